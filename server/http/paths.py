"""The paths that decide how a connection or request is served before any handler sees it. Everything else is the framework's.

Paths are as they came, without the query; only the name of a model is percent-decoded.
"""

import re
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

import httptools

from ..errors import NotFound, WrongMethod
from ..protocol.json_document import short

_SHARED = (b"/admin", b"/metrics", b"/status/", b"/v2/logging", b"/v2/trace/")
_INFERENCES = ("/infer", "/generate", "/generate_stream")
_NO_CHAT = "no language models are served here; of OpenAI's API there are /v1/embeddings and /v1/models, and /v1/rerank"
_INSTEAD = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/chat"), _NO_CHAT),
    **dict.fromkeys(("/embed", "/v1/embed", "/v2/embed"), "texts go to POST /v1/embeddings"),
    **dict.fromkeys(("/health", "/healthz", "/ready", "/readyz", "/v2/health"), "ask GET /v2/health/ready or /v2/health/live"),
    **dict.fromkeys(("/v2/models", "/models", "/v2/repository"), "POST /v2/repository/index lists the models"),
    "/admin": "the status page is at /, and what there is to call at /admin/docs",
    "/v1": "GET /v1/models lists the models that take texts",
}
_TEXTS = ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank")
_PROTOCOL_V1 = re.compile(r"/v1/models/([^/]+)(?:/versions/([0-9]+))?:(?:predict|explain|classify|regress)")
"""KServe's and TensorFlow Serving's protocol v1, whose model is a decoded segment."""
_TENANTLESS = (b"/v2", b"/v2/", b"/docs", b"/openapi.json")


def is_infer(path: str) -> bool:
    """Whether this is a path for `Infer`, which refuses the malformed ones among them."""
    return path.endswith(_INFERENCES) and path.startswith("/v2/models/") and path.count("/") > 3


def is_generate(path: str) -> bool:
    """Whether a path for `Infer` is one of Triton's generate extension."""
    return path.endswith(_INFERENCES[1:])


def is_shared(path: bytes) -> bool:
    """Whether this path is answered by the shared HTTP process: administration, metrics, the status page, settings."""
    return path == b"/" or path.startswith(_SHARED)


def is_tenantless(path: bytes) -> bool:
    """Whether this path is answered without a tenant: health, the server's metadata, and the description of the API."""
    return path in _TENANTLESS or path.startswith(b"/v2/health/")


def nothing_at(path: str) -> NotFound:
    """The error for a path, which is decoded, that there is nothing at; with where to look, if it is known what is meant."""
    where = _INSTEAD.get(path.rstrip("/"), "")
    return NotFound(f"there is nothing at {path}{where and f'; {where}'}")


def is_text(path: str) -> bool:
    """Whether this is a path for texts that go through a model, and that is no inference by the protocol."""
    return path in _TEXTS


def in_v2(path: str) -> str | None:
    """The path for `Infer` in place of this one, which is decoded, if it is an inference of protocol v1; None if it is not."""
    if not (found := _PROTOCOL_V1.fullmatch(path)):
        return None
    name, version = found.groups()
    return f"/v2/models/{quote(name, safe='')}{f'/versions/{version}' if version else ''}/infer"


def parse_infer(method: str, path: bytes, query: bytes = b"") -> tuple[str, str | None]:
    """The model, and the version if there is one, of a path for `Infer`, or of its query. Raises NotFound, or WrongMethod."""
    segments = path.split(b"/")  # "", v2, models, NAME[, versions, V], and infer, generate or generate_stream
    versioned = len(segments) == 7 and segments[4] == b"versions" and segments[5].isdigit()
    if not versioned and len(segments) != 5:
        raise nothing_at(unquote(path.decode("latin-1")))
    if method != "POST":
        raise WrongMethod(method, "POST")
    name, version = segments[3].decode("latin-1"), segments[5].decode() if versioned else None
    if query and version is None:
        version = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True)).get("version")
        check_version(version)
    return unquote(name) if "%" in name else name, version


def check_version(version: str | None) -> None:
    """Raise NotFound for what is no version's number."""
    if version is not None and not (version.isascii() and version.isdigit()):
        raise NotFound(f"version {short(version)!r} is no number; expected digits")


def of_request_line(line: bytes) -> bytes:
    """The path in a request line, `METHOD TARGET VERSION`; empty if it is malformed."""
    words = line.split(b" ", 2)
    return split_target(words[1])[0] if len(words) == 3 else b""


def split_target(target: bytes) -> tuple[bytes, bytes]:
    """Path and query of a request target, which proxies may write as an absolute URI; no path if it is malformed.

    An absolute URI without a path has the path `/` (RFC 9112, 3.2.1).
    """
    if not target.startswith(b"/"):
        try:
            url: Any = httptools.parse_url(target)  # Which says that its parts are never None.
        except httptools.HttpParserInvalidURLError:
            return b"", b""
        return url.path or b"/", url.query or b""
    path, _, query = target.partition(b"?")
    return path, query
