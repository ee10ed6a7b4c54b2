"""The configuration as frozen pydantic models; `server.config.file` reads them from a TOML file.

Sizes are bytes, durations seconds and paths absolute. `python -m server.config.reference` makes docs/configuration.md,
deploy/greenlane.toml and a JSON Schema of the descriptions; `examples` are for keys without a default in these.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, Field

from .tables import dotted
from .values import (
    MOST_INSTANCES,
    Batches,
    ByName,
    Cores,
    DeviceName,
    Digest,
    Digests,
    Duration,
    Hosts,
    HttpProcesses,
    KeepAlive,
    Latency,
    Lent,
    Location,
    Looped,
    Memory,
    Names,
    Origins,
    Profiles,
    Size,
    Text,
    WarmUp,
    Widths,
)

SHARES = ("granules", "cores", "sms")
"""The keys of a tenant's share of the device."""

_SHARE_OF_UNIT = {"core": "cores", "SM": "sms"}


class ConfigError(Exception):
    """A configuration that cannot be served. `problems` are lines that name a key, its value and what was expected."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class Section(BaseModel, frozen=True, extra="forbid", strict=True, hide_input_in_errors=True, defer_build=True):
    """A table of the file; fields with `exclude` are not keys of it. Built at first use: HTTP processes only unpickle them."""


class ServerConfig(Section, frozen=True):
    """HTTP: addresses, limits, processes and how the server ends."""

    host: Text = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port to listen on; 0 takes any that is free.")
    max_body: Size = Field(
        default=64 * 2**20,
        description="Largest request body or gRPC message, also after gzip or deflate is unpacked. Larger ones are refused "
        "with 413.",
    )
    max_json_tensor: Size = Field(
        default=2**20,
        description="Most JSON in one request, or over gRPC all but its raw tensors; more is refused with 413. Send large "
        "tensors in binary form.",
    )
    max_string_elements: int = Field(
        default=2**18,
        ge=1,
        description="Most elements of all BYTES tensors of one request; more are refused with 413. However short, each takes a "
        "microsecond and 100 bytes or more on a CPU, and a little of the interpreter (GIL) that all tenants' workers share.",
    )
    nonfinite_json: Literal["literal", "null"] = Field(
        default="literal",
        description='NaN and infinity in JSON answers: "literal" writes NaN, Infinity and -Infinity as Triton does, which JSON '
        'does not have and strict parsers refuse; "null" writes null. Binary tensors keep them as they are.',
    )
    admin_key_sha256: Digest | None = Field(
        default=None,
        repr=False,
        examples=["0" * 64],
        description="Digest of the admin key: `printf %s KEY | sha256sum`. Without it the admin API answers on the loopback "
        "interface only, and refuses web pages and requests that show that they came through a proxy. Not every proxy shows "
        "that, so set a key behind one.",
    )
    allowed_hosts: Hosts = Field(
        default=(),
        description="More names under which the admin API answers without a key. Addresses, localhost and the machine's own "
        "name always work.",
    )
    default_tenant: Text | None = Field(
        default=None, examples=["acme"], description="Tenant of requests that name none. Without it they are refused with 401."
    )
    fronts: Literal["per-tenant", "inline"] = Field(
        default="per-tenant",
        description='Where HTTP is handled: "per-tenant" in one process for each tenant, "inline" in the device\'s process.',
    )
    front_cores: Literal["auto", "any"] = Field(
        default="auto",
        description='On a GPU, "auto" pins each HTTP process to up to two cores, the device\'s process to others; "any" none.',
    )
    log_format: Literal["text", "json"] = Field(default="text", description="Format of log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least severe level to log.")
    keep_alive: KeepAlive = Field(
        default=75.0,
        description="How long an idle connection is kept; 5 s at most if no request on it named a tenant. Set it above the "
        "idle timeout of clients' pools and proxies, or they send requests into closed connections.",
    )
    cors_origins: Origins = Field(
        default=(),
        description='Origins of web pages that may call /v2, such as `["https://app.example"]`, or `["*"]`. Never /admin, '
        "/metrics, or loading and unloading of models.",
    )
    strict_readiness: bool = Field(
        default=False,
        description="With true the server is not ready while any model of any tenant could not be loaded, as Triton's default "
        "is. One tenant's broken model then takes the whole server out of a load balancer.",
    )
    usage_dir: Location | None = Field(
        default=None,
        examples=["usage"],
        description="Directory for what tenants were granted and used, relative to the configuration file: a CSV file for each "
        "day (UTC), with rows each minute. Without it only GET /admin/usage and /metrics have it.",
    )
    drain_grace: Duration = Field(
        default=1.0, description="Time from not ready to refusing requests at shutdown, for load balancers to notice."
    )
    drain_timeout: Duration = Field(
        default=10.0,
        description="Time after `drain_grace` by which the process ends. Half of it is for requests in flight, which are then "
        "stopped with 503.",
    )
    autopilot: Literal["off", "dry-run", "on"] = Field(
        default="off",
        description='"on" moves granules between tenants with `target_p99` or `min_granules` while they are served: from those '
        'that keep their target with fewer to those that miss it. "dry-run" only says what it would move. GET /admin/moves has '
        "every move with its reason; PUT /admin/autopilot switches it.",
    )
    max_execution: Duration = Field(
        default=300.0,
        description='Longest run of one inference on the device, for tenants that set no other; "0s": no limit. On a CPU it '
        "is stopped with 504. On a GPU it cannot be stopped: its tenant is refused with 503 until it ends.",
    )
    max_pause: Duration = Field(
        default=5.0,
        description="Longest time for which a repartition may keep the tenants it moves waiting. If an inference takes longer, "
        "the repartition is refused with 409 and the tenant's name, and nothing changes.",
    )
    watchdog: Duration = Field(
        default=20.0,
        description="Longest time for which the event loop of the device's process may be blocked, not counting time in which "
        'the process or the machine is stopped; "0s": no limit. Then the process logs its stacks and exits with status 70, to '
        "be restarted; after a quarter of the time it is not ready. A device process that stays stopped for so long is killed "
        "and replaced. An HTTP process that does not answer for 3 s, even if stopped, is too, not counting waits for a core or "
        'a disk; "0s" turns this off too. The watchdog reserves SIGUSR1.',
    )


class DeviceConfig(Section, frozen=True):
    """The hardware that is shared out among tenants.

    Several devices of one host are tables with names, in place of this one: `[devices.0]`, `[devices.1]`. They have the same
    keys; each says whether its `backend` is "cuda" or "cpu", no two have one `index` or a core in common, and each tenant names
    its `device`. Each GPU has a process of its own.
    """

    backend: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description='"auto" is a GPU where there is one and TensorRT is installed, else the CPU, with a warning if TensorRT is '
        'installed. "cuda" refuses to start without a GPU.',
    )
    index: int = Field(default=0, ge=0, description="Which GPU.")
    cores: Cores | None = Field(
        default=None, examples=["0-7"], description="CPU only: cores to share out. Without it all that the process may use."
    )
    copies: Literal["auto", "sm", "engine"] = Field(
        default="auto",
        description='GPU only: what moves tensors to and from the GPU, the partition\'s own SMs ("sm"), the copy engines that '
        'all tenants share ("engine"), or the better of both for this GPU ("auto").',
    )


class ModelOptions(Section, frozen=True):
    """What the files of one model do not say.

    `graphs` and the keys after it, except `warm_up`, are for GPUs. A key that the installed library, or ONNX Runtime on a CPU,
    cannot honour makes the model unavailable, with the reason. Each key from `graphs` on may also be a parameter of
    config.pbtxt, as in `parameters { key: "greenlane.graphs" value { string_value: "off" } }`.
    """

    max_batch: int | None = Field(
        default=None,
        ge=0,
        examples=[8],
        description="Most rows in one run; requests are joined up to it. 0: the model takes no batches, and requests are never "
        "joined. Without it config.pbtxt decides.",
    )
    batch_delay: Duration | None = Field(
        default=None,
        examples=["0s"],
        description='How long requests that could run may wait for more to share their batch, such as "500us". A single one '
        "never waits on an idle partition. Without it config.pbtxt decides.",
    )
    preferred_batches: Batches | None = Field(
        default=None,
        examples=[[4, 8]],
        description="Ascending sizes at which a batch stops waiting for more requests. Without it config.pbtxt decides.",
    )
    graphs: Literal["on", "off", "required"] | None = Field(
        default=None,
        examples=["on"],
        description='"on", the default: each inference is one CUDA graph where possible; "off": none is; "required": the model '
        "is refused where it is not possible.",
    )
    strategy: Literal["lazy", "eager", "none"] | None = Field(
        default=None,
        examples=["eager"],
        description='Kernels for a new shape: compiled before it runs ("eager", the default), in the background ("lazy") or '
        'never ("none").',
    )
    cuda_graphs: Literal["on", "off"] | None = Field(
        default=None,
        examples=["off"],
        description="The library's own CUDA graphs, of the engine alone, where `graphs` are off or impossible. Off by default.",
    )
    allocation: Literal["static", "on_profile_change", "user_managed"] | None = Field(
        default=None, examples=["static"], description='How an execution context gets its memory; "static" by default.'
    )
    profile: int | None = Field(
        default=None,
        ge=0,
        examples=[0],
        description="The one optimization profile to run with. Without it each request runs with one that fits.",
    )
    profiles: Profiles | None = Field(
        default=None,
        examples=[[{"x": {"min": [1, 3, 224, 224], "opt": [8, 3, 224, 224], "max": [32, 3, 224, 224]}}]],
        description="Optimization profiles that an ONNX file is built with: shapes by input. Without it batches of 1 to "
        "`max_batch`, or to 8. Refused for a .plan, which is built already.",
    )
    instances: int | None = Field(
        default=None,
        ge=1,
        le=MOST_INSTANCES,
        examples=[1],
        description="Executors of the model for each tenant, which its inferences use in turn; 1 by default. They share the "
        "weights; each has execution contexts, CUDA graphs and GPU memory of its own.",
    )
    weight_budget: Size | None = Field(
        default=None,
        examples=["1GiB"],
        description="Weights to keep on the GPU; the rest is streamed. ONNX files are built for that; a .plan that was not is "
        "refused.",
    )
    copies: Literal["auto", "sm", "engine"] | None = Field(
        default=None, examples=["auto"], description="Replaces `device.copies` for this model."
    )
    warm_up: WarmUp | None = Field(
        default=None,
        examples=["usual"],
        description='Batch sizes to run before the model is served, so that no request waits for kernels: "opt", a list, or '
        '"usual", the default: the smallest, the largest and the powers of two.',
    )
    loop: Looped | None = Field(
        default=None,
        examples=[{"feed": {"next": "token"}, "steps": 64, "until": "done", "outputs": ["next"]}],
        description="The model is run again and again for one answer, which has a part for each run; generate_stream passes "
        "them on. `feed` names the outputs that are inputs of the next run, `steps` is the most runs, and `until` is an output "
        "that is not zero in the last. `outputs` are those that make a part, by default all.",
    )


class ModelsConfig(Section, frozen=True):
    """The model repository, and the cache of what is built of it."""

    repository: Location = Field(description="Directory of models in Triton's layout, relative to the configuration file.")
    cache: Location | None = Field(
        default=None,
        examples=["cache"],
        description="GPU only: directory of built plans and compiled kernels, relative to the configuration file. Without it "
        ".greenlane in the repository or, where that cannot be written, greenlane in $XDG_CACHE_HOME or ~/.cache; the log says "
        "which. Where neither can be written, kernels are compiled at every start, and an ONNX file without a plan is refused. "
        "Keep the driver's cache too: ~/.nv/ComputeCache or $CUDA_CACHE_PATH.",
    )
    build_timeout: Duration = Field(
        default=900.0,
        description='GPU only: longest build of one ONNX file, in a process at idle priority; "0s": no limit. Then the model '
        "is refused, with how far the build was. Compiling a model's kernels has the same limit; after it the server compiles "
        "them itself.",
    )
    options: ByName[ModelOptions] = Field(default_factory=lambda: MappingProxyType({}), exclude=True)


class TenantConfig(Section, frozen=True):
    """A tenant: its share of the device (one of `granules`, `cores` and `sms`), limits and rights."""

    name: str = Field(exclude=True)
    device: DeviceName | None = Field(
        default=None,
        examples=["0"],
        description='Which device the tenant is on, by its name in `[devices.NAME]`; the only one is called "0" in `[device]`. '
        "Required where there are several.",
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
        description="Most that the tenant may use while others that `lend` are idle, its share included, counted like it "
        "in granules, cores or SMs. Without it the tenant never uses more than its share.",
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
        description="The fewest granules that the autopilot leaves the tenant; 1 for one with a `target_p99`. Without either "
        "key it never changes the tenant's share. An operator may give it fewer.",
    )
    ladder: Widths | None = Field(
        default=None,
        examples=[[4, 8, 16]],
        description="Shares between which the tenant can change in microseconds, counted as its share is: its models are made "
        "ready for each of them in the background, which takes device memory on a GPU for graphs, and on a CPU for whole "
        "sessions. The autopilot changes its share between these only.",
    )
    models: Names = Field(description='Models that the tenant may call; `["*"]`: all.')
    queue: int = Field(default=64, ge=1, description="Requests that may wait; more are refused with 429.")
    in_flight: int = Field(
        default=2,
        ge=1,
        description="Runs handed to the partition at a time: one runs, the others follow on its stream. The server hands over "
        "more while runs take well under 0.1 ms, but then no batch ahead of another. On a CPU nothing is handed over ahead.",
    )
    max_execution: Duration | None = Field(
        default=None, examples=["5min"], description="Replaces `server.max_execution` for this tenant."
    )
    memory: Memory = Field(
        default=512 * 2**20,
        description="Shared memory for tensors of requests and answers, from when a body is complete until its answer is "
        "written; bodies that are still arriving may take as much again, elsewhere once a complete request needs their place. "
        "On a GPU all of it is page-locked at the start. A request that can never fit is refused with 413, one that does not "
        "fit now with 429; an eighth is kept for requests of up to 1 MiB.",
    )
    device_memory: Size | None = Field(
        default=None,
        ge=1,
        examples=["20GiB"],
        description="The most of the device's memory that the tenant's models may take: weights, execution contexts and "
        "tensors on a GPU, on a CPU what its sessions take of the host's. A model that does not fit is refused when it is "
        "loaded, with the arithmetic. One that other tenants use too counts in full for each. Without it there is no limit.",
    )
    paging: bool = Field(
        default=False,
        description="Whether idle models are paged out when another one needs room within `device_memory`, the least recently "
        "used first, and brought back by their next request, which waits for that. Off by default: such a request takes as "
        "long as a load, and a model that is not there is refused when it is loaded and not at some later time.",
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
        description="A second port, which leads straight to this tenant's HTTP process, for firewalls. Requests there name "
        "the tenant by key, X-Tenant or `default_tenant`; those of other tenants are refused with 421.",
    )
    grpc_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        examples=[8101],
        description="A port on which this tenant is served over gRPC, for which `greenlane[grpc]` has to be installed. Calls "
        "name the tenant by the same rules as requests over HTTP, in metadata; those of other tenants are refused.",
    )
    http_processes: HttpProcesses = Field(
        default=1,
        examples=[4],
        description="GPU only: how many processes handle the tenant's HTTP. They share its queue, limits and memory. Several "
        'help a tenant whose requests are large or many. "auto" is as many as there are pairs of cores for HTTP, by the '
        "tenant's share, 4 at most. On a CPU the tenant's one process has its models too.",
    )
    front_cores: Cores | None = Field(
        default=None,
        examples=["0-1"],
        description="Cores of the tenant's HTTP process. Without it `server.front_cores` decides, and on a CPU it runs on the "
        "tenant's own cores. Cores of another tenant's partition delay that tenant: `check` and the log warn of it.",
    )

    target_p99: Latency | None = Field(
        default=None,
        examples=["5ms"],
        description="The p99 latency that the tenant is to keep. `greenlane curve --all` finds the share that keeps it, and "
        "GET /admin/advice compares it with what is measured. No request is refused for it.",
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

    def share(self, unit: str, sizes: Sequence[int]) -> int:
        """How many granules this tenant gets on a device whose granules have these sizes in `unit`s (`core` or `SM`).

        Raises ConfigError if the device counts in other units, or the share is no whole number of granules.
        """
        key, asked = self._asked()
        if key != "granules" and key != _SHARE_OF_UNIT.get(unit):
            instead = _SHARE_OF_UNIT.get(unit, "granules")
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
            there = len(sizes) if key == "granules" else sum(sizes)
            units = "granules" if key == "granules" else f"{unit}s"
            raise self._problem(f"{self.burst} is above the device, which has {there} {units}", "burst")
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

        Raises ConfigError for one that is no whole number of granules, or above the device, or if the models may be paged out.
        """
        key, _ = self._asked()
        if self.ladder and self.device_memory is not None:
            raise self._problem(
                "models that may be paged out (device_memory) are not held ready; leave one of the two out", "ladder"
            )
        found = tuple(self._granules("ladder", key, width, sizes) for width in self.ladder or ())
        if found and found[-1] > len(sizes) and self.ladder:
            raise self._problem(f"{self.ladder[-1]} is {found[-1]} granules, but the device has {len(sizes)}", "ladder")
        return found

    def check_least(self, share: int) -> None:
        """Raise ConfigError for a minimum above the tenant's own share in granules."""
        if self.min_granules is not None and self.min_granules > share:
            raise self._problem(f"{self.min_granules} is above the tenant's own share of {share} granules", "min_granules")

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


class Config(Section, frozen=True):
    """Everything that is configured; `source` names the file in messages."""

    server: ServerConfig = Field(default_factory=ServerConfig)
    device: DeviceConfig = Field(default_factory=DeviceConfig)
    devices: ByName[DeviceConfig] = Field(default_factory=lambda: MappingProxyType({}))
    """Those with names, in the file's order; empty where the file has [device] or none. `named_devices` has them all."""
    models: ModelsConfig
    tenants: ByName[TenantConfig]
    source: str = Field(exclude=True)

    @property
    def named_devices(self) -> Mapping[str, DeviceConfig]:
        """Every device by name, in the file's order; a single one without a name is called "0"."""
        return self.devices or {"0": self.device}

    def with_devices(self, devices: Mapping[str, DeviceConfig]) -> "Config":
        """The same with these devices. `device` is the first: the only one, where there is one."""
        return self.model_copy(update={"devices": MappingProxyType(devices), "device": next(iter(devices.values()))})

    def on_device(self, name: str) -> "Config":
        """The same with this device alone, for the process that has it."""
        return self.with_devices({name: self.named_devices[name]})

    def tenants_on(self, device: str) -> list[str]:
        """The tenants that start on this device, in the file's order. A tenant that names none is on the only one."""
        only = next(iter(self.named_devices))
        return [name for name, tenant in self.tenants.items() if (tenant.device or only) == device]

    def execution_limit(self, tenant: str) -> tuple[float, str]:
        """The seconds that an inference of this tenant may run, 0 for no limit, and the key that sets them."""
        if (own := self.tenants[tenant].max_execution) is None:
            return self.server.max_execution, "server.max_execution"
        return own, dotted(("tenants", tenant, "max_execution"))

    def counts(self, unit: str, sizes: Sequence[int], tenants: Iterable[str] | None = None) -> tuple[dict[str, int], list[str]]:
        """Granules by tenant on such a device (see `TenantConfig.share`), and the problems of shares, alone and together.

        `tenants` are those on this device, by default all.
        """
        counts: dict[str, int] = {}
        problems: list[str] = []
        names = list(self.tenants if tenants is None else tenants)
        for name in names:
            try:
                counts[name] = self.tenants[name].share(unit, sizes)
                self.tenants[name].most(unit, sizes)
                self.tenants[name].check_least(counts[name])
                self._check_ladder(name, unit, sizes, names)
            except ConfigError as error:
                problems += error.problems
        if sum(counts.values()) > len(sizes):
            problems.append(self._too_many(counts, unit, sizes))
        return counts, [f"{self.source}: {text}" for text in problems]

    def fit(self, unit: str, sizes: Sequence[int], tenants: Iterable[str] | None = None) -> None:
        """Raise ConfigError with every problem of the shares on such a device; `tenants` are as for `counts`."""
        if problems := self.counts(unit, sizes, tenants)[1]:
            raise ConfigError(problems)

    def _check_ladder(self, name: str, unit: str, sizes: Sequence[int], names: Sequence[str]) -> None:
        """Raise ConfigError for a ladder that the other tenants' minimums leave no room for."""
        tenant = self.tenants[name]
        others = {other: self.tenants[other].min_granules or 1 for other in names if other != name}
        left = len(sizes) - sum(others.values())
        if (widths := tenant.rungs(unit, sizes)) and widths[-1] > left:
            terms = " + ".join(f"{other} {least}" for other, least in others.items())
            text = f"its widest is {widths[-1]} granules, but of the device's {len(sizes)} the others keep at least {terms}"
            raise ConfigError([f"{dotted(('tenants', name, 'ladder'))}: {text}, which leaves {left}"])

    def _too_many(self, counts: Mapping[str, int], unit: str, sizes: Sequence[int]) -> str:
        terms = " + ".join(self.tenants[name].term(count) for name, count in counts.items())
        wanted, there = sum(counts.values()), len(sizes)
        of = f"{unit}s" if sizes[0] == 1 else f"granules of {sizes[0]} {unit}s"
        them = "them" if len(counts) > 1 else "it"
        return f"{terms} = {wanted} {of}, but the device has {there}: lower {them} by {wanted - there}"


def below_share(burst: int, key: str, share: int) -> str:
    """The problem with a burst that is below the share, which this key has."""
    return f"{burst} is below {key}, which is {share}; it is the most that the tenant may use, its share included"


def share_problem(given: Iterable[str]) -> str | None:
    """The problem with a tenant that has these keys, which should hold exactly one of SHARES."""
    shares = [key for key in SHARES if key in given]
    if len(shares) > 1:
        return f"{' and '.join(shares)} given; a share is only one of them"
    return None if shares else f"no share of the device; expected one of {', '.join(SHARES)}"
