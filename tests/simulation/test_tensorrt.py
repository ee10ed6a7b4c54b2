"""The simulated library compared with the documentation of the real one."""

from collections.abc import Callable, Iterator
from contextlib import closing
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import Builds, ModelRefused, load_engine
from engines.model_files.artifact import unpack
from engines.model_files.profiles import Profile, Range
from engines.tensorrt.api import collect_messages, find_tensorrt
from engines.tensorrt.building.builder import BuildOptions, build, build_cached
from tests.engines import as_tensorrt
from tests.engines.manifest import find_manifest
from tests.engines.simulated import AFFINE, ROWS, Bench, assert_right, opened, rows
from tests.engines.small import model
from tests.engines.tensors import Array

from . import Gpu, Misuse
from .building import building_as
from .plans import Ranges, make_plan
from .tensorrt import IOutputAllocator, library
from .tensorrt_config import ExecutionContextAllocationStrategy

pytestmark = pytest.mark.usefixtures("forked_programs")
NONZERO = "nonzero (float[n, 3] x) => (int64[2, found] y) { y = NonZero(x) }"


class Allocator(IOutputAllocator):
    """Gives memory of a bench for an output, `most` bytes at most, and records the calls."""

    def __init__(self, bench: Bench, most: int = 4096) -> None:
        IOutputAllocator.__init__(self)
        self._bench = bench
        self._most = most
        self.asked: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.memory: Any = None

    def reallocate_output_async(self, name: str, memory: int, size: int, alignment: int, stream: int) -> int:
        self.asked.append(size)
        self.memory = self._bench.memory(self._most)
        return int(self.memory.room.address) if size <= self._most else 0

    def notify_shape(self, name: str, shape: Any) -> None:
        self.shapes.append(tuple(shape))

    def numbers(self, dtype: Any) -> Array:
        """What lies in the memory."""
        shape, itemsize = self.shapes[-1], np.dtype(dtype).itemsize
        return np.array(self.memory.bytes[: int(np.prod(shape)) * itemsize]).view(dtype).reshape(shape)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with opened(tmp_path) as bench:
        yield bench
        bench.close()


def context(bench: Bench, text: str, ranges: Ranges, **facts: Any) -> Any:
    """An execution context of a model, without any code of engines around it."""
    bench.device.make_current()
    return bench.load(bench.plan(text, ranges, **facts)).plan.create_execution_context()


def put(bench: Bench, context: Any, **arrays: Array) -> None:
    """Shapes and addresses of inputs."""
    for name, array in arrays.items():
        (tensor,) = bench.pinned(array)
        assert context.set_input_shape(name, array.shape)
        assert context.set_tensor_address(name, tensor.address)


def execute(bench: Bench, context: Any) -> bool:
    done = context.execute_async_v3(bench.partition.handle)
    bench.partition.stream.sync()
    return bool(done)


def test_the_most_bytes_of_an_output_are_unknown_only_while_the_shapes_are(bench: Bench) -> None:
    one = context(bench, AFFINE, ROWS)
    assert one.get_max_output_size("y") == -1
    one.set_input_shape("x", (5, 3))
    assert one.get_max_output_size("y") == 60
    assert one.get_max_output_size("x") == one.get_max_output_size("absent") == -1
    other = bench.load(bench.plan()).plan
    first, second = other.create_execution_context(), other.create_execution_context()
    assert [each.active_optimization_profile for each in (first, second)] == [0, -1]
    assert second.get_max_output_size("y") == -1


def test_an_allocator_gets_size_and_shape_before_execute_returns(bench: Bench) -> None:
    one, allocator = context(bench, NONZERO, ROWS), Allocator(bench)
    assert one.set_output_allocator("y", allocator)
    assert one.get_output_allocator("y") is allocator
    data = np.array([[0, 1, 0], [2, 0, 3]], np.float32)
    put(bench, one, x=data)
    assert one.execute_async_v3(bench.partition.handle)
    assert (allocator.asked, allocator.shapes) == ([48], [(2, 3)])
    bench.partition.stream.sync()
    assert allocator.numbers(np.int64).tolist() == np.array(np.nonzero(data)).tolist()
    assert tuple(one.get_tensor_shape("y")) == (2, -1)


def test_an_allocator_that_gives_nothing_or_raises_refuses_the_run(bench: Bench) -> None:
    one = context(bench, NONZERO, ROWS)
    put(bench, one, x=np.ones((8, 3), np.float32))
    one.set_output_allocator("y", Allocator(bench, most=8))
    assert not execute(bench, one)
    broken = Allocator(bench)
    broken._bench = None  # type: ignore[assignment]
    one.set_output_allocator("y", broken)
    assert not execute(bench, one)


def test_an_allocator_may_have_any_output_and_be_taken_back(bench: Bench) -> None:
    one, allocator = context(bench, AFFINE, ROWS), Allocator(bench)
    put(bench, one, x=np.ones((2, 3), np.float32))
    one.set_output_allocator("y", allocator)
    assert execute(bench, one)
    assert allocator.numbers(np.float32).tolist() == [[-1, -1, -1]] * 2
    one.set_output_allocator("y", None)
    assert one.get_output_allocator("y") is None
    assert not execute(bench, one)
    assert not one.set_output_allocator("x", allocator)


def test_an_allocator_whose_base_was_not_made_is_refused(bench: Bench) -> None:
    class Unmade(IOutputAllocator):
        def __init__(self) -> None:
            """Does not call the base class's constructor, which is easily forgotten."""

    with pytest.raises(TypeError, match="__init__"):
        context(bench, AFFINE, ROWS).set_output_allocator("y", Unmade())


def test_data_dependent_outputs_invalidate_a_capture(bench: Bench) -> None:
    one, allocator = context(bench, NONZERO, ROWS), Allocator(bench)
    one.set_output_allocator("y", allocator)
    put(bench, one, x=np.ones((2, 3), np.float32))
    assert execute(bench, one)
    bench.gpu.begin_capture(bench.partition.stream.simulated, thread_local=True)
    assert not one.execute_async_v3(bench.partition.handle)
    bench.partition.stream.simulated.capture = bench.gpu.here.capture = None
    assert len(allocator.asked) == 1


def test_an_aliased_output_has_the_input_s_address(bench: Bench) -> None:
    bench.device.make_current()
    path = bench.folder / "aliased.plan"
    path.write_bytes(make_plan(model(AFFINE), ROWS, aliases={"y": "x"}))
    plan = bench.tensorrt.find_tensorrt().deserialize(path.read_bytes(), "aliased.plan")
    assert plan.get_aliased_input_tensor("y") == "x"
    one = plan.create_execution_context()
    put(bench, one, x=np.ones((2, 3), np.float32))
    one.set_tensor_address("y", bench.room().address)
    assert not execute(bench, one)
    one.set_tensor_address("y", one.get_tensor_address("x"))
    assert execute(bench, one)


# Versions.


@pytest.mark.parametrize(
    ("name", "version", "has", "lacks"),
    [
        ("tensorrt_rtx", "1.6", ["CudaGraphStrategy", "IRuntimeCache", "EngineValidity"], []),
        ("tensorrt", "11.4", ["IRuntimeConfig"], ["CudaGraphStrategy", "IRuntimeCache", "EngineValidity"]),
        ("tensorrt", "10.11", ["IRuntimeConfig"], ["DynamicShapesKernelSpecializationStrategy", "EngineInvalidityDiagnostics"]),
    ],
)
def test_a_version_has_the_members_of_its_manifest(name: str, version: str, has: list[str], lacks: list[str]) -> None:
    module = library(Gpu(), name, version)
    manifest = find_manifest(name, version)["classes"]
    assert module.__version__.startswith(version)
    assert [each for each in has if not hasattr(module, each)] == [each for each in lacks if hasattr(module, each)] == []
    for key, kind in vars(module).items():
        if isinstance(kind, type) and not issubclass(kind, IntEnum):
            theirs = {part for parts in manifest[key].values() for part in parts}
            assert {part for part in dir(kind) if not part.startswith("_")} <= theirs


def test_an_object_has_no_more_than_its_class(tmp_path: Path) -> None:
    """The objects that others make are of the narrowed classes too."""
    gpu = Gpu()
    module = library(gpu, "tensorrt", "10.11")
    with opened(tmp_path, module, gpu) as bench:
        bench.device.make_current()
        plan = bench.load(bench.plan()).plan
        config = plan.create_runtime_config()
        assert isinstance(plan, module.ICudaEngine)
        assert isinstance(config, module.IRuntimeConfig)
        assert isinstance(plan.create_execution_context(config), module.IExecutionContext)
        assert not any(map(hasattr, (plan, config), ("get_aliased_input_tensor", "cuda_graph_strategy")))
        bench.close()


@pytest.mark.parametrize("named", [True, False])
def test_a_context_is_made_of_an_allocation_strategy_alone(bench: Bench, named: bool) -> None:
    kind = ExecutionContextAllocationStrategy.USER_MANAGED
    bench.device.make_current()
    plan = bench.load(bench.plan()).plan
    one = plan.create_execution_context(strategy=kind) if named else plan.create_execution_context(kind)
    assert one.get_runtime_config().get_execution_context_allocation_strategy() is kind
    put(bench, one, x=np.ones((2, 3), np.float32))
    one.set_tensor_address("y", bench.room().address)
    with pytest.raises(Misuse, match="less memory than the engine needs"):
        one.execute_async_v3(bench.partition.handle)


@pytest.mark.parametrize(
    ("built_for", "said"),
    [
        ([], "without CUDA green context constraints"),
        ([64], "has 8 SMs and the optimization profile was built for 64"),
        ([8], ""),
    ],
)
def test_a_library_that_knows_green_contexts_compares_them_with_the_profile(
    tmp_path: Path, built_for: list[int], said: str
) -> None:
    """It warns and goes on; the docstring of TensorRT 11.4 calls what follows undefined."""
    gpu = Gpu()
    with opened(tmp_path, library(gpu, "tensorrt", "11.4"), gpu) as bench:
        one = context(bench, AFFINE, ROWS, built_for=built_for)
        put(bench, one, x=np.ones((2, 3), np.float32))
        one.set_tensor_address("y", bench.room().address)
        with collect_messages() as messages:
            assert execute(bench, one)
        assert [message.severity for message in messages] == ["WARNING"] * bool(said)
        assert all(said in message.text for message in messages)
        bench.close()


def test_a_library_that_knows_green_contexts_makes_streams_there_and_keeps_them(tmp_path: Path) -> None:
    gpu = Gpu()
    with opened(tmp_path, library(gpu, "tensorrt", "11.4"), gpu) as bench:
        one = context(bench, AFFINE, ROWS, aux_streams=2)
        put(bench, one, x=np.ones((2, 3), np.float32))
        one.set_tensor_address("y", bench.room().address)
        for _ in range(2):
            assert execute(bench, one)
        (green,) = gpu.contexts
        assert sum(not stream.closed for stream in green.streams) == 3
        del one
        assert sum(not stream.closed for stream in green.streams) == 1
        bench.close()


@pytest.mark.parametrize("version", ["10.11", "11.4"])
def test_an_onnx_file_is_built_by_what_the_full_library_s_builder_has(tmp_path: Path, version: str) -> None:
    """The real builder is TensorRT-RTX's, behind the names and parameters of the full library's."""
    rtx = pytest.importorskip("tensorrt_rtx_bindings", reason="needs the rtx extra")
    path, gpu = tmp_path / "affine.onnx", Gpu()
    path.write_bytes(model(AFFINE))
    with opened(tmp_path, library(gpu, "tensorrt", version, **building_as(gpu, rtx, "tensorrt", version)), gpu) as bench:
        api = find_tensorrt(["tensorrt"])
        build_cached(path, tmp_path, api=api)  # So that this GPU knows the plan, of which a child makes the same bytes.
        engine = load_engine(path, bench.device, builds=Builds(command=as_tensorrt.command(tmp_path, version)))
        with closing(engine), closing(engine.bind(bench.partition)) as executor:
            assert_right(executor, rows(5))
        profiles = (
            Profile({"x": Range((1, 3), (2, 3), (4, 3))}, sms=8),
            Profile({"x": Range((1, 3), (8, 3), (16, 3))}, sms=16),
        )
        options = BuildOptions(profiles, optimization_level=2, max_aux_streams=1, flags=("weight_streaming", "no_tf32"))
        built = unpack(build(path.read_bytes(), options, api=api, stream_for=lambda sms: 0x1000 + sms), "affine").artifact
        assert built is not None
        assert [profile.tuned for profile in built.profiles] == [version == "11.4"] * 2
        with pytest.raises(ModelRefused, match="it builds for the GPU it runs on"):
            build(path.read_bytes(), BuildOptions(targets=("8.6",)), api=api)
        bench.close()


def test_a_name_that_a_version_lacks_is_not_there_for_the_builder_either() -> None:
    rtx = pytest.importorskip("tensorrt_rtx_bindings", reason="needs the rtx extra")
    builder = building_as(Gpu(), rtx, "tensorrt", "11.4")["Builder"](rtx.Logger())
    config = builder.create_builder_config()
    for use in (
        lambda: config.num_compute_capabilities,
        lambda: setattr(config, "num_compute_capabilities", 1),
        lambda: setattr(config, "num_optimization_profiles", 1),
    ):
        with pytest.raises(AttributeError, match="IBuilderConfig has no num_"):
            use()
    with pytest.raises(TypeError, match=r"takes \[\['profile'\]\]"):
        config.add_optimization_profile()


# What is work on a stream, and what threads may do.

OTHER: Ranges = {"x": [(1, 3), (9, 3), (20, 3)]}


def two_profiles(bench: Bench) -> Any:
    """A context of an engine with two profiles, fully set up for the first."""
    bench.device.make_current()
    one = bench.load(bench.plan(AFFINE, ROWS, OTHER)).plan.create_execution_context()
    put(bench, one, x=np.ones((2, 3), np.float32))
    one.set_tensor_address("y", bench.room().address)
    return one


def test_an_inference_has_to_follow_the_switch_of_its_profile(bench: Bench) -> None:
    """The binding says: to order the two streams is the application's responsibility."""
    one, side = two_profiles(bench), bench.partition.make_stream()
    one.set_optimization_profile_async(1, bench.partition.handle)
    one.set_input_shape("x", (2, 3))
    with pytest.raises(Misuse, match="does not follow the switch"):
        one.execute_async_v3(side.handle)
    assert one.execute_async_v3(bench.partition.handle)
    bench.partition.stream.sync()
    side.close()


def test_a_context_is_not_destroyed_while_its_profile_is_switched(bench: Bench) -> None:
    one = two_profiles(bench)
    one.set_optimization_profile_async(1, bench.partition.handle)
    with pytest.raises(Misuse, match="before its profile was switched"):
        one.__del__()
    bench.partition.stream.sync()
    one.__del__()


@pytest.mark.parametrize(
    "touch",
    [
        lambda one: one.set_input_shape("x", (2, 3)),
        lambda one: one.set_tensor_address("x", 0),
        lambda one: one.set_output_allocator("y", None),
        lambda one: one.set_aux_streams([]),
        lambda one: one.set_device_memory(0, 0),
        lambda one: one.set_optimization_profile_async(1, 0),
        lambda one: one.infer_shapes(),
    ],
    ids=["shape", "address", "allocator", "streams", "memory", "profile", "infer"],
)
def test_a_context_must_not_be_changed_while_it_executes(bench: Bench, touch: Callable[[Any], object]) -> None:
    one = two_profiles(bench)
    assert one.execute_async_v3(bench.partition.handle)
    with pytest.raises(Misuse, match="with 1 inferences in flight"):
        touch(one)
    bench.partition.stream.sync()


def test_a_profile_is_not_switched_in_a_process_that_builds(bench: Bench) -> None:
    """Seen on an H100: it keeps the interpreter while it waits for the build, whose logger waits for the interpreter."""
    one = two_profiles(bench)
    bench.gpu.building = 1
    with pytest.raises(Misuse, match="during a build"):
        one.set_optimization_profile_async(1, bench.partition.handle)
    bench.gpu.building = 0


@pytest.mark.parametrize("call", ["execute_async_v3", "set_input_shape"])
def test_a_context_is_one_thread_s_at_a_time(bench: Bench, call: str) -> None:
    one, said = two_profiles(bench), []

    def meanwhile() -> None:
        with pytest.raises(Misuse, match="two threads") as raised:
            one.set_input_shape("x", (3, 3))
        said.append(str(raised.value))

    bench.gpu.meanwhile(f"IExecutionContext.{call}", lambda: bench.partition.run(meanwhile))
    one.execute_async_v3(bench.partition.handle) if call == "execute_async_v3" else one.set_input_shape("x", (2, 3))
    bench.partition.stream.sync()
    assert len(said) == 1
