"""The parsers of what clients send, as functions of bytes for `guided`. An error that a parser does not document is raised."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress

from engines.errors import ModelRefused, TensorMismatch
from engines.model_files.artifact import unpack
from engines.model_files.onnx_file import read_onnx, structure_digest
from engines.model_files.onnx_writer import FLOAT, floats, model, node, value
from server.config.tenant import TenantConfig
from server.errors import RequestError
from server.grpc.messages import ModelInferRequest
from server.grpc.request import document, parse
from server.http.head import Head
from server.processes.channels.routing import UNAUTHENTICATED, destination, process_for
from server.protocol.request import Limits
from server.repository.pbtxt import ConfigRefused, read_json, read_text
from server.tenants.auth import Tenancy
from tests.server.protocol import messages

TENANCY = Tenancy([TenantConfig(name=name, granules=1, models=("*",)) for name in ("acme", "globex")], None)
MODELS = (messages.model(), messages.PAIR, messages.BATCHED, messages.model("BYTES"), messages.model("BOOL", "n", 2))
LIMITS = Limits(json=1 << 20, elements=1 << 20)


def headers(data: bytes) -> None:
    """A process that answers a request itself finds the tenant in it that the dispatcher has found."""
    at_dispatcher, head = destination(data, TENANCY), Head(data[: data.find(b"\r\n\r\n") + 4])
    if at_dispatcher in (None, UNAUTHENTICATED) or not head.is_direct:
        return
    in_process = process_for(head.path, head.headers, TENANCY)
    assert in_process == at_dispatcher, f"the dispatcher says {at_dispatcher}, the HTTP process {in_process}"


def inference(data: bytes) -> None:
    """A body: the first byte chooses the model, the next two how much of the rest is JSON."""
    if len(data) < 3:
        return
    length, body = int.from_bytes(data[1:3], "little"), data[3:]
    with suppress(RequestError, TensorMismatch):
        messages.take_bytes(body, length if length <= len(body) else None, MODELS[data[0] % len(MODELS)], LIMITS)


def message(data: bytes) -> None:
    """A message over gRPC, as far as its document."""
    with suppress(RequestError):
        for _ in document(parse(data, LIMITS)):
            pass


def configuration(data: bytes) -> None:
    """A model's configuration in both forms."""
    for read in (read_text, read_json):
        with suppress(ConfigRefused):
            read(data.decode("utf-8", "replace"), "config.pbtxt")


def onnx(data: bytes) -> None:
    """What is read of an ONNX file before the library gets it."""
    read_onnx(data)
    structure_digest(data)


def plan(data: bytes) -> None:
    """An engine file."""
    with suppress(ModelRefused):
        unpack(data, "model.plan")


PARSERS: Mapping[str, Callable[[bytes], None]] = {
    each.__name__: each for each in (headers, inference, message, configuration, onnx, plan)
}


def seeds(parser: str) -> list[bytes]:
    """Inputs that are right, to begin with."""
    tensors = json.dumps(messages.request(messages.tensor([1.0, 2.0], shape=[2]))).encode()
    binary = json.dumps(messages.request(messages.binary(8))).encode()
    asked = ModelInferRequest(model_name="m")
    asked.inputs.add(name="x", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1.0, 2.0])
    return {
        "headers": [
            b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nX-Tenant: acme\r\nContent-Length: 3\r\n\r\nabc",
            b"GET /v2/health/ready HTTP/1.0\r\n\r\n",
            b"GET http://a/metrics?x HTTP/1.1\r\nAuthorization: Bearer k\r\nx-tenant:globex \r\nUpgrade: h2c\r\n\r\n",
        ],
        "inference": [b"\0\xff\xff" + tensors, b"\0" + len(binary).to_bytes(2, "little") + binary + bytes(8)],
        "message": [asked.SerializeToString()],
        "configuration": [
            b'name: "m" max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: [ -1, 3 ] } # and so on',
            b'{"name": "m", "instance_group": [{"count": 2}], "dynamic_batching": {}}',
        ],
        "onnx": [
            model(
                "n",
                [node("Add", ["x", "w"], ["y"], axis=1)],
                [value("x", FLOAT, ["n", 1])],
                [value("y", FLOAT, ["n", 1])],
                [floats("w", [1], [1.0])],
            )
        ],
        "plan": [b"\x89GLPLAN\n" + bytes(24)],
    }[parser]
