"""How many HTTP processes each tenant has: arithmetic, to be read as examples."""

from pathlib import Path
from typing import Any

import pytest

from server.config.schema import Config, ModelsConfig
from server.config.tables import ConfigError
from server.config.tenant import TenantConfig
from server.processes.supervision.affinity import count


def config(**tenants: dict[str, Any]) -> Config:
    made = {name: TenantConfig(name=name, models=("*",), **fields) for name, fields in tenants.items()}
    return Config(models=ModelsConfig(repository=Path()), tenants=made, source="greenlane.toml")


@pytest.mark.parametrize(
    ("cores", "granules", "expected"),
    [
        (16, (16,), (4,)),
        (32, (16,), (4,)),
        (16, (12, 4), (3, 1)),
        (16, (2, 2, 2, 2), (1, 1, 1, 1)),
        (2, (16,), (1,)),
    ],
)
def test_auto_is_the_tenants_share_of_the_pairs_of_cores_for_http(
    cores: int, granules: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    tenants = {f"t{at}": {"granules": share, "http_processes": "auto"} for at, share in enumerate(granules)}
    assert tuple(count(config(**tenants), (), cores).values()) == expected


def test_a_number_is_taken_as_it_is_and_one_is_the_default() -> None:
    assert count(config(a={"sms": 8, "http_processes": 5}, b={"sms": 8}), (), 2) == {"a": 5, "b": 1}


def test_on_cores_of_the_host_several_are_refused_and_auto_is_one() -> None:
    assert count(config(a={"cores": 1, "http_processes": "auto"}, b={"cores": 1}), ["0"], 64) == {"a": 1, "b": 1}
    with pytest.raises(ConfigError) as raised:
        count(config(a={"cores": 1, "http_processes": 2}), ["0"], 64)
    assert list(raised.value.problems) == [
        "greenlane.toml: tenants.a.http_processes: 2, but on a CPU a tenant's models are in its one process, beside its HTTP; "
        "leave it out, or give the tenant more cores"
    ]
