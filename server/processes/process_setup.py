"""What every process of the house does first."""

import logging
import resource
import signal
from contextlib import suppress
from pathlib import Path

from ..config.schema import Config
from ..host import logs
from .routing import SHARED, UNAUTHENTICATED

TENANTS, NOBODYS = 500, 800
"""What is added to a process's part of the memory, in thousandths of all there is, when the kernel chooses which to kill."""

_COMMAND = Path("/proc/self/comm")
_OOM_SCORE = Path("/proc/self/oom_score_adj")


class Signature(logging.Filter):
    """Puts whose process this is on every record that does not name a tenant."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "tenant", "-") == "-":
            record.tenant = self._name
        return True


def begin(name: str, config: Config) -> None:
    """Leave signals to the process that started this one, sign what is logged, and be allowed many connections.

    Where memory runs out, this process is killed before the device's, with which all tenants would be gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    allow_connections()
    go_first(name)
    with suppress(OSError):
        _COMMAND.write_text(f"greenlane {name}")  # The kernel keeps 15 bytes of it.
    level = config.server.log_level
    logs.configure(config.server.log_format, level if level == "error" else "warning")
    for logger in ("greenlane", "uvicorn"):
        for handler in logging.getLogger(logger).handlers:
            handler.addFilter(Signature(name))


def go_first(name: str) -> None:
    """Have the kernel kill this process before others where memory runs out, and what is no tenant's before what is."""
    with suppress(OSError):
        _OOM_SCORE.write_text(str(NOBODYS if name in (SHARED, UNAUTHENTICATED) else TENANTS))


def allow_connections() -> None:
    """Have as many descriptors as the system lets this process have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # Some systems promise more than they give.
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
