"""What counts as taken by the driver: differences of what is free, but for what something else may have changed."""

import ctypes
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from threading import Event, Thread
from typing import Any

import pytest

from partitions.cuda import driver_memory
from partitions.cuda.driver_memory import DriverMemory, Taken
from tests.simulation import Gpu, installed

MIB = 1 << 20


class Driver:
    """A driver with so much free."""

    def __init__(self) -> None:
        self.free: int | None = 1000
        self.looks = 0
        self.memory = DriverMemory(self.level)

    def level(self) -> int | None:
        self.looks += 1
        return self.free

    def take(self, nbytes: int) -> None:
        assert self.free is not None
        self.free -= nbytes

    def load(self, nbytes: int, taken: Taken, key: str = "a") -> Taken:
        with taken.measuring(key):
            self.take(nbytes)
        return taken

    def taken(self, what: str = "kernels") -> Taken:
        return Taken(self.memory, what)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def seen(taken: Taken) -> tuple[int, int]:
    return taken.nbytes, taken.unmeasured


def test_what_is_less_after_the_block_counts(driver: Driver) -> None:
    taken = driver.load(30, driver.taken())
    driver.load(5, taken, "b")
    assert seen(taken) == (35, 0)


def test_a_key_is_measured_once(driver: Driver) -> None:
    taken = driver.load(30, driver.taken())
    driver.load(9, taken)
    assert (seen(taken), driver.looks) == ((30, 0), 2)


def test_what_the_block_took_counts_although_it_failed(driver: Driver) -> None:
    taken = driver.taken()
    with suppress(ZeroDivisionError), taken.measuring("a"):
        driver.take(30)
        raise ZeroDivisionError
    assert seen(taken) == (30, 0)


def test_nothing_counts_where_the_driver_does_not_say(driver: Driver) -> None:
    driver.free, taken = None, driver.taken()
    with taken.measuring("a"):
        pass
    assert seen(taken) == (0, 1)
    assert driver.looks == 1


def test_nothing_counts_if_the_driver_no_longer_says_it_at_the_end(driver: Driver) -> None:
    taken = driver.taken()
    with taken.measuring("a"):
        driver.free = None
    assert seen(taken) == (0, 1)


def test_nothing_counts_if_there_is_more_than_before(driver: Driver) -> None:
    assert seen(driver.load(-10, driver.taken())) == (0, 1)


def test_nothing_counts_beside_a_change_that_began_before(driver: Driver) -> None:
    taken = driver.taken()
    with driver.memory.changing():
        driver.load(30, taken)
    assert (seen(taken), driver.looks) == ((0, 1), 0)


def test_nothing_counts_beside_a_change_that_began_meanwhile(driver: Driver) -> None:
    taken = driver.taken()
    with taken.measuring("a"), driver.memory.changing():
        pass
    assert seen(taken) == (0, 1)


def test_two_measurements_at_once_count_for_nothing(driver: Driver) -> None:
    one, other = driver.taken(), driver.taken("graph")
    with one.measuring("a"):
        driver.load(30, other)
    assert seen(one) == seen(other) == (0, 1)


def test_a_change_in_its_turn_waits_for_a_measurement(driver: Driver) -> None:
    taken, asked = driver.taken(), Event()

    def change() -> None:
        asked.set()
        with driver.memory.changing(in_turn=True):
            driver.take(500)

    thread = Thread(target=change)
    with taken.measuring("a"):
        thread.start()
        asked.wait()
        driver.take(30)
    thread.join()
    assert (seen(taken), driver.free) == ((30, 0), 470)


def test_a_change_that_waits_hurries_the_load_that_is_measured() -> None:
    hurried, asked = list[str](), Event()

    @contextmanager
    def hurrying() -> Iterator[None]:
        hurried.append("begun")
        asked.set()
        yield
        hurried.append("ended")

    def change() -> None:
        with memory.changing(in_turn=True):
            hurried.append("changed")

    memory = DriverMemory(lambda: 1000, hurrying)
    with memory.changing(in_turn=True):
        assert hurried == [], "nothing is measured"
    thread = Thread(target=change)
    with Taken(memory, "kernels").measuring("a"):
        thread.start()
        asked.wait()
    thread.join()
    assert sorted(hurried) == ["begun", "changed", "ended"]


def test_a_patient_measurement_waits_for_a_change_that_is_in_its_turn(driver: Driver) -> None:
    taken, begun, go_on = driver.taken(), Event(), Event()

    def change() -> None:
        with driver.memory.changing(in_turn=True):
            begun.set()
            go_on.wait()
            driver.take(500)

    def measure() -> None:
        with taken.measuring("a", patient=True):
            driver.take(30)

    threads = [Thread(target=change), Thread(target=measure)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join()
    assert seen(taken) == (30, 0)


def test_neither_waits_forever_for_the_other(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_memory, "PATIENCE", 0.01)
    monkeypatch.setattr(driver_memory, "TURN", 0.01)
    taken = driver.taken()
    with driver.memory.changing(in_turn=True), taken.measuring("a", patient=True):
        pass
    with taken.measuring("b"), driver.memory.changing(in_turn=True):
        pass
    assert seen(taken) == (0, 2)


def free(taken: Taken) -> None:
    with taken.freeing():
        pass


def test_what_is_loaded_into_memory_that_the_driver_kept_counts_as_before(driver: Driver) -> None:
    first = driver.load(30, driver.taken())
    free(first)
    assert (first.nbytes, driver.memory.kept) == (0, 30)
    assert driver.load(0, driver.taken()).nbytes == 30
    assert driver.memory.kept == 0


def test_what_is_loaded_again_beside_the_first_counts_as_measured(driver: Driver) -> None:
    """As an alternate's graph may fit beside that of its home."""
    first = driver.load(30, driver.taken())
    assert driver.load(0, driver.taken()).nbytes == 0
    assert first.nbytes == 30


def test_no_more_counts_than_was_kept(driver: Driver) -> None:
    free(driver.load(30, driver.taken()))
    again = [driver.load(0, driver.taken()) for _ in range(2)]
    assert [each.nbytes for each in again] == [30, 0]


def test_what_was_partly_kept_counts_with_what_was_taken_besides(driver: Driver) -> None:
    free(driver.load(30, driver.taken()))
    assert driver.load(20, driver.taken()).nbytes == 30
    assert driver.memory.kept == 20


def test_something_else_in_kept_memory_counts_for_nothing(driver: Driver) -> None:
    free(driver.load(30, driver.taken()))
    assert driver.load(0, driver.taken("graph")).nbytes == 0
    assert driver.memory.kept == 30


def test_what_was_measured_before_is_known_also_beside_a_change(driver: Driver) -> None:
    free(driver.load(30, driver.taken()))
    again = driver.taken()
    with driver.memory.changing():
        driver.load(0, again)
    assert seen(again) == (30, 0)


def test_freeing_is_a_change(driver: Driver) -> None:
    first, taken = driver.load(30, driver.taken()), driver.taken("graph")
    with taken.measuring("a"):
        free(first)
    assert seen(taken) == (0, 1)


def test_what_was_taken_is_forgotten_after_thousands_of_others(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_memory, "MOST_KNOWN", 2)
    free(driver.load(30, driver.taken()))
    for key in "bc":
        driver.load(1, driver.taken(), key)
    assert driver.load(0, driver.taken()).nbytes == 0


def test_what_a_child_does_is_a_change_only_where_the_whole_device_is_measured(driver: Driver) -> None:
    for own, unmeasured in ((True, 0), (False, 1)):
        memory = DriverMemory(driver.level, own=own)
        taken = Taken(memory, "kernels")
        with memory.changing_in_child(), taken.measuring("a"):
            pass
        assert seen(taken) == (0, unmeasured)


class Simulated:
    """`look` is the call that the device asks."""

    def __init__(self, gpu: Gpu, cuda: Any) -> None:
        self.gpu = gpu
        self.look = "nvmlDeviceGetComputeRunningProcesses_v3" if gpu.has_nvml else "cuMemGetInfo"
        self.device = cuda.open_cuda(Gpu.index)
        self.current = self.device.make_current()

    def taken(self) -> Taken:
        return Taken(self.device.driver_memory, "kernels")


@pytest.fixture(params=[True, False], ids=["of this process", "of the whole device"])
def simulated(request: pytest.FixtureRequest) -> Iterator[Simulated]:
    gpu = Gpu()
    gpu.has_nvml = request.param
    with installed(gpu) as cuda:
        yield Simulated(gpu, cuda)


def test_what_the_pool_gives_does_not_count_on_whatever_thread(simulated: Simulated) -> None:
    taken = simulated.taken()
    with closing(simulated.device.carve([0])) as partition:

        def allocate() -> None:
            simulated.device.make_current().allocate(100 * MIB, stream=partition.stream).close()

        with taken.measuring("a"):
            simulated.gpu.use_for_driver(3 * MIB)
            thread = Thread(target=allocate)
            thread.start()
            thread.join()
    assert seen(taken) == (2 * MIB, 0), "The driver takes whole steps, and had one."


def test_a_pool_that_grows_between_the_looks_is_looked_at_again(simulated: Simulated) -> None:
    with closing(simulated.device.carve([0])) as partition:
        taken = simulated.taken()
        simulated.gpu.meanwhile(simulated.look, lambda: simulated.current.allocate(MIB, stream=partition.stream))
        with taken.measuring("a"):
            simulated.gpu.use_for_driver(3 * MIB)
    assert seen(taken) == (2 * MIB, 0)


def test_a_pool_that_never_stops_growing_says_nothing(simulated: Simulated) -> None:
    def grow() -> None:
        simulated.gpu.pool_has += 1
        simulated.gpu.meanwhile(simulated.look, grow)

    taken = simulated.taken()
    simulated.gpu.meanwhile(simulated.look, grow)
    with taken.measuring("a"):
        pass
    assert seen(taken) == (0, 1)


@pytest.mark.parametrize("call", ["look", "cuMemPoolGetAttribute", "cuDeviceGetMemPool"])
def test_a_driver_that_fails_or_has_no_pool_says_nothing(simulated: Simulated, call: str) -> None:
    taken = simulated.taken()
    simulated.gpu.fail(simulated.look if call == "look" else call, error="CUDA_ERROR_NOT_SUPPORTED")
    with taken.measuring("a"):
        simulated.gpu.use_for_driver(3 * MIB)
    assert seen(taken) == (0, 1)


@pytest.mark.parametrize(("change", "whole"), [(100, (102 * MIB, 0)), (-100, (0, 1))], ids=["takes", "frees"])
def test_what_another_process_does_meanwhile_counts_only_where_the_whole_device_is_measured(
    simulated: Simulated, change: int, whole: tuple[int, int]
) -> None:
    simulated.gpu.others_have, taken = 200 * MIB, simulated.taken()
    with taken.measuring("a"):
        simulated.gpu.use_for_driver(3 * MIB)
        simulated.gpu.others_have += change * MIB
    assert seen(taken) == ((2 * MIB, 0) if simulated.gpu.has_nvml else whole)


def test_a_green_context_is_a_change(simulated: Simulated) -> None:
    taken = simulated.taken()
    with taken.measuring("a"):
        simulated.device.carve([0]).close()
    assert seen(taken) == (0, 1)


def test_memory_that_is_pinned_is_a_change(simulated: Simulated) -> None:
    memory, taken = bytearray(4096), simulated.taken()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with taken.measuring("a"):
        pinned = simulated.device.pin(address, len(memory))
    with taken.measuring("b"):
        pinned.close()
    assert seen(taken) == (0, 2)
