"""What was moved and why; what each tenant needs, beside its share; and switching the autopilot."""

import asyncio
import time
from collections.abc import Mapping
from typing import Annotated

from fastapi import Query, Request, Response
from msgspec.structs import asdict

from ..accounts.usage import NOTHING, NS, DeviceTotals
from ..api.body import read_object
from ..api.dependencies import ServiceDep
from ..api.framework import json_response
from ..api.openapi import errors, request_body
from ..control.controlled_device import ControlledDevice
from ..control.controller import Controller
from ..errors import BadRequest, Unavailable
from ..facts import milliseconds
from ..observing import advice as advising
from ..observing.need import Counted, Need, counted, need
from ..observing.pilot import MODES, Mode, Pilot
from ..protocol.json_document import show
from . import schemas
from .dependencies import ControllerDep, ObserversDep, admin_router

router = admin_router("Autopilot")
advice_router = admin_router()


@router.get("/moves", response_model=schemas.Moves)
async def moves(controller: ControllerDep) -> Response:
    """The last 256 moves of granules, the newest first: who wanted them, why, and how long they took."""
    return json_response(schemas.Moves(list(controller.moves)))


@router.get("/autopilot", response_model=schemas.Autopilot)
async def autopilot(controller: ControllerDep, observers: ObserversDep) -> Response:
    """Whether it is on, what each tenant needed in the last window, and why tenants that miss their targets get nothing."""
    return json_response(_state(controller, observers.pilot))


@router.put(
    "/autopilot",
    response_model=schemas.Autopilot,
    responses=errors(413),
    openapi_extra=request_body(schemas.AutopilotMode, {"mode": "dry-run"}, required=True),
)
async def switch(service: ServiceDep, controller: ControllerDep, observers: ObserversDep, request: Request) -> Response:
    """Switch it until the server ends. It measures for some seconds before it moves anything."""
    given = await read_object(request, service.uploads)
    mode: Mode | None = next((each for each in MODES if given == {"mode": each}), None)
    if mode is None:
        expected = " or ".join(f'{{"mode": "{each}"}}' for each in MODES)
        raise BadRequest(f"the request body is {show(given)}; expected {expected}")
    observers.pilot.set_mode(mode)
    return json_response(_state(controller, observers.pilot))


def _state(controller: Controller, pilot: Pilot) -> schemas.Autopilot:
    tenants = {}
    for name, tenant in controller.tenants.items():
        held, need = controller.partition(name), pilot.needs.get(name)
        piloted = tenant.target_p99 is not None or tenant.min_granules is not None
        tenants[name] = schemas.Piloted(
            len(held.granules) if held else 0,
            pilot.own(name),
            tenant.min_granules or 1 if piloted else None,
            None if tenant.target_p99 is None else milliseconds(tenant.target_p99),
            shown_need(need) if need else None,
        )
    return schemas.Autopilot(pilot.mode, round(pilot.paused_for, 1), pilot.notes, tenants)


def shown_need(need: Need) -> schemas.Measured:
    """What was measured, in milliseconds."""
    p99 = None if need.p99 is None else milliseconds(need.p99)
    return schemas.Measured(
        round(need.seconds, 1), need.requests, round(need.busy, 3), milliseconds(need.queue), p99, need.turned_away
    )


_LEAST, _MOST = 0.1, 60.0
"""Seconds that may be asked for."""
_STEP = 0.25
"""Seconds between two looks at whether the server ends meanwhile."""


@advice_router.get("/advice", response_model=schemas.Advices)
async def advice(
    controller: ControllerDep,
    observers: ObserversDep,
    seconds: Annotated[
        str,
        Query(
            description="How long to measure; the answer takes as long.",
            json_schema_extra={"type": "number", "minimum": _LEAST, "maximum": _MOST, "default": 10.0},
        ),
    ] = "10",
) -> Response:
    """Measure for some seconds what each tenant needs, and say whether its share should be kept, or how much would do.

    Nothing is changed, and nothing is measured but what is counted anyway. `greenlane curve` measures a share beforehand, and
    the autopilot acts on what it finds.
    """
    length = _length(seconds)
    held = controller.counts
    before, beside_before = await _counted(controller), await controller.placements.states()
    totals_before = await observers.accountant.collect()
    ends = time.monotonic() + length
    while (left := ends - time.monotonic()) > 0:
        await asyncio.sleep(min(_STEP, left))
        if controller.state not in ("serving", "incomplete", "starting"):
            raise Unavailable(f"the server is {controller.state}")
    after, beside = await _counted(controller), await controller.placements.states()
    used = (await observers.accountant.collect()).less(totals_before).devices
    lends = {tenant.name: report.lending[0] for tenant, report in await controller.reports() if report.lending}
    tenants = {
        name: _advised(controller, device, name, before.get(name), after.get(name), held)
        for name in controller.tenants
        if (device := controller.device_of(name)) and name in device.held
    }
    needs = {name: need(before[name], after[name]) for name in before if name in after}
    for name, about in tenants.items():
        about.lending = advising.advise_lender(name, lends.get(name))
        if (found := beside.get(name)) and found.wide:
            wide_before = name in beside_before and beside_before[name].wide
            about.lending += advising.advise_borrower(wide_before or found.wide, found.wide, needs)
        elif about.verdict == "more":
            about.lending += advising.advise_neighbours(
                name, controller.tenants[name].burst, _neighbours(controller, name, needs)
            )
        about.bandwidth = _hog(controller, name, needs, used)
        if found and (fence := found.fence):
            about.bandwidth += advising.advise_fenced(name, fence, controller.tenants[name].target_p99)
            before_fence = beside_before[name].fence if name in beside_before else None
            if about.verdict == "more" and before_fence and name in needs:
                waited = fence.waits - before_fence.waits
                about.bandwidth += advising.advise_paced(controller.tenants[name], waited, needs[name].requests, fence.pcie)
    return json_response(schemas.Advices(length, tenants))


def _hog(controller: Controller, name: str, needs: Mapping[str, Need], used: Mapping[str, DeviceTotals]) -> list[str]:
    """About what a tenant draws that has no share of its device's memory bandwidth."""
    tenant, device = controller.tenants[name], controller.device_of(name)
    if tenant.memory_bandwidth is not None:
        return []
    there = used.get(device.name) if device else None
    if not (device and device.info.bandwidth and there and there.moved_in and name in there.tenants):
        return []
    theirs, moved_in = there.tenants[name], there.moved_in / NS
    moved = theirs.moved or NOTHING
    beside = [each for each in device.held if each != name and each in needs and needs[each].requests]
    return advising.advise_hog(
        name,
        moved.memory / moved_in,
        device.held[name].size / sum(device.info.granules),
        device.info.bandwidth.memory,
        beside,
        moved.has_much(theirs.estimated),
        len(device.held[name].granules),
    )


def _neighbours(controller: Controller, name: str, needs: Mapping[str, Need]) -> list[advising.Neighbour]:
    """The other tenants of a tenant's device."""
    device = controller.device_of(name)
    others = [each for each in (device.held if device else ()) if each != name]
    return [
        advising.Neighbour(each, needs[each].busy if each in needs else None, bool(controller.tenants[each].lend))
        for each in others
    ]


async def _counted(controller: Controller) -> dict[str, Counted]:
    """The counters of every tenant whose process answers."""
    reports = await controller.reports()
    now = time.monotonic()
    return {tenant.name: counted(report, now) for tenant, report in reports if not report.age}


def _advised(
    controller: Controller,
    device: ControlledDevice,
    name: str,
    before: Counted | None,
    after: Counted | None,
    held: Mapping[str, int],
) -> schemas.Advice:
    tenant, granules = controller.tenants[name], len(device.held[name].granules)
    share = advising.Share(
        granules, len(device.info.granules), device.info.granules[0], device.info.unit, tenant.min_granules or 1
    )
    found = None
    if before is None or after is None or held.get(name) != granules:
        why = "its share changed meanwhile" if before and after else "its process does not answer"
        said = advising.Advice("unknown", None, "none", f"{name}: {why}, so nothing was measured")
    else:
        found = need(before, after)
        said = advising.advise(name, found, share, tenant.target_p99)
    target = milliseconds(tenant.target_p99) if tenant.target_p99 else None
    return schemas.Advice(granules, device.name, target, *said, _measured(found) if found else None, [], [])


def _measured(found: Need) -> schemas.Needed:
    low, high = advising.p99_between(found)
    between = [milliseconds(low), None if high is None else milliseconds(high)] if found.requests else None
    return schemas.Needed(**asdict(shown_need(found)), p99_between_ms=between)


def _length(text: str) -> float:
    """The seconds of a request. Raises BadRequest."""
    try:
        length = float(text)
    except ValueError:
        length = 0.0
    if not _LEAST <= length <= _MOST:  # Also for what is no number.
        raise BadRequest(f"seconds: {show(text)}; expected a number from {_LEAST:g} to {_MOST:g}")
    return length
