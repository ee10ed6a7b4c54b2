"""Request bodies over real sockets: their memory, their time limits, and what abandoned ones leave behind."""

import gc
import gzip
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from server.config.tenant import TenantConfig
from server.host.malloc import SPARE
from server.tenants import uploads as uploads_module
from server.tenants.auth import digest
from server.tenants.uploads import Uploads

from .fixtures import served_with
from .harness import Served, configuration, serving
from .processes import configure, running, tenant
from .virtual import VirtualDevice
from .wire import SMALL, Connection, post, posted, until

MIB = 1 << 20
PATH = "/v2/models/identity/infer"
INDEX = "/v2/repository/index"


served = served_with()


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector: objects are freed only by their last reference."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def traced() -> Iterator[None]:
    """Measure the memory of Python objects."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def in_chunks(nbytes: int) -> bytes:
    """The head of a request in chunks, and the first of them."""
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (
        PATH.encode(),
        nbytes,
        bytes(nbytes),
    )


JSON_LENGTH = "Inference-Header-Content-Length"
TENSORS = f"{JSON_LENGTH}: 2"
"""For a body that is not all JSON, which has a limit of its own."""
GIVEN_UP = {
    "an inference": post(PATH, bytes(4 * MIB), TENSORS, length=5 * MIB),
    "a packed one": post(PATH, bytes(4 * MIB), "Content-Encoding: gzip", length=5 * MIB),
    "one in chunks": in_chunks(4 * MIB),
    "anything else": post(INDEX, bytes(MIB - 1), length=MIB),
}


@pytest.mark.parametrize("data", GIVEN_UP.values(), ids=GIVEN_UP.keys())
def test_abandoned_body_leaves_nothing_behind(served: Served, data: bytes) -> None:
    with Connection(served) as connection:
        connection.send(post(INDEX, b"{}"))  # FastAPI builds its routes at the first request: 0.6 MiB that stay.
        assert connection.answer().status == 200
    with traced(), uncollected():
        before = tracemalloc.get_traced_memory()[0]

        def taken() -> int:
            return tracemalloc.get_traced_memory()[0] - before

        for _ in range(3):
            with ExitStack() as stack:
                for _ in range(3):
                    stack.enter_context(Connection(served)).send(data)
                until(lambda: taken() > 2 * len(data))
            until(lambda: taken() < len(data) // 2)


REFUSED = {
    "a tenant that does not exist": (post(INDEX, b"{", "X-Tenant: nobody", length=1000), 401),
    "a load without a tenant": (post("/v2/repository/models/identity/load", b"{", "X-Tenant: nobody", length=1000), 401),
    "an inference without a tenant": (post(PATH, b"{", "X-Tenant: nobody", length=1000), 401),
    "a packed one": (post(PATH, b"x", "X-Tenant: nobody", "Content-Encoding: gzip", length=1000), 401),
    "one in chunks": (in_chunks(10).replace(b"Host: localhost", b"Host: localhost\r\nX-Tenant: nobody"), 401),
    "administration through a proxy": (post("/admin/drain", b"{", "Forwarded: for=1.2.3.4", length=1000), 401),
    "a plan through a proxy": (b"PUT" + post("/admin/partitions", b"{", "Forwarded: for=1.2.3.4", length=1000)[4:], 401),
    "an unknown path": (post("/v2/nothing", b"{", length=1000), 404),
    "an unknown model": (post("/v2/models/nothing/infer", b"{", length=1000), 404),
    "an unknown model, packed": (post("/v2/models/nothing/infer", b"x", "Content-Encoding: gzip", length=1000), 404),
    "another method": (post("/v2/health/live", b"{", length=1000), 405),
    "JSON over its limit": (post(PATH, b"{", length=2 * MIB), 413),
    "JSON over its limit, and tensors": (post(PATH, b"{", f"{JSON_LENGTH}: {2 * MIB}", length=3 * MIB), 413),
    "a length of JSON over the body's": (post(PATH, b"{", f"{JSON_LENGTH}: 1001", length=1000), 400),
    "a length of JSON that is none": (post(PATH, b"{", f"{JSON_LENGTH}: -1", length=1000), 400),
    "another encoding": (post(PATH, b"{", "Content-Encoding: br", length=1000), 415),
    "generate with it": (post("/v2/models/identity/generate", b"{", "Content-Encoding: br", length=1000), 415),
    "the index with it": (post(INDEX, b"{", "Content-Encoding: br", length=1000), 415),
    "the index with too much": (post(INDEX, b"{", length=2 * MIB), 413),
    "texts that are too many": (post("/v1/embeddings", b"{", "Expect: 100-continue", length=2 * MIB), 413),
    "too many of another encoding": (post(PATH, b"{", "Content-Encoding: br", "Expect: 100-continue", length=1000), 415),
}


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED.keys())
def test_errors_in_headers_are_answered_before_the_body(served: Served, data: bytes, status: int) -> None:
    with Connection(served) as connection:
        connection.send(data)
        answer = connection.answer()
        assert answer.status == status
        assert answer.json["error"]


MEMORY = 16 * MIB
KEY = "Authorization: Bearer globex-key"


@pytest.fixture(scope="module", params=[False, True], ids=["asgi", "direct"])
def small(standard: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Two tenants, each with 16 MiB for incomplete bodies."""
    acme = TenantConfig(name="acme", granules=1, models=("*",), memory=MEMORY)
    globex = TenantConfig(name="globex", granules=1, models=("*",), memory=MEMORY, keys_sha256=(digest("globex-key"),))
    with serving(configuration(standard, acme, globex), VirtualDevice(2), direct=request.param) as served:
        yield served


def uploads(served: Served, tenant: str = "acme") -> Uploads:
    return served.service.tenants[tenant].uploads


def idle(counted: Uploads) -> bool:
    return repr(counted).startswith("<Uploads 0 on their way, 0 of")


PLAIN, PACKED = (post(PATH, b"{", *fields, length=6 * MIB) for fields in ([TENSORS], ["Content-Encoding: gzip"]))


@pytest.mark.parametrize("data", [PLAIN, PACKED, in_chunks(6 * MIB)], ids=["plain", "packed", "in chunks"])
def test_bodies_beyond_the_tenants_memory_are_429(small: Served, data: bytes) -> None:
    with ExitStack() as stack:
        for count in (1, 2):
            stack.enter_context(Connection(small)).send(data)
            until(lambda count=count: f", {6 * count * MIB} of {MEMORY} bytes" in repr(uploads(small)))  # type: ignore[misc]
        third = stack.enter_context(Connection(small))
        third.send(data)
        refused = third.answer()
        assert refused.status == 429
        assert f"together they may have {MEMORY} (tenants.acme.memory)" in refused.json["error"]
        with Connection(small) as other:
            other.send(posted("identity", SMALL))
            assert other.answer().status == 200, "what comes in one piece waits for nothing"
            other.send(posted("identity", SMALL, KEY))
            assert other.answer().status == 200
            other.send(PLAIN.replace(b"Host: localhost", f"Host: localhost\r\n{KEY}".encode()))
            until(lambda: ", 6291456 of" in repr(uploads(small, "globex")))
    until(lambda: idle(uploads(small)) and idle(uploads(small, "globex")))


def test_decompressed_bodies_count_against_memory(small: Served) -> None:
    bomb = gzip.compress(bytes(14 * MIB))
    with Connection(small) as first, Connection(small) as second:
        first.send(PLAIN)
        until(lambda: f", {6 * MIB} of" in repr(uploads(small)))
        second.send(post(PATH, bomb, "Content-Encoding: gzip"))
        refused = second.answer()
        assert refused.status == 429
        assert f"while {6 * MIB} bytes of others are on their way" in refused.json["error"]
    until(lambda: idle(uploads(small)))
    with Connection(small) as alone:
        alone.send(post(PATH, bomb, "Content-Encoding: gzip"))
        assert alone.answer().status == 413, "it is larger than JSON may be, but it was unpacked"
    assert idle(uploads(small))


def test_admin_bodies_have_their_own_memory(small: Served) -> None:
    plan = b"PUT" + post("/admin/partitions", b"{", length=MIB)[4:]
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(Connection(small)).send(plan)
        until(lambda: repr(small.service.uploads) == f"<Uploads 4 on their way, {4 * MIB} of {4 * MIB} bytes>")
        with Connection(small) as fifth:
            fifth.send(plan)
            assert fifth.answer().status == 503
            fifth.send(b" " * (MIB - 1))
            fifth.send(b"GET /admin/partitions HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert fifth.answer().status == 200
    until(lambda: idle(small.service.uploads))


@pytest.mark.parametrize(
    "data", [PLAIN, PACKED, in_chunks(10), post(INDEX, b"{", length=100)], ids=["plain", "packed", "in chunks", "not inference"]
)
def test_stalled_body_times_out(small: Served, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads_module, "GRACE", 0.05)
    monkeypatch.setattr(uploads_module, "CHECK_INTERVAL", 0.05)
    with Connection(small) as connection:
        connection.send(data)
        answer = connection.answer()
        assert answer.status == 408
        assert "expected 16384 a second" in answer.json["error"]
        assert answer.headers.get_all("connection") == ["close"]
    assert idle(uploads(small))


def test_idle_http_process_returns_memory(standard: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    def own() -> int:
        _, resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[:3])
        return (resident - shared) * 4096

    config = configure(tmp_path_factory.mktemp("served") / "c.toml", standard, tenant(), default_tenant='"acme"')
    with running(config) as server:
        pid = server.pid("acme")
        before = own()
        with ExitStack() as stack:
            uploaded = [stack.enter_context(Connection(server)) for _ in range(20)]
            for each in uploaded:
                each.send(post(PATH, bytes(10 * MIB), TENSORS, length=11 * MIB))
            until(lambda: own() > before + 180 * MIB)
        until(lambda: own() < before + SPARE + 16 * MIB)
