"""An ensemble of two TensorRT engines over HTTP: one graph, right answers while tenants move and a step is reloaded."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from .bench import expected
from .networks import add, plan, several
from .test_server import server

pytestmark = pytest.mark.gpu

CONFIG = """
platform: "ensemble"
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1, -1 ] } ]
ensemble_scheduling { step [
  { model_name: "second" model_version: -1
    input_map { key: "a" value: "wide" } input_map { key: "b" value: "B" } output_map { key: "sum" value: "OUT" } },
  { model_name: "first" model_version: -1
    input_map { key: "a" value: "A" } input_map { key: "b" value: "B" } output_map { key: "both" value: "wide" } }
] }
"""


def test_an_ensemble_is_one_graph_and_right_during_repartitions_and_reloads(tmp_path: Path, device: Any) -> None:
    for name in ("first", "second"):
        plan(add(tmp_path, name), several())
    (add(tmp_path, "all").parent / "config.pbtxt").write_text(CONFIG)
    wanted, chance = expected(several()), np.random.default_rng(3)

    def assert_right(http: httpx.Client, rows: int, tenant: str) -> None:
        a, b = chance.random((rows, 64), np.float32), chance.random((rows, 16), np.float32)
        inputs = [
            {"name": name, "shape": array.shape, "datatype": "FP32", "data": array.ravel().tolist()}
            for name, array in (("A", a), ("B", b))
        ]
        answer = http.post("/v2/models/all/infer", json={"inputs": inputs}, headers={"X-Tenant": tenant})
        assert answer.status_code == 200, answer.text
        (output,) = answer.json()["outputs"]
        ours = np.array(output["data"], np.float32).reshape(output["shape"])
        theirs = wanted({"a": wanted({"a": a, "b": b})[2], "b": b})[0]
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() <= 2e-2 * np.abs(theirs).max()

    with server(tmp_path) as served, httpx.Client(base_url=served.url, timeout=120) as http:
        config = http.get("/v2/models/all/config").json()
        execution = json.loads(config["parameters"]["greenlane.execution"]["string_value"])
        assert (config["platform"], execution["graphs"]) == ("ensemble", "captured"), config
        for change in (
            lambda: None,
            lambda: http.put("/admin/partitions", json={"acme": 6, "globex": 2}),
            lambda: http.post("/v2/repository/models/first/load"),
            lambda: http.put("/admin/partitions", json={"acme": 2, "globex": 6}),
        ):
            answer = change()
            assert answer is None or answer.status_code == 200, answer.text
            for rows in (1, 2, 3, 5, 8, 13, 16):
                for tenant in ("acme", "globex"):
                    assert_right(http, rows, tenant)
        assert http.post("/v2/repository/models/second/unload").status_code == 200
        assert http.post("/v2/models/all/infer", json={"inputs": []}).status_code == 503
        assert http.post("/v2/repository/models/second/load").status_code == 200
        assert_right(http, 4, "acme")
