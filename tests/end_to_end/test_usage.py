"""The account of a real server: what was granted and used adds up, and is what the kernel saw of the workers' threads."""

import csv
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .harness import cores
from .processes import Running, client, configure, running
from .wire import SMALL, infer, spin, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants on cores need two cores")

TENANTS = """
[tenants.acme]
cores = 1
models = ["identity", "spin"]
[tenants.globex]
cores = 1
models = ["identity", "spin"]
"""
LONG = spin(4000)
"""About 20 ms."""
WORKS, LONGER = 12, spin(15_000)
"""So long that what the worker's thread does besides is far less than 2 %, also on a busy machine."""


@pytest.fixture
def server(standard: Path, tmp_path: Path) -> Iterator[Running]:
    folder = str(tmp_path / "usage")
    with running(configure(tmp_path / "greenlane.toml", standard, TENANTS, usage_dir=f'"{folder}"')) as server:
        yield server


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with client(server, **{"X-Tenant": "acme"}) as http:
        yield http


def usage(http: httpx.Client, since: str = "") -> dict[str, Any]:
    answer = http.get("/admin/usage", params={"since": since} if since else {})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def tenant(found: dict[str, Any], name: str) -> dict[str, Any]:
    each: dict[str, Any] = next(each for each in found["tenants"] if each["tenant"] == name)
    return each


def model(found: dict[str, Any], name: str, which: str) -> dict[str, Any]:
    return next(each for each in tenant(found, name)["models"] if each["name"] == which)


def on_core(server: Running, name: str) -> dict[str, int]:
    """Nanoseconds that each thread of a tenant's process was on a core, by the kernel."""
    tasks = Path(f"/proc/{server.pid(name)}/task")
    return {task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()}


def test_it_adds_up_and_is_what_the_kernel_saw(server: Running, http: httpx.Client) -> None:
    infer(http, "spin", LONGER)
    before, ran = usage(http), on_core(server, "acme")
    for _ in range(WORKS):
        assert infer(http, "spin", LONGER).status_code == 200
    after, now = usage(http), on_core(server, "acme")
    seen = max(now[thread] - ran.get(thread, 0) for thread in now)  # The worker's: no other thread does as much.
    assert [each["name"] for each in tenant(before, "globex")["models"]] == ["identity", "spin"]
    used = model(after, "acme", "spin")["used"] - model(before, "acme", "spin")["used"]
    assert used == pytest.approx(seen / 1e9, rel=0.02)
    (device,) = after["devices"]
    assert device["total"] == pytest.approx(device["units"] * after["seconds"], rel=0.01)
    assert device["granted"] + device["free"] == pytest.approx(device["total"], rel=1e-9)
    assert device["granted"] == pytest.approx(device["used"] + device["idle"] + device["lent"], rel=1e-9)
    acme, globex = tenant(after, "acme"), tenant(after, "globex")
    assert acme["used"] == pytest.approx(sum(each["used"] for each in acme["models"]), rel=1e-9)
    assert (globex["used"], globex["share"]) == (0, 1)
    until(lambda: tenant(usage(http), "acme")["age_seconds"] < 1)  # The next report may be late on a busy machine.
    assert model(after, "acme", "spin")["works"] == model(before, "acme", "spin")["works"] + WORKS


def test_a_killed_process_takes_nothing_back(server: Running, http: httpx.Client) -> None:
    for _ in range(10):
        infer(http, "spin", LONG)
    before = usage(http)
    server.kill("acme")
    until(lambda: infer_again(http))
    after = usage(http)
    assert model(after, "acme", "spin")["works"] == 11
    assert tenant(after, "acme")["used"] > tenant(before, "acme")["used"]
    assert tenant(after, "acme")["granted"] > tenant(before, "acme")["granted"]


def infer_again(http: httpx.Client) -> bool:
    try:
        return infer(http, "spin", LONG).status_code == 200
    except httpx.TransportError:
        return False


def test_metrics_and_files_say_the_same(server: Running, http: httpx.Client, tmp_path: Path) -> None:
    for _ in range(5):
        infer(http, "spin", LONG)
    found = model(usage(http), "acme", "spin")
    text = http.get("/metrics").text
    scraped = {
        (sample.name, sample.labels.get("tenant"), sample.labels.get("model")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert scraped["greenlane_used_unit_seconds_total", "acme", "spin"] == pytest.approx(found["used"])
    assert scraped["greenlane_works_total", "acme", "spin"] == 5
    assert scraped["greenlane_idle_unit_seconds_total", "globex", None] > 0
    assert "# TYPE greenlane_granted_unit_seconds_total counter" in text
    server.signal()
    assert server.wait() == 0
    (path,) = (tmp_path / "usage").iterdir()
    assert re.fullmatch(r"usage-\d{4}-\d\d-\d\d\.csv", path.name)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert sum(float(row["used"] or 0) for row in rows) == pytest.approx(found["used"])
    assert sum(int(row["works"] or 0) for row in rows) == 5
    granted, idle = (sum(float(row[column] or 0) for row in rows if row["tenant"]) for column in ("granted", "idle"))
    assert granted == pytest.approx(idle + found["used"], rel=1e-9)
    spans = {(row["from"], row["to"]) for row in rows}
    seconds = sum((_moment(end) - _moment(begin)).total_seconds() for begin, end in spans)
    everything = sum(float(row["granted"] or 0) for row in rows)
    assert everything == pytest.approx(seconds * len(cores()), rel=0.01)


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def test_since_may_be_a_date_which_begins_at_midnight_utc(http: httpx.Client) -> None:
    assert usage(http, "1970-01-02")["seconds"] > 0
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).date().isoformat()
    for since, problem in ((tomorrow, "in the future"), ("2026-11-31", "a date such as 2026-11-22 (midnight UTC)")):
        answer = http.get("/admin/usage", params={"since": since})
        assert answer.status_code == 400
        assert problem in answer.json()["error"]


def test_since_is_a_time_that_is_not_in_the_future(http: httpx.Client) -> None:
    infer(http, "identity", SMALL)
    until(lambda: usage(http, str(time.time()))["seconds"] < usage(http)["seconds"])
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    before, since, after = (usage(http, *since)["seconds"] for since in ((), ("1970-01-02T00:00:00+01:00",), ()))
    assert before <= since <= after
    for since, problem in (("yesterday", "is not a time"), ("2026-01-01T00:00:00", "is not a time"), (later, "in the future")):
        answer = http.get("/admin/usage", params={"since": since})
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("since: ")
        assert problem in answer.json()["error"]
    for query, problem in (("since=", "is not a time"), ("sinse=1", '"sinse": there is no such parameter')):
        answer = http.get(f"/admin/usage?{query}")
        assert answer.status_code == 400
        assert problem in answer.json()["error"]
