"""Requests down to their bytes, and what every form of the server answers to them (`test_golden.py`).

A row is a name, the bytes that a client sends, and the answers, in their order.
"""

import gzip
from typing import NamedTuple

from .wire import BODY, PATH, chunked, get, post

RIGHT = '"data":[1.0,2.0]'
"""A part of the answer to `SMALL`."""
NO_HTTP = "the request is not HTTP: Invalid HTTP request received."


class Answer(NamedTuple):
    """A status and, of an error, its whole text; of another answer, something that its body contains.

    `field` is a header that it has, in lower case; `bare` is whether it has no body, though a length.
    """

    status: int
    text: str = ""
    field: str = ""
    bare: bool = False


class Row(NamedTuple):
    """A connection: the pieces sent, each after the server has read the one before, and the expected answers.

    `ends`: whether the server closes the connection after the last answer; if not, it answers one more request on it.
    `keys` is whether the server's tenants have keys, and web pages of APP may call it; `shuts` is whether the client says,
    once all is sent, that it is.
    """

    sent: tuple[bytes, ...]
    answers: tuple[Answer, ...]
    ends: bool = False
    keys: bool = False
    shuts: bool = False


OK = Answer(200, RIGHT)
EMPTY = Answer(400, "the request body is empty; expected an object")
INNER = b"GET /admin/partitions HTTP/1.1\r\nHost: y\r\n\r\n"
"""An admin request, if it were parsed as a request."""


def infer(*headers: str, body: bytes = BODY) -> bytes:
    """The bytes of an inference."""
    return post(PATH, body, *headers)


def offer(protocol: str) -> tuple[str, str]:
    """The headers of a client that offers another protocol."""
    return f"Upgrade: {protocol}", "Connection: Upgrade"


def no_json(at: int) -> Answer:
    """The answer to a body that is INNER from this byte on."""
    return Answer(
        400, f"the request body is not JSON: unexpected character, expected a JSON value: GET /admin/parti... at byte {at}"
    )


def split(data: bytes, at: bytes = b"\r\n\r\n") -> tuple[bytes, ...]:
    """The head, and the body a moment later."""
    head, end, body = data.partition(at)
    return head + end, body


CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
JAVA = ("Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA", "Upgrade: h2c")

UPGRADE = {
    "Java's client, HTTP/2 offered": Row((infer(*JAVA),), (OK,)),
    "Java's client, the body after the head": Row(split(infer(*JAVA)), (OK,)),
    "an offer and nothing behind it": Row((get("/v2", *JAVA),), (Answer(200, "greenlane"),)),
    "WebSockets offered": Row(split(infer(*offer("websocket"))), (OK,)),
    "anything offered": Row(split(infer(*offer("x"))), (OK,)),
    "an offer that is not for this connection": Row((infer("Upgrade: h2c"),), (OK,)),
    "an offer with a body in chunks": Row(split(chunked(BODY, headers=JAVA)), (OK,)),
    "an offer and 100 expected": Row(split(infer(*JAVA, "Expect: 100-continue")), (Answer(100), OK)),
    "an offer by a client that closes": Row(
        (infer("Connection: close", "Upgrade: h2c", "Connection: upgrade"),), (OK,), ends=True
    ),
    "a request as the body of one that offers": Row(split(infer(*JAVA, body=INNER)), (no_json(0),)),
    "the same in one piece": Row((infer(*JAVA, body=INNER),), (no_json(0),)),
    "the same behind much white space": Row((infer(*JAVA, body=b"\r\n" * 100_000 + INNER),), (no_json(200_000),)),
    "a request behind one that offers": Row((infer(*JAVA) + infer(),), (OK, OK)),
    "two offers and a request between": Row((infer(*JAVA) + infer() + infer(*JAVA),), (OK, OK, OK)),
}
"""Offers to upgrade, which are ignored: the body still belongs to its request."""


def twice(field: str, count: int = 2) -> Answer:
    """The answer to a request that repeats a single-valued header."""
    return Answer(400, f"{field}: given {count} times; expected once", "connection: close")


BASIC = "Authorization: Basic dXNlcjpwdw=="
TENANT = {
    "two tenants": Row((infer("X-Tenant: acme", "X-Tenant: globex"),), (twice("X-Tenant"),), ends=True),
    "the same tenant twice": Row((infer("X-Tenant: acme", "x-tenant: acme"),), (twice("X-Tenant"),), ends=True),
    "no tenant and a tenant": Row((infer("X-Tenant:", "X-Tenant: acme"),), (twice("X-Tenant"),), ends=True),
    "two tenants for metadata": Row(
        (get("/v2/models/identity", "X-Tenant: acme", "X-Tenant: globex"),), (twice("X-Tenant"),), ends=True
    ),
    "two tenants after one": Row((infer() + infer("X-Tenant: acme", "X-Tenant: globex"),), (OK, twice("X-Tenant")), ends=True),
    "two tenants, and a body that is still to come": Row(
        (split(infer("X-Tenant: acme", "X-Tenant: globex"))[0],), (twice("X-Tenant"),), ends=True
    ),
    "two keys": Row(
        (infer("Authorization: Bearer secret", "Authorization: Bearer wrong"),), (twice("Authorization"),), ends=True, keys=True
    ),
    "two keys for administration": Row(
        (get("/admin/tenants", "Authorization: Bearer a", "Authorization: Bearer b"),), (twice("Authorization"),), ends=True
    ),
    "two lengths of the JSON": Row(
        (infer("Inference-Header-Content-Length: 4", f"Inference-Header-Content-Length: {len(BODY)}"),),
        (twice("Inference-Header-Content-Length"),),
        ends=True,
    ),
    "a field that may stand twice": Row((infer("X-Forwarded-For: a", "X-Forwarded-For: b"),), (OK,)),
    "a tenant and blanks": Row((infer("X-Tenant: \t acme \t "),), (OK,)),
    "a length of the JSON and a blank": Row((infer(f"Inference-Header-Content-Length: {len(BODY)} "),), (OK,)),
    "a length of the JSON and a tab, in chunks": Row(
        (chunked(BODY, headers=[f"Inference-Header-Content-Length: {len(BODY)}\t"]),), (OK,)
    ),
    "a proxy's user where no tenant has keys": Row((infer(BASIC),), (OK,)),
    "a mesh's token where no tenant has keys": Row((infer("Authorization: Bearer eyJhbGciOiJub25lIn0.e30."),), (OK,)),
    "a proxy's user and a tenant": Row((infer(BASIC, "X-Tenant: acme"),), (OK,)),
    "a proxy's user and no such tenant": Row(
        (infer(BASIC, "X-Tenant: nobody"),), (Answer(401, "X-Tenant: there is no tenant 'nobody'"),)
    ),
    "a proxy's user where tenants have keys": Row(
        (infer(BASIC),), (Answer(401, "Authorization: expected 'Bearer KEY'", "www-authenticate: bearer"),), keys=True
    ),
    "a key of no tenant": Row(
        (infer("Authorization: Bearer wrong"),), (Answer(401, "Authorization: no tenant has this key"),), keys=True
    ),
    "a key and a blank": Row((infer("Authorization: Bearer secret "),), (OK,), keys=True),
}
"""Which tenant a request is for."""


def line(version: str, *headers: str, target: str = PATH) -> bytes:
    """The bytes of an inference with another version, and with these headers alone."""
    lines = [f"POST {target} HTTP/{version}", f"Content-Length: {len(BODY)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + BODY


def coded(coding: str, version: str = "1.1") -> bytes:
    """The bytes of an inference in chunks, with this for its Transfer-Encoding."""
    return f"POST {PATH} HTTP/{version}\r\nHost: test\r\nTransfer-Encoding: {coding}\r\n\r\n".encode() + CHUNKED


def no_coding(coding: str) -> Answer:
    """The answer to that request."""
    return Answer(501, f"Transfer-Encoding: '{coding}'; expected 'chunked' alone")


DAMAGED = Answer(400, NO_HTTP, "connection: close")
KEPT = Answer(200, RIGHT, "connection: keep-alive")
FRAGMENT = "the path has a fragment, '#frag'; a '#' in a name is written %23"
A_HOST = "expected a name or an address, [in brackets] if it has colons, and then perhaps ':' and a port"
STRICT = {
    "no host": Row((line("1.1"),), (Answer(400, "Host: missing; expected once, as HTTP/1.1 requires"),), ends=True),
    "two hosts": Row(
        (line("1.1", "Host: a", "Host: b"),),
        (Answer(400, "Host: given 2 times; expected once, as HTTP/1.1 requires"),),
        ends=True,
    ),
    "a host with a blank": Row(
        (line("1.1", "Host: a b"),), (Answer(400, f"Host: 'a b'; {A_HOST}", "connection: close"),), ends=True
    ),
    "a wrong host between two requests": Row(
        (infer() + line("1.1", "Host: a\\b") + infer(),), (OK, Answer(400, f"Host: 'a\\\\b'; {A_HOST}")), ends=True
    ),
    "a wrong host of HTTP/1.0 that keeps": Row(
        (line("1.0", "Connection: keep-alive", "Host: a b"),), (Answer(400, f"Host: 'a b'; {A_HOST}"),), ends=True
    ),
    "a wrong host and a whole address": Row(
        (line("1.1", "Host: a b", target=f"http://test{PATH}"),), (Answer(400, f"Host: 'a b'; {A_HOST}"),), ends=True
    ),
    "a long host": Row((line("1.1", f"Host: {'a' * 99} b"),), (Answer(400, f"Host: '{'a' * 40}'...; {A_HOST}"),), ends=True),
    "hosts that are right": Row((line("1.1", "Host:"), line("1.1", "Host: a_b:"), line("1.1", "Host: [::1]:80")), (OK, OK, OK)),
    "a whole address of another host": Row((line("1.1", "Host: a", target=f"http://b:80{PATH}"),), (OK,)),
    "whole addresses without a host": Row((line("1.1", "Host: a", target=f"http://:80{PATH}"),), (DAMAGED,), ends=True),
    "a port beyond 65535": Row((line("1.1", "Host: a", target=f"http://a:99999{PATH}"),), (DAMAGED,), ends=True),
    "no host, and a body that comes later": Row(
        split(line("1.1")), (Answer(400, "Host: missing; expected once, as HTTP/1.1 requires"),), ends=True
    ),
    "HTTP/2.0": Row((line("2.0", "Host: a"),), (Answer(505, "HTTP/2.0: expected HTTP/1.1 or HTTP/1.0"),), ends=True),
    "HTTP/0.9": Row((line("0.9", "Host: a"),), (Answer(505, "HTTP/0.9: expected HTTP/1.1 or HTTP/1.0"),), ends=True),
    "HTTP/3.1": Row((line("3.1", "Host: a"),), (DAMAGED,), ends=True),
    "the preface of HTTP/2": Row((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",), (DAMAGED,), ends=True),
    "HTTP/1.0": Row((line("1.0"),), (OK,), ends=True),
    "HTTP/1.0 that keeps": Row((line("1.0", "Connection: Keep-Alive") * 2,), (KEPT, KEPT)),
    "HTTP/1.0 that keeps, compressed": Row((line("1.0", "Connection: keep-alive", "Accept-Encoding: identity"),), (KEPT,)),
    "HTTP/1.0 that keeps, metadata": Row(
        (b"GET /v2 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",), (Answer(200, "greenlane", "connection: keep-alive"),)
    ),
    "HTTP/1.0 that keeps and expects": Row((line("1.0", "Connection: keep-alive", "Expect: x"),), (KEPT,)),
    "HTTP/1.0 has no 100": Row((line("1.0", "Connection: keep-alive", "Expect: 100-continue"),), (KEPT,)),
    "empty lines": Row((b"\r\n", b"\r\n" + infer() + b"\r", b"\n", infer()), (OK, OK)),
    "every path": Row((get("*").replace(b"GET", b"OPTIONS") + infer(),), (Answer(404, "there is nothing at /*"), OK)),
    "chunks": Row((coded("chunked"),), (OK,)),
    "chunks, written otherwise": Row((coded("Chunked "),), (OK,)),
    "chunks of HTTP/1.0": Row(
        (coded("chunked", "1.0"),),
        (Answer(400, "Transfer-Encoding: given with HTTP/1.0, which has none; expected Content-Length"),),
        ends=True,
    ),
    "gzip and chunks": Row((coded("gzip, chunked"),), (no_coding("gzip, chunked"),), ends=True),
    "gzip": Row((coded("gzip"),), (no_coding("gzip"),), ends=True),
    "identity": Row((coded("identity"),), (no_coding("identity"),), ends=True),
    "chunks and a length": Row((infer("Transfer-Encoding: chunked"),), (DAMAGED,), ends=True),
    "two lengths": Row((infer("Content-Length: 1"),), (DAMAGED,), ends=True),
    "lines that end in LF alone": Row((get("/v2").replace(b"\r\n", b"\n"),), (DAMAGED,), ends=True),
    "an empty line that ends in LF alone": Row((get("/v2")[:-2] + b"\n",), (DAMAGED,), ends=True),
    "LF alone, after a request": Row((infer() + get("/v2").replace(b"\r\n", b"\n"),), (OK, DAMAGED), ends=True),
    "LF alone behind the first line": Row((infer().replace(b"HTTP/1.1\r\n", b"HTTP/1.1\n"),), (DAMAGED,), ends=True),
    "CR alone": Row((infer("X: a\rb"),), (DAMAGED,), ends=True),
    "a folded header": Row((infer("X: a\r\n b"),), (DAMAGED,), ends=True),
    "no version": Row((b"GET v2\r\n\r\n",), (DAMAGED,), ends=True),
    "TLS": Row((b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",), (DAMAGED,), ends=True),
    "no colon": Row((get("/v2", "no colon"),), (DAMAGED,), ends=True),
    "NUL in a header": Row((get("/v2", "X: a\0b"),), (DAMAGED,), ends=True),
    "a negative length": Row((post(PATH, BODY, length=-1),), (DAMAGED,), ends=True),
    "a length of 31 digits": Row((post(PATH, BODY, length=10**30),), (DAMAGED,), ends=True),
    "a chunk of no size": Row((chunked(end=b"zz\r\n"),), (DAMAGED,), ends=True),
    "a chunk of a negative size": Row((chunked(BODY, end=b"-1\r\n"),), (DAMAGED,), ends=True),
    "a chunk of more than 64 bits": Row((chunked(end=b"f" * 17 + b"\r\n"),), (DAMAGED,), ends=True),
    "no method": Row((b"hello\r\n\r\n",), (DAMAGED,), ends=True),
    "a blank before the colon": Row((infer("X-Tenant : acme"),), (DAMAGED,), ends=True),
    "a fragment": Row((get("/v2/models/identity#frag"),), (Answer(400, FRAGMENT),), ends=True),
    "a fragment of an inference": Row((line("1.1", "Host: a", target=f"{PATH}#frag"),), (Answer(400, FRAGMENT),), ends=True),
    "a whole address": Row((get("http://test/v2/models/identity/ready"),), (Answer(200, "identity"),)),
    "a whole address without a path": Row(
        (get("http://test") + get("http://test?a=b"),), (Answer(200, "<title>Greenlane</title>"),) * 2
    ),
    "too many headers": Row(
        (b"GET /v2 HTTP/1.1\r\nHost: a\r\nX: ", *[b"a" * 8192] * 9),
        (Answer(431, "more than 65536 bytes of headers, which is the limit", "connection: close"),),
        ends=True,
    ),
}
"""Requests that two HTTP readers could read differently, refused with the same text by both forms."""

MANY, GENERATE = 2 << 20, 1 << 20
INDEX = "/v2/repository/index"
TOO_MUCH = Answer(413, "a body of more than 1048576 bytes, which is the limit here", "connection: close")
NO_POST = Answer(405, "POST is not possible here; use GET, HEAD", "connection: close")
EARLY = {
    "100 expected for too much": Row((post(INDEX, b"", "Expect: 100-continue", length=MANY),), (TOO_MUCH,), ends=True),
    "100 expected for a wrong method": Row((post("/v2", b"", "Expect: 100-continue", length=5),), (NO_POST,), ends=True),
    "100 expected for no path": Row(
        (post("/v2/nothing", b"", "Expect: 100-continue", length=5),),
        (Answer(404, "there is nothing at /v2/nothing", "connection: close"),),
        ends=True,
    ),
    "too much": Row((post(INDEX, b"", length=MANY), b" " * 1000), (TOO_MUCH,), ends=True),
    "a wrong method and much": Row((post("/v2", b"", length=MANY), b" " * 1000), (NO_POST,), ends=True),
    "a wrong method and chunks": Row((chunked(b"{}", path="/v2", end=b""), b"0\r\n"), (NO_POST,), ends=True),
    "a wrong method and much, of HTTP/1.0 that keeps": Row(
        (post("/v2", b"", "Connection: keep-alive", length=MANY).replace(b"HTTP/1.1", b"HTTP/1.0"),), (NO_POST,), ends=True
    ),
    "too much for generate, in chunks": Row(
        (chunked(b" " * (GENERATE + 1), path=f"{PATH[:-6]}/generate", end=b""),),
        (Answer(413, "a body of more than 1048576 bytes, which is the limit for generate", "connection: close"),),
        ends=True,
    ),
    "too much for generate, packed": Row(
        (post(f"{PATH[:-6]}/generate", gzip.compress(b" " * MANY), "Content-Encoding: gzip"),),
        (Answer(413, "the body unpacks to more than 1048576 bytes, which is the limit for generate"),),
    ),
    "a wrong method and a body that is late": Row(
        (post("/v2", b"", length=5), b"ab", b"cde"), (NO_POST._replace(field="allow: get, head"),)
    ),
}
"""Answers that come before a body, of which then much or an unknown part is still to come: so the connection is closed."""


def head(path: str) -> bytes:
    """The bytes of a HEAD."""
    return get(path).replace(b"GET", b"HEAD")


NOTHING = Answer(200, "", bare=True)
GLANCE = {
    "HEAD of liveness": Row((head("/v2/health/live"),), (NOTHING,)),
    "HEAD of readiness": Row((head("/v2/health/ready"),), (NOTHING,)),
    "HEAD of a model's readiness": Row((head("/v2/models/identity/ready"),), (NOTHING,)),
    "HEAD of the server": Row((head("/v2"),), (NOTHING,)),
    "the server, with a slash": Row((get("/v2/"),), (Answer(200, '"name":"greenlane"'),)),
    "the status page": Row((get("/"),), (Answer(200, "<title>Greenlane</title>", "content-type: text/html; charset=utf-8"),)),
    "the description, for tools": Row(
        (get("/openapi.json"),), (Answer(200, '"openapi":"3.', "content-type: application/json"),)
    ),
    "the description, for people": Row(
        (get("/docs"),), (Answer(200, "<h1>Greenlane ", "content-type: text/html; charset=utf-8"),)
    ),
    "the description, without a key": Row((get("/openapi.json") + get("/docs"),), (Answer(200, "tenantKey"),) * 2, keys=True),
    "a client that says it has said all": Row((get("/v2"),), (Answer(200, "greenlane"),), ends=True, shuts=True),
    "two requests, and that was all": Row((get("/v2") * 2,), (Answer(200, "greenlane"),) * 2, ends=True, shuts=True),
    "a request, half of another, and that was all": Row(
        (get("/v2") + get("/v2")[:9],), (Answer(200, "greenlane"),), ends=True, shuts=True
    ),
    "protocol v1 of KServe": Row(
        (post("/v1/models/identity:predict", b'{"instances": [[1.0]]}'),),
        (Answer(404, "this is KServe's protocol v1, which the server does not speak; use v2: POST /v2/models/identity/infer"),),
    ),
    "one slash more": Row((get("/v2/models/identity/"),), (Answer(404, "there is nothing at /v2/models/identity/"),)),
}
"""Requests of load balancers, browsers and people."""

APP = "https://app.example"


def options(path: str, *headers: str) -> bytes:
    """The bytes of an OPTIONS."""
    return get(path, *headers).replace(b"GET", b"OPTIONS", 1)


def preflight(path: str = PATH, origin: str = APP, field: str = "X-Tenant") -> bytes:
    """A CORS preflight request for a POST with this header."""
    return options(path, f"Origin: {origin}", "Access-Control-Request-Method: POST", f"Access-Control-Request-Headers: {field}")


ALLOWED = f"access-control-allow-origin: {APP}"
PAGE = infer("Authorization: Bearer secret", f"Origin: {APP}")
PAGES = {
    "a page's question where no pages may": Row((preflight(),), (Answer(405, "OPTIONS is not possible here; use POST"),)),
    "a page's question": Row((preflight(),), (Answer(200, "OK", ALLOWED),), keys=True),
    "a page's question and what it asked for": Row(
        (preflight() + PAGE,), (Answer(200, "OK", ALLOWED), OK._replace(field=ALLOWED)), keys=True
    ),
    "a page's question, and then what it asked for twice": Row(
        (preflight(), PAGE + PAGE), (Answer(200, "OK", ALLOWED), *[OK._replace(field=ALLOWED)] * 2), keys=True
    ),
    "a page that asks for metadata": Row(
        (get("/v2/models/identity", "Authorization: Bearer secret", f"Origin: {APP}"),),
        (Answer(200, "identity", ALLOWED),),
        keys=True,
    ),
    "a page that can read why not": Row(
        (infer(f"Origin: {APP}"),),
        (Answer(401, "tenant 'acme' needs its key: send Authorization: Bearer KEY", ALLOWED),),
        keys=True,
    ),
    "a page's questions about texts": Row(
        (preflight("/v1/embeddings") + preflight("/rerank") + preflight("/v1/models"),),
        (Answer(200, "OK", ALLOWED),) * 3,
        keys=True,
    ),
    "a page that lists models of texts": Row(
        (get("/v1/models", "Authorization: Bearer secret", f"Origin: {APP}"),), (Answer(200, "list", ALLOWED),), keys=True
    ),
    "a page's questions about what it may never read": Row(
        (preflight("/metrics"), preflight("/")),
        (Answer(405, "OPTIONS is not possible here; use GET"), Answer(405, "OPTIONS is not possible here; use GET, HEAD")),
        keys=True,
    ),
    "a page's question about load": Row(
        (preflight("/v2/repository/models/identity/load"),),
        (Answer(405, "OPTIONS is not possible here; use POST"),),
        keys=True,
    ),
    "a question of another origin": Row(
        (preflight(origin="https://other.example"),),
        (Answer(405, "OPTIONS is not possible here; use POST"),),
        keys=True,
    ),
}
"""Pages of other origins, which browsers ask for."""


def shown(reason: str) -> Answer:
    """The answer to an admin request without an admin key that does not come from a program on this machine."""
    return Answer(401, f"without server.admin_key_sha256 the admin API {reason}", "www-authenticate: bearer")


def by_proxy(field: str) -> Answer:
    """The answer to a proxy that adds this header."""
    return shown(f"does not answer through a proxy ({field})")


UNLOAD = "/v2/repository/models/identity/unload"
WITHOUT = "without a key of its tenant's a model is not loaded or unloaded"
FOREIGN = shown("answers under this machine's names and server.allowed_hosts only (Host: evil.example)")
ADMIN = {
    "administration through a proxy that says for whom": Row(
        (get("/admin/tenants", "X-Forwarded-For: 1.2.3.4"),), (by_proxy("x-forwarded-for"),)
    ),
    "administration through a proxy for this machine": Row(
        (get("/admin/tenants", "X-Forwarded-For: 127.0.0.1"),), (by_proxy("x-forwarded-for"),)
    ),
    "administration through a proxy that says who it is": Row((get("/metrics", "Via: 1.1 a"),), (by_proxy("via"),)),
    "administration by a page": Row(
        (get("/admin/partitions", "Sec-Fetch-Site: cross-site"),),
        (shown("does not answer to web pages (Sec-Fetch-Site: cross-site)"),),
    ),
    "administration under a foreign name": Row((b"GET /admin/partitions HTTP/1.1\r\nHost: evil.example\r\n\r\n",), (FOREIGN,)),
    "metrics under a foreign name": Row((b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n",), (FOREIGN,)),
    "a page that unloads a model": Row(
        (post(UNLOAD, b"", "Origin: http://evil.example"),),
        (Answer(401, f"{WITHOUT} by web pages (Origin: http://evil.example)", "www-authenticate: bearer"),),
    ),
    "a proxy that unloads a model": Row(
        (post(UNLOAD, b"", "X-Forwarded-For: 1.2.3.4"),),
        (
            Answer(
                401,
                f"{WITHOUT} through a proxy (x-forwarded-for), unless there is a server.admin_key_sha256",
                "www-authenticate: bearer",
            ),
        ),
    ),
    "a GET that would run the probe": Row(
        (get("/admin/partitions?probe=1"),),
        (Answer(405, "GET with 'probe' is not possible here; use POST /admin/partitions/probe", "allow: post"),),
    ),
}
"""Who may administer a server without an admin key. What uvicorn takes for the client's address is the proxy's word."""

GOLDEN = UPGRADE | TENANT | STRICT | EARLY | GLANCE | PAGES | ADMIN
