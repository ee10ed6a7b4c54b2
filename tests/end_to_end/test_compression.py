"""gzip and deflate over HTTP: compressed requests, compressed answers, and invalid ones."""

import gzip
import json
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from .fixtures import served_with
from .harness import Served
from .wire import PATH, SMALL, Connection, binary, client, infer, parts, post, request, statistics, tensor

LIMIT = 2**16
PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
UNPACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.decompress, "deflate": zlib.decompress}
FLOATS = struct.pack("<2000f", *range(2000))
LARGE = request(tensor("x", "FP32", [2000, 1], binary_data_size=len(FLOATS)), parameters={"binary_data_output": True})

both = pytest.mark.parametrize("encoding", ["gzip", "deflate"])


narrow = served_with(max_body=LIMIT)
"""A server that takes bodies of 64 KiB."""


@pytest.fixture
def limited(narrow: Served) -> Iterator[httpx.Client]:
    with client(narrow) as http:
        yield http


def sent(http: httpx.Client, body: bytes, **headers: str) -> httpx.Response:
    """The answer to a body for `identity`; underscores in the names of headers are hyphens."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return http.post(PATH, content=body, headers=fields)


def check(answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["data"] == [1, 2]


@pytest.mark.parametrize("name", ["gzip", "x-gzip", "GZIP", "deflate", "Deflate"])
def test_compressed_request(http: httpx.Client, name: str) -> None:
    pack = gzip.compress if "gzip" in name.lower() else zlib.compress
    check(sent(http, pack(json.dumps(SMALL).encode()), content_encoding=name))


def test_identity_encoding_is_accepted(http: httpx.Client) -> None:
    check(sent(http, json.dumps(SMALL).encode(), content_encoding="identity"))


@both
def test_header_length_counts_uncompressed_json(http: httpx.Client, encoding: str) -> None:
    plain = binary(LARGE, FLOATS)
    fields = {**plain["headers"], "Content-Encoding": encoding}
    answer = http.post(PATH, content=PACK[encoding](plain["content"]), headers=fields)
    assert parts(answer)[1] == [FLOATS]


@both
def test_compressed_chunked_request(http: httpx.Client, encoding: str) -> None:
    packed = PACK[encoding](json.dumps(SMALL).encode())
    chunks = (packed[at : at + 1] for at in range(len(packed)))
    check(http.post(PATH, content=chunks, headers={"Content-Encoding": encoding}))


@both
def test_large_answer_is_compressed_as_requested(served: Served, encoding: str) -> None:
    plain = binary(LARGE, FLOATS)
    fields = [f"{name}: {value}" for name, value in plain["headers"].items()]
    with Connection(served) as connection:
        connection.send(post(PATH, plain["content"], *fields))
        before = connection.answer()
        connection.send(post(PATH, plain["content"], *fields, f"Accept-Encoding: {encoding}"))
        packed = connection.answer()
    assert before.headers["content-encoding"] is None
    assert (packed.headers["content-encoding"], packed.headers["vary"]) == (encoding, "accept-encoding")
    assert len(packed.body) < len(before.body)
    assert UNPACK[encoding](packed.body) == before.body
    for name in ("inference-header-content-length", "content-type"):
        assert packed.headers[name] == before.headers[name]


def test_large_json_answer_is_compressed(http: httpx.Client) -> None:
    numbers = [float(n) for n in range(2000)]
    answer = infer(http, "identity", request(tensor("x", "FP32", [1, 2000], numbers)), headers={"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.json()["outputs"][0]["data"] == numbers


def test_small_answers_and_errors_are_not_compressed(http: httpx.Client) -> None:
    for document, status in ((SMALL, 200), (request(), 400)):
        answer = infer(http, "identity", document, headers={"Accept-Encoding": "gzip, deflate"})
        assert answer.status_code == status
        assert "content-encoding" not in answer.headers


def test_body_that_decompresses_to_the_limit_is_accepted(limited: httpx.Client) -> None:
    check(sent(limited, gzip.compress(json.dumps(SMALL).encode().ljust(LIMIT)), content_encoding="gzip"))


@both
def test_decompression_bomb_is_413_and_executes_nothing(limited: httpx.Client, encoding: str) -> None:
    before = statistics(limited, "identity")["execution_count"]
    for size in (LIMIT + 1, LIMIT * 500):
        answer = sent(limited, PACK[encoding](json.dumps(SMALL).encode().ljust(size)), content_encoding=encoding)
        assert (answer.status_code, answer.json()["error"]) == (
            413,
            f"the body unpacks to more than {LIMIT} bytes, which is the limit (server.max_body)",
        )
    check(infer(limited, "identity", SMALL))
    assert statistics(limited, "identity")["execution_count"] == before + 1


@both
def test_too_large_compressed_body_is_413_without_decompression(limited: httpx.Client, encoding: str) -> None:
    answer = sent(limited, bytes(LIMIT + 1), content_encoding=encoding)
    assert (answer.status_code, answer.json()["error"]) == (
        413,
        f"a body of {LIMIT + 1} bytes; the limit is {LIMIT} (server.max_body)",
    )
    check(infer(limited, "identity", SMALL))


@both
@pytest.mark.parametrize("damage", ["cut", "nothing", "rubbish", "longer", "twice", "flipped"])
def test_a_damaged_body_is_400_and_executes_nothing(http: httpx.Client, encoding: str, damage: str) -> None:
    packed = PACK[encoding](json.dumps(SMALL).encode())
    body = {
        "cut": packed[:-1],
        "nothing": b"",
        "rubbish": json.dumps(SMALL).encode(),
        "longer": packed + b"x",
        "twice": packed + packed,
        "flipped": packed[:-1] + bytes([packed[-1] ^ 1]),
    }[damage]
    before = statistics(http, "identity")["execution_count"]
    answer = sent(http, body, content_encoding=encoding)
    assert answer.status_code == 400
    expected = encoding if damage in ("flipped", "rubbish") else f"one complete {encoding} stream"
    assert answer.json()["error"].startswith(f"Content-Encoding: {encoding}, but the body is not {expected}")
    check(infer(http, "identity", SMALL))
    assert statistics(http, "identity")["execution_count"] == before + 1


@pytest.mark.parametrize("name", ["br", "zstd", "gzip, gzip", "compress"])
def test_unsupported_encoding_is_415_with_the_supported_ones(http: httpx.Client, name: str) -> None:
    answer = sent(http, json.dumps(SMALL).encode(), content_encoding=name)
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "gzip, deflate"
    assert answer.json()["error"] == f"Content-Encoding: {name!r}; expected gzip, deflate or identity"
    check(infer(http, "identity", SMALL))


@both
def test_any_body_may_be_packed(http: httpx.Client, encoding: str) -> None:
    def index(body: bytes) -> httpx.Response:
        return http.post("/v2/repository/index", content=body, headers={"Content-Encoding": encoding})

    assert index(PACK[encoding](b'{"ready": 5}')).json() == {"error": "ready: 5 is an integer; expected true or false"}
    assert index(PACK[encoding](b'{"ready": true}')).json()
    broken, bomb = index(b'{"ready": true}'), index(PACK[encoding](b" " * ((1 << 20) + 1)))
    assert broken.json()["error"].startswith(f"Content-Encoding: {encoding}, but the body is not {encoding}")
    assert (broken.status_code, bomb.status_code) == (400, 413)
    assert bomb.json()["error"] == "the body unpacks to more than 1048576 bytes, which is the limit here"


NAMES = [None, "gzip", "deflate"]
X = np.arange(2000, dtype=np.float32).reshape(40, 50)


def given(binary: bool) -> list[triton.InferInput]:
    x = triton.InferInput("x", list(X.shape), "FP32")
    return [x.set_data_from_numpy(X, binary_data=binary)]


def options(packed: str | None, wanted: str | None, binary: bool) -> dict[str, Any]:
    outputs = [triton.InferRequestedOutput("y", binary_data=binary)]
    return {"outputs": outputs, "request_compression_algorithm": packed, "response_compression_algorithm": wanted}


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("wanted", NAMES)
@pytest.mark.parametrize("packed", NAMES)
def test_tritons_client_compresses(served: Served, packed: str | None, wanted: str | None, binary: bool) -> None:
    with triton.InferenceServerClient(served.address) as client:
        result = client.infer("identity", given(binary), **options(packed, wanted, binary))
        assert (result.as_numpy("y") == X).all()


@pytest.fixture
async def aio(served: Served) -> AsyncIterator[triton_aio.InferenceServerClient]:
    async with triton_aio.InferenceServerClient(served.address) as client:
        yield client


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("wanted", NAMES)
@pytest.mark.parametrize("packed", NAMES)
async def test_tritons_asynchronous_client_compresses(
    aio: triton_aio.InferenceServerClient, packed: str | None, wanted: str | None, binary: bool
) -> None:
    result = await aio.infer("identity", given(binary), **options(packed, wanted, binary))
    assert (result.as_numpy("y") == X).all()


def test_tritons_client_reads_the_refusal_of_a_compressed_request(narrow: Served) -> None:
    x = triton.InferInput("x", [LIMIT, 1], "FP32")
    x.set_data_from_numpy(np.zeros((LIMIT, 1), np.float32))
    with triton.InferenceServerClient(narrow.address) as client, pytest.raises(InferenceServerException) as raised:
        client.infer("identity", [x], request_compression_algorithm="gzip")
    assert str(raised.value) == f"[413] the body unpacks to more than {LIMIT} bytes, which is the limit (server.max_body)"
