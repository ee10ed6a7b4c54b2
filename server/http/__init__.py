"""From a connection to one inference and back: HTTP, the routes of the framework, and who asks. Knows no device."""
