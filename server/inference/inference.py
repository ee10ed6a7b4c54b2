"""One inference of a tenant's model, from its admission to its end: whatever protocol its client speaks."""

import time
from asyncio import CancelledError
from collections.abc import Callable

from ..errors import (
    BadRequest,
    ClientGone,
    DeadlineExceeded,
    Failed,
    MemoryFull,
    Outgrown,
    QueueFull,
    RequestError,
    Unavailable,
    status_of,
)
from ..link.messages import Done, Shape
from ..link.slots import Slot
from ..scheduling.admission import ENDED
from ..tenants.service import Tenant
from ..tenants.tracing import Trace
from .through_functions import ThroughFunctions

OnEnd = Callable[[Done | Exception], None]
"""Called once with the completion of an inference, or with the error that it ended with."""

_INVALID = (400, 408, 413, 415)
"""Statuses of requests that were invalid or incomplete. As in Triton, they do not count as failures of the model."""
DAMAGED = "the body is not HTTP"
"""What a request's task is cancelled with that was counted as invalid already."""
_MAX_ERROR = 500
"""Characters of an error in a trace."""


class Inference:
    """One inference. Belongs to the event loop; nothing here blocks or awaits.

    A protocol handler (HTTP, gRPC) makes one as soon as it knows the tenant and the model, before it reads tensors. The
    constructor raises NotFound or Unavailable for the model, and refuses as the tenant's queue and its limits do (QueueFull,
    TooLarge); `nbytes` are those of the body, as far as they are announced; others are charged by `Admission.charge`. One of
    several for a single request is `charged` if it is not the first: where there is no room for it the handler tries again, so
    that is not counted. Then the handler
    1. sets `arrived` when the request is complete,
    2. calls `take_slot`, and writes the checked inputs into that slot (or earlier `early_slot`, and now `keep_slot`),
    3. calls `submit` before the event loop goes on, and gets a call of its `on_end`,
    4. reads the outputs in `slot_of` the completion, and calls `succeed` when it has encoded them.
    `fail` or `cancel` ends it at any point. `served` is the model at the version asked for; `arrived` is on the clock of
    `time.monotonic_ns`. If the tenant is traced, the handler sets `trace` before that. Of one that is `silent` no failure is
    counted: that of its request has been.
    """

    __slots__ = ("_charged", "_decoded", "_name", "_on_end", "_priority", "_shapes", "_slot", "_tenant", "_through", "_timeout",
                 "_unasked", "_version", "_visit", "arrived", "served", "silent", "trace")  # fmt: skip

    def __init__(self, tenant: Tenant, name: str, version: str | None, nbytes: int = 0, charged: bool = False) -> None:
        self._tenant = tenant
        self._name = name
        self._version = version
        self._charged = charged
        self.silent = False
        self.arrived = time.monotonic_ns()
        self.served = tenant.catalog.route(name, version)
        self._slot: Slot | None = None
        self._on_end: OnEnd | None = None
        self._visit = ENDED
        self._through: ThroughFunctions | None = None
        self.trace: Trace | None = None
        try:
            self._visit = tenant.lane.admission.admit(nbytes, charged)
        except RequestError as error:
            self.count(error)
            raise

    def take_slot(self, at_once: bool = False, begun: bool = False) -> Slot:
        """The slot to write the inputs into. Raises as the constructor does: queue and model may have changed meanwhile.

        They cannot have if this is called `at_once`, in the same iteration of the event loop: then they are not checked again.
        `begun` is as for `Admission.check_room`.
        """
        if at_once:
            slot = self._slot = self._tenant.lane.slots.acquire()
        else:
            self.served = self._tenant.catalog.route(self._name, self._version, self.served)
            slot = self._slot = self._tenant.lane.take_slot(begun, self._charged)
        return slot

    def early_slot(self, leave: Callable[[], None]) -> Slot | None:
        """A slot to receive inputs into while they arrive, if one is free; `keep_slot` once they have come.

        `leave` is called if the slot is needed before that: it has to call `return_slot`. Raises NotFound or Unavailable.
        """
        self.served = self._tenant.catalog.route(self._name, self._version, self.served)
        slot = self._slot = self._tenant.lane.slots.acquire_early(leave)
        return slot

    def return_slot(self) -> None:
        """Give back the slot, if it still has one."""
        slot, self._slot = self._slot, None
        if slot:
            self._tenant.lane.release(slot)

    def keep_slot(self) -> bool:
        """The inputs in the early slot are complete; False if the model was replaced, which may want others there.

        Raises as `take_slot`.
        """
        slot, served = self._slot, self.served
        assert slot
        self.served = self._tenant.catalog.route(self._name, self._version, self.served)
        self._tenant.lane.admission.check_room()
        self._tenant.lane.slots.keep(slot)
        return self.served is served

    def submit(self, shapes: tuple[Shape, ...], priority: int, timeout: float | None, on_end: OnEnd, unasked: int = 0) -> None:
        """Queue it, with its inputs of these shapes in its slot; `on_end` is called once, later, unless it is ended before.

        `timeout` is in seconds from now, and `unasked` as in `Ticket`. An error that `on_end` gets is already counted, and the
        slot is released. Raises BadRequest for shapes that are too long to send and for a model that answers in parts (see
        `InferenceInParts`), and Unavailable if the model's own queue is full.
        """
        slot, served = self._slot, self.served
        assert slot
        if served.signature.in_parts:
            use = "generate_stream, or generate for a single part, or ModelStreamInfer over gRPC"
            raise BadRequest(f"model {served.name!r} answers in parts; use {use}")
        self._shapes, self._priority, self._timeout, self._on_end = shapes, priority, timeout, on_end
        self._unasked = unasked
        self._decoded = time.monotonic_ns()
        if served.running is not None:
            self._through = ThroughFunctions(self._tenant, served, slot, priority, timeout, self._end_through, unasked)
            self._through.begin(shapes)
            return
        lane = self._tenant.lane
        batching, queues = served.batching, served.queues
        begun = self._charged
        lane.submit(slot, served.key, shapes, self._end, priority, timeout, batching, queues, unasked=unasked, begun=begun)

    def slot_of(self, done: Done) -> Slot:
        """The slot that the outputs of this completion are in: of a batch all outputs are in one slot."""
        slot = self._tenant.lane.slots.at(done.slot) if done.rows else self._slot
        assert slot
        return slot

    def succeed(self, done: Done) -> tuple[float, float]:
        """Count it, once its outputs are encoded, and release its slot; the milliseconds it was queued and executed."""
        self.return_slot()
        return self.count_success(done)

    def count_success(self, done: Done) -> tuple[float, float]:
        """As `succeed`, for outputs that are written from the slot: call `return_slot` after that."""
        served, decoded, now = self.served, self._decoded, time.monotonic_ns()
        served.statistics.succeeded(self.arrived, decoded, done, now, served.signature.rows(self._shapes))
        self._leave(now - self.arrived)
        if self.trace is not None:
            self._keep_trace(self.trace, now, done)
        return (done.began - decoded) / 1e6, (done.ended - done.began) / 1e6

    def fail(self, error: Exception) -> Exception:
        """End it for this error, as `cancel` does; the error to answer with."""
        if isinstance(error, MemoryFull):
            error = QueueFull(str(error)) if self._charged else self._tenant.lane.admission.reject(str(error))
        self.cancel(error)
        return error

    def cancel(self, error: BaseException) -> None:
        """End it: `on_end` will not be called any more. Counts `error` as the reason, and releases the slot."""
        self._on_end = None
        if self.trace is not None:
            self._keep_failed(self.trace, error)
        self.count(error)
        self._leave(0)
        if self._through is not None:
            self._through.cancel()
        slot, self._slot = self._slot, None
        if slot:
            self._tenant.lane.release(slot)

    def _keep_trace(self, trace: Trace, now: int, done: Done) -> None:
        """The request is answered: have its spans made. Called for those that are traced only."""
        self.trace = None
        trace.about(self._tenant.name, self.served.name, self.served.version, self.arrived, now)
        trace.decoded, trace.began, trace.ended = self._decoded, done.began, done.ended
        trace.rows, trace.batch = self.served.signature.rows(self._shapes), done.rows
        trace.keep()

    def _keep_failed(self, trace: Trace, error: BaseException) -> None:
        """The same for one that was refused or failed."""
        self.trace = None
        trace.about(self._tenant.name, self.served.name, self.served.version, self.arrived, time.monotonic_ns())
        trace.error = str(error)[:_MAX_ERROR] or type(error).__name__
        trace.status = 499 if isinstance(error, ClientGone | CancelledError) else status_of(error)
        trace.keep()

    def _leave(self, latency: int) -> None:
        """It is open no more; `latency` is from its arrival to its answer, 0 without one."""
        visit, self._visit = self._visit, ENDED
        if visit != ENDED:
            self._tenant.lane.admission.leave(visit, self.served.key, latency)

    def count(self, error: BaseException) -> None:
        """Count this refusal or failure in the model's or the tenant's statistics."""
        if self.silent or self.is_retried(error) or error.args == (DAMAGED,):
            return
        if reason := _reason(error):
            self.served.statistics.failed(time.monotonic_ns() - self.arrived, reason)
        else:
            self._tenant.lane.admission.count_invalid()

    def is_retried(self, error: BaseException) -> bool:
        """Whether this one, of several for a request, has found no room, so that there is another one in its place."""
        return self._charged and isinstance(error, QueueFull)

    def time_left(self, timeout: float) -> float:
        """How many of these seconds since the request arrived are left. Raises DeadlineExceeded."""
        return self._left(timeout, self.arrived)

    def _left(self, timeout: float, since: int) -> float:
        left = timeout - (time.monotonic_ns() - since) / 1e9
        if left <= 0:
            raise self._tenant.lane.admission.expire(timeout)
        return left

    def _end(self, end: Done | RequestError) -> None:
        """Called by the lane when the inference has ended."""
        if isinstance(end, Done):
            on_end, self._on_end = self._on_end, None  # Breaks a cycle that only the garbage collector would free.
            if on_end:
                on_end(end)
        elif isinstance(end, Outgrown):
            self._retry_with_more_memory(end)
        else:
            self._fail(self._blamed(end))

    def _blamed(self, error: RequestError) -> RequestError:
        """BadRequest in place of Failed where the request has several sizes for dimensions that the model names alike."""
        mixed = isinstance(error, Failed) and self.served.running is None
        why = self.served.signature.disagreement(self._shapes) if mixed else ""
        return BadRequest(f"{why}, and {error}") if why else error

    def _end_through(self, end: Done | RequestError) -> None:
        """Called when the model and its functions have ended, or failed; what `preprocess` took counts as input."""
        if (through := self._through) is not None:
            self._decoded, self._through = through.submitted or self._decoded, None
        self._end(end)

    def _fail(self, error: Exception) -> None:
        on_end = self._on_end
        error = self.fail(error)
        if on_end:
            on_end(error)

    def _retry_with_more_memory(self, outgrown: Outgrown) -> None:
        """Run it again, unbatched, with memory for its outputs; the model's next requests reserve as much at once.

        The first run is lost: only the HTTP side can allocate a tenant's memory, and the worker does not wait for it.
        """
        try:
            slot, served, lane, timeout = self._slot, self.served, self._tenant.lane, self._timeout
            assert slot
            served.request_cache.reserve_more(slot, served.signature, self._shapes, outgrown.nbytes)
            if timeout is not None:
                timeout = self._left(timeout, self._decoded)
            lane.submit(slot, served.key, self._shapes, self._end, self._priority, timeout, unasked=self._unasked, begun=True)
        except Exception as error:
            self._fail(error)


def _reason(error: BaseException) -> str | None:
    """The reason as in Triton's metric nv_inference_request_failure; None for an invalid request, which is not a failure."""
    if isinstance(error, QueueFull | DeadlineExceeded | Unavailable):
        return "REJECTED"
    if isinstance(error, ClientGone | CancelledError):
        return "CANCELED"
    status = status_of(error)
    if status in _INVALID:
        return None
    return "BACKEND" if status == 500 else "OTHER"
