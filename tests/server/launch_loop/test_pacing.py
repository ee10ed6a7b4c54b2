"""How the launch loop keeps a share of PCIe, as Python does. What a loop does with it is in workers/test_pace.py."""

import ctypes

from hypothesis import given, settings
from hypothesis import strategies as st

from server.launch_loop.library import open_library
from server.launch_loop.structures import IN, MEMORY, OUT
from server.link.activity import ENDED, OPEN
from server.workers.pace import Pace
from tests.launchable import needs_a_compiler
from tests.server.workers.test_pace import page

pytestmark = needs_a_compiler

NS = st.integers(0, 10**12)
RATES = st.one_of(st.just(0), st.integers(1, 10**6), st.integers(10**6, 10**12))
NBYTES = st.one_of(st.just(0), st.integers(0, 10**6), st.integers(0, 10**12))


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 200_000_000), NBYTES, NBYTES, NBYTES, st.integers(0, 2), NS), max_size=12),
    st.lists(st.booleans(), max_size=3),
    RATES,
    RATES,
)
def test_c_and_python_wait_and_charge_the_same(
    seen: list[tuple[int, int, int, int, int, int]], neighbours: list[bool], pcie: int, memory: int
) -> None:
    """`seen` are works: the time since the one before, what each moves, and what the first neighbour does then."""
    library, pages, now = open_library(), [page(int(works)) for works in neighbours], 10**9
    ours, theirs = Pace(pages, pcie, memory), Pace(pages, pcie, memory)
    address = ctypes.byref(theirs.shared)
    for later, in_, out, moved, open_, ended in seen:
        now += later
        if pages:
            pages[0].processes[0][OPEN], pages[0].processes[0][ENDED] = open_, min(ended, now)
        assert ours.wait(now) == library.launch_loop_pace_wait(address, now)
        for path, nbytes in ((IN, in_), (OUT, out), (MEMORY, moved)):
            ours.charge(path, nbytes, now)
        library.launch_loop_pace_charge(address, now, in_, out, moved)
        assert list(ours.shared.free_at) == list(theirs.shared.free_at)
