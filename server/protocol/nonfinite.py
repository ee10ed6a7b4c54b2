"""NaN and infinity in answers: JSON has no number for them, so they are written as Triton writes them, or as null."""

from itertools import chain, zip_longest
from typing import Any

import numpy as np
import orjson

Array = np.ndarray[Any, np.dtype[Any]]


def dump(array: Array, nonfinite: str) -> bytes:
    """A flat array as JSON; what is no finite number is "null", or with "literal" `NaN`, `Infinity` or `-Infinity`.

    JavaScript's JSON.parse and strict parsers refuse such words, Python's and RapidJSON, which Triton uses, take them.
    """
    text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)  # It writes null.
    if nonfinite == "null" or array.dtype.kind != "f" or (finite := np.isfinite(array)).all():
        return text
    words = [b"NaN" if value != value else b"Infinity" if value > 0 else b"-Infinity" for value in array[~finite].tolist()]
    return b"".join(chain.from_iterable(zip_longest(text.split(b"null"), words, fillvalue=b"")))
