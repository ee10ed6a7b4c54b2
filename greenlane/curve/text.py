"""A curve as text for people and as JSON for programs, and the TOML lines that follow from it. Pure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from greenlane.load.rules import OTHERS
from server.config.bandwidth import in_words
from server.config.tenant import SHARE_OF_UNIT

from .curve import Curve
from .options import Target
from .points import LEAST, LESS, P99, AtRate, Drawn, Point, Word, disturbed

_WIDTHS, _DRAWN, _AT_RATE = (8, 13, 12, 12), (12, 8, 9, 17, 15), (11, 15, 19, 10)
DRAWN = ("memory MB", "GB/s", "of all", "PCIe MB in/out", "GB/s")
"""Headings of what requests drew: a request, and all of them in a second."""


def units(count: int, unit: str) -> str:
    """`1 core`, `16 SMs`."""
    return f"{count} {unit}{'s' * (count != 1)}"


def short(seconds: float) -> str:
    """A duration with three digits: `0.412 ms`, `12.3 ms`."""
    return f"{_digits(1e3 * seconds)} ms"


def _digits(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def toml_duration(seconds: float) -> str:
    """A duration as the configuration has it: `5ms`, `500us`."""
    return f"{seconds * 1e3:.10g}ms" if seconds >= 1e-3 else f"{seconds * 1e6:.10g}us"


def heading(target: Target | None, unit: str, bandwidth: bool = False) -> str:
    """The first line of the table; with `bandwidth` rows have what requests drew."""
    names = [f"{unit}s", "requests/s", "p50 alone", "p99 alone", *(DRAWN if bandwidth else ())]
    if target:
        names += ["p50", f"p99 at {target.rate:g}/s", "95 % interval", "requests"]
    return _line(names, bandwidth)


def row(point: Point) -> str:
    """A line of the table."""
    cells = [str(point.size), f"{point.throughput:,.0f}", short(point.p50), short(point.p99), *drawn_cells(point)]
    if found := point.at_rate:
        cells += [short(found.p50), *_cells(found.p99, found.word)] if found.p99 else ["-"] * 4
    return _line(cells, bool(point.drawn)) + (f"  {found.word}" if found else "")


def drawn_cells(point: Point) -> Iterator[str]:
    """The cells below DRAWN; none for a point without."""
    if found := point.drawn:
        memory, *pcie = (_digits(each / 1e6) for each in found.moved)
        rate, *ways = (_digits(each / 1e9) for each in found.rates)
        yield from (memory, rate, f"{found.memory:.1%}", "/".join(pcie), "/".join(ways))


def _cells(p99: P99, word: Word) -> list[str]:
    if word == "too few":
        return ["-", "-", str(p99.requests)]
    return [short(p99.value), f"{short(p99.low)[:-3]} to {short(p99.high)}", str(p99.requests)]


def _line(cells: Sequence[str], bandwidth: bool) -> str:
    widths = _WIDTHS + (_DRAWN if bandwidth else ()) + _AT_RATE
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)).rstrip()


def busy_cores(others: float) -> tuple[str, ...]:
    """A sentence if other programs used more than a tenth of the cores; `others` is the part that they used."""
    if others <= OTHERS:
        return ()
    return (f"other programs used {others:.0%} of the cores meanwhile, which makes p99s longer: stop them, and measure again",)


def conclusions(curve: Curve) -> Iterator[str]:
    """Sentences: the notes, the knee, what requests draw, and the smallest share that keeps the target."""
    yield from curve.notes
    yield from noise(curve)
    yield _knee(curve)
    yield from _draws(curve)
    if curve.target is None:
        return
    if curve.target.p99 is None:
        yield f"no --p99 was given, so no share is chosen; the table has the p99 at {curve.target.rate:g} requests a second"
    elif (found := curve.smallest) and found.at_rate and (p99 := found.at_rate.p99):
        of = f"{units(found.size, curve.unit)} of {curve.total}"
        yield (
            f"{of}: the smallest share that keeps {wanted(curve.target)}; it was {short(p99.value)} of {p99.requests} "
            f"requests, with 95 % at most {short(p99.high)}"
        )
        yield from unclear(curve, below=found)
    else:
        yield none_keeps(curve, curve.target)


def noise(curve: Curve) -> Iterator[str]:
    """A sentence if something else used the shares while they were measured."""
    if noisy := [point for point in curve.points if disturbed(point)]:
        worst = max(noisy, key=lambda point: point.p99 / point.p50)
        yield (
            f"something else was running on this machine: one request alone on {units(worst.size, curve.unit)} took "
            f"{short(worst.p50)} in the middle, but {short(worst.p99)} at its p99; measure again when it is quiet"
        )


def wanted(target: Target) -> str:
    """A target in words."""
    p99 = toml_duration(target.p99 or 0.0).replace("ms", " ms").replace("us", " us")
    return f"a p99 of {p99} at {target.rate:g} requests a second"


def none_keeps(curve: Curve, target: Target) -> str:
    """That no share was seen to keep the target, with the best that was seen."""
    if doubts := list(unclear(curve)):
        return f"it is not clear whether any share keeps {wanted(target)}; {'; '.join(doubts)}"
    if (found := curve.best) and found.at_rate and found.at_rate.p99:
        seen = f"the best was {short(found.at_rate.p99.value)} on {units(found.size, curve.unit)}"
        if (count := found.at_rate.p99.requests) < LEAST:
            seen += f" (of {count} requests, after which so many were late that more would not have changed it)"
    else:
        fastest = max(curve.points, key=lambda point: point.throughput)
        seen = f"all are overloaded: {units(fastest.size, curve.unit)} answered {fastest.throughput:,.0f} a second at most"
    return f"no share that was measured keeps {wanted(target)}; {seen}"


def unclear(curve: Curve, below: Point | None = None) -> Iterator[str]:
    """What stands in the way of a verdict, for shares below this one."""
    for point in curve.points:
        if point.at_rate is None or (below and point.granules >= below.granules):
            continue
        of, found = units(point.size, curve.unit), point.at_rate.p99
        if point.at_rate.word == "too noisy" and found:
            yield f"{of}: too noisy to say (p99 {short(found.low)[:-3]} to {short(found.high)}); raise --seconds"


def _knee(curve: Curve) -> str:
    if len(curve.points) < 2:
        return "one share has no knee; measure several to see from where more brings little"
    largest, found = curve.points[-1], curve.knee
    if found is None:
        more = f"over {LESS:.0%} more throughput than the next smaller one"
        return f"no knee: {units(largest.size, curve.unit)}, the largest share, still has {more}"
    return f"the knee is at {units(found.size, curve.unit)}: no larger share has over {LESS:.0%} more throughput"


def _draws(curve: Curve) -> Iterator[str]:
    """A sentence on what requests drew on the share of `toml`, or else on the largest, and what would not hold them back."""
    point = _chosen(curve) or curve.points[-1]
    if found := point.drawn:
        ways = f"{in_words(found.rates.pcie_in)} of PCIe in, {in_words(found.rates.pcie_out)} out"
        key = f" and pcie = {_unhindered(found.pcie):g}" if found.pcie else ""
        yield (
            f"on {units(point.size, curve.unit)} requests back to back draw {in_words(found.rates.memory)} of the memory "
            f"({found.memory:.0%}), {ways}: memory_bandwidth = {_unhindered(found.memory):g}{key} would not hold them back"
        )


def _unhindered(part: float) -> float:
    """A part in hundredths that is a tenth more than this, as the server's own figures are off by some."""
    return min(1.0, max(1, math.ceil(110 * part)) / 100)


def _chosen(curve: Curve) -> Point | None:
    return curve.smallest or (None if curve.target and curve.target.p99 else curve.knee)


def toml(curve: Curve) -> str:
    """Lines to paste for a tenant with the smallest share that keeps the target, else with the knee's; "" without either."""
    if (found := _chosen(curve)) is None:
        return ""
    lines = ["[tenants.NAME]", share(found.granules, found.size, curve.unit), f'models = ["{curve.model}"]']
    if found.drawn:
        lines.append(f"memory_bandwidth = {_unhindered(found.drawn.memory):g}")
    if curve.target and curve.target.p99:
        lines += targets(curve.target)
    return "\n".join(lines)


def targets(target: Target) -> list[str]:
    """The keys of a tenant's target."""
    p99 = [f'target_p99 = "{toml_duration(target.p99)}"'] if target.p99 else []
    return [*p99, f"target_rate = {max(1, math.ceil(target.rate))}"]


def share(granules: int, size: int, unit: str) -> str:
    """The key of a share: in the device's units where the configuration has a key for them."""
    return f"{SHARE_OF_UNIT[unit]} = {size}" if unit in SHARE_OF_UNIT else f"granules = {granules}"


def as_json(curve: Curve) -> dict[str, Any]:
    """Everything that was measured, in seconds."""
    chosen, bend = curve.smallest, curve.knee
    return {
        "model": curve.model,
        "batch": curve.batch,
        "device": curve.device,
        "unit": curve.unit,
        "units": curve.total,
        "target": target_json(curve.target),
        "points": points_json(curve.points),
        "knee": bend.size if bend else None,
        "smallest": chosen.size if chosen else None,
        "toml": toml(curve),
        "notes": list(curve.notes),
        "machine": curve.machine,
    }


def target_json(target: Target | None) -> dict[str, float | None] | None:
    """A target's fields."""
    return {"rate": target.rate, "p99": target.p99} if target else None


def points_json(points: Iterable[Point]) -> list[dict[str, Any]]:
    """The fields of points."""
    return [
        {
            "granules": point.granules,
            "units": point.size,
            "requests_per_second": point.throughput,
            "p50_alone": point.p50,
            "p99_alone": point.p99,
            "at_rate": _at_rate_json(point.at_rate) if point.at_rate else None,
            **({"drawn": _drawn_json(point.drawn)} if point.drawn else {}),
        }
        for point in points
    ]


def _drawn_json(found: Drawn) -> dict[str, Any]:
    """Bytes of a request, bytes a second, and the parts of what the GPU moves at most."""
    rates, parts = found.rates._asdict(), {"memory_bandwidth": found.memory, "pcie": found.pcie}
    return {"moved": found.moved._asdict(), "bytes_per_second": rates, **parts}


def _at_rate_json(found: AtRate) -> dict[str, Any]:
    p99 = found.p99
    return {
        "rate": found.rate,
        "verdict": found.word,
        "requests": p99.requests if p99 else 0,
        "p50": found.p50 if p99 else None,
        "p99": p99.value if p99 else None,
        "p99_low": p99.low if p99 else None,
        "p99_high": p99.high if p99 else None,
    }
