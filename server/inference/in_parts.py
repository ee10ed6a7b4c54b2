"""An inference whose answer may come in parts: what a front that can pass parts on makes in place of `Inference`."""

import time

from ..errors import Outgrown, RequestError
from ..link.messages import Done, Shape
from .inference import Inference, OnEnd


class InferenceInParts(Inference):
    """As `Inference`, for a model that answers in parts or as a whole.

    `on_end` is called with each part: with a completion that has outputs. The front encodes them, and calls `proceed` when it
    wants the next part. The answer ends with a completion without outputs, after which the front calls `succeed`, or with an
    error. A model that answers as a whole gives one completion with outputs, which is also the end.
    """

    __slots__ = ("_began", "_computed", "in_parts", "parts")

    def submit(self, shapes: tuple[Shape, ...], priority: int, timeout: float | None, on_end: OnEnd) -> None:
        """As `Inference.submit`; `timeout` is for the whole answer."""
        slot, served = self._slot, self.served
        assert slot
        self.in_parts = served.signature.in_parts
        self.parts = self._began = self._computed = 0
        if not self.in_parts:
            super().submit(shapes, priority, timeout, on_end)
            return
        self._shapes, self._priority, self._timeout, self._on_end = shapes, priority, timeout, on_end
        self._decoded = time.monotonic_ns()
        self._tenant.lane.submit(slot, served.key, shapes, self._end, priority, timeout, None, served.queues, True)

    def proceed(self) -> None:
        """Ask for the next part; its outputs take the place of the last one's."""
        slot = self._slot
        assert slot
        self._tenant.lane.proceed(slot)

    def succeed(self, done: Done) -> tuple[float, float]:
        """As `Inference.succeed`, with the time that all parts took to compute; waiting between two is not part of it."""
        if self.in_parts:
            done = done._replace(began=self._began or done.began, ended=(self._began or done.began) + self._computed)
        return super().succeed(done)

    def _end(self, end: Done | RequestError) -> None:
        if self.in_parts and isinstance(end, Done):
            self._began = self._began or end.began
            self._computed += end.ended - end.began
            if end.outputs:
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
            slot = self._slot
            assert slot
            self._reserve(slot, outgrown)
            self.proceed()
        except Exception as error:
            self._fail(error)
