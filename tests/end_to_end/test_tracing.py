"""Spans as a receiver of OTLP over HTTP gets them, of requests over HTTP and gRPC."""

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from server.config.tenant import TenantConfig

from .harness import Served, configuration, serving
from .processes import configure, running, tenant
from .wire import SMALL, client, infer, until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
STEPS = {"body", "decode", "queue", "execute", "encode"}


class Receiver(ThreadingHTTPServer):
    """Takes spans, and keeps them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: list[Any] = []
        self.services: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def names(self, trace: str = TRACE) -> set[str]:
        return {each.name for each in self.spans if each.trace_id.hex() == trace}


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        message = ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            self.server.services |= {
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # Milliseconds until spans are sent.
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever)
        thread.start()
        yield receiver
        receiver.shutdown()
        thread.join()


def test_spans_of_a_tenants_process_reach_a_receiver(standard: Path, tmp_path: Path, receiver: Receiver) -> None:
    tracing = {"tracing_endpoint": f'"{receiver.url}"', "tracing_ratio": "0.0", "tracing_service": '"lane"'}
    config = configure(tmp_path / "c.toml", standard, tenant("acme", "identity"), default_tenant='"acme"', **tracing)
    with running(config) as server, client(server) as http:
        assert infer(http, "identity", SMALL).status_code == 200, "this one says nothing of a trace, and the ratio is 0"
        assert infer(http, "identity", SMALL, headers=HEADER).status_code == 200
        until(lambda: receiver.names() == {"infer identity"} | STEPS)
    (request,) = (each for each in receiver.spans if each.name == "infer identity")
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert {each.key: each.value.string_value or each.value.int_value for each in request.attributes} == {
        "greenlane.tenant": "acme",
        "greenlane.model": "identity",
        "greenlane.version": "1",
        "greenlane.rows": 1,
        "greenlane.batch_rows": 1,
        "http.response.status_code": 200,
    }
    steps = [each for each in receiver.spans if each.name in STEPS]
    assert all(each.parent_span_id == request.span_id for each in steps)
    assert all(request.start_time_unix_nano <= each.start_time_unix_nano for each in steps)
    assert all(each.end_time_unix_nano <= request.end_time_unix_nano for each in steps)
    assert len(receiver.spans) == 6
    assert receiver.services == {"lane"}


@pytest.fixture
def served(standard: Path, receiver: Receiver, unused_tcp_port: int) -> Iterator[Served]:
    acme = TenantConfig(name="acme", granules=1, models=("*",), grpc_port=unused_tcp_port)
    with serving(configuration(standard, acme, tracing_endpoint=receiver.url, tracing_ratio=0.0), direct=True) as served:
        yield served


def test_a_failure_and_a_request_over_grpc_have_spans_too(served: Served, receiver: Receiver) -> None:
    with client(served) as http:
        wrong = {"inputs": [{**SMALL["inputs"][0], "name": "other"}]}
        assert infer(http, "identity", wrong, headers=HEADER).status_code == 400
        until(lambda: receiver.names() == {"infer identity", "body"})
    (failed,) = (each for each in receiver.spans if each.name == "infer identity")
    assert failed.status.code == failed.status.STATUS_CODE_ERROR
    assert "other" in failed.status.message
    receiver.spans.clear()
    inputs = [grpc.InferInput(each["name"], each["shape"], each["datatype"]) for each in SMALL["inputs"]]
    for tensor, each in zip(inputs, SMALL["inputs"], strict=True):
        tensor.set_data_from_numpy(_array(each))
    port = served.service.config.tenants["acme"].grpc_port
    with grpc.InferenceServerClient(f"127.0.0.1:{port}") as over_grpc:
        over_grpc.infer("identity", inputs, headers=HEADER)
    until(lambda: receiver.names() == {"infer identity"} | STEPS)


def _array(tensor: Any) -> Any:
    return np.array(tensor["data"], np.float32).reshape(tensor["shape"])
