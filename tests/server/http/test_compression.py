import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import BadRequest, QueueFull, TooLarge
from server.http import compression
from server.http.compression import choose, compress

LARGE = b"0123456789abcdef" * 40_000
"""More than is compressed on the event loop."""


async def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Without a limit on memory."""
    return await compression.decompress(body, encoding, limit, lambda _: None)


async def test_decompressed_bytes_are_counted_as_they_grow() -> None:
    asked: list[int] = []

    def grow(nbytes: int) -> None:
        asked.append(nbytes)
        if sum(asked) > 10 << 20:
            raise QueueFull("no more")

    bomb = await compress(b"\0" * (64 << 20), "gzip")
    with pytest.raises(QueueFull, match="no more"):
        await compression.decompress(bomb, "gzip", 64 << 20, grow)
    assert sum(asked) <= 11 << 20


async def test_deflate_is_the_zlib_format() -> None:
    assert await decompress(zlib.compress(b"abc"), "deflate", 3) == b"abc"
    bare = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    with pytest.raises(BadRequest, match=r"^Content-Encoding: deflate, but the body is not deflate: "):
        await decompress(bare.compress(b"abc") + bare.flush(), "deflate", 3)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("body", [b"abc", LARGE])
async def test_body_over_the_limit_is_too_large(body: bytes, encoding: str) -> None:
    packed = await compress(body, encoding)
    assert await decompress(packed, encoding, len(body)) == body
    with pytest.raises(
        TooLarge, match=rf"^the body unpacks to more than {len(body) - 1} bytes, which is the limit \(server.max_body\)$"
    ):
        await decompress(packed, encoding, len(body) - 1)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_decompression_bomb_is_refused_early(encoding: str) -> None:
    bomb = await compress(b"\0" * (64 << 20), encoding)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            await decompress(bomb, encoding, 1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(bomb)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_truncated_body_is_refused(encoding: str) -> None:
    packed = await compress(b"abcabc", encoding)
    for end in range(len(packed)):
        with pytest.raises(
            BadRequest, match=f"^Content-Encoding: {encoding}, but the body is not one complete {encoding} stream$"
        ):
            await decompress(packed[:end], encoding, 100)


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        ("", ""),
        ("gzip", "gzip"),
        ("GZIP", "gzip"),
        ("deflate", "deflate"),
        ("gzip, deflate, br", "gzip"),
        ("deflate,gzip", "gzip"),
        ("br, gzip;q=0.5", "gzip"),
        ("gzip;q=0.5, deflate;q=0.9", "deflate"),
        ("gzip ; q=0.5 , deflate ; q=0.4", "gzip"),
        ("deflate;q=0.001", "deflate"),
        ("gzip;Q=0.5", "gzip"),
        ("gzip;q=0", ""),
        ("gzip;q=0.000, deflate", "deflate"),
        ("gzip;q=0, *", ""),
        ("br", ""),
        ("*", ""),
        ("*;q=0", ""),
        ("identity", ""),
        ("identity;q=0", ""),
        ("identity, gzip;q=0.5", ""),
        ("identity;q=0.5, gzip", "gzip"),
        ("gzip, identity", "gzip"),
        ("gzip;q=high, deflate", "deflate"),
        ("gzip;q=nan, deflate", "deflate"),
        ("gzip;q=2", ""),
        ("gzip;q=-1", ""),
        ("gzip;", "gzip"),
        (",,", ""),
        ("not gzip", ""),
    ],
)
def test_encoding_with_the_highest_weight_is_chosen(accepted: str, chosen: str) -> None:
    assert choose(accepted) == chosen


@given(st.text())
def test_any_accept_encoding_gives_a_supported_encoding(accepted: str) -> None:
    assert choose(accepted) in ("gzip", "deflate", "")
