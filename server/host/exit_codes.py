"""Exit statuses that mean something to what supervises the process."""

NEEDS_RESTART = 70
"""Only a new process can go on (EX_SOFTWARE of sysexits.h): the device was lost, or this one stopped turning."""

GAVE_UP = 1
"""Told to end a second time, with accepted requests that were not answered yet."""
