"""Shares of memory bandwidth and PCIe: how they are written, and that they fit the device."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from partitions.base import Bandwidth
from server.config.bandwidth import rate, too_much
from server.config.changes import compare
from server.config.file import load
from server.config.schema import Config
from server.config.tables import ConfigError
from server.config.tenant import TenantConfig
from server.control.fence import plan_fences

HOMES = {"acme": (0, 1), "globex": (2, 3)}
MOVES = Bandwidth(memory=3_352 * 10**9, unit=126 * 10**9, pcie=63 * 10**9)
FILE = """
[models]
repository = "models"
[tenants.acme]
sms = 64
models = ["*"]
{}
[tenants.globex]
sms = 64
models = ["*"]
{}
"""


def loaded(folder: Path, acme: str = "", globex: str = "") -> Config:
    (folder / "models").mkdir(exist_ok=True)
    (file := folder / "c.toml").write_text(FILE.format(acme, globex))
    return load(file)


def tenants(**given: dict[str, Any]) -> dict[str, TenantConfig]:
    return {name: TenantConfig(name=name, granules=2, models=("*",), **keys) for name, keys in given.items()}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('"auto"', "auto"),
        ("0.4", 0.4),
        ("1", 1.0),
        ('"1.2TB/s"', 1_200 * 10**9),
        ('"900GB/s"', 900 * 10**9),
        ('"1MB/s"', 10**6),
    ],
)
@pytest.mark.parametrize("key", ["memory_bandwidth", "pcie"])
def test_a_share_is_a_part_or_a_rate(tmp_path: Path, key: str, written: str, value: object) -> None:
    given = getattr(loaded(tmp_path, f"{key} = {written}").tenants["acme"], key)
    assert (given, type(given)) == (value, type(value))


@pytest.mark.parametrize("written", ["0", "1.5", "2", "-0.1", "true", '"1.2TB"', '"0.5MB/s"', '"fast"', '"1.2 TB/s"', "nan"])
def test_what_is_no_share_is_refused_with_what_was_expected(tmp_path: Path, written: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, f"memory_bandwidth = {written}")
    (problem,) = refused.value.problems
    assert "tenants.acme.memory_bandwidth: " in problem
    assert "is not 'auto' (the tenant's part of the SMs or cores), a part of the device's above 0 and up to 1, or a" in problem
    assert "a text without spaces such as '1.2TB/s'" in problem


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"acme": {"memory_bandwidth": 0.6}, "globex": {"memory_bandwidth": "auto"}},
            "tenants.acme.memory_bandwidth 0.6 + tenants.globex.memory_bandwidth auto (0.5) = 1.1 of the device's memory "
            "bandwidth, which is 3.352 TB/s: lower them by 0.1",
        ),
        (
            {"acme": {"memory_bandwidth": 4 * 10**12}, "globex": {}},
            "tenants.acme.memory_bandwidth 4TB/s (1.19) = 1.19 of the device's memory bandwidth, which is 3.352 TB/s: "
            "lower it by 0.2",
        ),
        (
            {"acme": {"pcie": 60 * 10**9}, "globex": {"pcie": 0.2}},
            "tenants.acme.pcie 60GB/s (0.952) + tenants.globex.pcie 0.2 = 1.15 of the device's PCIe, which is 63 GB/s: "
            "lower them by 0.16",
        ),
    ],
)  # fmt: skip
def test_shares_of_more_than_there_is_are_refused_with_the_numbers(given: dict[str, Any], problem: str) -> None:
    assert too_much(tenants(**given), HOMES, [8] * 4, MOVES) == [problem]
    config = Config.model_construct(tenants=MappingProxyType(tenants(**given)), source="c.toml")
    assert config.too_much(HOMES, [8] * 4, MOVES) == [f"c.toml: {problem}"]


@pytest.mark.parametrize(
    ("acme", "said", "lower"),
    [(0.6249, "= 1.12 of", 0.13), (0.5004, "= 1.0004 of", 0.0004), (0.50000012, "= 1.0000001 of", 1.2e-7)],
)
def test_shares_that_are_lowered_by_what_is_said_fit(acme: float, said: str, lower: float) -> None:
    (problem,) = too_much(tenants(acme={"pcie": acme}, globex={"pcie": 0.5}), HOMES, [8] * 4, None)
    assert said in problem
    assert problem.endswith(f": lower them by {lower:g}")
    assert not too_much(tenants(acme={"pcie": acme - lower}, globex={"pcie": 0.5}), HOMES, [8] * 4, None)


@pytest.mark.parametrize(
    "given",
    [
        {"acme": {"memory_bandwidth": "auto"}, "globex": {"memory_bandwidth": "auto"}},
        {"acme": {"memory_bandwidth": 0.7}, "globex": {"memory_bandwidth": 0.3}},
        {"acme": {"memory_bandwidth": 0.9}, "globex": {"pcie": 0.9}},
        {"acme": {}, "globex": {}},
    ],
)
def test_shares_of_all_there_is_are_served(given: dict[str, Any]) -> None:
    assert not too_much(tenants(**given), HOMES, [8] * 4, MOVES)


@pytest.mark.parametrize(("home", "least"), [((0, 1), 16 / 44), ((2, 3), 28 / 44)])
def test_the_part_of_a_larger_granule_is_larger_and_counts_as_what_the_tenant_is_held_to(
    home: tuple[int, ...], least: float
) -> None:
    """As the last granule of an H100, which has 20 SMs."""
    sizes, given = [8, 8, 8, 20], {"memory_bandwidth": "auto"}
    fence = plan_fences(tenants(acme=given, globex={}), {"acme": home, "globex": ()}, sizes, "SM", MOVES)["acme"]
    assert fence.memory == int(least * MOVES.memory)
    homes = {"acme": home, "globex": HOMES["acme" if home == (2, 3) else "globex"]}
    for rest, problems in ((1 - least, 0), (1 - least + 0.001, 1)):
        both = tenants(acme=given, globex={"memory_bandwidth": rest})
        assert len(too_much(both, homes, sizes, MOVES)) == problems


def test_where_the_whole_is_not_known_rates_do_not_count() -> None:
    given = tenants(acme={"memory_bandwidth": 4 * 10**12}, globex={"memory_bandwidth": 0.7})
    assert not too_much(given, HOMES, [8] * 4, None)
    (problem,) = too_much({**given, **tenants(acme={"memory_bandwidth": 0.5})}, HOMES, [8] * 4, None)
    assert problem.endswith("= 1.2 of the device's memory bandwidth: lower them by 0.2")


@pytest.mark.parametrize(
    ("value", "expected"), [(None, 0), ("auto", 25 * 10**7), (0.4, 4 * 10**8), (10**6, 10**6), (1e-12, 10**6)]
)
def test_a_share_comes_to_a_rate(value: Any, expected: int) -> None:
    (tenant,) = tenants(acme={"memory_bandwidth": value}).values()
    assert rate(tenant, "memory_bandwidth", 0.25, 10**9) == expected
    assert rate(tenant, "memory_bandwidth", 0.25, 0) == 0, "of what is not known there is none"


def test_shares_change_while_serving(tmp_path: Path) -> None:
    none, one, other = (loaded(tmp_path, each) for each in ("", "pcie = 0.4", 'pcie = "10GB/s"'))
    (change,) = compare(none, one)
    assert (change.key, change.old, change.new, change.live) == ("tenants.acme.pcie", "(not set)", "0.4", True)
    (change,) = compare(one, other)
    assert (change.old, change.new, change.live, change.why) == ("0.4", '"10GB/s"', True, "")
    (change,) = compare(one, loaded(tmp_path, "pcie = 0.4", 'memory_bandwidth = "auto"'))
    assert (change.key, change.live) == ("tenants.globex.memory_bandwidth", True)


def test_tenants_come_where_one_is_fenced(tmp_path: Path) -> None:
    fenced = loaded(tmp_path, "pcie = 0.4")
    more = loaded(tmp_path, "pcie = 0.4", '[tenants.initech]\nsms = 8\nmodels = ["*"]\npcie = 0.1')
    (change,) = compare(fenced, more)
    assert (change.key, change.live) == ("tenants.initech", True)
