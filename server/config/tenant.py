"""The tables `[tenants.NAME]`, and the keys of a share of the device."""

from collections.abc import Iterable, Sequence

from pydantic import Field

from .tables import ConfigError, Section, dotted
from .values import (
    BandwidthShare,
    Cores,
    DeviceName,
    Digests,
    Duration,
    HttpProcesses,
    Latency,
    Lent,
    Memory,
    Names,
    Size,
    WeightsByModel,
    Widths,
)

MOST_RATE = 10**12
"""Requests or bytes a second, or at once: no machine takes more, and token buckets count millionths of them in 64 bits."""

MOST_QUEUE = 10**9
"""Requests that may wait: each has a slot of 8 KiB, and all of them have to fit into the addresses of a process."""

SHARES = ("granules", "cores", "sms")
"""The keys of a tenant's share of the device."""

FENCES = ("memory_bandwidth", "pcie")
"""The keys of its share of what partitions of a device have in common."""

SHARE_OF_UNIT = {"core": "cores", "SM": "sms"}
"""The key of a tenant's share, by the device's unit."""


class TenantConfig(Section, frozen=True):
    """A tenant: its share of the device (one of `granules`, `cores` and `sms`), limits and rights."""

    name: str = Field(exclude=True)
    device: DeviceName | None = Field(
        default=None,
        examples=["0"],
        description="Which device the tenant is on, by its name in `[devices.NAME]`; required where there are several.",
    )
    granules: int | None = Field(
        default=None, ge=1, examples=[6], description="Share of the device in the granules of GET /admin/device."
    )
    cores: int | None = Field(default=None, ge=1, examples=[2], description="Share of a CPU in cores.")
    sms: int | None = Field(
        default=None, ge=1, examples=[16], description="Share of a GPU in SMs, a multiple of its granules'."
    )
    burst: int | None = Field(
        default=None,
        ge=1,
        examples=[16],
        description="Most that the tenant may use while others that `lend` are idle, its share included and counted "
        "like it. Without it the tenant never uses more than its share.",
    )
    lend: Lent = Field(
        default=0.0,
        description="Whether tenants with a `burst` may use this tenant's share while it has no request open, and for how long "
        "at most by one inference: that is how late its next request may be. true: 1ms.",
    )
    min_granules: int | None = Field(
        default=None,
        ge=1,
        examples=[2],
        description="The fewest granules that the autopilot leaves the tenant; 1 with a `target_p99`. Without either "
        "key it never changes the share.",
    )
    ladder: Widths | None = Field(
        default=None,
        examples=[[4, 8, 16]],
        description="Shares between which the tenant can change in microseconds, counted as its share is: its models "
        "are made ready for each of them, which takes memory. The autopilot changes its share between these only.",
    )
    memory_bandwidth: BandwidthShare | None = Field(
        default=None,
        examples=["auto", 0.4, "1.2TB/s"],
        description="The most memory bandwidth of its device that the tenant draws, on a GPU while others are at work, on "
        'cores with that part of the L3 cache; "auto" is its part of the units. Without it nothing holds it back.',
    )
    pcie: BandwidthShare | None = Field(
        default=None,
        examples=["auto", 0.4, "20GB/s"],
        description="The same of a GPU's PCIe link, each way: inputs and outputs of its requests, streamed weights, and models "
        "that are loaded; not what the library moves otherwise, such as kernels.",
    )
    models: Names = Field(description='Models that the tenant may call; `["*"]`: all.')
    weights: WeightsByModel | None = Field(
        default=None,
        examples=[{"resnet50": {"1": 0.9, "2": 0.1}}],
        description="Weights of versions for this tenant, by model, in place of `models.NAME.weights`.",
    )
    queue: int = Field(default=64, ge=1, le=MOST_QUEUE, description="Requests that may wait; more are refused with 429.")
    requests_per_second: int | None = Field(
        default=None,
        ge=1,
        le=MOST_RATE,
        examples=[200],
        description="Inference requests a second, all models and processes together; more are refused with 429 before "
        "their bodies are read.",
    )
    burst_requests: int | None = Field(
        default=None,
        ge=1,
        le=MOST_RATE,
        examples=[400],
        description="Requests that may come at once after a pause; by default one second's.",
    )
    bytes_per_second: Size | None = Field(
        default=None,
        le=MOST_RATE,
        examples=["100MB"],
        description="Bytes of inference requests' bodies a second, as they arrive; more are refused with 429.",
    )
    burst_bytes: Size | None = Field(
        default=None,
        le=MOST_RATE,
        examples=["200MB"],
        description="Bytes that may come at once after a pause; a larger body is refused with 413. By default one "
        "second's, and at least `server.max_body`.",
    )
    max_connections: int | None = Field(
        default=None,
        ge=1,
        examples=[256],
        description="Connections that the tenant's clients may have open, and as many on its `grpc_port`; the first "
        "request on any other is answered 429, and it is closed.",
    )
    max_large_bodies: int | None = Field(
        default=None,
        ge=1,
        examples=[8],
        description="Request bodies of more than 1 MiB that may arrive at a time; another is refused with 429.",
    )
    in_flight: int = Field(
        default=2,
        ge=1,
        description="Runs handed to each partition at a time: one runs, others follow on its stream; more while runs take "
        "well under 0.1 ms. On a CPU a batch that can grow waits.",
    )
    max_execution: Duration | None = Field(
        default=None, examples=["5min"], description="Replaces `server.max_execution` for this tenant."
    )
    memory: Memory = Field(
        default=512 * 2**20,
        description="Shared memory for tensors of requests and answers, from when a body is complete until its answer "
        "is written; bodies that are still arriving may take as much again. On a GPU all is page-locked at the "
        "start. A request that can never fit is refused with 413, one that does not fit now with 429; an eighth is "
        "kept for requests up to 1 MiB.",
    )
    device_memory: Size | None = Field(
        default=None,
        examples=["20GiB"],
        description="The most of the device's memory that the tenant's models may take: weights, contexts, tensors, "
        "kernels and graphs on a GPU, on a CPU what its sessions take of the host's. A model that does not fit is "
        "refused when it is loaded. docs/operations/limits.md says what counts.",
    )
    paging: bool = Field(
        default=False,
        description="Whether idle models are paged out when another one needs room within `device_memory`, the least "
        "recently used first, and brought back by their next request, which waits for that.",
    )
    keys_sha256: Digests = Field(
        default=(),
        repr=False,
        description="Digests of the tenant's keys. Without any, every request that names the tenant is served.",
    )
    port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        examples=[8001],
        description="A second port, for firewalls, which leads straight to this tenant's HTTP process; requests of "
        "other tenants are refused there with 421.",
    )
    grpc_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        examples=[8101],
        description="A port on which this tenant is served over gRPC. Needs greenlane[grpc]. Calls of other tenants "
        "are refused.",
    )
    http_processes: HttpProcesses = Field(
        default=1,
        examples=[4],
        description="GPU only: how many processes handle the tenant's HTTP, for a tenant whose requests are large or "
        'many. "auto" is as many as there are pairs of cores for HTTP, by the tenant\'s share, 4 at most.',
    )
    front_cores: Cores | None = Field(
        default=None,
        examples=["0-1"],
        description="Cores of the tenant's HTTP process. Without it `server.front_cores` decides, and on a CPU it "
        "runs on the tenant's own cores. Cores of another tenant's partition delay that tenant.",
    )

    target_p99: Latency | None = Field(
        default=None,
        examples=["5ms"],
        description="The p99 latency that the tenant is to keep, for `greenlane curve --all`, GET /admin/advice and "
        "the autopilot. No request is refused for it.",
    )
    target_rate: int | None = Field(
        default=None,
        ge=1,
        examples=[800],
        description="Requests a second, all models together, at which `greenlane curve --all` measures `target_p99`.",
    )

    def may_call(self, model: str) -> bool:
        """Whether this tenant sees the model of this name."""
        return model in self.models or "*" in self.models

    def may_call_of(self, there: Iterable[str]) -> list[str]:
        """The models that this tenant names, and those of a repository with these models that it may call, each once."""
        return [name for name in dict.fromkeys([*self.models, *there]) if name != "*" and self.may_call(name)]

    def execution_limit(self, default: float) -> tuple[float, str]:
        """The seconds that an inference may run, 0 for no limit, and the key that sets them; `default` is the server's."""
        if self.max_execution is None:
            return default, "server.max_execution"
        return self.max_execution, dotted(("tenants", self.name, "max_execution"))

    @property
    def fenced(self) -> bool:
        """Whether the tenant is held to a share of bandwidth."""
        return any(getattr(self, key) is not None for key in FENCES)

    def with_models(self, models: Iterable[str]) -> "TenantConfig":
        """The same with this list of models."""
        return self.model_copy(update={"models": tuple(models)})

    def share(self, unit: str, sizes: Sequence[int]) -> int:
        """How many granules this tenant gets on a device whose granules have these sizes in `unit`s (`core` or `SM`).

        Raises ConfigError if the device counts in other units, or the share is no whole number of granules.
        """
        key, asked = self._asked()
        if key != "granules" and key != SHARE_OF_UNIT.get(unit):
            instead = SHARE_OF_UNIT.get(unit, "granules")
            raise self._problem(f"this device is shared out in {unit}s; use '{instead}' instead", key)
        return self._granules(key, key, asked, sizes)

    def most(self, unit: str, sizes: Sequence[int]) -> int:
        """How many granules this tenant may use on such a device while others are idle: its share, if it has no `burst`.

        Raises ConfigError as `share` does, and for a burst below the share or above the device.
        """
        share = self.share(unit, sizes)
        if self.burst is None:
            return share
        key, asked = self._asked()
        if self.burst < asked:
            raise self._problem(below_share(self.burst, key, asked), "burst")
        most = self._granules("burst", key, self.burst, sizes)
        if most > len(sizes):
            raise self._problem(_above(self.burst, key, unit, sizes), "burst")
        return most

    def _granules(self, key: str, unit: str, asked: int, sizes: Sequence[int]) -> int:
        """The granules of what this key asks for in granules, cores or SMs. Raises ConfigError."""
        if unit == "granules":
            return asked
        if asked % sizes[0]:
            multiples = ", ".join(str(sizes[0] * count) for count in range(1, len(sizes) + 1))
            raise self._problem(f"{asked} is not in whole granules of {sizes[0]}; expected one of {multiples}", key)
        return asked // sizes[0]

    def rungs(self, unit: str, sizes: Sequence[int]) -> tuple[int, ...]:
        """The ladder's widths in granules of such a device, ascending; none without a ladder.

        Raises ConfigError for one that is no whole number of granules, or above the device.
        """
        key, _ = self._asked()
        found = tuple(self._granules("ladder", key, width, sizes) for width in self.ladder or ())
        if found and found[-1] > len(sizes) and self.ladder:
            raise self._problem(_above(self.ladder[-1], key, unit, sizes), "ladder")
        return found

    def check_least(self, share: int) -> None:
        """Raise ConfigError for a minimum above the tenant's own share in granules."""
        if self.min_granules is not None and self.min_granules > share:
            raise self._problem(
                f"{self.min_granules} is above the tenant's own share of {share} granule{'s' * (share != 1)}", "min_granules"
            )

    def term(self, count: int) -> str:
        """The share as the file gives it, followed by its granules where that is another number."""
        key, asked = self._asked()
        return f"{dotted(('tenants', self.name, key))} {asked}{f' ({count} granules)' if count != asked else ''}"

    def _asked(self) -> tuple[str, int]:
        shares = {key: value for key in SHARES if (value := getattr(self, key)) is not None}
        if problem := share_problem(shares):
            raise self._problem(problem)
        return next(iter(shares.items()))

    def _problem(self, text: str, *key: str) -> ConfigError:
        return ConfigError([f"{dotted(('tenants', self.name, *key))}: {text}"])


def _above(asked: int, key: str, unit: str, sizes: Sequence[int]) -> str:
    """The problem with a number that is above the device, counted as the share is, which this key has."""
    there, units = (len(sizes), "granules") if key == "granules" else (sum(sizes), f"{unit}s")
    return f"{asked} is above the device, which has {there} {units}"


def below_share(burst: int, key: str, share: int) -> str:
    """The problem with a burst that is below the share, which this key has."""
    return f"{burst} is below {key}, which is {share}; it is the most that the tenant may use, its share included"


def share_problem(given: Iterable[str]) -> str | None:
    """The problem with a tenant that has these keys, which should hold exactly one of SHARES."""
    shares = [key for key in SHARES if key in given]
    if len(shares) > 1:
        return f"{' and '.join(shares)} given; a share is only one of them"
    return None if shares else f"no share of the device; expected one of {', '.join(SHARES)}"
