"""Counters of each model, in Triton's categories."""

import time
from bisect import bisect_left
from typing import Annotated

from msgspec import Meta, Struct, field

from ..link.messages import Done
from . import answers
from .answers import BatchStatistics, Duration, InferenceStatistics, ResponseStatistics

BOUNDS = (*(digit * 10**power for power in range(5, 10) for digit in (1, 2, 5)), 10**10)
"""Upper bounds of the histogram's buckets in nanoseconds: 100 microseconds to 10 seconds."""


FIRST_BOUNDS = (100 * 10**6, 500 * 10**6, 2 * 10**9, 5 * 10**9)
"""The same of the histogram of first parts; Triton's."""


class Counters(Struct, array_like=True, forbid_unknown_fields=True):
    """What HTTP processes send as it is, checked by its annotations where it arrives."""


def _exactly(length: int) -> Meta:
    return Meta(min_length=length, max_length=length)


class Size(Counters):
    """Requests (or runs) of one number of rows: how many succeeded, and the sums of their nanoseconds by phase."""

    count: int = 0
    total: int = 0
    queue: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0


MOST_RESPONSES = 64
"""Parts of answers that are counted, from the first on."""


class Responses(Counters):
    """The parts that have one number in their answers, counted with the sums of their nanoseconds.

    `ends` are ends of answers that came in place of the part; `failed` and `cancelled` answers ended so in it.
    """

    count: int = 0
    compute_infer: int = 0
    compute_output: int = 0
    ends: int = 0
    ends_ns: int = 0
    failed: int = 0
    failed_ns: int = 0
    cancelled: int = 0
    cancelled_ns: int = 0

    def answer(self) -> ResponseStatistics:
        return ResponseStatistics(
            compute_infer=Duration(self.count, self.compute_infer),
            compute_output=Duration(self.count, self.compute_output),
            success=Duration(self.count, self.compute_infer + self.compute_output),
            fail=Duration(self.failed, self.failed_ns),
            empty_response=Duration(self.ends, self.ends_ns),
            cancel=Duration(self.cancelled, self.cancelled_ns),
        )


class ModelStatistics(Counters):
    """One model at one version, as one tenant used it. The HTTP side's: not thread-safe.

    `sizes` are requests that ran alone, by rows. `joined` are all requests that ran in batches, `joined_rows` their rows, and
    `runs` the batches, by rows. `buckets` count answers by the smallest of `BOUNDS` that they kept, the last one those above
    all. `failures` are by Triton's reason (REJECTED, CANCELED, BACKEND, OTHER). `last` is when the last request was answered,
    on the clock of `time.monotonic_ns`, 0 for never. `responses` are parts of answers, by their numbers from 0. `firsts` count
    answers in parts by when their first part was there, as `buckets` do for `FIRST_BOUNDS`, and `firsts_ns` is the sum. Totals
    are computed when they are read.
    """

    sizes: dict[int, Size] = field(default_factory=dict)
    joined: Size = field(default_factory=Size)
    joined_rows: int = 0
    runs: dict[int, Size] = field(default_factory=dict)
    last_run: int = 0
    buckets: Annotated[list[int], _exactly(len(BOUNDS) + 1)] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    failures: dict[str, int] = field(default_factory=dict)
    failed_ns: int = 0
    last: int = 0
    responses: dict[int, Responses] = field(default_factory=dict)
    firsts: Annotated[list[int], _exactly(len(FIRST_BOUNDS) + 1)] = field(default_factory=lambda: [0] * (len(FIRST_BOUNDS) + 1))
    firsts_ns: int = 0

    def succeeded(self, arrived: int, decoded: int, done: Done, encoded: int, rows: int) -> None:
        """Count an answered request; the times are nanoseconds on the clock of `time.monotonic_ns`.

        Call it for each request of a batch, one after the other.
        """
        size = self._share(arrived, decoded, done, encoded, rows) if done.rows else self.sizes.get(rows)
        if size is None:
            size = self.sizes[rows] = Size()
        size.count += 1
        total = encoded - arrived
        size.total += total
        self.buckets[bisect_left(BOUNDS, total)] += 1
        if done.began > decoded:
            size.queue += done.began - decoded
        size.compute_input += decoded - arrived
        size.compute_infer += done.ended - done.began
        size.compute_output += encoded - done.ended
        self.last = encoded

    def _share(self, arrived: int, decoded: int, done: Done, encoded: int, rows: int) -> Size:
        """Count a batch with its first request; batches are distinguished by when they began."""
        self.joined_rows += rows
        if run := self.count_run(done):
            run.compute_input += decoded - arrived
            run.compute_output += encoded - done.ended
        return self.joined

    def count_run(self, done: Done) -> Size | None:
        """Count a batch, unless it was counted; where its phases are to be added, None if it was.

        The lead also calls it for the requests of its helpers, whose own counts of batches are not used.
        """
        if done.began == self.last_run:
            return None
        self.last_run = done.began
        run = self.runs.setdefault(done.rows, Size())
        run.count += 1
        run.compute_infer += done.ended - done.began
        return run

    def failed(self, ns: int, reason: str) -> None:
        """Count a failed request."""
        self.failed_ns += ns
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def first_part(self, ns: int) -> None:
        """Count an answer in parts whose first part was there so long after the request."""
        self.firsts[bisect_left(FIRST_BOUNDS, ns)] += 1
        self.firsts_ns += ns

    def response(self, number: int) -> Responses | None:
        """The counter of a part, to be counted in; None if it is not counted."""
        found = self.responses.get(number)
        if found is None and number < MOST_RESPONSES:
            found = self.responses[number] = Responses()
        return found

    @property
    def inferences(self) -> int:
        """Rows inferred."""
        return self.joined_rows + sum(rows * size.count for rows, size in self.sizes.items())

    @property
    def executions(self) -> int:
        """Runs of the model."""
        return sum(size.count for sizes in (self.sizes, self.runs) for size in sizes.values())

    @property
    def success(self) -> Duration:
        """Successful requests, and their time from the complete body to the encoded answer."""
        return self._sum("total")

    @property
    def queue(self) -> Duration:
        """Their time from decoded inputs to the beginning of the run."""
        return self._sum("queue")

    @property
    def compute_input(self) -> Duration:
        """Their time to decode."""
        return self._sum("compute_input")

    @property
    def compute_infer(self) -> Duration:
        """Their time to run."""
        return self._sum("compute_infer")

    @property
    def compute_output(self) -> Duration:
        """Their time from the end of the run to the encoded answer."""
        return self._sum("compute_output")

    @property
    def fail(self) -> Duration:
        """Requests that got an error."""
        return Duration(sum(self.failures.values()), self.failed_ns)

    @property
    def last_ms(self) -> int:
        """When the last request was answered, in milliseconds since 1970; 0 for never."""
        return int(time.time() * 1000 - (time.monotonic_ns() - self.last) / 1e6) if self.last else 0

    def answer(self, name: str, version: str) -> answers.ModelStatistics:
        """What is answered of this version of a model."""
        phases, no_cache = (self.queue, self.compute_input, self.compute_infer, self.compute_output), Duration(0, 0)
        return answers.ModelStatistics(
            name=name,
            version=version,
            last_inference=self.last_ms,
            inference_count=self.inferences,
            execution_count=self.executions,
            inference_stats=InferenceStatistics(self.success, self.fail, *phases, no_cache, no_cache),
            response_stats={f"{number}": self.responses[number].answer() for number in sorted(self.responses)},
            batch_stats=[self._batch(rows) for rows in sorted(self.sizes.keys() | self.runs.keys())],
            memory_usage=[],
        )

    def _sum(self, name: str) -> Duration:
        sizes = (self.joined, *self.sizes.values())
        return Duration(sum(size.count for size in sizes), sum(getattr(size, name) for size in sizes))

    def _batch(self, rows: int) -> BatchStatistics:
        """The runs of so many rows, whether of one request or of several."""
        sizes = [size for size in (self.sizes.get(rows), self.runs.get(rows)) if size]
        count = sum(size.count for size in sizes)
        phases = ("compute_input", "compute_infer", "compute_output")
        return BatchStatistics(rows, *(Duration(count, sum(getattr(size, name) for size in sizes)) for name in phases))
