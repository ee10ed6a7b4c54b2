from typing import cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from partitions import DoesNotFit, Move, Partition, PartitionError, PartitionManager
from tests.fakes import FakeDevice, FakePartition, FakeWork

TOTAL = 6
Carved = tuple[Move, dict[str, Partition]]


class Repartitioning(RuleBasedStateMachine):
    """Several threads that plan, carve and commit at the same time, on a device that fails at random."""

    moves = Bundle("moves")
    carvings = Bundle("carvings")

    def __init__(self) -> None:
        super().__init__()
        self.device = FakeDevice((1,) * TOTAL)
        self.manager = PartitionManager(self.device)
        self.counts: dict[str, int] = {}
        self.uncommitted: list[Partition] = []

    @rule(target=moves, counts=st.dictionaries(st.sampled_from("abcd"), st.integers(1, TOTAL), min_size=1))
    def plan(self, counts: dict[str, int]) -> object:
        if sum({**self.counts, **counts}.values()) > TOTAL:
            with pytest.raises(DoesNotFit):
                self.manager.plan(counts)
            return multiple()
        move = self.manager.plan(counts)
        assert {name: len(granules) for name, granules in move.after.items()} == {**self.counts, **counts}
        return move

    @rule(target=carvings, move=consumes(moves))
    def carve(self, move: Move) -> object:
        carved = self.manager.carve(move)
        assert {name: partition.granules for name, partition in carved.items()} == {n: move.after[n] for n in move.movers}
        self.uncommitted += carved.values()
        return move, carved

    @rule(move=moves, nth=st.integers(1, 3))
    def carve_in_vain(self, move: Move, nth: int) -> None:
        if nth <= len(move.movers):
            self.device.script.fail("carve", nth)
            with pytest.raises(PartitionError, match="scripted to fail"):
                self.manager.carve(move)

    @rule(carving=consumes(carvings))
    def commit(self, carving: Carved) -> None:
        move, carved = carving
        before = self.manager.held
        if {name: partition.granules for name, partition in before.items()} != move.before:
            with pytest.raises(RuntimeError, match="plan again"):
                self.manager.commit(move, carved)
            assert self.manager.held == before
            self._discard(carved)
            return
        left = self.manager.commit(move, carved)
        assert left == {name: before[name] for name in move.movers if name in before}
        assert self.manager.held == {**before, **carved}
        self.counts = {name: len(granules) for name, granules in move.after.items()}
        self.uncommitted = [partition for partition in self.uncommitted if partition not in carved.values()]
        self.manager.discard(left)

    @rule(carving=consumes(carvings))
    def discard(self, carving: Carved) -> None:
        self._discard(carving[1])

    @rule()
    def close(self) -> None:
        self.manager.close()
        self.counts = {}

    def _discard(self, carved: dict[str, Partition]) -> None:
        self.manager.discard(carved)
        self.uncommitted = [partition for partition in self.uncommitted if partition not in carved.values()]

    @invariant()
    def no_granule_has_two_holders(self) -> None:
        granules = [granule for partition in self.manager.held.values() for granule in partition.granules]
        assert len(set(granules)) == len(granules)

    @invariant()
    def each_holder_has_what_was_last_committed(self) -> None:
        assert {name: len(partition.granules) for name, partition in self.manager.held.items()} == self.counts

    @invariant()
    def every_open_partition_is_held_or_about_to_be(self) -> None:
        expected = [*self.manager.held.values(), *self.uncommitted]
        assert {id(partition) for partition in self.device.open} == {id(partition) for partition in expected}


TestRepartitioning = Repartitioning.TestCase


def _held(manager: PartitionManager, counts: dict[str, int]) -> dict[str, Partition]:
    move = manager.plan(counts)
    return manager.commit(move, manager.carve(move))


def test_a_move_touches_only_holders_whose_share_changes() -> None:
    manager = PartitionManager(FakeDevice((1,) * 6))
    _held(manager, {"acme": 2, "globex": 2})
    globex = manager.held["globex"]
    assert list(_held(manager, {"acme": 3})) == ["acme"]
    assert manager.held["globex"] is globex


def test_a_move_made_from_an_account_that_changed_since_is_refused() -> None:
    manager = PartitionManager(FakeDevice())
    early, late = manager.plan({"acme": 1}), manager.plan({"globex": 1})
    carved = manager.carve(early)
    manager.commit(early, carved)
    stale = manager.carve(late)
    assert stale["globex"].granules == carved["acme"].granules
    with pytest.raises(RuntimeError, match="the partitions changed since this move was planned; plan again"):
        manager.commit(late, stale)
    assert manager.held == carved


def test_the_old_partitions_serve_until_the_commit() -> None:
    device = FakeDevice()
    manager = PartitionManager(device)
    _held(manager, {"acme": 1})
    old = manager.held["acme"]
    move = manager.plan({"acme": 2})
    carved = manager.carve(move)
    assert manager.held == {"acme": old}
    assert manager.commit(move, carved) == {"acme": old}
    assert old in device.open


def test_partitions_carved_before_a_failure_are_closed() -> None:
    device = FakeDevice()
    manager = PartitionManager(device)
    device.script.fail("carve", nth=3)
    with pytest.raises(PartitionError, match="scripted to fail at carve"):
        manager.carve(manager.plan({"acme": 1, "globex": 1, "initech": 1}))
    assert len(device.partitions) == 2
    assert not device.open


def test_closing_the_manager_closes_every_partition_and_not_the_device() -> None:
    device = FakeDevice()
    manager = PartitionManager(device)
    _held(manager, {"acme": 1, "globex": 3})
    manager.close()
    manager.close()
    assert not device.open
    assert not device.closed
    assert manager.held == {}


def test_a_partition_that_cannot_be_closed_keeps_no_other_open() -> None:
    device = FakeDevice()
    manager = PartitionManager(device)
    _held(manager, {"acme": 1, "globex": 2, "initech": 1})
    busy, work = device.open[1], cast(FakeWork, object())
    busy.stream.works.append(work)
    with pytest.raises(RuntimeError, match="closed with work in flight"):
        manager.close()
    assert device.open == [busy]


def test_a_count_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="acme: 0 granules; every tenant needs at least 1"):
        PartitionManager(FakeDevice()).plan({"acme": 0})


@pytest.mark.parametrize("count", ["2", 1.0, None, True, [0]])
def test_a_count_that_is_no_number_is_refused_with_what_is_expected(count: object) -> None:
    with pytest.raises(TypeError, match=r"^acme: .* granules; expected a whole number of at least 1$"):
        PartitionManager(FakeDevice()).plan({"acme": count})  # type: ignore[dict-item]


@pytest.mark.parametrize("counts", [2, [("acme", 2)], "acme", None])
def test_counts_that_name_no_holders_are_refused_with_an_example(counts: object) -> None:
    with pytest.raises(TypeError, match=r"^counts are granules by holder, such as \{'acme': 2\}; got "):
        PartitionManager(FakeDevice()).plan(counts)  # type: ignore[arg-type]


@pytest.mark.parametrize("move", [0, [], {"acme": 2}])
def test_only_a_plan_can_be_carved(move: object) -> None:
    with pytest.raises(TypeError, match="carve takes what plan returned, such as plan"):
        PartitionManager(FakeDevice()).carve(move)  # type: ignore[arg-type]


def test_the_partition_of_a_holder_is_the_one_that_was_carved_for_it() -> None:
    device = FakeDevice()
    manager = PartitionManager(device)
    _held(manager, {"acme": 1})
    (partition,) = device.partitions
    assert isinstance(partition, FakePartition)
    assert manager.held == {"acme": partition}
