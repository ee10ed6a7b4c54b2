"""What was served, counted by model: Triton's categories, in plain integers."""

from dataclasses import dataclass, field

from .ticket import Done


@dataclass(slots=True)
class Duration:
    """How often something happened, and for how many nanoseconds in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """Count one more."""
        self.count += 1
        self.ns += ns

    def as_json(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


@dataclass(slots=True)
class ModelStatistics:
    """One model at one version, as one tenant used it. The HTTP side's: not thread-safe.

    `inferences` counts rows, `executions` runs; `failures` counts by Triton's reason (REJECTED, CANCELED, BACKEND, OTHER).
    """

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    batches: dict[int, list[Duration]] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    inferences: int = 0
    executions: int = 0
    last_ms: int = 0

    def succeeded(self, arrived: int, decoded: int, done: Done, encoded: int, rows: int, now_ms: int) -> None:
        """Count an answered request; the times are nanoseconds on one clock, `now_ms` is milliseconds since 1970."""
        times = (decoded - arrived, done.ended - done.began, encoded - done.ended)
        self.success.add(encoded - arrived)
        self.queue.add(max(0, done.began - decoded))
        batch = self.batches.setdefault(rows, [Duration(), Duration(), Duration()])
        totals = (self.compute_input, self.compute_infer, self.compute_output)
        for total, by_size, ns in zip(totals, batch, times, strict=True):
            total.add(ns)
            by_size.add(ns)
        self.inferences += rows
        self.executions += 1
        self.last_ms = now_ms

    def failed(self, ns: int, reason: str) -> None:
        """Count a request that got an error instead."""
        self.fail.add(ns)
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def as_json(self) -> dict[str, object]:
        """The fields of one entry of `model_stats` in Triton's statistics extension, name and version aside."""
        durations = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
        phases = ("compute_input", "compute_infer", "compute_output")
        batches = [
            {"batch_size": size} | {name: d.as_json() for name, d in zip(phases, parts, strict=True)}
            for size, parts in sorted(self.batches.items())
        ]
        return {
            "last_inference": self.last_ms,
            "inference_count": self.inferences,
            "execution_count": self.executions,
            "inference_stats": {name: getattr(self, name).as_json() for name in durations},
            "response_stats": {},
            "batch_stats": batches,
            "memory_usage": [],
        }
