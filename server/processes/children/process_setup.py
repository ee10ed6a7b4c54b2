"""What an HTTP process is started with, and its first steps, which are the dispatcher's as well."""

import logging
import resource
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config.schema import Config
from ...host import logs
from ...host.confinement import confine
from ...link.occupancy import LEAD
from ...link.ring import Descriptors
from ..channels.routing import SHARED, UNAUTHENTICATED

OOM_TENANT, OOM_OTHER = 500, 800
"""Added, in thousandths of all memory, to a process's share of it when the kernel chooses which process to kill: that of a
tenant's HTTP process, and that of the shared and the unauthenticated one.
"""

_COMMAND = Path("/proc/self/comm")
_OOM_SCORE = Path("/proc/self/oom_score_adj")


class ProcessName(logging.Filter):
    """Puts the name of this process, which is the tenant's, on every record that does not name a tenant."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "tenant", "-") == "-":
            record.tenant = self._name
        return True


def set_up(
    name: str, log_format: str, log_level: str, device: bool = False, number: int = LEAD, audit: Path | None = None
) -> None:
    """Ignore signals, which are for the supervisor; set process name, logging, descriptor limit and OOM score. Confine it.

    `number` says which of the tenant's HTTP processes it is; that of a helper is part of its process name.

    A `device` process logs what the level allows, as the supervisor does, and the others warnings and errors alone. Many
    tenants depend on it, so the kernel is not asked to kill it before others. It parses nothing of clients, starts children
    and opens the device, so it is not confined.
    """
    if not device:
        confine()  # Before there is another thread, which would not be.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_descriptor_limit()
    with suppress(OSError):
        which = "" if number == LEAD else f".{number}"
        _COMMAND.write_text(f"greenlane{which} {name}")  # The kernel keeps 15 bytes of it.
    logs.configure(log_format, log_level if device or log_level == "error" else "warning", audit)
    if device:
        return
    set_oom_score(name)
    for logger in ("greenlane", "uvicorn"):
        for handler in logging.getLogger(logger).handlers:
            handler.addFilter(ProcessName(name))


def set_oom_score(name: str) -> None:
    """Where memory runs out, have the kernel kill this process before the device process, with which all tenants would go.

    The shared and the unauthenticated HTTP process go before those of tenants.
    """
    with suppress(OSError):
        _OOM_SCORE.write_text(str(OOM_OTHER if name in (SHARED, UNAUTHENTICATED) else OOM_TENANT))


def raise_descriptor_limit() -> None:
    """Raise the limit of open descriptors to the most that the system lets this process have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # Some systems promise more than they give.
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass(frozen=True, slots=True)
class ProcessArguments:
    """What the supervisor starts an HTTP process with. `config` is the whole file, as a reload may change any table.

    `name` is the tenant's, or SHARED or UNAUTHENTICATED; `handoff` the socket over which connections come and go back;
    `channel` that of the messages to and from the supervisor, and `descriptors` that of descriptors from it; `link` the
    tenant's link, None if its device side is in the same process, and `listeners` the sockets of its own port, on which
    it accepts connections at once unless its tenant is `arriving`: then after `ToHttp.listen`. `pages` are the descriptors of
    tenants' activity pages (`link.activity`): its own, and where its device side is here those of all others like it.

    A tenant with several HTTP processes has an `occupancy`, the descriptor of the page that they share. Those with a `number`
    other than LEAD are helpers: their link is to the lead, as is the socket `to_lead` for cancellations.
    """

    name: str
    config: Config
    handoff: socket.socket
    channel: socket.socket
    descriptors: socket.socket
    link: Descriptors | None
    listeners: list[socket.socket]
    pages: Mapping[str, int] = field(default_factory=dict)
    number: int = LEAD
    occupancy: Any = None
    to_lead: socket.socket | None = None
    arriving: bool = False
