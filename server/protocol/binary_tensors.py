"""Checks the elements of binary tensors, of those data types for which some bit patterns are not valid."""

import math
from collections import deque

import numpy as np

from engines import TensorSpec, wire

from ..errors import BadRequest
from .json_tensors import InputDeclaration


def needs_check(spec: TensorSpec) -> bool:
    """Whether some bit patterns are not valid for the data type, so that its contents have to be checked."""
    return spec.datatype.kind in ("bytes", "bool")


def checked(data: memoryview, declared: InputDeclaration) -> memoryview:
    """The binary data, with every element checked to be valid for the data type."""
    kind = declared.spec.datatype.kind
    if kind == "bytes":
        _check_elements(data, declared)
    elif kind == "bool" and len(data) and np.frombuffer(data, np.uint8).max() > 1:
        raise BadRequest(f"{declared}: bytes other than 0 and 1 in its binary data; expected one of them for each element")
    return data


def _check_elements(data: memoryview, declared: InputDeclaration) -> None:
    """Check the lengths that precede the elements of a BYTES tensor; the elements may be any bytes."""
    try:
        deque(wire.starts(data, math.prod(declared.shape)), maxlen=0)
    except ValueError as error:
        raise BadRequest(f"{declared}: {error}") from error
