"""An inference of a model with functions: `preprocess`, the model itself, `postprocess`, each if there is one."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from engines.signature import align

from ..errors import DeadlineExceeded, Failed, Outgrown, RequestError
from ..link.messages import Done, Extent, Shape
from ..link.slots import Slot
from ..protocol.request import Input, write_inputs
from ..scheduling.admission import expired
from ..tenants.catalog import ServedModel
from ..tenants.service import Tenant

if TYPE_CHECKING:
    from ..functions.arrays import Data, Raw
    from ..functions.thread import Call
    from ..tenants.running_functions import RunningFunctions


class ThroughFunctions:
    """The way of one inference through the functions of its model. Belongs to the event loop.

    The functions get copies of tensors, so the slot may be released at any time: call `cancel` then. `on_end` is called once,
    with a completion whose outputs are those that clients know, in the request's own slot, or with an error. `submitted` is
    when the model itself was asked for, on the clock of `time.monotonic_ns`.
    """

    def __init__(
        self,
        tenant: Tenant,
        served: ServedModel,
        slot: Slot,
        priority: int,
        timeout: float | None,
        on_end: Callable[[Done | RequestError], None],
        unasked: int = 0,
    ) -> None:
        assert served.running
        self._tenant = tenant
        self._served = served
        self._running: RunningFunctions = served.running
        self._unasked = 0 if served.running.functions.postprocess else unasked  # `postprocess` gets all outputs.
        self._inner = served.engine_signature
        self._slot = slot
        self._priority = priority
        self._timeout = timeout
        self._on_end: Callable[[Done | RequestError], None] | None = on_end
        self._deadline = float("inf")
        self._timer: asyncio.TimerHandle | None = None
        self._call: Call | None = None
        self._shapes: tuple[Shape, ...] = ()
        self.submitted = 0
        if timeout is not None:
            self._deadline = time.monotonic() + timeout
            self._timer = asyncio.get_running_loop().call_later(timeout, self._expire)

    def begin(self, shapes: tuple[Shape, ...]) -> None:
        """Start, with the client's inputs of these shapes in the slot. Raises what the request is refused with."""
        slot, served = self._slot, self._served
        tensors, room = slot.inputs(served.signature, shapes, slot.capacity)
        if self._running.functions.preprocess:
            places = [(shape, t.address - slot.address, t.nbytes) for shape, t in zip(shapes, tensors, strict=True)]
            raw = self._running.copied(served.signature.inputs, places, slot.view)
            self._running.thread.check_room()
            self._tenant.lane.hold(slot, served.key, shapes, self._on_done)
            self._start("preprocess", partial(self._running.module.preprocess, raw), self._on_preprocessed)
        else:  # The inputs are the model's own; its outputs may need more room than those that were expected.
            needed = self._inner.output_bytes(self._inner.check(shapes))
            slot.reserve(room.address - slot.address + needed, served.request_cache.output_reserve)
            self._submit(shapes)

    def cancel(self) -> None:
        """The inference has ended: `on_end` will not be called any more."""
        self._on_end = None
        if self._timer:
            self._timer.cancel()
        if self._call:
            self._running.thread.cancel(self._call)
            self._call = None

    def _start(self, name: str, work: Callable[[], object], then: "Callable[[Sequence[Data]], None]") -> None:
        self._call = self._running.call(name, work, partial(self._returned, then))

    def _returned(self, then: "Callable[[Sequence[Data]], None]", outcome: object) -> None:
        self._call = None
        try:
            if isinstance(outcome, Exception):
                raise outcome
            assert isinstance(outcome, list)
            then(outcome)
        except Exception as error:
            self._fail(error)

    def _on_preprocessed(self, tensors: "Sequence[Data]") -> None:
        """Write what `preprocess` returned into the slot, and have the model run."""
        inputs = [Input(shape, data) for shape, data in tensors]
        shapes = tuple([item.shape for item in inputs])
        try:
            self._inner.check(shapes)
        except Exception as error:
            raise Failed(f"{self._running.what('preprocess')} returned what the model does not take: {error}") from error
        write_inputs(inputs, self._inner, self._slot, self._served.request_cache.output_reserve)
        self._submit(shapes)

    def _submit(self, shapes: tuple[Shape, ...]) -> None:
        served, lane = self._served, self._tenant.lane
        self._shapes, self.submitted = shapes, time.monotonic_ns()
        priority, batching, queues = self._priority, served.batching, served.queues
        until, unasked = self._deadline, self._unasked
        lane.submit(self._slot, served.key, shapes, self._on_done, priority, None, batching, queues, False, until, unasked)

    def _on_done(self, end: Done | RequestError) -> None:
        """The model has run, or the request has failed before."""
        try:
            if isinstance(end, Outgrown):
                served, slot = self._served, self._slot
                served.request_cache.reserve_more(slot, self._inner, self._shapes, end.nbytes)
                lane, priority, until, unasked = self._tenant.lane, self._priority, self._deadline, self._unasked
                lane.submit(
                    slot, served.key, self._shapes, self._on_done, priority, None, None, None, False, until, unasked, True
                )
            elif isinstance(end, DeadlineExceeded) and time.monotonic() >= self._deadline:
                raise expired(self._timeout or 0.0)  # The worker has met the deadline before the timer here.
            elif not isinstance(end, Done):
                raise end
            elif self._running.functions.postprocess:
                slot = self._tenant.lane.slots.at(end.slot) if end.rows else self._slot
                raw: list[Raw] = self._running.copied(self._inner.outputs, end.outputs, slot.view)
                work = partial(self._running.module.postprocess, raw, self._served.signature)
                self._start("postprocess", work, partial(self._on_postprocessed, end))
            else:
                self._report(end)
        except Exception as error:
            self._fail(error)

    def _on_postprocessed(self, done: Done, tensors: "Sequence[Data]") -> None:
        """Write what `postprocess` returned into the slot, in place of what the model did."""
        extents, end = [], 0
        for shape, data in tensors:
            nbytes = len(data) if isinstance(data, bytes) else data.nbytes
            extents.append(Extent(shape, end, nbytes))
            end = align(end + nbytes)
        self._slot.reserve(end)
        for (_, offset, nbytes), (_, data) in zip(extents, tensors, strict=True):
            if nbytes:
                self._slot.view[offset : offset + nbytes] = memoryview(data).cast("B")
        self._report(done._replace(slot=self._slot.index, outputs=tuple(extents)))

    def _expire(self) -> None:
        """The deadline has passed; a call that runs goes on, and its result is dropped."""
        self._timer = None
        self._fail(self._tenant.lane.admission.expire(self._timeout or 0.0))

    def _fail(self, error: Exception) -> None:
        self._report(error if isinstance(error, RequestError) else _unexpected(error))

    def _report(self, end: Done | RequestError) -> None:
        on_end = self._on_end
        self.cancel()
        if on_end:
            on_end(end)


def _unexpected(error: Exception) -> RequestError:
    failed = Failed(f"{type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
