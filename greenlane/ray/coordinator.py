"""Knows which servers there are and which shares are in force, and changes the shares of all of them.

There is one. Its replacement learns both from the servers' reports.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True, slots=True)
class Shares:
    """Granules by tenant that were set while serving; those of the configuration where `revision` is 0.

    A later change has a higher revision. `version`: of which configuration.
    """

    version: str
    revision: int = 0
    granules: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Listed:
    """A server that serves. `number`: its rank among the servers, which its replacement gets too. `key`: its admin key."""

    id: str
    number: int
    url: str
    key: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The servers that serve, by number. While it is not `complete` there may be more, which have not reported yet.

    `gone`: ids of servers that said that they stop.
    """

    servers: tuple[Listed, ...]
    complete: bool
    gone: frozenset[str] = frozenset()


log = logging.getLogger("greenlane.ray")

SILENT = 5.0
"""Seconds without a report after which a server is off the list."""
LEARNING = 3.0
"""Seconds after its start in which a coordinator may not know every server yet."""
CHECK_TIMEOUT = 10.0
CHANGE_TIMEOUT = 300.0
"""Seconds for one server's answers; a change makes every model ready on its new partition."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a call to all servers: an HTTP status, and JSON that says it for each of them."""

    status: int
    document: dict[str, Any]


class _Refused(Exception):
    """A server refused, or did not answer; the text says why."""


class Coordinator:
    """Belongs to the event loop. `version`: of the configuration; servers of another one, which are being replaced, are listed
    too, but have shares of their own. `clock` gives seconds.
    """

    def __init__(self, version: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._servers: dict[str, tuple[Listed, float]] = {}
        self._gone: set[str] = set()
        self._shares = Shares(version)
        self._changing = asyncio.Lock()

    async def shares(self) -> Shares:
        """Those in force."""
        return self._shares

    async def report(self, server: Listed, shares: Shares) -> Shares:
        """List this server, which has these shares. Returns those in force."""
        self._servers[server.id] = server, self._clock()
        self._gone.discard(server.id)
        if shares.version == self._shares.version and shares.revision > self._shares.revision:
            self._shares = shares
        # While all are being changed, some have new shares already, which may be taken back.
        return shares if self._changing.locked() else self._shares

    async def forget(self, id: str) -> None:
        """Take this server off the list."""
        self._servers.pop(id, None)
        self._gone.add(id)

    async def servers(self) -> Listing:
        """Those that have reported lately."""
        now = self._clock()
        self._servers = {id: (server, at) for id, (server, at) in self._servers.items() if now - at < SILENT}
        servers = sorted((server for server, _ in self._servers.values()), key=lambda server: (server.number, server.id))
        return Listing(tuple(servers), now - self._started > LEARNING, frozenset(self._gone))

    async def partitions(self) -> Outcome:
        """What each server answers to GET /admin/partitions."""
        found: dict[str, Any] = {}
        async with aiohttp.ClientSession() as http:
            for server in (await self.servers()).servers:
                try:
                    found[str(server.number)] = await _ask(http, server, "GET", seconds=CHECK_TIMEOUT)
                except _Refused as error:
                    found[str(server.number)] = {"error": str(error)}
        return Outcome(200, {"revision": self._shares.revision, "servers": found})

    async def repartition(self, counts: Mapping[str, int]) -> Outcome:
        """Give tenants these granules on every server, or leave all as they are.

        All are checked before the first one changes. If one refuses then, those that have changed are put back; the document
        says what each of them has. Servers that start later begin with these shares.
        """
        async with self._changing:
            listing = await self.servers()
            if not listing.servers or not listing.complete:
                return Outcome(503, {"error": "the servers are not ready or not known yet, so nothing has changed"})
            # A change that has begun is completed, even if its client disconnects.
            return await asyncio.shield(self._change(listing.servers, counts))

    async def _change(self, servers: Sequence[Listed], counts: Mapping[str, int]) -> Outcome:
        async with aiohttp.ClientSession() as http:
            before: dict[str, dict[str, int]] = {}
            refused: dict[str, str] = {}
            for server in servers:
                try:
                    before[server.id] = _checked(await _ask(http, server, "GET", seconds=CHECK_TIMEOUT), counts)
                except _Refused as error:
                    refused[str(server.number)] = str(error)
            if refused:
                left = {str(server.number): "unchanged" for server in servers}
                return Outcome(409, {"error": _all_of(refused), "state": "unchanged", "servers": left})
            return await self._change_checked(http, servers, counts, before)

    async def _change_checked(
        self,
        http: aiohttp.ClientSession,
        servers: Sequence[Listed],
        counts: Mapping[str, int],
        before: Mapping[str, Mapping[str, int]],
    ) -> Outcome:
        """One after another, so that the first refusal finds as few changed as possible."""
        states = {str(server.number): "unchanged" for server in servers}
        for index, server in enumerate(servers):
            try:
                await _ask(http, server, "PUT", counts, seconds=CHANGE_TIMEOUT)
            except _Refused as error:
                for each in servers[: index + 1]:
                    states[str(each.number)] = await self._put_back(
                        http, each, {name: before[each.id][name] for name in counts}
                    )
                state = "unchanged" if set(states.values()) <= {"unchanged", "put back"} else "mixed"
                return Outcome(409, {"error": f"server {server.number}: {error}", "state": state, "servers": states})
            states[str(server.number)] = "changed"
        granules = {**(self._shares.granules or {}), **counts}
        self._shares = Shares(self._shares.version, self._shares.revision + 1, granules)
        log.info("all %d servers have other shares: %s", len(servers), json.dumps(granules))
        return Outcome(200, {"state": "changed", "revision": self._shares.revision, "granules": granules, "servers": states})

    async def _put_back(self, http: aiohttp.ClientSession, server: Listed, granules: Mapping[str, int]) -> str:
        """What became of it. The one that refused is asked too: it may have changed without an answer."""
        try:
            await _ask(http, server, "PUT", granules, seconds=CHANGE_TIMEOUT)
        except _Refused as error:
            log.error("server %d could not be put back to %s: %s", server.number, dict(granules), error)
            return f"not put back: {error}"
        return "put back"


async def _ask(
    http: aiohttp.ClientSession, server: Listed, method: str, body: Mapping[str, int] | None = None, *, seconds: float
) -> dict[str, Any]:
    """/admin/partitions of one server. Raises _Refused."""
    headers, limit = {"Authorization": f"Bearer {server.key}"}, aiohttp.ClientTimeout(seconds)
    address = f"{server.url}/admin/partitions"
    try:
        async with http.request(method, address, headers=headers, json=body and dict(body), timeout=limit) as answer:
            document = await answer.json(content_type=None)
            if answer.status != 200:
                raise _Refused(document.get("error", f"answered with {answer.status}"))
            return dict(document)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise _Refused(f"no answer: {error!r}") from error


def _checked(found: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, int]:
    """The granules that tenants have now. Raises _Refused for what cannot fit; the rest is for the server to say."""
    held = {name: len(each["granules"]) for name, each in found["partitions"].items()}
    if unknown := counts.keys() - held.keys():
        raise _Refused(f"no tenant {', '.join(sorted(unknown))}; there are {', '.join(held)}")
    wrong = [f"{name}: {count!r}" for name, count in counts.items() if type(count) is not int or count < 1]
    if wrong:
        raise _Refused(f"{', '.join(wrong)}; expected whole numbers of granules of 1 or more")
    after = {**held, **counts}
    total = found.get("granules")
    if total is not None and sum(after.values()) > total:
        raise _Refused(f"{' + '.join(map(str, after.values()))} granules do not fit on {total}")
    return held


def _all_of(refused: Mapping[str, str]) -> str:
    return "; ".join(f"server {number}: {error}" for number, error in refused.items())
