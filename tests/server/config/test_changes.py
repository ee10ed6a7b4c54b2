"""What differs between two configurations, and what of it may change while they are served."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.config.changes import LIVE_OF_SERVER, LIVE_OF_TENANT, Change, compare, loaded_again
from server.config.file import keys, load
from server.config.schema import ModelOptions
from server.config.server import ServerConfig
from server.config.tenant import TenantConfig
from server.processes.channels.http_protocols import Live
from server.processes.channels.message_fields import decode_hook, encode_hook

FILE = """
[server]
default_tenant = "acme"
usage_dir = "usage"
[models]
repository = "."
[models.resnet]
max_batch = 8
[tenants.acme]
granules = 1
lend = "2ms"
http_processes = "auto"
front_cores = "0-1"
ladder = [1, 2]
models = ["*"]
bytes_per_second = "1MB"
"""
KEY = "ab" * 32
WEIGHTS = "weights = { 1 = 9, 2 = 0.5 }"
OPTIONS = """
preferred_batches = [4, 8]
profiles = [{ "x" = { "min" = [1, 3], "opt" = [8, 3], "max" = [32, 3] } }]
warm_up = [1, 8]
text = { pooling = "cls" }
loop = { feed = { next = "token" }, steps = 64, until = "done", outputs = ["next"] }
"""
LEND = 'lend = "2ms"'
GLOBEX = "[tenants.globex]\ngranules = 1\nmodels = ['*']"


def changes(tmp_path: Path, old: str, new: str) -> list[Change]:
    found = []
    for text in (old, new):
        (tmp_path / "greenlane.toml").write_text(text)
        found.append(load(tmp_path / "greenlane.toml"))
    return compare(*found)


def weighted(model: str) -> Change:
    return Change(f"models.{model}.weights", "(not set)", "{ 1 = 9.0, 2 = 0.5 }", True)


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ("", "", None),
        ('"1MB"', '"2MB"', Change("tenants.acme.bytes_per_second", "1000000", "2000000", True)),
        (LEND, f'{LEND}\nkeys_sha256 = ["{KEY}"]', Change("tenants.acme.keys_sha256", "none", "abababab...", True)),
        ('default_tenant = "acme"', "", None),
        ('models = ["*"]', 'models = ["a"]', Change("tenants.acme.models", '["*"]', '["a"]', True)),
        ("granules = 1", "granules = 2", Change("tenants.acme.granules", "1", "2", True)),
        ('models = ["*"]', 'models = ["*"]\nqueue = 7', Change("tenants.acme.queue", "64", "7", False)),
        ("max_batch = 8", "max_batch = 4", Change("models.resnet.max_batch", "8", "4", True)),
        ("[models]", "[models]\nbuild_timeout = '1s'", Change("models.build_timeout", '"15min"', '"1s"', False)),
        ("[tenants.acme]", f"{WEIGHTS}\n[tenants.acme]", weighted("resnet")),
        ("[server]", f"[models.a]\n{WEIGHTS}\n[server]", weighted("a")),
        ("[server]", "[device]\nindex = 1\n[server]", Change("device.index", "0", "1", False)),
        ("[models]", f"{GLOBEX}\n[models]", Change("tenants.globex", "(not set)", "a table", True)),
    ],
)  # fmt: skip
def test_a_change_has_its_key_and_both_values(tmp_path: Path, old: str, new: str, change: Change | None) -> None:
    assert changes(tmp_path, FILE, FILE.replace(old, new) if old else FILE) == ([change] if change else [])


def test_values_are_written_as_a_file_has_them(tmp_path: Path) -> None:
    added = OPTIONS.replace("feed = {", 'feed = { "x y" = "\\"b\\"",')
    new = FILE.replace("max_batch = 8", "max_batch = 8\n" + added).replace('"0-1"', '"0,2-3"')
    found = {change.key: (change.old, change.new) for change in changes(tmp_path, FILE, new)}
    assert found.pop("tenants.acme.front_cores") == ('"0-1"', '"0,2-3"')
    assert found == {
        f"models.resnet.{key}": ("(not set)", text)
        for key, text in {
            "preferred_batches": "[4, 8]",
            "profiles": "[{ x = { min = [1, 3], opt = [8, 3], max = [32, 3] } }]",
            "warm_up": "[1, 8]",
            "text": '{ pooling = "cls" }',
            "loop": '{ feed = { "x y" = "\\"b\\"", next = "token" }, steps = 64, until = "done", outputs = ["next"] }',
        }.items()
    }
    pasted = [line.replace(".resnet", "") for line in (f"{key} = {text}" for key, (_, text) in found.items())]
    parsed = tomllib.loads("\n".join(pasted))["models"]
    assert parsed == tomllib.loads(added)


def test_long_values_are_cut_off(tmp_path: Path) -> None:
    names = ", ".join(f'"{letter * 30}"' for letter in "abc")
    (change,) = changes(tmp_path, FILE, FILE.replace('models = ["*"]', f"models = [{names}]"))
    assert change.new == f"[{names}]"[:60] + "..."


def test_a_tenant_with_the_port_of_one_that_goes_cannot_come_at_once(tmp_path: Path) -> None:
    """As one that is renamed: the port is that of the old one until its requests have ended."""
    old, new = (FILE + GLOBEX.replace("globex", name) + "\nport = 9001" for name in ("globex", "initech"))
    gone, came = changes(tmp_path, old, new)
    assert (gone.live, came.key, came.live) == (True, "tenants.initech", False)
    assert came.why == "its port is that of tenant globex until that has gone, which a reload before can have it do"
    assert all(change.live for change in changes(tmp_path, old, new.replace("9001", "9002")))


def test_weights_alone_need_no_loading(tmp_path: Path) -> None:
    configs = []
    for text in (FILE, FILE.replace("max_batch = 8", f"max_batch = 8\n{WEIGHTS}"), FILE.replace("max_batch = 8", OPTIONS)):
        (tmp_path / "greenlane.toml").write_text(text)
        configs.append(load(tmp_path / "greenlane.toml"))
    first, weighted, other = configs
    assert loaded_again(first, weighted) == {}
    assert loaded_again(weighted, other) == {"resnet": other.models.options["resnet"]}
    (tmp_path / "greenlane.toml").write_text(FILE.replace("[models.resnet]\nmax_batch = 8\n", ""))
    assert loaded_again(first, load(tmp_path / "greenlane.toml")) == {"resnet": ModelOptions()}


def test_what_may_change_are_keys_of_the_file() -> None:
    assert set(LIVE_OF_SERVER) <= set(keys(ServerConfig))
    assert set(LIVE_OF_TENANT) <= set(keys(TenantConfig))


def test_a_process_that_is_sent_a_configuration_has_the_same(tmp_path: Path) -> None:
    (tmp_path / "greenlane.toml").write_text(FILE)
    before = load(tmp_path / "greenlane.toml")
    (tmp_path / "greenlane.toml").write_text(
        FILE.replace("max_batch = 8", "max_batch = 8\nweights = { 1 = 0.9, 2 = 0.1 }\n" + OPTIONS).replace(
            '"1MB"', f'"2MB"\nkeys_sha256 = ["{KEY}"]\nweights = {{ resnet = {{ 2 = 1 }} }}'
        )
    )
    after = load(tmp_path / "greenlane.toml")
    after = after.model_copy(
        update={
            "tenants": {
                **after.tenants,
                "globex": after.tenants["acme"].model_copy(update={"name": "globex", "device": ("0", "1")}),
            }
        }
    )
    data = msgspec.msgpack.encode(Live.of(after), enc_hook=encode_hook)
    sent = msgspec.msgpack.decode(data, type=Live, dec_hook=decode_hook)
    assert sent.config(before) == after != before
    text = sent.config(before).models.options["resnet"].text
    assert text is not None
    assert text.pooling == "cls"
    assert after.version_weights("acme") == {"resnet": {"2": 1.0}}


def test_comparing_takes_as_many_steps_for_each_of_many_tenants_as_for_each_of_few(tmp_path: Path) -> None:
    def steps(count: int) -> int:
        path = tmp_path / "greenlane.toml"
        tables = (f"[tenants.t{number}]\ngranules = 1\nport = {10_000 + number}\nmodels = ['m']\n" for number in range(count))
        path.write_text("[models]\nrepository = '.'\n[tenants.acme]\ngranules = 1\nmodels = ['*']\n" + "".join(tables))
        many = load(path)
        path.write_text("[models]\nrepository = '.'\n[tenants.acme]\ngranules = 1\nmodels = ['*']\n")
        few, found = load(path), 0

        def count_line(_frame: Any, _event: str, _argument: Any) -> Any:
            nonlocal found
            found += 1
            return count_line

        before = sys.gettrace()
        sys.settrace(count_line)
        try:
            compare(few, many)
            compare(many, few)
        finally:
            sys.settrace(before)
        return found

    steps(1)
    assert steps(200) < 12 * steps(20)
