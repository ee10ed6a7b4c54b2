"""A tenant's gRPC port over real sockets, through Triton's own client; the test plays the worker."""

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.grpc import service_pb2

from server.config.tables import ConfigError
from server.grpc import server, tenant_port
from server.grpc.server import GrpcServer
from server.grpc.tenant_port import Places
from server.link.messages import Failure
from server.tenants.service import SPARE_SLOTS, Service

from .bench import GLOBEX_KEY, MAX_BODY, Bench, X, refused


async def test_an_inference_has_its_tensors_id_and_times(bench: Bench) -> None:
    result = await bench.answered(bench.infer(request_id="7"))
    assert result.as_numpy("y").tolist() == [1, 2]
    assert (result.get_response().id, result.get_response().model_name, result.get_response().model_version) == ("7", "m", "1")
    assert result.get_response().raw_output_contents == [X.tobytes()]
    assert (bench.served.statistics.success.count, bench.tenant.lane.slots.statistics().used) == (1, 0)


async def test_times_come_in_trailing_metadata_as_those_of_server_timing(bench: Bench) -> None:
    channel = grpc.aio.insecure_channel(bench.address)
    request = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[X.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[2])
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(request.SerializeToString())
    await bench.answered(call)
    told = dict(await call.trailing_metadata())["server-timing"]
    assert told.startswith("queue;dur=")
    assert ", execute;dur=" in told
    await channel.close()


async def test_typed_contents_are_answered_in_raw_contents(bench: Bench) -> None:
    request = service_pb2.ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype="FP32", shape=[2]).contents.fp32_contents.extend([3, 4])
    answer = await bench.answered(bench.client._client_stub.ModelInfer(request))
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [3, 4]


async def test_many_typed_values_are_converted_between_other_work(bench: Bench) -> None:
    request = service_pb2.ModelInferRequest(model_name="m")
    values = np.arange(30_000, dtype=np.float32)
    request.inputs.add(name="x", datatype="FP32", shape=[30_000]).contents.fp32_contents.extend(values.tolist())
    answer = await bench.answered(bench.client._client_stub.ModelInfer(request))
    assert answer.raw_output_contents == [values.tobytes()]
    assert repr(bench.tenant.uploads).startswith("<Uploads 0 on their way, 0 of ")


async def test_classification_is_answered_in_texts(bench: Bench) -> None:
    outputs = [triton.InferRequestedOutput("y", class_count=1)]
    result = await bench.answered(bench.infer(outputs=outputs))
    assert result.as_numpy("y").tolist() == [b"2.000000:1:two"]


@pytest.mark.parametrize(
    ("asked", "status", "text"),
    [
        ({"model": "n"}, "NOT_FOUND", "Request for unknown model: 'n' is not found"),
        ({"model_version": "2"}, "NOT_FOUND", "Request for unknown model: 'm' version 2 is not found"),
        ({"x": np.zeros((1, 2), np.float32)}, "INVALID_ARGUMENT", "input 'x': shape [1, 2] has 2 dimensions; expected 1"),
        ({"outputs": [triton.InferRequestedOutput("z")]}, "INVALID_ARGUMENT", "outputs[0].name: the model has no output 'z'"),
        (
            {"parameters": {"mine": "1"}, "sequence_id": 3},
            "INVALID_ARGUMENT",
            "parameters.sequence_id: sequences are not served",
        ),
        ({"headers": {"x-tenant": "nobody"}}, "UNAUTHENTICATED", "X-Tenant: there is no tenant 'nobody'"),
        ({"headers": {"authorization": "Bearer no"}}, "UNAUTHENTICATED", "Authorization: no tenant has this key"),
        (
            {"headers": {"authorization": f"Bearer {GLOBEX_KEY}"}},
            "PERMISSION_DENIED",
            "this port belongs to tenant 'acme'; send requests of 'globex' over HTTP; it has no grpc_port",
        ),
        (
            {"headers": {"x-tenant": "initech"}},
            "PERMISSION_DENIED",
            "this port belongs to tenant 'acme'; send requests of 'initech' on 8199, its own port",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isupper() else "",
)
async def test_a_refusal_has_https_text_and_a_status_of_grpc(
    bench: Bench, asked: dict[str, Any], status: str, text: str
) -> None:
    came, said = await refused(bench.infer(**asked))
    assert came == status
    assert text in said
    assert bench.tenant.lane.slots.statistics().used == 0


async def test_a_failure_of_the_model_has_a_request_id_that_is_in_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "greenlane.infer"):
        status, text = await refused(bench.answered(bench.infer(), Failure("raised", "no")))
    (record,) = caplog.records
    assert (status, text) == ("INTERNAL", f"the model raised: no (request {record.request_id})")  # type: ignore[attr-defined]
    assert bench.served.statistics.failures == {"BACKEND": 1}


async def test_the_text_of_an_unexpected_error_is_in_the_log_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bench.server.tenant_port, "tenant", lambda context: 1 / 0)
    status, text = await refused(bench.infer())
    assert status == "INTERNAL"
    assert text.startswith("internal error (request ")


@pytest.mark.parametrize("letter", ["n", "%", "é", "名", "😀"])
async def test_a_long_text_is_shortened_so_that_every_client_can_read_it(bench: Bench, letter: str) -> None:
    status, text = await refused(bench.infer(model=letter * 20_000))
    assert status == "NOT_FOUND"
    assert 500 < len(text) < 2100


async def test_a_text_of_many_lines_is_shortened_as_well(bench: Bench) -> None:
    status, text = await refused(bench.answered(bench.infer(), Failure("raised", "no\n" * 10_000)))
    assert (status, text[:20]) == ("INTERNAL", "the model raised: no")
    assert len(text) < 2100


async def test_no_model_is_ready_while_inferences_are_refused(bench: Bench) -> None:
    asked = service_pb2.ModelReadyRequest(name=bench.served.name).SerializeToString()
    channel = grpc.aio.insecure_channel(bench.address)
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelReady")
    for reason, ready in (("", True), ("the device process has ended", False), ("", True)):
        bench.tenant.suspend(reason)
        assert service_pb2.ModelReadyResponse.FromString(await call(asked)).ready is ready
    await channel.close()


async def test_repeated_credentials_are_ambiguous(bench: Bench) -> None:
    channel = grpc.aio.insecure_channel(bench.address)
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelReady")
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call(b"", metadata=(("x-tenant", "acme"), ("x-tenant", "globex")))
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.value.details() == "X-Tenant: given 2 times; expected once"
    await channel.close()


async def test_the_shorter_of_timeout_and_the_calls_deadline_is_the_tickets(bench: Bench) -> None:
    now = asyncio.get_running_loop().time()
    for options, seconds in [({"timeout": 50_000_000}, 50), ({"client_timeout": 20.0, "timeout": 50_000_000}, 20)]:
        call = asyncio.ensure_future(bench.infer(**options))
        ticket = await bench.next_ticket()
        assert seconds - 1 < ticket.deadline - now < seconds + 5
        bench.echo(ticket)
        await call


async def test_a_timeout_that_passes_is_answered_at_that_moment(bench: Bench) -> None:
    status, text = await refused(bench.infer(timeout=1000))
    assert status == "DEADLINE_EXCEEDED"
    assert text == "Request timeout expired: 1000 microseconds (parameters.timeout) passed"
    assert bench.tenant.lane.statistics().expired == 1


async def test_a_call_whose_deadline_passes_is_stopped_and_counted_as_expired(bench: Bench) -> None:
    status, _ = await refused(bench.infer(client_timeout=0.2))
    assert status == "DEADLINE_EXCEEDED"
    ticket = await bench.next_ticket()
    while not bench.cancelled:
        await asyncio.sleep(0)
    assert bench.cancelled == [ticket.slot]
    bench.end(ticket, failure=Failure("cancelled", ""))
    await bench.released()
    assert bench.served.statistics.failures == {"REJECTED": 1}
    assert bench.tenant.lane.statistics().expired == 1


async def test_a_cancelled_call_stops_its_inference(bench: Bench) -> None:
    call = asyncio.ensure_future(bench.infer())
    ticket = await bench.next_ticket()
    call.cancel()
    while not bench.cancelled:
        await asyncio.sleep(0)
    bench.end(ticket, failure=Failure("cancelled", ""))
    await bench.released()
    assert bench.served.statistics.failures == {"CANCELED": 1}


async def test_a_flood_is_refused_before_its_tensors_arrive(bench: Bench) -> None:
    calls = [asyncio.ensure_future(bench.infer()) for _ in range(3)]
    ticket = await bench.next_ticket()
    while bench.tenant.lane.statistics().waiting < 2:
        await asyncio.sleep(0)
    channel = grpc.aio.insecure_channel(bench.address)
    flooding = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")()  # Sends no message at all.
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await flooding
    assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "Exceeds maximum queue size" in str(refusal.value.details())
    assert bench.tenant.lane.statistics().rejected == 1
    await channel.close()
    bench.echo(ticket)
    for _ in range(2):
        bench.echo(await bench.next_ticket())
    await asyncio.gather(*calls)


async def test_too_many_calls_at_a_time_are_refused(bench: Bench) -> None:
    own = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(bench.address, options=own) for _ in range(3)]
    most, method = bench.tenant.config.queue + SPARE_SLOTS, "/inference.GRPCInferenceService/ModelInfer"
    calls = [asyncio.ensure_future(each.stream_unary(method)()) for each in channels[:2] for _ in range(most)]  # No messages.
    calls.append(asyncio.ensure_future(channels[2].stream_unary(method)()))
    (first,), _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    refusal = first.exception()
    assert isinstance(refusal, grpc.aio.AioRpcError)
    assert refusal.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    for each in channels:
        await each.close()
    await asyncio.wait(calls)


async def test_a_message_over_max_body_is_refused(bench: Bench) -> None:
    status, text = await refused(bench.infer(np.zeros(MAX_BODY // 4 + 1, np.float32)))
    assert status == "RESOURCE_EXHAUSTED"
    assert f"vs. {MAX_BODY}" in text


async def test_a_compressed_message_over_max_body_is_refused_uncompressed_too(bench: Bench) -> None:
    status, text = await refused(bench.infer(np.zeros(16 * MAX_BODY // 4, np.float32), compression_algorithm="gzip"))
    assert status == "RESOURCE_EXHAUSTED"
    assert "larger than max" in text


async def test_a_message_of_max_body_is_served_compressed_or_not(bench: Bench) -> None:
    x = np.zeros(MAX_BODY // 4 - 64, np.float32)
    for algorithm in (None, "gzip", "deflate"):
        result = await bench.answered(bench.infer(x, compression_algorithm=algorithm))
        assert result.as_numpy("y").nbytes == x.nbytes


async def test_a_message_that_does_not_come_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_port, "READ_SECONDS", 0.05)
    channel = grpc.aio.insecure_channel(bench.address)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")()
    assert refusal.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert str(refusal.value.details()).startswith("the message did not come within 0.0")
    await channel.close()


async def test_silent_calls_make_room_for_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_port, "CONTESTED_SECONDS", 0.05)
    monkeypatch.setattr(bench.server.tenant_port, "reading", Places(2))
    channel = grpc.aio.insecure_channel(bench.address)
    silent = [asyncio.ensure_future(channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")()) for _ in range(2)]
    while not bench.server.tenant_port.reading.full:
        await asyncio.sleep(0)
    assert (await bench.answered(bench.infer())).as_numpy("y").tolist() == [1, 2]
    (ended,), (waits,) = await asyncio.wait(silent, return_when=asyncio.FIRST_COMPLETED)
    assert isinstance(error := ended.exception(), grpc.aio.AioRpcError)
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    waits.cancel()
    await channel.close()


async def test_a_call_without_a_message_is_refused(bench: Bench) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        return
        yield

    channel = grpc.aio.insecure_channel(bench.address)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")(nothing())
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    await channel.close()


async def test_a_message_that_is_none_counts_as_invalid(bench: Bench) -> None:
    channel = grpc.aio.insecure_channel(bench.address)
    for method in ("ModelInfer", "ModelReady"):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(b"\xff\xff")
        assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert f"the message is no {method}Request: " in str(refusal.value.details())
    assert bench.tenant.lane.statistics().invalid == 1
    await channel.close()


async def test_a_stream_answers_each_request_in_order_with_its_error_if_it_has_one(bench: Bench) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for index, name in enumerate(("m", "n", "m")):
            given = triton.InferInput("x", [2], "FP32").set_data_from_numpy(X + index)
            yield {"model_name": name, "inputs": [given], "request_id": str(index), "enable_empty_final_response": True}

    answers = bench.client.stream_infer(requests())
    result, error = await bench.answered(anext(answers))
    assert (error, result.as_numpy("y").tolist(), result.get_response().id) == (None, [1, 2], "0")
    assert result.get_response().parameters["triton_final_response"].bool_param
    assert str((await anext(answers))[1]) == "Request for unknown model: 'n' is not found"
    result, error = await bench.answered(anext(answers))
    assert (error, result.as_numpy("y").tolist(), result.get_response().id) == (None, [3, 4], "2")
    with pytest.raises(StopAsyncIteration):
        await anext(answers)


async def test_a_cancelled_stream_stops_its_inference(bench: Bench) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "m", "inputs": [triton.InferInput("x", [2], "FP32").set_data_from_numpy(X)]}

    answers = bench.client.stream_infer(requests())
    first = asyncio.ensure_future(anext(answers))
    ticket = await bench.next_ticket()
    answers.cancel()
    while not bench.cancelled:
        await asyncio.sleep(0)
    bench.end(ticket, failure=Failure("cancelled", ""))
    await bench.released()
    first.cancel()


async def test_an_error_in_a_stream_has_the_id_of_its_request(bench: Bench) -> None:
    channel = grpc.aio.insecure_channel(bench.address)
    stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
    for message, identifier in (
        (service_pb2.ModelInferRequest(model_name="n", id="7").SerializeToString(), "7"),
        (b"\xff", ""),
    ):
        await stream.write(message)
        answer = service_pb2.ModelStreamInferResponse.FromString(await stream.read())
        assert answer.error_message
        assert answer.infer_response.id == identifier
    await stream.done_writing()
    assert await stream.read() == grpc.aio.EOF
    await channel.close()


async def test_more_streams_than_messages_may_arrive_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.server.tenant_port, "readers", 3)
    channel = grpc.aio.insecure_channel(bench.address)
    call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    streams = [call() for _ in range(3)]
    for each in streams:
        await each.write(service_pb2.ModelInferRequest(model_name="n").SerializeToString())
        assert await each.read()  # It is open.
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call().read()
    assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "3 streams are open" in str(refusal.value.details())
    for each in streams:
        await each.done_writing()
        assert await each.read() == grpc.aio.EOF
    await channel.close()


async def test_idle_streams_end_at_once_when_the_server_stops(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "STOP_SECONDS", 60.0)
    channel = grpc.aio.insecure_channel(bench.address)
    stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
    await stream.write(service_pb2.ModelInferRequest(model_name="n").SerializeToString())
    assert await stream.read()
    began = time.monotonic()
    await bench.server.stop()
    assert time.monotonic() - began < 30, "it waited for the stream"
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stream.read()
    assert (refusal.value.code(), refusal.value.details()) == (grpc.StatusCode.UNAVAILABLE, "the server is stopping")
    await channel.close()
    assert caplog.records == []


async def test_health_needs_no_tenant_and_no_message(bench: Bench) -> None:
    for state, ready in (("serving", True), ("draining", False)):
        bench.service.set_state(state)  # type: ignore[arg-type]
        nobody = {"x-tenant": "nobody"}
        assert await bench.client.is_server_live(headers=nobody)
        assert await bench.client.is_server_ready(headers=nobody) == ready
        channel = grpc.aio.insecure_channel(bench.address)
        answer = await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
        assert answer == (b"\x08\x01" if ready else b"\x08\x02")
        await channel.close()
    metadata = await bench.client.get_server_metadata(headers={"x-tenant": "nobody"})
    assert metadata.name == "greenlane"
    assert "statistics" in metadata.extensions


async def test_a_suspended_tenant_is_unavailable(bench: Bench) -> None:
    call = asyncio.ensure_future(bench.infer())
    await bench.next_ticket()
    bench.tenant.suspend("its worker is being restarted")
    assert await refused(call) == ("UNAVAILABLE", "its worker is being restarted")
    assert await refused(bench.infer()) == ("UNAVAILABLE", "its worker is being restarted")


async def test_every_method_of_tritons_service_is_served_or_refused_by_name(bench: Bench) -> None:
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    channel = grpc.aio.insecure_channel(bench.address)
    for method in service.methods:
        call = channel.unary_unary(f"/{service.full_name}/{method.name}")(service_pb2.ModelInferRequest().SerializeToString())
        assert await call.details() != "Method not found!", method.name
    await channel.close()


async def test_shared_memory_is_refused_with_what_to_use(bench: Bench) -> None:
    status, text = await refused(bench.client.unregister_cuda_shared_memory("m"))
    assert status == "UNIMPLEMENTED"
    assert text.endswith("use raw_input_contents: shared memory is not served, since regions have no tenant")


async def test_a_port_in_use_is_refused_with_its_key(bench: Bench) -> None:
    config = bench.service.config
    with pytest.raises(ConfigError, match=r"^c\.toml: tenants\.acme\.grpc_port: cannot listen on 127\.0\.0\.1:"):
        await GrpcServer(Service(config, [bench.tenant]), "acme", bench.ask).start()


async def test_an_accepted_call_is_answered_while_the_server_stops(bench: Bench) -> None:
    call = asyncio.ensure_future(bench.infer())
    ticket = await bench.next_ticket()
    stopping = asyncio.ensure_future(bench.server.stop())
    bench.echo(ticket)
    assert (await call).as_numpy("y").tolist() == [1, 2], "what was accepted is answered"
    await stopping


async def test_silent_calls_that_wait_for_a_place_do_not_lock_others_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_port, "CONTESTED_SECONDS", 0.05)
    monkeypatch.setattr(bench.server.tenant_port, "reading", Places(2))
    channel = grpc.aio.insecure_channel(bench.address, options=[("grpc.use_local_subchannel_pool", 1)])
    silent = [asyncio.ensure_future(channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")()) for _ in range(20)]
    while not bench.server.tenant_port.reading.wanted:
        await asyncio.sleep(0)
    assert (await asyncio.wait_for(bench.answered(bench.infer()), 10)).as_numpy("y").tolist() == [1, 2]
    for each in silent:
        each.cancel()
    await channel.close()


def test_grpcs_library_writes_nothing_to_standard_error_by_itself_unless_it_is_asked_to() -> None:
    script = "import os, sys, server.grpc; print('grpc' in sys.modules, os.environ['GRPC_VERBOSITY'])"
    for given, expected in (({}, "False NONE"), ({"GRPC_VERBOSITY": "DEBUG"}, "False DEBUG")):
        environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"} | given
        found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == expected
