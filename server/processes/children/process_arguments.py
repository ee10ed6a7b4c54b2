"""The arguments of a new HTTP process."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...config.schema import Config
from ...link.occupancy import LEAD
from ...link.ring import Descriptors


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
