"""What is done to the server during a soak, at random: repartitions, loads, reloads, kills; and samples of its processes."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from greenlane.load import wire

from .soak_clients import MODELS
from .watched_server import ServerProcess


class Event(NamedTuple):
    """Something that was done, to which tenant ("" for all), when, and the status that it was answered, 200 for a signal."""

    name: str
    tenant: str
    began: float
    ended: float
    status: int


class Sample(NamedTuple):
    """Of one process at one time: KiB of memory of its own, descriptors, and threads."""

    at: float
    anonymous: int
    descriptors: int
    threads: int = 0


class Late(NamedTuple):
    """A thread of the clients' process that slept woke up at this time, so many seconds late."""

    at: float
    seconds: float


@dataclass(slots=True)
class Events:
    """A thread that does something every `every` seconds, on average, and one kill every `kill_every`."""

    server: ServerProcess
    config: Path
    texts: Sequence[str]
    plans: Sequence[dict[str, int]]
    killed: Sequence[str]
    """Processes that are killed, in turn: a tenant's name for its HTTP process, "dev" and the name for its device process."""
    every: float
    kill_every: float
    chance: random.Random
    stopped: threading.Event
    done: list[Event] = field(default_factory=list)
    _kills: int = 0
    _killed: float = 0.0

    def run(self) -> None:
        """Until stopped."""
        what: list[tuple[str, Callable[[], tuple[str, int]]]] = [
            ("repartition", self._repartition),
            ("repartition", self._repartition),
            ("load of a model", self._load),
            ("reload (POST)", self._reload),
            ("reload (SIGHUP)", self._hang_up),
            ("reload, refused", self._refused),
        ]
        next_kill = time.monotonic() + self.kill_every
        while not self.stopped.wait(self.chance.expovariate(1 / self.every)):
            name, act = self.chance.choice(what)
            if time.monotonic() > next_kill:
                next_kill += self.kill_every
                whose = self.killed[self._kills % len(self.killed)]
                name, act = "kill of dev" if whose.startswith("dev ") else "kill", partial(self._kill, whose)
            began = time.monotonic()
            try:
                tenant, status = act()
            except (OSError, HTTPException):
                tenant, status = "", 0
            self.done.append(Event(name, tenant, self._killed if name.startswith("kill") else began, time.monotonic(), status))

    def _ask(self, method: str, path: str, body: object = None, tenant: str = "") -> int:
        return ask(self.server.port, method, path, body, tenant)[0]

    def _repartition(self) -> tuple[str, int]:
        return "", self._ask("PUT", "/admin/partitions", self.chance.choice(self.plans))

    def _load(self) -> tuple[str, int]:
        tenant, name = self.chance.choice(list(self.plans[0])), self.chance.choice(list(MODELS))
        return tenant, self._ask("POST", f"/v2/repository/models/{name}/load", {}, tenant)

    def _reload(self) -> tuple[str, int]:
        self.config.write_text(self.chance.choice(self.texts))
        return "", self._ask("POST", "/admin/reload")

    def _hang_up(self) -> tuple[str, int]:
        self.config.write_text(self.chance.choice(self.texts))
        os.kill(self.server.popen.pid, signal.SIGHUP)
        return "", 200

    def _refused(self) -> tuple[str, int]:
        self.config.write_text("[tenants.acme]\nqueue = 'no number'\n")
        try:
            return "", self._ask("POST", "/admin/reload")
        finally:
            self.config.write_text(self.texts[0])

    def _kill(self, whose: str) -> tuple[str, int]:
        tenant, self._killed = whose.removeprefix("dev "), time.monotonic()
        for one in self.server.family():
            if one.name == f"greenlane {whose}"[:15] and one.state != "Z":
                self._killed = time.monotonic()
                os.kill(one.pid, signal.SIGKILL)
                self._kills += 1
                return tenant, 200
        return tenant, 0


def ask(port: int, method: str, path: str, body: object = None, tenant: str = "") -> tuple[int, Any]:
    """Status and document of one request. Raises OSError and HTTPException."""
    headers = {"X-Tenant": tenant} if tenant else {}
    answer = wire.ask(port, method, path, headers, b"" if body is None else json.dumps(body).encode(), timeout=60)
    return answer.status, json.loads(answer.body or b"null")


def watch(server: ServerProcess, stopped: threading.Event, samples: dict[tuple[str, int], list[Sample]]) -> None:
    """Sample every process once a second until stopped, by its name and number."""
    while not stopped.wait(1.0):
        for one in server.family():
            with suppress(OSError, KeyError, ValueError):
                fields = [line.split() for line in Path(f"/proc/{one.pid}/status").read_text().splitlines()]
                found = {words[0]: int(words[1]) for words in fields if words[0] in ("RssAnon:", "Threads:")}
                sample = Sample(time.monotonic(), found["RssAnon:"], len(os.listdir(f"/proc/{one.pid}/fd")), found["Threads:"])
                samples.setdefault((one.name, one.pid), []).append(sample)


def oversleep(stopped: threading.Event, late: list[Late], nap: float = 0.005) -> None:
    """Note how late this process itself is, where that is more than `nap` seconds: all its clients waited meanwhile."""
    woke = time.monotonic()
    while not stopped.wait(nap):
        before, woke = woke, time.monotonic()
        if woke - before > 2 * nap:
            late.append(Late(woke, woke - before - nap))
