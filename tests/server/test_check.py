"""`check`: everything at once, with the exit status of the worst; real models on the CPU's cores."""

import os
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from engines import Builds, Engine, RuntimeSettings, load_engine
from partitions import Device, DeviceUnavailable, open_device
from partitions.base import Bandwidth
from server import app
from server.check import check, execution_line
from server.config.file import load
from server.config.schema import Config, DeviceConfig
from tests import encoders
from tests.end_to_end import repository
from tests.fakes import FakeDevice, Script
from tests.simulation.mps import FakeMps
from tests.simulation.resctrl import KernelPath, groups, lay_out

CONFIG = """
[server]
log_level = "info"

[device]
backend = "cpu"

[models]
repository = "models"

[models.rows]
max_batch = 2

[tenants.acme]
granules = 1
models = ["rows"]
keys_sha256 = ["{digest}"]
"""

FIRST = min(os.sched_getaffinity(0))
MEMORY = "memory 512 MiB, one request up to 448 MiB"


def on_cpu(config: DeviceConfig) -> Device:
    return open_device(config.backend, config.cores)


def configuration(path: str | None) -> AbstractContextManager[Config]:
    return nullcontext(load(Path(path or "")))


def on_nothing(config: DeviceConfig) -> Device:
    raise DeviceUnavailable("there is no GPU here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    repository.write(tmp_path / "models", "rows", repository.ROWS)
    (tmp_path / "greenlane.toml").write_text(CONFIG.format(digest="a" * 64))
    return tmp_path


class Checked:
    """What a check printed and returned; `read` of the file is changed before it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys
        self.out: list[str] = []
        self.err: list[str] = []

    def check(
        self,
        *changes: tuple[str, str],
        device: Callable[[DeviceConfig], Device] = on_cpu,
        more: str = "",
        cores: Iterable[int] | None = None,
        root: Path = Path("/"),
    ) -> int:
        path = self.folder / "greenlane.toml"
        text = path.read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path.write_text(text + more)
        status = check(str(path), device, configuration, *([] if cores is None else [lambda _: cores]), root=root)
        captured = self._capsys.readouterr()
        self.out, self.err = captured.out.splitlines(), [line.strip() for line in captured.err.splitlines()]
        return status


@pytest.fixture
def checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> Checked:
    return Checked(folder, capsys)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("192.0.2.1", "192.0.2.1 is not an address of this machine: choose another --host, or server.host"),
        ("a.invalid", "choose another --host, or server.host"),
        ("a" * 64, "no name of a host; choose another --host, or server.host"),
        ("a..b", "choose another --host, or server.host"),
    ],
)
def test_a_host_that_the_server_could_not_listen_on_is_wrong(checked: Checked, host: str, why: str) -> None:
    assert checked.check(("[server]", f"[server]\nhost = '{host}'")) == 2
    title, line = checked.err
    assert title == "greenlane: the configuration cannot be served:"
    assert line.startswith(f"greenlane.toml: server.host: cannot listen on {host}: ")
    assert why in line


def test_what_would_be_served_is_printed_with_shares_and_tensors(checked: Checked) -> None:
    assert checked.check() == 0
    first, *lines = checked.out
    assert first.startswith("greenlane.toml: http://127.0.0.1:8000 on CPU, ")
    assert lines == [
        f"tenant acme: core {FIRST}, keys, {MEMORY}",
        "  rows 1: x FP32[-1, 3] -> y FP32[-1, 3], batches of up to 2 (onnxruntime_onnx)",
        "    1 thread, warmed for 1x3",
        f"HTTP process of acme on core {min(os.sched_getaffinity(0))}",
        "all of it can be served",
    ]
    assert checked.err == []


def test_several_devices_are_checked_each_with_its_tenants(checked: Checked) -> None:
    core = min(os.sched_getaffinity(0))
    second = ("[device]", f'[devices.b]\nbackend = "cuda"\n[devices.0]\ncores = "{core}"')
    tenant = '[tenants.globex]\ngranules = 8\ndevice = "b"\nmodels = ["rows"]'

    def opener(config: DeviceConfig) -> Device:
        if config.backend == "cuda":
            raise DeviceUnavailable("there is no GPU here")
        return on_cpu(config)

    assert checked.check(second, ("granules = 1", 'granules = 2\ndevice = "0"'), more=tenant, device=opener) == 2
    assert [line for line in checked.out if not line.startswith("  ")] == [
        "greenlane.toml: http://127.0.0.1:8000 on 2 devices",
        "device b: no device, so no model is tried",
        f"tenant globex: no share (below), so nothing is served, no keys: anyone may call it, {MEMORY}",
        f"device 0: {on_cpu(DeviceConfig(backend='cpu', cores=(core,))).describe()}",
        f"tenant acme: no share (below), so nothing is served, keys, {MEMORY}",
    ]
    assert checked.err[-2:] == [
        "greenlane.toml: devices.b: there is no GPU here",
        "greenlane.toml: tenants.acme.granules 2 = 2 cores, but the device has 1: lower it by 1",
    ]


def test_what_is_set_of_a_tenants_share_and_limits_is_printed_as_a_file_has_it(checked: Checked) -> None:
    more = "burst = 2\nlend = true\nladder = [1, 2]\nrequests_per_second = 100\nbytes_per_second = '1MiB'\ntarget_p99 = '5ms'"
    checked.check(('["rows"]', f'["rows"]\n{more}'))
    assert checked.out[2] == (
        '  burst = 2, lend = "1ms", ladder = [1, 2], target_p99 = "5ms", requests_per_second = 100, bytes_per_second = "1MiB"'
    )


def test_a_model_without_inputs_or_batches_is_described_too(checked: Checked) -> None:
    constant = "constant () => (float[2] y) <float[2] c = {1, 2}> { y = Identity(c) }"
    repository.write(checked.folder / "models", "constant", constant)
    assert checked.check(('["rows"]', '["*"]\nport = 8001'), ("[server]", "[server]\nhost = '::1'")) == 0
    assert checked.out[0].startswith("greenlane.toml: http://[::1]:8000 on ")
    assert checked.out[1] == f"tenant acme: core {FIRST}, keys, port 8001, {MEMORY}"
    assert checked.out[2] == "  constant 1: nothing -> y FP32[2] (onnxruntime_onnx)"


def test_too_little_memory_for_a_model_is_reported_with_the_arithmetic(checked: Checked) -> None:
    large = "large (float[n, 300000] x) => (float[n, 300000] y) { y = Identity(x) }"
    repository.write(checked.folder / "models", "large", large)
    memory = ('["rows"]', '["*"]\nmemory = "2MiB"')
    limit = "tenants.acme.memory of 2097152 lets one take 1835008"
    assert checked.check(memory, ("[models.rows]\n", "[models.large]\n")) == 1
    need = "its smallest request takes 2400000 bytes of memory (inputs 1200000 + outputs 1200000)"
    assert checked.err[1] == f"model large 1 is unavailable: {need}, but {limit}; raise it"
    assert "  large 1: unavailable" in checked.out


def test_a_model_that_does_not_fit_the_tenants_budget_is_reported_with_the_arithmetic(checked: Checked) -> None:
    assert checked.check(('models = ["rows"]', 'models = ["rows"]\ndevice_memory = "1KiB"')) == 1
    assert any(line.startswith("    device memory: ") and "(file " in line and ", session " in line for line in checked.out)
    (line,) = [line for line in checked.err if "device_memory" in line]
    assert re.match(r"acme: model rows is unavailable: it needs \S+ \w+ of device memory \(file .*, session .*\), but", line)
    assert line.endswith("too many; raise tenants.acme.device_memory")
    assert checked.check(('"1KiB"', '"1GiB"\npaging = true')) == 0


def test_weights_of_versions_that_are_not_served_are_a_possible_mistake(checked: Checked) -> None:
    repository.write(checked.folder / "models", "rows", repository.ROWS, version=2)
    assert checked.check(("max_batch = 2", "max_batch = 2\nweights = { 1 = 0.9, 2 = 0.1 }")) == 0
    (line,) = [line for line in checked.err if "weights" in line]
    assert line == (
        "greenlane.toml: models.rows.weights: version 1 is not served: of rows there is 2, by version_policy in "
        "rows/config.pbtxt, whose default is the newest alone"
    )
    (checked.folder / "models" / "rows" / "config.pbtxt").write_text("version_policy { all {} }")
    assert checked.check(('["rows"]', '["rows"]\nweights = { rows = { 1 = 1 } }')) == 0
    assert checked.err == []


def test_budgets_above_what_the_device_has_are_a_possible_mistake(checked: Checked) -> None:
    assert checked.check(('models = ["rows"]', 'models = ["rows"]\ndevice_memory = "900000GiB"')) == 0
    (line,) = [line for line in checked.err if "device_memory" in line]
    assert "device_memory of all of its device is acme 879 TiB = 879 TiB, but that has " in line
    assert line.endswith("models may be refused by the device within a budget; lower one")
    assert checked.check(('"900000GiB"', '"1GiB"')) == 0
    assert not any("device_memory" in line for line in checked.err)


def test_paging_without_a_budget_is_wrong(checked: Checked) -> None:
    assert checked.check(('models = ["rows"]', 'models = ["rows"]\npaging = true')) == 2
    assert any("tenants.acme.paging: true, but nothing is paged out without a device_memory" in line for line in checked.err)


def test_more_memory_than_the_machine_has_is_a_warning(checked: Checked) -> None:
    assert checked.check(('["rows"]', '["rows"]\nmemory = "60000GB"')) == 0
    text = "greenlane.toml: tenants: memory of all of them is acme 54.6 TiB = 54.6 TiB, but the machine has "
    assert checked.err[1].startswith(text)
    assert checked.err[1].endswith("iB: lower it")
    assert ", memory 54.6 TiB, one request up to 47.7 TiB" in checked.out[1]


def test_models_are_loaded_so_a_broken_one_is_found(checked: Checked) -> None:
    (checked.folder / "models" / "rows" / "1" / "model.onnx").write_bytes(b"not a model")
    assert checked.check() == 1
    assert checked.out[2] == "  rows 1: unavailable"
    assert checked.err[0] == "greenlane: not all that is configured can be served:"
    assert checked.err[1].startswith("model rows 1 is unavailable: rows/1/model.onnx: failed to load: ")


FUNCTIONS = """
def postprocess(outputs):
    return outputs
"""


def test_functions_that_cannot_be_run_are_found(checked: Checked) -> None:
    (checked.folder / "models" / "rows" / "model.py").write_text(FUNCTIONS)
    python = ("[models.rows]", "python = true\n[models.rows]")
    assert checked.check(python) == 0
    (checked.folder / "models" / "rows" / "model.py").write_text("import no_such_package\n" + FUNCTIONS)
    assert checked.check() == 1
    assert checked.err == [
        "greenlane: not all that is configured can be served:",
        "model rows 1 is unavailable: rows/model.py, line 1: ModuleNotFoundError: No module named 'no_such_package'",
    ]


def test_a_model_that_takes_texts_says_so_or_why_it_does_not(checked: Checked) -> None:
    encoders.write(checked.folder / "models", "encoder", encoders.encoder())
    assert checked.check(('models = ["rows"]', 'models = ["encoder"]')) == 0
    assert checked.out[4] == "    takes texts of up to 512 tokens at /v1/embeddings"
    (checked.folder / "models" / "encoder" / "tokenizer.json").write_text("{}")
    assert checked.check() == 0
    assert checked.out[-1] == "all of it can be served", "which possible mistakes do not change"
    assert checked.err[0] == "greenlane: possible mistakes:"
    assert checked.err[1].startswith("model encoder 1 does not take texts: ")
    encoders.write_tokenizer(checked.folder / "models" / "encoder" / "tokenizer.json")
    (checked.folder / "models" / "encoder" / "modules.json").write_text("[]]")
    assert checked.check() == 0
    assert [line.partition(" (")[0] for line in checked.err[1:]] == [
        "model encoder 1 does not take texts: modules.json is not JSON"
    ]


def test_an_unknown_model_is_reported_with_the_nearest_known_one(checked: Checked) -> None:
    assert checked.check(("[models.rows]", "[models.row]"), ('["rows"]', '["rows", "ROWS"]')) == 1
    assert checked.err[1:] == [
        "greenlane.toml: models.row: there is no such model in the repository; did you mean 'rows'?",
        "greenlane.toml: tenants.acme.models: 'ROWS' is not in the repository; did you mean 'rows'?",
    ]


def test_a_problem_of_several_tenants_is_reported_once(checked: Checked) -> None:
    (checked.folder / "models" / "rows" / "two").mkdir()
    (checked.folder / "models" / "rows" / "config.pbtxt").write_text("max_bacth_size: 2")
    more = '[tenants.globex]\ngranules = 1\nmodels = ["*"]'
    assert checked.check(more=more, device=lambda _: FakeDevice()) == 1
    assert len(checked.err) == len(set(checked.err))
    assert "rows: not looked into: two; a version is a number above 0 without leading zeros" in checked.err
    ignored = "rows/config.pbtxt: ignored, as they mean nothing here: max_bacth_size (did you mean max_batch_size?)"
    assert "greenlane: possible mistakes:" in checked.err
    assert ignored in checked.err


@pytest.mark.parametrize(
    ("key", "other", "said"),
    [
        ("burst = 2", "", "tenants.globex.burst: no other tenant"),
        ("lend = true", "", "tenants.globex.lend: no other tenant"),
        ("burst = 2", "lend = true", ""),
    ],
)
def test_a_burst_without_a_lender_and_the_reverse_are_possible_mistakes(
    checked: Checked, key: str, other: str, said: str
) -> None:
    tenant = '[tenants.{}]\ngranules = 1\nmodels = ["*"]\n{}\n'
    checked.check(more=tenant.format("globex", key) + tenant.format("initech", other), device=lambda _: FakeDevice())
    found = "\n".join(checked.err)
    assert said in found
    assert ("no other tenant" in found) == bool(said)


def moving(config: DeviceConfig) -> Device:
    """A device that says what it moves: one unit half of it."""
    device = FakeDevice()
    device.moves = Bandwidth(memory=4 * 10**12, unit=10**12, pcie=60 * 10**9)
    return device


def test_what_holds_a_tenants_bandwidth_is_printed_with_the_means(checked: Checked) -> None:
    tenant = '[tenants.globex]\ngranules = 3\nmodels = ["rows"]\n{}\n'
    file = (checked.folder / "greenlane.toml").read_text()
    checked.check(more=tenant.format('memory_bandwidth = 0.6\npcie = "20GB/s"'), device=moving)
    (at,) = [place for place, line in enumerate(checked.out) if line.startswith("tenant globex")]
    assert checked.out[at + 1 : at + 4] == [
        '  memory_bandwidth = 0.6, pcie = "20GB/s"',
        "  memory bandwidth while others are at work: 2.4 TB/s of 4 TB/s; models that draw more run on granules [1, 2], whose "
        "2 units draw 2 TB/s at most",
        "  PCIe while others are at work: 20 GB/s each way of 60 GB/s; inferences start no sooner than their inputs and "
        "outputs allow",
    ]
    assert not [line for line in checked.err if "memory_bandwidth" in line]
    (checked.folder / "greenlane.toml").write_text(file)
    checked.check(more=tenant.format("memory_bandwidth = 0.8"), device=moving)
    assert (
        "  it needs no narrower placement: its 3 units draw 3 TB/s at most, and its memory_bandwidth is 3.2 TB/s" in checked.out
    )
    assert not [line for line in checked.err if "memory_bandwidth" in line]


def test_how_cores_would_be_held_is_printed_or_why_not(checked: Checked, tmp_path: Path) -> None:
    root, tenant = KernelPath(tmp_path), '[tenants.globex]\ngranules = 1\nmodels = ["rows"]\nmemory_bandwidth = 0.45\n'
    base = lay_out(root, max(os.sched_getaffinity(0)) + 1)
    assert checked.check(more=tenant, root=root) == 0
    (line,) = [line for line in checked.out if "at any time" in line]
    assert line.startswith("  memory bandwidth at any time: core ")
    assert line.endswith(": MB:0=40, % of each L3 cache's memory bandwidth, by resctrl")
    assert not groups(base), "a check holds nothing"
    assert not [line for line in checked.err if "memory_bandwidth" in line]
    (base / "info").rename(root / "elsewhere")
    checked.check(root=root)
    said = f"as resctrl is not mounted; have root call: mount -t resctrl resctrl {base}"
    assert [line for line in checked.err if line.endswith(said)]


@pytest.mark.parametrize(
    ("keys", "device", "problem"),
    [
        ("memory_bandwidth = 0.1", moving, "its memory_bandwidth is 400 GB/s, but one granule (1 units) draws 1 TB/s at most"),
        ("pcie = 0.1", on_cpu, "its pcie holds nothing back: only a GPU's is held, and it has cores"),
        ('memory_bandwidth = "5TB/s"', moving, "tenants.globex.memory_bandwidth 5TB/s (1.25) = 1.25 of the device's memory"),
    ],
)
def test_a_share_of_bandwidth_that_does_not_hold_is_said(
    checked: Checked, keys: str, device: Callable[[DeviceConfig], Device], problem: str
) -> None:
    count = 1 if device is on_cpu else 3
    status = checked.check(more=f'[tenants.globex]\ngranules = {count}\nmodels = ["rows"]\n{keys}\n', device=device)
    found = "\n".join(checked.err)
    assert problem in found
    assert (f"greenlane.toml: tenants.globex.{keys.split()[0]}: its" in found) == ("5TB/s" not in keys)
    assert (status == 2) == ("5TB/s" in keys)


@pytest.mark.parametrize(
    ("mode", "target", "said"), [("on", "", True), ("off", "", False), ("on", 'target_p99 = "5ms"', False)]
)
def test_an_autopilot_without_a_target_is_a_possible_mistake(checked: Checked, mode: str, target: str, said: bool) -> None:
    tenant = f'[tenants.globex]\ngranules = 1\nmodels = ["*"]\n{target}\n'
    checked.check(("[server]", f'[server]\nautopilot = "{mode}"'), more=tenant, device=lambda _: FakeDevice())
    assert any("server.autopilot: no tenant has a `target_p99`" in line for line in checked.err) == said


def test_mistakes_in_the_file_are_announced_before_what_is_tried_and_stand_last(checked: Checked) -> None:
    (checked.folder / "models" / "rows" / "notes").mkdir()
    assert checked.check(("[server]", "[server]\nstrict_readines = true")) == 2
    assert checked.out[0] == "greenlane.toml has a mistake (below), and nothing is served; the rest of it is tried here:"
    assert checked.out[1].startswith("greenlane.toml: http://127.0.0.1:8000 on CPU, ")
    assert checked.err == [
        "greenlane: possible mistakes:",
        "rows: not looked into: notes; a version is a number above 0 without leading zeros",
        "greenlane: the configuration cannot be served:",
        "greenlane.toml: server.strict_readines: unknown key; did you mean 'strict_readiness'?",
    ]
    assert checked.check(("strict_readines", "hsot = '::1'\nstrict_readines")) == 2
    assert checked.out[0].startswith("greenlane.toml has 2 mistakes (below), ")


def test_nothing_is_said_of_the_models_of_a_repository_that_cannot_be_read(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    path = folder / "greenlane.toml"
    path.write_text(path.read_text().replace('"models"', '"nothing://bucket"'))
    assert check(str(path), on_cpu, app.configuration) == 2
    title, line = capsys.readouterr().err.splitlines()
    assert title == "greenlane: the configuration cannot be served:"
    assert line.startswith("  models.repository: nothing://bucket cannot be read: Protocol not known: nothing; ")


def test_wrong_keys_hide_no_broken_models_and_no_shares_that_do_not_fit(checked: Checked) -> None:
    (checked.folder / "models" / "rows" / "1" / "model.onnx").write_bytes(b"")
    changes = [("[server]", "[server]\nprot = 1"), ("granules = 1", "granules = 4096")]
    assert checked.check(*changes) == 2
    assert checked.err[1].startswith("model rows 1 is unavailable: ")
    assert checked.err[2:4] == [
        "greenlane: the configuration cannot be served:",
        "greenlane.toml: server.prot: unknown key; did you mean 'port'?",
    ]
    assert checked.err[4].startswith("greenlane.toml: tenants.acme.granules 4096 = 4096 cores, but the device has ")
    assert checked.out[2:] == [f"tenant acme: no share (below), so nothing is served, keys, {MEMORY}", "  rows 1: unavailable"]


def test_wrong_keys_and_a_wrong_lend_are_not_said_to_be_missing_as_well(checked: Checked) -> None:
    more = """
[tenants.globex]
granules = 1
burst = 2
models = ["*"]
keys_sha256 = ["%s"]
[tenants.initech]
granules = 1
lend = "1 sec"
models = ["*"]
keys_sha256 = ["a key"]
""" % ("b" * 64)
    assert checked.check(more=more, device=lambda _: FakeDevice()) == 2
    named = [line.split(": ")[1] for line in checked.err if "tenants." in line]
    assert named == ["tenants.initech.lend", "tenants.initech.keys_sha256"]
    assert f"tenant initech: granules [2], keys that are wrong, {MEMORY}" in checked.out


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("default_tenant = 'acne'", "server.default_tenant: 'acne' is not a configured tenant; did you mean 'acme'?"),
        ("default_tenant = 5", "server.default_tenant: 5 is not a text of at least one character, without NUL"),
        ("defualt_tenant = 'acme'", "server.defualt_tenant: unknown key; did you mean 'default_tenant'?"),
    ],
)
def test_a_wrong_default_tenant_is_not_said_to_be_missing_as_well(checked: Checked, wrong: str, problem: str) -> None:
    assert checked.check(OPEN, ("[server]", f"[server]\n{wrong}")) == 2
    assert checked.err[1:] == [f"greenlane.toml: {problem}"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two tenants need two cores")
@pytest.mark.parametrize("wrong", ["granuels = 1", ""])
def test_a_tenant_that_is_left_out_is_not_said_to_be_no_default(checked: Checked, wrong: str) -> None:
    changes = [OPEN, ("[server]", "[server]\ndefault_tenant = 'acme'"), ("granules = 1", wrong)]
    assert checked.check(*changes, more='[tenants.globex]\ngranules = 1\nmodels = ["rows"]') == 2
    assert len(checked.err) == 2, checked.err
    assert checked.err[1].startswith("greenlane.toml: tenants.acme")


@pytest.mark.parametrize("wrong", ["max_bacth = 2", "max_batch = 'two'"])
def test_batches_are_not_said_to_be_in_vain_where_max_batch_is_wrong(checked: Checked, wrong: str) -> None:
    assert checked.check(("max_batch = 2", f"{wrong}\npreferred_batches = [2]")) == 2
    assert len(checked.err) == 2, checked.err
    assert checked.err[1].startswith("greenlane.toml: models.rows.max_ba")


@pytest.mark.parametrize("text", ["= nothing", "[models]\nrepository = 'nowhere'"])
def test_of_an_incomplete_file_only_its_problems_are_reported(checked: Checked, text: str) -> None:
    (checked.folder / "greenlane.toml").write_text(text)
    assert checked.check() == 2
    assert checked.out == []
    assert checked.err[0] == "greenlane: the configuration cannot be served:"


def test_without_a_device_there_is_still_the_repository(checked: Checked) -> None:
    repository.write(checked.folder / "models", "other", repository.IDENTITY, config="platform: 'python'")
    assert checked.check(('["rows"]', '["other", "rows"]'), device=on_nothing) == 2
    assert checked.out[0].endswith(" on no device, so no model is tried")
    assert checked.out[1:] == [f"tenant acme: no share (below), so nothing is served, keys, {MEMORY}", "  other: unavailable"]
    assert checked.err[-1] == "greenlane.toml: device: there is no GPU here"
    assert checked.err[1].startswith("model other is unavailable: other/config.pbtxt: platform is ")


def test_a_partition_that_cannot_be_made_is_reported(checked: Checked) -> None:
    script = Script()
    script.fail("carve")
    device = FakeDevice(script=script)
    assert checked.check(device=lambda _: device) == 2
    assert checked.err[1] == "greenlane.toml: device: scripted to fail at carve"
    assert device.closed


def test_an_empty_repository_is_doubtful(checked: Checked) -> None:
    (checked.folder / "models" / "rows").rename(checked.folder / "rows")
    assert checked.check(("[models.rows]\nmax_batch = 2", ""), ('["rows"]', '["*"]')) == 0
    assert checked.err[1:] == ["greenlane.toml: models.repository: there is no model in it"]


def test_an_absent_model_of_an_empty_repository_is_reported_without_a_suggestion(checked: Checked) -> None:
    (checked.folder / "models" / "rows").rename(checked.folder / "rows")
    assert checked.check(("[models.rows]\nmax_batch = 2", "")) == 1
    assert checked.err[-1] == "greenlane.toml: tenants.acme.models: 'rows' is not in the repository"


def test_batches_that_the_model_does_not_take_are_reported(checked: Checked) -> None:
    assert checked.check(("max_batch = 2", 'batch_delay = "1ms"\npreferred_batches = [4]')) == 1
    assert checked.err[1:] == [
        "greenlane.toml: models.rows.batch_delay: the model takes no batches; set max_batch too, or leave it out",
        "greenlane.toml: models.rows.preferred_batches: the model takes no batches; set max_batch too, or leave it out",
    ]


def test_a_preferred_batch_above_the_models_largest_is_reported(checked: Checked) -> None:
    (checked.folder / "models" / "rows" / "config.pbtxt").write_text("max_batch_size: 4")
    assert checked.check(("max_batch = 2", "preferred_batches = [4, 8]")) == 1
    assert checked.err[1:] == [
        "greenlane.toml: models.rows.preferred_batches: 8 is above the model's largest batch, which is 4"
    ]


def test_front_cores_outside_the_affinity_mask_are_reported(checked: Checked) -> None:
    assert checked.check(("granules = 1", 'granules = 1\nfront_cores = "65535"')) == 2
    assert checked.err[1].startswith("greenlane.toml: tenants.acme.front_cores: [65535] are not among the cores")


@pytest.mark.parametrize(("key", "path"), [("usage_dir", "/proc/a/b"), ("audit", "/proc/a")])
def test_what_could_not_be_written_is_said(checked: Checked, key: str, path: str) -> None:
    assert checked.check(("[server]", f"[server]\n{key} = '{path}'")) == 1
    assert f"greenlane.toml: server.{key}: /proc cannot be written: No such file or directory" in checked.err


@pytest.mark.parametrize("key", ["usage_dir", "audit"])
def test_a_name_that_is_too_long_to_be_written_is_said(checked: Checked, key: str) -> None:
    assert checked.check(("[server]", f"[server]\n{key} = '{'a' * 256}'")) == 1
    assert f"server.{key}: {checked.folder / ('a' * 256)} cannot be written: File name too long" in checked.err[1]


@pytest.mark.parametrize(("key", "path"), [("usage_dir", "/sys/a/b"), ("audit", "/sys/a")])
def test_who_could_not_write_is_said(checked: Checked, key: str, path: str) -> None:
    """The server may run as another user."""
    assert checked.check(("[server]", f"[server]\n{key} = '{path}'")) == 1
    who = f"by user {os.geteuid()}: Permission denied; check it as the user that the server runs as"
    beginning = f"greenlane.toml: server.{key}: /sys cannot be written"
    assert f"{beginning} {who}" in checked.err or f"{beginning}: Read-only file system" in checked.err


def test_the_check_of_what_could_be_written_leaves_nothing(checked: Checked) -> None:
    (checked.folder / "log").write_text("kept")
    before = sorted(checked.folder.rglob("*"))
    assert checked.check(("[server]", "[server]\nusage_dir = 'new/usage'\naudit = 'log'")) == 0
    assert sorted(checked.folder.rglob("*")) == before
    assert (checked.folder / "log").read_text() == "kept"


def test_several_http_processes_on_cores_of_the_host_are_reported_and_auto_is_one(checked: Checked) -> None:
    assert checked.check(("granules = 1", "granules = 1\nhttp_processes = 3")) == 2
    assert checked.err[1] == (
        "greenlane.toml: tenants.acme.http_processes: 3, but on a CPU a tenant's models are in its one process, "
        "beside its HTTP; leave it out, or give the tenant more cores"
    )
    assert checked.check(("http_processes = 3", 'http_processes = "auto"')) == 0


def on_fake(config: DeviceConfig) -> Device:
    return FakeDevice()


def test_where_the_device_has_no_cores_for_tenants_it_is_said_where_http_would_run(checked: Checked) -> None:
    checked.check(device=on_fake, cores=range(16))
    assert checked.out[-1] == "HTTP process of acme on cores 8-9; device process on cores 0-7, all others on cores 10-15"
    checked.check(("granules = 1", "granules = 1\nhttp_processes = 3"), device=on_fake, cores=range(16))
    assert checked.out[-1] == "HTTP process of acme on cores 8-13; device process on cores 0-7, all others on cores 14-15"
    checked.check(device=on_fake, cores=[3])
    assert checked.out[-1].startswith("HTTP on any core: too few are left ")


def test_where_http_runs_on_any_core_nothing_is_said_of_it(checked: Checked) -> None:
    checked.check(("[server]", '[server]\nfront_cores = "any"'), device=on_fake, cores=range(16))
    assert not [line for line in checked.out if "HTTP" in line]


def hosted(config: DeviceConfig) -> Device:
    device = FakeDevice()
    device.on_host_cores = True
    return device


GLOBEX = '\n[tenants.globex]\ngranules = 1\nmodels = ["rows"]\nfront_cores = "1"\nkeys_sha256 = ["%s"]\n' % ("b" * 64)


def test_http_on_the_cores_of_another_s_partition_is_doubtful(checked: Checked) -> None:
    change = ("granules = 1", 'granules = 1\nfront_cores = "1"')
    checked.check(change, more=GLOBEX, device=hosted, cores=range(4))
    assert checked.out[-1] == "HTTP process of acme on core 1, of globex on core 1"
    begin, end = map(
        checked.err.index, ("greenlane: possible mistakes:", "greenlane: not all that is configured can be served:")
    )
    doubtful = checked.err[begin + 1 : end]
    assert [line.split(";")[0] for line in doubtful] == [
        "greenlane.toml: tenants.acme.front_cores: 1 is of globex's partition, whose work this tenant's HTTP would delay"
    ]


def test_a_tenant_without_a_share_has_no_cores(checked: Checked) -> None:
    assert checked.check(("granules = 1", "sms = 1"), more=GLOBEX.replace('"1"', '"0"'), device=hosted, cores=range(4)) == 2
    assert checked.out[-1] == "HTTP process of globex on core 0"
    assert "greenlane: possible mistakes:" not in checked.err


def test_where_shares_do_not_fit_nothing_is_said_of_where_http_runs(checked: Checked) -> None:
    assert checked.check(("granules = 1", "granules = 5"), more=GLOBEX, device=hosted, cores=range(4)) == 2
    assert not [line for line in checked.out if line.startswith("HTTP")]


def test_a_missing_repository_is_reported_once_beside_too_many_shares(checked: Checked) -> None:
    assert checked.check(('repository = "models"', 'repository = "modles"'), ("granules = 1", "granules = 4096")) == 2
    assert checked.err[1] == (
        f"greenlane.toml: models.repository: 'modles' is not an existing directory: {checked.folder / 'modles'}"
    )
    assert checked.err[2].startswith("greenlane.toml: tenants.acme.granules 4096 = 4096 cores, but the device has ")
    assert len(checked.err) == 3


OPEN = ('keys_sha256 = ["%s"]' % ("a" * 64), "")


def test_a_missing_default_tenant_is_a_warning_where_there_are_several(checked: Checked) -> None:
    checked.check(OPEN, more=GLOBEX.replace('front_cores = "1"', ""), device=hosted, cores=range(4))
    assert f"tenant acme: granules [0], no keys: anyone may call it, {MEMORY}" in checked.out
    missing = "greenlane.toml: server.default_tenant: missing, so requests that name no tenant are 401; "
    assert f"{missing}set it to acme, or have them send X-Tenant" in checked.err


@pytest.mark.parametrize(
    ("globex", "instead"), [("", "leave it out"), ('[tenants.globex]\ngranules = 1\nmodels = ["rows"]', "use globex")]
)
def test_a_default_tenant_that_has_keys_is_doubtful(checked: Checked, globex: str, instead: str) -> None:
    checked.check(("[server]", '[server]\ndefault_tenant = "acme"'), more=globex, device=hosted)
    doubtful = "'acme' has keys, so requests without one are 401 all the same"
    assert checked.err[1] == f"greenlane.toml: server.default_tenant: {doubtful}; {instead}"


def test_a_default_tenant_without_keys_is_as_it_should_be(checked: Checked) -> None:
    assert checked.check(OPEN, ("[server]", '[server]\ndefault_tenant = "acme"')) == 0
    assert checked.err == []


def test_a_repository_that_vanished_is_reported(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    def opener(config: DeviceConfig) -> Device:
        (checked.folder / "models").rename(checked.folder / "gone")
        return on_cpu(config)

    assert checked.check(device=opener) == 2
    assert checked.err[1].startswith("greenlane.toml: models.repository: cannot be read: No such file or directory: ")


def test_settings_that_the_library_cannot_honour_are_all_refused_with_the_reason(checked: Checked) -> None:
    """Of ONNX Runtime on a CPU, where what is ready may be chosen, and graphs may be left out."""
    settings = 'max_batch = 2\nstrategy = "lazy"\nweight_budget = "1GiB"\ngraphs = "off"\nwarm_up = [1, 2]'
    settings += "\nprofiles = [{ x = { max = [2, 3] } }]"
    assert checked.check(("max_batch = 2", settings)) == 1
    assert checked.err == [
        "greenlane: not all that is configured can be served:",
        "model rows is unavailable: greenlane.toml: models.rows.strategy: 'lazy' cannot be honoured: ONNX Runtime on a CPU "
        "compiles no kernels for shapes; leave it out",
        "model rows is unavailable: greenlane.toml: models.rows.profiles: [a table] cannot be honoured: "
        "ONNX Runtime on a CPU has no optimization profiles; leave it out",
        "model rows is unavailable: greenlane.toml: models.rows.weight_budget: 1073741824 cannot be honoured: ONNX Runtime on "
        "a CPU streams no weights; leave it out",
    ]
    assert checked.check((settings, 'max_batch = 2\ngraphs = "off"\nwarm_up = [1, 2]')) == 0
    assert "    1 thread, warmed for 1x3 and 2x3" in checked.out


def test_models_are_tried_as_they_would_be_served(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the device's copies, and warm at the usual shapes: another way may fail, or hide what fails."""
    tried: list[RuntimeSettings | None] = []

    def remember(
        path: Path, device: Device | None, settings: RuntimeSettings, max_batch: int | None, builds: Builds | None
    ) -> Engine:
        tried.append(settings)
        return load_engine(path, device, settings, max_batch, builds)

    monkeypatch.setattr("server.device.model_loader.load_engine", remember)
    assert checked.check(('backend = "cpu"', 'backend = "cpu"\ncopies = "engine"')) == 0
    limits = {"memory_limit": 512 << 20, "trial_limit": 300}
    assert tried == [RuntimeSettings(copies="engine", warm_up="usual", batch_padding=True, **limits)]


ENSEMBLE = """
platform: "ensemble" max_batch_size: 2 output { name: "OUT" data_type: TYPE_FP32 dims: 3 }
ensemble_scheduling { step { model_name: "rows" input_map { key: "x" value: "IN" } output_map { key: "y" value: "OUT" } } }
"""


def ensemble(folder: Path, config: str = ENSEMBLE) -> None:
    """Called `all`, which is before its step in the alphabet."""
    (folder / "models" / "all" / "1").mkdir(parents=True, exist_ok=True)
    (folder / "models" / "all" / "config.pbtxt").write_text(config)


def test_an_ensemble_is_tried_after_its_steps(checked: Checked) -> None:
    ensemble(checked.folder)
    assert checked.check(('["rows"]', '["all", "rows"]')) == 0
    assert checked.out[4] == "  all 1: IN FP32[-1, 3] -> OUT FP32[-1, 3], batches of up to 2 (ensemble)"
    assert checked.err == []


def test_an_ensemble_as_a_step_is_refused_as_one_whatever_the_order(checked: Checked) -> None:
    ensemble(checked.folder)
    (checked.folder / "models" / "aaa" / "1").mkdir(parents=True)
    (checked.folder / "models" / "aaa" / "config.pbtxt").write_text(ENSEMBLE.replace('"rows"', '"all"').replace('"x"', '"IN"'))
    assert checked.check(('["rows"]', '["aaa", "all", "rows"]')) == 1
    step = "model aaa 1 is unavailable: ensemble_scheduling.step[0] (all)"
    assert checked.err[1:] == [f"{step} is an ensemble, which cannot be a step; name its steps instead"]


def test_a_model_of_several_problems_is_listed_once_as_unavailable(checked: Checked) -> None:
    checked.check(("max_batch = 2", 'max_batch = 2\nstrategy = "lazy"\nprofiles = [{ x = { max = [2, 3] } }]'))
    assert len([line for line in checked.err if line.startswith("model rows is unavailable: ")]) == 2
    assert checked.out.count("  rows: unavailable") == 1


def test_a_setting_that_an_ensemble_s_steps_have_is_refused_of_it_or_ignored(checked: Checked) -> None:
    ensemble(checked.folder, ENSEMBLE + "instance_group { count: 1 profile: '0' }")
    assert checked.check(('["rows"]', '["all", "rows"]'), more='[models.all]\nstrategy = "lazy"\n') == 1
    why = "cannot be honoured: an ensemble has no such setting, its steps have: set it for them"
    assert f"model all is unavailable: greenlane.toml: models.all.strategy: 'lazy' {why}; leave it out" in checked.err
    assert f"all/config.pbtxt: instance_group.profile: 0 {why}; it is ignored" in checked.err


def test_a_delay_of_an_ensemble_s_step_is_said_to_mean_nothing_within_it(checked: Checked) -> None:
    ensemble(checked.folder)
    assert checked.check(('["rows"]', '["all", "rows"]'), ("max_batch = 2", 'max_batch = 2\nbatch_delay = "1ms"')) == 0
    (line,) = checked.err[1:]
    assert line.startswith("model all 1: ensemble_scheduling.step[0] (rows) has a batch delay or preferred batches, which")


@pytest.mark.parametrize(
    ("described", "line"),
    [
        ({"graphs": "captured", "why": "", "shapes": [[[1, 3], [4]], [[8, 3], [4]]]},
         "graphs captured, warmed for 1x3, 4 and 8x3, 4"),
        ({"graphs": "none", "shapes": [[[]]]}, "graphs none, warmed for a scalar"),
        ({"graphs": "none", "shapes": []}, "graphs none"),
        ({"graphs": "none", "verified": {"right": 2, "others": [{"verdict": "wrong"}, {"verdict": "wrong"}]}},
         "graphs none, verified shapes: 2 right, 2 wrong"),
        ({"graphs": "none", "steps": [{"graphs": "none", "shapes": [[[1, 1]]]}, {"graphs": "none", "threads": 1}]},
         "steps: graphs none, warmed for 1x1; 1 thread"),
    ],
)  # fmt: skip
def test_an_executor_s_description_is_printed_in_words(described: dict[str, object], line: str) -> None:
    assert execution_line(described) == line


class Gpu(FakeDevice):
    uuid = "GPU-5ea1"


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (lambda _: Gpu(), 'greenlane.toml: device.mps: "on", but nvidia-cuda-mps-control is not on PATH; '),
        (on_cpu, 'greenlane.toml: device.mps: "on", which is for GPUs, and this is CPU, '),
    ],
)
def test_a_device_process_for_each_tenant_is_announced_and_what_is_missing_for_it_is_named(
    checked: Checked, device: Callable[[DeviceConfig], Device], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert checked.check(('backend = "cpu"', 'backend = "cpu"\nmps = "on"'), device=device) == 2
    announced = "  1 device process under MPS, each of which takes some 360 MiB of the GPU, "
    assert any(line.startswith(announced) for line in checked.out) == (device is not on_cpu), "cores have none"
    assert any(line.startswith(said) for line in checked.err), checked.err


SECOND = '[tenants.globex]\ngranules = 1\nmodels = ["rows"]\n'


@pytest.mark.parametrize(
    ("device", "more", "command", "line"),
    [
        (
            lambda _: Gpu(),
            SECOND,
            True,
            "  2 device processes under MPS, each of which takes some 360 MiB of the GPU, and loads ",
        ),
        (
            lambda _: Gpu(),
            SECOND,
            False,
            "  one device process for all tenants: nvidia-cuda-mps-control is not on PATH; it comes with ",
        ),
        (lambda _: Gpu(), "", True, "  one device process for all tenants: it has fewer than two tenants"),
        (on_cpu, "", True, ""),
    ],
)
def test_whether_tenants_have_a_process_each_by_default_is_printed_with_its_reason_and_cores_have_no_such_line(
    checked: Checked,
    device: Callable[[DeviceConfig], Device],
    more: str,
    command: bool,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(FakeMps(checked.folder / "fake").folder if command else "/nonexistent"))
    checked.check(device=device, more=more)
    said = [each for each in checked.out if "device process" in each and not each.startswith("HTTP process of ")]
    assert len(said) == bool(line)
    assert said == [] or said[0].startswith(line)
    assert not any(".mps: " in each for each in checked.err)
