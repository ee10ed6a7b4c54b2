"""Whether a move of granules or of a tenant that was asked for can be tried. Pure: nothing here awaits or blocks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from partitions.plan import Granules

from ..errors import BadRequest, Conflict, Unavailable
from ..protocol.json_document import show
from .controlled_device import ControlledDevice
from .descriptions import NOT_OPENED


class TransferPlan(NamedTuple):
    """The devices that a tenant moves between, and the granules that it gets on the second."""

    source: ControlledDevice
    target: ControlledDevice
    granules: Granules


def check_counts(counts: Mapping[str, object], tenants: Collection[str]) -> None:
    """Check the numbers of granules that tenants are to have. Raises BadRequest."""
    for name, count in counts.items():
        if name not in tenants:
            raise BadRequest(f"{name}: there is no such tenant; there are {', '.join(tenants)}")
        _check_count(name, count)


def plan_transfer(
    devices: Sequence[ControlledDevice],
    tenant: str,
    to: str,
    count: int | None,
    state_of: Callable[[ControlledDevice], str],
    possible: bool,
) -> TransferPlan | None:
    """A known tenant's move to another device, onto so many granules or as many as it has; None if it is there with as many.

    `state_of` returns the state of a device; `possible` is whether this server can move tenants at all. Raises BadRequest,
    DoesNotFit with the arithmetic, Conflict for a device that is not open, Unavailable while one of the devices does not serve.
    """
    source = next(device for device in devices if tenant in device.runtimes)
    target = next((device for device in devices if device.name == to), None)
    if target is None:
        raise BadRequest(f"device: {show(to)} is not a device; there are {', '.join(device.name for device in devices)}")
    there = len(source.held[tenant].granules)
    count = there if count is None else count
    _check_count("granules", count)
    if target is source and count == there:
        return None
    if target is source:
        raise BadRequest(f"tenant {tenant} is on device {to} already; PUT /admin/partitions changes its granules")
    for device in (source, target):
        if (state := state_of(device)) not in ("serving", "incomplete"):
            raise Unavailable(f"device {device.name} is {state}; move tenant {tenant} when both devices serve")
    if not (possible and source.adopts and target.adopts):
        raise BadRequest(
            f"tenant {tenant} cannot move while it is served: on cores each tenant's process has its own device side; "
            f"set tenants.{tenant}.device and restart the server"
        )
    if target.info is NOT_OPENED:
        raise Conflict(f"device {to}: it had no tenant at the start, so it is not open; give it one, and restart the server")
    return TransferPlan(source, target, target.plan({tenant: count}).after[tenant])


def _check_count(name: str, count: object) -> None:
    """Raises BadRequest."""
    if type(count) is not int or count < 1:
        raise BadRequest(f"{name}: {show(count)} granules; expected an integer of at least 1")
