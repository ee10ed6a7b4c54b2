"""How many green contexts a tenant's process has in time: one for each set of granules that a placement of its ever had."""

from random import Random

from partitions.base import Bandwidth
from partitions.plan import assign, orders
from server.config.tenant import TenantConfig
from server.control.fence import plan_fences
from server.control.stretch import plan_wide
from server.processes.supervision.mps_group import memory_limit

MOVES = Bandwidth(memory=3_352 * 10**9, unit=125 * 10**9, pcie=63 * 10**9)
CONTEXT = 4 << 20
"""Bytes that the driver takes for each, until the process ends."""
START = 360 << 20
"""Bytes that it takes for a process."""


def limit(budget: int, borrows: bool) -> int:
    """Bytes that the driver allows a process."""
    (value,) = memory_limit(budget, borrows).values()
    return int(value.removeprefix("0=").removesuffix("M")) << 20


def test_contexts_of_random_changes_fit_beside_twice_the_budget() -> None:
    """Of narrow placements there are few others than of homes, since those are the first granules; of wide ones many."""
    random, names = Random(1), [f"tenant {number}" for number in range(8)]
    lends = {name: 0.001 if number < 4 else 0.0 for number, name in enumerate(names)}
    tenants = {name: TenantConfig(name=name, granules=2, models=("*",), memory_bandwidth=0.6) for name in names}
    held = assign(16, {}, dict.fromkeys(names, 2))
    order = orders(16, held)
    narrow_or_home, wide = ({name: set[tuple[int, ...]]() for name in names} for _ in range(2))
    for _ in range(10_000):
        for name, fence in plan_fences(tenants, held, [8] * 16, "SM", MOVES).items():
            narrow_or_home[name] |= {held[name], fence.granules} - {()}
        for name, plan in plan_wide(held, {name: 8 for name in names if not lends[name]}, lends).items():
            wide[name].add(plan.granules)
        some = random.sample(names, random.randint(2, len(names)))
        counts = {name: 1 if name in some else len(granules) for name, granules in held.items()}
        for _ in range(random.randint(0, 16 - sum(counts.values()))):
            counts[random.choice(some)] += 1
        held = assign(16, held, counts, order)
    budget = 8 << 30
    for name in names:
        contexts = len(narrow_or_home[name]) + len(wide[name])
        assert len(narrow_or_home[name]) <= 110
        assert 2 * budget + START + contexts * CONTEXT <= limit(budget, not lends[name])
