"""Memory for outputs whose size was known only after the model had run."""

from engines import Signature

from ..errors import Outgrown, TooLarge
from ..link.messages import Shape
from ..link.slots import Slot
from ..tenants.catalog import ServedModel
from ..tenants.service import Tenant

_OUTPUT_RESERVE_FRACTION = 8
"""One in so many of a tenant's bytes may be reserved at most for the outputs of one request whose size is not known."""


def reserve_more(
    tenant: Tenant, served: ServedModel, signature: Signature, shapes: tuple[Shape, ...], slot: Slot, outgrown: Outgrown
) -> None:
    """Take memory for the outputs, and have the model's next requests reserve as much. Raises TooLarge or MemoryFull.

    The slot has inputs of these shapes, as `signature` lays them out.
    """
    if outgrown.nbytes <= slot.capacity:
        raise TooLarge(f"the answer needs at least {outgrown.nbytes} bytes of memory, which is more than its model may take")
    blocks = tenant.lane.slots.blocks
    _, room = slot.inputs(signature, shapes, slot.capacity)
    needed = outgrown.nbytes - (room.address - slot.address)
    served.request_cache.raise_output_reserve(min(needed, blocks.nbytes // _OUTPUT_RESERVE_FRACTION))
    slot.reserve(outgrown.nbytes)
