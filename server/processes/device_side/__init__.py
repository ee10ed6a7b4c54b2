"""A device process, and the messages that a runtime answers."""
