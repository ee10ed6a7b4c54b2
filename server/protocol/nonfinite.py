"""NaN and infinity in JSON answers: they are not JSON numbers, and are written as Triton writes them, or as null."""

from itertools import chain, zip_longest
from typing import Any

import numpy as np
import orjson

Array = np.ndarray[Any, np.dtype[Any]]


def dump(array: Array, nonfinite: str) -> bytes:
    """A flat array as JSON. `nonfinite` is "null", or "literal" for `NaN`, `Infinity` and `-Infinity`.

    JavaScript's JSON.parse and strict parsers refuse the literals; Python and RapidJSON, which Triton uses, accept them.
    """
    text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)  # orjson writes null for NaN and infinity.
    if nonfinite == "null" or array.dtype.kind != "f" or (finite := np.isfinite(array)).all():
        return text
    literals = [b"NaN" if value != value else b"Infinity" if value > 0 else b"-Infinity" for value in array[~finite].tolist()]
    return b"".join(chain.from_iterable(zip_longest(text.split(b"null"), literals, fillvalue=b"")))
