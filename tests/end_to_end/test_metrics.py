"""/metrics as Prometheus reads it, compared with the statistics of the protocol."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.config.tenant import TenantConfig

from .harness import Served, configuration, serving
from .repository import ODD_NAME
from .virtual import VirtualDevice
from .wire import (
    FOREVER,
    PATH,
    SMALL,
    Connection,
    Document,
    busy,
    chunked,
    client,
    infer,
    lane,
    posted,
    request,
    spin,
    tensor,
    until,
)

COUNTERS = ["nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count"]
DURATIONS = [f"nv_inference_{phase}_duration_us" for phase in ("request", "queue")]
DURATIONS += [f"nv_inference_compute_{phase}_duration_us" for phase in ("input", "infer", "output")]
FAILURE, PENDING = "nv_inference_request_failure", "nv_inference_pending_request_count"
BY_MODEL = {"model", "version", "tenant", "partition"}
LABELS = {
    **dict.fromkeys([*COUNTERS, *DURATIONS, PENDING], BY_MODEL),
    FAILURE: BY_MODEL | {"reason"},
    "greenlane_model_graphs": {"model", "version", "tenant", "graphs"},
    "greenlane_model_device_memory_bytes": {"model", "version", "tenant", "kind"},
    "greenlane_model_paged_out": {"model", "version", "tenant"},
    "greenlane_device_memory_bytes": {"tenant"},
    "greenlane_page_ins_total": {"tenant"},
    "greenlane_page_outs_total": {"tenant"},
    "greenlane_page_in_seconds_total": {"tenant"},
    "greenlane_page_out_seconds_total": {"tenant"},
    "greenlane_tenant_ready": {"tenant"},
    "greenlane_waiting_requests": {"tenant"},
    "greenlane_in_flight_requests": {"tenant"},
    "greenlane_rejected_requests_total": {"tenant"},
    "greenlane_limited_requests_total": {"tenant", "limit"},
    "greenlane_expired_requests_total": {"tenant"},
    "greenlane_invalid_requests_total": {"tenant"},
    "greenlane_unread_answers_total": {"tenant"},
    "greenlane_request_duration_seconds_bucket": {"model", "version", "tenant", "le"},
    "greenlane_request_duration_seconds_count": {"model", "version", "tenant"},
    "greenlane_request_duration_seconds_sum": {"model", "version", "tenant"},
    "greenlane_report_age_seconds": {"tenant"},
    "greenlane_slot_bytes": {"tenant"},
    "greenlane_memory_bytes": {"tenant"},
    "greenlane_partition_granules": {"tenant", "partition"},
    "greenlane_device_info": {"device", "kind"},
    "greenlane_device_granules": {"device"},
    "greenlane_device_free_granules": {"device"},
    "greenlane_device_serving": {"device"},
    "greenlane_tenant_device": {"tenant", "device"},
    "greenlane_ready": set(),
    "greenlane_model_ready": {"model", "version", "tenant"},
    "greenlane_build_info": {"version"},
    "greenlane_start_time_seconds": set(),
    "nv_cpu_utilization": set(),
    "nv_cpu_memory_total_bytes": set(),
    "nv_cpu_memory_used_bytes": set(),
    "greenlane_device_unit_seconds_total": {"device", "unit"},
    "greenlane_free_unit_seconds_total": {"device", "unit"},
    **{f"greenlane_{what}_unit_seconds_total": {"tenant", "device", "unit"} for what in ("granted", "idle", "lent")},
    "greenlane_used_unit_seconds_total": {"model", "version", "tenant", "device", "unit"},
    "greenlane_borrowed_unit_seconds_total": {"model", "version", "tenant", "device", "unit"},
    "greenlane_works_total": {"model", "version", "tenant", "device", "unit"},
    "greenlane_usage_age_seconds": {"tenant", "device"},
    "greenlane_repartitions_total": set(),
}
"""All series and their labels."""
ACCOUNT = {f"greenlane_{what}_total" for what in ("used_unit_seconds", "borrowed_unit_seconds", "works")}
"""Those of the account by model."""
TRITONS_COUNTERS, GAUGES = {*COUNTERS, *DURATIONS, FAILURE}, {PENDING, "greenlane_ready", "greenlane_waiting_requests"}

Scraped = dict[tuple[str, frozenset[tuple[str, str]]], float]


both_ways = pytest.mark.parametrize("counted", [False, True], ids=["asgi", "direct"], indirect=True)


@pytest.fixture
def counted(standard: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Two tenants on many granules; the first runs one request at a time and lets two wait."""
    acme = TenantConfig(name="acme", granules=2, models=("identity", "pick", "rows", "spin"), queue=2, in_flight=1)
    globex = TenantConfig(name="globex", granules=1, models=("identity", "scaled", ODD_NAME))
    with serving(configuration(standard, acme, globex), VirtualDevice(8), getattr(request, "param", False)) as served:
        yield served


@pytest.fixture
def mine(counted: Served) -> Iterator[httpx.Client]:
    with client(counted) as http:
        yield http


def scrape(http: httpx.Client) -> Scraped:
    answer = http.get("/metrics")
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.text)
    return {(_name(s.name), frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def _name(read: str) -> str:
    """The name of a series in the text; the parser appends `_total` to Triton's counters, which lack it."""
    return read.removesuffix("_total") if read.startswith("nv_") else read


def value(scraped: Scraped, name: str, **labels: str) -> float:
    """The value of the only series that has these labels, among others."""
    (found,) = [v for (series, has), v in scraped.items() if series == name and labels.items() <= has]
    return found


def test_every_series_is_there_with_its_labels(mine: httpx.Client) -> None:
    until(lambda: "nv_cpu_utilization" in mine.get("/metrics").text)  # It takes two looks at the cores.
    series: dict[str, list[set[str]]] = {}
    for name, labels in scrape(mine):
        series.setdefault(name, []).append({label for label, _ in labels})
    assert {name: labels[0] for name, labels in series.items()} == LABELS
    assert all(labels == LABELS[name] for name, all_labels in series.items() for labels in all_labels)


@pytest.mark.parametrize(("accepted", "encoding"), [("gzip", "gzip"), ("gzip;q=0, deflate", "deflate"), ("identity", None)])
def test_metrics_are_compressed_for_clients_that_take_that(mine: httpx.Client, accepted: str, encoding: str | None) -> None:
    answer = mine.get("/metrics", headers={"accept-encoding": accepted})
    assert answer.headers.get("content-encoding") == encoding
    assert "greenlane_ready" in answer.text
    assert encoding is None or int(answer.headers["content-length"]) < len(answer.content) / 3


def test_content_type_and_metric_types(mine: httpx.Client) -> None:
    answer = mine.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert "charset=utf-8" in answer.headers["content-type"]
    types = {family.name: family.type for family in text_string_to_metric_families(answer.text)}
    assert {types[name] for name in TRITONS_COUNTERS} == {"counter"}
    assert f"# TYPE {FAILURE} counter\n" in answer.text, "without _total at its end, as it is Triton's"
    assert {types[name] for name in GAUGES} == {"gauge"}
    assert types["greenlane_rejected_requests"] == types["greenlane_repartitions"] == "counter"


def test_metrics_have_labels_by_tenant_model_and_version(mine: httpx.Client) -> None:
    def models(tenant: str) -> set[tuple[str, str]]:
        all_labels = [dict(labels) for name, labels in scrape(mine) if name == "nv_inference_count"]
        return {(labels["model"], labels["version"]) for labels in all_labels if labels["tenant"] == tenant}

    assert models("acme") == {("identity", "1"), ("pick", "1"), ("rows", "1"), ("spin", "1")}
    assert models("globex") == {("identity", "1"), (ODD_NAME, "1"), ("scaled", "1"), ("scaled", "2"), ("scaled", "10")}


def rows(count: int) -> Document:
    return request(tensor("x", "FP32", [count, 3], [1] * 3 * count))


def pick(at: int) -> Document:
    return request(tensor("x", "FP32", [4], [1, 2, 3, 4]), tensor("at", "INT64", [1], [at]))


def work(served: Served, http: httpx.Client) -> None:
    """One request of every outcome. The full queue and the disconnect come first, while no model is known to be quick."""
    with busy(served, http), Connection(served) as one, Connection(served) as two:
        for waiting, connection in enumerate((one, two), 1):
            connection.send(posted("identity", SMALL))
            until(lambda waiting=waiting: lane(http)["waiting"] == waiting)  # type: ignore[misc]
        assert infer(http, "identity", SMALL).status_code == 429
        assert value(scrape(http), PENDING, model="identity", tenant="acme") == 2
        assert value(scrape(http), PENDING, model="spin") == 0, "what runs does not wait"
        assert value(scrape(http), "greenlane_waiting_requests", tenant="acme") == 2
        assert value(scrape(http), "greenlane_in_flight_requests", tenant="acme") == 1
    until(lambda: lane(http)["waiting"] + lane(http)["in_flight"] == 0)
    for count in (1, 4):
        assert infer(http, "rows", rows(count)).status_code == 200
    assert infer(http, "rows", rows(5)).status_code == 400
    assert http.post("/v2/models/rows/infer", content=b"{").status_code == 400
    assert http.post("/v2/models/rows/infer", content=b"{}", headers={"Content-Encoding": "br"}).status_code == 415
    assert infer(http, "pick", pick(2)).status_code == 200
    assert infer(http, "pick", pick(9)).status_code == 500
    assert infer(http, "spin", spin(FOREVER, parameters={"timeout": 1000})).status_code == 504


@both_ways
def test_counts_are_those_of_the_statistics(counted: Served, mine: httpx.Client) -> None:
    work(counted, mine)
    until(lambda: value(scrape(mine), FAILURE, model="identity", tenant="acme", reason="CANCELED") == 2)
    scraped = scrape(mine)
    entries = mine.get("/v2/models/stats").json()["model_stats"]
    assert len(entries) == 4
    for entry in entries:
        labels, times = {"model": entry["name"], "version": entry["version"], "tenant": "acme"}, entry["inference_stats"]
        assert value(scraped, "nv_inference_request_success", **labels) == times["success"]["count"]
        assert value(scraped, "nv_inference_count", **labels) == entry["inference_count"]
        assert value(scraped, "nv_inference_exec_count", **labels) == entry["execution_count"]
        assert value(scraped, "nv_inference_request_duration_us", **labels) == times["success"]["ns"] / 1000
        for phase in ("queue", "compute_input", "compute_infer", "compute_output"):
            assert value(scraped, f"nv_inference_{phase}_duration_us", **labels) == times[phase]["ns"] / 1000
        failures = [v for (name, has), v in scraped.items() if name == FAILURE and labels.items() <= has]
        assert (len(failures), sum(failures)) == (4, times["fail"]["count"])


@both_ways
def test_failures_are_counted_by_their_reason(counted: Served, mine: httpx.Client) -> None:
    work(counted, mine)
    until(lambda: value(scrape(mine), FAILURE, model="identity", tenant="acme", reason="CANCELED") == 2)
    scraped = scrape(mine)
    counts = {
        (labels["model"], labels["reason"]): count
        for (name, has), count in scraped.items()
        if name == FAILURE and (labels := dict(has))["tenant"] == "acme" and count
    }
    assert counts == {
        ("identity", "REJECTED"): 1,
        ("identity", "CANCELED"): 2,
        ("pick", "BACKEND"): 1,
        ("spin", "CANCELED"): 1,
        ("spin", "REJECTED"): 1,
    }
    assert value(scraped, "greenlane_rejected_requests_total", tenant="acme") == 1
    assert value(scraped, "greenlane_expired_requests_total", tenant="acme") == 1
    assert value(scraped, "greenlane_expired_requests_total", tenant="globex") == 0
    assert value(scraped, "greenlane_invalid_requests_total", tenant="acme") == 3, "no failure of the model"
    assert value(scraped, "greenlane_invalid_requests_total", tenant="globex") == 0
    assert value(scraped, "nv_inference_count", model="rows") == 5
    assert value(scraped, "nv_inference_exec_count", model="rows") == 2
    assert value(scraped, PENDING, model="identity", tenant="acme") == 0


@pytest.mark.parametrize("counted", [True], ids=["direct"], indirect=True)
def test_a_damaged_chunk_is_an_invalid_request_and_no_failure_of_its_model(counted: Served, mine: httpx.Client) -> None:
    """At once, and when the body is awaited; nor is it a client that has gone. Without a tenant it is counted nowhere."""
    page = ["Origin: https://app.example"]
    for more in ([], ["X-Tenant: acme"], page, ["X-Tenant: nobody"]):
        with Connection(counted) as connection:
            connection.send(chunked(headers=more, end=b"zz\r\n"))
            assert connection.answer().status == 400
    for path, more in ((PATH, []), (PATH, page), ("/v2/models/identity/generate", [])):
        with Connection(counted) as connection:
            connection.send(chunked(path=path, headers=["Expect: 100-continue", *more], end=b""))
            assert connection.answer(bare=True).status == 100
            connection.send(b"1\r\n{\r\nzz\r\n")
            assert connection.answer().status == 400
    scraped = scrape(mine)
    assert value(scraped, "greenlane_invalid_requests_total", tenant="acme") == 6
    assert value(scraped, "greenlane_invalid_requests_total", tenant="globex") == 0
    assert [count for (name, _), count in scraped.items() if name == FAILURE and count] == []


@both_ways
def test_request_durations_are_a_cumulative_histogram(counted: Served, mine: httpx.Client) -> None:
    for _ in range(5):
        assert infer(mine, "rows", rows(1)).status_code == 200
    assert infer(mine, "spin", spin(2000)).status_code == 200
    scraped, name = scrape(mine), "greenlane_request_duration_seconds"
    for model, count in (("rows", 5), ("spin", 1), ("pick", 0)):
        labels = {"model": model, "tenant": "acme"}
        buckets = [v for (series, has), v in scraped.items() if series == f"{name}_bucket" and labels.items() <= has]
        assert buckets == sorted(buckets), "each counts what is in those before it, too"
        assert value(scraped, f"{name}_bucket", le="+Inf", **labels) == value(scraped, f"{name}_count", **labels) == count
        total = value(scraped, "nv_inference_request_duration_us", **labels) / 1e6
        assert value(scraped, f"{name}_sum", **labels) == pytest.approx(total)
    assert value(scraped, f"{name}_bucket", le="0.0001", model="spin") == 0
    assert value(scraped, f"{name}_bucket", le="10.0", model="rows") == 5


def test_tenants_are_counted_separately(mine: httpx.Client) -> None:
    assert infer(mine, "identity", SMALL, headers={"X-Tenant": "globex"}).status_code == 200
    assert value(scrape(mine), "nv_inference_request_success", model="identity", tenant="globex") == 1
    assert value(scrape(mine), "nv_inference_request_success", model="identity", tenant="acme") == 0


def test_partition_label_follows_a_repartition(mine: httpx.Client) -> None:
    assert infer(mine, "identity", SMALL).status_code == 200
    before = scrape(mine)
    assert value(before, "nv_inference_count", model="identity", tenant="acme", partition="0-1") == 1
    assert value(before, "greenlane_partition_granules", tenant="acme", partition="0-1") == 2
    assert value(before, "greenlane_repartitions_total") == 1
    assert mine.put("/admin/partitions", json={"acme": 4}).json()["moved"] == ["acme"]
    assert infer(mine, "identity", SMALL).status_code == 200
    after = scrape(mine)
    assert value(after, "nv_inference_count", model="identity", tenant="acme", partition="0-1-3-4") == 2
    assert value(after, "greenlane_partition_granules", tenant="acme", partition="0-1-3-4") == 4
    assert value(after, "greenlane_partition_granules", tenant="globex", partition="2") == 1
    assert value(after, "greenlane_repartitions_total") == 2
    assert not any(("partition", "0-1") in labels for _, labels in after)


def test_a_model_that_was_unloaded_has_no_series_but_the_accounts_and_a_reloaded_one_keeps_its_counts(
    mine: httpx.Client,
) -> None:
    assert infer(mine, "identity", SMALL).status_code == 200
    assert mine.post("/v2/repository/models/identity/load").status_code == 200
    assert value(scrape(mine), "nv_inference_count", model="identity", tenant="acme") == 1
    assert mine.post("/v2/repository/models/rows/unload").status_code == 200
    left = {name for name, labels in scrape(mine) if ("model", "rows") in labels}
    assert left == ACCOUNT, "what was used stays in the account"


def test_readiness_is_a_metric_too(mine: httpx.Client) -> None:
    assert value(scrape(mine), "greenlane_ready") == 1
    assert mine.post("/admin/drain").status_code == 202
    assert value(scrape(mine), "greenlane_ready") == 0
