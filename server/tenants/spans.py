"""Spans of traced requests, by OpenTelemetry's SDK: made and sent over OTLP/HTTP on a thread of its batch processor.

Needs the extra `otel`, and is imported only where `server.tracing_endpoint` is set.
"""

import time
from collections.abc import Iterable, Iterator, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from .. import __version__
from ..config.server import ServerConfig
from .tracing import Sampler, Trace, Tracing

_SCOPE = InstrumentationScope("greenlane", __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Spans:
    """Sends the spans of one process. `exporter` takes them, by default the one for the configured endpoint."""

    def __init__(self, config: ServerConfig, exporter: SpanExporter | None = None) -> None:
        resource = Resource.create({"service.name": config.tracing_service, "service.version": __version__})
        sending = exporter or OTLPSpanExporter(endpoint=config.tracing_endpoint)
        self._processor = BatchSpanProcessor(_Expanding(sending, resource))
        self._ratio = config.tracing_ratio

    def trace(self, tenants: Iterable[Tracing]) -> None:
        """Trace the requests of these tenants from now on."""
        for each in tenants:
            each.sampler = Sampler(self._ratio, self._processor.on_end)  # type: ignore[arg-type]

    def close(self) -> None:
        """Send what is left. Blocks for some seconds if the receiver does not answer."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


class _Expanding(SpanExporter):
    """Makes spans of traces, on the thread that sends them."""

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        self._exporter = exporter
        self._resource = resource
        self._ids = RandomIdGenerator()

    def export(self, spans: Sequence[Trace]) -> SpanExportResult:  # type: ignore[override]
        since_1970 = time.time_ns() - time.monotonic_ns()
        return self._exporter.export([span for trace in spans for span in self._of(trace, since_1970)])

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def _of(self, trace: Trace, offset: int) -> Iterator[ReadableSpan]:
        """The request's span, and those of the steps that it took."""
        own = SpanContext(trace.trace, trace.span, False, _SAMPLED)
        parent = SpanContext(trace.trace, trace.parent, True, _SAMPLED) if trace.parent else None
        attributes: dict[str, str | int] = {
            "greenlane.tenant": trace.tenant,
            "greenlane.model": trace.model,
            "greenlane.version": trace.version,
            "greenlane.rows": trace.rows,
            "greenlane.batch_rows": trace.batch or trace.rows,
            "http.response.status_code": trace.status,
        }
        status = Status(StatusCode.ERROR, trace.error) if trace.error else Status(StatusCode.UNSET)
        steps = (
            ("body", trace.begun, trace.arrived),
            ("decode", trace.arrived, trace.decoded),
            ("queue", trace.decoded, trace.began),
            ("execute", trace.began, trace.ended),
            ("encode", trace.ended, trace.done),
        )

        def span(
            name: str, context: SpanContext, above: SpanContext | None, begin: int, end: int, kind: SpanKind
        ) -> ReadableSpan:
            return ReadableSpan(
                name,
                context,
                above,
                self._resource,
                attributes if context is own else None,
                kind=kind,
                status=status if context is own else Status(StatusCode.UNSET),
                start_time=begin + offset,
                end_time=max(begin, end) + offset,
                instrumentation_scope=_SCOPE,
            )

        yield span(f"infer {trace.model}", own, parent, trace.begun, trace.done, SpanKind.SERVER)
        for name, begin, end in steps:
            if begin and end:
                context = SpanContext(trace.trace, self._ids.generate_span_id(), False, _SAMPLED)
                yield span(name, context, own, begin, end, SpanKind.INTERNAL)
