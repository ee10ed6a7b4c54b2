"""The configuration as frozen pydantic models; `server.config.file` reads them from a TOML file.

Sizes are bytes, durations seconds and paths absolute. `python -m server.config.reference` makes docs/configuration.md,
deploy/greenlane.toml and a JSON Schema of the descriptions; `examples` are for keys without a default in these.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, ValidationInfo, model_validator

from partitions.base import Bandwidth
from partitions.plan import Granules

from .bandwidth import too_much
from .server import ServerConfig
from .tables import ConfigError, Section, dotted
from .tenant import TenantConfig
from .text import Text
from .values import Batches, ByName, Cores, Duration, Location, Looped, Profiles, SizeOr0, WarmUp, Watched, Weights


class DeviceConfig(Section, frozen=True):
    """The hardware that is shared out among tenants.

    Several devices of one host are tables with names, in place of this one: `[devices.0]`, `[devices.1]`. They have the same
    keys; each says whether its `backend` is "cuda" or "cpu", no two have one `index` or a core in common, and each tenant names
    its `device`. Each GPU has a process of its own.
    """

    backend: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description='"auto" is a GPU where there is one and TensorRT is installed, else the CPU. "cuda" refuses to '
        "start without a GPU.",
    )
    index: int = Field(default=0, ge=0, description="Which GPU.")
    cores: Cores | None = Field(
        default=None, examples=["0-7"], description="CPU only: cores to share out. Without it all that the process may use."
    )
    copies: Literal["auto", "sm", "engine"] = Field(
        default="auto",
        description='GPU only: what moves tensors to and from the GPU, the partition\'s own SMs ("sm"), the copy '
        'engines that all tenants share ("engine"), or the better of both ("auto").',
    )
    mps: Literal["auto", "off", "on"] = Field(
        default="auto",
        description='GPU only: a device process for each tenant, under CUDA MPS ("on"), or one for all ("off"). "auto": "on" '
        "where MPS can run, for a GPU that has two or more tenants at the start.",
    )


class ModelOptions(Section, frozen=True):
    """What the files of one model do not say.

    `graphs` and the keys after it, except `warm_up`, `loop` and `verify`, are for GPUs. A key that the installed library, or
    ONNX Runtime on a CPU, cannot honour makes the model unavailable, with the reason. Each key from `graphs` on may also be a
    parameter of config.pbtxt, as in `parameters { key: "greenlane.graphs" value { string_value: "off" } }`.
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
    weights: Weights | None = Field(
        default=None,
        examples=[{"1": 0.9, "2": 0.1}],
        description="How requests that name no version are shared out among the versions that are served. Versions "
        "without a weight get none; where none with a weight is served, the highest gets all. A reload may change it.",
    )
    text: Text | None = Field(
        default=None,
        examples=[{"pooling": "mean", "normalize": True, "max_tokens": 512}],
        description="How a model with a tokenizer.json is used for /v1/embeddings and /v1/rerank: `task` (embed or "
        "rerank), `pooling` (mean, cls, last, max), `normalize`, `max_tokens`, `truncate`, `output` and `token_ids`; "
        "docs/text.md explains them.",
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
        description="The only optimization profile to run with. Without it each request runs with a profile that fits.",
    )
    profiles: Profiles | None = Field(
        default=None,
        examples=[[{"x": {"min": [1, 3, 224, 224], "opt": [8, 3, 224, 224], "max": [32, 3, 224, 224]}}]],
        description="Optimization profiles that an ONNX file is built with: shapes by input. Without it batches of 1 to "
        "`max_batch`, or to 8. Refused for a .plan, which is built already.",
    )
    weight_budget: SizeOr0 | None = Field(
        default=None,
        examples=["1GiB"],
        description="Weights to keep on the GPU; the rest is streamed. A .plan that was not built for that is refused.",
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
        description="The model is run again and again for one answer, with a part for each run. `feed` names the "
        "outputs that are inputs of the next run, `steps` is the most runs, `until` an output that is not zero in the "
        "last; `outputs` make a part, by default all.",
    )
    verify: Literal["on", "off", "required"] | None = Field(
        default=None,
        examples=["on"],
        description='Whether answers to random inputs are compared before clients get any. "on", the default: '
        "requests are not joined where rows depend on each other, and on a GPU a shape whose answer disagrees with "
        "ONNX Runtime's runs with other numbers of rows, or is refused. What cannot be compared is served; "
        '"required": it is refused, and not joined. "off": nothing is compared.',
    )


class ModelsConfig(Section, frozen=True):
    """The model repository, and the cache of what is built of it."""

    repository: Location = Field(
        description="Directory of models in Triton's layout, relative to the configuration file. Or a URL, which is "
        'copied into `cache` and needs greenlane[remote]: "s3://bucket/models", "gs://bucket/models", '
        '"hf://owner/name/models".'
    )
    cache: Location | None = Field(
        default=None,
        examples=["cache"],
        description="GPU only: directory of built plans and compiled kernels, relative to the configuration file. "
        "Without it .greenlane in the repository or, where that cannot be written, greenlane in $XDG_CACHE_HOME or "
        "~/.cache; where neither can be written, kernels are compiled at every start, and an ONNX file without a plan "
        "is refused. Keep the driver's cache too: ~/.nv/ComputeCache or $CUDA_CACHE_PATH.",
    )
    build_timeout: Duration = Field(
        default=900.0,
        description="GPU only: longest build of one ONNX file, after which the model is refused, and longest "
        'compilation of a model\'s kernels in a process of its own, after which the server compiles them itself; "0s": '
        "no limit.",
    )
    paced_loads: bool = Field(
        default=True,
        description="GPU only: load the kernels of a network with pauses while tenants are served, as all tenants' "
        "inferences wait for the driver while it loads one. The first load of MobileNetV2 takes 25 s then in place of "
        "3. A repartition, a model that is paged in, and an inference that is no CUDA graph end the pauses. Needs "
        "CUPTI, which greenlane[rtx] and greenlane[tensorrt] install.",
    )
    watch: Watched = Field(
        default=0.0,
        description="How often the server looks for changes of the repository; true is every 5 s, false never. It "
        "loads new models, versions and changed files and unloads removed ones, once two looks found the same. A version "
        "that cannot be served leaves the old one in place.",
    )
    python: bool = Field(
        default=False,
        description="Whether functions of models (`preprocess` and `postprocess` in a model.py) are run, in the "
        "tenant's own HTTP process: it is code, so trust who can write to the repository. Without it a model with "
        "functions is unavailable.",
    )
    options: ByName[ModelOptions] = Field(default_factory=lambda: MappingProxyType({}), exclude=True)
    remote: str | None = Field(default=None, exclude=True)
    """The URL of a remote repository; then `repository` is the directory of its copy."""

    @model_validator(mode="before")
    @classmethod
    def _copied(cls, given: Any, info: ValidationInfo) -> Any:
        """Have `repository` be a directory also where it is a URL."""
        if not (isinstance(given, dict) and is_url(given.get("repository"))):
            return given
        url, cache, folder = given["repository"], given.get("cache"), info.context
        found = Path(folder, cache) if isinstance(cache, str) and cache and folder is not None else None
        return {**given, "repository": str(copy_of(url, found)), "remote": url}


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

    def device_of(self, tenant: str) -> str:
        """The device on which this tenant starts. One that names none is on the only one."""
        return self.tenants[tenant].device or next(iter(self.named_devices))

    def tenants_on(self, device: str) -> list[str]:
        """The tenants that start on this device, in the file's order."""
        return [name for name in self.tenants if self.device_of(name) == device]

    def version_weights(self, tenant: str) -> dict[str, dict[str, float]]:
        """The weights of versions that hold for a tenant, by model: its own, or those of [models.NAME]."""
        found = {name: dict(each.weights) for name, each in self.models.options.items() if each.weights}
        return found | {name: dict(weights) for name, weights in self.tenants[tenant].weights or ()}

    def execution_limit(self, tenant: str) -> tuple[float, str]:
        """The seconds that an inference of this tenant may run, 0 for no limit, and the key that sets them."""
        return self.tenants[tenant].execution_limit(self.server.max_execution)

    def counts(self, unit: str, sizes: Sequence[int], tenants: Iterable[str] | None = None) -> tuple[dict[str, int], list[str]]:
        """Granules by tenant on such a device (see `TenantConfig.share`), and the problems of shares, alone and together.

        `tenants` are those on this device, by default all. Shares of bandwidth go by granules: `too_much`.
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

    def too_much(self, homes: Mapping[str, Granules], sizes: Sequence[int], moves: Bandwidth | None) -> list[str]:
        """The problems of shares of bandwidth; arguments are as for `bandwidth.too_much`."""
        return [f"{self.source}: {text}" for text in too_much(self.tenants, homes, sizes, moves)]

    def fit(self, unit: str, sizes: Sequence[int], tenants: Iterable[str] | None = None) -> None:
        """Raise ConfigError with every problem of the shares on such a device; arguments are as for `counts`."""
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


_PASSWORD = re.compile(r"[^:]+://[^/@]*:[^/]*@")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\0]+")


def is_url(text: object) -> bool:
    """Whether a repository's address is a URL, and no directory."""
    return isinstance(text, str) and _URL.fullmatch(text) is not None


def has_password(text: object) -> bool:
    """Whether it is a URL with a password, as in https://user:password@host/path."""
    return is_url(text) and _PASSWORD.match(str(text)) is not None


def copy_of(url: str, cache: Path | None) -> Path:
    """The directory for the copy of a repository: in `models.cache`, or in the user's directory for caches."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "greenlane")
    named = re.sub(r"[^A-Za-z0-9]+", "-", url)[:60].strip("-")
    return (cache or own) / "repositories" / f"{named}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
