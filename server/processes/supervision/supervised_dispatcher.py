"""The dispatcher as the supervisor has it: started, sent keys and sockets, asked for heartbeats, and replaced when it ends."""

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess

import msgspec

from ...host.backoff import Backoff
from ..channels import handoff
from ..children import spawn
from ..children.heartbeat import Heartbeat
from ..dispatching import dispatcher, refused
from .restarts import EXIT_TIMEOUT, Restarts
from .supervised import Current, SupervisedProcess, kill_if_hung

log = logging.getLogger("greenlane.processes")

MOST_FAILURES = 2
"""Attempts to start a process in a row that may fail before its connections are refused, which wait until then."""
LABEL = "the dispatcher"
"""Its name in the log."""


class SupervisedDispatcher:
    """Belongs to the event loop. It accepts connections on `listeners`, for the HTTP processes in `processes`, by name.

    `counts` is where connections that it refused are counted, by the reason.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        processes: Mapping[str, SupervisedProcess],
        current: Current,
        restarts: Restarts,
        counts: MutableMapping[str, int] | None = None,
    ) -> None:
        self.process: BaseProcess | None = None
        self._listeners = list(listeners)
        self._processes = processes
        self._current = current
        self._restarts = restarts
        self._refused: MutableMapping[str, int] = {} if counts is None else counts
        self._control: socket.socket | None = None
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        """What its socket has no room for yet, as while it begins, with descriptors that are ours."""
        self._reconfigured = asyncio.Event()
        self._backoff = Backoff()
        self._heartbeat = Heartbeat()

    async def start(self) -> None:
        self.disconnect()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._heartbeat = Heartbeat()
        self._backoff.started(time.monotonic())
        try:
            config, server = self._current.config, self._current.config.server
            arguments = dispatcher.keys_of(config), server.log_format, server.log_level, self._listeners, theirs
            self.process = await spawn.start(dispatcher.main, *arguments)
        finally:
            theirs.close()
        if config is self._current.config:
            self._reconfigured.set()
        else:  # It has changed meanwhile.
            self._send_keys()
        self.restrict()
        for each in self._processes.values():
            self.announce(each)

    async def keep(self) -> None:
        """Replace it whenever it ends, until the server closes."""
        while not self._restarts.closing.is_set():
            assert self._control
            with suppress(OSError):
                while message := await asyncio.get_running_loop().sock_recv(self._control, dispatcher.MAX_NAME):
                    self._on_message(message)
            if self._restarts.closing.is_set():
                return
            self.disconnect()
            await self._restarts.wait_for_end(self.process, LABEL, self._backoff)
            await self._restarts.retry(self.start)

    def announce(self, each: SupervisedProcess) -> None:
        """Send it the sockets over which this process takes connections. A new dispatcher is sent those of all processes."""
        if each.failures >= MOST_FAILURES:
            self.refuse(each)
        if each.handoff and each.takes_connections:
            self._send(each.name.encode(), [end.fileno() for end in each.handoff])

    def refuse(self, each: SupervisedProcess) -> None:
        """This process cannot be started: have the dispatcher refuse its connections until it is announced."""
        self._send(dispatcher.AWAY + each.name.encode())

    def withdraw(self, each: SupervisedProcess) -> None:
        """Close the sockets to this process, which has ended, and have the dispatcher hand what it did not take to the next."""
        each.disconnect()
        self._send(dispatcher.WITHDRAWN + each.name.encode())

    async def reconfigure(self) -> None:
        """Have it use the keys of the current configuration, and return when it does."""
        self._send_keys()
        with suppress(TimeoutError):  # It hangs, and is killed soon.
            await asyncio.wait_for(self._reconfigured.wait(), EXIT_TIMEOUT)

    def restrict(self) -> None:
        """Restrict it to the cores of processes without a tenant, once those are known."""
        if self.process:
            self._current.restrict(self.process)

    def check_heartbeat(self, now: float) -> None:
        """Send it a heartbeat, and kill it if it has not answered one for too long; it is then replaced."""
        if self.process:
            if self._heartbeat.answered:
                self._send(dispatcher.HEARTBEAT)
            kill_if_hung(LABEL, self.process, self._heartbeat, now)

    async def close(self) -> None:
        """Have it end, and wait until it has: connections that it has handed over are still to be answered."""
        if self._control:
            with suppress(OSError):  # It has just died, and this socket is closed already.
                self._control.shutdown(socket.SHUT_RDWR)
        for listener in self._listeners:
            listener.close()
        if self.process:
            await asyncio.to_thread(spawn.join, self.process, EXIT_TIMEOUT)

    def disconnect(self) -> None:
        """Close the socket to it, and forget what it was not sent."""
        self._forget_unsent()
        if self._control:
            self._control.close()

    def _send_keys(self) -> None:
        """Send it the keys; one that has ended is replaced by one that has them."""
        self._reconfigured.clear()
        file = handoff.memory_file(msgspec.json.encode(dispatcher.keys_of(self._current.config)))
        try:
            if not self._send(dispatcher.RECONFIGURE, [file]):
                self._reconfigured.set()
        finally:
            os.close(file)

    def _send(self, message: bytes, descriptors: Sequence[int] = ()) -> bool:
        """Send it after all else, now or once there is room; the caller may close the descriptors. False if it has ended."""
        if self._control is None:
            return False
        if not self._unsent:
            try:
                socket.send_fds(self._control, [message], descriptors)
                return True
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self._control.fileno(), self._send_more)
            except OSError:
                return False
        self._unsent.append((message, [os.dup(each) for each in descriptors]))
        return True

    def _send_more(self) -> None:
        """There is room, or it has ended."""
        assert self._control
        with suppress(OSError):
            while self._unsent:
                message, descriptors = self._unsent[0]
                try:
                    socket.send_fds(self._control, [message], descriptors)
                except BlockingIOError:
                    return
                self._drop_first()
        self._forget_unsent()

    def _forget_unsent(self) -> None:
        if self._control and self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_writer(self._control.fileno())
        while self._unsent:
            self._drop_first()

    def _drop_first(self) -> None:
        for descriptor in self._unsent.popleft()[1]:
            os.close(descriptor)

    def _on_message(self, message: bytes) -> None:
        if message == dispatcher.HEARTBEAT_ANSWER:
            self._heartbeat.on_answer()
        elif message == dispatcher.RECONFIGURED:
            self._reconfigured.set()
        elif message.startswith(refused.REFUSED):
            for reason, count in msgspec.json.decode(message[1:], type=dict[str, int]).items():
                self._refused[reason] = self._refused.get(reason, 0) + count
        elif (each := self._processes.get(message.decode(errors="replace"))) and each.process:
            log.error("%s sent the dispatcher a malformed handoff; killing it", each.label)
            spawn.kill(each.process)
