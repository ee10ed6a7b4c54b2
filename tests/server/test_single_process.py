"""What a plain uvicorn keeps of a configuration; how a real one starts is in tests/end_to_end/test_shutdown.py."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.config.schema import Config, DeviceConfig, ModelsConfig
from server.config.server import ServerConfig
from server.config.tables import ConfigError
from server.config.tenant import TenantConfig
from server.single_process import prepare

ACME = TenantConfig(name="acme", granules=1, models=("*",))
GLOBEX = TenantConfig(name="globex", granules=1, models=("*",))
SHARED = (
    "  tenants: the HTTP of all of them shares one process and one event loop here, so that large or many requests of one "
    "delay the others'; `greenlane` gives each an HTTP process of its own"
)


@pytest.fixture(autouse=True)
def _interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def configured(*tenants: TenantConfig, server: ServerConfig | None = None) -> Config:
    models = ModelsConfig(repository=Path())
    by_name = {tenant.name: tenant for tenant in tenants}
    return Config(server=server or ServerConfig(), models=models, tenants=by_name, source="c.toml")


def test_no_warning_if_all_settings_are_honoured(caplog: pytest.LogCaptureFixture) -> None:
    prepare(configured(ACME))
    assert caplog.records == []
    assert sys.getswitchinterval() == 0.001


def test_functions_of_models_are_refused_where_tenants_share_the_process() -> None:
    alone, both = configured(ACME), configured(ACME, GLOBEX)
    python = {"models": alone.models.model_copy(update={"python": True})}
    prepare(alone.model_copy(update=python))
    with pytest.raises(ConfigError, match=r"models\.python: true, but functions of models run in the process of their tenant"):
        prepare(both.model_copy(update=python))


def test_ignored_settings_are_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    globex = TenantConfig(name="globex", granules=1, models=("*",), front_cores=(0, 1), http_processes=2)
    prepare(configured(ACME, globex, server=ServerConfig(host="0.0.0.0", port=80, front_cores="any")))
    (record,) = caplog.records
    assert (record.levelname, record.getMessage().splitlines()) == (
        "WARNING",
        [
            "not all of c.toml is honoured by uvicorn server.app:app:",
            SHARED,
            "  server.front_cores, tenants.globex.front_cores: there are no HTTP processes to put on cores",
            "  tenants.globex.http_processes: here all HTTP is in one process; `greenlane` starts several on a GPU",
            "  server.host and server.port, 0.0.0.0:80: uvicorn listens where its --host and --port say",
        ],
    )


def test_several_devices_are_refused() -> None:
    """One process has one device; a lost GPU would take the others' tenants with it."""
    config = configured(ACME).with_devices({"0": DeviceConfig(backend="cuda"), "b": DeviceConfig(backend="cuda", index=1)})
    with pytest.raises(ConfigError) as raised:
        prepare(config)
    assert raised.value.problems == (
        "c.toml: devices.0, devices.b: 2 devices, but uvicorn server.app:app is one process, which has one device; "
        "serve them with `greenlane`",
    )


def test_a_device_process_for_each_tenant_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r'^c.toml: device.mps: "on", but uvicorn server.app:app is one process for all tenants'
    ):
        prepare(configured(ACME).with_devices({"0": DeviceConfig(backend="cuda", mps="on")}))


def test_it_stays_outside_an_operator_s_mps_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    prepare(configured(ACME))
    assert os.environ.get("CUDA_MPS_PIPE_DIRECTORY") != str(tmp_path)


def test_ports_of_tenants_are_all_refused(caplog: pytest.LogCaptureFixture) -> None:
    """A port keeps other tenants away, so a tenant that has one may not be served without it."""
    before = sys.getswitchinterval()
    tenants = [TenantConfig(name=name, granules=1, models=("*",), port=port) for name, port in (("acme", 81), ("globex", 82))]
    with pytest.raises(ConfigError) as refusal:
        prepare(configured(*tenants))
    why = "uvicorn server.app:app listens on uvicorn's own socket alone, so the tenant has none of its own"
    assert refusal.value.problems == (
        f"c.toml: tenants.acme.port: 81, but {why}; serve it with `greenlane`, or leave it out",
        f"c.toml: tenants.globex.port: 82, but {why}; serve it with `greenlane`, or leave it out",
    )
    assert caplog.records == []
    assert sys.getswitchinterval() == before
