"""Attacks of a hostile tenant or of unauthenticated clients, a function each: the requests, and the expected answers.

All are clients that anybody could write.
"""

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx.parser
from onnx import numpy_helper

from greenlane.load.jobs import Ask, Behaviour, ClosedLoop
from greenlane.load.wire import post

ATTACKER, ATTACKER_KEY, ADMIN_KEY = "attacker", "key of the attacker", "key of the administrator"
MODELS = ("open", "expand", "texts", "repeat", "heavy", "spin", "fussy")
"""Of the attacker."""
FOREVER = 10**12
MIB = 1 << 20
BATCH = 64
"""Connections that are enough to keep a process busy."""
NOBODY = {"Authorization": "Bearer nothing"}
_HEAD = '<ir_version: 8, opset_import: ["": 17]>'
_GRAPHS = {
    "little": "little (float[n] x) => (float[n] y) { y = Neg(x) }",
    "open": "open (float[n] x) => (float[m] y) { y = Identity(x) }",
    "expand": "expand (float[1] x, int64[1] n) => (float[m] y) { y = Expand(x, n) }",
    "texts": "texts (string[n] x) => (string[n] y) { y = Identity(x) }",
    "repeat": "repeat (string[1] x, int64[1] n) => (string[m] y) { y = Expand(x, n) }",
    "heavy": "heavy (float[n, 1024] x) => (float[n, 1024] y) { a = MatMul(x, w0) y = MatMul(a, w1) }",
}


class Inquiry(NamedTuple):
    """A request, without whose it is."""

    path: str
    body: bytes
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Crowd:
    """Some connections that do the same.

    `expected` are statuses, one of which has to be among the answers; without any, nothing is answered, and all connections
    have to have been made.
    """

    asks: tuple[Ask, ...]
    connections: int
    expected: frozenset[int] = frozenset()
    behaviour: Behaviour = "flood"
    every: float = 0.0
    after: float = 0.0
    """Seconds after the others."""
    least: float = 0.0
    """Seconds that the attack takes at least: until the first answer, where that is long."""

    def job(self, name: str, port: int, ahead: float, seconds: float, cores: tuple[int, ...] | None) -> ClosedLoop:
        """The job of a load process."""
        return ClosedLoop(
            name=name,
            port=port,
            asks=self.asks,
            connections=self.connections,
            behaviour=self.behaviour,
            seconds=seconds,
            ahead=ahead - self.after,
            every=self.every,
            cores=cores,
        )

    def reached(self, statuses: Sequence[int], opened: int) -> bool:
        """Whether that did what it is about."""
        return bool(self.expected.intersection(statuses)) if self.expected else opened >= self.connections


def _of(ask: Inquiry, **headers: str) -> Ask:
    """A request of the attacker's."""
    given = {"Authorization": f"Bearer {ATTACKER_KEY}"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return Ask(post(ask.path, given | ask.headers, ask.body))


def _flood(ask: Ask, connections: int, *expected: int) -> tuple[Crowd, ...]:
    return (Crowd((ask,), connections, frozenset(expected)),)


def _large() -> Inquiry:
    """62 MB, and as much for its answer."""
    return infer("open", bytes(62_000_000), _input("x", "FP32", 15_500_000, 62_000_000))


def _texts(count: int) -> Inquiry:
    return infer("texts", b"\4\0\0\0text" * count, _input("x", "BYTES", count, 8 * count))


def _expand(model: str, datatype: str, count: int) -> Inquiry:
    data = ["x"] if datatype == "BYTES" else [1.0]
    one = {"name": "x", "datatype": datatype, "shape": [1], "data": data}
    return infer(model, b"", one, {"name": "n", "datatype": "INT64", "shape": [1], "data": [count]})


def _input(name: str, datatype: str, count: int, nbytes: int) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": [count], "parameters": {"binary_data_size": nbytes}}


def infer(model: str, binary: bytes, *inputs: Mapping[str, object]) -> Inquiry:
    """An inference with these inputs, whose data is in them or in `binary`, and with binary outputs."""
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return Inquiry(f"/v2/models/{model}/infer", head + binary, {"Inference-Header-Content-Length": str(len(head))})


def _little(values: int = 1, model: str = "open") -> Inquiry:
    one = {"name": "x", "datatype": "FP32", "shape": [values], "data": [1.0] * values}
    return infer(model, b"", one)


def _load(model: str, config: object) -> Ask:
    body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
    return _of(Inquiry(f"/v2/repository/models/{model}/load", body, {}))


def upgrade() -> tuple[Crowd, ...]:
    """Requests that offer an upgrade, whose bodies are inferences, and requests themselves."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2_Settings": ""}
    right = _of(_little(), **offer)
    smuggled = _of(Inquiry("/v2/models/open/infer", b"GET /v2/models/open HTTP/1.1\r\nHost: a\r\n\r\n", {}), **offer)
    return (Crowd((right, smuggled), 16, frozenset({200})),)


def unauthenticated_bodies() -> tuple[Crowd, ...]:
    """Bodies without a key that end one byte early, for the shared and the unauthenticated HTTP process."""
    index = post("/v2/repository/index", NOBODY, bytes(MIB))[:-1]
    plan = post("/admin/partitions", {"Authorization": "Bearer nothing"}, bytes(MIB))[:-1]
    return (Crowd((Ask(index), Ask(plan)), 200, frozenset({401, 404, 405}), "churn"),)


def tenants_bodies() -> tuple[Crowd, ...]:
    """30 bodies of the other tenant's of 60 MiB each, which end one byte early."""
    ask = _of(Inquiry("/v2/models/open/infer", bytes(60 * MIB), {}))
    return (Crowd((Ask(ask.data[:-1]),), 30),)


def gzip_bombs() -> tuple[Crowd, ...]:
    """62 KB that unpack to 62 MB, 12 at a time. They share the attacker's core, so the first is answered late."""
    whole = _large()
    bomb = _of(Inquiry(whole.path, gzip.compress(whole.body), whole.headers), Content_Encoding="gzip")
    return (Crowd((bomb,), 12, frozenset({200}), least=10.0),)


def large_bodies() -> tuple[Crowd, ...]:
    """62 MB in, and as much out, two at a time."""
    return _flood(_of(_large()), 2, 200)


def large_outputs() -> tuple[Crowd, ...]:
    """A request of 100 bytes for an output of 549 MiB."""
    return _flood(_of(_expand("expand", "FP32", 549 * MIB // 4)), 1, 200)


def texts_100000() -> tuple[Crowd, ...]:
    """100,000 texts again and again."""
    return _flood(_of(_texts(100_000)), 1, 200)


def texts_250000() -> tuple[Crowd, ...]:
    """250,000 texts again and again, which is nearly as many as one request may have."""
    return _flood(_of(_texts(250_000)), 1, 200)


def texts_1000000() -> tuple[Crowd, ...]:
    """A million texts again and again, which are refused."""
    return _flood(_of(_texts(1_000_000)), 2, 413)


def many_texts_out() -> tuple[Crowd, ...]:
    """A request of 100 bytes for a million texts."""
    return _flood(_of(_expand("repeat", "BYTES", 1_000_000)), 1, 200)


def large_configurations() -> tuple[Crowd, ...]:
    """Loads with a configuration of 1 MB, two such in turn, which are refused."""
    lists = [{"version_policy": {"specific": {"versions": list(range(at, at + 140_000))}}} for at in (100_001, 100_002)]
    return (Crowd(tuple(_load("open", each) for each in lists), 4, frozenset({400, 413})),)


def most_configurations() -> tuple[Crowd, ...]:
    """Loads with as much configuration as may be: versions, unknown keys, inputs and preferred sizes by the thousand."""
    versions = [{"version_policy": {"specific": {"versions": list(range(at, at + 1000))}}} for at in (2, 50_000)]
    unknown = {f"unknown_key_{number}": 1 for number in range(1000)}
    inputs = {"input": [{"name": f"x{number}", "data_type": "TYPE_FP32", "dims": [1]} for number in range(200)]}
    preferred = {"max_batch_size": 4, "dynamic_batching": {"preferred_batch_size": list(range(1000))}}
    every = tuple(_load("open", each) for each in (*versions, unknown, inputs, preferred))
    return (Crowd(every, 4, frozenset({400})),)


def heavy_loads() -> tuple[Crowd, ...]:
    """A model of 60 MB is loaded again and again."""
    return _flood(_of(Inquiry("/v2/repository/models/heavy/load", b"{}", {})), 1, 200)


def waiting_loads() -> tuple[Crowd, ...]:
    """Loads from 64 connections, of which all but a few are refused as too many."""
    return _flood(_of(Inquiry("/v2/repository/models/heavy/load", b"{}", {})), BATCH, 200, 429)


def empty_lines() -> tuple[Crowd, ...]:
    """64 connections whose first 17 KB begin with empty lines, or are nothing else, and nothing more comes."""
    return (Crowd((Ask(b"\r\n" + b"X" * 17_000), Ask(b"\r\n" * 8_500)), BATCH),)


def byte_at_a_time() -> tuple[Crowd, ...]:
    """Headers of 100 connections, a byte at a time, 10,000 bytes a second."""
    return (Crowd((_of(_little()),), 100, behaviour="drip", every=0.01),)


def slow_headers() -> tuple[Crowd, ...]:
    """2,000 connections that send a byte of their headers a second."""
    return (Crowd((_of(_little()),), 2000, behaviour="drip", every=1.0),)


def idle_connections() -> tuple[Crowd, ...]:
    """4,000 connections on which nothing is said."""
    return (Crowd((Ask(b""),), 4000),)


def empty_connections() -> tuple[Crowd, ...]:
    """4,000 connections a second that are closed as soon as they are there."""
    return (Crowd((), 16, behaviour="knock", every=0.004),)


def garbage() -> tuple[Crowd, ...]:
    """Connections that speak TLS, an older HTTP, or nothing known."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n"
    every = (hello, b"\0" * 500 + b"\r\n\r\n", b"GET /\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    return (Crowd(tuple(map(Ask, every)), 16, frozenset({400}), "churn"),)


def wrong_keys() -> tuple[Crowd, ...]:
    """Requests with keys of no tenant."""
    return _flood(Ask(post("/v2/models/open/infer", NOBODY, b"{}")), 16, 401)


def wrong_requests() -> tuple[Crowd, ...]:
    """Requests of the other tenant's that are refused: shapes, names, types, deep and broken JSON."""
    every = tuple(_of(Inquiry("/v2/models/open/infer", body, {})) for body in _wrong())
    return (Crowd(every, 16, frozenset({400})),)


def _wrong() -> list[bytes]:
    x = {"name": "x", "datatype": "FP32", "shape": [4], "data": [0.0] * 4}
    documents: list[object] = [{"inputs": [x | {"shape": [3]}]}, {"inputs": [x | {"datatype": "FP31"}]}, {"inputs": []}, []]
    documents += [{"inputs": [x | {"name": "z"}]}, {"inputs": [x | {"data": ["a"] * 4}]}]
    return [json.dumps(each).encode() for each in documents] + [b"{", b"[" * 20_000, b""]


def small_chunks() -> tuple[Crowd, ...]:
    """Bodies in 100,000 chunks of a byte each."""
    head = _of(Inquiry("/v2/models/open/infer", b"", {})).data.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return _flood(Ask(head + b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n"), 4, 400)


def failing_models() -> tuple[Crowd, ...]:
    """Inferences that the model fails in, 16 at a time."""
    return _flood(_of(_little(model="fussy")), 16, 500)


def full_queue() -> tuple[Crowd, ...]:
    """300 connections of the other tenant's that ask for as much as it is given."""
    return _flood(_of(_little()), 300, 200)


def slow_readers() -> tuple[Crowd, ...]:
    """100 connections that ask for 4 MB each and hardly read them."""
    one = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}
    count = {"name": "n", "datatype": "INT64", "shape": [1], "data": [MIB]}
    return (Crowd((_of(infer("expand", b"", one, count)),), 100, frozenset({200}), "slow"),)


def endless_inferences() -> tuple[Crowd, ...]:
    """Four inferences that do not end."""
    return (Crowd((endless(),), 4),)


def endless_and_repartition() -> tuple[Crowd, ...]:
    """An inference that does not end, while the administrator moves its tenant and the one that is timed, again and again."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    plans = ({"attacker": 5, "bystander": 2, "victim": 7}, {"attacker": 6, "bystander": 2, "victim": 8})
    puts = tuple(Ask(post("/admin/partitions", headers, json.dumps(plan).encode())) for plan in plans)
    puts = tuple(Ask(put.data.replace(b"POST", b"PUT", 1)) for put in puts)
    return (Crowd((endless(),), 1), Crowd(puts, 1, frozenset({200, 409})))


def endless() -> Ask:
    """A request whose inference does not end."""
    x = {"name": "x", "datatype": "FP32", "shape": [8, 8], "data": [0.1] * 64}
    turns = {"name": "turns", "datatype": "INT64", "shape": [], "data": [FOREVER]}
    return _of(infer("spin", b"", turns, x))


def write_models(root: Path) -> None:
    """Write the models of the attacker that need nothing of the tests, and the victim's, below `root`."""
    for name, graph in _GRAPHS.items():
        model = onnx.parser.parse_model(_HEAD + graph)
        if name == "heavy":
            for index, shape in enumerate([(1024, 7680), (7680, 1024)]):
                model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), f"w{index}"))
        path = root / name / "1" / "model.onnx"
        path.parent.mkdir(parents=True)
        path.write_bytes(model.SerializeToString())


ATTACKS: dict[str, Callable[[], tuple[Crowd, ...]]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        upgrade, unauthenticated_bodies, tenants_bodies, gzip_bombs, large_bodies, large_outputs, texts_100000, texts_250000,
        texts_1000000, many_texts_out, large_configurations, most_configurations, heavy_loads, waiting_loads, empty_lines,
        byte_at_a_time, slow_headers, idle_connections, empty_connections, garbage, wrong_keys, wrong_requests, small_chunks,
        failing_models, full_queue, slow_readers, endless_inferences, endless_and_repartition,
    )
}  # fmt: skip
DOOR = frozenset(
    {
        "empty-lines",
        "byte-at-a-time",
        "slow-headers",
        "idle-connections",
        "empty-connections",
        "garbage",
        "unauthenticated-bodies",
    }
)
"""Attacks on the process that accepts connections: the victim makes a new connection for each of its requests, too."""
MOVING = frozenset({"endless-and-repartition"})
"""Attacks that need more granules than two cores have."""
