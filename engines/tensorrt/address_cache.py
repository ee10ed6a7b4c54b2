"""Where the tensors of an inference come from and go to: worked out once for memory that stays where it is and pinned.

A server's slots are few and stay pinned, so nearly every inference has addresses that were seen before; then neither the
driver has to be asked whether the GPU reaches them, nor a table be made of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from partitions.cuda.device import CudaDevice

from ..base import Room, Tensor
from .copies import Table
from .shapes import Prepared

MOST_ROUTES = 1024
"""Routes of one executor that are remembered; when there are more, all are forgotten."""

_Key = tuple[object, ...]


class Route(NamedTuple):
    """What is run, the table for its copies, and the outputs; `staged` if those have to be taken from where they lie, `padded`
    if more rows run than were asked for.
    """

    prepared: Prepared
    table: Table
    outputs: tuple[Tensor, ...]
    staged: bool
    padded: bool


class Routes:
    """Those of one executor. One thread at a time, but memory may be unpinned by any other."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._as_of = device.unpinned
        self._known: dict[_Key, Route] = {}

    def __repr__(self) -> str:
        return f"<Routes, {len(self._known)} known>"

    def find(self, inputs: Sequence[Tensor], room: Room) -> Route | None:
        """The way from these to there, if all of it holds still: the memory is pinned, the graph is there."""
        if self._as_of != self._device.unpinned:
            self._as_of = self._device.unpinned
            self._known.clear()
        try:
            found = self._known.get(_key(inputs, room))
        except (AttributeError, TypeError):
            return None  # Those are no tensors, which is for whoever makes a route of them to say.
        return found if found and found.prepared.graph else None

    def keep(self, inputs: Sequence[Tensor], room: Room, route: Route) -> None:
        """Remember a route if the memory of all its tensors was pinned by the device's `pin`."""
        tensors = (*inputs, *route.outputs)
        if not all(not each.nbytes or self._device.is_pinned(each.address, each.nbytes) for each in tensors):
            return
        if len(self._known) >= MOST_ROUTES:
            self._known.clear()
        self._known[_key(inputs, room)] = route


def _key(inputs: Sequence[Tensor], room: Room) -> _Key:
    """What a route depends on: not on who owns the memory."""
    return (room, *[(tensor.shape, tensor.address, tensor.nbytes) for tensor in inputs])
