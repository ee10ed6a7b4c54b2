"""What processes send each other survives pickling, also where its classes are compiled."""

import pickle

import pytest

from engines import Signature, TensorSpec
from engines.datatypes import DATATYPES
from server.scheduling.batching import Batching
from server.scheduling.lane import LaneStatistics
from server.scheduling.slot_pool import SlotStatistics
from server.tenants.catalog import IndexEntry, ServedModel
from server.tenants.frontend import ModelReport, Report
from server.tenants.statistics import ModelStatistics, Size

SIGNATURE = Signature((TensorSpec("x", DATATYPES["FP32"], ("n", 2)),), (), 3)
COUNTED = ModelReport("m", "1", ModelStatistics(sizes={1: Size(2, 3)}, failures={"OTHER": 1}), 4)


@pytest.mark.parametrize(
    "message",
    [
        Report((COUNTED,), (IndexEntry("m", "1", "READY"),), LaneStatistics(1, 2, 3, 4, 5), SlotStatistics(1, 2, 3)),
        ServedModel("m", "1", "m/1#1", SIGNATURE, "onnxruntime_onnx", {}, Batching(SIGNATURE, 3, 0.1, (2,))),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_survive_pickling(message: object) -> None:
    assert pickle.loads(pickle.dumps(message)) == message
