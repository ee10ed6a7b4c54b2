"""Connections without a key that attack a tenant's gRPC port: its clients are answered meanwhile and at once afterwards."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.grpc import service_pb2

from server.grpc.server import MAX_FIELDS
from server.grpc.tenant_port import MOST_UNSHOWN
from tests.fakes import PATIENCE

from .bench import Bench
from .raw import connect

DEADLINE = 8.0
"""Seconds for a call: some for a new connection, and for a machine that does other things."""


@asynccontextmanager
async def attacked(bench: Bench, kind: str, count: int) -> AsyncIterator[None]:
    """While such an attack is under way."""
    command = [sys.executable, "-m", "tests.server.grpc.attacker", bench.address.rpartition(":")[2], kind, str(count)]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    attacker = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[3], **pipes)
    assert attacker.stdin
    assert attacker.stdout
    try:
        assert await asyncio.wait_for(attacker.stdout.readline(), PATIENCE) == b"under way\n"
        yield
    finally:
        attacker.stdin.close()
        await attacker.wait()


async def answered(bench: Bench) -> bool:
    """Whether a client with a connection of its own is answered; False if it is refused at once."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(bench.address, options=options) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelReady",
            request_serializer=service_pb2.ModelReadyRequest.SerializeToString,
            response_deserializer=service_pb2.ModelReadyResponse.FromString,
        )
        try:
            return bool((await call(service_pb2.ModelReadyRequest(name="m"), timeout=DEADLINE)).ready)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
                return False
            raise


async def test_clients_are_answered_while_a_thousand_connections_say_nothing(bench: Bench) -> None:
    kept = triton.InferenceServerClient(bench.address)
    assert await kept.is_model_ready("m", client_timeout=DEADLINE)
    async with attacked(bench, "idle", 1100):
        for _ in range(3):
            assert await answered(bench)
            assert await kept.is_model_ready("m", client_timeout=DEADLINE)
        connections = bench.server.connections
        async with asyncio.timeout(PATIENCE):
            while connections.unshown > MOST_UNSHOWN:
                await asyncio.sleep(0.05)
        assert await answered(bench)
    assert await kept.is_model_ready("m", client_timeout=DEADLINE)
    await kept.close()


@pytest.mark.parametrize("count", [1, 4])
async def test_clients_are_answered_soon_after_heads_that_become_megabytes(bench: Bench, count: int) -> None:
    assert await answered(bench)
    async with attacked(bench, "heads", count):
        pass
    async with asyncio.timeout(2 * DEADLINE):
        while not await answered(bench):
            pass


async def test_a_connection_whose_metadata_has_very_many_fields_is_closed(bench: Bench) -> None:
    client = await connect(int(bench.address.rpartition(":")[2]))
    await client.call("ServerLive", b"", metadata=tuple((f"x{number}", "y") for number in range(MAX_FIELDS + 1)))
    await asyncio.wait_for(client.closed(), PATIENCE)
    assert await answered(bench)


async def test_connections_beyond_the_tenants_own_limit_are_refused_and_those_of_others_do_not_count(bench: Bench) -> None:
    bench.tenant.config = bench.tenant.config.model_copy(update={"max_connections": 1})
    others = [await connect(int(bench.address.rpartition(":")[2])) for _ in range(3)]
    kept = triton.InferenceServerClient(bench.address)
    assert await kept.is_model_ready("m", client_timeout=DEADLINE)
    assert not await answered(bench)
    await kept.close()
    async with asyncio.timeout(PATIENCE):
        while not await answered(bench):
            pass
    for each in others:
        each.close()
