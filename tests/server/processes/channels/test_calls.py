"""A Protocol between two processes: what its annotations do not allow never reaches the implementation."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
import pytest

from server.errors import Conflict, Unavailable
from server.processes.channels.calls import proxy, serve
from server.processes.channels.rpc import Channel


class Fact(NamedTuple):
    name: str
    sizes: tuple[int, ...] = ()


class Rooms(Protocol):
    async def fit(self, facts: Sequence[Fact], most: Annotated[int, msgspec.Meta(ge=0)] = 3) -> Mapping[str, Fact]: ...
    async def fail(self) -> None: ...
    def close(self, reason: str = "") -> None: ...


class Office:
    """The implementation."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    async def fit(self, facts: Sequence[Fact], most: int = 0) -> Mapping[str, Fact]:
        self.heard.append((facts, most))
        return {each.name: each for each in facts}

    async def fail(self) -> None:
        raise Conflict("tenant acme: no")

    def close(self, reason: str = "") -> None:
        self.heard.append(reason)


@asynccontextmanager
async def rooms(office: Office) -> AsyncIterator[tuple[Rooms, Channel, Channel]]:
    ours, theirs = socket.socketpair()
    near, far = Channel("far", {}), Channel("near", serve(Rooms)(lambda: office))
    await near.open(ours)
    await far.open(theirs)
    yield proxy(Rooms, near), near, far
    for each in (near, far):
        each.close()


async def test_arguments_and_results_arrive_as_they_were_and_defaults_are_those_of_the_protocol() -> None:
    fact = Fact("a", (1, 2))
    async with rooms(office := Office()) as (far, *_):
        assert await far.fit([fact]) == {"a": fact}
        assert await far.fit(most=0, facts=(fact,)) == {"a": fact}
        far.close("enough")
        far.close()
        assert await far.fit([]) == {}
    assert office.heard == [([fact], 3), ([fact], 0), "enough", "", ([], 3)]


async def test_a_call_reaches_the_implementation_that_it_names() -> None:
    offices = {name: Office() for name in ("north", "south")}
    ours, theirs = socket.socketpair()
    near, far = Channel("far", {}), Channel("near", serve(Rooms, names=1)(offices.__getitem__))
    await near.open(ours)
    await far.open(theirs)
    proxy(Rooms, near, "south").close("enough")
    assert await proxy(Rooms, near, "north").fit([Fact("a")]) == {"a": Fact("a")}
    assert {name: office.heard for name, office in offices.items()} == {"north": [([Fact("a")], 3)], "south": ["enough"]}
    proxy(Rooms, near).close("which?")
    await asyncio.wait_for(far.closed.wait(), 10)
    assert far.distrusted
    near.close()


async def test_calls_are_sent_in_the_order_in_which_they_are_made_awaited_or_not() -> None:
    async with rooms(office := Office()) as (far, *_):
        first = far.fit([Fact("a")])
        assert await far.fit([Fact("b")]) == {"b": Fact("b")}
        assert await first == {"a": Fact("a")}
    assert [facts[0].name for facts, _ in office.heard] == ["a", "b"]


async def test_an_error_of_the_implementation_is_raised_by_the_call_and_the_channel_stays_open() -> None:
    async with rooms(Office()) as (far, *_):
        with pytest.raises(Conflict, match=r"^tenant acme: no$"):
            await far.fail()
        assert await far.fit([]) == {}


async def test_a_call_that_the_protocol_does_not_have_is_an_error_here() -> None:
    async with rooms(Office()) as (far, *_):
        unchecked: Any = far
        with pytest.raises(AttributeError):
            unchecked.open()
        with pytest.raises(TypeError, match="unexpected keyword argument 'least'"):
            unchecked.fit([], least=1)


MALFORMED: dict[str, list[Any]] = {
    "another Protocol's method": ["Halls.fit", [], 3],
    "no method": ["Rooms.open"],
    "the implementation's own": ["Office.close", ""],
    "too few arguments": ["Rooms.fit", []],
    "too many arguments": ["Rooms.fit", [], 3, 4],
    "an argument of another type": ["Rooms.fit", "a", 3],
    "a fact of another type": ["Rooms.fit", [["a", ["b"]]], 3],
    "a fact with a field too many": ["Rooms.fit", [["a", [], 1]], 3],
    "out of bounds": ["Rooms.fit", [], -1],
    "a method named without its Protocol": ["fit", [], 3],
}


@pytest.mark.parametrize("number", [1, None], ids=["a call", "a notification"])
@pytest.mark.parametrize("message", MALFORMED.values(), ids=MALFORMED.keys())
async def test_what_the_protocol_does_not_allow_closes_the_channel(number: int | None, message: list[Any]) -> None:
    office = Office()
    ours, theirs = socket.socketpair()
    channel = Channel("a hostile process", serve(Rooms)(lambda: office))
    await channel.open(ours)
    method, *arguments = message
    data = msgspec.msgpack.encode(["call", number, method, arguments])
    with theirs:
        theirs.sendall(len(data).to_bytes(4, "little") + data)
        await asyncio.wait_for(channel.closed.wait(), 10)
    assert (channel.distrusted, office.heard) == (True, [])


async def test_a_result_of_another_type_closes_the_channel_to_the_process_that_sent_it() -> None:
    class Lying(Office):
        async def fit(self, facts: Sequence[Fact], most: int = 0) -> Any:
            return {"a": ["a", ["b"]]}

    async with rooms(Lying()) as (far, near, _):
        with pytest.raises(Unavailable):
            await far.fit([])
        assert near.distrusted
