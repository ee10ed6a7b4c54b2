"""Requests made from metadata: as a server reads them, and in every data type."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.datatypes import DATATYPES
from greenlane.prove.attacks import lacking, strains
from greenlane.prove.inputs import TEXT, Form, Input, Model, binary, described, encoded, padded, wrong
from partitions.strain import STRAINS

MIXED = Model("a b/c", (Input("x", "FP32", (-1, 3, -1)), Input("names", "BYTES", (-1, 1)), Input("n", "INT64", (-1, 1))), 8)
HEADERS = {"X-Tenant": "acme"}


def parted(data: bytes) -> tuple[str, dict[str, str], bytes]:
    """The request line, the headers, and the body."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return first, dict(line.split(": ", 1) for line in lines), body


def test_only_cores_have_no_pcie_to_strain() -> None:
    """Whatever another vendor's GPU counts its share in."""
    assert strains("CU") == strains("SM") != strains("core")
    assert {"PCIe in", "PCIe out"} == set(strains("SM")) - set(strains("core"))
    assert lacking(("L2", "PCIe in")) == "cores cannot strain PCIe in"
    assert lacking(("L2",)) == lacking(STRAINS) == ""


@given(st.integers(1, 8), st.integers(1, 16), st.integers(0, 1))
def test_a_binary_request_says_how_long_its_tensors_are(rows: int, free: int, number: int) -> None:
    first, headers, body = parted(binary(MIXED, Form(rows, free, number), HEADERS).data)
    assert first == "POST /v2/models/a%20b%2Fc/infer HTTP/1.1"
    assert headers["X-Tenant"] == "acme"
    assert int(headers["Content-Length"]) == len(body)
    length = int(headers["Inference-Header-Content-Length"])
    entries = json.loads(body[:length])["inputs"]
    assert [entry["shape"] for entry in entries] == [[rows, 3, free], [rows, 1], [rows, 1]]
    assert sum(entry["parameters"]["binary_data_size"] for entry in entries) == len(body) - length
    assert MIXED.nbytes(Form(rows, free, number)) == len(body) - length


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_has_elements(datatype: str) -> None:
    data, kind = encoded(datatype, 5, 1), DATATYPES[datatype]
    assert len(data) == 5 * (kind.size or len(TEXT) + 4)
    if kind.kind == "float" and datatype != "BF16":
        assert np.isfinite(np.frombuffer(data, kind.numpy)).all()
    if kind.kind in ("int", "uint"):
        assert set(np.frombuffer(data, kind.numpy).tolist()) == {1}


def test_bfloat16_is_between_0_and_1() -> None:
    halves = np.frombuffer(encoded("BF16", 100, 1), "<u2").astype("<u4") << 16
    values = halves.view("<f4")
    assert (values >= 0).all()
    assert (values < 1).all()


def test_a_padded_request_is_valid_json_of_that_size() -> None:
    _, headers, body = parted(padded(MIXED, Form(2, 4), HEADERS, 10_000).data)
    assert len(body) == 10_000 == int(headers["Content-Length"])
    entries = json.loads(body)["inputs"]
    assert [len(entry["data"]) == math.prod(entry["shape"]) for entry in entries] == [True] * 3


def test_wrong_requests_differ() -> None:
    asks = wrong(MIXED, HEADERS)
    assert len({ask.data for ask in asks}) == len(asks) >= 5
    assert wrong(Model("none", ()), HEADERS)


def test_a_model_is_read_from_its_metadata_and_an_unknown_datatype_is_named() -> None:
    metadata = {"inputs": [{"name": "x", "datatype": "FP8", "shape": [-1, 2]}]}
    model = described("m", metadata, {"max_batch_size": 4})
    assert model == Model("m", (Input("x", "FP8", (-1, 2)),), 4)
    assert not model.varies
    assert "FP8" in model.unknown()
    assert not MIXED.unknown()
    assert MIXED.varies
