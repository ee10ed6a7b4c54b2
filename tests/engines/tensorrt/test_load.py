"""Plans that are loaded, refused, and bound to partitions of a simulated GPU."""

import gc
import json
import os
import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import Builds, CacheFolder, ModelRefused, RuntimeSettings, TensorMismatch, load_engine
from engines.model_files import known_plans
from engines.model_files.artifact import read_plan
from engines.model_files.profiles import Profile, Range
from engines.tensorrt.api import LIBRARIES, find_tensorrt
from engines.tensorrt.building.builder import BuildOptions, build_cached
from partitions import DeviceLost
from partitions.cpu import open_cpu
from tests.engines import as_tensorrt
from tests.engines.simulated import AFFINE, SEVERAL, TWO, Bench, affine, opened
from tests.engines.small import model
from tests.engines.tensors import run
from tests.simulation import Gpu
from tests.simulation.building import building, building_as
from tests.simulation.tensorrt import Runtime, library
from tests.simulation.tensorrt_config import (
    CudaGraphStrategy,
    DynamicShapesKernelSpecializationStrategy,
    ExecutionContextAllocationStrategy,
)

pytestmark = pytest.mark.usefixtures("forked_programs")
DESERIALIZING = ("__init__", "deserialize_cuda_engine")
DATA = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_a_bare_plan_says_itself_what_it_takes_and_gives(bench: Bench) -> None:
    path = bench.plan(SEVERAL, TWO)
    engine = bench.load(path)
    assert engine.platform == "tensorrt_plan"
    assert repr(engine) == (
        f"<TensorRTEngine {path.name} <Signature a FP32[-1, 3], b INT64[-1] -> "
        "sum FP32[-1, 3], more INT64[-1], both FP32[-1, 6], batch none>, TensorRT-RTX 1.6.1.120>"
    )
    assert engine.signature.inputs[1].limits == ((1, 5),)
    assert engine.signature.max_batch == 0


def test_an_engine_file_remembers_the_names_of_sizes(bench: Bench) -> None:
    engine = bench.load(bench.artifact(SEVERAL, TWO))
    assert [spec.dims for spec in engine.signature.inputs] == [("n", 3), ("n",)]
    assert [spec.limits for spec in engine.signature.inputs] == [((1, 5), (3, 3)), ((1, 5),)]
    with pytest.raises(TensorMismatch, match=r"input 'b': dimension 0 of shape .* is 3; dimension 'n' is 2 elsewhere"):
        engine.signature.check([(2, 3), (3,)])
    with pytest.raises(TensorMismatch, match=r"input 'a': dimension 0 of shape .* is 6; the engine was built for 1 to 5"):
        engine.signature.check([(6, 3), (6,)])


def test_an_engine_without_dynamic_sizes_has_no_limits(bench: Bench) -> None:
    engine = bench.load(bench.plan("fixed (float[2, 3] x) => (float[2, 3] y) { y = Add(x, x) }", {}))
    assert engine.signature.inputs[0].limits == ()
    executor = engine.bind(bench.partition)
    assert run(executor, DATA)[0].tolist() == (2 * DATA).tolist()
    executor.close()


def test_binding_runs_the_best_shape_until_its_graph_was_launched(bench: Bench) -> None:
    executor = bench.bind(AFFINE, {"x": [(1, 3), (5, 3), (8, 3)]})
    launched, captured = bench.gpu.log.count("cuGraphLaunch"), bench.gpu.log.count("cuGraphInstantiate")
    assert (launched, captured) == (1, 1)
    run(executor, np.zeros((5, 3), np.float32))
    assert bench.gpu.log.count("cuGraphLaunch") == 2
    assert bench.gpu.log.count("cuGraphInstantiate") == 1


# What is refused.


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"version": "1.7.1.116"}, "built with tensorrt_rtx 1.7.1.116, but this is tensorrt_rtx 1.6.1.120"),
        ({"library": "tensorrt"}, "the plan is for tensorrt 1.6.1.120, but this is tensorrt_rtx 1.6.1.120"),
        ({"targets": ("8.6", "12.0")}, "built for compute capabilities 8.6, 12.0, but the GPU has 9.0"),
    ],
)
def test_an_engine_file_for_something_else_is_refused_before_the_library_sees_it(
    bench: Bench, fields: dict[str, Any], why: str
) -> None:
    """F70, F78."""
    with pytest.raises(ModelRefused, match=rf"affine1.plan: {why}; build it again"):
        bench.load(bench.artifact(**fields))
    assert "Runtime.deserialize_cuda_engine" not in bench.gpu.log


def test_a_plan_that_cannot_be_loaded_is_refused_with_the_library_s_error(bench: Bench) -> None:
    """F78."""
    path = bench.folder / "junk.plan"
    path.write_bytes(b"junk")
    with pytest.raises(ModelRefused, match=r"junk\.plan: TensorRT-RTX 1\.6\.1\.120 cannot load it: Serialization"):
        bench.load(path)
    with pytest.raises(ModelRefused, match="No such file"):
        bench.load(bench.folder / "absent.plan")


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"shape_inputs": ["x"]}, "the values of 'x' decide shapes, which is not served; make it a constant"),
        ({"aliases": {"y": "x"}}, "output 'y' is written over input 'x', which is not served"),
    ],
)
def test_tensors_that_are_not_the_gpu_s_alone_are_refused_when_it_is_loaded(
    bench: Bench, facts: dict[str, Any], why: str
) -> None:
    """F31, F33."""
    with pytest.raises(ModelRefused, match=rf"affine1\.plan: {why}"):
        bench.load(bench.plan(**facts))


def test_a_library_that_knows_no_aliases_has_none(tmp_path: Path) -> None:
    """F33: as TensorRT 10.11."""
    gpu = Gpu()
    with opened(tmp_path, library(gpu, "tensorrt", "10.11"), gpu) as bench:
        bench.load(bench.plan(aliases={"y": "x"})).bind(bench.partition).close()
        bench.close()


def test_a_partition_of_a_cpu_is_refused(bench: Bench) -> None:
    engine, partition = bench.load(bench.plan()), open_cpu().carve([0])
    with pytest.raises(ModelRefused, match=r"affine1\.plan: TensorRT serves partitions of a GPU, not <CpuPartition"):
        engine.bind(partition)
    partition.close()


def test_a_partition_that_was_closed_is_refused(bench: Bench) -> None:
    engine, partition = bench.load(bench.plan()), bench.device.carve([1])
    partition.close()
    with pytest.raises(ModelRefused, match="cannot take another thread"):
        engine.bind(partition)


def test_a_context_that_cannot_be_created_is_refused_with_the_library_s_error(bench: Bench) -> None:
    engine = bench.load(bench.plan())
    bench.gpu.fail("ICudaEngine.create_execution_context")
    with pytest.raises(ModelRefused, match=r"TensorRT-RTX 1\.6\.1\.120 created no context: CUDA_ERROR_OUT_OF_MEMORY"):
        engine.bind(bench.partition)


@pytest.mark.parametrize(
    ("bits", "said"),
    [
        (1, "version mismatch"),
        (6, "unsupported cc, old cuda driver"),
        (32, "malformed engine"),
        (16, "insufficient gpu memory"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_library_s_reasons(bench: Bench, bits: int, said: str) -> None:
    """F78: before it is deserialised."""
    bench.gpu.verdict = ("INVALID", bits)
    with pytest.raises(
        ModelRefused, match=rf"affine1\.plan: TensorRT-RTX .* the plan does not fit here: {said}; build it again"
    ):
        bench.load(bench.plan())
    assert "Runtime.deserialize_cuda_engine" not in bench.gpu.log


@pytest.mark.parametrize(
    ("verdict", "said"),
    [(("INVALID", 2), "calls the plan INVALID here (unsupported cc)"), (("SUBOPTIMAL", 0), "SUBOPTIMAL here (no reason)")],
)
def test_a_plan_for_a_gpu_that_the_library_does_not_support_is_tried(
    bench: Bench, verdict: tuple[str, int], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """F78: TensorRT-RTX 1.6 says so of an H100, on which it runs."""
    bench.gpu.verdict = verdict
    executor = bench.bind()
    assert run(executor, DATA)[0].tolist() == affine(DATA).tolist()
    assert len(caplog.messages) == 1
    assert said in caplog.messages[0]


def test_a_library_that_cannot_validate_plans_is_not_asked_to(tmp_path: Path) -> None:
    gpu = Gpu()
    gpu.verdict = ("INVALID", 1)
    lacking = type("Runtime", (), {"_gpu": gpu, **{name: getattr(Runtime, name) for name in DESERIALIZING}})
    with opened(tmp_path, library(gpu, Runtime=lacking), gpu) as bench:
        bench.bind().close()
        bench.close()


# What goes wrong.


def steps(folder: Path) -> list[tuple[str, int]]:
    """Every call that binding makes, and its number among the calls of that name."""
    with opened(folder) as bench:
        engine, begun = bench.load(bench.plan()), len(bench.gpu.log)
        engine.bind(bench.partition).close()
        calls = bench.gpu.log[begun:]
    end = calls.index("cuGraphExecDestroy") - 3  # From there on it is closed.
    named = [call for call in calls[:end] if not call.endswith((".close", ".__del__"))]
    return [(call, named[: index + 1].count(call)) for index, call in enumerate(named)]


def outcome(engine: Any, partition: Any) -> str:
    """Bind without cached kernels, the model's and those of copies, and close: the type and the text of the error, or None."""
    kernels = engine.loaded.settings.cache_file(engine.path)
    kernels.unlink(missing_ok=True)
    shutil.rmtree(kernels.parent / "copies", ignore_errors=True)
    engine.loaded.device.kernels.close()
    try:
        engine.bind(partition).close()
    except (ModelRefused, DeviceLost) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_binding_that_fails_at_any_step_frees_what_it_made(tmp_path: Path, bench: Bench) -> None:
    """Or binding works without that step. The next bind is right."""
    path, before, refused = bench.plan(), bench.holdings(), set()
    for call, nth in steps(tmp_path):
        if call in ("cuGraphDestroy", "cuStreamDestroy"):
            continue  # If destroying fails, the object stays.
        engine = bench.load(path)  # After the first bind the kernels are cached.
        bench.gpu.fail(call, nth)
        if said := outcome(engine, bench.partition):
            assert said.startswith("ModelRefused: "), call
            assert "CUDA_ERROR_OUT_OF_MEMORY: as scripted" in said, call
            refused.add(call)
        bench.partition.stream.sync()
        engine.close()
        if bench.holdings() != before:
            gc.collect()  # The error's traceback held something.
        assert bench.holdings() == before, call
    assert refused >= {
        "Device.set_current", "ICudaEngine.create_runtime_config", "ICudaEngine.create_execution_context", "Device.allocate",
        "Program", "LegacyPinnedMemoryResource.allocate", "Buffer.fill", "Stream.sync", "Device.create_event",
        "IExecutionContext.infer_shapes", "IExecutionContext.execute_async_v3", "Stream.record", "Event.sync", "cuGraphLaunch",
    }  # fmt: skip
    executor = bench.load(path).bind(bench.partition)
    assert run(executor, DATA)[0].tolist() == affine(DATA).tolist()
    executor.close()


def test_a_binding_that_fails_at_any_step_leaves_an_engine_that_can_be_bound(tmp_path: Path, bench: Bench) -> None:
    """Perhaps with what the first attempt had made, which is freed only once."""
    path, before = bench.plan(), bench.holdings()
    for call, nth in steps(tmp_path):
        if call in ("cuGraphDestroy", "cuStreamDestroy"):
            continue
        engine = bench.load(path)
        bench.gpu.fail(call, nth)
        outcome(engine, bench.partition)
        executor = engine.bind(bench.partition)
        assert run(executor, DATA)[0].tolist() == affine(DATA).tolist(), call
        executor.close()
        engine.close()
        if bench.holdings() != before:
            gc.collect()
        assert bench.holdings() == before, call


def test_the_copy_kernels_are_compiled_once_for_all_partitions_and_models(bench: Bench) -> None:
    """So a model that is loaded, reloaded or paged in waits for no compiler, and no tenant for a kernel that is loaded."""
    compiled = bench.gpu.log.count("Program")
    for _ in range(2):
        engine = bench.load(bench.plan())
        executors = [engine.bind(bench.partition) for _ in range(3)]
        for executor in executors:
            executor.close()
        engine.close()
    assert bench.gpu.log.count("Program") == compiled + 1


def test_a_device_lost_at_any_step_of_a_bind_raises_device_lost(tmp_path: Path) -> None:
    """Once in every call."""
    for call, nth in dict(steps(tmp_path)).items():
        with opened(tmp_path) as bench:
            engine = bench.load(bench.plan())
            bench.gpu.fail(call, nth, "CUDA_ERROR_ECC_UNCORRECTABLE")
            said = outcome(engine, bench.partition)
            assert said.startswith("DeviceLost"), call
            assert "CUDA_ERROR_ECC_UNCORRECTABLE: " in said, call


@pytest.mark.parametrize("call", ["Device.set_current", "Device.compute_capability"])
def test_a_device_that_cannot_be_asked_refuses_the_model_or_is_lost(bench: Bench, call: str) -> None:
    path = bench.plan()
    bench.gpu.fail(call)
    with pytest.raises(ModelRefused, match="CUDA_ERROR_OUT_OF_MEMORY"):
        bench.load(path)
    bench.gpu.fail(call, error="CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(DeviceLost, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        bench.load(path)


# Contexts and strategies.


def configured(bench: Bench, **settings: Any) -> Any:
    """The configuration of the context that an engine with these settings is bound with."""
    executor = bench.bind(**settings)
    (context,) = bench.gpu.executions
    executor.close()
    bench.close_engines()
    return context.get_runtime_config()


def test_kernels_are_made_before_a_shape_runs_so_that_graphs_keep_the_best(bench: Bench) -> None:
    """F63."""
    config = configured(bench)
    assert config.dynamic_shapes_kernel_specialization_strategy is DynamicShapesKernelSpecializationStrategy.EAGER
    assert config.cuda_graph_strategy is CudaGraphStrategy.DISABLED


def test_kernel_strategies_are_those_of_the_settings(bench: Bench) -> None:
    """F39, F45: whenever a context is made."""
    settings = {
        "graphs": "off",
        "cuda_graph_strategy": "whole_graph_capture",
        "dynamic_shapes_kernel_specialization_strategy": "none",
        "allocation_strategy": "on_profile_change",
    }
    for _ in range(2):
        config = configured(bench, **settings)
        assert config.dynamic_shapes_kernel_specialization_strategy is DynamicShapesKernelSpecializationStrategy.NONE
        assert config.cuda_graph_strategy is CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        assert config.get_execution_context_allocation_strategy() is ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE


class Plain:
    """The configuration of a library without strategies."""


@pytest.mark.parametrize("lacking", [None, Plain])
def test_a_library_without_strategies_is_not_asked_for_any(tmp_path: Path, lacking: type | None) -> None:
    """F46: without a warning, as no strategy was set."""
    gpu = Gpu()
    with opened(tmp_path, library(gpu, IRuntimeConfig=lacking), gpu) as bench:
        executor = bench.bind()
        assert run(executor, DATA)[0].tolist() == affine(DATA).tolist()
        assert bench.gpu.log.count("ICudaEngine.create_runtime_config") == (lacking is not None)
        executor.close()
        bench.close_engines()
        with pytest.warns(UserWarning, match="has no cuda_graph_strategy: 'whole_graph_capture' has no effect"):
            configured(bench, cuda_graph_strategy="whole_graph_capture")
        bench.close()


@pytest.mark.parametrize("strategy", ["static", "on_profile_change", "user_managed"])
def test_a_library_without_a_configuration_is_given_the_allocation_strategy_alone(tmp_path: Path, strategy: str) -> None:
    """F46: it has an overload of `create_execution_context` for that."""
    gpu = Gpu()
    with opened(tmp_path, library(gpu, IRuntimeConfig=None), gpu) as bench:
        executor = bench.bind(allocation_strategy=strategy)
        (context,) = gpu.executions
        assert context.get_runtime_config().get_execution_context_allocation_strategy().name == strategy.upper()
        assert run(executor, DATA)[0].tolist() == affine(DATA).tolist()
        assert "ICudaEngine.create_runtime_config" not in gpu.log
        bench.close()


def test_an_allocation_strategy_is_a_warning_where_a_configuration_takes_none(tmp_path: Path) -> None:
    """F42, F46."""
    gpu = Gpu()
    with opened(tmp_path, library(gpu, IRuntimeConfig=Plain), gpu) as bench:
        with pytest.warns(UserWarning, match="has no allocation_strategy: 'on_profile_change' has no effect"):
            executor = bench.bind(allocation_strategy="on_profile_change")
        assert run(executor, DATA)[0].tolist() == affine(DATA).tolist()
        bench.close()


# ONNX.


def known(path: Path, options: BuildOptions = BuildOptions(), device: str = "") -> None:  # noqa: B008
    """Have the simulated library know the plan of a model that a child will build: every build gives the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        build_cached(path, Path(folder), options, device=device)


def test_an_onnx_file_is_built_once_into_its_folder(tmp_path: Path, rtx: Any) -> None:
    path, gpu = tmp_path / "double.onnx", Gpu()
    path.write_bytes(model("double (float[2, 3] x) => (float[2, 3] y) { y = Add(x, x) }"))
    with opened(tmp_path, library(gpu, **building(gpu, rtx.module)), gpu) as bench:
        known(path)
        engine = load_engine(path, bench.device)
        assert engine.path.parent == tmp_path / ".greenlane"
        made = os.stat(engine.path).st_mtime_ns
        executor = engine.bind(bench.partition)
        assert run(executor, DATA)[0].tolist() == (2 * DATA).tolist()
        executor.close()
        assert os.stat(bench.load(path).path).st_mtime_ns == made
        bench.close()


def test_a_plan_that_is_damaged_although_it_looks_unchanged_is_built_again(
    tmp_path: Path, rtx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a disk that loses bytes: its record is made again, with the state of the damaged file."""
    monkeypatch.setattr(known_plans, "SETTLED", 0.0)
    path, gpu, builds = tmp_path / "double.onnx", Gpu(), Builds(CacheFolder([tmp_path / "cache"]))
    path.write_bytes(model("double (float[2, 3] x) => (float[2, 3] y) { y = Add(x, x) }"))
    with opened(tmp_path, library(gpu, **building(gpu, rtx.module)), gpu) as bench:
        known(path)
        engine = build_cached(path, tmp_path / "cache")
        whole = engine.read_bytes()
        engine.write_bytes(damaged := whole[:-1] + b"!")
        (record,) = (tmp_path / "cache").glob("double-*.source")
        known_plans.record(record, engine, known_plans.states_of([path]))
        assert known_plans.known_plan(record) == engine
        load_engine(path, bench.device, builds=builds).close()
        assert engine.read_bytes() != damaged
        read_plan(engine)


def test_plans_and_kernels_are_kept_in_one_folder_where_no_model_takes_another_s(tmp_path: Path, rtx: Any) -> None:
    """Models' files mostly have the same name, so the cache does not go by it."""
    gpu, texts = Gpu(), ("y = Add(x, x)", "y = Mul(x, x)")
    builds = Builds(CacheFolder([tmp_path / "cache"]))
    with opened(tmp_path, library(gpu, **building(gpu, rtx.module)), gpu) as bench:
        files = [tmp_path / name / "model.onnx" for name in ("one", "two")]
        for path, text in zip(files, texts, strict=True):
            path.parent.mkdir()
            path.write_bytes(model(f"m (float[2, 3] x) => (float[2, 3] y) {{ {text} }}"))
            known(path)
        files.append(bench.plan().rename(tmp_path / "one" / "model.plan"))
        answers = []
        for path in files:
            executor = load_engine(path, bench.device, builds=builds).bind(bench.partition)
            answers.append(run(executor, DATA)[0].tolist())
            executor.close()
        bench.close()
    assert answers == [(2 * DATA).tolist(), (DATA * DATA).tolist(), affine(DATA).tolist()]
    files = [path for path in (tmp_path / "cache").iterdir() if path.is_file()]
    names = sorted(path.suffix for path in files if path.suffix not in (".lock", ".source"))
    assert names == [".cache"] * 3 + [".json"] * 2 + [".onnx"] + [".plan"] * 3, "one of them to make shared caches of"
    assert [path.name for path in (tmp_path / "one").iterdir()] in (["model.onnx", "model.plan"], ["model.plan", "model.onnx"])


def test_kernels_are_kept_where_the_settings_say_before_where_plans_are(tmp_path: Path, bench: Bench) -> None:
    builds, settings = Builds(CacheFolder([tmp_path / "cache"])), RuntimeSettings(cache_path=tmp_path / "kernels")
    load_engine(bench.plan(), bench.device, settings, builds=builds).bind(bench.partition).close()
    assert (tmp_path / "kernels").exists()
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_a_warning_for_kernels(
    tmp_path: Path, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file")
    executor = load_engine(bench.plan(), bench.device, builds=Builds(CacheFolder([tmp_path / "cache"]))).bind(bench.partition)
    assert run(executor, DATA)[0].tolist() == affine(DATA).tolist()
    executor.close()
    assert caplog.messages[0].startswith(f"nothing can be kept in {tmp_path / 'cache'} (Not a directory): kernels are compiled")
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_an_onnx_file_is_built_for_as_many_rows_as_are_asked_for(tmp_path: Path, rtx: Any) -> None:
    path, gpu = tmp_path / "double.onnx", Gpu()
    path.write_bytes(model("double (float[n, 3] x) => (float[n, 3] y) { y = Add(x, x) }"))
    with opened(tmp_path, library(gpu, **building(gpu, rtx.module)), gpu) as bench:
        for options in (BuildOptions(), BuildOptions(max_batch=32)):
            known(path, options)
        engines = [load_engine(path, bench.device, max_batch=rows) for rows in (None, 32)]
        assert [engine.signature.inputs[0].limits for engine in engines] == [((1, 8), (3, 3)), ((1, 32), (3, 3))]
        bench.close()


def test_an_onnx_file_is_built_with_the_profiles_and_weight_streaming_requested(tmp_path: Path, rtx: Any) -> None:
    """F74, and profiles."""
    path, gpu = tmp_path / "double.onnx", Gpu()
    path.write_bytes(model("double (float[n, 3] x) => (float[n, 3] y) { y = Add(x, x) }"))
    small, large = (((1, 3), (2, 3), (4, 3)), ((8, 3), (16, 3), (32, 3)))
    settings = RuntimeSettings(build_profiles=((("x", small),), (("x", large),)))
    with opened(tmp_path, library(gpu, **building(gpu, rtx.module)), gpu) as bench:
        known(path, BuildOptions((Profile({"x": Range(*small)}), Profile({"x": Range(*large)})), max_batch=2))
        engine = load_engine(path, bench.device, settings, max_batch=2)
        assert engine.signature.inputs[0].limits == ((1, 32), (3, 3))
        assert [profile.ranges["x"].max for profile in engine.loaded.profiles] == [(4, 3), (32, 3)]
        known(path, BuildOptions(flags=("weight_streaming",)))
        with pytest.raises(ModelRefused, match="a weight_streaming_budget of 9 bytes has no effect"):
            load_engine(path, bench.device, RuntimeSettings(weight_streaming_budget=9))
        with pytest.raises(ModelRefused, match=r"double\.onnx: profile 0: the model has no input 'z'"):
            load_engine(path, bench.device, RuntimeSettings(build_profiles=((("z", small),),)))
        bench.close()


def test_a_library_that_measures_builds_on_the_gpu_and_for_each_kind_of_it(tmp_path: Path, rtx: Any) -> None:
    path = tmp_path / "double.onnx"
    path.write_bytes(model("double (float[2, 3] x) => (float[2, 3] y) { y = Add(x, x) }"))
    builds = Builds(command=as_tensorrt.command(tmp_path, "11.4"))
    built = set()
    for name, arch in (("one", "90"), ("another", "90"), ("one", "100")):
        gpu = Gpu()
        gpu.name, gpu.arch = name, arch
        with opened(
            tmp_path, library(gpu, "tensorrt", "11.4", **building_as(gpu, rtx.module, "tensorrt", "11.4")), gpu
        ) as bench:
            known(path)
            built |= {load_engine(path, bench.device, builds=builds).path for _ in range(2)}
            bench.close()
    assert len(built) == 3
    assert (tmp_path / f"gpu-{Gpu.index}").exists()


def test_a_library_that_times_kernels_builds_nothing_on_a_gpu_that_serves(tmp_path: Path, rtx: Any) -> None:
    """What was built before is served, also after a change of the cores that builds may use."""
    files, idle = [tmp_path / name for name in ("one.onnx", "other.onnx")], [True]
    for count, path in enumerate(files, 2):
        path.write_bytes(model(f"m (float[{count}, 3] x) => (float[{count}, 3] y) {{ y = Add(x, x) }}"))
    builds = Builds(command=as_tensorrt.command(tmp_path, "11.4"), is_idle=lambda: idle[0])
    gpu = Gpu()
    with opened(tmp_path, library(gpu, "tensorrt", "11.4", **building_as(gpu, rtx.module, "tensorrt", "11.4")), gpu) as bench:
        known(files[0])
        load_engine(files[0], bench.device, builds=builds)
        idle[0] = False
        load_engine(files[0], bench.device, builds=builds)
        why = r"other\.onnx: TensorRT builds it by timing kernels on the GPU, .*; build it ahead with `greenlane build`"
        with pytest.raises(ModelRefused, match=why):
            load_engine(files[1], bench.device, builds=builds)
        bench.close()


def test_what_was_timed_is_kept_beside_the_plans_for_later_builds(
    tmp_path: Path, rtx: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache, gpu = tmp_path / "cache", Gpu()

    def build(count: int) -> list[str]:
        """Build another model; what is kept afterwards."""
        path = tmp_path / f"{count}.onnx"
        path.write_bytes(model(f"m (float[{count}, 3] x) => (float[{count}, 3] y) {{ y = Add(x, x) }}"))
        build_cached(path, cache, api=find_tensorrt(["tensorrt"]), device="a GPU")
        (kept,) = cache.glob("timings-*.cache")
        return json.loads(kept.read_bytes()) if kept.is_file() else []  # type: ignore[no-any-return]

    with opened(tmp_path, library(gpu, "tensorrt", "11.4", **building_as(gpu, rtx.module, "tensorrt", "11.4")), gpu) as bench:
        first = build(2)
        assert len(first) == 1
        assert set(first) < set(build(3))
        (kept,) = cache.glob("timings-*.cache")
        kept.write_bytes(b"damaged")
        assert len(build(4)) == 1
        assert caplog.messages == []
        kept.unlink()
        kept.mkdir()
        build(5)
        assert [message.partition(":")[0] for message in caplog.messages] == [
            "kernels are timed again",
            "timings of kernels are not kept for the next build",
        ]
        bench.close()


@pytest.mark.parametrize("version", ["10.11", "11.4"])
def test_a_plan_that_was_timed_on_the_whole_gpu_warns_on_a_partition_before_it_runs(
    tmp_path: Path, rtx: Any, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, gpu = tmp_path / "double.onnx", Gpu()
    path.write_bytes(model("double (float[2, 3] x) => (float[2, 3] y) { y = Add(x, x) }"))
    with opened(tmp_path, library(gpu, "tensorrt", version, **building_as(gpu, rtx.module, "tensorrt", version)), gpu) as bench:
        (profile,) = read_plan(build_cached(path, tmp_path, api=find_tensorrt(["tensorrt"]))).artifact.profiles  # type: ignore[union-attr]
        assert (profile.sms, profile.tuned) == (132, True)
        engine = load_engine(path, bench.device, builds=Builds(command=as_tensorrt.command(tmp_path, version)))
        gpu.meanwhile("IExecutionContext.execute_async_v3", lambda: warned.extend(caplog.messages))
        warned: list[str] = []
        with closing(engine), closing(engine.bind(bench.partition)) as executor:
            assert executor.describe()["missing_sms"] == 124
        (text,) = [message for message in warned if "132 SMs" in message]
        assert "profile 0 is tuned for 132 SMs and runs on 8 of" in text
        assert "where kernels whose blocks wait for each other may fail or never end" in text
        bench.close()


def test_the_simulated_library_goes_by_one_of_the_real_names() -> None:
    assert library(Gpu()).__name__ in LIBRARIES["tensorrt_rtx"]
