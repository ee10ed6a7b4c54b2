"""The coordinator: who is listed, and shares that change on every server or on none."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from greenlane.ray import coordinator as module
from greenlane.ray.coordinator import Coordinator, Listed, Shares
from tests.passing_time import Clock

from .upstream import Upstream, upstream

NONE = Shares("v")


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
async def pair() -> AsyncIterator[list[Upstream]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(upstream(number, acme=1, globex=3)) for number in range(2)]


async def knowing(clock: Clock, servers: list[Upstream]) -> Coordinator:
    """One that every server has reported to."""
    found = Coordinator("v", clock)
    clock.now += module.LEARNING + 0.1
    for server in servers:
        await found.report(server.listed, NONE)
    return found


async def test_a_server_is_listed_while_it_reports(clock: Clock) -> None:
    one, two = (Listed(id, number, "http://none", "k") for number, id in enumerate("ab"))
    found = Coordinator("v", clock)
    await found.report(two, NONE)
    assert not (await found.servers()).complete, "others may not have reported yet"
    clock.now = module.LEARNING + 0.1
    await found.report(one, NONE)
    assert (await found.servers()).servers == (one, two)
    clock.now = module.SILENT
    assert (await found.servers()).servers == (one,)
    await found.forget("a")
    assert (await found.servers()).servers == ()
    assert (await found.servers()).complete
    assert (await found.servers()).gone == {"a"}
    await found.report(one, NONE)
    assert (await found.servers()).gone == set()


async def test_shares_change_on_every_server_and_hold_for_those_that_start_later(clock: Clock, pair: list[Upstream]) -> None:
    found = await knowing(clock, pair)
    outcome = await found.repartition({"acme": 2, "globex": 2})
    assert (outcome.status, outcome.document["servers"]) == (200, {"0": "changed", "1": "changed"})
    assert [server.shares for server in pair] == [{"acme": 2, "globex": 2}] * 2
    assert await found.shares() == Shares("v", 1, {"acme": 2, "globex": 2})
    shown = (await found.partitions()).document
    assert (shown["revision"], set(shown["servers"])) == (1, {"0", "1"})


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ({"acme": 2}, "server 0: 2 + 3 granules do not fit on 4; server 1: 2 + 3 granules do not fit on 4"),
        ({"who": 1}, "no tenant who; there are acme, globex"),
        ({"acme": 0}, "acme: 0; expected whole numbers of granules of 1 or more"),
    ],
)
async def test_what_one_server_could_not_have_is_asked_of_none(
    clock: Clock, pair: list[Upstream], counts: dict[str, int], why: str
) -> None:
    outcome = await (await knowing(clock, pair)).repartition(counts)
    assert (outcome.status, outcome.document["state"]) == (409, "unchanged")
    assert why in outcome.document["error"]
    assert [server.puts for server in pair] == [[], []]


async def test_servers_that_changed_are_put_back_if_a_later_one_refuses(clock: Clock, pair: list[Upstream]) -> None:
    pair[1].refusals = [True]
    found = await knowing(clock, pair)
    outcome = await found.repartition({"acme": 2, "globex": 2})
    assert (outcome.status, outcome.document["state"]) == (409, "unchanged")
    assert outcome.document["error"] == "server 1: a tenant does not halt"
    assert outcome.document["servers"] == {"0": "put back", "1": "put back"}
    assert [server.shares for server in pair] == [{"acme": 1, "globex": 3}] * 2
    assert await found.shares() == NONE


async def test_one_that_cannot_be_put_back_is_reported(clock: Clock, pair: list[Upstream]) -> None:
    pair[0].refusals, pair[1].refusals = [False, True], [True]
    outcome = await (await knowing(clock, pair)).repartition({"acme": 2, "globex": 2})
    assert outcome.document["state"] == "mixed"
    assert outcome.document["servers"] == {"0": "not put back: a tenant does not halt", "1": "put back"}


async def test_a_server_that_does_not_answer_refuses(clock: Clock, pair: list[Upstream]) -> None:
    found = await knowing(clock, pair)
    await found.report(Listed("gone", 2, "http://127.0.0.1:1", "k"), NONE)
    outcome = await found.repartition({"acme": 2, "globex": 2})
    assert (outcome.status, outcome.document["state"]) == (409, "unchanged")
    assert "server 2: no answer: " in outcome.document["error"]
    assert "no answer: " in (await found.partitions()).document["servers"]["2"]["error"]
    assert [server.puts for server in pair] == [[], []]


async def test_nothing_changes_while_the_servers_are_not_known(clock: Clock, pair: list[Upstream]) -> None:
    found = Coordinator("v", clock)
    await found.report(pair[0].listed, NONE)
    assert (await found.repartition({"acme": 2, "globex": 2})).status == 503


async def test_a_replacement_learns_the_shares_in_force_from_reports(clock: Clock) -> None:
    found, server = Coordinator("v", clock), Listed("a", 0, "http://none", "k")
    later = Shares("v", 2, {"acme": 2})
    assert await found.report(server, Shares("v", 1, {"acme": 3})) == Shares("v", 1, {"acme": 3})
    assert await found.report(server, later) == later
    assert await found.report(server, NONE) == later
    assert await found.report(server, Shares("of before", 9, {"acme": 1})) == later, "a file that was replaced"
