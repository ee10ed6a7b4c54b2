"""Exit statuses with a meaning for systemd, a container runtime, or what else restarts the server."""

NEEDS_RESTART = 70
"""Only a new process can go on (EX_SOFTWARE of sysexits.h): the device was lost, or the event loop hung."""

GAVE_UP = 1
"""A second signal ended the process before all accepted requests were answered."""
