"""Bodies that are received straight into slots: on a fake transport, piece by piece, and on real sockets under uvloop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
import orjson
import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from engines import DATATYPES, Signature, TensorSpec
from server.config.tenant import TenantConfig
from server.errors import Unavailable
from server.http.connection import HttpConnection
from server.http.infer import Infer
from server.http.inference import Target
from server.link import ring as links
from server.link.messages import Extent
from server.processes.http_side.connection_handoff import ReplayProtocol
from server.protocol.request import Limits
from server.tenants.catalog import ServedModel
from server.tenants.service import slots
from server.tenants.unread import UnreadAnswers
from tests.lanes import PlayedTenant, opened_tenant

from .test_connection import Transport

MIB = 1 << 20
COUNT = 20_000
VALUES = np.arange(COUNT, dtype="<f4")
PIECE = 256_000
"""What uvloop reads at most for an ordinary protocol."""


def signature(name: str = "x", datatype: str = "FP32") -> Signature:
    return Signature((TensorSpec(name, DATATYPES[datatype], ("n",)),), (TensorSpec("y", DATATYPES[datatype], ("n",)),))


def served(key: str = "m/1#1", takes: Signature | None = None) -> ServedModel:
    return ServedModel("m", "1", key, takes or signature(), "onnx", {})


def infer(data: bytes, datatype: str = "FP32", **fields: Any) -> bytes:
    """A request with one binary tensor, and with a binary answer."""
    count = len(data) // DATATYPES[datatype].size
    entry = {"name": "x", "datatype": datatype, "shape": [count], "parameters": {"binary_data_size": len(data)}}
    head = orjson.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}, **fields})
    lines = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nInference-Header-Content-Length: {len(head)}\r\nContent-Length: "
    return f"{lines}{len(head) + len(data)}\r\n\r\n".encode() + head + data


IMAGE = infer(VALUES.tobytes())
SMALL = infer(VALUES[:4].tobytes())
TENSORS_AT = len(IMAGE) - VALUES.nbytes


class SocketTransport(Transport):
    """A fake transport that receives as uvloop does: into the protocol's own buffers, if it has any.

    `given` are the addresses and sizes of those buffers, as numpy sees them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[int, int]] = []

    def receive(self, data: bytes, piece: int = PIECE) -> None:
        """What arrives, in pieces of at most this size."""
        for start in range(0, len(data), piece):
            left = memoryview(data)[start : start + piece]
            while left:
                left = left[self._receive_some(left) :]

    def _receive_some(self, data: memoryview) -> int:
        if not isinstance(self.protocol, asyncio.BufferedProtocol):
            self.protocol.data_received(bytes(data))
            return len(data)
        room: Any = self.protocol.get_buffer(-1)
        self.given.append((np.frombuffer(room, np.uint8).ctypes.data, len(room)))
        size = min(len(room), len(data))
        room[:size] = data[:size]
        self.protocol.buffer_updated(size)
        return size


class Bench(PlayedTenant):
    """Its worker answers each request with its input, and there are connections to it."""

    def __init__(self, config: TenantConfig, descriptors: links.Descriptors) -> None:
        super().__init__(config, descriptors)
        self.target = Target(self.tenant, "m", None, Limits(MIB, 64 * MIB), 256 * MIB)
        self.state = ServerState()

    def resolve(self, *_: object) -> Target:
        return self.target

    @property
    def ending(self) -> bool:
        return False

    def unread(self, _: object) -> UnreadAnswers:
        return self.tenant.unread

    def protocol(self) -> HttpConnection:
        config = uvicorn.Config(cast(Any, self), timeout_keep_alive=60, log_config=None)
        config.load()
        return HttpConnection(cast(Infer, self), cast(Any, self), None, config, self.state, {})

    def connect(self) -> tuple[HttpConnection, SocketTransport]:
        connection, transport = self.protocol(), SocketTransport()
        transport.protocol = connection
        connection.connection_made(transport)
        return connection, transport

    def used(self) -> tuple[int, int]:
        """Slots and bytes of tensor memory in use."""
        statistics = self.tenant.lane.slots.statistics()
        return statistics.used, statistics.nbytes

    async def work(self, turns: int = 5) -> None:
        """Answer every ticket with its own input."""
        for _ in range(turns):
            while ticket := self.far.tickets.poll():
                (count,) = ticket.shapes[0]
                size = self.tenant.lane.slots.at(ticket.slot).capacity if not count else 4 * count
                self.end(ticket, Extent((count,), 0, size))
            await asyncio.sleep(0)


ROOM = {"queue": 8, "in_flight": 2}


@pytest.fixture
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """A test's parameters are keys of the tenant."""
    with opened_tenant(Bench, **{**ROOM, **getattr(request, "param", {})}) as bench:
        yield bench
        assert not bench.cancelled


def answers(written: bytes) -> list[bytes]:
    """The status line and the tensors of each answer."""
    found = []
    while written:
        head, _, rest = written.partition(b"\r\n\r\n")
        fields = dict(line.split(b": ") for line in head.split(b"\r\n")[1:])
        body, written = rest[: int(fields[b"content-length"])], rest[int(fields[b"content-length"]) :]
        status = head.split(b" ", 2)[1]
        found.append(body[int(fields.get(b"inference-header-content-length", 0)) :] if status == b"200" else status)
    return found


async def test_tensors_of_repeated_requests_are_received_into_the_slot_alone(bench: Bench) -> None:
    _, transport = bench.connect()
    transport.receive(IMAGE)
    await bench.work()
    transport.given.clear()
    transport.receive(IMAGE, 10 * PIECE)
    slot = bench.tenant.lane.slots.at(0)
    (before, head), tensors = transport.given
    assert head == TENSORS_AT, "no byte of the tensor is received into another buffer"
    assert not slot.address <= before < slot.address + slot.capacity
    assert tensors == (slot.address, VALUES.nbytes)


@pytest.mark.parametrize("read_ahead", [TENSORS_AT - 10, len(IMAGE) // 2, len(IMAGE)])
async def test_body_of_which_another_process_has_read_a_part_is_answered(bench: Bench, read_ahead: int) -> None:
    replay, transport = ReplayProtocol(cast(Any, bench.protocol()), IMAGE[:read_ahead]), SocketTransport()
    replay.connection_made(transport)
    transport.receive(IMAGE[read_ahead:] + IMAGE)
    for _ in range(2):
        await bench.work()
    assert answers(transport.written) == [VALUES.tobytes()] * 2
    assert bench.used() == (0, 0)


async def test_disconnect_in_mid_body_frees_slot_and_block(bench: Bench) -> None:
    connection, transport = bench.connect()
    transport.receive(IMAGE[:-1])
    assert bench.used()[0] == 1
    assert connection.received() == len(IMAGE) - 1 - IMAGE.index(b"\r\n\r\n") - 4
    transport.protocol.connection_lost(None)
    assert bench.used() == (0, 0)
    assert repr(bench.tenant.uploads).startswith("<Uploads 0 on their way, 0 of")


async def test_refusal_in_mid_body_frees_the_slot_and_drops_the_rest(bench: Bench) -> None:
    connection, transport = bench.connect()
    transport.receive(IMAGE[: TENSORS_AT + 100])
    connection.refuse(Unavailable("the server is draining"))
    assert bench.used() == (0, 0)
    transport.receive(IMAGE[TENSORS_AT + 100 :] + SMALL)
    await bench.work()
    assert answers(transport.written) == [b"503", VALUES[:4].tobytes()]
    assert not transport.closed


@pytest.mark.parametrize(
    ("now", "expected"),
    [(served("m/1#2"), VALUES.tobytes()), (served("m/1#2", signature("other")), b"400")],
    ids=["the same inputs", "others"],
)
async def test_model_that_is_reloaded_in_mid_body_decides_about_the_body(
    bench: Bench, now: ServedModel, expected: bytes
) -> None:
    _, transport = bench.connect()
    transport.receive(IMAGE[: len(IMAGE) // 2])
    bench.tenant.catalog.put("m", [now], [])
    transport.receive(IMAGE[len(IMAGE) // 2 :])
    await bench.work()
    assert answers(transport.written) == [expected]
    assert bench.used() == (0, 0)


async def test_invalid_contents_are_refused_once_they_have_arrived(bench: Bench) -> None:
    bench.tenant.catalog.put("m", [served(takes=signature(datatype="BOOL"))], [])
    request = infer(b"\1" * 99_999 + b"\2", "BOOL")
    _, transport = bench.connect()
    transport.receive(request[:-1])
    assert (bench.used()[0], transport.written) == (1, b"")
    transport.receive(request[-1:])
    assert answers(transport.written) == [b"400"]
    assert bench.used() == (0, 0)


async def test_full_queue_is_429_when_the_body_is_complete(bench: Bench) -> None:
    _, transport = bench.connect()
    transport.receive(IMAGE[:-1])
    others = [bench.connect()[1] for _ in range(10)]
    for other in others:
        other.receive(SMALL)
    transport.receive(IMAGE[-1:])
    assert answers(transport.written) == [b"429"]
    await bench.work(20)
    assert [answers(other.written) for other in others] == [[VALUES[:4].tobytes()]] * 10
    assert bench.used() == (0, 0)


@pytest.mark.parametrize("bench", [{"memory": 16 * MIB}], indirect=True)
async def test_upload_gives_its_memory_to_a_complete_request_and_is_still_answered(bench: Bench) -> None:
    large = infer(np.arange(MIB, dtype="<f4").tobytes())  # 4 MiB, and as much for its answer.
    _, slow = bench.connect()
    slow.receive(large[: 3 * MIB])
    assert bench.used() == (1, 8 * MIB)
    _, quick = bench.connect()
    quick.receive(large)
    assert bench.used() == (1, 8 * MIB), "both do not fit: the one that is complete has the memory"
    await bench.work()
    slow.receive(large[3 * MIB :])
    await bench.work()
    for transport in (slow, quick):
        assert answers(transport.written) == [np.arange(MIB, dtype="<f4").tobytes()]
    assert bench.used() == (0, 0)


@pytest.mark.parametrize("bench", [{"queue": 1, "in_flight": 1}], indirect=True)
async def test_uploads_give_their_slots_to_complete_requests(bench: Bench) -> None:
    uploading = []
    for _ in range(slots(bench.tenant.config)):
        _, transport = bench.connect()
        transport.receive(IMAGE[:-1])
        uploading.append(transport)
    assert bench.used()[0] == slots(bench.tenant.config)
    _, more = bench.connect()
    more.receive(IMAGE[:-1])
    _, quick = bench.connect()
    quick.receive(SMALL)
    await bench.work()
    assert answers(quick.written) == [VALUES[:4].tobytes()]
    for transport in (*uploading, more):
        transport.receive(IMAGE[-1:])
        await bench.work()
        assert answers(transport.written) == [VALUES.tobytes()]
    assert bench.used() == (0, 0)


def test_real_sockets_receive_into_slots_and_a_slow_reader_holds_none() -> None:
    """38 MB each way under uvloop: the socket takes a part of the answer, and the slot is free while the rest is read."""
    values = np.arange(9_500_000, dtype="<f4")

    async def scenario(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        await loop.connect_accepted_socket(bench.protocol, theirs)
        for _ in range(2):
            sending = asyncio.ensure_future(loop.sock_sendall(ours, infer(values.tobytes())))
            while not sending.done() or bench.far.tickets.waiting():
                await bench.work(1)
            while bench.used()[0]:
                await bench.work(1)
            assert bench.used() == (0, 0), "no byte was read yet"
            received = bytearray()
            while len(received) < values.nbytes or len(received.partition(b"\r\n\r\n")[2]) < values.nbytes + 100:
                received += await loop.sock_recv(ours, 1 << 20)
            assert answers(bytes(received)) == [values.tobytes()]
        ours.close()
        await asyncio.sleep(0.01)

    async def opened() -> None:
        with opened_tenant(Bench, **ROOM) as bench:
            await scenario(bench)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(opened())
