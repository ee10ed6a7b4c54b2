"""From a connection to one inference and back, on bytes: HTTP/1.1, its limits, and its bodies. No framework, no device."""
