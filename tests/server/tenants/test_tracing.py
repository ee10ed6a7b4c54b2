"""Which requests are traced, by their traceparent or the ratio, and the spans that are made of one."""

from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from server.config.server import ServerConfig
from server.tenants.spans import Spans
from server.tenants.tracing import FORCED, Sampler, Trace, Tracing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def sampler(ratio: float, kept: list[Trace] | None = None) -> Sampler:
    return Sampler(ratio, (kept if kept is not None else []).append)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_caller_decides_for_its_requests(ratio: float) -> None:
    found = sampler(ratio).start(f"00-{TRACE}-{PARENT}-01".encode(), 7)
    assert found
    assert (f"{found.trace:032x}", f"{found.parent:016x}", found.begun) == (TRACE, PARENT, 7)
    assert found.span != found.parent
    assert sampler(ratio).start(f"00-{TRACE}-{PARENT}-00", 7) is None


def test_callers_of_a_tenant_have_so_many_requests_traced_a_second_and_the_ratio_decides_for_the_rest() -> None:
    header, none, all_of_them = f"00-{TRACE}-{PARENT}-01", sampler(0.0), sampler(1.0)
    second = 1_000_000_000
    assert sum(none.start(header, second) is not None for _ in range(FORCED + 50)) == FORCED
    assert sum(none.start(header, 2 * second) is not None for _ in range(FORCED + 50)) == FORCED
    assert sum(all_of_them.start(header, second) is not None for _ in range(FORCED + 50)) == FORCED + 50


def test_the_ratio_decides_for_all_others() -> None:
    assert sampler(0.0).start(None, 0) is None
    assert all(sampler(1.0).start(None, 0) for _ in range(100))
    found = [each for each in (sampler(0.5).start(None, 0) for _ in range(2000)) if each]
    assert 800 < len(found) < 1200
    assert len({each.trace for each in found}) == len(found)
    assert not any(each.parent for each in found)


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "hello",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE[1:]}-{PARENT}-00",
        f"00-{TRACE.upper()}-{PARENT}-00",
        f"00-{'0' * 32}-{PARENT}-00",
        f"00-{TRACE}-{'0' * 16}-00",
        f"ff-{TRACE}-{PARENT}-00",
        f"00-{TRACE}-{PARENT}-00-more",
        b"\xff\xfe",
    ],
)
def test_a_wrong_traceparent_counts_as_none(wrong: Any) -> None:
    found = sampler(1.0).start(wrong, 0)
    assert found
    assert not found.parent


def test_spans_have_the_times_that_were_kept_and_only_of_what_happened() -> None:
    exporter, tracing = InMemorySpanExporter(), Tracing()
    spans = Spans(ServerConfig(tracing_ratio=1.0, tracing_service="mine"), exporter)
    spans.trace([tracing])
    assert tracing.sampler
    whole, refused = (tracing.sampler.start(f"00-{TRACE}-{PARENT}-01", 1_000) for _ in range(2))
    assert whole
    assert refused
    whole.about("acme", "m", "3", 2_000, 6_000)
    whole.decoded, whole.began, whole.ended, whole.rows, whole.batch = 2_500, 4_000, 5_000, 2, 8
    whole.keep()
    refused.about("acme", "m", "3", 2_000, 2_100)
    refused.status, refused.error = 429, "the queue is full"
    refused.keep()
    spans.close()
    first, *steps = found = exporter.get_finished_spans()[:6]
    start = first.start_time or 0
    assert [(each.name, (each.start_time or 0) - start, (each.end_time or 0) - start) for each in found] == [
        ("infer m", 0, 5_000),
        ("body", 0, 1_000),
        ("decode", 1_000, 1_500),
        ("queue", 1_500, 3_000),
        ("execute", 3_000, 4_000),
        ("encode", 4_000, 5_000),
    ]
    assert first.parent
    assert (first.kind, f"{first.parent.span_id:016x}", first.parent.is_remote) == (SpanKind.SERVER, PARENT, True)
    assert first.attributes == {
        "greenlane.tenant": "acme",
        "greenlane.model": "m",
        "greenlane.version": "3",
        "greenlane.rows": 2,
        "greenlane.batch_rows": 8,
        "http.response.status_code": 200,
    }
    assert first.resource.attributes["service.name"] == "mine"
    assert all(each.parent == first.context and each.context.trace_id == int(TRACE, 16) for each in steps if each.context)
    bad = exporter.get_finished_spans()[6:]
    assert [each.name for each in bad] == ["infer m", "body"]
    assert (bad[0].status.status_code, bad[0].status.description) == (StatusCode.ERROR, "the queue is full")
