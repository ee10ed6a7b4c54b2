"""The frontend of a tenant on two devices, with the test at the other end of its channel."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from engines import DATATYPES, Signature, TensorSpec
from server.config.tenant import TenantConfig
from server.errors import Unavailable
from server.processes.remote.spread_frontend import DeviceSides, SpreadFrontend, open_spread
from server.tenants.catalog import ModelVersion
from tests.fakes import PATIENCE

from .test_remote_frontend import Device, Process

FP32 = DATATYPES["FP32"]
SIGNATURE = Signature((TensorSpec("x", FP32, ("n",)),), (TensorSpec("y", FP32, ("n",)),))
ENDED = "the process of device 0 has ended and is being started again"


@pytest.fixture
async def frontend() -> AsyncIterator[SpreadFrontend]:
    frontend = open_spread(TenantConfig(name="acme", device=("0", "1"), granules=1, models=("*",)), ["0", "1"])
    yield frontend
    frontend.close()


def model(name: str, load: int) -> ModelVersion:
    return ModelVersion(name, "1", f"{name}/1#{load}", SIGNATURE, "onnxruntime_onnx", {})


def published(process: Process) -> list[dict[str, dict[str, str]]]:
    return [keys for *_, keys in process.of("publish")]


async def test_its_links_lead_to_one_memory(frontend: SpreadFrontend) -> None:
    first, second = frontend.spread.values()
    assert set(first[:4]).isdisjoint(second[:4])
    assert os.fstat(first.memory).st_ino == os.fstat(second.memory).st_ino
    before = frontend.spread
    free = frontend.renew()
    assert all(before[name] != each for name, each in frontend.spread.items())
    assert frontend.descriptors == frontend.spread["0"]
    free()
    for each in before.values():
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(each.arena)


async def test_the_process_and_its_replacement_are_notified_of_a_device_that_ends(frontend: SpreadFrontend) -> None:
    zero, one = frontend.members.values()
    process = Process()
    channel = await process.meet(frontend)
    await zero.publish("m", [model("m", 4)], [])
    await one.publish("m", [model("m", 9)], [])
    await zero.publish("n", [model("n", 5)], [])
    assert [each.key for each in one.served()] == ["m/1#9"], "of this device"
    process.heard.clear()
    zero.fail_in_flight(ENDED)
    await frontend.drained()
    assert process.heard[0] == ("fail_in_flight", ENDED, True, "0")
    [(name, served, problems, _)] = process.of("publish")
    assert (name, served, problems[0].reason) == ("n", [], ENDED), "only device 0 served it"
    process.close()
    await channel.closed.wait()
    frontend.renew()()
    process = Process()
    channel = await process.meet(frontend)
    assert published(process) == [{"m/1#2": {"1": "m/1#9"}}, {}]
    assert [each.devices for (each,) in process.of("follow")] == [{"0": ENDED}] * 2
    process.close()
    channel.close()


async def test_a_device_that_is_started_again_gets_a_new_link(frontend: SpreadFrontend) -> None:
    process, before = Process(), frontend.spread
    channel = await process.meet(frontend)
    process.answers["relink"] = True
    (await frontend.members["1"].relink())()
    [(_, _, device)] = process.of("relink")
    assert device == "1"
    assert frontend.spread["0"] == before["0"]
    assert frontend.spread["1"] != before["1"]
    process.close()
    channel.close()


async def test_helpers_learn_only_whether_any_device_serves(frontend: SpreadFrontend) -> None:
    lead, helper = Process(), Process()
    channels = await lead.meet(frontend), await helper.join(frontend, 2)
    frontend.members["0"].suspend("stuck")
    frontend.members["1"].suspend("stuck too")
    frontend.members["0"].suspend("")
    await frontend.drained()
    assert [each.suspended for (each,) in helper.of("follow")][2:] == ["", "stuck", ""]
    followed = [each.devices for (each,) in lead.of("follow")][2:]
    assert followed == [{"0": "stuck"}, {"0": "stuck", "1": "stuck too"}, {"1": "stuck too"}]
    for end in (lead, helper, *channels):
        end.close()


async def test_what_both_load_on_request_is_published_once(frontend: SpreadFrontend) -> None:
    process = Process()
    channel = await process.meet(frontend)
    members = list(frontend.members.values())
    zero, one = members
    with zero.loading("m"), one.loading("m"):
        assert await asyncio.gather(*(member.agree("m", []) for member in members)) == ["", ""]
        await asyncio.gather(*(member.publish("m", [model("m", at)], []) for at, member in enumerate(members, 4)))
    assert published(process) == [{"m/1#1": {"0": "m/1#4", "1": "m/1#5"}}]
    process.close()
    channel.close()


async def test_what_cannot_be_loaded_on_one_device_is_served_on_none(frontend: SpreadFrontend) -> None:
    zero, one = frontend.members.values()
    with one.loading("m"):
        with pytest.raises(Unavailable), zero.loading("m"):
            raise Unavailable("no memory")
        assert await one.agree("m", []) == "device 0: no memory"


def test_a_cancellation_reaches_every_device() -> None:
    devices = [Device(), Device()]
    DeviceSides(devices).cancel("acme", 3, 14)
    assert [each.asked for each in devices] == [[("acme", 3, 14)]] * 2


async def test_what_a_device_had_published_when_it_ended_is_not_served_by_it_afterwards(frontend: SpreadFrontend) -> None:
    """It waited for another publication of the model, which waits for requests of the versions that it replaces."""
    zero, one = frontend.members.values()
    process = Process()
    channel = await process.meet(frontend)
    process.gates["publish"] = asyncio.Event()
    publishing = [asyncio.ensure_future(one.publish("m", [model("m", 9)], []))]
    await process.hears("publish")
    publishing.append(asyncio.ensure_future(zero.publish("m", [model("m", 4)], [])))
    await asyncio.sleep(0)
    zero.fail_in_flight(ENDED)
    process.gates["publish"].set()
    assert await asyncio.gather(*publishing) == [True, False]
    assert published(process)[-1] == {"m/1#1": {"1": "m/1#9"}}
    assert zero.served() == []
    await zero.publish("m", [model("m", 5)], [])
    assert published(process)[-1] == {"m/1#2": {"0": "m/1#5", "1": "m/1#9"}}, "what the next process publishes is served"
    process.close()
    channel.close()


async def test_what_a_device_had_agreed_to_and_published_when_it_ended_is_not_served_by_it(frontend: SpreadFrontend) -> None:
    """It waited for the other device, which publishes it as well."""
    zero, one = frontend.members.values()
    process = Process()
    channel = await process.meet(frontend)
    with one.loading("m"):
        with suppress(Unavailable), zero.loading("m"):
            assert await asyncio.gather(zero.agree("m", []), one.agree("m", [])) == ["", ""]
            publishing = [asyncio.ensure_future(zero.publish("m", [model("m", 4)], []))]
            await asyncio.sleep(0)
            zero.fail_in_flight(ENDED)
            raise Unavailable(ENDED)
        publishing.append(asyncio.ensure_future(one.publish("m", [model("m", 9)], [])))
        await asyncio.wait_for(asyncio.gather(*publishing), PATIENCE)
    assert published(process)[-1] == {"m/1#1": {"1": "m/1#9"}}
    assert zero.served() == []
    process.close()
    channel.close()


async def test_a_publication_of_a_device_that_ended_does_not_wait_for_ever(frontend: SpreadFrontend) -> None:
    zero, one = frontend.members.values()
    with one.loading("m"), zero.loading("m"):
        assert await asyncio.gather(zero.agree("m", []), one.agree("m", [])) == ["", ""]
        publishing = asyncio.ensure_future(zero.publish("m", [model("m", 4)], []))
        await asyncio.sleep(0)
        zero.fail_in_flight(ENDED)
    assert not await asyncio.wait_for(publishing, PATIENCE)
