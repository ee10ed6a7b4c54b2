"""The processes that the supervisor starts and watches: what it knows of each."""

import socket
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from ..config.schema import Config
from ..host.backoff import Backoff
from ..link.occupancy import LEAD
from ..link.ring import Descriptors
from .descriptors import DescriptorSender
from .handoff import Ends
from .heartbeat import Heartbeat, StoppedTime, observe
from .http_process import ProcessArguments
from .remote_frontend import RemoteFrontend
from .remote_runtime import RemoteRuntime
from .routing import SHARED, UNAUTHENTICATED, process_name
from .rpc import Channel


class HostedRuntime(NamedTuple):
    """The device side of a tenant that is in the tenant's own process.

    `target` is the function that such a process runs; `make_arguments` returns its argument, given that of an HTTP process.
    """

    runtime: RemoteRuntime
    target: Callable[[Any], None]
    make_arguments: Callable[[ProcessArguments], Any]


class SupervisedProcess:
    """One HTTP process: its name, the process, its channel, and the socket over which it is handed connections.

    `frontend` is the tenant's; None for the shared and the unauthenticated HTTP process, and for a helper. `listeners` are the
    sockets of a tenant's own port. `hosted` is the tenant's device side if that is in the same process. `helpers` are those of
    a lead, and `number` says which of the tenant's processes it is.
    """

    def __init__(
        self,
        name: str,
        frontend: RemoteFrontend | None,
        listeners: Sequence[socket.socket] = (),
        hosted: HostedRuntime | None = None,
        number: int = LEAD,
    ) -> None:
        self.name = process_name(name, number)
        self.tenant = name
        self.number = number
        self.helpers: list[SupervisedProcess] = []
        self.occupancy: int | None = None
        """The descriptor of the page that the processes of a tenant with several share."""
        self.frontend = frontend
        self.hosted = hosted
        self.listeners = list(listeners)
        self.channel = Channel(self.label, {})
        self.process: BaseProcess | None = None
        self.handoff: Ends | None = None
        self.takes_connections = False
        """Whether the dispatcher may hand it connections: not before it has its models."""
        self.retired = False
        """Whether its tenant has gone, so that it is not started again."""
        self.descriptors: DescriptorSender | None = None
        self.backoff = Backoff()
        self.heartbeat = Heartbeat()

    def __repr__(self) -> str:
        return f"<SupervisedProcess {self.name}, {self.process!r}>"

    @property
    def label(self) -> str:
        """Its name in the log."""
        if self.name in (SHARED, UNAUTHENTICATED):
            return f"the {self.name.strip('()')} HTTP process"
        return f"the HTTP process of {self.name}"

    def disconnect(self) -> None:
        """Close the channel, and the sockets for connections and descriptors."""
        self.takes_connections = False
        self.channel.close()
        if self.handoff:
            self.handoff.close()
            self.handoff = None
        if self.descriptors:
            self.descriptors.close()
            self.descriptors = None


class SupervisedDevice:
    """One device process: its name, that of the device in the configuration, and the device side that it has.

    `target` is the function that the process runs; `make_arguments` returns its argument: for the configuration, the process's
    ends of the channel and of the socket for descriptors, and as `spawn.inherited` returns them the links of its tenants and
    the pages of all that lend.
    """

    def __init__(
        self,
        name: str,
        runtime: RemoteRuntime,
        target: Callable[[Any], None],
        make_arguments: Callable[[Config, socket.socket, socket.socket, dict[str, Descriptors], dict[str, int]], Any],
    ) -> None:
        self.name = name
        self.runtime = runtime
        self.target = target
        self.make_arguments = make_arguments
        self.channel = Channel(self.label, {})
        self.process: BaseProcess | None = None
        self.descriptors: DescriptorSender | None = None
        self.backoff = Backoff()
        self._stopped = StoppedTime()

    def __repr__(self) -> str:
        return f"<SupervisedDevice {self.name}, {self.process!r}>"

    @property
    def label(self) -> str:
        """Its name in the log."""
        return self.runtime.label

    def stopped_for(self, now: float) -> float:
        """For how many seconds the process has been stopped, by SIGSTOP or a debugger; 0 if it runs. Call it regularly."""
        return self._stopped.after(now, observe(self.process.pid)) if self.process and self.process.pid else 0.0

    def disconnect(self) -> None:
        """Close the channel and the socket for descriptors."""
        self.channel.close()
        if self.descriptors:
            self.descriptors.close()
            self.descriptors = None
