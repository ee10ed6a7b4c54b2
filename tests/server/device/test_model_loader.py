"""Models from files to executors, and the messages about those that cannot be loaded or honoured."""

import json
import logging
from pathlib import Path

import pytest

from engines import DATATYPES, Engine, ModelRefused, RuntimeSettings, Signature, TensorSpec
from engines.signature import Default
from partitions import Partition
from server.config.schema import Config, DeviceConfig, ModelOptions, ModelsConfig
from server.config.tenant import TenantConfig
from server.device.loaded_model import LoadedModel
from server.device.model_loader import ModelLoader, Read, open_model_loader
from server.repository.model_repository import Repository
from server.scheduling.batching import Batching
from server.tenants.catalog import IndexEntry
from tests.fakes import FakeDevice, FakeEngine, Script

SIGNATURE = Signature((TensorSpec("x", DATATYPES["FP32"], ("n",)),), ())


@pytest.fixture
def partitions() -> list[Partition]:
    device = FakeDevice()
    return [device.carve([0]), device.carve([1])]


def add(root: Path, model: str, config: str = "", version: str = "1") -> None:
    (root / model / version).mkdir(parents=True)
    (root / model / version / "model.onnx").touch()
    (root / model / "config.pbtxt").write_text(config)


def library(root: Path, read: Read = lambda path, max_batch, settings: FakeEngine(SIGNATURE, Script())) -> ModelLoader:
    return ModelLoader(Repository(root, {}), read)


def load(models: ModelLoader, name: str, partition: Partition) -> LoadedModel:
    return models.bind(models.prepare(name), partition)


def configured(root: Path, copies: str = "auto", **options: ModelOptions) -> Config:
    models = ModelsConfig(repository=root, options=options)
    return Config(device=DeviceConfig(copies=copies), models=models, tenants={}, source="greenlane.toml")


def refuse(path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
    raise ModelRefused(f"{path}: no good")


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == "greenlane.models"]
    caplog.clear()
    return found


def test_a_warning_is_logged_once_for_a_model(
    tmp_path: Path, partitions: list[Partition], caplog: pytest.LogCaptureFixture
) -> None:
    add(tmp_path, "m", "instance_group { gpus: 0 }")
    models = library(tmp_path)
    for partition in [*partitions, *partitions]:
        assert load(models, "m", partition).served
    assert messages(caplog) == ["m/config.pbtxt: ignored, as they mean nothing here: instance_group.gpus"]


def test_a_problem_is_logged_once_and_again_after_it_was_fixed(
    tmp_path: Path, partitions: list[Partition], caplog: pytest.LogCaptureFixture
) -> None:
    add(tmp_path, "m", "max_batch_size: -1")
    models, (first, second) = library(tmp_path), partitions
    load(models, "m", first)
    load(models, "m", second)
    assert messages(caplog) == [
        "model m is unavailable: m/config.pbtxt: max_batch_size is -1; expected 0 (no batching) or more"
    ]
    (tmp_path / "m" / "config.pbtxt").write_text("")
    assert load(models, "m", first).served
    (tmp_path / "m" / "config.pbtxt").write_text("max_batch_size: -1")
    load(models, "m", first)
    assert len(messages(caplog)) == 1


def test_a_problem_of_a_version_names_it_without_the_path_of_the_repository(
    tmp_path: Path, partitions: list[Partition], caplog: pytest.LogCaptureFixture
) -> None:
    add(tmp_path, "m")
    load(library(tmp_path, refuse), "m", partitions[0])
    assert messages(caplog) == ["model m 1 is unavailable: m/1/model.onnx: no good"]


def test_a_model_with_batches_has_batching_or_a_warning_why_not(
    tmp_path: Path, partitions: list[Partition], caplog: pytest.LogCaptureFixture
) -> None:
    add(tmp_path, "m", "max_batch_size: 4")
    add(tmp_path, "square", "max_batch_size: 4")
    square = Signature((TensorSpec("x", DATATYPES["FP32"], ("n", "n")),), ())
    models = library(tmp_path, lambda path, *_: FakeEngine(square if "square" in str(path) else SIGNATURE, Script()))
    (joined,), (alone,) = (load(models, name, partitions[0]).served for name in ("m", "square"))
    assert joined.batching == Batching(SIGNATURE.with_max_batch(4), 4)
    assert "dynamic_batching" in joined.config
    assert alone.batching is None
    assert messages(caplog) == [
        "model square 1: requests are not joined into batches: 'x' has the batch dimension 'n' in another place too: [n, n]"
    ]


def test_attempt_returns_its_messages_and_logs_none(
    tmp_path: Path, partitions: list[Partition], caplog: pytest.LogCaptureFixture
) -> None:
    add(tmp_path, "m", "zzz: 1")
    loaded = library(tmp_path, refuse).attempt("m", partitions[0])
    assert loaded.messages() == (
        "m/config.pbtxt: ignored, as they mean nothing here: zzz (there is no such field)",
        "model m 1 is unavailable: m/1/model.onnx: no good",
    )
    assert messages(caplog) == []


def test_a_version_that_does_not_fit_the_tenants_memory_is_not_bound(tmp_path: Path, partitions: list[Partition]) -> None:
    add(tmp_path, "m")
    add(tmp_path, "m2")
    large, script = Signature((TensorSpec("x", DATATYPES["FP32"], (1 << 40,)),), ()), Script()
    engines = {"m": FakeEngine(large, script), "m2": FakeEngine(SIGNATURE, script)}
    models = library(tmp_path, lambda path, max_batch, settings: engines[path.parent.parent.name])
    tenant = TenantConfig(name="acme", granules=1, models=("*",), memory=1 << 20)
    found = [models.attempt(name, partitions[0], tenant=tenant) for name in engines]
    assert [len(each.executors) for each in engines.values()] == [0, 1]
    assert [len(each.served) for each in found] == [0, 1]
    assert found[0].problems[0].reason.startswith("its smallest request takes 4398046511104 bytes of memory (inputs")


def test_an_engine_is_read_once_for_all_partitions(tmp_path: Path, partitions: list[Partition]) -> None:
    add(tmp_path, "m")
    read: list[FakeEngine] = []

    def remember(path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
        read.append(FakeEngine(SIGNATURE, Script()))
        return read[-1]

    models = library(tmp_path, remember)
    loaded = [load(models, "m", partition) for partition in partitions]
    assert len(read) == 1
    assert repr(models) == f"<ModelLoader <Repository {tmp_path}>, 1 engine>"
    assert {len(each.executors) for each in loaded} == {1}


def test_an_engine_is_read_with_the_configured_max_batch(tmp_path: Path, partitions: list[Partition]) -> None:
    asked: list[int | None] = []

    def read(path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
        asked.append(max_batch)
        return FakeEngine(SIGNATURE, Script())

    for config in ("", "max_batch_size: 0", "max_batch_size: 32"):
        add(tmp_path / config[-1:], "m", config=config)
        load(library(tmp_path / config[-1:], read), "m", partitions[0])
    assert asked == [None, None, 32]


def test_an_unreadable_repository_counts_as_empty_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert library(tmp_path / "gone").names() == []
    (message,) = messages(caplog)
    assert message.startswith("the model repository cannot be read, so it counts as empty: [Errno 2]")


def test_an_unexpected_error_of_a_library_is_a_problem_logged_with_a_traceback(
    tmp_path: Path, partitions: list[Partition], caplog: pytest.LogCaptureFixture
) -> None:
    add(tmp_path, "m")

    def raise_it(path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
        raise RuntimeError("a bug")

    loaded = load(library(tmp_path, raise_it), "m", partitions[0])
    assert [problem.reason for problem in loaded.problems] == ["a bug"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]
    assert caplog.records[0].exc_info


class Reader:
    """Makes fake engines, and records the settings of each."""

    def __init__(self) -> None:
        self.settings: list[RuntimeSettings] = []
        self.engines: list[FakeEngine] = []

    def __call__(self, path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
        self.settings.append(settings)
        self.engines.append(FakeEngine(SIGNATURE, Script()))
        return self.engines[-1]


@pytest.mark.parametrize("copies", ["auto", "sm", "engine"])
def test_a_model_without_options_has_the_devices_copies_and_usual_warm_up(
    tmp_path: Path, partitions: list[Partition], copies: str
) -> None:
    add(tmp_path, "m", "max_batch_size: 0")
    read = Reader()
    load(open_model_loader(configured(tmp_path, copies), FakeDevice(), read), "m", partitions[0])
    assert read.settings == [RuntimeSettings(copies=copies, warm_up="usual")]


def test_the_servers_configuration_overrules_the_models(tmp_path: Path, partitions: list[Partition]) -> None:
    for name in ("m", "n"):
        add(tmp_path, name, "max_batch_size: 8 model_warmup { batch_size: 8 } optimization { cuda { graphs: false } }")
    read = Reader()
    models = open_model_loader(configured(tmp_path, m=ModelOptions(warm_up=(1, 4))), FakeDevice(), read)
    for name in ("m", "n"):
        assert load(models, name, partitions[0]).messages() == ()
    assert [(each.warm_up, each.graphs) for each in read.settings] == [((1, 4), "off"), ((8,), "off")]


@pytest.mark.parametrize(("config", "padding"), [("", False), ("max_batch_size: 0", False), ("max_batch_size: 8", True)])
def test_batch_padding_is_on_where_max_batch_size_is_configured(
    tmp_path: Path, partitions: list[Partition], config: str, padding: bool
) -> None:
    add(tmp_path, "m", config)
    read = Reader()
    load(open_model_loader(configured(tmp_path), FakeDevice(), read), "m", partitions[0])
    assert [each.batch_padding for each in read.settings] == [padding]


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        ("", ()),
        ("input { name: 'x' data_type: TYPE_FP32 dims: [-1, 16] }", (("x", (-1, 16)),)),
        ("max_batch_size: 8 input { name: 'x' data_type: TYPE_FP32 dims: 16 }", (("x", (-1, 16)),)),
        ("max_batch_size: 8 input { name: 'x' data_type: TYPE_FP32 dims: 32 reshape { shape: [8, 4] } }", (("x", (-1, 8, 4)),)),
        ("input { name: 'x' data_type: TYPE_FP32 dims: [9999999, 16] }", ()),
    ],
)
def test_the_sizes_of_inputs_in_config_pbtxt_are_what_is_warmed_up_unless_no_request_can_have_them(
    tmp_path: Path, config: str, shapes: tuple[tuple[str, tuple[int, ...]], ...]
) -> None:
    add(tmp_path, "m", config)
    read = Reader()
    open_model_loader(configured(tmp_path), FakeDevice(), read).prepare("m")
    assert [each.usual_shapes for each in read.settings] == [shapes]


def test_optional_inputs_are_requested_and_a_warning_names_those_without_a_default(
    tmp_path: Path, partitions: list[Partition], caplog: pytest.LogCaptureFixture
) -> None:
    entry = 'input { name: "%s" data_type: TYPE_FP32 dims: [-1] optional: true }'
    add(tmp_path, "m", entry % "x" + entry % "k")
    asked: list[RuntimeSettings] = []
    own = TensorSpec("k", DATATYPES["FP32"], ("m",), default=Default((0,), b""))

    def read(path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
        asked.append(settings)
        return FakeEngine(Signature((*SIGNATURE.inputs, own), ()), Script())

    assert load(library(tmp_path, read), "m", partitions[0]).served
    assert [settings.optional_inputs for settings in asked] == [("k", "x")]
    why = "the model has nothing to take in its place: send it"
    assert messages(caplog) == [f"model m 1: input 'x' is optional in m/config.pbtxt, but {why}"]


def test_settings_that_cannot_be_honoured_are_problems_and_nothing_is_loaded(
    tmp_path: Path, partitions: list[Partition]
) -> None:
    """On a CPU; a problem of two versions is reported once."""
    add(tmp_path, "m", "version_policy { all {} } parameters { key: 'greenlane.profile' value { string_value: '0' } }")
    add(tmp_path, "m2")
    (tmp_path / "m2" / "1").rename(tmp_path / "m" / "2")
    (tmp_path / "m" / "2" / "model.onnx").touch()
    read = Reader()
    models = open_model_loader(configured(tmp_path, m=ModelOptions(strategy="lazy", graphs="off")), None, read)
    loaded = load(models, "m", partitions[0])
    assert loaded.problems == [
        IndexEntry(
            "m",
            "",
            "UNAVAILABLE",
            "m/config.pbtxt: parameters greenlane.profile: '0' cannot be honoured: ONNX Runtime on a CPU has no optimization "
            "profiles; leave it out",
        ),
        IndexEntry(
            "m",
            "",
            "UNAVAILABLE",
            "greenlane.toml: models.m.strategy: 'lazy' cannot be honoured: ONNX Runtime on a CPU compiles no kernels for "
            "shapes; leave it out",
        ),
    ]
    assert (loaded.served, read.engines) == ([], [])


def test_an_error_about_a_setting_names_its_key_and_file(tmp_path: Path, partitions: list[Partition]) -> None:
    add(tmp_path, "m", "parameters { key: 'greenlane.strategy' value { string_value: 'lazy' } }")

    def read(path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
        raise ModelRefused(f"{path}: a weight_streaming_budget of {settings.weight_streaming_budget} bytes has no effect")

    options = {"m": ModelOptions(weight_budget=5)}
    (problem,) = load(ModelLoader(Repository(tmp_path, options, "greenlane.toml"), read), "m", partitions[0]).problems
    assert problem.reason == (
        "m/1/model.onnx: a weight_streaming_budget of 5 bytes has no effect (greenlane.toml: models.m.weight_budget)"
    )


def test_tritons_settings_that_cannot_be_honoured_are_a_warning(tmp_path: Path, partitions: list[Partition]) -> None:
    add(tmp_path, "m", "instance_group { count: 2 }")
    read = Reader()
    loaded = load(open_model_loader(configured(tmp_path), FakeDevice(), read), "m", partitions[0])
    assert loaded.messages() == (
        "m/config.pbtxt: instance_group.count: 2 cannot be honoured: inferences of a tenant run one after another on its "
        "partition, and dynamic_batching joins them; it is ignored",
    )
    assert len(read.engines[0].executors) == 1


def test_a_missing_library_is_a_problem_of_the_model(tmp_path: Path, partitions: list[Partition]) -> None:
    def missing(*_: object) -> dict[str, str]:
        raise ModelRefused("no TensorRT is installed")

    add(tmp_path, "m")
    loaded = load(ModelLoader(Repository(tmp_path, {}), Reader(), unsupported=missing), "m", partitions[0])
    assert [problem.reason for problem in loaded.problems] == ["no TensorRT is installed"]


def test_a_warm_up_batch_above_the_models_largest_is_a_problem(tmp_path: Path, partitions: list[Partition]) -> None:
    add(tmp_path, "m", "max_batch_size: 4")
    models = open_model_loader(configured(tmp_path, m=ModelOptions(warm_up=(4, 8))), FakeDevice(), Reader())
    (problem,) = load(models, "m", partitions[0]).problems
    assert problem.reason == "greenlane.toml: models.m.warm_up: 8 is above the model's largest batch, which is 4"


@pytest.mark.parametrize("text", ["model_warmup { inputs { key: 'x' value { dims: 99999999 } } }", "PARAMETER"])
def test_warm_up_inputs_larger_than_max_body_are_refused(tmp_path: Path, partitions: list[Partition], text: str) -> None:
    """A tenant may send such a configuration, and all share the machine's memory."""
    add(tmp_path, "m", text.replace("PARAMETER", "parameters { key: 'greenlane.warm_up' value { string_value: '99999999' } }"))
    read = Reader()
    (problem,) = load(library(tmp_path, read), "m", partitions[0]).problems
    assert "inputs of 399999996 bytes, but the server takes bodies of up to 67108864" in problem.reason
    assert read.engines[0].executors == []


def test_engines_are_shared_by_equal_settings_only(tmp_path: Path, partitions: list[Partition]) -> None:
    add(tmp_path, "m")
    read = Reader()
    models = ModelLoader(Repository(tmp_path, {}), read)
    kept = [load(models, "m", partition) for partition in partitions]
    (tmp_path / "m" / "config.pbtxt").write_text("optimization { cuda { graphs: false } }")
    kept.append(load(models, "m", partitions[0]))
    assert [each.graphs for each in read.settings] == ["on", "off"]
    assert [len(each.executors) for each in kept] == [1, 1, 1]


def test_the_graph_mode_is_in_the_models_configuration_and_its_notes_are_warnings(
    tmp_path: Path, partitions: list[Partition], caplog: pytest.LogCaptureFixture
) -> None:
    add(tmp_path, "m")

    def read(path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
        engine = FakeEngine(SIGNATURE, Script())
        engine.description = {"graphs": "none", "notes": ["cannot be captured (why)"], "counts": {"captures": 1}}
        return engine

    (served,) = load(library(tmp_path, read), "m", partitions[0]).served
    execution = served.config["parameters"]["greenlane.execution"]["string_value"]
    assert json.loads(execution) == {"graphs": "none", "notes": ["cannot be captured (why)"]}
    assert messages(caplog) == ["model m 1: cannot be captured (why)"]
