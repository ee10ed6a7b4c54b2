"""Requests whose JSON came before: where nothing but the bytes of binary tensors differs, there is nothing left to check.

A client that sends binary tensors sends the same JSON again and again. Checking it takes most of the time of decoding a
small request, and its outcome depends on nothing else, so it is kept: by the JSON's exact bytes, for one model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engines import Signature
from server.link.blocks import rounded
from server.link.messages import Extent
from server.link.slots import Slot
from server.protocol.time_slices import Turns

from .json_document import Object, parse
from .request import InferRequest, Limits, decode
from .response import InferResponse, Written, encode

_MOST = 64
_LONGEST = 4096


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request said, the length of its body, and where each tensor goes: from offset in the slot, to span in the body."""

    request: InferRequest
    length: int
    capacity: int
    copies: tuple[tuple[int, int, int], ...]

    def write(self, body: bytes, slot: Slot, spare: int = 0) -> None:
        """Put the tensors of such a body where `Slot.place` would, with as many `spare` bytes. Raises TooLarge, MemoryFull."""
        slot.reserve(self.capacity, spare)
        source = memoryview(body)
        for offset, start, size in self.copies:
            slot.view[offset : offset + size] = source[start : start + size]


Answered = tuple[InferRequest, Sequence[Extent], bytes, list[Extent]]
"""The last request that was answered, its outputs, the JSON that told of them, and those it asked for."""


class Plans:
    """Decodes the requests for one model, the sooner the more alike they are. At most 64 are remembered; not thread-safe.

    Those with an id are not, which is rarely seen twice. Large JSON takes `turns`.

    Each request gets memory for its outputs as well, and `spare` bytes for those whose size no shape tells, if there are so
    many: as many as were needed before, which `leave` is told.
    """

    def __init__(self) -> None:
        self.turns = Turns()
        self.spare = 0
        self._plans: dict[bytes, Plan] = {}
        self._answered: Answered | None = None

    def __repr__(self) -> str:
        return f"<Plans {len(self._plans)}>"

    def decode(
        self,
        body: bytes,
        header_length: int | None,
        signature: Signature,
        slot: Slot,
        limits: Limits,
        document: Object | None = None,
    ) -> InferRequest:
        """As `server.protocol.request.decode`."""
        if not header_length or header_length > _LONGEST:
            return decode(body, header_length, signature, slot, limits, document, self.spare)
        head = body[:header_length]
        plan = self._plans.get(head)
        if plan and plan.length == len(body) and len(head) == header_length:
            plan.write(body, slot, self.spare)
            return plan.request
        request = decode(body, header_length, signature, slot, limits, None, self.spare)
        if plan is None and request.id is None and _is_plain(signature):
            self._consider(head, body, request, signature, slot)
        return request

    def leave(self, nbytes: int) -> None:
        """Outputs needed so many bytes, which were not there: leave as much for those of later requests."""
        self.spare = max(self.spare, rounded(nbytes))

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
        """As `server.protocol.response.encode`; the JSON of an answer in binary follows from its extents alone."""
        answered = self._answered
        if answered and answered[0] is request:
            wanted = answered[3] if answered[1] == extents else _moved(answered, extents)
            if wanted is not None:
                tensors = [slot.view[offset : offset + nbytes] for _, offset, nbytes in wanted]
                return InferResponse(b"".join([answered[2], *tensors]), len(answered[2]))
        response = encode(name, version, request, signature, slot, extents, written, nonfinite)
        plain = request.id is None and not request.classified
        if response.header_length is not None and plain and all(binary for _, binary, _ in request.outputs):
            document = response.body[: response.header_length]
            self._answered = request, extents, document, [extents[position] for position, _, _ in request.outputs]
        return response

    def _consider(self, head: bytes, body: bytes, request: InferRequest, signature: Signature, slot: Slot) -> None:
        entries = parse(head)["inputs"]
        if len(entries) == len(signature.inputs) and all(entry.get("data") is None for entry in entries):
            self._remember(head, _plan(entries, len(head), body, request, signature, slot))

    def _remember(self, head: bytes, plan: Plan) -> None:
        if len(self._plans) >= _MOST:
            del self._plans[next(iter(self._plans))]
        self._plans[head] = plan


def _moved(answered: Answered, extents: Sequence[Extent]) -> list[Extent] | None:
    """Those asked for, if outputs differ from the last in nothing but their places, as those of a batch's rows do."""
    request, before, _, _ = answered
    for (shape, _, nbytes), (other, _, size) in zip(before, extents, strict=True):
        if nbytes != size or shape != other:
            return None
    return [extents[position] for position, _, _ in request.outputs]


def _is_plain(signature: Signature) -> bool:
    """Whether every input is of a type whose every bit pattern is a value."""
    return all(spec.datatype.kind not in ("bytes", "bool") for spec in signature.inputs)


def _plan(entries: list[Object], start: int, body: bytes, request: InferRequest, signature: Signature, slot: Slot) -> Plan:
    """The plan for these inputs, all of them binary, whose bytes start behind the JSON."""
    tensors, room = slot.inputs(signature, request.shapes, slot.capacity)
    by_name = {spec.name: tensor for spec, tensor in zip(signature.inputs, tensors, strict=True)}
    copies = []
    for entry in entries:
        tensor = by_name[entry["name"]]
        copies.append((tensor.address - slot.address, start, tensor.nbytes))
        start += tensor.nbytes
    end = room.address - slot.address
    return Plan(request, len(body), end + signature.output_bytes(signature.check(request.shapes)), tuple(copies))
