"""`python -m server check FILE`: prints what a configuration would serve, and all problems with it.

One problem hides no other: the rest of a file with wrong keys is checked, the models of tenants whose shares do not fit are
tried on a part of the device, and without a device the repository is still checked.
"""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines import TensorSpec
from engines.memory import shared_by
from partitions import Device, DoesNotFit, PartitionError, PartitionManager
from partitions.regular_file import check_writable
from partitions.resctrl import CoreGroups

from .check_http_side import try_http_side
from .config.changes import LIMITS_OF_TENANT, written
from .config.file import salvage
from .config.schema import Config, DeviceConfig, ModelOptions
from .config.tables import ConfigError, KeyPath, dotted, nearest
from .config.tenant import FENCES, TenantConfig
from .config.text import TextOptions
from .control.fence import Fence, core_shares, plan_fences
from .control.fence import describe as describe_fence
from .device.ahead import open_builds
from .device.budget import Claim, missing, refusal, sized, taken_more
from .device.loaded_model import LoadedModel
from .device.model_loader import ModelLoader, open_model_loader
from .link.blocks import largest_block
from .processes.supervision.affinity import TOO_FEW_CORES, conflicts, count, describe, share_cores, too_many
from .processes.supervision.listen import why_not
from .processes.supervision.mps_group import hindrance, why_shared
from .repository.model_repository import Repository, some
from .tenants.catalog import IndexEntry, ModelVersion

Plan = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Findings:
    """Problems, each once: errors of the configuration, models that cannot be served, and possible mistakes."""

    wrong: dict[str, None] = field(default_factory=dict)
    unserved: dict[str, None] = field(default_factory=dict)
    suspicious: dict[str, None] = field(default_factory=dict)

    @property
    def status(self) -> int:
        return 2 if self.wrong else 1 if self.unserved else 0

    def lines(self) -> list[str]:
        """All findings, as lines to print, the worst last: that is what a terminal still shows."""
        titles = {
            "greenlane: possible mistakes:": self.suspicious,
            "greenlane: not all that is configured can be served:": self.unserved,
            "greenlane: the configuration cannot be served:": self.wrong,
        }
        return [line for title, found in titles.items() if found for line in (title, *(f"  {text}" for text in found))]


def check(
    path: str,
    open_device: Callable[[DeviceConfig], Device],
    load: Callable[[str | None], AbstractContextManager[Config]],
    cores: Callable[[int], Iterable[int]] = os.sched_getaffinity,
    root: Path = Path("/"),
) -> int:
    """Print what the file at `path` would serve, then all problems on standard error. Blocks, as models are loaded.

    `cores` says which of the host's a process may run on, `root` is where /sys is. Returns the exit status: 0 where all can be
    served, 1 where something that is configured cannot be, such as a broken or absent model, 2 where the configuration itself
    is wrong or does not fit the device.
    """
    found = Findings()
    with ExitStack() as stack:
        if read := _configuration(path, load, stack, found):
            config, dropped = read
            if count := len(found.wrong):
                mistakes = "a mistake" if count == 1 else f"{count} mistakes"
                _print_line(f"{config.source} has {mistakes} (below), and nothing is served; the rest of it is tried here:")
            _Check(config, dropped, found, frozenset(cores(0)), open_device, root).run()
    for line in found.lines():
        print(line, file=sys.stderr)
    if found.status == 0:
        print("all of it can be served")
    return found.status


def _configuration(
    path: str, load: Callable[[str | None], AbstractContextManager[Config]], stack: ExitStack, found: Findings
) -> tuple[Config, frozenset[KeyPath]] | None:
    """The configuration, and the keys that were dropped from it because they are wrong; None if too little is left."""
    try:
        return stack.enter_context(load(path)), frozenset()
    except ConfigError as error:
        found.wrong.update(dict.fromkeys(error.problems))
    try:
        return salvage(Path(path))
    except ConfigError:
        return None


class _Check:
    """One check of a configuration. Prints as it goes, since loading models takes time.

    Of keys that were `dropped`, for they are wrong, it is not said that they are missing.
    """

    def __init__(
        self,
        config: Config,
        dropped: frozenset[KeyPath],
        found: Findings,
        allowed: frozenset[int],
        open_device: Callable[[DeviceConfig], Device],
        root: Path,
    ) -> None:
        self._config = config
        self._root = root
        self._dropped = dropped
        self._found = found
        self._allowed = allowed
        self._open_device = open_device
        self._environ = dict(os.environ)
        """From before a device is opened, which takes the variables of MPS from this process's."""
        self._cores: dict[str, frozenset[int] | None] = {}
        self._apart: set[str] = set()
        """The devices whose tenants would have a process each."""
        self._repository = Repository(config.models.repository, config.models.options)

    def run(self) -> None:
        config, devices = self._config, self._config.named_devices
        if len(devices) > 1:
            _print_line(f"{config.source}: {self._url()} on {len(devices)} devices")
        known: list[str] | None = None
        held: list[str] = []
        for name in devices:  # One after another: each is closed before the next is opened.
            with ExitStack() as stack:
                device = self._open(name, stack)
                where = device.describe() if device else "no device, so no model is tried"
                _print_line(f"device {name}: {where}" if len(devices) > 1 else f"{config.source}: {self._url()} on {where}")
                self._check_mps(name, device)
                if name == next(iter(devices)):
                    known = self._check_repository()
                held += self._run_on(name, device, known or [])
        self._print_http_cores(held)
        self._check_written()
        if ("server", "host") not in self._dropped and (why := why_not(config.server.host)):
            self._wrong(("server", "host"), why)

    def _check_repository(self) -> list[str] | None:
        """Check what concerns all devices. Returns the names of the models; None if the repository cannot be read."""
        known = self._known()
        if known is not None:
            self._check_names(known)
            config = self._config
            for path, text in unserved_weights(config.models.options, config.tenants.values(), self._repository):
                self._suspicious(path, text)
        self._check_default()
        self._check_memory()
        self._check_lending()
        self._check_autopilot()
        return known

    def _url(self) -> str:
        server = self._config.server
        return f"http://{f'[{server.host}]' if ':' in server.host else server.host}:{server.port}"

    def _open(self, name: str, stack: ExitStack) -> Device | None:
        config = self._config
        try:
            return stack.enter_context(closing(self._open_device(config.named_devices[name])))
        except PartitionError as error:
            self._wrong(self._key(name), str(error))
            return None

    def _key(self, device: str) -> KeyPath:
        return ("devices", device) if len(self._config.named_devices) > 1 else ("device",)

    def _check_mps(self, name: str, device: Device | None) -> None:
        """Check whether each tenant would have a process of its own here, without starting any."""
        mps, count = self._config.named_devices[name].mps, len(self._config.tenants_on(name))
        uuid = device.uuid if device else ""
        if mps == "off" or (mps == "auto" and not uuid):
            return
        if mps == "auto" and (why := asyncio.run(why_shared(self._config, name, uuid, self._environ))):
            _print_line(f"  one device process for all tenants: {why}")
            return
        key = (*self._key(name), "mps")
        if device and not uuid:
            self._wrong(key, f'"on", which is for GPUs, and this is {device.describe()}; leave it out')
            return
        self._apart.add(name)
        what = "each of which takes some 360 MiB of the GPU, and loads its tenant's models for itself"
        _print_line(f"  {count} device process{'es' * (count != 1)} under MPS, {what}")
        if mps == "on" and (why := asyncio.run(hindrance(uuid, self._environ))):
            self._wrong(key, f'"on", but {why}; or leave it out')

    def _run_on(self, name: str, device: Device | None, known: list[str]) -> list[str]:
        """Check the tenants of a device. Returns those that have a share of it."""
        config = self._config
        tenants = config.tenants_on(name)
        plan = self._plan(device, tenants) if device else {}
        fences = self._fences(device, plan) if device else {}
        cores = device.address if device and device.kind == "cpu" else ""
        builds = open_builds(config.models)
        model_loader = open_model_loader(config.on_device(name), device, builds=builds)
        for each in tenants:
            tenant = config.tenants[each]
            _print_line(f"tenant {each}: {share_text(plan.get(each), cores)}, {self._access(tenant)}, {_memory_text(tenant)}")
            if settings := settings_line(tenant):
                _print_line(f"  {settings}")
            if device and each in fences:
                self._check_fence(each, fences[each], device)
            self._check_front_cores(tenant)
            wanted = [model for model in dict.fromkeys([*tenant.models, *known]) if model in known and tenant.may_call(model)]
            self._try(model_loader, device, each, plan.get(each, (0,)), wanted)
        self._check_budgets(device, tenants)
        return list(plan)

    def _known(self) -> list[str] | None:
        """The names of the models in the repository; None if it cannot be read."""
        if self._config.models.remote and any(line.startswith("models.repository: ") for line in self._found.wrong):
            return None  # Nothing was copied, which says nothing of what is there.
        try:
            known = self._repository.names()
        except OSError as error:
            if not any(line.startswith(f"{self._config.source}: models.repository: ") for line in self._found.wrong):
                self._wrong(("models", "repository"), f"cannot be read: {error.strerror}: {error.filename}")
            return None
        if not known:
            self._suspicious(("models", "repository"), "there is no model in it")
        return known

    def _plan(self, device: Device, tenants: Iterable[str]) -> Plan:
        """The granules that each of these tenants would hold; empty if the shares do not fit."""
        counts, problems = self._config.counts(device.unit, device.granules, tenants)
        plan: Plan = {}
        with suppress(DoesNotFit):  # It is among the problems.
            plan = PartitionManager(device).plan(counts).after
        homes = plan or dict.fromkeys(counts, ())
        problems += self._config.too_much(homes, device.granules, device.bandwidth())
        self._found.wrong.update(dict.fromkeys(problems))
        return plan

    def _fences(self, device: Device, plan: Plan) -> dict[str, Fence]:
        tenants = self._config.tenants
        cores = CoreGroups(self._root).look(core_shares(tenants, plan, device.granules, device.address))
        return plan_fences(tenants, plan, device.granules, device.unit, device.bandwidth(), cores)

    def _check_fence(self, tenant: str, fence: Fence, device: Device) -> None:
        """Print what holds a tenant back while others of its device are at work, and find what does not."""
        for line in describe_fence(fence, device.unit, device.granules, device.bandwidth()):
            _print_line(f"  {line}")
        keys = [key for key in FENCES if getattr(self._config.tenants[tenant], key) is not None]
        for note in fence.notes:
            key = next((key for key in keys if key in note), keys[0])
            if key == "memory_bandwidth" and fence.memory and not fence.granules:
                _print_line(f"  {note}")
            else:
                self._suspicious(("tenants", tenant, key), note)

    def _check_names(self, known: list[str]) -> None:
        for name in self._config.models.options:
            if name not in known:
                self._unserved(("models", name), f"there is no such model in the repository{_hint(name, known)}")
        for tenant in self._config.tenants.values():
            for name in tenant.models:
                if name != "*" and name not in known:
                    text = f"{name!r} is not in the repository{_hint(name, known)}"
                    self._unserved(("tenants", tenant.name, "models"), text)

    def _check_default(self) -> None:
        """Check which tenant answers requests without a key and a tenant's name."""
        tenants, default = self._config.tenants, self._config.server.default_tenant
        free = " or ".join(
            name for name, tenant in tenants.items() if not tenant.keys_sha256 and not self._without(name, "keys_sha256")
        )
        if default is None and free and ("server", "default_tenant") not in self._dropped:
            text = f"missing, so requests that name no tenant are 401; set it to {free}, or have them send X-Tenant"
            self._suspicious(("server", "default_tenant"), text)
        if default and tenants[default].keys_sha256:
            instead = f"use {free}" if free else "leave it out"
            text = f"{default!r} has keys, so requests without one are 401 all the same; {instead}"
            self._suspicious(("server", "default_tenant"), text)

    def _check_lending(self) -> None:
        """Check that a tenant that may borrow has a lender to borrow from, and one that lends has a borrower."""
        tenants = self._config.tenants
        for name, tenant in tenants.items():
            others = [other for other in tenants.values() if other is not tenant and other.device == tenant.device]
            if tenant.burst is not None and not any(other.lend or self._without(other.name, "lend") for other in others):
                text = "no other tenant of its device lends, so it has no effect; set `lend = true` for those that may lend"
                self._suspicious(("tenants", name, "burst"), text)
            if tenant.lend and not any(other.burst is not None or self._without(other.name, "burst") for other in others):
                text = "no other tenant of its device has a `burst`, so nothing is lent; set it for those that may borrow"
                self._suspicious(("tenants", name, "lend"), text)

    def _check_autopilot(self) -> None:
        """Check that there is a tenant that the autopilot may give something."""
        if self._config.server.autopilot != "off" and not any(each.target_p99 for each in self._config.tenants.values()):
            text = "no tenant has a `target_p99`, so it moves nothing; set it for those that are to get more when they miss it"
            self._suspicious(("server", "autopilot"), text)

    def _check_memory(self) -> None:
        """Check that the machine has the memory of all tenants together, which is allocated at the start on a GPU."""
        memory = {name: tenant.memory for name, tenant in self._config.tenants.items()}
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if (whole := sum(memory.values())) > there:
            terms = " + ".join(f"{name} {sized(each)}" for name, each in memory.items())
            text = f"memory of all of them is {terms} = {sized(whole)}, but the machine has {sized(there)}: lower it"
            self._suspicious(("tenants",), text)

    def _check_written(self) -> None:
        """Check that what the server writes beside its answers can be written, as it serves without that."""
        server = self._config.server
        for key, path in (("usage_dir", server.usage_dir), ("audit", server.audit)):
            try:
                if path is not None and path.name != "-":
                    check_writable(path)
            except PermissionError as error:
                who = f"user {os.geteuid()}: {error.strerror}; check it as the user that the server runs as"
                self._unserved(("server", key), f"{error.filename} cannot be written by {who}")
            except OSError as error:
                self._unserved(("server", key), f"{error.filename} cannot be written: {error.strerror}")

    def _check_budgets(self, device: Device | None, tenants: Sequence[str]) -> None:
        """Check that the device has the memory that its tenants' models may take together."""
        budgets = {name: budget for name in tenants if (budget := self._config.tenants[name].device_memory) is not None}
        there = device.memory() if device else None
        if there is not None and sum(budgets.values()) > there:
            terms = " + ".join(f"{name} {sized(budget)}" for name, budget in budgets.items())
            text = (
                f"device_memory of all of its device is {terms} = {sized(sum(budgets.values()))}, but that has {sized(there)}"
            )
            self._suspicious(("tenants",), f"{text}: models may be refused by the device within a budget; lower one")

    def _check_front_cores(self, tenant: TenantConfig) -> None:
        if missing := sorted(set(tenant.front_cores or ()) - self._allowed):
            text = f"{missing} are not among the cores this process may use, {sorted(self._allowed)}"
            self._wrong(("tenants", tenant.name, "front_cores"), text)

    def _print_http_cores(self, sharing: Collection[str]) -> None:
        """Print on which cores HTTP would run: on those of the tenants' partitions if these are cores, else on others.

        `sharing` are the tenants that have a share of their device.
        """
        chosen = {name: tenant.front_cores for name, tenant in self._config.tenants.items()}
        held = {name: cores for name, cores in self._cores.items() if cores is not None and name in sharing}
        if held:
            _print_line(describe({name: chosen[name] or cores for name, cores in held.items()}))
            for tenant in map(self._config.tenants.__getitem__, held):
                if why := too_many(tenant):
                    self._wrong(("tenants", tenant.name, "http_processes"), why)
            lines = conflicts(chosen, held)
            self._found.suspicious.update(dict.fromkeys(f"{self._config.source}: {line}" for line in lines))
        on_gpus = {name: chosen[name] for name, cores in self._cores.items() if cores is None}
        if on_gpus and self._config.server.front_cores == "auto":
            left = self._allowed.difference(*held.values())
            devices: list[str] = []
            for name in self._config.named_devices:
                if theirs := [tenant for tenant in self._config.tenants_on(name) if tenant in on_gpus]:
                    devices += [f"{name}, {tenant}" for tenant in theirs] if name in self._apart else [name]
            counts = count(self._config, (), len(self._allowed))
            _print_line(str(share_cores(left, on_gpus, devices, counts) or TOO_FEW_CORES))

    def _try(
        self, model_loader: ModelLoader, device: Device | None, tenant: str, granules: tuple[int, ...], names: list[str]
    ) -> None:
        """Load models on a partition of these granules, and close them again. Without a device, only look for their files."""
        if device is None:
            for name in names:
                self._print_model(_listed(self._repository, name))
            return
        try:
            with closing(device.carve(granules)) as partition:
                self._cores[tenant] = partition.host_cores
                models: dict[str, LoadedModel] = {}
                claims: list[Claim] = []
                counted: set[Hashable] = set()
                for name in model_loader.in_order(names):
                    loaded = models[name] = model_loader.attempt(name, partition, models, self._config.tenants[tenant])
                    self._print_model(loaded)
                    self._check_budget(self._config.tenants[tenant], loaded, claims, counted)
                    for executor in loaded.executors.values():
                        executor.close()
        except PartitionError as error:
            self._wrong(("device",), str(error))

    def _check_budget(self, tenant: TenantConfig, loaded: LoadedModel, claims: list[Claim], counted: set[Hashable]) -> None:
        """Print what a model takes of the device's memory, if the tenant has a budget.

        Appends it to `claims` if it fits, and what it shares with other models to `counted`.
        """
        if tenant.device_memory is None or not loaded.executors:
            return
        claim = Claim(loaded.name, taken_more(loaded.executors.values(), counted))
        _print_line(f"    device memory: {claim}")
        room = [] if tenant.paging else claims
        if missing(tenant.device_memory, room, claim) > 0:
            self._found.unserved[f"{tenant.name}: model {loaded.name} is unavailable: {refusal(tenant, room, claim)}"] = None
        else:
            claims.append(claim)
            counted.update(shared_by(loaded.executors.values()))

    def _print_model(self, loaded: LoadedModel) -> None:
        for served in loaded.served:
            _print_line(f"  {served.name} {served.version}: {model_line(served)}")
            _print_line(f"    {execution_line(loaded.executors[served.key].describe())}")
            self._check_batches(served)
            self._check_http_side(served)
        for which in dict.fromkeys(f"{problem.name} {problem.version}".rstrip() for problem in loaded.problems):
            _print_line(f"  {which}: unavailable")
        self._found.unserved.update(dict.fromkeys(line for line in loaded.messages() if line not in loaded.warnings))
        self._found.suspicious.update(dict.fromkeys(loaded.warnings))

    def _check_http_side(self, served: ModelVersion) -> None:
        """Find what is wrong with a model's functions and its tokenizer."""
        options = self._config.models.options.get(served.name, ModelOptions())
        tried = try_http_side(served, options.text or TextOptions())
        if tried.line:
            _print_line(f"    {tried.line}")
        if tried.unserved:
            self._found.unserved[tried.unserved] = None
        if tried.without_texts:
            self._found.suspicious[tried.without_texts] = None

    def _check_batches(self, served: ModelVersion) -> None:
        """Find options that this model makes useless."""
        options = self._config.models.options.get(served.name, ModelOptions())
        most, key = served.signature.max_batch, ("models", served.name)
        if (*key, "max_batch") in self._dropped:
            return
        for option in ("batch_delay", "preferred_batches") if not most else ():
            if getattr(options, option):
                self._unserved((*key, option), "the model takes no batches; set max_batch too, or leave it out")
        if most and (above := [size for size in options.preferred_batches or () if size > most]):
            self._unserved((*key, "preferred_batches"), f"{above[0]} is above the model's largest batch, which is {most}")

    def _access(self, tenant: TenantConfig) -> str:
        without = "keys that are wrong" if self._without(tenant.name, "keys_sha256") else "no keys: anyone may call it"
        ports = {"port": tenant.port, "gRPC port": tenant.grpc_port}
        access = "keys" if tenant.keys_sha256 else without
        return ", ".join([access, *(f"{kind} {port}" for kind, port in ports.items() if port)])

    def _without(self, tenant: str, key: str) -> bool:
        """Whether a tenant's key was dropped, so that nothing is known of what it should be."""
        return ("tenants", tenant, key) in self._dropped

    def _wrong(self, key: KeyPath, text: str) -> None:
        self._found.wrong[f"{self._config.source}: {dotted(key)}: {text}"] = None

    def _suspicious(self, key: KeyPath, text: str) -> None:
        self._found.suspicious[f"{self._config.source}: {dotted(key)}: {text}"] = None

    def _unserved(self, key: KeyPath, text: str) -> None:
        self._found.unserved[f"{self._config.source}: {dotted(key)}: {text}"] = None


def _listed(repository: Repository, name: str) -> LoadedModel:
    listing = repository.read(name)
    problems = [IndexEntry(name, problem.version, "UNAVAILABLE", problem.reason) for problem in listing.problems]
    return LoadedModel(name, [], problems, {}, list(listing.warnings))


def _print_line(line: str) -> None:
    print(line, flush=True)


def _memory_text(tenant: TenantConfig) -> str:
    """The memory that all requests of a tenant may hold, and one of them."""
    return f"memory {sized(tenant.memory)}, one request up to {sized(largest_block(tenant.memory))}"


def _hint(name: str, known: list[str]) -> str:
    return f"; {nearest(name, known)}" if known else ""


def unserved_weights(
    options: Mapping[str, ModelOptions], tenants: Iterable[TenantConfig], repository: Repository
) -> Iterator[tuple[KeyPath, str]]:
    """Each key with weights of versions that the repository does not serve, and what is wrong with it. Blocks."""
    given = [(("models", name, "weights"), name, dict(each.weights or ())) for name, each in options.items()]
    for tenant in tenants:
        given += [(("tenants", tenant.name, "weights"), name, dict(weights)) for name, weights in tenant.weights or ()]
    for path, name, weights in given:
        served = [str(file.version) for file in repository.read(name).files]
        missing = [version for version, weight in weights.items() if weight and version not in served]
        if missing:
            there = f"of {name} there is {some(served)}" if served else f"{name} has none"
            why = f"not served: {there}, by version_policy in {name}/config.pbtxt, whose default is the newest alone"
            yield path, f"version {some(missing)} is {why}"


SETTINGS = (
    *("burst", "lend", *FENCES, "ladder", "min_granules", "weights", "target_p99", "target_rate"),
    *LIMITS_OF_TENANT,
    *("max_execution", "device_memory", "paging", "http_processes"),
)
"""Keys of a tenant that are printed where they are set."""


def share_text(granules: tuple[int, ...] | None, cores: str) -> str:
    """A tenant's share of a device; `granules` are None where shares do not fit, or there is no device. `cores` are the numbers
    of a CPU's, with commas between; "" on a GPU.
    """
    if granules is None:
        return "no share (below), so nothing is served"
    if cores:
        return f"core{'s' * (len(granules) != 1)} {', '.join(cores.split(',')[granule] for granule in granules)}"
    return f"granules {list(granules)}"


def settings_line(tenant: TenantConfig) -> str:
    """What is set of how the tenant shares, is limited and is sized; "" if nothing is."""
    return ", ".join(written(tenant, SETTINGS))


def model_line(served: ModelVersion) -> str:
    inputs, outputs = (_tensors(specs) for specs in (served.signature.inputs, served.signature.outputs))
    most = served.signature.max_batch
    return f"{inputs} -> {outputs}{f', batches of up to {most}' if most else ''} ({served.platform})"


def execution_line(execution: Mapping[str, object]) -> str:
    """How it runs, in a line, without what is reported as a warning."""
    said = {key: value for key, value in execution.items() if key not in ("why", "notes", "counts") and value not in ("", [])}
    if said.get("graphs") == "none" and said.keys() & {
        "threads",
        "steps",
    }:  # There are none on a CPU, and none of several steps.
        del said["graphs"]
    return ", ".join(_execution_entry(key, value) for key, value in said.items())


def _execution_entry(key: str, value: Any) -> str:
    """One entry of `Executor.describe`. The steps of an ensemble are what their executors describe."""
    match key:
        case "shapes":
            return f"warmed for {' and '.join(', '.join(map(_dimensions, shapes)) for shapes in value)}"
        case "threads":
            return f"{value} thread{'s' * (value != 1)}"
        case "verified":
            words = Counter(each["verdict"] for each in value["others"])
            return "verified shapes: " + ", ".join([f"{value['right']} right", *(f"{n} {word}" for word, n in words.items())])
        case "steps":
            return f"steps: {'; '.join(map(execution_line, value))}"
        case _:
            return f"{key} {value if isinstance(value, str) else json.dumps(value)}"


def _dimensions(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"


def _tensors(specs: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.datatype}{list(spec.shape)}" for spec in specs) or "nothing"
