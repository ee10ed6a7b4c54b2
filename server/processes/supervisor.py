"""Every process that speaks HTTP: started, watched, and started again when it died."""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from itertools import chain, repeat
from multiprocessing.process import BaseProcess
from typing import Any

from ..config.schema import Config
from ..host.backoff import Backoff
from ..host.watch import interval
from ..tenants.frontend import State
from . import dispatcher, handoff, spawn
from . import http_process as process
from .affinity import Shares
from .heartbeat import INTERVAL, Pulse, observe
from .http_process import Outfit
from .proxy import Forwarded, answer
from .remote_frontend import RemoteFrontend
from .routing import SHARED, UNAUTHENTICATED
from .rpc import Channel

log = logging.getLogger("greenlane.processes")

PARTING = 5.0
"""Seconds a process may take to end when it is told to: more than `body.LAST`, which it gives those who read no answers."""
_LONGEST_PAUSE = 10.0
"""Seconds between two tries to start something for which there may be no memory."""


class Front:
    """One process: what it is called, how it is started, and how it is spoken to."""

    def __init__(self, name: str, desk: RemoteFrontend | None, listeners: Sequence[socket.socket] = ()) -> None:
        self.name = name
        self.desk = desk
        self.listeners = list(listeners)
        self.channel = Channel({})
        self.process: BaseProcess | None = None
        self.door: socket.socket | None = None
        self.restarts = Backoff()
        self.pulse = Pulse()

    def __repr__(self) -> str:
        return f"<Front {self.name}, {self.process!r}>"

    def shut(self) -> None:
        """Nobody is to be heard from this process any more, and nobody sent there."""
        self.channel.close()
        if self.door:
            self.door.close()
            self.door = None


class House:
    """All processes but this one. Belongs to the event loop.

    `application` answers what the fronts forward; `reopened` is awaited with a tenant's name, and what frees its old link,
    when its process has ended and its link is another, before a process has the other end of that.
    """

    def __init__(
        self,
        config: Config,
        desks: Mapping[str, RemoteFrontend],
        listeners: Sequence[socket.socket],
        own: Mapping[str, Sequence[socket.socket]],
        application: Any,
        reopened: Callable[[str, Callable[[], None]], Awaitable[None]],
    ) -> None:
        self._config = config
        self._listeners = list(listeners)
        self._own = list(chain(*own.values()))
        self._application = application
        self._reopened = reopened
        self._fronts = {name: Front(name, desk, own.get(name, ())) for name, desk in desks.items()}
        self._fronts |= {name: Front(name, None) for name in (SHARED, UNAUTHENTICATED)}
        self._dispatcher: BaseProcess | None = None
        self._control: socket.socket | None = None
        self._dispatcher_restarts = Backoff()
        self._dispatcher_pulse = Pulse()
        self._state: State = "starting"
        self._cores: frozenset[int] = frozenset()
        self._watching: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    def __repr__(self) -> str:
        return f"<House {self._state}, {', '.join(self._fronts)}>"

    async def start(self) -> None:
        """Start every process. They answer from now on, what they can. After an error there may be some to `kill`."""
        await asyncio.gather(self._start_dispatcher(), *map(self._start, self._fronts.values()))
        self._watch(self._mind_dispatcher())
        self._watch(self._beat())
        for front in self._fronts.values():
            self._watch(self._mind(front))

    def become(self, state: State) -> None:
        """Tell everyone the server's state."""
        self._state = state
        for front in self._fronts.values():
            if front.desk:
                front.desk.become(state)
            else:
                front.channel.tell("become", state)

    def place(self, shares: Shares) -> None:
        """Have these processes, and those that take their places, run on these cores."""
        self._cores = shares.others
        for front in self._fronts.values():
            if front.desk:
                front.desk.assign(shares.fronts[front.name])
            else:
                self._pin(front.process)
        self._pin(self._dispatcher)

    async def close(self) -> None:
        """Let every process finish what it is about, and end. Nobody is let in from now on."""
        self._closing.set()
        if self._control:
            with suppress(OSError):  # The dispatcher has just died, and this end is closed already.
                self._control.shutdown(socket.SHUT_RDWR)
        for listener in (*self._listeners, *self._own):
            listener.close()
        if self._dispatcher:  # Before the others: what it has passed on is to be answered.
            await asyncio.to_thread(spawn.end, self._dispatcher, PARTING)
        for front in self._fronts.values():
            front.channel.tell("leave")
        if self._watching:
            await asyncio.wait(self._watching, timeout=PARTING)
        self.kill()

    def kill(self) -> None:
        """End every process that is left, at once."""
        self._closing.set()
        for task in self._watching:
            task.cancel()
        for front in self._fronts.values():
            front.shut()
        if self._control:
            self._control.close()
        for child in (self._dispatcher, *(front.process for front in self._fronts.values())):
            if child:
                spawn.kill(child)
                child.join()

    def slay(self) -> None:
        """Kill every process that is left, without a word. Any thread."""
        for child in (self._dispatcher, *(front.process for front in self._fronts.values())):
            if child:
                spawn.kill(child)
        spawn.Origin.kill()

    async def _start(self, front: Front) -> None:
        front.door, theirs = handoff.pair()
        ours, other = socket.socketpair()
        link = spawn.inherited(front.desk.descriptors) if front.desk else None
        outfit = Outfit(front.name, self._config, theirs, other, link, front.listeners)
        front.pulse = Pulse()
        handlers: dict[str, Callable[..., Any]] = {"forward": self._forward, "turns": front.pulse.answered}
        front.channel = Channel({**handlers, **(front.desk.handlers() if front.desk else {})})
        front.restarts.started(time.monotonic())
        try:
            front.process = await spawn.start(process.main, outfit)
        finally:
            theirs.close()
            other.close()
        await front.channel.open(ours)
        if front.desk:
            await front.desk.connect(front.channel)
        else:
            self._pin(front.process)
            front.channel.tell("become", self._state)
        self._let_in(front)  # Now that it knows its models: else whoever comes first is told that there are none.
        if self._closing.is_set():
            front.channel.tell("leave")

    async def _start_dispatcher(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._dispatcher_pulse = Pulse()
        self._dispatcher_restarts.started(time.monotonic())
        try:
            self._dispatcher = await spawn.start(dispatcher.main, self._config, self._listeners, theirs)
        finally:
            theirs.close()
        self._pin(self._dispatcher)
        for front in self._fronts.values():
            self._let_in(front)

    def _pin(self, process: BaseProcess | None) -> None:
        """Have a process that is no tenant's run where those do, once that is known and there is such a process."""
        if process and self._cores:
            spawn.pin(process, self._cores)

    def _let_in(self, front: Front) -> None:
        """Tell the dispatcher the way to this process; one that is gone is followed by one that is told everything."""
        if self._control and front.door:
            with suppress(OSError):
                socket.send_fds(self._control, [front.name.encode()], [front.door.fileno()])

    async def _mind(self, front: Front) -> None:
        """Whenever this process ends though nobody told it to, have another one do its work."""
        while True:
            await front.channel.closed.wait()
            if self._closing.is_set():
                return
            front.shut()
            await self._buried(front.process, _http(front), front.restarts)
            if front.desk:
                # Before another process may write where the worker still reads, which frees the old link.
                await self._reopened(front.name, front.desk.renew().close)
            await self._insist(lambda: self._start(front))

    async def _beat(self) -> None:
        """Tell every process that this one still turns: one that is not told says that the server is not ready.

        They say the same of themselves; one that does not for too long is killed, and followed by another as any that ends.
        """
        origin = spawn.Origin()
        while not self._closing.is_set() and self._config.server.watchdog:
            now = time.monotonic()
            for front in self._fronts.values():
                front.channel.tell("beat")
                if front.process and not front.channel.closed.is_set():
                    self._look(_http(front), front.process, front.pulse, now)
            origin.look(now)
            if self._dispatcher:
                if self._dispatcher_pulse.due:
                    self._ask_dispatcher()
                self._look("the dispatcher", self._dispatcher, self._dispatcher_pulse, now)
            await self._rest(min(INTERVAL, interval(self._config.server.watchdog)))

    def _look(self, what: str, process: BaseProcess, pulse: Pulse, now: float) -> None:
        """Kill this process, which was asked just now, if it has not answered for too long."""
        if pulse.due:
            pulse.asked(now)
        elif process.pid and pulse.hangs(now, activity := observe(process.pid)):
            log.error("%s has not answered for %.1f s: %s; killing it", what, pulse.silent, activity)
            spawn.kill(process)

    def _ask_dispatcher(self) -> None:
        if self._control:
            with suppress(OSError):
                self._control.send(dispatcher.ASK)

    async def _mind_dispatcher(self) -> None:
        while not self._closing.is_set():
            assert self._control
            with suppress(OSError):
                while await asyncio.get_running_loop().sock_recv(self._control, len(dispatcher.ANSWER)):
                    self._dispatcher_pulse.answered()
            if self._closing.is_set():
                return
            self._control.close()
            await self._buried(self._dispatcher, "the dispatcher", self._dispatcher_restarts)
            await self._insist(self._start_dispatcher)

    async def _buried(self, process: BaseProcess | None, what: str, restarts: Backoff) -> None:
        """Wait until it has ended, and then for as long as it should be left alone."""
        assert process
        await asyncio.to_thread(spawn.end, process, PARTING)
        pause = restarts.pause(time.monotonic())
        log.error("%s ended (%s); starting another%s", what, spawn.manner(process), f" in {pause:g} s" if pause else "")
        await self._rest(pause)

    async def _insist(self, start: Callable[[], Awaitable[None]]) -> None:
        """Start something, as often as it takes: first again at once, for what it was to be forked off may just have ended."""
        for pause in chain((0.0,), repeat(_LONGEST_PAUSE)):
            if self._closing.is_set():
                return
            try:
                await start()
                return
            except (OSError, EOFError) as error:  # There may be no memory, descriptors or processes to be had.
                when = f"in {pause:g} s" if pause else "at once"
                log.error("no process can be started now (%s); trying again %s", error, when)
                await self._rest(pause)

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    def _watch(self, minding: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(minding)
        self._watching.add(task)
        task.add_done_callback(_tell)

    async def _forward(self, asked: Forwarded) -> Any:
        return await answer(self._application, asked)


def _http(front: Front) -> str:
    return f"the HTTP process of {front.name}"


def _tell(task: "asyncio.Task[None]") -> None:
    """Nothing that goes wrong here is to go unnoticed."""
    if not task.cancelled() and (error := task.exception()):
        log.critical("a process is no longer watched: %s", error, exc_info=error)
