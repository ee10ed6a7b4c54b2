"""A request body, split into its JSON and the binary tensors after it, which may not have arrived yet."""

from typing import Any, NamedTuple

from ..errors import BadRequest, TooLarge
from .json_document import Object, count

Buffer = Any
"""bytes, a memoryview, a contiguous numpy array, or `Awaited`."""


class Awaited(NamedTuple):
    """Binary data that has not arrived: where it begins in the body, and its size in bytes."""

    start: int
    nbytes: int


class SplitBody:
    """A request body of `length` bytes split into its JSON document, of `start` bytes, and the binary tensors after it.

    `binary` is None if they have not arrived yet.
    """

    def __init__(self, document: Object, binary: memoryview | None, start: int, length: int, is_all_json: bool = False) -> None:
        self.document = document
        self.binary = binary
        self.start = start
        self.length = length
        self.is_all_json = is_all_json
        self.taken = 0
        self.texts = 0

    @property
    def left(self) -> int:
        """Bytes of binary data that no input has taken."""
        return self.length - self.start - self.taken

    def count_texts(self, elements: int, where: str, limit: int) -> None:
        """Count the elements of a BYTES input; `where` is its JSON path. Raises TooLarge beyond the limit of the request."""
        self.texts += elements
        if self.texts > limit:
            text = f"{where}shape: {self.texts} elements of BYTES in one request"
            raise TooLarge(f"{text}; the limit is {limit} (server.max_string_elements)")

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
