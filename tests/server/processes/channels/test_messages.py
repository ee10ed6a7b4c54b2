"""Messages arrive with all that was in them, and what an HTTP process may not say is refused."""

from contextlib import nullcontext
from typing import Any

import msgspec
import pytest

from engines import Signature, TensorSpec
from engines.datatypes import DATATYPES
from engines.signature import Default, Form
from server.http.strict import MAX_HEADER_BYTES
from server.processes.channels.http_protocols import ForwardedRequest
from server.processes.channels.message_fields import decode_hook, encode_hook
from server.processes.remote.remote_frontend import Publication
from server.protocol.classification import Labels
from server.scheduling.batching import Batching
from server.scheduling.lane_statistics import LaneStatistics, SlotStatistics
from server.scheduling.queue_policy import QueueLimits, QueuePolicy
from server.tenants.catalog import IndexEntry, ModelVersion
from server.tenants.frontend import ModelReport, Report
from server.tenants.statistics import ModelStatistics, Responses, Size

SPECS = tuple(TensorSpec(name, datatype, ("n", 2)) for name, datatype in DATATYPES.items())
FORMED = TensorSpec("f", DATATYPES["FP32"], ("n", 4), ((1, 9), (4, 4)), Form((-1, 2, 2), (-1, 4)), Default((1, 4), b"\0" * 16))
SIGNATURE = Signature((*SPECS, FORMED), SPECS, 3)
LIMITS = QueueLimits(3, 0.5, "models.m")
POLICY = QueuePolicy(LIMITS, 2, 1, {2: QueueLimits(9, 0.0, "models.m")})
CONFIG = {"name": "m", "nested": [{"dims": [-1, 2.5]}, None, True]}
BATCHING, LABELS = Batching(SIGNATURE, 3, 0.1, (2,)), Labels({"y": b"a\nb"})
SERVED = ModelVersion("m", "1", "m/1#1", SIGNATURE, "onnxruntime_onnx", CONFIG, BATCHING, LABELS, POLICY)
STATISTICS = ModelStatistics(
    {1: Size(1, 2, 3, 4, 5, 6)},
    Size(7),
    8,
    {2: Size(9)},
    10,
    list(range(17)),
    {"OTHER": 1},
    11,
    12,
    {3: Responses(1, 2, 3, 4, 5, 6, 7, 8, 9)},
)
REPORT = Report(
    [ModelReport("m", "1", STATISTICS, 4)],
    [IndexEntry("m", "1", "READY"), IndexEntry("b", "", "UNAVAILABLE", "why")],
    LaneStatistics(1, 2, 3, 4, 5, 6, (7, 8, 9, 10), 11, 12),
    SlotStatistics(1, 2, 3),
)


def sent(value: Any, kind: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value, enc_hook=encode_hook), type=kind, dec_hook=decode_hook)


@pytest.mark.parametrize(
    "served", [SERVED, ModelVersion("m", "2", "m/2#1", SIGNATURE, "tensorrt_plan", {})], ids=["all", "least"]
)
def test_a_published_model_arrives_as_it_was(served: ModelVersion) -> None:
    problems = [IndexEntry("m", "3", "UNAVAILABLE", "broken")]
    received = sent(Publication("m", [served], problems), Publication)
    (found,) = received.served
    assert (received.name, found, received.problems) == ("m", served, problems)
    assert (found.labels.files, found.queues) == (served.labels.files, served.queues), "which == does not compare"
    assert found.signature.inputs[0].datatype == served.signature.inputs[0].datatype


def test_a_report_arrives_as_it_was() -> None:
    assert sent(REPORT, Report) == REPORT


def test_statistics_with_another_number_of_buckets_are_refused() -> None:
    """They would break the metrics of all tenants."""
    report = msgspec.to_builtins(REPORT)
    report["served"][0]["statistics"][5].append(0)
    with pytest.raises(msgspec.ValidationError, match="length <= 17"):
        sent(report, Report)


@pytest.mark.parametrize("sent_type", ["f4,(", "O", "<f4,<f4", "<f16", ["<f4"], None, 4])
def test_a_data_type_that_the_protocol_does_not_have_is_refused(sent_type: object) -> None:
    """NumPy would parse it."""
    signature = msgspec.to_builtins(SIGNATURE, enc_hook=encode_hook)
    signature["inputs"][0]["datatype"]["numpy"] = sent_type
    with pytest.raises(msgspec.ValidationError, match=r"inputs\[0\]\.datatype\.numpy"):
        sent(signature, Signature)


@pytest.mark.parametrize(("count", "taken"), [(MAX_HEADER_BYTES // 4, True), (1 << 20, False)])
def test_a_request_with_more_headers_than_a_head_can_have_is_refused(count: int, taken: bool) -> None:
    """The supervisor would have tens of times as many bytes as came."""
    headers = {b"%d" % number: b"" for number in range(count)}
    request = ForwardedRequest("GET", b"/metrics", b"", headers, b"", None)
    with nullcontext() if taken else pytest.raises(msgspec.ValidationError, match="length <= 16384"):
        assert sent(request, ForwardedRequest) == request


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(NotImplementedError, match="object cannot be sent to another process"):
        msgspec.msgpack.encode([object()], enc_hook=encode_hook)
