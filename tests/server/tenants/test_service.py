"""`Service` finds a request's tenant and its state; `LocalFrontend` over a device side that the test plays."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest

from engines import DATATYPES, Signature, TensorSpec
from server.config.schema import Config, ModelsConfig
from server.config.server import ServerConfig
from server.config.tenant import TenantConfig
from server.errors import Conflict, Misdirected, NotFound, QueueFull, Unavailable, answer
from server.http.infer import Infer
from server.link import activity
from server.link.activity import ActivityPage
from server.link.messages import Done, Extent, Failure
from server.link.slots import Slot
from server.scheduling.lender import Lender, Neighbour
from server.tenants import publishing as tenants_publishing
from server.tenants.auth import digest
from server.tenants.catalog import UNLOADED, IndexEntry, ServedModel
from server.tenants.local_frontend import LocalFrontend, open_local
from server.tenants.service import Service, open_tenant
from tests.lanes import submit

SIGNATURE = Signature((TensorSpec("x", DATATYPES["FP32"], ("n",)),), ())
ACME = TenantConfig(name="acme", granules=1, models=("*",), queue=3, in_flight=1)
GLOBEX = TenantConfig(name="globex", granules=1, models=("*",), keys_sha256=(digest("globex-key"),))
CONFIG = Config(
    server=ServerConfig(default_tenant="acme"),
    models=ModelsConfig(repository=Path()),
    tenants={tenant.name: tenant for tenant in (ACME, GLOBEX)},
    source="test",
)

ELSEWHERE = r"^this connection belongs to {}; send requests of '{}' to the server's common port on another connection$"


class Device:
    """Records which requests were cancelled."""

    def __init__(self) -> None:
        self.cancelled: list[tuple[str, int, int]] = []

    def cancel(self, tenant: str, slot: int, serial: int) -> None:
        self.cancelled.append((tenant, slot, serial))


@pytest.fixture
def frontends() -> Iterator[dict[str, LocalFrontend]]:
    """Frontends of both tenants, not open yet."""
    made = {tenant.name: open_local(tenant) for tenant in (ACME, GLOBEX)}
    yield made
    for frontend in made.values():
        frontend.descriptors.close()


@pytest.fixture
async def frontend() -> AsyncIterator[LocalFrontend]:
    frontend = open_local(ACME)
    yield frontend
    frontend.close()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def served(name: str, version: str = "1", load: int = 1) -> ServedModel:
    return ServedModel(name, version, f"{name}/{version}#{load}", SIGNATURE, "fake", {})


def test_a_request_for_a_tenant_of_another_process_is_421(frontends: dict[str, LocalFrontend]) -> None:
    service = Service(CONFIG, [frontends["acme"].tenant])
    with pytest.raises(Misdirected, match=ELSEWHERE.format("tenant 'acme'", "globex")) as caught:
        service.tenant("Bearer globex-key", None)
    assert answer(caught.value, "-").status == 421
    assert service.tenant(None, None).name == "acme"


def test_the_421_names_the_port_of_a_tenant_that_has_one(frontends: dict[str, LocalFrontend]) -> None:
    tenants = {**CONFIG.tenants, "globex": GLOBEX.model_copy(update={"port": 8001})}
    with pytest.raises(Misdirected, match=r"send requests of 'globex' to the server's common port, or to 8001, its own, on"):
        Service(CONFIG.model_copy(update={"tenants": tenants}), [frontends["acme"].tenant]).tenant("Bearer globex-key", None)


def test_queue_full_names_the_setting_that_limits_the_queue(frontends: dict[str, LocalFrontend]) -> None:
    full = CONFIG.tenants["acme"].model_copy(update={"queue": 0, "in_flight": 0})
    lane = open_tenant(full, frontends["acme"].link, frontends["acme"]).lane
    with pytest.raises(QueueFull, match=r"0 requests may wait, and as many do \(tenants\.acme\.queue\)$"):
        lane.admission.check_room()


@pytest.mark.parametrize("headers", [(None, None), (None, "acme"), ("Bearer globex-key", "globex")])
def test_in_a_process_without_tenants_every_identified_request_is_421(headers: tuple[str | None, str | None]) -> None:
    service = Service(CONFIG, tenants=[])
    with pytest.raises(Misdirected, match=ELSEWHERE.format("no tenant", "(acme|globex)")):
        service.tenant(*headers)
    assert repr(service) == "<Service starting, of no tenant>"


def test_a_service_is_ready_only_while_serving() -> None:
    service = Service(CONFIG, [])
    ready = {}
    for state in ("starting", "serving", "draining", "lost", "closed"):
        service.set_state(state)
        ready[state] = service.unready is None
    assert [state for state, is_ready in ready.items() if is_ready] == ["serving"]


async def test_a_tenant_s_own_process_is_not_ready_while_none_of_its_models_is(frontend: LocalFrontend) -> None:
    """Or while it is not known which there are; but if all were unloaded on request, or it asks for none."""
    service = Service(CONFIG, [frontend.tenant])
    service.set_state("serving")
    assert service.unready
    frontend.listed()
    assert service.unready is None
    problem = IndexEntry("m", "", "UNAVAILABLE", "broken")
    for served_models, problems, ready in (
        ([], [problem], False),
        ([served("m")], [], True),
        ([], [IndexEntry("m", "", "UNAVAILABLE", UNLOADED)], True),
        ([served("m")], [problem], True),
    ):
        await frontend.publish("m", served_models, problems)
        assert service.unready == (None if ready else "'acme' is served no model; POST /v2/repository/index says why")
    frontend.tenant.catalog.lose()
    assert service.unready
    service.set_state("incomplete")
    assert service.unready == "no tenant is served a model; POST /v2/repository/index says why"


async def test_releasing_a_request_cancels_it_on_the_device_and_drained_waits_for_its_end(frontend: LocalFrontend) -> None:
    device, lane = Device(), frontend.tenant.lane
    frontend.open(device)
    slot = lane.take_slot()
    submit(lane, slot, "m/1#1", ((1,),))
    lane.release(slot)
    assert device.cancelled == [("acme", slot.index, 1)]
    emptied = asyncio.ensure_future(frontend.drained())
    await settle()
    assert not emptied.done()
    frontend.link.completions.put(Done(slot.index, (), None, 1, 2))
    frontend.link.completions.ring()
    await emptied


async def test_relink_moves_the_lane_and_the_device_side_to_a_new_link(frontend: LocalFrontend) -> None:
    frontend.open(Device())
    lane, link, before = frontend.tenant.lane, frontend.link, frontend.descriptors
    slot = lane.take_slot()
    answer = submit(lane, slot, "m/1#1", ((1,),))
    relinked = asyncio.ensure_future(frontend.relink(30))
    await settle()
    assert frontend.link is link
    link.completions.put(Done(slot.index, (), None, 1, 2))
    link.completions.ring()
    free = await relinked
    assert (await answer).slot == slot.index
    assert frontend.link is not link
    assert frontend.link.arena.memory is link.arena.memory
    lane.release(slot)
    free()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(before.tickets)
    frontend.link.tickets.open()
    submit(lane, lane.take_slot(), "m/1#1", ((1,),))
    assert frontend.link.tickets.poll()


async def test_relink_raises_conflict_and_keeps_the_link_when_work_does_not_end(frontend: LocalFrontend) -> None:
    frontend.open(Device())
    lane, link = frontend.tenant.lane, frontend.link
    submit(lane, lane.take_slot(), "m/1#1", ((1,),))
    counts = []
    for _ in range(3):
        text = r"tenant acme: an inference has been running for 0\.001 s; its link was not replaced"
        with pytest.raises(Conflict, match=text):
            await frontend.relink(0.001)
        gc.collect()  # An error's traceback has the new link.
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] == counts[2], "new links that are not used are closed"
    assert frontend.link is link


async def test_fail_in_flight_ends_what_runs_and_what_waits_and_bodies_that_arrive(frontend: LocalFrontend) -> None:
    frontend.open(Device())
    lane = frontend.tenant.lane
    slot = lane.take_slot()
    answer = submit(lane, slot, "m/1#1", ((1,),))
    frontend.fail_in_flight("gone", queued=False)
    with pytest.raises(Unavailable, match="gone"):
        await answer
    lane.release(slot)
    slot = lane.take_slot()
    answer = submit(lane, slot, "m/1#1", ((1,),))
    frontend.fail_in_flight("gone again")
    with pytest.raises(Unavailable, match="gone again"):
        await answer
    lane.release(slot)
    assert lane.admission.refusing == "gone again"
    assert lane.slots.statistics().used == 0


async def test_publish_serves_new_models_and_waits_for_requests_of_replaced_ones(frontend: LocalFrontend) -> None:
    frontend.open(Device())
    catalog, lane = frontend.tenant.catalog, frontend.tenant.lane
    frontend.announce("m")
    assert [entry.state for entry in catalog.index()] == ["LOADING"]
    await frontend.publish("m", [served("m"), served("m", "2")], [])
    slot = lane.take_slot()
    submit(lane, slot, "m/1#1", ((1,),))
    publishing = asyncio.ensure_future(
        frontend.publish("m", [served("m", load=2)], [IndexEntry("m", "2", "UNAVAILABLE", "broken")])
    )
    await settle()
    assert catalog.find("m").key == "m/1#2"
    assert not publishing.done(), "a request for what was replaced is in flight"
    frontend.link.completions.put(Done(slot.index, (), None, 1, 2))
    frontend.link.completions.ring()
    await settle()
    assert not publishing.done(), "its answer is still being read"
    lane.release(slot)
    await publishing


async def test_answers_in_parts_of_a_replaced_model_end_after_a_while(
    frontend: LocalFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants_publishing, "FINISH_SECONDS", 0.01)
    frontend.open(Device())
    lane, ends = frontend.tenant.lane, []
    await frontend.publish("m", [served("m")], [])

    def on_end(slot: Slot, end: object) -> None:
        ends.append(end)
        if isinstance(end, Unavailable):
            lane.release(slot)

    taken = [lane.take_slot() for _ in range(2)]
    for slot in taken:
        lane.submit(slot, "m/1#1", ((1,),), partial(on_end, slot), in_parts=True)
    frontend.link.completions.put(Done(taken[0].index, (Extent((1,), 0, 4),), None, 1, 2))
    frontend.link.completions.ring()
    publishing = asyncio.ensure_future(frontend.publish("m", [], []))
    while len(ends) < 3:
        await asyncio.sleep(0.001)
    assert [str(end) for end in ends[1:]] == [
        "model 'm' was unloaded or replaced while it answered; send the request again"
    ] * 2
    assert not publishing.done(), "the worker has not freed what it keeps of them"
    for slot in reversed(taken):  # The one that is in flight first: then the ticket that frees the other is launched.
        frontend.link.completions.put(Done(slot.index, (), Failure("expired", ""), 1, 2))
        frontend.link.completions.ring()
        await settle()
    await publishing
    assert lane.slots.statistics().used == 0


async def test_report_has_served_models_pending_requests_and_index(frontend: LocalFrontend) -> None:
    frontend.open(Device())
    lane = frontend.tenant.lane
    await frontend.publish("m", [served("m")], [])
    for _ in range(3):
        submit(lane, lane.take_slot(), "m/1#1", ((1,),))
    report = await frontend.report()
    assert [(item.name, item.version, item.pending) for item in report.served] == [("m", "1", 2)]
    assert (report.lane.waiting, report.lane.in_flight, report.slots.used) == (2, 1, 3)
    assert [entry.state for entry in report.index] == ["READY"]


async def test_a_model_is_not_ready_while_its_inferences_are_refused(frontend: LocalFrontend) -> None:
    tenant = frontend.tenant
    frontend.listed()
    await frontend.publish("m", [served("m")], [IndexEntry("m", "2", "UNAVAILABLE", "broken")])
    assert tenant.callable("m").version == "1"
    frontend.suspend("the device process has ended")
    with pytest.raises(Unavailable, match=r"^the device process has ended$"):
        tenant.callable("m")
    with pytest.raises(NotFound):
        tenant.callable("n")
    ended = "the device process has ended"
    refused = [IndexEntry("m", "1", "UNAVAILABLE", ended), IndexEntry("m", "2", "UNAVAILABLE", "broken")]
    assert tenant.index() == (await frontend.report()).index == refused
    frontend.suspend("")
    assert [entry.state for entry in tenant.index()] == ["READY", "UNAVAILABLE"]
    frontend.refuse("the server is stopping")
    with pytest.raises(Unavailable, match=r"^the server is stopping$"):
        tenant.callable("m")


async def test_a_refusing_frontend_gives_the_reason(frontend: LocalFrontend) -> None:
    frontend.refuse("the server is draining")
    frontend.set_cores(frozenset({0}))
    with pytest.raises(Unavailable, match=r"^the server is draining$"):
        frontend.tenant.lane.take_slot()


async def test_the_event_loop_runs_on_a_single_tenants_cores_until_its_frontend_closes() -> None:
    before = os.sched_getaffinity(0)
    frontend = open_local(ACME, only=True)
    for core in (min(before), max(before)):
        frontend.set_cores(frozenset({core}))
        assert os.sched_getaffinity(0) == {core}
    frontend.set_cores(None)
    frontend.close()
    assert os.sched_getaffinity(0) == before


async def test_cores_that_the_event_loop_cannot_use_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    frontend = open_local(ACME, only=True)
    frontend.set_cores(frozenset({100_000}))
    frontend.close()
    assert caplog.messages == ["the event loop cannot run on cores [100000]: Invalid argument"]


async def test_a_closed_frontend_has_no_reader_and_no_descriptors() -> None:
    frontend = open_local(ACME)
    frontend.open(Device())
    event = frontend.link.completions.event
    frontend.close()
    assert not asyncio.get_running_loop().remove_reader(event)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(event)


def test_a_service_without_heartbeats_of_the_supervisor_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a quarter of `server.watchdog`; where all is one process, no heartbeat is expected."""
    now = 100.0
    monkeypatch.setattr("server.tenants.service.time.monotonic", lambda: now)
    config = CONFIG.model_copy(update={"server": ServerConfig(watchdog=20.0)})
    services = [Service(CONFIG.model_copy(update={"server": ServerConfig(watchdog=seconds)}), []) for seconds in (20.0, 0.0)]
    for service in (*services, alone := Service(config, [])):
        service.set_state("serving")
    for service in services:
        service.heartbeat()
    now = 105.0
    assert [service.unready for service in (*services, alone)] == [None, None, None]
    now = 106.0
    assert [service.unready for service in (*services, alone)] == ["the supervisor has been silent for 6 s", None, None]
    services[0].heartbeat()
    assert services[0].unready is None
    services[0].config = CONFIG.model_copy(update={"server": ServerConfig(strict_readiness=True)})
    services[0].set_state("incomplete")
    reason = "not every model could be loaded, and server.strict_readiness asks for all of them; "
    assert services[0].unready == reason + "POST /v2/repository/index says which of a tenant's, the log which of all"
    services[0].set_state("draining")
    assert services[0].unready == "the server is draining"


def test_a_tenant_identified_by_routing_is_not_identified_again(
    frontends: dict[str, LocalFrontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(CONFIG, [frontends["acme"].tenant])
    infer, identified = Infer(lambda: service), []
    monkeypatch.setattr(service.tenancy, "identify", lambda *_: identified.append(ACME) or ACME)
    path, headers = b"/v2/models/m/infer", {b"x-tenant": b"acme"}
    assert infer.resolve("POST", path, headers, "acme").tenant is frontends["acme"].tenant
    assert identified == []
    for unknown in (None, "(shared)", "globex"):
        assert infer.resolve("POST", path, headers, unknown).tenant is frontends["acme"].tenant
    assert identified == [ACME] * 3


@pytest.mark.parametrize(("burst", "kind"), [(None, Neighbour), (2, Lender)])
def test_a_tenant_watches_what_lending_costs_only_where_one_borrows(
    frontends: dict[str, LocalFrontend], burst: int | None, kind: type[Neighbour]
) -> None:
    lending, other = (each.model_copy(update=keys) for each, keys in ((ACME, {"lend": 0.001}), (GLOBEX, {"burst": burst})))
    tenants = {"acme": lending, "globex": other}
    pages = activity.open_pages(tenants)
    page = pages["acme"]
    tenant = frontends["acme"].tenant
    tenant.use_page(tenants, page)
    assert type(tenant.lane.admission.neighbour) is kind
    assert bool(ActivityPage(page).processes[0][activity.LENDS]) == (kind is Lender)
    for each in pages.values():
        os.close(each)
