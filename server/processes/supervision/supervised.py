"""The processes that the supervisor starts and watches: what it knows of each, and what it does alike for all."""

import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from partitions import PartitionError

from ...config.changes import loaded_again
from ...config.schema import Config
from ...config.tables import ConfigError
from ...errors import RequestError
from ...host.backoff import Backoff
from ...link.occupancy import LEAD
from ...tenants.frontend import State
from ..channels import descriptors
from ..channels.calls import proxy
from ..channels.descriptors import DescriptorSender
from ..channels.handoff import Ends
from ..channels.http_protocols import Logging
from ..channels.routing import SHARED, UNAUTHENTICATED, process_name
from ..channels.rpc import Channel, Handlers
from ..children import spawn
from ..children.heartbeat import Heartbeat, StoppedTime, observe
from ..children.process_setup import ProcessArguments
from ..remote.remote_frontend import RemoteFrontend
from ..remote.remote_runtime import RemoteRuntime
from .mps_group import MpsGroup

log = logging.getLogger("greenlane.processes")


@dataclass(slots=True)
class Current:
    """What all processes are to have now, and those that start later: the supervisor changes it while they run.

    `log_level` is "" as long as it is the configuration's; `cores` are those of processes without a tenant, none if any may be
    used.
    """

    config: Config
    state: State = "starting"
    progress: str = ""
    log_level: str = ""
    cores: frozenset[int] = frozenset()

    def restrict(self, process: BaseProcess) -> None:
        """Restrict a process without a tenant to the cores of such processes, once those are known."""
        if self.cores:
            spawn.set_affinity(process, self.cores)

    def send_log_level(self, channel: Channel) -> None:
        """Have a process that was just started log as the others do, if that was changed."""
        if self.log_level:
            proxy(Logging, channel).set_log_level(self.log_level)


class HostedRuntime(NamedTuple):
    """The device side of a tenant that is in the tenant's own process.

    `target` is the function that such a process runs; `make_arguments` returns its argument, given that of an HTTP process.
    """

    runtime: RemoteRuntime
    target: Callable[[Any], None]
    make_arguments: Callable[[ProcessArguments], Any]


class Supervised:
    """A process that is started again when it ends: its name, the process, its channel, and the socket for descriptors."""

    def __init__(self, name: str, label: str) -> None:
        self.name = name
        self.label = label
        """Its name in the log."""
        self.channel = Channel(label, {})
        self.process: BaseProcess | None = None
        self.descriptors: DescriptorSender | None = None
        self.backoff = Backoff()

    async def start(
        self, target: Callable[[Any], None], make_argument: Callable[[socket.socket, socket.socket], Any], handlers: Handlers
    ) -> None:
        """Start the process, which runs `target`, with a new channel, and a new socket for descriptors; its ends of these are
        given to `make_argument`. Raises OSError or EOFError.
        """
        ours, theirs = socket.socketpair()
        self.descriptors, their_descriptors = descriptors.pair()
        self.channel = Channel(self.label, handlers)
        self.backoff.started(time.monotonic())
        try:
            self.process = await spawn.start(target, make_argument(theirs, their_descriptors))
        except BaseException:
            ours.close()
            raise
        finally:
            their_descriptors.close()
            theirs.close()
        await self.channel.open(ours)

    def kill(self) -> None:
        """Kill the process, if there is one. Its channel closes then, so another one is started."""
        if self.process:
            spawn.kill(self.process)

    def disconnect(self) -> None:
        """Close the channel and the socket for descriptors."""
        self.channel.close()
        if self.descriptors:
            self.descriptors.close()
            self.descriptors = None


class SupervisedProcess(Supervised):
    """One HTTP process, with the socket over which it is handed connections.

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
        own = process_name(name, number)
        super().__init__(own, _label(own))
        self.tenant = name
        self.number = number
        self.helpers: list[SupervisedProcess] = []
        self.occupancy: int | None = None
        """The descriptor of the page that the processes of a tenant with several share."""
        self.frontend = frontend
        self.hosted = hosted
        self.listeners = list(listeners)
        self.handoff: Ends | None = None
        self.takes_connections = False
        """Whether the dispatcher may hand it connections: not before it has its models."""
        self.failures = 0
        """How many attempts to start it have failed since it took connections."""
        self.retired = False
        """Whether its tenant has gone, so that it is not started again."""
        self.heartbeat = Heartbeat()

    def disconnect(self) -> None:
        """Close the channel, and the sockets for connections and descriptors."""
        self.takes_connections = False
        super().disconnect()
        if self.handoff:
            self.handoff.close()
            self.handoff = None


class SupervisedDevice(Supervised):
    """One device process, with its name, which is the device's if it has all of that, and the device side that it has.

    `target` is the function that the process runs; `make_arguments` returns its argument: for the configuration, the process's
    ends of the channel and of the socket for descriptors, as `spawn.inherited` returns them the links of its tenants, the
    variables of its environment, and as those the deposit that it has with others. `group` are the processes of the same
    device; None if it is the only one.
    """

    def __init__(
        self,
        name: str,
        runtime: RemoteRuntime,
        target: Callable[[Any], None],
        make_arguments: Callable[..., Any],
        group: MpsGroup | None = None,
    ) -> None:
        super().__init__(name, runtime.label)
        self.runtime = runtime
        self.target = target
        self.make_arguments = make_arguments
        self.group = group
        self.retired = False
        """Whether its tenant has gone, so that it is not started again."""
        self._stopped = StoppedTime()

    @property
    def device(self) -> str:
        """The name of the device in the configuration."""
        return self.group.device if self.group else self.name

    def stopped_for(self, now: float) -> float:
        """For how many seconds the process has been stopped, by SIGSTOP or a debugger; 0 if it runs. Call it regularly."""
        return self._stopped.after(now, observe(self.process.pid)) if self.process and self.process.pid else 0.0


async def connect(runtime: RemoteRuntime, each: Supervised) -> bool:
    """Have a runtime use this process. Where it replaces another that was serving, that is done again first; False, and it is
    killed, if that cannot be.
    """
    assert each.descriptors
    try:
        await runtime.connect(each.channel, each.descriptors)
    except (PartitionError, ConfigError, RequestError) as error:
        log.error("%s cannot be started again: %s", each.label, error)
        each.kill()
        return False
    return True


def kill_if_outdated(each: Supervised, started_with: Config, now: Config) -> None:
    """Kill a process with models that was started with one configuration, if models have other options in that of now."""
    if each.process and loaded_again(started_with, now):
        log.error("models have other options since %s was started; starting it again", each.label)
        each.kill()


def kill_if_hung(label: str, process: BaseProcess, heartbeat: Heartbeat, now: float, starting: bool = False) -> None:
    """Kill this process, which was just sent a heartbeat, if it has not answered for too long."""
    if heartbeat.answered:
        heartbeat.on_sent(now)
    elif process.pid and heartbeat.hangs(now, activity := observe(process.pid), starting) and activity.state not in "XZ":
        log.error("%s has not answered for %.1f s: %s; killing it", label, heartbeat.silent, activity)
        spawn.kill(process)


def _label(name: str) -> str:
    """The name of an HTTP process in the log."""
    return f"the {name.strip('()')} HTTP process" if name in (SHARED, UNAUTHENTICATED) else f"the HTTP process of {name}"
