"""gzip and deflate, both ways, with a limit on what a body may unpack to."""

import asyncio
import zlib
from collections.abc import Callable

from ..errors import BadRequest, TooLarge, UnsupportedEncoding

_WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
WORTHWHILE = 1024
"""Bytes below which an answer is sent as it is."""
_ON_A_THREAD = 64 * 1024
_STEP = 1 << 20
"""Bytes that are unpacked before it is asked whether there is memory for more."""


async def unpack(body: bytes, encoding: str, limit: int, swell: Callable[[int], None]) -> bytes:
    """Undo a Content-Encoding; `swell` is told of the bytes that it unpacks to before each is taken, and may raise.

    Raises UnsupportedEncoding, BadRequest for broken data, TooLarge beyond `limit` bytes.
    """
    if encoding in ("", "identity"):
        return body
    if encoding not in _WINDOW:
        raise UnsupportedEncoding(f"Content-Encoding: {encoding[:40]!r}; expected gzip, deflate or identity")
    inflater = Inflater(body, encoding)
    size, parts = 0, [inflater.step(_ON_A_THREAD)]
    while (size := size + len(parts[-1])) <= limit and not inflater.over:
        swell(len(parts[-1]))
        parts.append(await asyncio.to_thread(inflater.step, _STEP))
    if size > limit:
        raise TooLarge(f"the body unpacks to more than {limit} bytes, which is the limit (server.max_body)")
    inflater.check()
    return b"".join(parts)


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


class Inflater:
    """Unpacks one body, some of it at a time."""

    def __init__(self, body: bytes, encoding: str) -> None:
        self._inflater = zlib.decompressobj(_WINDOW[encoding])
        self._encoding = encoding
        self._left = memoryview(body)

    def __repr__(self) -> str:
        return f"<Inflater of {self._encoding}, {len(self._left)} bytes left>"

    @property
    def over(self) -> bool:
        """Whether nothing more comes."""
        return self._inflater.eof or not (self._left or self._inflater.unconsumed_tail)

    def step(self, nbytes: int) -> bytes:
        """The next bytes, up to about so many; blocks for a few milliseconds a mebibyte. Raises BadRequest."""
        parts, size = [], 0
        while size < nbytes and not self.over:
            packed = self._inflater.unconsumed_tail or self._next()
            try:
                parts.append(self._inflater.decompress(packed, nbytes - size))
            except zlib.error as error:
                raise BadRequest(
                    f"Content-Encoding: {self._encoding}, but the body is not {self._encoding}: {error}"
                ) from error
            size += len(parts[-1])
        return b"".join(parts)

    def check(self) -> None:
        """Raise BadRequest if what came was less, or more, than it says of itself."""
        if not self._inflater.eof or self._inflater.unused_data or self._left:
            raise BadRequest(f"Content-Encoding: {self._encoding}, but the body is not one whole {self._encoding} stream")

    def _next(self) -> memoryview:
        found, self._left = self._left[:_ON_A_THREAD], self._left[_ON_A_THREAD:]
        return found


def _deflate(body: bytes, encoding: str) -> bytes:
    deflater = zlib.compressobj(1, zlib.DEFLATED, _WINDOW[encoding])
    return deflater.compress(body) + deflater.flush()
