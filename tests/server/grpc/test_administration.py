"""Loads, unloads and settings over gRPC: the routes of HTTP answer, under their rules."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from server.grpc.messages import MESSAGES
from server.grpc.tenant_port import MAX_MESSAGE
from server.tenants.model_changes import MAX_WAITING

from .bench import GLOBEX_KEY, Bench, refused


async def test_a_load_has_its_configuration_and_an_unload_none(bench: Bench) -> None:
    await bench.client.load_model("m", config='{"max_batch_size": 4}')
    await bench.client.load_model("50% ü")
    await bench.client.unload_model("m", unload_dependents=True)
    assert bench.control.asked == [("load", "m", '{"max_batch_size": 4}'), ("load", "50% ü", None), ("unload", "m", None)]


@pytest.mark.parametrize(
    ("asked", "status", "text"),
    [
        ({"model_name": ""}, "NOT_FOUND", "Request for unknown model: '' is not found"),
        ({"model_name": "../etc"}, "NOT_FOUND", "Request for unknown model: '../etc' is not found"),
        ({"config": "{"}, "INVALID_ARGUMENT", "failed to load 'm': "),
        ({"config": '{"max_batch": 4}'}, "INVALID_ARGUMENT", "failed to load 'm': "),
        ({"config": '{"max_batch_size": 4}', "files": {"file:1/model.onnx": b"\0"}}, "INVALID_ARGUMENT", "put files into"),
        ({"headers": {"x-forwarded-for": "10.0.0.1"}}, "UNAUTHENTICATED", "is not loaded or unloaded through a proxy"),
        ({"headers": {"authorization": f"Bearer {GLOBEX_KEY}"}}, "PERMISSION_DENIED", "belongs to tenant 'acme'"),
        ({"headers": {"x-tenant": "nobody"}}, "UNAUTHENTICATED", "there is no tenant 'nobody'"),
    ],
    ids=str,
)
async def test_a_load_is_refused_with_the_text_of_http(bench: Bench, asked: dict[str, Any], status: str, text: str) -> None:
    came, said = await refused(bench.client.load_model(**{"model_name": "m", **asked}))
    assert came == status
    assert text in said
    assert bench.control.asked == []


@pytest.mark.parametrize(
    ("method", "fields", "text"),
    [
        ("RepositoryIndex", {}, "repository_name: 'other'; expected none, as there is one repository"),
        ("RepositoryModelLoad", {"model_name": "m"}, "repository_name: 'other'; expected none, as there is one repository"),
        ("RepositoryModelUnload", {"model_name": "m"}, "repository_name: 'other'; expected none, as there is one repository"),
        ("ModelStatistics", {"version": "3"}, "version: '3' without a name; expected the name of its model"),
    ],
)
async def test_a_field_that_would_mean_nothing_is_refused(bench: Bench, method: str, fields: dict[str, str], text: str) -> None:
    asked = MESSAGES[f"{method}Request"](**fields)
    if method != "ModelStatistics":
        asked.repository_name = "other"
    async with grpc.aio.insecure_channel(bench.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(asked.SerializeToString())
    assert (refusal.value.code(), refusal.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)
    assert bench.control.asked == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"bytes_param": b"{}"}, "parameters.config: bytes_param; expected string_param, as it is a text"),
        ({"int64_param": 7}, "parameters.config: 7 is an integer; expected a string"),
        ({}, "parameters.config: null; expected a string, a number or true or false"),
    ],
)
async def test_a_configuration_that_is_no_text_is_refused_as_such(bench: Bench, value: dict[str, Any], text: str) -> None:
    asked = MESSAGES["RepositoryModelLoadRequest"](model_name="m")
    asked.parameters["config"].CopyFrom(MESSAGES["ModelRepositoryParameter"](**value))
    async with grpc.aio.insecure_channel(bench.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad")(asked.SerializeToString())
    assert (refusal.value.code(), refusal.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)
    assert bench.control.asked == []


async def test_a_message_of_many_fields_is_refused_before_it_is_parsed(bench: Bench) -> None:
    """Settings are asked for without a key, too."""
    settings = {f"log_setting_{number}": 1 for number in range(MAX_MESSAGE // 16)}
    status, text = await refused(bench.client.update_log_settings(settings))
    assert status == "INVALID_ARGUMENT"
    assert text.startswith("the message is a LogSettingsRequest of ")
    assert f"; the limit is {MAX_MESSAGE}" in text


async def test_a_load_whose_call_is_cancelled_before_its_turn_is_not_made(bench: Bench) -> None:
    bench.control.gate.clear()
    first = asyncio.ensure_future(bench.client.load_model("m"))
    while not bench.control.asked:
        await asyncio.sleep(0)
    others = [asyncio.ensure_future(bench.client.load_model("m")) for _ in range(MAX_WAITING)]
    while bench.tenant.changes.asked <= MAX_WAITING:
        await asyncio.sleep(0)
    assert (await refused(bench.client.load_model("m")))[0] == "RESOURCE_EXHAUSTED"
    for each in others:
        each.cancel()
    while bench.tenant.changes.asked > 1:
        await asyncio.sleep(0)
    bench.control.gate.set()
    await first
    assert len(bench.control.asked) == 1


async def test_trace_settings_say_what_is_configured_and_change_nothing(bench: Bench) -> None:
    for model in (None, "m"):
        settings = await bench.client.get_trace_settings(model)
        found = {name: list(each.value) for name, each in settings.settings.items()}
        assert (found["trace_level"], found["trace_mode"]) == (["OFF"], ["opentelemetry"])
        same = {name: value if name == "trace_level" else value[0] for name, value in found.items()}
        assert await bench.client.update_trace_settings(model, {**same, "trace_rate": None}) == settings
        status, text = await refused(bench.client.update_trace_settings(model, {"trace_rate": "7"}))
        assert (status, text[:15]) == ("INVALID_ARGUMENT", 'trace_rate: "7"')
    assert (await refused(bench.client.get_trace_settings("n")))[0] == "NOT_FOUND"
    distant = bench.client.update_trace_settings(None, {"trace_rate": "7"}, headers={"via": "1.1 proxy"})
    assert (await refused(distant))[0] == "UNAUTHENTICATED"


async def test_repeated_credentials_are_ambiguous_for_settings_too(bench: Bench) -> None:
    async with grpc.aio.insecure_channel(bench.address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/TraceSetting")
        refusal = call(b"", metadata=(("authorization", "Bearer a"), ("authorization", "Bearer b")))
        assert await refusal.details() == "Authorization: given 2 times; expected once"
