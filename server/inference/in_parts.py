"""An inference whose answer may come in parts: what a protocol handler that can pass parts on makes in place of `Inference`."""

import time
from asyncio import CancelledError

from ..errors import ClientGone, Outgrown, RequestError
from ..link.messages import Done, Shape
from ..tenants.service import Tenant
from .inference import Inference, OnEnd


class InferenceInParts(Inference):
    """As `Inference`, for a model that answers in parts or as a whole.

    `on_end` is called with each part: with a completion that has outputs. The handler encodes them, calls `encoded`, and
    `proceed` when it wants the next part. The answer ends with a completion without outputs, after which the handler calls
    `succeed`, or with an error. A model that answers as a whole gives one completion with outputs, which is also the end.
    """

    __slots__ = ("_began", "_computed", "in_parts", "parts")

    def __init__(self, tenant: Tenant, name: str, version: str | None, nbytes: int = 0) -> None:
        self.in_parts = False
        self.parts = self._began = self._computed = 0
        super().__init__(tenant, name, version, nbytes)

    def submit(self, shapes: tuple[Shape, ...], priority: int, timeout: float | None, on_end: OnEnd, unasked: int = 0) -> None:
        """As `Inference.submit`; `timeout` is for the whole answer."""
        slot, served = self._slot, self.served
        assert slot
        self.in_parts = served.signature.in_parts
        if not self.in_parts:
            super().submit(shapes, priority, timeout, on_end, unasked)
            return
        self._shapes, self._priority, self._timeout, self._on_end = shapes, priority, timeout, on_end
        self._decoded = time.monotonic_ns()
        lane, queues = self._tenant.lane, served.queues
        lane.submit(slot, served.key, shapes, self._end, priority, timeout, None, queues, True, unasked=unasked)

    def encoded(self, done: Done) -> None:
        """Count this part, whose outputs were encoded."""
        if self.in_parts and (response := self.served.statistics.response(self.parts - 1)):
            response.count += 1
            response.compute_infer += done.ended - done.began
            response.compute_output += time.monotonic_ns() - done.ended

    def proceed(self) -> None:
        """Ask for the next part; its outputs take the place of the last one's."""
        slot = self._slot
        assert slot
        self._tenant.lane.proceed(slot)

    def succeed(self, done: Done) -> tuple[float, float]:
        """As `Inference.succeed`, with the time that all parts took to compute; waiting between two is not part of it."""
        if self.in_parts:
            if response := self.served.statistics.response(self.parts):
                response.ends += 1
                response.ends_ns += done.ended - done.began
            done = done._replace(began=self._began or done.began, ended=(self._began or done.began) + self._computed)
        return super().succeed(done)

    def count(self, error: BaseException) -> None:
        super().count(error)
        if self.in_parts and (response := self.served.statistics.response(self.parts)):
            ns = time.monotonic_ns() - self.arrived
            if isinstance(error, ClientGone | CancelledError):
                response.cancelled += 1
                response.cancelled_ns += ns
            else:
                response.failed += 1
                response.failed_ns += ns

    def _end(self, end: Done | RequestError) -> None:
        if self.in_parts and isinstance(end, Done):
            self._began = self._began or end.began
            self._computed += end.ended - end.began
            if end.outputs:
                if not self.parts:
                    self.served.statistics.first_part(time.monotonic_ns() - self.arrived)
                self.parts += 1
                if on_end := self._on_end:
                    on_end(end)
                return
        if self.in_parts and isinstance(end, Outgrown):
            self._store_again(end)
        else:
            super()._end(end)

    def _store_again(self, outgrown: Outgrown) -> None:
        """Make room for a part that the worker has computed and keeps."""
        try:
            slot, served = self._slot, self.served
            assert slot
            served.request_cache.reserve_more(slot, served.signature, self._shapes, outgrown.nbytes)
            self.proceed()
        except Exception as error:
            self._fail(error)
