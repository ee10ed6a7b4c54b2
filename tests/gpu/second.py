"""`python -m tests.gpu.second PLAN`: an engine on the second GPU of a host, with memory and streams of all kinds; as JSON.

Each kind of memory is "right", or says what was wrong or refused. In a process of its own, as a process splits one GPU. See
test_two_devices.
"""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from engines import EngineError, Executor, Room, Tensor, load_engine, on_stream
from partitions import PartitionError, open_device

from .bench import Pinned, assert_close, expected, results, tensors
from .networks import feed, mlp

INDEX = 1
SHAPE = (8, 784)
GIVEN, TAKEN = 8 * 784 * 4, 8 * 10 * 4


class OnGpu:
    """An input and room for an output in a GPU's memory, allocated in one of the driver's ways."""

    def __init__(self, index: int, how: str, opened: ExitStack) -> None:
        from cuda.core import Device

        self._index, self._device = index, Device(index)
        with self:
            stream = self._device.create_stream()
            allocate = {"cuMemAlloc": self._plain, "from its pool": lambda nbytes: self._pooled(nbytes, stream)}[how]
            self.given, self.taken = allocate(GIVEN), allocate(TAKEN)
            opened.callback(stream.close)

    def __enter__(self) -> "OnGpu":
        self._device.set_current()
        return self

    def __exit__(self, *_: object) -> None:
        from cuda.core import Device

        Device(INDEX).set_current()

    def write(self, data: Any) -> None:
        self._call("cuMemcpyHtoD", self.given, data.ctypes.data, data.nbytes)

    def read(self) -> Any:
        found = np.empty((8, 10), np.float32)
        self._call("cuMemcpyDtoH", found.ctypes.data, self.taken, found.nbytes)
        return found

    def _plain(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def _pooled(self, nbytes: int, stream: Any) -> int:
        found = int(self._call("cuMemAllocAsync", nbytes, stream.handle))
        stream.sync()
        return found

    def _call(self, name: str, *arguments: Any) -> Any:
        from cuda.bindings import driver

        from partitions.cuda.driver import handle_return

        return handle_return(getattr(driver, name)(*arguments))


def said(body: Callable[[], Any], wanted: Any) -> str:
    """ "right", or what was wrong or refused."""
    try:
        assert_close([body()], wanted)
    except (EngineError, PartitionError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "right"


def enqueue(executor: Executor, memory: OnGpu, data: Any) -> Any:
    memory.write(data)
    executor.enqueue([Tensor(SHAPE, memory.given, GIVEN)], Room(memory.taken, TAKEN)).wait()
    return memory.read()


def main(path: Path) -> None:
    """Try all of them and print what was found."""
    network = mlp()
    arrays = feed(network, {"x": SHAPE}, 3)
    wanted, data, found = expected(network)(arrays), np.ascontiguousarray(arrays["x"]), dict[str, str]()
    with ExitStack() as opened:
        device: Any = opened.enter_context(closing(open_device("cuda", index=INDEX)))
        partition = opened.enter_context(closing(device.carve([0, 1])))
        partition.attach()
        engine = opened.enter_context(closing(load_engine(path, device)))
        executor = opened.enter_context(closing(engine.bind(partition)))
        pinned = opened.enter_context(closing(Pinned(device, engine, network, arrays)))

        def outputs(*enqueued: Any) -> Any:
            return results(engine, executor.enqueue(*enqueued).wait())[0]

        found["pinned memory"] = said(lambda: outputs(pinned.inputs, pinned.room), wanted)
        found["memory of the host"] = said(lambda: outputs(tensors(engine, network, arrays)), wanted)
        for how in ("cuMemAlloc", "from its pool"):
            own = OnGpu(INDEX, how, opened)
            found[f"its own memory, {how}"] = said(lambda own=own: enqueue(executor, own, data), wanted)  # type: ignore[misc]
        with closing(partition.make_stream()) as side, on_stream(side.stream):
            found["a selected stream"] = said(lambda: enqueue(executor, own, data), wanted)
            side.stream.sync()
        side = opened.enter_context(closing(partition.make_stream()))
        adopted = opened.enter_context(closing(device.adopt(side.stream)))
        there = opened.enter_context(closing(engine.bind(adopted)))
        found["an adopted stream"] = said(lambda: enqueue(there, own, data), wanted)
        for how in ("cuMemAlloc", "from its pool"):
            with OnGpu(0, how, opened) as foreign:
                foreign.write(data)
            inputs = [Tensor(SHAPE, foreign.given, GIVEN)]
            found[f"the first GPU's memory, {how}"] = said(lambda inputs=inputs: outputs(inputs), wanted)  # type: ignore[misc]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
