"""The dashboard and the alert rules against a live /metrics: every metric and label that a query names is there."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from partitions.health import Health
from server.config.tenant import TenantConfig
from tests.end_to_end.conftest import standard as standard
from tests.end_to_end.harness import configuration, serving
from tests.end_to_end.virtual import VirtualDevice
from tests.end_to_end.wire import SMALL, infer, until

from .tools import GRAFANA, wheel

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yml"
DASHBOARD = json.loads((ROOT / "deploy/grafana/greenlane.json").read_text())
GPU = Health(
    "GPU-1", 0.5, 0.5, 100, 50, 300.0, 700.0, 10.0, 50, {"sm": 1e9}, {"hw_slowdown": False}, {"uncorrected": 0}, {"79": 1}
)
OF_PROMETHEUS = {"up": {"job"}}
"""What Prometheus adds by itself; it adds `instance` and `job` to everything."""
KEYWORDS = {"by", "on", "ignoring", "group_left", "group_right", "without", "and", "or", "unless", "bool", "offset", "vector"}

needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool") and "CI" not in os.environ, reason="needs promtool, of Debian's package prometheus"
)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[tuple[str, str]]:
    """Every query of the dashboard, by the title of its panel."""
    drawn = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    asked = [
        (each["name"], re.sub(r"label_values\((\w+), (\w+)\)", r"sum by (\2) (\1)", each["query"]["query"]))
        for each in DASHBOARD["templating"]["list"]
        if each["type"] == "query"
    ]
    return drawn + asked + [(each["name"], each["expr"]) for each in DASHBOARD["annotations"]["list"]]


QUERIES = [(rule["alert"], rule["expr"]) for rule in rules()] + panels()


@pytest.fixture(scope="module")
def live(standard: Path) -> Iterator[dict[str, set[str]]]:
    """The labels of each metric of a server with all that has metrics: lending, targets, budgets, and a GPU's readings."""
    acme = TenantConfig(name="acme", granules=2, burst=4, target_p99=0.1, models=("identity",))
    globex = TenantConfig(name="globex", granules=2, lend=1.0, device_memory=2**30, models=("identity",))
    with (
        serving(configuration(standard, acme, globex), VirtualDevice(8)) as served,
        httpx.Client(timeout=60, base_url=served.url) as http,
    ):
        assert infer(http, "identity", SMALL).status_code == 200
        served.application.observers().health.take("", "0", GPU)
        served.controller.restarts["the dispatcher"] = 0  # There are processes under a supervisor only.
        served.controller.devices[0].info = _on_cores(served.controller.devices[0].info)
        until(lambda: "greenlane_partition_utilization_ratio" in http.get("/metrics").text)
        yield _labels(http.get("/metrics").text)


def _on_cores(info: Any) -> Any:
    """The virtual device with a core's address for each granule."""
    return type(info)(info.kind, info.description, info.unit, info.granules, ",".join(["0"] * len(info.granules)))


def _labels(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removesuffix("_total") if sample.name.startswith("nv_") else sample.name
            found.setdefault(name, {"instance", "job"}).update(sample.labels)
    return found


def named(query: str) -> tuple[dict[str, set[str]], set[str]]:
    """The metrics in a query with the labels that select from them, and the labels that it groups by."""
    query = re.sub(r"\[[^\]]*\]", "", query)
    grouped = {
        each for inside in re.findall(r"\b(?:by|on|ignoring)\s*\(([^)]*)\)", query) for each in re.findall(r"\w+", inside)
    }
    query = re.sub(r"\b(?:by|on|ignoring|group_left)\s*\([^)]*\)", "", query)
    metrics: dict[str, set[str]] = {}
    for name, selector in re.findall(r"\b([a-zA-Z_]\w*)\b(?!\s*\()(?:\{([^}]*)\})?", _without_labels(query)):
        if name not in KEYWORDS and not re.fullmatch(r"e\d+|m", name):
            metrics.setdefault(name, set()).update(re.findall(r"@(\w+)", selector))
    return metrics, grouped


def _without_labels(query: str) -> str:
    """The query with `{a="b", c=~"d"}` written as `{@a @c}`, as label names are no metrics."""

    def shorten(found: "re.Match[str]") -> str:
        return "{" + " ".join(f"@{name}" for name in re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", found[1])) + "}"

    return re.sub(r"\{([^}]*)\}", shorten, query)


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{title}: {query[:40]}" for title, query in QUERIES])
def test_a_query_names_metrics_and_labels_that_are_there(title: str, query: str, live: dict[str, set[str]]) -> None:
    there = {**live, **OF_PROMETHEUS}
    metrics, grouped = named(query)
    assert metrics
    assert set(metrics) <= set(there), "no such metric"
    for name, labels in metrics.items():
        assert labels <= there[name], name
    assert grouped <= set().union(*(there[name] for name in metrics))


def test_the_names_in_a_query_are_found() -> None:
    query = 'sum by (tenant, le) (rate(a_bucket{tenant=~"$t", x="{}"}[5m])) / on (tenant) group_left () b > 1e6 or vector(0)'
    assert named(query) == ({"a_bucket": {"tenant", "x"}, "b": set()}, {"tenant", "le"})


def test_every_alert_is_explained_and_every_explanation_has_an_alert() -> None:
    section = (ROOT / "docs/operations/monitor.md").read_text().split("\n## Alerts\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [rule["alert"] for rule in rules()]


def test_every_alert_links_to_what_it_means() -> None:
    page = "https://github.com/greenlane-server/greenlane/blob/main/docs/operations/monitor.md#alerts"
    assert {rule["annotations"].get("runbook_url") for rule in rules()} == {page}


def test_labels_in_the_text_of_an_alert_are_labels_of_its_query(live: dict[str, set[str]]) -> None:
    for rule in rules():
        metrics, grouped = named(rule["expr"])
        there = grouped if "sum by" in rule["expr"] else set().union(*({**live, "up": {"instance"}}[name] for name in metrics))
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= there, rule["alert"]


@needs_promtool
def test_promtool_has_nothing_to_say(tmp_path: Path) -> None:
    """Of the configuration and the rules, and of the dashboard's queries as if they were rules."""
    queries = [re.sub(r"\$__rate_interval", "1m", query) for _, query in panels()]
    asked = {"groups": [{"name": "g", "rules": [{"record": f"r{at}", "expr": query} for at, query in enumerate(queries)]}]}
    (tmp_path / "dashboard.yml").write_text(yaml.safe_dump(asked))
    for command in (("config", RULES.parent / "prometheus.yml"), ("rules", RULES), ("rules", tmp_path / "dashboard.yml")):
        done = subprocess.run(["promtool", "check", *map(str, command)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_when_they_should() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", str(Path(__file__).parent / "alerts_test.yml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


READ_BACK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from grafana_foundation_sdk.cog import encoder, plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
plugins.register_default_plugins()
print(encoder.JSONEncoder().encode(Dashboard.from_json(json.load(sys.stdin))))
"""
NOT_IN_ITS_TYPES = {"titleFormat", "definition"}
"""Keys that Grafana writes itself when a dashboard is exported: of an annotation's title, and of a variable in its list."""


def lost(written: Any, read: Any, path: str = "") -> list[str]:
    """The keys and values of `written` that are not in `read`."""
    if isinstance(written, dict) and isinstance(read, dict):
        parts = [lost(value, read.get(key, ...), f"{path}.{key}") for key, value in written.items()]
        return [each for part in parts for each in part if each.rpartition(".")[2] not in NOT_IN_ITS_TYPES]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        return [each for at, pair in enumerate(zip(written, read, strict=True)) for each in lost(*pair, f"{path}[{at}]")]
    return [] if written == read else [path]


def test_grafanas_own_types_have_all_that_the_dashboard_says() -> None:
    """They drop keys that Grafana does not know. In a process of its own, as their package is read out of its wheel."""
    command = [sys.executable, "-c", READ_BACK, str(wheel(GRAFANA))]
    read = subprocess.run(command, input=json.dumps(DASHBOARD), capture_output=True, text=True, check=True).stdout
    assert lost(DASHBOARD, json.loads(read)) == []
    assert lost({"title": "t", "colour": 1}, {"title": "t"}) == [".colour"]


def test_compose_restarts_what_is_in_the_network_of_a_container_together_with_that() -> None:
    """A new container has a new network, and what was in the old one reaches nothing any more."""
    services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    inside = {name: service["network_mode"] for name, service in services.items() if "network_mode" in service}
    assert inside == {"prometheus": "service:greenlane"}
    assert services["prometheus"]["depends_on"]["greenlane"]["restart"] is True


def test_compose_names_files_that_exist() -> None:
    services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    assert (
        ROOT / "deploy" / services["greenlane"]["build"]["context"] / services["greenlane"]["build"]["dockerfile"]
    ).is_file()
    mounted = [volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())]
    assert all((ROOT / "deploy" / path).exists() for path in mounted if path.startswith("."))
    uids = re.findall(r"uid: (\w+)", (ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert uids == ["prometheus"]
