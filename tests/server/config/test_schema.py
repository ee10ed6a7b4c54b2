import os
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
from pydantic import ValidationError

from server.config import rules
from server.config.file import MOST_BYTES, load, salvage
from server.config.schema import Config, DeviceConfig, ModelOptions, ModelsConfig
from server.config.server import ServerConfig
from server.config.tables import ConfigError
from server.config.tenant import TenantConfig
from server.config.text import TextOptions
from server.processes.children import spawn

KEY_A, KEY_B = "aa" * 32, "bb" * 32
ACME = 'granules = 6\nmodels = ["*"]\n'
COMPLETE = f"""
[server]
host = "0.0.0.0"
port = 0
max_body = "10MB"
max_json_tensor = 4096
max_string_elements = 1000
nonfinite_json = "null"
admin_key_sha256 = "{"AB" * 32}"
default_tenant = "globex"
log_format = "json"
log_level = "debug"
strict_readiness = true
keep_alive = "2min"
cors_origins = ["https://app.example", "http://localhost:3000"]
drain_grace = "250ms"

[device]
backend = "cpu"
index = 1
cores = "0,2-3"
copies = "engine"

[models]
repository = "models"

[models.resnet50]
max_batch = 8
batch_delay = "500us"
preferred_batches = [4, 8]

[models."with space"]

[tenants.globex]
cores = 2
models = ["resnet50", "bert"]

[tenants.acme]
granules = 6
queue = 1
in_flight = 1
models = ["*"]
keys_sha256 = ["{KEY_A.upper()}"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "greenlane.toml"
    path.write_text(text)
    return path


def sections(server: str = "", device: str = "", models: str = 'repository = "models"', tenants: str = ACME) -> str:
    return f"[server]\n{server}\n[device]\n{device}\n[models]\n{models}\n[tenants.acme]\n{tenants}\n"


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        load(write(folder, text))
    start = "greenlane.toml: "
    assert all(problem.startswith(start) for problem in refusal.value.problems)
    assert str(refusal.value).splitlines() == list(refusal.value.problems)
    return [problem.removeprefix(start) for problem in refusal.value.problems]


def test_a_complete_file_becomes_a_configuration(folder: Path) -> None:
    assert load(write(folder, COMPLETE)) == Config(
        server=ServerConfig(
            host="0.0.0.0",
            port=0,
            max_body=10_000_000,
            max_json_tensor=4096,
            max_string_elements=1000,
            nonfinite_json="null",
            admin_key_sha256="ab" * 32,
            default_tenant="globex",
            log_format="json",
            log_level="debug",
            strict_readiness=True,
            keep_alive=120.0,
            cors_origins=("https://app.example", "http://localhost:3000"),
            drain_grace=0.25,
        ),
        device=DeviceConfig(backend="cpu", index=1, cores=(0, 2, 3), copies="engine"),
        models=ModelsConfig(
            repository=folder / "models",
            options={
                "resnet50": ModelOptions(max_batch=8, batch_delay=0.0005, preferred_batches=(4, 8)),
                "with space": ModelOptions(max_batch=None),
            },
        ),
        tenants={
            "globex": TenantConfig(name="globex", cores=2, models=("resnet50", "bert")),
            "acme": TenantConfig(name="acme", granules=6, queue=1, in_flight=1, models=("*",), keys_sha256=(KEY_A,)),
        },
        source="greenlane.toml",
    )


def test_tenants_keep_the_order_of_the_file(folder: Path) -> None:
    assert list(load(write(folder, COMPLETE)).tenants) == ["globex", "acme"]


def test_the_repository_is_relative_to_the_file_not_to_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, sections())
    monkeypatch.chdir(folder)
    assert load(Path("greenlane.toml")).models.repository == folder / "models"


def test_a_configuration_cannot_be_changed(folder: Path) -> None:
    config = load(write(folder, COMPLETE))
    with pytest.raises(ValidationError, match="Instance is frozen"):
        config.server.port = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.tenants["new"] = config.tenants["acme"]  # type: ignore[index]
    with pytest.raises(TypeError):
        config.models.options["new"] = ModelOptions()  # type: ignore[index]


def test_a_configuration_is_pickled_whole(folder: Path) -> None:
    config = load(write(folder, COMPLETE))
    assert spawn, "which says how read-only mappings are pickled"
    copied = pickle.loads(ForkingPickler.dumps(config))
    assert copied == config
    with pytest.raises(TypeError):
        copied.tenants["new"] = config.tenants["acme"]


def test_digests_of_keys_are_not_printed(folder: Path) -> None:
    config = load(write(folder, COMPLETE))
    assert config.server.admin_key_sha256 == "ab" * 32
    for text in (repr(config), str(config), repr(config.server), repr(config.tenants)):
        assert "abab" not in text
        assert KEY_A not in text


def test_an_object_made_in_code_is_checked_without_its_values_in_the_error() -> None:
    with pytest.raises(ValidationError) as refused:
        TenantConfig(name="a", models=("*",), keys_sha256=("pasted",), queue=0, quota=1)  # type: ignore[call-arg]
    assert {error["loc"][0] for error in refused.value.errors()} == {"keys_sha256", "queue", "quota"}
    assert "pasted" not in str(refused.value)


def test_a_missing_file_is_named_with_its_path(folder: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(folder / "none.toml")
    assert refusal.value.problems == (f"none.toml: cannot be read at {folder}/none.toml: No such file or directory",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[server]\n  port 8000\n",
            "line 2, column 8: not TOML: Expected '=' after a key in a key/value pair: port 8000",
        ),
        ("[server]\nport = 1\nport = 2\n", "line 3, column 9: not TOML: a key or table is there twice: port = 2"),
        ("[server\n", "line 1, column 8: not TOML: Expected ']' at the end of a table declaration: [server"),
        ("port =\r\n", "line 1, column 7: not TOML: Invalid value: port ="),
        ("[server]\nport = [1,\n\n", "line 2: not TOML: Invalid value (at end of document): port = [1,"),
        ("keys_sha256 = [open sesame]", "line 1, column 16: not TOML: Invalid value: keys_sha256 = ..."),
        ("a = 'x' # " + "z" * 500 + "\nb = ", "line 2: not TOML: Invalid value (at end of document): b ="),
        ("keys_sha256 = [\n'a',\n  open sesame\n]", "line 3, column 3: not TOML: Invalid value: keys_sha256 = ..."),
        ("keys_sha256 = ['a']\nb = x", "line 2, column 5: not TOML: Invalid value: b = x"),
        (
            "keys_sha256 = ['a']\n[b",
            "line 2: not TOML: Expected ']' at the end of a table declaration (at end of document): [b",
        ),
        ("a = '\x1b[2J'", "line 1, column 6: not TOML: Found invalid character '\\x1b': a = '\\x1b[2J'"),
        ("a = x # " + "z" * 500, f"line 1, column 5: not TOML: Invalid value: a = x # {'z' * 72}..."),
    ],
)
def test_a_syntax_error_shows_its_line_but_no_key(folder: Path, text: str, said: str) -> None:
    assert problems(folder, text) == [said]


def test_a_file_that_is_not_utf_8_is_reported_with_its_line(folder: Path) -> None:
    path = folder / "greenlane.toml"
    path.write_bytes(b'[server]\nhost = "\xff"\n')
    with pytest.raises(ConfigError, match=r"^greenlane.toml: line 2 is not UTF-8"):
        load(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[sever]\n" + sections(), "sever: unknown key; did you mean 'server'?"),
        (sections(server="prot = 1"), "server.prot: unknown key; did you mean 'port'?"),
        (sections(device="core = '0'"), "device.core: unknown key; did you mean 'cores'?"),
        (sections(tenants=ACME + "in_fligth = 1"), "tenants.acme.in_fligth: unknown key; did you mean 'in_flight'?"),
        (sections(tenants=ACME + "name = 'b'"), "tenants.acme.name: unknown key; "),
        (sections() + "[models.a]\nmax_bacth = 1", "models.a.max_bacth: unknown key; did you mean 'max_batch'?"),
        (sections(tenants=ACME + "QUEUE = 1"), "tenants.acme.QUEUE: unknown key; did you mean 'queue'?"),
        (sections() + "[models.a]\ndelay = '1ms'", "models.a.delay: unknown key; did you mean 'batch_delay'?"),
        (
            sections(models="repository = 'models'\nmax = 1"),
            "models.max: unknown key; expected repository or cache or build_timeout or paced_loads or watch or python",
        ),
        (sections() + "[models.a.b]", "models.a.b: unknown key; expected one of 16, such as max_batch"),
        (sections(device="zzz = 1"), "device.zzz: unknown key; expected backend or index or cores or copies"),
        (sections(server="priority = 1"), "server.priority: unknown key; expected one of "),
        (sections(server="front = 'any'"), "server.front: unknown key; did you mean 'front_cores'?"),
        (sections(tenants='granuels = 6\nmodels = ["*"]'), "tenants.acme.granuels: unknown key; did you mean 'granules'?"),
        (sections(tenants="cores = 1\nmodles = ['*']"), "tenants.acme.modles: unknown key; did you mean 'models'?"),
        (sections(models="repositry = 'models'"), "models.repositry: unknown key; did you mean 'repository'?"),
        (sections().replace("[models]", "[model]"), "model: unknown key; did you mean 'models'?"),
        (
            sections(server="default_tenant = 'acme'").replace("[tenants.acme]", "[tenant.acme]"),
            "tenant: unknown key; did you mean 'tenants'?",
        ),
        (
            sections(server="default_tenant = 'b'") + "[tenant.b]\ncores = 1\nmodels = ['*']",
            "tenant: unknown key; did you mean 'tenants'?",
        ),
    ],
)
def test_an_unknown_key_is_refused_once_with_the_nearest_known_one(folder: Path, text: str, problem: str) -> None:
    (only,) = problems(folder, text)
    assert only.startswith(problem)


COUNT = "is not a whole number from 1 to 16, or 'auto'"
LEND = "is not true, which is '1ms', false, or a duration of at most 1 s"
DURATION = "is not a duration: a text such as '500us', '10ms', '1.5s' or '15min', at most a year"
TEXT = "is not a text of at least one character, without NUL"
PATH = "is not a text with a path, without NUL"
WATCH = "is not true, which is '5s', false, or a duration of at least 100 ms, such as '1s'"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (sections(server="port = 'abc'"), "server.port: 'abc' is not a whole number from 0 to 65535"),
        (sections(server="max_body = 0"), "server.max_body: 0 is not a size: 1 or more bytes as a whole"),
        (sections(server="max_json_tensor = '0B'"), "server.max_json_tensor: '0B' is not a size: 1 or more bytes"),
        (sections(server="port = [1]"), "server.port: [1] is not a whole number from 0 to 65535"),
        (sections(server="drain_grace = '999999999999999min'"), f"server.drain_grace: '999999999999999min' {DURATION}"),
        (sections(server="max_execution = '527041min'"), f"server.max_execution: '527041min' {DURATION}"),
        (sections(server="tracing_endpoint = 'host:4318'"), "server.tracing_endpoint: 'host:4318' is not the address of a rec"),
        (sections(server="watchdog = '900ms'"), "server.watchdog: '900ms' is not a duration of at least 1 s, or '0s': a text"),
        (sections(server='usage_dir = "a\\u0000b"'), f"server.usage_dir: 'a\\x00b' {PATH}"),
        (sections(server='host = "a\\u0000b"'), f"server.host: 'a\\x00b' {TEXT}"),
        (sections(models='repository = "a\\u0000b"'), f"models.repository: 'a\\x00b' {PATH}"),
        (sections(server="tracing_ratio = 2"), "server.tracing_ratio: 2 is not a number from 0 to 1"),
        (sections(server="tracing_ratio = 'all'"), "server.tracing_ratio: 'all' is not a number from 0 to 1"),
        (sections(server="admin_key_sha256 = 'secret'"), "server.admin_key_sha256: <6 characters> is not a SHA-256"),
        (sections(server="default_tenant = 1"), "server.default_tenant: 1 is not a text"),
        (sections(server="strict_readiness = 'yes'"), "server.strict_readiness: 'yes' is not true or false"),
        (sections(server="keep_alive = '500ms'"), "server.keep_alive: '500ms' is not a duration of at least 1 s"),
        (
            sections(server="cors_origins = ['app.example/a']"),
            "server.cors_origins: ['app.example/a'] is not a list of origins of",
        ),
        (sections(server="cors_origins = '*'"), "server.cors_origins: '*' is not a list of origins of web pages"),
        (sections(server=f"port = 0x{'f' * 4000}"), "server.port: a number of thousands of digits is not a whole number"),
        (sections(server=f"log_level = '{'x' * 99}'"), f"server.log_level: '{'x' * 59}... is not 'debug'"),
        (sections(models="repository = {}"), "models.repository: {} is not a text"),
        (sections(models=""), "models.repository: missing; expected a text with a path"),
        (sections() + "[models.a]\nmax_batch = -1", "models.a.max_batch: -1 is not a whole number of 0 or more"),
        (
            sections(tenants=ACME + "memory = '1023KiB'"),
            "tenants.acme.memory: '1023KiB' is not a size from 1MiB to 64TiB: bytes as a number, or a text",
        ),
        (sections(tenants="cores = 1"), "tenants.acme.models: missing; expected a list of one or more model names"),
        (sections(tenants=ACME + "keys_sha256 = ['k']"), "tenants.acme.keys_sha256: [<1 character>] is not a list of"),
        (sections(tenants=ACME + "keys_sha256 = { k = 1 }"), "tenants.acme.keys_sha256: a table is not a list of"),
        (sections(tenants=ACME + "http_processes = 17"), f"tenants.acme.http_processes: 17 {COUNT}"),
        (sections(tenants=ACME + "http_processes = true"), f"tenants.acme.http_processes: true {COUNT}"),
        (sections(tenants=ACME + "http_processes = 'many'"), f"tenants.acme.http_processes: 'many' {COUNT}"),
        (sections(tenants=ACME + "lend = 1"), f"tenants.acme.lend: 1 {LEND}"),
        (sections(tenants=ACME + "lend = '2s'"), f"tenants.acme.lend: '2s' {LEND}"),
        (sections(tenants=ACME + "lend = '-1ms'"), f"tenants.acme.lend: '-1ms' {LEND}"),
        (sections(models="repository = 'models'\nwatch = '99ms'"), f"models.watch: '99ms' {WATCH}"),
        (sections(models="repository = 'models'\nwatch = 5"), f"models.watch: 5 {WATCH}"),
        (sections(models="repository = 'models'\nwatch = '527041min'"), f"models.watch: '527041min' {WATCH}"),
        (sections(tenants=ACME + "target_p99 = '527041min'"), "tenants.acme.target_p99: '527041min' is not a duration above 0"),
        (
            sections(tenants=ACME + "pcie = 2_000_000"),
            "tenants.acme.pcie: 2000000 is not 'auto' (the tenant's part of the SMs or cores)",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_what_came_and_what_was_expected(folder: Path, text: str, problem: str) -> None:
    """What each key expects, and what it is by default, `test_reference.py` compares with the documents."""
    (only,) = problems(folder, text)
    assert only.startswith(problem)


KEYED = f'{ACME}keys_sha256 = ["{KEY_A}"]'
CONTRADICTIONS = {
    "a port of two": (
        sections(tenants=ACME + "port = 8001") + f"[tenants.globex]\n{ACME}port = 8001\n[tenants.initech]\n{ACME}port = 8000",
        "tenants.globex.port: 8001 is also tenants.acme.port; each listens on a port of its own",
        "tenants.initech.port: 8000 is also server.port; each listens on a port of its own",
    ),
    "a port for gRPC that is another port": (
        sections(tenants=ACME + "port = 8001\ngrpc_port = 8000") + f"[tenants.globex]\n{ACME}grpc_port = 8001",
        "tenants.acme.grpc_port: 8000 is also server.port; each listens on a port of its own",
        "tenants.globex.grpc_port: 8001 is also tenants.acme.port; each listens on a port of its own",
    ),
    "a preferred batch above max_batch": (
        sections() + "[models.a]\nmax_batch = 8\npreferred_batches = [8, 16, 32]",
        "models.a.preferred_batches: 16 is above max_batch, which is 8",
    ),
    "a warm-up above max_batch": (
        sections() + "[models.a]\nmax_batch = 8\nwarm_up = [8, 16]",
        "models.a.warm_up: 16 is above max_batch, which is 8",
    ),
    "what is no table": (
        sections(models="repository = 'models'\na = [1]") + "[tenants]\nglobex = true",
        "models.a: unknown key; expected repository or cache or build_timeout or paced_loads or watch or python",
        "tenants.globex: true is not a table; write [tenants.globex]",
    ),
    "devices without a table": (
        sections() + "[devices]",
        "devices: there is no device in it; write [devices.0], or [device] for the only one",
    ),
    "no tenants": (
        '[models]\nrepository = "models"\n[server]\ndefault_tenant = "acme"',
        "tenants: missing; at least one tenant is needed, as in [tenants.acme]",
        "server.default_tenant: 'acme' is not a configured tenant; there is none",
    ),
    "a default tenant that is not there": (
        sections(server="default_tenant = 'acmee'"),
        "server.default_tenant: 'acmee' is not a configured tenant; did you mean 'acme'?",
    ),
    "two shares": (
        sections(tenants=ACME + "sms = 48"),
        "tenants.acme: granules and sms given; a share is only one of them",
    ),
    "a burst below the share": (
        sections(tenants=ACME + "burst = 5"),
        "tenants.acme.burst: 5 is below granules, which is 6; it is the most that the tenant may use, its share included",
    ),
    "a key of two": (
        sections(tenants=KEYED) + f'[tenants.globex]\n{ACME}keys_sha256 = ["{KEY_B}", "{KEY_A.upper()}"]',
        "tenants.globex.keys_sha256: the key aaaaaaaa... is also in tenants.acme.keys_sha256; a key belongs to one of them",
    ),
    "the admin's key as a tenant's": (
        sections(f'admin_key_sha256 = "{KEY_A}"', tenants=KEYED),
        "tenants.acme.keys_sha256: the key aaaaaaaa... is also in server.admin_key_sha256; a key belongs to one of them",
    ),
    "a key that is gone": (
        sections(server="fronts = 'inline'"),
        "server.fronts: this key is gone, as each tenant has an HTTP process; leave it out "
        "(`uvicorn server.app:app` serves all tenants in one process)",
    ),
    "a name in dots, which is quoted": (
        sections() + f'[tenants."a.b_c-1"]\n{ACME}queue = 0',
        'tenants."a.b_c-1".queue: 0 is not a whole number from 1 to 1000000000',
    ),
    "keys twice, of which the known one counts, and a table spelled twice": (
        sections(server="prot = 1\nport = 2") + "[tenant.acme]\nqueue = 1\n[tenant.globex]\nqueue = 0",
        "tenant: unknown key; did you mean 'tenants'?",
        "server.prot: unknown key; did you mean 'port'?",
        "tenants.globex.models: missing; expected a list of one or more model names, or ['*'] alone for all",
        "tenants.globex.queue: 0 is not a whole number from 1 to 1000000000",
        "tenants.globex: no share of the device; expected one of granules, cores, sms",
    ),
}
"""Files that contradict themselves, and all their problems."""


@pytest.mark.parametrize("case", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_contradiction_is_refused_with_both_sides_named(folder: Path, case: tuple[str, ...]) -> None:
    text, *expected = case
    assert problems(folder, text) == expected


@pytest.mark.parametrize("value", ["9223372036854775808", "0x10000000000000000", "1_000_000_000_000_000_000_000"])
@pytest.mark.parametrize(
    "key",
    ["max_connections", "target_rate", "device_memory", "ladder", "memory_bandwidth", "http_processes", "queue", "memory"],
)
def test_a_number_that_no_message_takes_is_refused(folder: Path, key: str, value: str) -> None:
    written = f"[{value}]" if key == "ladder" else value
    (only,) = problems(folder, sections(tenants=f"{ACME}{key} = {written}"))
    assert only.startswith(f"tenants.acme.{key}: ")
    assert only.endswith(" is more than 9223372036854775807, the largest there is") or " is not " in only


@pytest.mark.parametrize(
    ("key", "most"), [("queue", 10**9), ("memory", 2**46), ("max_connections", 2**63 - 1), ("device_memory", 2**63 - 1)]
)
def test_the_largest_number_is_taken_and_no_larger_one(folder: Path, key: str, most: int) -> None:
    assert getattr(load(write(folder, sections(tenants=f"{ACME}{key} = {most}"))).tenants["acme"], key) == most
    (only,) = problems(folder, sections(tenants=f"{ACME}{key} = {most + 1}"))
    assert only.startswith(f"tenants.acme.{key}: {most + 1} is ")


@pytest.mark.parametrize(("count", "whose"), [(48, 0), (49, 0), (49, 1)])
def test_no_more_tenants_have_processes_under_mps_than_a_daemon_takes(folder: Path, count: int, whose: int) -> None:
    devices = "".join(f"[devices.{name}]\nbackend = 'cuda'\nindex = {name}\nmps = 'on'\n" for name in "01")
    on = [str(whose)] * count + ["1"]
    tenants = "".join(f"[tenants.t{number}]\n{ACME}device = '{each}'\n" for number, each in enumerate(on))
    text = f'{devices}[models]\nrepository = "models"\n{tenants}'
    if count <= 48:
        assert len(load(write(folder, text)).tenants_on(str(whose))) == count
    else:
        assert problems(folder, text) == [
            f'devices.{whose}.mps: "on", but it has {count + whose} tenants, and a daemon takes the processes of 48; '
            "have fewer tenants there, or leave it out"
        ]


def test_a_byte_order_mark_is_skipped(folder: Path) -> None:
    path = write(folder, sections())
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert load(path).tenants["acme"].granules == 6
    path.write_text(path.read_text(encoding="utf-8-sig") + "\n= 1\n", encoding="utf-8-sig")
    with pytest.raises(ConfigError, match="not TOML"):
        load(path)


def test_how_a_model_takes_texts_is_a_table(folder: Path) -> None:
    table = "[models.minilm.text]\npooling = 'cls'\nmax_tokens = 128\n"
    found = load(write(folder, sections() + table)).models.options["minilm"].text
    assert found == TextOptions(pooling="cls", max_tokens=128)
    for wrong in ("pooling = 'weighted'", "max_tokens = 0", "normalise = true", "normalize = 1"):
        (problem,) = problems(folder, sections() + f"[models.minilm.text]\n{wrong}")
        assert problem.startswith("models.minilm.text: ")
        assert "a table with any of task ('embed', 'rerank'), pooling ('mean', 'cls', 'last', 'max'), normalize" in problem


def test_a_grpc_port_without_grpc_is_refused_with_the_command_that_installs_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    assert problems(folder, sections(tenants=ACME + "grpc_port = 8101")) == [
        "tenants.acme.grpc_port: gRPC is not installed; install it with `scripts/install grpc`, or leave it out"
    ]


def test_with_server_port_0_a_tenant_may_use_any_port(folder: Path) -> None:
    config = load(write(folder, sections(server="port = 0", tenants=ACME + "port = 8000")))
    assert config.tenants["acme"].port == 8000


def test_preferred_batches_need_no_max_batch(folder: Path) -> None:
    config = load(write(folder, sections() + "[models.a]\npreferred_batches = [4, 16]"))
    assert config.models.options["a"].preferred_batches == (4, 16)


@pytest.mark.parametrize("name", ["modles", "greenlane.toml"])
def test_a_repository_that_is_no_directory_is_named_with_its_path(folder: Path, name: str) -> None:
    assert problems(folder, sections(models=f"repository = '{name}'")) == [
        f"models.repository: {name!r} is not an existing directory: {folder}/{name}"
    ]


def test_a_folder_is_refused_as_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError) as refused:
        load(Path("."))
    assert str(refused.value) == f".: cannot be read at {folder}: Is a directory"


def test_what_is_no_file_is_refused_as_configuration_and_as_audit(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "endless").symlink_to("/dev/zero")
    for name, what in (("pipe", "a named pipe"), ("endless", "a device")):
        with pytest.raises(ConfigError) as refused:
            load(folder / name)
        assert str(refused.value) == f"{name}: cannot be read at {folder / name}: is {what}; expected a file"
    assert problems(folder, sections(server="audit = 'pipe'")) == [
        f"""server.audit: 'pipe' is there, and no file: {folder / "pipe"}; expected a file, or "-" for the log"""
    ]


@pytest.mark.parametrize("usage", ["file", "file/a/b", "link/a"])
def test_a_usage_dir_that_cannot_be_a_directory_is_refused(folder: Path, usage: str) -> None:
    (folder / "file").touch()
    (folder / "link").symlink_to("gone")
    (problem,) = problems(folder, sections(server=f"usage_dir = '{usage}'"))
    where = folder / usage.partition("/")[0]
    assert problem.startswith(f"server.usage_dir: '{usage}': {where} is there, and no directory; ")


def test_a_usage_dir_may_be_there_or_not(folder: Path) -> None:
    (folder / "there").mkdir()
    for usage in ("there", "new", "there/new/newer"):
        assert load(write(folder, sections(server=f"usage_dir = '{usage}'"))).server.usage_dir == folder / usage


def test_a_configuration_that_is_too_large_is_refused_before_it_is_parsed(folder: Path) -> None:
    (folder / "large").write_text("#" * (MOST_BYTES + 1))
    with pytest.raises(ConfigError, match=f"has {MOST_BYTES + 1} bytes; at most {MOST_BYTES} are read"):
        load(folder / "large")


def test_the_cache_is_relative_to_the_file_and_build_timeout_is_15_minutes(folder: Path) -> None:
    assert load(write(folder, sections())).models == ModelsConfig(
        repository=folder / "models", cache=None, build_timeout=900.0, options={}
    )
    models = load(write(folder, sections(models="repository = 'models'\ncache = 'kept'\nbuild_timeout = '2min'"))).models
    assert (models.cache, models.build_timeout) == (folder / "kept", 120.0)


def test_a_model_may_be_called_cache(folder: Path) -> None:
    models = load(write(folder, sections(models="repository = 'models'\n[models.cache]\nmax_batch = 4"))).models
    assert (models.cache, models.options["cache"].max_batch) == (None, 4)


@pytest.mark.parametrize(
    ("section", "named"), [("server", ""), ("device", ""), ("models", ""), ("tenants", ".NAME"), ("devices", ".NAME")]
)
def test_a_section_that_is_not_a_table_is_refused(folder: Path, section: str, named: str) -> None:
    assert f"{section}: 3 is not a table; write [{section}{named}]" in problems(folder, f"{section} = 3")


TWO = """
[devices.0]
backend = "cuda"
[devices.b]
backend = "cuda"
index = 1
"""
ONE_EACH = (
    TWO
    + """
[tenants.acme]
device = "b"
granules = 1
models = ["*"]
[tenants.globex]
device = "0"
granules = 1
models = ["*"]
"""
)


def test_several_devices_have_names_and_tenants(folder: Path) -> None:
    (folder / "greenlane.toml").write_text("[models]\nrepository = 'models'\n" + ONE_EACH)
    config = load(folder / "greenlane.toml")
    assert {name: device.index for name, device in config.named_devices.items()} == {"0": 0, "b": 1}
    assert (config.tenants_on("0"), config.tenants_on("b")) == (["globex"], ["acme"])
    assert config.on_device("b").device == config.on_device("b").named_devices["b"] == config.devices["b"]


def test_the_only_device_is_called_0_or_as_its_table(folder: Path) -> None:
    for text, name in (("", "0"), ("[device]\nindex = 3", "0"), ("[devices.gpu]\nindex = 3", "gpu")):
        (folder / "greenlane.toml").write_text(f"[models]\nrepository = 'models'\n[tenants.acme]\n{ACME}\n{text}")
        config = load(folder / "greenlane.toml")
        assert list(config.named_devices) == [name]
        assert config.device == config.named_devices[name]
        assert config.tenants_on(name) == ["acme"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ONE_EACH + "[device]\nindex = 1", "device: given besides [devices]; move its keys into a table such as [devices.0], "
         "or leave [devices] out"),
        (ONE_EACH.replace("index = 1", ""), "devices.b.index: 0 is also devices.0.index; each is a GPU of its own"),
        (ONE_EACH.replace('backend = "cuda"\nindex', "index"), "devices.b.backend: with several devices each says what it is; "
         "expected 'cpu' or 'cuda'"),
        (ONE_EACH.replace('device = "b"\n', ""), "tenants.acme.device: missing; there are several devices, so name one of "
         "'0', 'b'"),
        (ONE_EACH.replace('device = "b"', 'device = "c"'), "tenants.acme.device: 'c' is not a configured device; "
         "expected 0 or b"),
        (ONE_EACH.replace('device = "b"', 'device = ["b", "0"]\nladder = [1, 2]'), "tenants.acme.device: ['b', '0'] is not the "
         "name of one device as a text, such as '1'; to be on several, have a tenant on each"),
        (ONE_EACH.replace('device = "b"', 'device = ["b"]'), "tenants.acme.device: ['b'] is not the name of one device as a "
         "text, such as '1'; to be on several, have a tenant on each"),
        (ONE_EACH.replace("[devices.b]", '[devices."b c"]').replace('"b"', '"b c"'), "devices.\"b c\": not a device's name; "
         "use up to 128 letters, digits, '.', '_' and '-'"),
        (ONE_EACH.replace("index = 1", "index = [1]"), "devices.b.index: [1] is not a whole number of 0 or more"),
        (ONE_EACH.replace("index = 1", "index = {}"), "devices.b.index: {} is not a whole number of 0 or more"),
    ],
)  # fmt: skip
def test_devices_that_are_in_each_others_way_are_refused(folder: Path, text: str, problem: str) -> None:
    assert problem in problems(folder, "[models]\nrepository = 'models'\n" + text)


@pytest.mark.parametrize(
    ("first", "second", "wrong"),
    [
        ('cores = "0-3"', 'cores = "4,6"', []),
        ('cores = "0-3"', 'cores = "2,3,5"', ["devices.b.cores: 2-3 is also in devices.0.cores; a core is of one device"]),
        ("", 'cores = "1"', ["devices.0.cores: missing; without it the device is all cores, but there are several devices"]),
    ],
)
def test_devices_of_cores_have_no_core_in_common(folder: Path, first: str, second: str, wrong: list[str]) -> None:
    text = ONE_EACH.replace("cuda", "cpu").replace("index = 1", second).replace("[devices.b]", f"{first}\n[devices.b]")
    (folder / "greenlane.toml").write_text("[models]\nrepository = 'models'\n" + text)
    if wrong:
        assert problems(folder, "[models]\nrepository = 'models'\n" + text) == wrong
    else:
        load(folder / "greenlane.toml")


KEYS = f'keys_sha256 = ["{"a" * 64}"]'


@pytest.mark.parametrize(
    ("tenants", "default"),
    [
        (ACME, "acme"),
        (ACME + KEYS, None),
        (ACME + "[tenants.globex]\ngranules = 1\nmodels = ['a']", None),
        (f"{ACME}{KEYS}\n[tenants.globex]\ngranules = 1\nmodels = ['a']", None),
    ],
)
def test_the_only_tenant_is_the_default_where_it_has_no_keys(folder: Path, tenants: str, default: str | None) -> None:
    config = load(write(folder, f"[models]\nrepository = 'models'\n[tenants.acme]\n{tenants}"))
    assert config.server.default_tenant == default


@pytest.mark.parametrize("name", ["a b", "", "é", "a/b", "a\\n"])
def test_a_tenants_name_that_cannot_travel_in_a_header_is_refused(folder: Path, name: str) -> None:
    (problem,) = problems(folder, sections() + f'[tenants."{name}"]\n{ACME}')
    assert problem.startswith(f'tenants."{name}": not a tenant\'s name; ')


def test_a_name_that_is_too_long_to_be_handed_over_is_refused(folder: Path) -> None:
    """One of 9,000 letters was taken, and the tenant's requests were never answered."""
    assert "t" * 128 in load(write(folder, sections() + f"[tenants.{'t' * 128}]\n{ACME}")).tenants
    (problem,) = problems(folder, sections() + f"[tenants.{'t' * 129}]\n{ACME}")
    assert problem.endswith("use up to 128 letters, digits, '.', '_' and '-'")


def test_a_key_listed_twice_by_its_tenant_does_no_harm(folder: Path) -> None:
    config = load(write(folder, sections(tenants=f'{ACME}keys_sha256 = ["{KEY_A}", "{KEY_A}"]')))
    assert set(config.tenants["acme"].keys_sha256) == {KEY_A}


def test_every_problem_is_reported_at_once(folder: Path) -> None:
    text = f"""
        [server]
        port = "abc"
        admin_key_sha256 = "{KEY_A}"
        default_tenant = "nobody"
        [modles]
        [tenants.acme]
        cores = 1
        sms = "x"
        keys_sha256 = ["{KEY_A}", "pasted"]
        [tenants.globex]
        queue = 0
    """
    keys = [problem.split(": ")[0] for problem in problems(folder, text)]
    assert keys == [
        "modles",
        "server.port",
        "models.repository",
        "tenants.acme.sms",
        "tenants.acme.models",
        "tenants.acme.keys_sha256",
        "tenants.acme",
        "tenants.globex.models",
        "tenants.globex.queue",
        "tenants.globex",
        "server.default_tenant",
        "tenants.acme.keys_sha256",
    ]


@pytest.mark.parametrize("text", [f"port = {'1' * 5000}", f"a = {'[' * 100_000}"])
def test_toml_that_breaks_the_parser_is_an_error_without_a_traceback(folder: Path, text: str) -> None:
    (problem,) = problems(folder, text)
    assert problem.startswith("not TOML: ")


def test_salvage_keeps_what_is_valid(folder: Path) -> None:
    text = sections(server='prot = 1\nhost = "::1"\ndefault_tenant = "globex"', device="index = -1", tenants=ACME + "queue = 0")
    text += '[modles]\n[models.a]\nmax_batch = "x"\n[tenants.globex]\ncores = 1\n[tenants.initech]\nmodels = ["a"]'
    salvaged = salvage(write(folder, text))
    assert salvaged is not None
    config, dropped = salvaged
    assert (config.server, config.device) == (ServerConfig(host="::1", port=1, default_tenant="acme"), DeviceConfig())
    assert config.models.options == {"a": ModelOptions()}
    assert config.tenants == {"acme": TenantConfig(name="acme", granules=6, models=("*",))}
    assert dropped >= {("server", "default_tenant"), ("models", "a", "max_batch"), ("tenants", "acme", "queue")}


@pytest.mark.parametrize(
    "text", ["models = 3", "[models]", ACME, sections(models="repository = 3"), "[models]\nrepository = 'models'"]
)
def test_salvage_needs_a_repository_and_a_tenant(folder: Path, text: str) -> None:
    assert salvage(write(folder, text)) is None


def test_salvage_keeps_a_repository_that_does_not_exist(folder: Path) -> None:
    salvaged = salvage(write(folder, sections(models="repository = 'nowhere'")))
    assert salvaged is not None
    config, _ = salvaged
    assert (config.models.repository, list(config.tenants)) == (folder / "nowhere", ["acme"])


def test_salvage_keeps_all_of_a_good_file(folder: Path) -> None:
    path = write(folder, COMPLETE)
    assert salvage(path) == (load(path), frozenset())


def tenant(**share: int) -> TenantConfig:
    return TenantConfig(name="acme", models=("a", "b"), **share)  # type: ignore[arg-type]


def test_a_tenant_may_call_the_models_it_lists_or_with_a_star_every_one() -> None:
    assert [tenant().may_call(model) for model in ("a", "b", "c", "*")] == [True, True, False, False]
    assert TenantConfig(name="acme", models=("*",)).may_call("anything")


@pytest.mark.parametrize(
    ("share", "unit", "sizes", "granules"),
    [
        ({"granules": 6}, "SM", [8] * 16, 6),
        ({"granules": 6}, "core", [1] * 8, 6),
        ({"cores": 3}, "core", [1] * 8, 3),
        ({"sms": 48}, "SM", [8] * 16, 6),
        ({"sms": 8}, "SM", [8] * 16, 1),
    ],
)
def test_a_share_is_counted_in_granules(share: dict[str, int], unit: str, sizes: list[int], granules: int) -> None:
    assert tenant(**share).share(unit, sizes) == granules


@pytest.mark.parametrize(
    ("share", "unit", "problem"),
    [
        ({"sms": 8}, "core", "tenants.acme.sms: this device is shared out in cores; use 'cores' instead"),
        ({"cores": 8}, "SM", "tenants.acme.cores: this device is shared out in SMs; use 'sms' instead"),
        ({"cores": 8}, "tile", "tenants.acme.cores: this device is shared out in tiles; use 'granules' instead"),
    ],
)
def test_a_share_in_units_of_another_device_is_refused_with_the_key_to_use(
    share: dict[str, int], unit: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        tenant(**share).share(unit, [8])
    assert refusal.value.problems == (problem,)


@pytest.mark.parametrize("share", [{}, {"granules": 1, "sms": 8}])
def test_a_tenant_made_in_code_needs_one_share(share: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"^tenants.acme: "):
        tenant(**share).share("SM", [8])


def shared(**shares: dict[str, int]) -> Config:
    tenants = {name: TenantConfig(name=name, models=("*",), **share) for name, share in shares.items()}  # type: ignore[arg-type]
    return Config(models=ModelsConfig(repository=Path()), tenants=tenants, source="c.toml")


@pytest.mark.parametrize(
    ("shares", "unit", "sizes", "problem"),
    [
        (
            {"acme": {"cores": 6}, "globex": {"cores": 2}}, "core", [1, 1],
            "tenants.acme.cores 6 + tenants.globex.cores 2 = 8 cores, but the device has 2: lower them by 6",
        ),
        (
            {"acme": {"granules": 3}}, "core", [1, 1],
            "tenants.acme.granules 3 = 3 cores, but the device has 2: lower it by 1",
        ),
        (
            {"acme": {"sms": 48}, "globex": {"granules": 12}}, "SM", [8] * 16,
            "tenants.acme.sms 48 (6 granules) + tenants.globex.granules 12 = 18 granules of 8 SMs, but the device has 16: "
            "lower them by 2",
        ),
    ],
)  # fmt: skip
def test_too_many_shares_are_refused_with_their_keys(
    shares: dict[str, dict[str, int]], unit: str, sizes: list[int], problem: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        shared(**shares).fit(unit, sizes)
    assert refused.value.problems == (f"c.toml: {problem}",)


def test_a_share_in_the_wrong_unit_does_not_hide_that_the_others_are_too_many() -> None:
    counts, (first, second) = shared(acme={"sms": 8}, globex={"cores": 2}, initech={"cores": 1}).counts("core", [1, 1])
    assert counts == {"globex": 2, "initech": 1}
    assert first == "c.toml: tenants.acme.sms: this device is shared out in cores; use 'cores' instead"
    assert second.startswith("c.toml: tenants.globex.cores 2 + tenants.initech.cores 1 = 3 cores, ")


HOW = """
[models.a]
max_batch = 8
graphs = "required"
strategy = "lazy"
cuda_graphs = "on"
allocation = "on_profile_change"
profile = 1
profiles = [{ x = { min = [0, 3], opt = [4, 3], max = [8, 3] }, y = { max = [8] } }, { x = { opt = [16, 3] } }]
weight_budget = "1GiB"
copies = "engine"
warm_up = [1, 8]
"""


def test_model_options(folder: Path) -> None:
    assert load(write(folder, sections() + HOW)).models.options["a"] == ModelOptions(
        max_batch=8,
        graphs="required",
        strategy="lazy",
        cuda_graphs="on",
        allocation="on_profile_change",
        profile=1,
        profiles=(
            (("x", ((0, 3), (4, 3), (8, 3))), ("y", ((8,), (8,), (8,)))),
            (("x", ((16, 3), (16, 3), (16, 3))),),
        ),
        weight_budget=2**30,
        copies="engine",
        warm_up=(1, 8),
    )
    assert load(write(folder, sections() + "[models.a]\nwarm_up = 'opt'")).models.options["a"].warm_up == "opt"


def test_every_problem_of_model_options_is_reported_at_once(folder: Path) -> None:
    wrong = """[models.a]
max_batch = 4
graphs = true
strategy = "fast"
cuda_graphs = "whole"
allocation = ""
profile = -1
weight_budget = "1 GiB"
copies = "dma"
warm_up = [4, 1]
graph = "on"
"""
    assert problems(folder, sections() + wrong) == [
        "models.a.graph: unknown key; did you mean 'graphs'?",
        "models.a.graphs: true is not 'on' or 'off' or 'required'",
        "models.a.strategy: 'fast' is not 'lazy' or 'eager' or 'none'",
        "models.a.cuda_graphs: 'whole' is not 'on' or 'off'",
        "models.a.allocation: '' is not 'static' or 'on_profile_change' or 'user_managed'",
        "models.a.profile: -1 is not a whole number of 0 or more",
        "models.a.weight_budget: '1 GiB' is not a size: bytes as a whole number, or a text such as '64MiB' or '10MB'",
        "models.a.copies: 'dma' is not 'auto' or 'sm' or 'engine'",
        "models.a.warm_up: [4, 1] is not 'opt', 'usual', or a list of batch sizes, each 1 or more and above the one before it, "
        "as in [1, 4, 32]",
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        "[]", "[{}]", "{ x = { max = [8] } }", "[{ x = [8] }]", "[{ x = {} }]", "[{ x = { max = [] } }]",
        "[{ x = { most = [8] } }]",
        "[{ x = { max = ['8'] } }]", "[{ x = { max = [0] } }]", "[{ x = { min = [4], max = [2] } }]",
        "[{ x = { min = [1, 4], max = [2] } }]", "[{ x = { max = [-1] } }]",
        "[" + "{ x = { max = [8] } }, " * 17 + "]",
    ],
)  # fmt: skip
def test_wrong_profiles_are_refused_with_an_example(folder: Path, wrong: str) -> None:
    (problem,) = problems(folder, sections() + f"[models.a]\nprofiles = {wrong}")
    assert problem.startswith("models.a.profiles: ")
    assert "is not a list of 1 to 16 optimization profiles, each a table with shapes for inputs by name" in problem
    assert problem.endswith("as in [{ x = { min = [1, 16], opt = [8, 16], max = [32, 16] } }]")


def test_without_batches_no_warm_up_is_above_the_largest(folder: Path) -> None:
    assert load(write(folder, sections() + "[models.a]\nmax_batch = 0\nwarm_up = [16]")).models.options["a"].warm_up == (16,)


@pytest.mark.parametrize(("written", "seconds"), [("true", 0.001), ("false", 0.0), ('"500us"', 0.0005), ('"0s"', 0.0)])
def test_lend_is_a_duration_or_says_whether(folder: Path, written: str, seconds: float) -> None:
    config = load(write(folder, sections(tenants=f"{ACME}lend = {written}")))
    assert config.tenants["acme"].lend == seconds


@pytest.mark.parametrize(
    ("given", "unit", "sizes", "granules"),
    [
        ({"granules": 2}, "SM", [8] * 16, 2),
        ({"granules": 2, "burst": 16}, "SM", [8] * 16, 16),
        ({"sms": 16, "burst": 64}, "SM", [8] * 16, 8),
        ({"cores": 1, "burst": 1}, "core", [1] * 4, 1),
    ],
)
def test_a_burst_is_counted_as_the_share_is(given: dict[str, int], unit: str, sizes: list[int], granules: int) -> None:
    assert tenant(**given).most(unit, sizes) == granules


@pytest.mark.parametrize(
    ("given", "unit", "sizes", "problem"),
    [
        ({"granules": 4, "burst": 3}, "SM", [8] * 4, "3 is below granules, which is 4; it is the most that the tenant may use"),
        ({"granules": 4, "burst": 17}, "SM", [8] * 16, "17 is above the device, which has 16 granules"),
        ({"sms": 16, "burst": 256}, "SM", [8] * 16, "256 is above the device, which has 128 SMs"),
        ({"sms": 16, "burst": 20}, "SM", [8] * 4, "20 is not in whole granules of 8; expected one of 8, 16, 24, 32"),
        ({"cores": 1, "burst": 3}, "core", [1, 1], "3 is above the device, which has 2 cores"),
        ({"granules": 4, "ladder": [4, 17]}, "SM", [8] * 16, "17 is above the device, which has 16 granules"),
        ({"sms": 16, "ladder": [16, 20]}, "SM", [8] * 4, "20 is not in whole granules of 8; expected one of 8, 16, 24, 32"),
    ],
)
def test_a_burst_or_a_ladder_that_does_not_fit_the_device_is_refused_with_the_numbers(
    given: dict[str, object], unit: str, sizes: list[int], problem: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        shared(acme=given).fit(unit, sizes)
    (text,) = refused.value.problems
    assert text.startswith(f"c.toml: tenants.acme.{[*given][-1]}: {problem}")


def test_a_minimum_above_the_share_is_refused() -> None:
    shared(acme={"granules": 4, "min_granules": 4}).fit("SM", [8] * 4)
    with pytest.raises(ConfigError) as refused:
        shared(acme={"sms": 16, "min_granules": 3}).fit("SM", [8] * 4)
    assert refused.value.problems == ("c.toml: tenants.acme.min_granules: 3 is above the tenant's own share of 2 granules",)


def test_a_ladder_leaves_the_others_their_minimums() -> None:
    config = shared(acme={"granules": 4, "ladder": [4, 8]}, globex={"granules": 2, "min_granules": 2}, other={"granules": 1})
    assert config.tenants["acme"].rungs("SM", [8] * 16) == (4, 8)
    config.fit("SM", [8] * 11)
    with pytest.raises(ConfigError) as refused:
        config.fit("SM", [8] * 10)
    assert refused.value.problems == (
        "c.toml: tenants.acme.ladder: its widest is 8 granules, but of the device's 10 the others keep at least "
        "globex 2 + other 1, which leaves 7",
    )


@pytest.mark.parametrize(("written", "seconds"), [("true", 5), ("false", 0), ('"0s"', 0), ('"100ms"', 0.1), ('"1min"', 60)])
def test_watch_is_a_duration_or_says_whether(folder: Path, written: str, seconds: float) -> None:
    config = load(write(folder, sections(models=f"repository = 'models'\nwatch = {written}")))
    assert config.models.watch == seconds


def test_weights_of_a_tenant_hold_in_place_of_those_of_all(folder: Path) -> None:
    file = sections(tenants=f"{ACME}weights = {{ a = {{ 3 = 1 }} }}") + "[models.a]\nweights = { 1 = 0.9, 2 = 0.1 }\n"
    config = load(write(folder, file + "[models.b]\nweights = { 1 = 1, 2 = 0 }\n[models.c]\nmax_batch = 8"))
    assert config.version_weights("acme") == {"a": {"3": 1}, "b": {"1": 1, "2": 0}}


@pytest.mark.parametrize(
    "written", ["0.5", "{}", "{ 1 = 0 }", "{ 1 = -1 }", "{ 01 = 1 }", "{ 1 = true }", "{ 1 = inf }", "[1]"]
)
def test_weights_that_are_none_are_refused(folder: Path, written: str) -> None:
    (problem,) = problems(folder, sections() + f"[models.a]\nweights = {written}")
    assert problem.startswith(f"models.a.weights: {written.replace(chr(34), '')} is not a table of versions")
    assert "a table of versions and their weights, numbers from 0 to 1000000, not all 0" in problem
    (problem,) = problems(folder, sections(tenants=f"{ACME}weights = {{ a = {written} }}"))
    assert "a table of models with a table each of versions and their weights" in problem


def test_a_repository_that_is_a_url_is_a_directory_of_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = "repository = 's3://bucket/Models'"
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/x")
    config = load(write(folder, sections(models=models)))
    assert config.models.remote == "s3://bucket/Models"
    own, name = config.models.repository.parent, config.models.repository.name
    assert (str(own), name[:17]) == ("/home/x/greenlane/repositories", "s3-bucket-Models-")
    config = load(write(folder, sections(models=f"{models}\ncache = 'cache'")))
    assert config.models.repository == folder / "cache" / "repositories" / name
    assert problems(folder, sections(models="repository = 'models'\nremote = 's3://b'"))[0].startswith("models.remote: unknown")
    (found,) = problems(folder, sections(models="repository = 'https://user:s3cret@host/models'"))
    assert found.startswith("models.repository: a password in a URL, which logs and the copy's directory would show; give it")
    assert "s3cret" not in found
    assert load(write(folder, sections(models="repository = 'hf://owner/name@v1:2/models'"))).models.remote
