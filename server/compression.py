"""gzip and deflate, both ways, with a limit on what a body may unpack to."""

import asyncio
import zlib

from .errors import BadRequest, TooLarge, UnsupportedEncoding

_WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
WORTHWHILE = 1024
"""Bytes below which an answer is sent as it is."""
_ON_A_THREAD = 64 * 1024


async def unpack(body: bytes, encoding: str, limit: int) -> bytes:
    """Undo a Content-Encoding. Raises UnsupportedEncoding, BadRequest for broken data, TooLarge beyond `limit` bytes."""
    if encoding in ("", "identity"):
        return body
    if encoding not in _WINDOW:
        raise UnsupportedEncoding(f"Content-Encoding: {encoding[:40]!r}; expected gzip, deflate or identity")
    if len(body) > _ON_A_THREAD // 16:
        return await asyncio.to_thread(_inflate, body, encoding, limit)
    return _inflate(body, encoding, limit)


async def pack(body: bytes, encoding: str) -> bytes:
    """Apply a Content-Encoding that `choose` chose."""
    if len(body) > _ON_A_THREAD:
        return await asyncio.to_thread(_deflate, body, encoding)
    return _deflate(body, encoding)


def choose(accepted: str) -> str:
    """The encoding to answer with, from the value of Accept-Encoding: gzip, deflate or none, which is empty.

    The one that the client likes best, and of equals the first of these; what it does not name, such as under `*`, is
    not chosen. None is always possible, even where the client would rather not.
    """
    liked = dict(_offer(part) for part in accepted.split(","))
    best = max(("gzip", "deflate", "identity"), key=lambda name: liked.get(name, 0.0))
    return best if best != "identity" and liked.get(best, 0.0) > 0 else ""


def _offer(part: str) -> tuple[str, float]:
    name, _, rest = part.partition(";")
    try:
        weight = float(rest.partition("=")[2] or 1)
    except ValueError:
        weight = 0.0
    return name.strip().lower(), weight if 0 <= weight <= 1 else 0.0


def _inflate(body: bytes, encoding: str, limit: int) -> bytes:
    inflater = zlib.decompressobj(_WINDOW[encoding])
    try:
        data = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadRequest(f"the body is not {encoding}: {error}") from error
    if len(data) > limit:
        raise TooLarge(f"the body unpacks to more than {limit} bytes, which is the limit (server.max_body)")
    if not inflater.eof or inflater.unused_data:
        raise BadRequest(f"the body is not one whole {encoding} stream")
    return data


def _deflate(body: bytes, encoding: str) -> bytes:
    deflater = zlib.compressobj(1, zlib.DEFLATED, _WINDOW[encoding])
    return deflater.compress(body) + deflater.flush()
