"""The findings as one HTML page that needs nothing else: pictures inside, the table, the machine, how it was measured."""

from collections.abc import Mapping
from html import escape
from typing import Any

from greenlane.report.page import document, each, pairs, picture, table, tiles

from .findings import Findings, busiest, few, milliseconds, times
from .verdicts import CONTROL, UNDER, Combination, Verdict

_TONES = {"isolated": "good", "not exercised": "mute", "no control": "mute", "too noisy": "mute"}
_CAPTIONS = {
    "bars": "The victim's p99 by aggressor. Grey: alone.",
    "distributions": "How many requests took longer than that, all rounds together. The dotted line is the p99.",
    "timeline": "Every request of the victim in one round, by when it was due: what a partition keeps away is only seen below.",
}


def render(findings: Findings, pictures: Mapping[str, bytes]) -> str:
    """The page; `pictures` are PNG files by the names that `plots.draw` gives them."""
    parts = [
        f"<header><h1>{escape(findings.title)}</h1>{_summary(findings.verdicts)}</header>",
        picture(pictures["bars"], _CAPTIONS["bars"]),
        f"<section><h2>In numbers</h2>{_table(findings)}{_few(findings)}{_throughput(findings)}</section>",
        *(picture(pictures[name], _CAPTIONS[name]) for name in ("timeline", "distributions")),
        f"<section><h2>Who disturbed</h2>{_aggressors(findings)}</section>",
        f"<section><h2>How it was measured</h2><ul>{each('li', findings.notes)}</ul>{pairs(findings.settings)}</section>",
        f"<section><h2>On what</h2>{pairs(findings.machine)}</section>",
    ]
    return document(findings.title, parts)


def _summary(verdicts: list[Verdict]) -> str:
    proven = [one for one in verdicts if one.word == "isolated"]
    open_ = [one for one in verdicts if one.word not in _TONES]
    shown = [(f"{len(proven)} of {len(verdicts)}", "aggressors held off, where the control shows that they disturb")]
    shown.append((str(len(open_)), "leaks: the tail grew in the victim's own partition"))
    shown += [(f"{times(max(one.ratios['p99'] for one in verdicts))}&times;", "worst growth of the p99 in its own partition")]
    controls = [one.control_ratio for one in verdicts if one.control]
    shown += [(f"{times(max(controls))}&times;", "worst growth on one partition for all")] if controls else []
    return tiles(shown)


def _table(findings: Findings) -> str:
    groups = [("", 2), ("p99, ms", 3), ("p99.9, ms", 2), ("under load / alone", 3), ("control", 1), ("requests", 2), ("", 1)]
    top = "".join(f'<th colspan="{span}">{name}</th>' for name, span in groups)
    names = ["victim", "aggressor", "alone", "loaded", "control", "alone", "loaded"]
    names += ["p50", "p99", "p99.9", "p99", "sent", "failed", ""]
    rows = "".join(_row(verdict) for verdict in findings.verdicts)
    head = f'<tr class="groups">{top}</tr><tr>{each("th", names)}</tr>'
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _row(one: Verdict) -> str:
    cells = [one.victim, one.aggressor, milliseconds(one.alone.p99), milliseconds(one.under.p99)]
    cells += [milliseconds(one.control.p99) if one.control else "-", milliseconds(one.alone.p999), milliseconds(one.under.p999)]
    cells += [times(one.ratios[name]) for name in ("p50", "p99", "p999")]
    cells += [times(one.control_ratio), str(one.under.count), str(one.under.failed)]
    tone = _TONES.get(one.word, "bad")
    chip = f'<td><span class="chip {tone}" title="{escape(one.why)}">{escape(one.word)}</span></td>'
    return f"<tr>{each('td', cells)}{chip}</tr>"


def _few(findings: Findings) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in few(findings.verdicts))


def _throughput(findings: Findings) -> str:
    lines = [
        f"{one.name}: {one.partitions:,.0f} a second on partitions, {one.plain:,.0f} without, so {one.ratio:.2f} of it is left"
        for one in findings.throughput
    ]
    return f"<h3>What it costs</h3><ul>{each('li', lines)}</ul>" if lines else ""


def _aggressors(findings: Findings) -> str:
    names = ["victim", "aggressor", "what it does", "answered in its partition", "answered without partitions"]
    return table(names, (_aggressor(one, findings.aggressors) for one in findings.combinations), "words")


def _aggressor(one: Combination, what: Mapping[str, str]) -> str:
    done = ["; ".join(f"{_load(row)}" for row in busiest(one, kind)) or "-" for kind in (UNDER, CONTROL)]
    return f"<tr>{each('td', [one.victim, one.aggressor, what.get(one.aggressor, ''), *done])}</tr>"


def _load(row: Mapping[str, Any]) -> str:
    return f"{row['name']} {row['rate']:,.0f}/s, {row['megabytes']:,.1f} MB/s"
