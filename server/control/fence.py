"""What each tenant with a share of bandwidth is held to while others of its device are at work, and where. Pure arithmetic."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, NamedTuple

from msgspec import Meta

from partitions.base import Bandwidth
from partitions.health import cores_of
from partitions.plan import Granules
from partitions.resctrl import CoreShare, Held

from ..config.bandwidth import in_words, own_part, rate, whole
from ..config.tenant import FENCES, TenantConfig
from ..facts import Fact


class Fence(NamedTuple):
    """What holds one tenant: bytes a second of the device's `memory` and over PCIe, each way; 0 where nothing does.

    While one of the `neighbours` is at work, works that draw more of the memory run on the narrow placement, which has these
    granules of the tenant's own; () for none, as where its home cannot draw more. They begin when what is `paced` allows, bytes
    a second of memory, or at once for 0, where these granules draw no more. `notes` say why something is not made, and `cores`
    how the tenant's cores are held, which the control plane sees to.
    """

    neighbours: tuple[str, ...]
    memory: int = 0
    granules: Granules = ()
    pcie: int = 0
    notes: tuple[str, ...] = ()
    cores: str = ""
    paced: int = 0


class Narrowing(NamedTuple):
    """What was seen of a tenant's models where they are held: bytes a second that a unit draws there at most, 0 for all that
    it can, and whether that has to be a `single` granule, as one of them slows works of others, or is tried for that.
    """

    unit: int = 0
    single: bool = False


class FencedModel(Fact):
    """What is known of a model of a fenced tenant; 0 for what is not."""

    model: Annotated[str, Meta(examples=["resnet/1"])]
    moved: Annotated[
        int,
        "Bytes of the device's memory that an inference moves, measured, or guessed from its tensors.",
    ]
    home_ms: Annotated[float, "What one takes on all of the tenant's granules, as of late."]
    narrow_ms: Annotated[float, "What one takes on the granules where it is held."]
    anyway: Annotated[bool, "Whether it is held whatever it moves: with `slows`, and while that is tried."] = False
    slows: Annotated[
        float,
        "How many times as long inferences of others take beside it on all of the tenant's granules, at least: "
        "why it is held. 0 for a model that is not held for that.",
    ] = 0.0


class FencedTenant(Fact):
    """What holds a tenant back while others of its device are at work."""

    memory_bandwidth: Annotated[int, "The most that it draws of the device's memory then, in bytes a second; 0: all there is."]
    granules: Annotated[Granules, "Where works run then that would draw more; empty if there is no such placement."]
    launches: Annotated[int, "Inferences that ran there so far."]
    pcie: Annotated[int, "The most bytes a second that it moves over PCIe then, each way; 0: all there is."]
    waits: Annotated[int, "Inferences that started later for that so far."]
    notes: Annotated[list[str], "What does not hold it, or need not, and why."]
    problems: Annotated[list[str], "What could not be made."]
    models: Annotated[list[FencedModel], "Those that are ready on these granules."]
    cores: Annotated[str, "How its cores are held at any time, by resctrl; empty where they are not."] = ""
    moved: Annotated[int | None, "Bytes of memory that its cores have moved since then; null where that is not counted."] = None
    paced: Annotated[bool, "Whether works on these granules begin no sooner than `memory_bandwidth` allows."] = False


def core_shares(
    tenants: Mapping[str, TenantConfig], homes: Mapping[str, Granules], sizes: Sequence[int], address: str
) -> dict[str, CoreShare]:
    """What is to hold the cores of tenants with a `memory_bandwidth` on a device with this address: none that is no cores, or
    has one tenant.
    """
    cores = cores_of(address)
    found = {}
    for name, home in homes.items():
        most = tenants[name].memory_bandwidth
        if cores and len(homes) > 1 and most is not None:
            part = own_part(home, sizes) if most == "auto" else most
            found[name] = CoreShare(tuple(cores[granule] for granule in home), part)
    return found


def plan_fences(
    tenants: Mapping[str, TenantConfig],
    homes: Mapping[str, Granules],
    sizes: Sequence[int],
    unit: str,
    moves: Bandwidth | None,
    cores: Mapping[str, Held] = MappingProxyType({}),
    seen: Mapping[str, Narrowing] = MappingProxyType({}),
) -> dict[str, Fence]:
    """The fence of each tenant of a device that asks for one. The device has granules of these sizes in `unit`s, and `homes`
    are those of each tenant; `cores` says how the host holds these where they are cores, and `seen` what is known of models.

    A narrow placement has the first granules of its home, as many as cannot draw more than the tenant may; one at least. Once
    it was seen what models draw there, it has as many as fill the tenant's share, and works are paced to that. Where the home
    cannot draw more or is one granule, only a tenant that borrows has one, of the whole home.
    """
    plans = {}
    for name, home in homes.items():
        if (tenant := tenants[name]).fenced:
            neighbours = tuple(other for other in homes if other != name)
            fence = _fence(tenant, neighbours, home, sizes, unit, moves, name in cores, seen.get(name, Narrowing()))
            held = cores.get(name, Held())
            plans[name] = fence._replace(cores=held.how, notes=(*fence.notes, *held.notes))
    return plans


def _fence(
    tenant: TenantConfig,
    neighbours: tuple[str, ...],
    home: Granules,
    sizes: Sequence[int],
    unit: str,
    moves: Bandwidth | None,
    on_cores: bool,
    seen: Narrowing,
) -> Fence:
    if not neighbours:
        return Fence((), notes=("no other tenant is on its device, so nothing holds it",))
    units = [sizes[granule] for granule in home]
    memory, pcie = (rate(tenant, key, own_part(home, sizes), whole(key, moves)) for key in FENCES)
    notes = list(_unknown(tenant, moves, on_cores, unit))
    granules: Granules = ()
    paced = 0
    if memory and moves:
        count = _fitting(units, moves.unit, memory)
        if seen.unit and not seen.single and count < len(home):
            most = _fitting(units, min(seen.unit, moves.unit), memory)  # One more draws more.
            count, paced = min(most + 1, len(home) - 1), memory
        granules = tuple(home[: max(1, 1 if seen.single else count)])
        drawn, all_drawn = (sum(each) * moves.unit for each in (units[: len(granules)], units))
        here = f"{in_words(all_drawn)} at most, and its memory_bandwidth is {in_words(memory)}"
        borrows = tenant.burst is not None
        if all_drawn <= memory and not borrows:
            notes.append(f"it needs no narrower placement: its {sum(units)} {unit}s draw {here}")
            granules = ()
        elif len(home) == 1 and not borrows:
            notes.append(f"it has one granule, which cannot be narrowed: its {sum(units)} {unit}s draw {here}")
            memory, granules = 0, ()
        elif drawn > memory and len(granules) == 1 and not paced:
            what = f"its memory_bandwidth is {in_words(memory)}, but one granule ({units[0]} {unit}s) draws {in_words(drawn)}"
            notes.append(f"{what} at most: works that draw more run on that, and are held to that")
            memory = drawn if len(home) == 1 else memory  # Else works would only go from its home to the same granule.
    return Fence(neighbours, memory, granules, pcie, tuple(notes), paced=paced if granules else 0)


def _fitting(units: Sequence[int], drawn: int, most: int) -> int:
    """How many of the first granules with so many units draw at most this together, where each unit draws so much."""
    return next((count for count in range(len(units), 0, -1) if sum(units[:count]) * drawn <= most), 0)


def _unknown(tenant: TenantConfig, moves: Bandwidth | None, on_cores: bool, unit: str) -> Iterator[str]:
    for key in FENCES:
        if getattr(tenant, key) is not None and not whole(key, moves) and not (on_cores and key == "memory_bandwidth"):
            without = key == "pcie" and unit == "core"
            why = "only a GPU's is held, and it has cores" if without else "what this device moves is not known"
            yield f"its {key} holds nothing back: {why}"


def describe(fence: Fence, unit: str, sizes: Sequence[int], moves: Bandwidth | None) -> Iterator[str]:
    """Lines that say what of a fence is enforced, and by which means."""
    if fence.memory and moves and fence.granules:
        units = sum(sizes[granule] for granule in fence.granules)
        where = f"granules {list(fence.granules)}, whose {units} {unit}s draw {in_words(units * moves.unit)} at most"
        held = f"{in_words(fence.memory)} of {in_words(moves.memory)}"
        yield f"memory bandwidth while others are at work: {held}; models that draw more run on {where}"
    if fence.cores:
        yield f"memory bandwidth at any time: {fence.cores}"
    if fence.pcie and moves:
        held = f"{in_words(fence.pcie)} each way of {in_words(moves.pcie)}"
        yield f"PCIe while others are at work: {held}; inferences start no sooner than their inputs and outputs allow"
