"""Decodes repeated requests without parsing their JSON again, and encodes repeated answers without writing theirs.

A client that sends binary tensors sends the same JSON with every request. Checking that JSON takes most of the time of
decoding a small request, and the result depends on nothing but its bytes and the model. So the result is cached per model, by
the exact bytes of the JSON.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engines import Memo, Signature

from ..errors import TooLarge
from ..link.blocks import block_size
from ..link.messages import Extent, Shape
from ..link.slots import Slot
from .json_document import Object, parse
from .request import InferRequest, Limits, Placement, decode, place
from .response import InferResponse, Written, encode
from .time_slices import TimeSlices

_MAX_ENTRIES = 64
_RESERVE_FRACTION = 8
"""One in so many of a tenant's bytes may be reserved at most for the outputs of one request whose size is not known."""
MAX_JSON_BYTES = 4096
"""Longer JSON is not cached, and its tensors are not received straight into a slot."""


@dataclass(frozen=True, slots=True)
class CachedRequest:
    """A decoded request of binary tensors only, and where they belong. It applies to bodies of exactly `length` bytes.

    `capacity` is how many bytes the slot needs.
    """

    placement: Placement
    length: int
    capacity: int

    def write(self, body: bytes, slot: Slot, output_reserve: int = 0) -> None:
        """Write the tensors of such a body where `Slot.lay_out` would put them. Raises TooLarge, MemoryFull."""
        slot.reserve(self.capacity, output_reserve)
        source = memoryview(body)
        for offset, start, size in self.placement.places:
            slot.view[offset : offset + size] = source[start : start + size]


LastAnswer = tuple[InferRequest, Sequence[Extent], bytes, list[Extent]]
"""The last encoded request, the extents of all outputs, the JSON of its answer, and the extents of the requested outputs."""


class RequestCache:
    """Decodes the requests and encodes the answers of one model, with a cache of 64 requests. Not thread-safe.

    A request with an id is not cached, because its JSON hardly ever comes again. Large JSON is parsed in `time_slices`.

    Each request gets memory for its outputs too; `output_reserve` bytes of it are for outputs whose size does not follow from
    the shapes, as many as were needed before: see `reserve_more`.
    """

    def __init__(self) -> None:
        self.time_slices = TimeSlices()
        self.output_reserve = 0
        self._cached: Memo[bytes, CachedRequest] = Memo(_MAX_ENTRIES)
        self._last: LastAnswer | None = None

    def __repr__(self) -> str:
        return f"<RequestCache {len(self._cached)}>"

    def decode(
        self,
        body: bytes,
        header_length: int | None,
        signature: Signature,
        slot: Slot,
        limits: Limits,
        document: Object | None = None,
    ) -> InferRequest:
        """As `server.protocol.request.decode`, from the cache if possible."""
        if not header_length or header_length > MAX_JSON_BYTES:
            return decode(body, header_length, signature, slot, limits, document, self.output_reserve)
        head = body[:header_length]
        cached = self._cached.get(head)
        if cached and cached.length == len(body) and len(head) == header_length:
            cached.write(body, slot, self.output_reserve)
            return cached.placement.request
        request = decode(body, header_length, signature, slot, limits, None, self.output_reserve)
        if cached is None and request.id is None and _needs_no_check(signature):
            self._add(head, len(body), request, signature, slot)
        return request

    def place(self, head: bytes, length: int, signature: Signature, slot: Slot, limits: Limits) -> Placement | None:
        """As `server.protocol.request.place`, from the cache if possible."""
        if len(head) > MAX_JSON_BYTES:
            return None
        cached = self._cached.get(head)
        if cached and cached.length == length:
            slot.reserve(cached.capacity, self.output_reserve, False)
            return cached.placement
        placement = place(head, length, signature, slot, limits, self.output_reserve)
        if placement and head and cached is None and placement.request.id is None and _needs_no_check(signature):
            self._add(head, length, placement.request, signature, slot)
        return placement

    def reserve_more(self, slot: Slot, signature: Signature, shapes: tuple[Shape, ...], nbytes: int) -> None:
        """An answer needs so many bytes of its slot, which was known only after the model had run: take them, and have the next
        requests reserve as much. Raises TooLarge or MemoryFull.

        The slot has inputs of these shapes, as `signature` lays them out.
        """
        if nbytes <= slot.capacity:
            raise TooLarge(f"the answer needs at least {nbytes} bytes of memory, which is more than its model may take")
        assert slot.blocks
        _, room = slot.inputs(signature, shapes, slot.capacity)
        needed, most = nbytes - (room.address - slot.address), slot.blocks.nbytes // _RESERVE_FRACTION
        self.output_reserve = max(self.output_reserve, block_size(min(needed, most)))
        slot.reserve(nbytes)

    def encode(
        self,
        name: str,
        version: str,
        request: InferRequest,
        signature: Signature,
        slot: Slot,
        extents: Sequence[Extent],
        written: Written | None = None,
        nonfinite: str = "literal",
    ) -> InferResponse:
        """As `server.protocol.response.encode`, reusing the last JSON if possible: with binary outputs it depends only on their
        shapes and sizes.
        """
        last = self._last
        if last and last[0] is request:
            requested = last[3] if last[1] == extents else _moved(last, extents)
            if requested is not None:
                tensors = [slot.view[offset : offset + nbytes] for _, offset, nbytes in requested]
                return InferResponse(last[2], tensors, len(last[2]))
        response = encode(name, version, request, signature, slot, extents, written, nonfinite)
        plain = request.id is None and not request.classified
        if response.header_length is not None and plain and all(binary for _, binary, _ in request.outputs):
            self._last = request, extents, response.document, [extents[position] for position, _, _ in request.outputs]
        return response

    def _add(self, head: bytes, length: int, request: InferRequest, signature: Signature, slot: Slot) -> None:
        entries = parse(head)["inputs"]
        if len(entries) == len(signature.inputs) and all(entry.get("data") is None for entry in entries):
            self._cached.remember(head, _cached_request(entries, len(head), length, request, signature, slot))


def _moved(last: LastAnswer, extents: Sequence[Extent]) -> list[Extent] | None:
    """The requested outputs, if all differ from the last ones only in their offsets, as the rows of a batch do; else None."""
    request, before, _, _ = last
    for (shape, _, nbytes), (other, _, size) in zip(before, extents, strict=True):
        if nbytes != size or shape != other:
            return None
    return [extents[position] for position, _, _ in request.outputs]


def _needs_no_check(signature: Signature) -> bool:
    """Whether all inputs have data types for which every bit pattern is valid, so that only the JSON needs checking."""
    return all(spec.datatype.kind not in ("bytes", "bool") for spec in signature.inputs)


def _cached_request(
    entries: list[Object], start: int, length: int, request: InferRequest, signature: Signature, slot: Slot
) -> CachedRequest:
    """The cache entry for these inputs, all of them binary, whose data starts at `start` in the body."""
    tensors, room = slot.inputs(signature, request.shapes, slot.capacity)
    by_name = {spec.name: tensor for spec, tensor in zip(signature.inputs, tensors, strict=True)}
    places = []
    for entry in entries:
        tensor = by_name[entry["name"]]
        places.append((tensor.address - slot.address, start, tensor.nbytes))
        start += tensor.nbytes
    end = room.address - slot.address
    capacity = end + signature.output_bytes(signature.check(request.shapes))
    return CachedRequest(Placement(request, tuple(places)), length, capacity)
