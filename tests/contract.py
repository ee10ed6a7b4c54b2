"""What every kind of hardware promises, as tests: subclass `Contract` and give it a `subject`.

A subject brings four models and a stall: work that does not end before it is released, so that no test has to sleep.
"""

import gc
import json
import os
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from itertools import permutations
from threading import Thread
from typing import Any, Protocol, TypeVar

import numpy as np
import pytest

from engines import Cancelled, Engine, ExecutionFailed, Executor, Room, Tensor, TensorMismatch, Work, parts
from engines.base import COUNTS, MEMORY
from engines.signature import ALIGNMENT
from partitions import Device, Partition, PartitionError, Unsupported, probe
from partitions.strain import MOST, STRAINS, Strain
from tests.engines.tensors import UNTOUCHED, Memory, array, run

T = TypeVar("T")

ONE = np.arange(6, dtype=np.float32).reshape(2, 3)
OTHER = -ONE
ZEROS = np.zeros(4, np.float32)
BAD = np.full(4, 7, np.float32)

PATIENCE = 30.0
"""Seconds after which a thread that should have ended fails the test."""


class Stall(Protocol):
    """Work at the head of a stream that has not ended."""

    @property
    def work(self) -> Work:
        """What was enqueued."""

    def release(self) -> None:
        """Let it end."""

    def wait_until_running(self, thread: Thread) -> None:
        """Block until the device works on it; `thread` is the attached thread that waits for it."""

    def gave_up(self) -> bool:
        """Whether it timed out without `release`, which it does after some seconds. Valid once it has ended."""

    def close(self) -> None:
        """Free what it holds; it must have ended."""


class Subject(Protocol):
    """One implementation of both seams."""

    @property
    def device(self) -> Device:
        """With at least one granule."""

    @property
    def identity(self) -> Engine:
        """FP32[rows, columns] x to the same y."""

    @property
    def surprising(self) -> Engine:
        """FP32[n] x to the same y, as long as no two elements are equal; the shape is known only once it ran."""

    @property
    def fussy(self) -> Engine:
        """FP32[n] x to the same y for zeros; raises for BAD."""

    @property
    def passing(self) -> Engine:
        """FP32[rows, columns] x to two outputs: the input x itself, and its negative y."""

    def stall(self, partition: Partition) -> Stall:
        """Stall the partition's stream."""


class Contract:
    """The promises of partitions.base and engines.base."""

    @pytest.fixture
    def partition(self, subject: Subject) -> Iterator[Partition]:
        with closing(subject.device.carve([0])) as partition:
            yield partition

    @pytest.fixture
    def wide(self, subject: Subject) -> Iterator[Partition]:
        """Granule 0 is its holder's own, and all others are lent."""
        if (count := len(subject.device.granules)) == 1:
            pytest.skip("a device of one granule has none to lend")
        with closing(subject.device.carve(range(count), range(1, count))) as wide:
            yield wide

    @pytest.fixture
    def executor(self, subject: Subject, partition: Partition) -> Iterator[Executor]:
        with closing(subject.identity.bind(partition)) as executor:
            yield executor

    @pytest.fixture
    def stall(self, subject: Subject, partition: Partition, executor: Executor) -> Iterator[Stall]:
        with closing(subject.stall(partition)) as stall:
            yield stall

    def test_a_work_gives_the_right_numbers(self, executor: Executor) -> None:
        assert run(executor, ONE)[0].tolist() == ONE.tolist()
        assert run(executor, OTHER[:1])[0].tolist() == OTHER[:1].tolist()

    @pytest.mark.parametrize(
        ("inputs", "why"),
        [
            ([], "0 tensors given"),
            ([Tensor.of(ONE)] * 2, "2 tensors given"),
            ([ONE], "input 'x': a numpy.ndarray; expected an engines.Tensor"),
            ([Tensor.of(ONE)._replace(nbytes=20)], r"input 'x': 20 bytes for shape \[2, 3\] of FP32; expected 24"),
            ([Tensor.of(ONE)._replace(shape=(3, 3))], r"input 'x': 24 bytes for shape \[3, 3\] of FP32; expected 36"),
            ([Tensor.of(ONE.ravel())], r"input 'x': shape \[6\] has 1 dimension; expected 2"),
        ],
        ids=["none", "too many", "an array", "too few bytes", "another shape", "another rank"],
    )
    def test_tensors_that_do_not_match_the_inputs_are_refused(self, executor: Executor, inputs: list[Tensor], why: str) -> None:
        with pytest.raises(TensorMismatch, match=f"^{why}"):
            executor.enqueue(inputs)
        assert run(executor, ONE)[0].tolist() == ONE.tolist()

    def test_the_first_work_after_binding_is_right(self, subject: Subject, partition: Partition) -> None:
        memory = Memory(4096)
        with closing(subject.identity.bind(partition)) as executor:
            assert (memory.bytes == UNTOUCHED).all()
            assert run(executor, ONE, room=memory.room)[0].tolist() == ONE.tolist()

    def test_enqueue_returns_before_the_work_ends(self, executor: Executor, stall: Stall) -> None:
        memory = Memory(4096)
        work = executor.enqueue([Tensor.of(ONE)], memory.room)
        assert (memory.bytes == UNTOUCHED).all()
        stall.release()
        assert array(work.wait()[0]).tolist() == ONE.tolist()

    def test_works_of_one_stream_end_in_order(self, executor: Executor, stall: Stall) -> None:
        memory = Memory(4096)
        works = [executor.enqueue([Tensor.of(data)], memory.room) for data in (ONE, OTHER)]
        stall.release()
        assert array(works[1].wait()[0]).tolist() == OTHER.tolist()
        works[0].wait()
        stall.work.wait()
        assert memory.bytes[: OTHER.nbytes].view(np.float32).tolist() == OTHER.ravel().tolist()

    def test_memory_is_said_by_kind_as_long_as_it_is_taken(self, subject: Subject, partition: Partition) -> None:
        engine = subject.identity
        expected = dict(engine.executor_memory)
        executor = engine.bind(partition)
        taken = dict(executor.memory)
        for memory in (engine.memory, expected, taken):
            assert memory
            assert set(memory) <= set(MEMORY)
            assert all(isinstance(nbytes, int) and nbytes >= 0 for nbytes in memory.values())
        assert set(taken) - {"graphs"} == set(expected), "what a driver takes for graphs is only known afterwards"
        executor.close()
        assert not executor.memory

    def test_an_inference_in_one_line_gives_the_right_numbers(self, subject: Subject, partition: Partition) -> None:
        engine = subject.identity
        for data in (ONE, OTHER):
            assert array(engine.bind(partition).enqueue([Tensor.of(data)]).wait()[0]).tolist() == data.tolist()

    @pytest.fixture
    def narrow(self, subject: Subject) -> Iterator[Partition]:
        """Granules of their holder's own, others than those of `partition` where there are any."""
        with closing(subject.device.carve([len(subject.device.granules) - 1])) as narrow:
            yield narrow

    @pytest.fixture
    def several(self, executor: Executor, wide: Partition, narrow: Partition) -> Iterator[list[Executor]]:
        """A home executor and two alternates, in turns."""
        with closing(executor.alternate(wide)) as first, closing(executor.alternate(narrow)) as second:
            yield [executor, first, second]

    @pytest.mark.parametrize("seed", range(3))
    def test_alternates_give_the_same_numbers_in_any_order(self, several: list[Executor], seed: int) -> None:
        """Several works in flight on one, then on another; some of shapes that are new to all."""
        chance, memories = random.Random(seed), [Memory(4096) for _ in range(3)]
        for _ in range(20):
            executor, rows = chance.choice(several), chance.choice([2, 2, 2, chance.randrange(1, 9)])
            inputs = [np.full((rows, 3), chance.random(), np.float32) for _ in memories[: chance.randrange(1, 4)]]
            works = [executor.enqueue([Tensor.of(data)], memory.room) for data, memory in zip(inputs, memories, strict=False)]
            assert [array(work.wait()[0]).tolist() for work in reversed(works)] == [data.tolist() for data in inputs[::-1]]

    @pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
    def test_alternates_are_closed_in_any_order(self, several: list[Executor], order: tuple[int, ...]) -> None:
        for number in order:
            several[number].close()
            for left in order[order.index(number) + 1 :]:
                assert run(several[left], ONE)[0].tolist() == ONE.tolist()

    def test_an_alternate_s_works_end_in_order_and_it_works_for_a_thread_of_its_home(
        self, partition: Partition, several: list[Executor]
    ) -> None:
        def work() -> list[object]:
            partition.attach()
            works = [several[1].enqueue([Tensor.of(data)]) for data in (ONE, OTHER)]
            return [array(each.wait()[0]).tolist() for each in reversed(works)]

        assert in_a_thread(work)[1].result(PATIENCE) == [OTHER.tolist(), ONE.tolist()]

    def test_a_thread_attaches_to_the_partitions_of_alternates_in_turn(
        self, partition: Partition, wide: Partition, narrow: Partition, several: list[Executor]
    ) -> None:
        def work() -> list[object]:
            numbers = []
            for place, executor in [*zip((partition, wide, narrow), several, strict=True)] * 2:
                place.attach()
                numbers.append(run(executor, ONE)[0].tolist())
            return numbers

        assert in_a_thread(work)[1].result(PATIENCE) == [ONE.tolist()] * 6

    def test_alternates_outlive_a_move_of_their_home(
        self, subject: Subject, several: list[Executor], narrow: Partition
    ) -> None:
        home, *others = several
        with closing(home.rebind(narrow)) as moved:
            home.close()
            for executor in (moved, *others, moved):
                assert run(executor, OTHER)[0].tolist() == OTHER.tolist()
            with closing(moved.alternate(narrow)) as another:
                for executor in (another, *others, moved):
                    assert run(executor, ONE)[0].tolist() == ONE.tolist()

    def test_alternates_say_what_they_add(self, several: list[Executor]) -> None:
        described = [executor.describe().get("adds") for executor in several]
        assert described[0] is None
        for executor, adds in zip(several[1:], described[1:], strict=True):
            assert isinstance(adds, dict)
            memory = [_without_the_driver_s(each) for each in (adds, executor.memory)]
            assert memory[0] in ({}, memory[1])
            assert executor.engine is several[0].engine

    def test_a_work_in_flight_keeps_its_executor(self, subject: Subject, partition: Partition) -> None:
        engine = subject.identity
        works = [engine.bind(partition).enqueue([Tensor.of(data)]) for data in (ONE, OTHER)]
        gc.collect()
        assert [array(work.wait()[0]).tolist() for work in works] == [ONE.tolist(), OTHER.tolist()]

    def test_settings_overridden_for_a_block_give_right_outputs_in_it_and_after(self, executor: Executor) -> None:
        with executor.overriding(graphs="off"):
            assert run(executor, ONE)[0].tolist() == ONE.tolist()
        assert run(executor, OTHER)[0].tolist() == OTHER.tolist()
        with pytest.raises(TypeError, match="profile cannot be overridden"), executor.overriding(profile=0):
            pass

    def test_outputs_lie_in_the_room_at_an_aligned_address_when_they_fit(self, executor: Executor) -> None:
        memory = Memory(4096)
        (output,) = executor.enqueue([Tensor.of(ONE)], memory.room).wait()
        assert memory.holds(output)
        assert output.address % ALIGNMENT == 0
        assert (output.shape, output.nbytes) == (ONE.shape, ONE.nbytes)

    def test_outputs_that_fit_exactly_lie_in_the_room(self, executor: Executor) -> None:
        memory = Memory(4096)
        (output,) = executor.enqueue([Tensor.of(ONE)], memory.room._replace(nbytes=ONE.nbytes)).wait()
        assert memory.holds(output)
        assert (memory.bytes[ONE.nbytes :] == UNTOUCHED).all()

    def test_outputs_that_do_not_fit_own_their_memory(self, executor: Executor) -> None:
        memory = Memory(4096)
        (output,) = executor.enqueue([Tensor.of(ONE)], memory.room._replace(nbytes=ONE.nbytes - 1)).wait()
        assert array(output).tolist() == ONE.tolist()
        assert not memory.holds(output)
        assert (memory.bytes == UNTOUCHED).all()

    def test_outputs_of_unknown_size_own_memory_that_later_works_leave_alone(
        self, subject: Subject, partition: Partition
    ) -> None:
        data = np.arange(5, dtype=np.float32)
        memory = Memory(4096)
        with closing(subject.surprising.bind(partition)) as executor:
            (output,) = executor.enqueue([Tensor.of(data)], memory.room).wait()
            assert run(executor, data + 10, room=memory.room)[0].tolist() == (data + 10).tolist()
            assert array(output).tolist() == data.tolist()
        assert array(output).tolist() == data.tolist()
        assert (memory.bytes == UNTOUCHED).all()

    @pytest.mark.parametrize("nbytes", [4096, 0], ids=["in a room", "without a room"])
    def test_an_output_that_is_an_input_has_its_numbers_and_outlives_it(
        self, subject: Subject, partition: Partition, nbytes: int
    ) -> None:
        data, memory = ONE.copy(), Memory(4096)
        room = Room(memory.room.address, nbytes)
        with closing(subject.passing.bind(partition)) as executor:
            for numbers in (ONE, OTHER, ONE):  # In the same memory, so that what is remembered of the first serves the others.
                data[:] = numbers
                memory.bytes[:] = UNTOUCHED
                same, negative = executor.enqueue([Tensor.of(data)], room).wait()
                data[:] = 7
                assert array(same).tolist() == numbers.tolist()
                assert array(negative).tolist() == (-numbers).tolist()
                assert memory.holds(same) == memory.holds(negative) == bool(nbytes)

    @pytest.mark.parametrize("nbytes", [4096, 0], ids=["in a room", "without a room"])
    def test_outputs_that_are_not_asked_for_may_be_left_out_and_the_others_are_right(
        self, subject: Subject, partition: Partition, nbytes: int
    ) -> None:
        memory = Memory(4096)
        with closing(subject.passing.bind(partition)) as executor:
            for unasked in (0b01, 0b10, 0b11, 0b00):
                work = executor.enqueue([Tensor.of(ONE)], Room(memory.room.address, nbytes, unasked))
                for index, (output, right) in enumerate(zip(work.wait(), (ONE, -ONE), strict=True)):
                    left_out = output == Tensor((), memory.room.address, 0) and unasked >> index & 1
                    assert left_out or array(output).tolist() == right.tolist()

    def test_two_executors_share_a_partition(self, subject: Subject, partition: Partition, executor: Executor) -> None:
        with closing(subject.identity.bind(partition)) as second:
            works = [each.enqueue([Tensor.of(data)]) for each, data in ((executor, ONE), (second, OTHER))]
            assert [array(work.wait()[0]).tolist() for work in works] == [ONE.tolist(), OTHER.tolist()]

    def test_an_executor_is_closed_while_another_one_s_work_is_in_flight(
        self, subject: Subject, partition: Partition, executor: Executor
    ) -> None:
        with closing(subject.fussy.bind(partition)) as other:
            good, bad = (other.enqueue([Tensor.of(data)]) for data in (ZEROS, BAD))
            executor.close()
            assert array(good.wait()[0]).tolist() == ZEROS.tolist()
            with pytest.raises(ExecutionFailed):
                bad.wait()

    def test_a_work_cancelled_before_it_began_ends_as_cancelled(self, executor: Executor, stall: Stall) -> None:
        memory = Memory(4096)
        cancelled, later = (executor.enqueue([Tensor.of(data)], memory.room) for data in (ONE, OTHER))
        cancelled.cancel()
        stall.release()
        with pytest.raises(Cancelled):
            cancelled.wait()
        assert array(later.wait()[0]).tolist() == OTHER.tolist()

    def test_a_work_cancelled_while_it_runs_ends_as_cancelled(
        self, partition: Partition, executor: Executor, stall: Stall
    ) -> None:
        thread, ended = _wait_in_a_thread(partition, stall.work)
        stall.wait_until_running(thread)
        stall.work.cancel()
        with pytest.raises(Cancelled):
            ended.result(PATIENCE)
        assert run(executor, ONE)[0].tolist() == ONE.tolist()

    def test_a_work_cancelled_after_it_ended_keeps_its_outputs(self, executor: Executor) -> None:
        work = executor.enqueue([Tensor.of(ONE)])
        work.wait()
        work.cancel()
        assert array(work.wait()[0]).tolist() == ONE.tolist()

    def test_a_thread_that_attaches_again_works_for_the_other_partition(self, subject: Subject, partition: Partition) -> None:
        last = len(subject.device.granules) - 1

        def move() -> list[object]:
            numbers = []
            with closing(subject.device.carve([last])) as other:
                for place in (partition, other, partition):
                    place.attach()
                    with closing(subject.identity.bind(place)) as executor:
                        numbers.append(run(executor, ONE)[0].tolist())
            return numbers

        assert in_a_thread(move)[1].result(PATIENCE) == [ONE.tolist()] * 3

    def test_a_partition_on_which_a_work_waits_or_runs_is_not_idle(
        self, partition: Partition, executor: Executor, stall: Stall
    ) -> None:
        assert not partition.idle
        thread, ended = _wait_in_a_thread(partition, stall.work)
        stall.wait_until_running(thread)
        assert not partition.idle
        stall.release()
        ended.result(PATIENCE)

    def test_wait_releases_the_gil(self, partition: Partition, stall: Stall) -> None:
        thread, ended = _wait_in_a_thread(partition, stall.work)
        stall.wait_until_running(thread)
        stall.release()
        ended.result(PATIENCE)
        assert not stall.gave_up()

    def test_a_work_may_be_waited_for_by_several_threads_attached_or_not(
        self, partition: Partition, executor: Executor, stall: Stall
    ) -> None:
        works = [executor.enqueue([Tensor.of(data)]) for data in (ONE, OTHER)]
        waiting = [_wait_in_a_thread(partition, work, attached)[1] for work in works for attached in (True, False)]
        stall.release()
        numbers = [array(ended.result(PATIENCE)[0]).tolist() for ended in waiting]
        assert numbers == [ONE.tolist(), ONE.tolist(), OTHER.tolist(), OTHER.tolist()]

    def test_an_error_of_the_model_fails_only_its_work(self, subject: Subject, partition: Partition) -> None:
        memory = Memory(4096)
        with closing(subject.fussy.bind(partition)) as executor:
            for _ in range(2):
                bad, good = (executor.enqueue([Tensor.of(data)], memory.room) for data in (BAD, ZEROS))
                with pytest.raises(ExecutionFailed, match=r"\w"):
                    bad.wait()
                assert array(good.wait()[0]).tolist() == ZEROS.tolist()

    def test_an_ended_work_is_freed_without_the_garbage_collector(self, executor: Executor) -> None:
        gc.disable()
        try:
            data = ONE.copy()
            held = weakref.ref(data)
            work = executor.enqueue([Tensor.of(data)])
            forgotten = weakref.ref(work)
            work.wait()
            del data, work
            assert forgotten() is None
            assert held() is None
        finally:
            gc.enable()

    def test_an_engine_bound_again_gives_the_same_numbers(self, subject: Subject, executor: Executor) -> None:
        last = len(subject.device.granules) - 1
        with closing(subject.device.carve([last])) as elsewhere, closing(executor.engine.bind(elsewhere)) as again:
            assert again.engine is executor.engine
            assert run(again, ONE)[0].tolist() == run(executor, ONE)[0].tolist() == ONE.tolist()

    def test_an_executor_outlives_another_of_its_engine(self, subject: Subject, executor: Executor) -> None:
        with closing(subject.device.carve([0])) as elsewhere:
            subject.identity.bind(elsewhere).close()
        assert run(executor, ONE)[0].tolist() == ONE.tolist()

    @pytest.mark.parametrize("kind", STRAINS)
    def test_a_partition_strains_what_is_shared_for_a_while_and_works_on(
        self, subject: Subject, partition: Partition, executor: Executor, kind: Strain
    ) -> None:
        if subject.device.kind == "cpu" and kind.startswith("PCIe"):
            with pytest.raises(Unsupported, match=f"^strain '{kind}': there is none on cores; there are memory copy, "):
                partition.strain(kind, 0.02)
        else:
            done = partition.strain(kind, 0.02)
            assert done.nbytes > 0
            assert 0 < done.seconds < PATIENCE
            assert done.rate == pytest.approx(done.nbytes / done.seconds / 1e9)
        assert run(executor, ONE)[0].tolist() == ONE.tolist()

    def test_before_each_pass_of_a_strain_it_is_asked_where_that_runs(self, partition: Partition) -> None:
        asked = list[int]()
        assert partition.strain("memory read", 0.02, asked.append).nbytes > 0
        assert asked
        assert min(asked) >= 0

    def test_a_strain_does_not_wait_for_work_in_flight(
        self, subject: Subject, partition: Partition, executor: Executor
    ) -> None:
        partition.strain("memory read", 0.001)  # A GPU may wait for what runs when it loads kernels.
        with closing(subject.stall(partition)) as stall:
            work = executor.enqueue([Tensor.of(ONE)])
            assert partition.strain("memory read", 0.02).nbytes > 0
            stall.release()
            assert array(work.wait()[0]).tolist() == ONE.tolist()
            stall.work.wait()
            assert not stall.gave_up()

    @pytest.mark.parametrize("seconds", [0.0, -1.0, MOST * 1.01, float("nan"), float("inf")])
    def test_a_strain_lasts_for_a_bounded_time(self, partition: Partition, seconds: float) -> None:
        with pytest.raises(ValueError, match=r"^a strain of .* s: expected more than 0 and at most 2$"):
            partition.strain("memory read", seconds)

    def test_a_strain_that_there_is_not_names_those_that_there_are(self, partition: Partition) -> None:
        with pytest.raises(Unsupported, match=r"^strain 'arithmetic': there is none.*; there are memory copy, memory read"):
            partition.strain("arithmetic", 0.02)  # type: ignore[arg-type]

    def test_closing_again_does_nothing(self, subject: Subject) -> None:
        partition = subject.device.carve([0])
        executor = subject.identity.bind(partition)
        run(executor, ONE)
        for each in (executor, partition, subject.identity, subject.device):
            each.close()
            each.close()

    def test_every_partition_runs_within_its_grant(self, subject: Subject) -> None:
        device = subject.device
        partitions = {f"{granule}": device.carve([granule]) for granule in range(len(device.granules))}
        assert [partition.size for partition in partitions.values()] == list(device.granules)
        probe.check(partitions, probe.locate(partitions))
        for partition in partitions.values():
            partition.close()

    def test_a_partition_of_every_granule_has_every_unit(self, subject: Subject) -> None:
        every = range(len(subject.device.granules))
        with closing(subject.device.carve(list(reversed(every)))) as partition:
            assert partition.granules == tuple(every)
            assert 1 <= len(partition.locate()) <= partition.size == sum(subject.device.granules)

    def test_a_wide_partition_says_what_is_lent_and_runs_on_all_its_units(self, subject: Subject, wide: Partition) -> None:
        granules = tuple(range(len(subject.device.granules)))
        assert (wide.granules, wide.lent) == (granules, granules[1:])
        assert wide.size == sum(subject.device.granules)
        with closing(subject.device.carve([0])) as home:
            assert home.lent == ()
            assert home.host_cores == wide.host_cores
            assert home.locate() < wide.locate()

    @pytest.mark.parametrize("lent", [[0], [1], [0, 0], ["0"], 0], ids=str)
    def test_lent_granules_are_some_of_the_partition_s_and_not_all(self, subject: Subject, lent: Any) -> None:
        with pytest.raises((PartitionError, TypeError)):
            subject.device.carve([0], lent)

    def test_the_host_s_cores_of_a_partition_are_where_its_threads_run(self, partition: Partition) -> None:
        cores = partition.host_cores
        assert cores is None or (cores and cores <= os.sched_getaffinity(0))
        assert cores is None or partition.run(lambda: os.sched_getaffinity(0)) <= cores

    def test_a_partition_runs_functions_and_returns_their_result_or_error(self, partition: Partition) -> None:
        assert partition.run(lambda: 42) == 42
        with pytest.raises(ZeroDivisionError):
            partition.run(lambda: 1 // 0)

    def test_describe_is_json_with_the_graph_mode(self, executor: Executor) -> None:
        run(executor, ONE)
        described = executor.describe()
        assert json.loads(json.dumps(described)) == described
        assert described["graphs"] in ("captured", "native", "none")
        counts = described.get("counts", {})
        assert isinstance(counts, dict)
        assert set(counts) <= set(COUNTS)

    def test_every_repr_is_one_line(self, subject: Subject, partition: Partition, executor: Executor, stall: Stall) -> None:
        stall.release()
        for each in (subject.device, partition, executor, executor.engine, stall.work):
            assert repr(each).startswith("<")
            assert "\n" not in repr(each)
        assert "\n" not in subject.device.describe()
        assert (subject.device.memory() or 1) > 0

    def test_a_unit_draws_a_part_of_what_the_device_moves(self, subject: Subject) -> None:
        if moves := subject.device.bandwidth():
            assert 0 < moves.unit < moves.memory
            assert 0 <= moves.pcie < moves.memory


class StreamingContract:
    """The promises of `engines.base.Streaming`.

    A subject brings `partition`, and `counting`, an engine: FP32[2] x to FP32[1] y in parts, which count down from x[0] to 1;
    instead of the part that is x[1] it raises.
    """

    @pytest.fixture
    def executor(self, partition: Partition, counting: Engine) -> Iterator[Any]:
        with closing(counting.bind(partition)) as executor:
            yield executor

    def test_an_answer_has_its_parts_in_order_and_then_ends(self, executor: Any) -> None:
        assert counted(executor, 3) == [3, 2, 1]
        assert counted(executor, 1) == [1]
        assert counted(executor, 0) == []

    def test_the_signature_says_that_answers_have_parts(self, counting: Engine) -> None:
        assert counting.signature.in_parts

    def test_the_answers_of_one_executor_interleave(self, executor: Any) -> None:
        first, second = executor.enqueue([start(2)]), executor.enqueue([start(20)])
        later, latest = executor.proceed(first) if first.wait() else None, executor.proceed(second) if second.wait() else None
        assert [number(work) for work in (latest, later, second, first)] == [19, 1, 20, 2]

    def test_parts_lie_in_their_room_when_they_fit_and_else_own_their_memory(self, executor: Any) -> None:
        memory, small = Memory(4096), Memory(4096)
        first = executor.enqueue([start(9)], memory.room)
        (output,) = first.wait()
        assert memory.holds(output)
        (owned,) = executor.proceed(first, small.room._replace(nbytes=3)).wait()
        assert not small.holds(owned)
        assert [array(output).tolist(), array(owned).tolist()] == [[9], [8]]

    def test_the_inputs_are_not_read_after_the_first_part(self, executor: Any) -> None:
        data = np.array([5, -1], np.float32)
        part = executor.enqueue([Tensor.of(data)])
        part.wait()
        data[:] = 99
        assert number(executor.proceed(part)) == 4

    def test_an_error_ends_the_answer_and_no_other(self, executor: Any) -> None:
        bad, good = executor.enqueue([start(3, raising=2)]), executor.enqueue([start(3)])
        assert [number(bad), number(good)] == [3, 3]
        failed = executor.proceed(bad)
        with pytest.raises(ExecutionFailed, match=r"\w"):
            failed.wait()
        with pytest.raises(ExecutionFailed):
            executor.proceed(failed)
        assert number(executor.proceed(good)) == 2

    def test_a_part_that_is_cancelled_ends_the_answer_and_no_other(self, executor: Any) -> None:
        part, other = executor.enqueue([start(3)]), executor.enqueue([start(3)])
        assert [number(part), number(other)] == [3, 3]
        cancelled = executor.proceed(part)
        cancelled.cancel()
        with pytest.raises(Cancelled):
            cancelled.wait()
        with pytest.raises(ExecutionFailed):
            executor.proceed(cancelled)
        assert number(executor.proceed(other)) == 2

    def test_an_answer_goes_on_once_from_each_part_and_not_after_its_end(self, executor: Any) -> None:
        first = executor.enqueue([start(1)])
        first.wait()
        end = executor.proceed(first)
        assert end.wait() == ()
        for part in (first, end):
            with pytest.raises(ExecutionFailed):
                executor.proceed(part)

    def test_an_answer_goes_on_where_its_engine_is_bound_again(
        self, partition: Partition, executor: Any, elsewhere: Partition
    ) -> None:
        part = executor.enqueue([start(3)])
        part.wait()
        moved = executor.rebind(elsewhere)
        executor.close()
        with closing(moved):
            part = moved.proceed(part)
            assert number(part) == 2
            assert number(moved.proceed(part)) == 1

    def test_an_answer_goes_on_in_an_alternate_and_back(self, executor: Any, elsewhere: Partition) -> None:
        with closing(executor.alternate(elsewhere)) as other:
            part = executor.enqueue([start(4)])
            part.wait()
            found = []
            for each in (other, executor, other):
                part = each.proceed(part)
                found.append(number(part))
            assert found == [3, 2, 1]

    def test_an_answer_that_is_not_gone_on_with_is_freed_without_the_garbage_collector(self, executor: Any) -> None:
        gc.disable()
        try:
            part = executor.enqueue([start(3)])
            first = weakref.ref(part)
            part.wait()
            part = executor.proceed(part)
            part.wait()
            assert first() is None
            second = weakref.ref(part)
            del part
            assert second() is None
        finally:
            gc.enable()


def start(first: int, raising: int = -1) -> Tensor:
    """The input of a counting engine."""
    return Tensor.of(np.array([first, raising], np.float32))


def number(part: Work) -> float:
    """The number of a counting engine's part."""
    (output,) = part.wait()
    return float(array(output)[0])


def counted(executor: Any, first: int) -> list[float]:
    """All parts of a counting engine's answer."""
    return [float(array(output)[0]) for (output,) in parts(executor, [start(first)])]


def in_a_thread(function: Callable[[], T]) -> tuple[Thread, "Future[T]"]:
    """Call a function on a new thread; the future has what it gave or raised."""
    result: Future[T] = Future()

    def body() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    thread = Thread(target=body, daemon=True)
    thread.start()
    return thread, result


def _without_the_driver_s(memory: Mapping[str, int]) -> dict[str, int]:
    """Without what the driver was seen to take, which differs for each executor."""
    return {kind: nbytes for kind, nbytes in memory.items() if kind not in ("kernels", "graphs")}


def _wait_in_a_thread(partition: Partition, work: Work, attached: bool = True) -> tuple[Thread, "Future[tuple[Tensor, ...]]"]:
    def wait() -> tuple[Tensor, ...]:
        if attached:
            partition.attach()
        return work.wait()

    return in_a_thread(wait)
