"""Good requests changed at random: each is refused or answered as the model answers, and the server serves on."""

import json
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .harness import Served
from .wire import SMALL, Answer, Connection, Document, post, posted, request, tensor

Arrays = dict[str, Any]

MODELS: dict[str, Callable[..., Arrays]] = {
    "identity": lambda x: {"y": x},
    "rows": lambda x: {"y": -x},
    "add": lambda a, b: {"sum": a + b, "difference": a - b},
    "text": lambda words: {"same": words},
}
TYPES = {"FP32": np.float32, "INT32": np.int32, "BYTES": object}
WRITTEN = {"FP32": {int, float}, "INT32": {int}, "BYTES": {str}}
TIMED = {"timeout": 60_000_000, "priority": 1, "note": "a:b"}
WANTED = [{"name": "difference", "parameters": {"binary_data": False}}, {"name": "sum"}]

JSON: list[tuple[str, Document]] = [
    ("identity", request(tensor("x", "FP32", [2, 2], [[1, 2.5], [-3, 4e9]], note=1), id="i", parameters=TIMED)),
    ("rows", request(tensor("x", "FP32", [1, 3], [1, 2, 3]), outputs=[{"name": "y", "parameters": {"binary_data": True}}])),
    ("add", request(tensor("a", "INT32", [2], [1, 2]), tensor("b", "INT32", [2], [-30, 2**31 - 1]), outputs=WANTED)),
    ("text", request(tensor("words", "BYTES", [3], ["", "grün", 'a"b:\0']), parameters={"binary_data_output": True})),
]
BINARY: list[tuple[str, Document, bytes]] = [
    ("identity", request(tensor("x", "FP32", [1, 2], binary_data_size=8), parameters=TIMED), b"\0\0\x80?\xff\xff\x7f\x7f"),
    ("rows", request(tensor("x", "FP32", [1, 3], binary_data_size=12), parameters={"binary_data_output": True}), bytes(12)),
    ("add", request(tensor("b", "INT32", [1], [7]), tensor("a", "INT32", [1], binary_data_size=4)), b"\1\0\0\0"),
    ("text", request(tensor("words", "BYTES", [2], binary_data_size=9), id="t"), b"\1\0\0\0w\0\0\0\0"),
]
VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        3,
        -1,
        1.0,
        0.5,
        1e39,
        2**31,
        2**40,
        2**63,
        2**64,
        "",
        "x",
        "y",
        "a",
        "b",
        "sum",
        "FP32",
        "INT32",
    ),
    *(
        "BYTES",
        "é\0",
        [],
        [1],
        [1, 2],
        [2, 2],
        [[1, 2], [3, 4]],
        [[]],
        [["a"]],
        [2**40, 0],
        [1] * 70,
        {},
        {"a": 1},
        {"name": "y"},
    ),
    *({"binary_data": True}, {"binary_data_size": 8}, {"binary_data_size": 0}, tensor("x", "FP32", [1], [1]), [{"name": "y"}]),
]
SCRAPS = [b"", b"\0", b"\xff", b"[", b"]", b"{", b"}", b":", b",", b'"', b"9", b"-", b".", b"e9", b"NaN", b"null", b"\\u0000"]


@st.composite
def documents(draw: st.DrawFn, document: Document) -> Document:
    """A document with up to three fields or elements replaced, dropped or doubled."""
    changed = deepcopy(document)
    for _ in range(draw(st.integers(0, 3))):
        parent: Any = changed
        while True:
            key = draw(st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent))))
            if not isinstance(parent[key], dict | list) or not parent[key] or draw(st.booleans()):
                break
            parent = parent[key]
        what = draw(st.sampled_from(["replace", "replace", "drop", "double"]))
        if what == "drop":
            del parent[key]
        elif what == "double" and isinstance(parent, list):
            parent.append(deepcopy(parent[key]))
        else:
            parent[key] = deepcopy(draw(st.sampled_from(VALUES)))  # The next change may be inside it.
        if not changed:
            break
    return changed


@st.composite
def scraped(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes with up to two short spans replaced."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(changed)))
        changed[at : at + draw(st.integers(0, 2))] = draw(st.sampled_from(SCRAPS))
    return bytes(changed)


def flat(data: Any) -> list[Any]:
    """The elements of nested lists."""
    return [element for part in data for element in flat(part)] if isinstance(data, list) else [data]


def split(data: bytes) -> list[bytes]:
    """The elements of a BYTES tensor."""
    elements = []
    while data:
        size = int.from_bytes(data[:4], "little")
        elements.append(data[4 : 4 + size])
        data = data[4 + size :]
    return elements


def array(entry: Document, data: bytes) -> Any:
    """A tensor as a client understands it, whether it stands in the JSON or behind it."""
    kind = entry["datatype"]
    if "data" in entry and entry["data"] is not None:
        values = flat(entry["data"])
        assert {type(value) for value in values} <= WRITTEN[kind]
        values = [text.encode() for text in values] if kind == "BYTES" else values
    else:
        values = split(data) if kind == "BYTES" else np.frombuffer(data, TYPES[kind])  # type: ignore[assignment]
    return np.array(values, TYPES[kind]).reshape(entry["shape"])


def arrays(entries: list[Document], data: bytes) -> Arrays:
    """Tensors by name; each that is binary has its bytes at the front of `data`, of which nothing is left."""
    found = {}
    for entry in entries:
        size = (entry.get("parameters") or {}).get("binary_data_size", 0)
        assert entry["name"] not in found
        found[entry["name"]] = array(entry, data[:size])
        data = data[size:]
    assert data == b""
    return found


def check(model: str, body: bytes, size: int | None, answer: Answer) -> None:
    """Compare an answer with what the model makes of this request."""
    head = len(body) if size is None else size
    document = json.loads(body[:head])
    with np.errstate(over="ignore"):
        expected = MODELS[model](**arrays(document["inputs"], body[head:]))
    head = int(answer.headers.get("inference-header-content-length", len(answer.body)))
    response = json.loads(answer.body[:head])
    given = arrays(response["outputs"], answer.body[head:])
    assert list(given) == ([entry["name"] for entry in document.get("outputs") or ()] or list(expected))
    assert response.get("id") == (document.get("id") or None)  # As in Triton, an empty one is none.
    for name, values in given.items():
        assert values.shape == expected[name].shape
        np.testing.assert_array_equal(values, expected[name])


class Target:
    """Sends requests to a server, one after another on one connection, and a good one after each."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.statuses: Counter[int] = Counter()

    def __repr__(self) -> str:
        return f"<Target {dict(self.statuses)}>"

    def send(self, model: str, body: bytes, size: int | None) -> None:
        headers = [] if size is None else [f"Inference-Header-Content-Length: {size}"]
        self.connection.send(post(f"/v2/models/{model}/infer", body, *headers))
        answer = self.connection.answer()
        self.statuses[answer.status] += 1
        assert answer.status in (200, 400, 504), answer
        if answer.status == 200:
            check(model, body, size, answer)
        else:
            assert list(answer.json) == ["error"]
        self.connection.send(posted("identity", SMALL))
        assert self.connection.answer().json["outputs"][0]["data"] == [1, 2]


EXAMPLES = 2 * settings.default.max_examples
"""At night it is ten times as many; they are the same in each run."""
bounded = settings(derandomize=True, max_examples=EXAMPLES, database=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(("model", "document"), JSON, ids=[model for model, _ in JSON])
def test_json_changed_at_random_is_refused_or_answered_rightly(served: Served, model: str, document: Document) -> None:
    @bounded
    @given(documents(document).map(lambda changed: json.dumps(changed).encode()) | scraped(json.dumps(document).encode()))
    def attack(body: bytes) -> None:
        target.send(model, body, None)

    with Connection(served) as connection:
        target = Target(connection)
        attack()
    assert min(target.statuses[200], target.statuses[400]) > EXAMPLES // 40, target


@pytest.mark.parametrize(("model", "document", "tensors"), BINARY, ids=[model for model, *_ in BINARY])
def test_binary_tensors_changed_at_random_are_refused_or_answered_rightly(
    served: Served, model: str, document: Document, tensors: bytes
) -> None:
    whole = json.dumps(document).encode()
    heads = st.just(whole) | documents(document).map(lambda changed: json.dumps(changed).encode()) | scraped(whole)

    @bounded
    @given(heads, st.just(tensors) | scraped(tensors), st.sampled_from([0, 0, 0, 0, 0, 0, 0, 0, 1, -1, 99]))
    def attack(head: bytes, rest: bytes, off: int) -> None:
        target.send(model, head + rest, max(0, len(head) + off))

    with Connection(served) as connection:
        target = Target(connection)
        attack()
    assert min(target.statuses[200], target.statuses[400]) > EXAMPLES // 40, target
