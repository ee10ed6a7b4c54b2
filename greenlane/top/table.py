"""The table as lines of text. Pure."""

from collections.abc import Sequence

from .rates import DeviceRates, ModelRates, Moving, Rates, TenantRates

_HEAD = (
    *("TENANT", "DEVICE", "SHARE", "USED%", "IDLE%", "LENT%", "BORROWED", "RUN/S", "REQ/S", "P99", "WAIT", "REFUSED/S"),
    *("MEMORY", "WATTS", "MOVES", "PCIE", "NARROW/S"),
)
_SPARED = (
    "IDLE%",
    "LENT%",
    "BORROWED",
    "NARROW/S",
    "MEMORY",
    "WATTS",
    "PCIE",
    "MOVES",
    "DEVICE",
    "RUN/S",
    "SHARE",
    "WAIT",
    "REFUSED/S",
    "P99",
)
"""Columns that are left out where there is no room for all, the first ones first; DEVICE before all where there is one."""
_LEFT = 2
"""Columns that are aligned to the left."""


def lines(rates: Rates, models: bool = True, width: int | None = None) -> list[str]:
    """Devices, then a row for each tenant, and for each of its models if `models`.

    In a terminal of `width` characters, of which the last stays empty, the least important columns are left out, and a line
    says how many; None is no limit.

    The busiest tenants come first, and so do the busiest of a tenant's models. Those that are as busy, as far as the table
    shows it, are in order of their names and versions, so that rows do not change places for less.
    """
    shown = [_device(each) for each in rates.devices]
    state = "" if rates.ready else ", NOT READY"
    rows: list[Sequence[str]] = [_HEAD]
    for tenant in sorted(rates.tenants, key=lambda each: (-_shown(each), each.tenant, each.device)):
        if tenant.share or tenant.granted or tenant.used:
            rows.append(_tenant(tenant))
            rows += [_model(each, tenant) for each in sorted(tenant.models, key=_rank) if models]
    spared = _SPARED if len(rates.devices) > 1 else ("DEVICE", *_SPARED)
    note, table = _narrowed(_without_empty(rows), spared, width)
    return [f"greenlane {rates.until}, over {rates.seconds:.1f} s{state}", *shown, note, *_aligned(table)]


def _shown(each: TenantRates | ModelRates) -> float:
    """Units that it used, to about what the table shows of them."""
    return round(each.used + each.borrowed, 2)


def _rank(model: ModelRates) -> tuple[float, str, int, str]:
    return -_shown(model), model.name, len(model.version), model.version


def _device(device: DeviceRates) -> str:
    granted, used = f"{_number(device.granted)} granted", f"{_percent(device.used + device.lent, device.units)}% used"
    power = "" if device.watts is None else f", {device.watts:.0f} W ({device.idle_watts or 0:.0f} of them idle)"
    memory, pcie = _moving(device.moving)
    moved = f", moves {memory} (PCIe {pcie})" if device.moving else ""
    return f"device {device.name}: {device.units} {device.unit}s, {granted}, {used}{power}{moved}"


def _tenant(tenant: TenantRates) -> tuple[str, ...]:
    late = f" (reported {tenant.age:.0f} s ago)" if tenant.age > 5 else ""
    return (
        tenant.tenant + late,
        tenant.device,
        str(tenant.share),
        *(_percent(each, tenant.granted) for each in (tenant.used, tenant.idle, tenant.lent)),
        _number(tenant.borrowed),
        _number(tenant.works),
        _number(tenant.answered),
        "-" if tenant.p99 is None else _time(tenant.p99),
        str(tenant.waiting),
        _number(tenant.refused),
        _bytes(tenant.memory),
        "" if tenant.watts is None else f"{tenant.watts:.1f}",
        *_moving(tenant.moving),
        "" if tenant.narrow is None else _number(tenant.narrow),
    )


def _model(model: ModelRates, tenant: TenantRates) -> tuple[str, ...]:
    watts = "" if model.watts is None else f"{model.watts:.1f}"
    used, borrowed, works = _percent(model.used, tenant.granted), _number(model.borrowed), _number(model.works)
    return (
        f"  {model.name} {model.version}",
        "",
        "",
        used,
        "",
        "",
        borrowed,
        works,
        "",
        "",
        "",
        "",
        "",
        watts,
        *_moving(model.moving),
        "",
    )


def _moving(moving: Moving | None) -> tuple[str, str]:
    """Of its memory and over PCIe; with a ~ where it is estimated."""
    if moving is None:
        return "", ""
    about = "~" if moving.estimated else ""
    return about + _per_second(moving.memory), about + _per_second(moving.pcie)


def _without_empty(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Without columns that no row has anything in: what this device cannot say."""
    kept = [index for index in range(len(_HEAD)) if any(row[index] for row in rows[1:]) or index < _LEFT]
    return [[row[index] for index in kept] for row in rows]


def _narrowed(rows: list[list[str]], spared: Sequence[str], width: int | None) -> tuple[str, list[list[str]]]:
    """The table without columns for which there is no room, and a line about them; "" where all fit."""
    full = _width(rows)
    gone = 0
    for name in spared:
        if width is None or _width(rows) < width:
            break
        if name in rows[0]:
            at = rows[0].index(name)
            rows = [[*row[:at], *row[at + 1 :]] for row in rows]
            gone += 1
    return (f"{gone} more column{'s' * (gone != 1)} in a terminal of {full + 1}" if gone else ""), rows


def _width(rows: Sequence[Sequence[str]]) -> int:
    return max(map(len, _aligned(rows)))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return [
        "  ".join(
            text.ljust(width) if rows[0][index] in _HEAD[:_LEFT] else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}" if whole > 0 else "-"


def _number(value: float) -> str:
    return "0" if abs(value) < 0.05 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _per_second(value: float) -> str:
    for power, unit in ((12, "TB/s"), (9, "GB/s"), (6, "MB/s")):
        if value >= 10**power:
            return f"{value / 10**power:.1f} {unit}"
    return f"{value / 1000:.1f} kB/s"


def _bytes(value: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << power:
            return f"{value / (1 << power):.1f} {unit}"
    return f"{value} B" if value else ""
