"""The example configuration and those in the documentation agree with the program."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from server.config.file import keys, load
from server.config.schema import DeviceConfig, ModelOptions, ModelsConfig
from server.config.server import ServerConfig
from server.config.tables import ConfigError
from server.config.tenant import TenantConfig
from server.repository.model_settings import default_settings, from_options, resolve_settings

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "deploy" / "greenlane.toml").read_text()
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()
EVERYTHING = re.sub(r"^# (?=\w+ = )", "", EXAMPLE, flags=re.MULTILINE)
"""The example with every key set."""


def write(folder: Path, text: str) -> Path:
    (folder / "models").mkdir()
    (folder / "greenlane.toml").write_text(text)
    return folder / "greenlane.toml"


@pytest.mark.parametrize("text", [EXAMPLE, EVERYTHING], ids=["as it is", "with every key"])
def test_the_example_can_be_served(tmp_path: Path, text: str) -> None:
    config = load(write(tmp_path, text))
    assert list(config.tenants) == ["acme", "globex", "initech"]


def test_the_example_has_every_key() -> None:
    document = tomllib.loads(EVERYTHING)
    assert set(document["server"]) == set(keys(ServerConfig))
    assert set(document["device"]) == set(keys(DeviceConfig))
    assert set(document["models"]["resnet50"]) == set(keys(ModelOptions))
    assert set(document["models"]) - {"resnet50"} == set(keys(ModelsConfig))
    assert set().union(*document["tenants"].values()) == set(keys(TenantConfig))


def test_commented_out_keys_show_their_defaults(tmp_path: Path) -> None:
    config = load(write(tmp_path, EVERYTHING))
    _is_default(config.server, ServerConfig(), "default_tenant", "admin_key_sha256", "usage_dir", "audit", "tracing_endpoint")
    _is_default(config.device, DeviceConfig(), "cores")
    options = config.models.options["resnet50"]
    held = resolve_settings(from_options(options, ()), default_settings(config.device), lambda _: {})
    _is_default(held.settings, default_settings(config.device), "profile", "build_profiles", "weight_streaming_budget", "loop")
    plain = TenantConfig(name="acme", granules=6, models=("resnet50",))
    without_default = (
        "device burst ladder min_granules memory_bandwidth pcie device_memory port grpc_port front_cores max_execution "
        "target_p99 target_rate requests_per_second burst_requests bytes_per_second burst_bytes max_connections "
        "max_large_bodies weights"
    )
    _is_default(config.tenants["acme"], plain, *without_default.split())


def _is_default(shown: Any, default: Any, *without: str) -> None:
    names = set(type(default).__annotations__) - set(without)
    assert {name: getattr(shown, name) for name in names} == {name: getattr(default, name) for name in names}


@pytest.mark.parametrize(("page", "place", "cores"), [(README, 0, 2), (QUICKSTART, 0, 2), (QUICKSTART, 1, 8)])
def test_documented_configurations_fit_the_machines_they_name(tmp_path: Path, page: str, place: int, cores: int) -> None:
    text = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[place]
    load(write(tmp_path, text)).fit("core", (1,) * cores)
    with pytest.raises(ConfigError, match=f"= {cores} cores, but the device has {cores - 1}"):
        load(tmp_path / "greenlane.toml").fit("core", (1,) * (cores - 1))


def test_the_documented_configuration_of_teams_is_all_of_an_h100(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "gpu.md").read_text(), re.DOTALL)
    load(write(tmp_path, text)).fit("SM", (8,) * 14 + (20,))
    with pytest.raises(ConfigError, match="= 15 granules of 8 SMs, but the device has 14"):
        load(tmp_path / "greenlane.toml").fit("SM", (8,) * 14)


@pytest.mark.parametrize("page", [README, QUICKSTART])
def test_documented_commands_need_no_activated_environment(page: str) -> None:
    assert not re.findall(r"(?:^|`)(?:python|pip|uvicorn|pytest) \S+", page, re.MULTILINE)
