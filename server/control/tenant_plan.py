"""Which granules change hands by a reload: those of tenants that come or go, or have another share in the file now. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from partitions import DoesNotFit, Move
from partitions.plan import Granules, assign

from ..config.changes import arrivals, removals, resized
from ..config.schema import Config
from ..config.tables import ConfigError
from ..config.tenant import FENCES
from ..errors import Conflict
from .controlled_device import ControlledDevice
from .descriptions import NOT_OPENED

UNCHANGED = "nothing has changed"


@dataclass(slots=True)
class TenantPlan:
    """Tenants that `come`, with their device and granules there; those that `go`, with their device; and the `moves` of tenants
    that stay, one for each device with a share that changes, to these `counts`.
    """

    come: dict[str, tuple[ControlledDevice, Granules]] = field(default_factory=dict)
    go: dict[str, ControlledDevice] = field(default_factory=dict)
    moves: list[tuple[ControlledDevice, Move]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def concerns_shares(old: Config, new: Config) -> bool:
    """Whether a tenant gets or loses granules."""
    return bool(arrivals(old, new) or removals(old, new) or resized(old, new))


def plan(old: Config, new: Config, devices: Sequence[ControlledDevice]) -> TenantPlan:
    """Who is to have which granules after a reload. Tenants whose share is as it was in the file keep what they have now.

    Those that come may have free granules, and those of tenants that go or shrink. Raises Conflict with the
    arithmetic of every device where that is too much, and for a device that is not open.
    """
    found, problems = TenantPlan(), list[str]()
    gone, coming, changed = removals(old, new), arrivals(old, new), resized(old, new)
    for device in devices:
        there = [name for name in coming if new.device_of(name) == device.name]
        leaving = [name for name in gone if name in device.runtimes]
        other = [name for name in changed if name in device.runtimes]
        found.go |= dict.fromkeys(leaving, device)
        if not there and not other:
            problems += _bandwidth(old, new, device)
            continue
        if device.info is NOT_OPENED:
            problems.append(f"device {device.name}: it had no tenant at the start, so it is not open; restart the server")
            continue
        stay = [name for name in device.held if name not in gone]
        try:
            _plan_device(found, new, device, stay, there, other)
        except ConfigError as error:
            problems += error.problems
        except DoesNotFit as error:
            problems.append(_arithmetic(error, device, devices, leaving))
    if problems:
        raise Conflict("\n".join([f"{UNCHANGED}, as the tenants do not fit:", *problems]))
    return found


def _bandwidth(old: Config, new: Config, device: ControlledDevice) -> list[str]:
    """Why the shares of bandwidth of a device's tenants are too much, if one of these shares has changed."""
    homes = {name: home for name, home in device.homes.items() if name in new.tenants}
    same = all(getattr(old.tenants[name], key) == getattr(new.tenants[name], key) for name in homes for key in FENCES)
    return [] if same else new.too_much(homes, device.info.granules, device.info.bandwidth)


def _plan_device(
    found: TenantPlan, new: Config, device: ControlledDevice, stay: Sequence[str], coming: Sequence[str], changed: Sequence[str]
) -> None:
    """Add one device to the plan. Raises ConfigError for a share that is not a number of its granules, and DoesNotFit."""
    unit, sizes = device.info.unit, device.info.granules
    new.fit(unit, sizes, [*stay, *coming])
    before = {name: device.held[name].granules for name in stay}
    counts = {name: new.tenants[name].share(unit, sizes) for name in (*changed, *coming)}
    kept = {name: len(granules) for name, granules in before.items()}
    orders = {name: order for name, order in device.orders.items() if name in before}
    after = assign(len(sizes), before, {**kept, **counts}, orders)
    if problems := new.too_much(after, sizes, device.info.bandwidth):
        raise ConfigError(problems)
    found.come |= {name: (device, after[name]) for name in coming}
    move = Move(before, {name: after[name] for name in before})
    if move.movers:
        found.moves.append((device, move))
    found.counts |= {name: counts[name] for name in changed}


def _arithmetic(
    error: DoesNotFit, device: ControlledDevice, devices: Sequence[ControlledDevice], leaving: Sequence[str]
) -> str:
    which = f"device {device.name}: " if len(devices) > 1 else ""
    without = f"; that is without {', '.join(leaving)}, which would go" if leaving else ""
    return f"{which}{error}{without}. Tenants that the file does not change keep what they have now: GET /admin/partitions"
