"""A request body, split into its JSON and the binary tensors after it, which may not have arrived yet, and are checked."""

import math
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from engines import TensorSpec, wire

from ..errors import BadRequest, TooLarge
from .json_document import Object, count, unsigned
from .json_tensors import InputDeclaration, from_json

Buffer = Any
"""bytes, a memoryview, a contiguous numpy array, or `Awaited`."""


class Awaited(NamedTuple):
    """Binary data that has not arrived: where it begins in the body, and its size in bytes."""

    start: int
    nbytes: int


class RequestBody:
    """A request as a document, as its JSON form has it, and where the data of its inputs is."""

    def __init__(self, document: Object) -> None:
        self.document = document
        self.texts = 0

    def count_texts(self, elements: int, where: str, limit: int) -> None:
        """Count the elements of a BYTES input; `where` is its path. Raises TooLarge beyond the limit of the request."""
        self.texts += elements
        if self.texts > limit:
            text = f"{where}shape: {self.texts} elements of BYTES in one request"
            raise TooLarge(f"{text}; the limit is {limit} (server.max_string_elements)")

    def data(self, entry: Object, values: Object, declared: InputDeclaration) -> Buffer:
        """The data of an input, checked unless it is awaited; `values` are the parameters of its entry. Raises BadRequest."""
        raise NotImplementedError

    def finish(self) -> None:
        """Raise BadRequest if there is data of no input."""


class SplitBody(RequestBody):
    """A request body of `length` bytes split into its JSON document, of `start` bytes, and the binary tensors after it.

    `binary` is None if they have not arrived yet.
    """

    def __init__(self, document: Object, binary: memoryview | None, start: int, length: int, is_all_json: bool = False) -> None:
        super().__init__(document)
        self.binary = binary
        self.start = start
        self.length = length
        self.is_all_json = is_all_json
        self.taken = 0

    def data(self, entry: Object, values: Object, declared: InputDeclaration) -> Buffer:
        where, spec = declared.where, declared.spec
        size = unsigned(values, "binary_data_size", f"{where}parameters.") if values else None
        if (size is None) == (entry.get("data") is None):
            how = "missing; expected an array, or" if size is None else "given; expected either this or"
            raise BadRequest(f"{where}data: {how} parameters.binary_data_size")
        if size is None:
            return from_json(entry, declared)
        if spec.datatype.size and size != (expected := spec.nbytes(declared.shape)):
            raise BadRequest(f"{declared}: parameters.binary_data_size is {size}; the shape asks for {expected}")
        data = self.take(size, where)
        return data if self.binary is None else checked(data, declared)

    def finish(self) -> None:
        if left := self.left:
            more = count(left, "byte")
            raise BadRequest(f"the body has {more} more than its JSON and parameters.binary_data_size of its inputs say")

    @property
    def left(self) -> int:
        """Bytes of binary data that no input has taken."""
        return self.length - self.start - self.taken

    def take(self, size: int, where: str) -> Buffer:
        """The next `size` bytes of binary data; `where` is the JSON path of their input."""
        if (left := self.left) < size:
            why = ", which without the header Inference-Header-Content-Length is all JSON" if self.is_all_json else ""
            came = f"{where}parameters.binary_data_size: {size}"
            raise BadRequest(f"{came}, but {count(left, 'byte')} of the body remain{why}")
        self.taken += size
        if self.binary is None:
            return Awaited(self.start + self.taken - size, size)
        return self.binary[self.taken - size : self.taken]


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
