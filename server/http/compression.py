"""Content-Encoding gzip and deflate for requests and answers, with a limit on the decompressed size of a body."""

import asyncio
import zlib
from collections.abc import Callable

from ..errors import BadRequest, TooLarge, UnsupportedEncoding
from .exchange import MAX_BODY

_WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
MIN_COMPRESSED_BYTES = 1024
"""Smaller answers are sent uncompressed."""
_THREAD_BYTES = 64 * 1024
"""Bytes that are processed on the event loop at most; more goes to a thread. Also the size of an input chunk."""
_STEP = 1 << 20
"""Bytes of output between two checks whether the tenant has memory for more."""


def encoding_of(value: str | bytes | None) -> str:
    """The Content-Encoding that a header's value names, "" for none. Raises UnsupportedEncoding."""
    encoding = (value.decode("latin-1") if isinstance(value, bytes) else value or "").lower()
    if encoding in ("", "identity"):
        return ""
    if encoding not in _WINDOW:
        raise UnsupportedEncoding(f"Content-Encoding: {encoding[:40]!r}; expected gzip, deflate or identity")
    return encoding


async def decompress(body: bytes, encoding: str, limit: int, grow: Callable[[int], None], where: str = MAX_BODY) -> bytes:
    """Undo a Content-Encoding, as `encoding_of` returns it. `grow` is called with the size of each decompressed chunk, and may
    raise. `where` ends the text on the limit.

    Raises what `grow` raises, BadRequest for broken data, TooLarge beyond `limit` bytes.
    """
    if not encoding:
        return body
    inflater = Inflater(body, encoding)
    size, chunks = 0, [inflater.step(_THREAD_BYTES)]
    while (size := size + len(chunks[-1])) <= limit and not inflater.ended:
        grow(len(chunks[-1]))
        chunks.append(await asyncio.to_thread(inflater.step, _STEP))
    if size > limit:
        raise TooLarge(f"the body unpacks to more than {limit} bytes, which is the limit {where}")
    inflater.check()
    return b"".join(chunks)


async def compress(body: bytes, encoding: str) -> bytes:
    """Apply a Content-Encoding returned by `choose`."""
    if len(body) > _THREAD_BYTES:
        return await asyncio.to_thread(_deflate, body, encoding)
    return _deflate(body, encoding)


def choose(accepted: str) -> str:
    """The encoding for the answer, from the value of Accept-Encoding: "gzip", "deflate", or "" for none.

    The highest weight wins, in this order where weights are equal. Only encodings that the client names are chosen: `*` is
    ignored. No encoding is always possible, even with `identity;q=0`.
    """
    weights = dict(_weight(item) for item in accepted.split(","))
    best = max(("gzip", "deflate", "identity"), key=lambda name: weights.get(name, 0.0))
    return best if best != "identity" and weights.get(best, 0.0) > 0 else ""


def _weight(item: str) -> tuple[str, float]:
    name, _, rest = item.partition(";")
    try:
        weight = float(rest.partition("=")[2] or 1)
    except ValueError:
        weight = 0.0
    return name.strip().lower(), weight if 0 <= weight <= 1 else 0.0


class Inflater:
    """Decompresses one body in steps."""

    def __init__(self, body: bytes, encoding: str) -> None:
        self._inflater = zlib.decompressobj(_WINDOW[encoding])
        self._encoding = encoding
        self._left = memoryview(body)

    @property
    def ended(self) -> bool:
        """Whether the end of the stream, or of the body, was reached."""
        return self._inflater.eof or not (self._left or self._inflater.unconsumed_tail)

    def step(self, nbytes: int) -> bytes:
        """About the next `nbytes` of output; blocks for a few milliseconds per MiB. Raises BadRequest for broken data."""
        chunks, size = [], 0
        while size < nbytes and not self.ended:
            data = self._inflater.unconsumed_tail or self._next()
            try:
                chunks.append(self._inflater.decompress(data, nbytes - size))
            except zlib.error as error:
                raise BadRequest(
                    f"Content-Encoding: {self._encoding}, but the body is not {self._encoding}: {error}"
                ) from error
            size += len(chunks[-1])
        return b"".join(chunks)

    def check(self) -> None:
        """Raise BadRequest if the body was not exactly one complete stream."""
        if not self._inflater.eof or self._inflater.unused_data or self._left:
            raise BadRequest(f"Content-Encoding: {self._encoding}, but the body is not one complete {self._encoding} stream")

    def _next(self) -> memoryview:
        chunk, self._left = self._left[:_THREAD_BYTES], self._left[_THREAD_BYTES:]
        return chunk


def _deflate(body: bytes, encoding: str) -> bytes:
    deflater = zlib.compressobj(1, zlib.DEFLATED, _WINDOW[encoding])
    return deflater.compress(body) + deflater.flush()
