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
from .processes import Running, configure, running, tenant
from .wire import SMALL, infer, spin, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants on cores need two cores")

LONG = spin(4000)
"""About 20 ms."""
WORKS, LONGER = 12, spin(15_000)
"""So long that what the worker's thread does besides is far less than 2 %, also on a busy machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("usage")


@pytest.fixture(scope="module")
def server(standard: Path, folder: Path) -> Iterator[Running]:
    tenants = "".join(tenant(name, "identity", "spin") for name in ("acme", "globex"))
    with running(configure(folder / "greenlane.toml", standard, tenants, usage_dir=f'"{folder}/usage"')) as server:
        yield server


def usage(http: httpx.Client, since: str = "") -> dict[str, Any]:
    answer = http.get("/admin/usage", params={"since": since} if since else {})
    assert answer.status_code == 200, answer.text
    return answer.json()


def of(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in found["tenants"] if each["tenant"] == name)


def model(found: dict[str, Any], name: str, which: str) -> dict[str, Any]:
    return next(each for each in of(found, name)["models"] if each["name"] == which)


def on_core(server: Running, name: str) -> dict[str, int]:
    """Nanoseconds that each thread of a tenant's process was on a core, by the kernel."""
    tasks = Path(f"/proc/{server.pid(name)}/task")
    return {task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()}


def test_it_adds_up_and_is_what_the_kernel_saw(server: Running, acme: httpx.Client) -> None:
    infer(acme, "spin", LONGER)
    before, ran = usage(acme), on_core(server, "acme")
    for _ in range(WORKS):
        assert infer(acme, "spin", LONGER).status_code == 200
    after, now = usage(acme), on_core(server, "acme")
    seen = max(now[thread] - ran.get(thread, 0) for thread in now)  # The worker's: no other thread does as much.
    assert [each["name"] for each in of(before, "globex")["models"]] == ["identity", "spin"]
    used = model(after, "acme", "spin")["used"] - model(before, "acme", "spin")["used"]
    assert used == pytest.approx(seen / 1e9, rel=0.02)
    (device,) = after["devices"]
    assert device["total"] == pytest.approx(device["units"] * after["seconds"], rel=0.01)
    assert device["granted"] + device["free"] == pytest.approx(device["total"], rel=1e-9)
    assert device["granted"] == pytest.approx(device["used"] + device["idle"] + device["lent"], rel=1e-9)
    ours, globex = of(after, "acme"), of(after, "globex")
    assert ours["used"] == pytest.approx(sum(each["used"] for each in ours["models"]), rel=1e-9)
    assert (globex["used"], globex["share"]) == (0, 1)
    until(lambda: of(usage(acme), "acme")["age_seconds"] < 1)  # The next report may be late on a busy machine.
    assert model(after, "acme", "spin")["works"] == model(before, "acme", "spin")["works"] + WORKS


def test_a_killed_process_takes_nothing_back(server: Running, acme: httpx.Client) -> None:
    for _ in range(10):
        infer(acme, "spin", LONG)
    before = usage(acme)
    server.kill("acme")
    until(lambda: infer_again(acme))
    after = usage(acme)
    assert model(after, "acme", "spin")["works"] == model(before, "acme", "spin")["works"] + 1
    assert of(after, "acme")["used"] > of(before, "acme")["used"]
    assert of(after, "acme")["granted"] > of(before, "acme")["granted"]


def infer_again(acme: httpx.Client) -> bool:
    try:
        return infer(acme, "spin", LONG).status_code == 200
    except httpx.TransportError:
        return False


def test_since_may_be_a_date_which_begins_at_midnight_utc(acme: httpx.Client) -> None:
    assert usage(acme, "1970-01-02")["seconds"] > 0
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).date().isoformat()
    for since, problem in ((tomorrow, "in the future"), ("2026-11-31", "a date such as 2026-11-22 (midnight UTC)")):
        answer = acme.get("/admin/usage", params={"since": since})
        assert answer.status_code == 400
        assert problem in answer.json()["error"]


def test_since_is_a_time_that_is_not_in_the_future(acme: httpx.Client) -> None:
    infer(acme, "identity", SMALL)
    until(lambda: usage(acme, str(time.time()))["seconds"] < usage(acme)["seconds"])
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    before, since, after = (usage(acme, *since)["seconds"] for since in ((), ("1970-01-02T00:00:00+01:00",), ()))
    assert before - 0.1 <= since <= after + 0.1, "the device was divided a moment before the account begins"
    for since, problem in (("yesterday", "is not a time"), ("2026-01-01T00:00:00", "is not a time"), (later, "in the future")):
        answer = acme.get("/admin/usage", params={"since": since})
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("since: ")
        assert problem in answer.json()["error"]
    for query, problem in (("since=", "is not a time"), ("sinse=1", '"sinse": there is no such parameter; expected since')):
        answer = acme.get(f"/admin/usage?{query}")
        assert answer.status_code == 400
        assert problem in answer.json()["error"]


def test_metrics_and_files_say_the_same(server: Running, acme: httpx.Client, folder: Path) -> None:
    """The last, as it ends the server. Rows of the files have the process that was killed before, too."""
    for _ in range(5):
        infer(acme, "spin", LONG)
    found, everything = model(usage(acme), "acme", "spin"), of(usage(acme), "acme")
    text = acme.get("/metrics").text
    scraped = {
        (sample.name, sample.labels.get("tenant"), sample.labels.get("model")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert scraped["greenlane_used_unit_seconds_total", "acme", "spin"] == pytest.approx(found["used"])
    assert scraped["greenlane_works_total", "acme", "spin"] == found["works"]
    assert scraped["greenlane_idle_unit_seconds_total", "globex", None] > 0
    assert "# TYPE greenlane_granted_unit_seconds_total counter" in text
    server.signal()
    assert server.wait() == 0
    (path,) = (folder / "usage").iterdir()
    assert re.fullmatch(r"usage-\d{4}-\d\d-\d\d\.csv", path.name)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert sum(float(row["used"] or 0) for row in rows) == pytest.approx(everything["used"])
    assert sum(int(row["works"] or 0) for row in rows) == sum(each["works"] for each in everything["models"])
    granted, idle = (sum(float(row[column] or 0) for row in rows if row["tenant"]) for column in ("granted", "idle"))
    assert granted == pytest.approx(idle + everything["used"], rel=1e-9)
    spans = {(row["from"], row["to"]) for row in rows}
    seconds = sum((datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds() for begin, end in spans)
    assert sum(float(row["granted"] or 0) for row in rows) == pytest.approx(seconds * len(cores()), rel=0.01)
