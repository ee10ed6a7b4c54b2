"""`greenlane curve --all`: the share that each tenant needs for its target, and whether all of them fit their devices."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from greenlane.load.machine import Others, describe
from greenlane.models import check_name
from partitions import Device
from server.app import configuration, open_alone
from server.config.schema import Config
from server.config.tables import dotted, nearest
from server.config.tenant import TenantConfig
from server.device.ahead import open_builds
from server.device.model_loader import ModelLoader, open_model_loader

from . import text
from .curve import Curve, Impossible, check_seconds
from .measure import Effort, measure
from .options import Options, Target
from .points import Fit, Point, candidate, keeps
from .subject import RepositorySubject


@dataclass(frozen=True, slots=True)
class Need:
    """What a tenant needs of its device: `granules`, of `size` units together; None if no share keeps its target.

    `curve` are the shares that were measured for it, None for a tenant without a target, which keeps the share that it has.
    """

    tenant: str
    granules: int | None
    size: int
    curve: Curve | None

    @property
    def unclear(self) -> bool:
        """Whether longer measurements might find a share."""
        points = self.curve.points if self.curve else ()
        return self.granules is None and any(p.at_rate and p.at_rate.word in ("too noisy", "too few") for p in points)


def plan(options: Options, command: str, effort: Effort) -> tuple[int, dict[str, Any]]:
    """Measure every tenant with a target, print what each needs, and return the exit status and the document. Blocks.

    Raises ConfigError, PartitionError, ModelRefused, Impossible, Interrupted.
    """
    status, devices = 0, {}
    with configuration(options.config) as config:
        goals = targets(config, options)
        for tenant, target in goals.items():
            check_seconds(target, options.seconds, f"{tenant}: ")
        for name in config.named_devices:  # One after another: each is closed before the next is opened.
            with closing(open_alone(config.named_devices[name])) as device:
                print(f"device {name}: {device.describe()}")
                with closing(open_model_loader(config.on_device(name), device, builds=open_builds(config.models))) as loader:
                    tenants = [config.tenants[each] for each in config.tenants_on(name)]
                    needs = [
                        _need(tenant, goals.get(tenant.name), device, loader, config.source, options, effort)
                        for tenant in tenants
                    ]
                found, lines = conclude(needs, device.unit, device.granules)
                print("\n".join(lines))
                status = max(status, found)
                devices[name] = _as_json(needs, device)
    return status, {"devices": devices, "machine": describe(command)}


def targets(config: Config, options: Options) -> dict[str, Target]:
    """The target of each tenant that has one. Raises Impossible."""
    if unknown := [name for name in options.targets if name not in config.tenants]:
        raise Impossible(f"--target {unknown[0]}: not a tenant of {config.source}; {nearest(unknown[0], config.tenants)}")
    found = {}
    for name, tenant in config.tenants.items():
        if goal := options.targets.get(name):
            found[name] = goal
        elif tenant.target_p99 and tenant.target_rate:
            found[name] = Target(tenant.target_rate, tenant.target_p99)
        elif tenant.target_p99 or tenant.target_rate:
            has, lacks = ("target_p99", "target_rate") if tenant.target_p99 else ("target_rate", "target_p99")
            key = dotted(("tenants", name, has))
            raise Impossible(f"{config.source}: {key} is set, but {lacks} is not; set both, or give --target {name}=800/5ms")
    if not found:
        example = next(iter(config.tenants))
        raise Impossible(
            f"{config.source}: no tenant has a target; set target_p99 and target_rate, or give --target {example}=800/5ms"
        )
    return found


def _need(
    tenant: TenantConfig,
    target: Target | None,
    device: Device,
    loader: ModelLoader,
    source: str,
    options: Options,
    effort: Effort,
) -> Need:
    """Measure shares until the smallest that keeps the target is known; without a target it is the configured share."""
    sizes, unit = device.granules, device.unit
    if target is None:
        own = tenant.share(unit, sizes)
        print(f"{tenant.name}: no target, so it keeps its {text.units(sum(sizes[:own]), unit)}")
        return Need(tenant.name, own, sum(sizes[:own]), None)
    names = loader.names() if "*" in tenant.models else list(tenant.models)
    for name in (*names, *options.mix):
        check_name(name, loader, source)
    if not names:
        raise Impossible(f"{source}: {dotted(('tenants', tenant.name, 'models'))}: there is no model to measure")
    print(f"{tenant.name}: {_mix(names, options.mix)}; {text.wanted(target)}", flush=True)
    weights = [options.mix.get(name, 1.0) for name in names]
    points: dict[int, Point] = {}
    others = Others(sorted(os.sched_getaffinity(0)), True)
    with closing(RepositorySubject(device, loader, names, options.batch, options.shapes, several=True)) as subject:
        while (count := candidate({at: keeps(point) for at, point in points.items()}, len(sizes))) is not None:
            points[count] = measure(device, count, subject.bind, weights, target, effort)
            if len(points) == 1:
                print(text.heading(target, unit))
            print(text.row(points[count]), flush=True)
    ascending = tuple(points[count] for count in sorted(points))
    notes = text.busy_cores(others.share())
    curve = Curve(tenant.name, options.batch, device.describe(), unit, sum(sizes), ascending, target, notes)
    need, lines = concluded(tenant, curve, sizes)
    print("\n".join(lines))
    return need


def concluded(tenant: TenantConfig, curve: Curve, sizes: tuple[int, ...]) -> tuple[Need, list[str]]:
    """What a tenant needs by what was measured for it, and the sentences that say so. Pure."""
    lines = [*(f"{tenant.name}: {note}" for note in curve.notes), *text.noise(curve)]
    if (chosen := curve.smallest) is None:
        if curve.target is not None:
            lines.append(f"{tenant.name}: {text.none_keeps(curve, curve.target)}")
        return Need(tenant.name, None, 0, curve), lines
    least = tenant.min_granules or 1
    granules = max(chosen.granules, least)
    why = f", as its min_granules is {least}" if granules > chosen.granules else ""
    lines.append(f"{tenant.name} needs {text.units(sum(sizes[:granules]), curve.unit)}{why}")
    if chosen.granules > least:
        lines += [f"{tenant.name}: {line}" for line in text.unclear(curve, below=chosen)]
    return Need(tenant.name, granules, sum(sizes[:granules]), curve), lines


def _mix(names: list[str], mix: Mapping[str, float]) -> str:
    """The models that are asked for, and how often each."""
    return ", ".join(f"{name} ({mix[name]:g})" if name in mix else name for name in names)


def conclude(needs: Iterable[Need], unit: str, sizes: tuple[int, ...]) -> tuple[int, list[str]]:
    """The exit status for one device, and what to print: whether the shares fit, and the lines to paste. Pure."""
    needs = list(needs)
    if not needs:
        return 0, ["no tenant is on it"]
    lacking = [need for need in needs if need.granules is None]
    known = {need.tenant: need.granules for need in needs if need.granules is not None}
    fit = Fit(known, len(sizes))
    lines = [*_fits(fit, unit, sizes)] if known else []
    if lacking:
        lines.append(f"not counted, as no share was seen to keep its target: {', '.join(need.tenant for need in lacking)}")
    status = 2 if fit.left < 0 or any(not need.unclear for need in lacking) else 1 if lacking else 0
    if status == 0:
        lines += ["", *_toml(needs, unit)]
    return status, lines


def _fits(fit: Fit, unit: str, sizes: tuple[int, ...]) -> Iterator[str]:
    size = sizes[0]
    terms = " + ".join(f"{name} {count * size}" for name, count in fit.needs.items())
    needed = f"{terms} = {text.units(sum(fit.needs.values()) * size, unit)}"
    if fit.left >= 0:
        yield f"{needed} of {fit.total * size}: {fit.left * size} left"
    else:
        most = fit.needs[fit.largest] * size
        yield (
            f"{needed}, but the device has {fit.total * size}: {-fit.left * size} too many; "
            f"the largest is {fit.largest} with {most}"
        )


def _toml(needs: list[Need], unit: str) -> Iterator[str]:
    for need in needs:
        if need.curve and need.curve.target and need.granules:
            yield from (
                f"[{dotted(('tenants', need.tenant))}]",
                text.share(need.granules, need.size, unit),
                *text.targets(need.curve.target),
                "",
            )


def _as_json(needs: list[Need], device: Device) -> dict[str, Any]:
    known = sum(need.granules or 0 for need in needs)
    tenants = {
        need.tenant: {
            "granules": need.granules,
            "units": need.size if need.granules else None,
            "target": text.target_json(need.curve.target) if need.curve else None,
            "points": text.points_json(need.curve.points) if need.curve else [],
            "notes": list(need.curve.notes) if need.curve else [],
        }
        for need in needs
    }
    about = {"device": device.describe(), "unit": device.unit, "granules": len(device.granules)}
    return {**about, "left": len(device.granules) - known, "tenants": tenants}
