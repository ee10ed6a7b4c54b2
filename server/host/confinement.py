"""Keeps a process that parses what clients sent from the memory and the signals of the user's other processes."""

import ctypes
import os

_SET_NO_NEW_PRIVS = 38
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
"""System calls of Landlock, which have these numbers on every architecture; libc has no functions for them."""
_VERSION = 1
"""Flag of the first: return the version alone."""
_SCOPED = 6
"""The first version that knows scopes: Linux 6.12."""
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


def confine() -> bool:
    """Confine the calling thread and all that it starts, for good: no program that it runs gets more rights than it has.

    With Linux 6.12 and newer they also reach no process that was not started by them: not by ptrace and what asks for the same
    permission (its memory, environment and descriptors in /proc), and not by signals. Returns whether that is so; it is not
    where Landlock is not there, or not permitted. Files, ports and what was inherited stay as they are.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION)) < _SCOPED:
        return False
    rules = _Ruleset(scoped=_ABSTRACT_SOCKETS | _SIGNALS)
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(ctypes.sizeof(rules)), ctypes.c_uint32(0))
    if ruleset < 0:
        return False
    try:
        return bool(libc.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)) == 0)
    finally:
        os.close(ruleset)
