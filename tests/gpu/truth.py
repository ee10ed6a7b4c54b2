"""`python -m tests.gpu.truth`: when each part of tests/gpu was last run and last seen to pass, and what has changed since.

It reads the logs of `tests/gpu/all.sh` in tests/gpu/results, DATE-GPU-REVISION-PART.log, and asks git for the folders of the
code that a part runs and that differ from that revision now. `--write` brings the table in tests/gpu/RUNS.md up to date, which
has no changes in it, so it is out of date only when there is another log.
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests/gpu/results"
PAGE = ROOT / "tests/gpu/RUNS.md"
BEGIN = "<!-- Written by `python -m tests.gpu.truth --write` from the logs in tests/gpu/results. -->"
END = "<!-- The end of what is written. -->"


class Part(NamedTuple):
    """A part of all.sh: what it is, and the folders whose code it runs."""

    what: str
    covers: tuple[str, ...]


SERVER = ("engines", "partitions", "server", "greenlane", "tests/gpu")
UNDER_MPS = ("tests", "alone", "felt", "two", "soak", "prove", "fence", "fence-prove", "change", "lending")
"""Parts that MPS=on runs as well, as PART-mps: what of them starts servers, with a device process for each tenant."""
PARTS: Mapping[str, Part] = {
    "tests": Part("what may run side by side", SERVER),
    "alone": Part("what measures time or memory", SERVER),
    "felt": Part("latency beside changes and neighbours, confinement", SERVER),
    "memcheck": Part("compute-sanitizer", ("engines", "partitions", "tests/gpu")),
    "two": Part("two GPUs: moves, a killed process", SERVER),
    "mps": Part("processes under MPS: faults, kills, a server with one for each tenant", SERVER),
    "soak": Part("everything at once for minutes", (*SERVER[:4], "benchmarks")),
    "prove": Part("greenlane prove, of two tenants or more", SERVER),
    "fence": Part("figures of isolation beside hogs, with a fence and without", (*SERVER[:4], "benchmarks")),
    "fence-prove": Part("greenlane prove --memory, which fails without a fence and passes with one", SERVER),
    "change": Part("figures of latency while something changes", (*SERVER[:4], "benchmarks/change")),
    "apart": Part("figures of many tenants, in one device process and in one each", (*SERVER[:4], "benchmarks")),
    "starting": Part("cold starts", (*SERVER[:4], "benchmarks")),
    "lending": Part("figures of lending", (*SERVER[:4], "benchmarks")),
    "isolation": Part("figures of isolation", (*SERVER[:4], "benchmarks")),
    **{f"{part}-mps": Part("the same with a device process for each tenant", SERVER) for part in UNDER_MPS},
}
_BENCHMARKS = "soak", "prove", "fence", "fence-prove", "lending"
_UNCOUNTED = ("apart", "starting", "isolation", *_BENCHMARKS, *(f"{part}-mps" for part in _BENCHMARKS))
"""Benchmarks that end with 0 if all is well, and print tables."""
_NAME = re.compile(rf"(\d{{4}}-\d\d-\d\d)-([^-]+)-([0-9a-f]{{7,40}})-({'|'.join(sorted(PARTS, reverse=True))})(?:-[^-]+)?\.log")
_HEAD = re.compile(r"^(command|date|revision|GPU): +(.+)$", re.MULTILINE)
_ENDED = re.compile(r"ended with (\d+)$", re.MULTILINE)
_SUMMARY = re.compile(r"^(?:=+ )?((?:\d+ (?:passed|failed|skipped|errors?|deselected|xfailed)(?:, )?)+) in ", re.MULTILINE)
_FIGURE = re.compile(r"^(met|missed|not exercised) ", re.MULTILINE)
_COUNTED = re.compile(r"(\d+) (passed|failed|skipped|error)")
_OVERRAN = 124
_SECTION = re.compile(r" (?:-k|--only) ")
_FENCE = "fence", "fence-mps"
"""Parts with one such option of their own."""


class Run(NamedTuple):
    """What one log says. `ended` is the exit status; `whole` is whether it was all of the part."""

    part: str
    date: str
    gpu: str
    revision: str
    counts: Mapping[str, int]
    ended: int
    whole: bool
    log: str

    @property
    def passed(self) -> bool:
        """All of the part ran, and nothing failed. A part of which everything was skipped has not passed."""
        good = any(self.counts.get(each) for each in ("passed", "met", "no finding"))
        return self.whole and self.ended == 0 and (good or self.part in _UNCOUNTED)

    @property
    def result(self) -> str:
        """As it is said on the page."""
        found = ", ".join(f"{count} {kind}" if kind != "no finding" else kind for kind, count in self.counts.items())
        ended = "cut by its limit" if self.ended == _OVERRAN else "" if found else f"ended with {self.ended}"
        return "; ".join(each for each in (found, ended, "" if self.whole else "in part") if each)


def read(name: str, text: str) -> Run | None:
    """The run that a log of this name is of; None for one that is no log of a part, or has no head or no end."""
    named = _NAME.fullmatch(name)
    head = dict(reversed(_HEAD.findall(text[:4000])))
    ended = _ENDED.findall(text)
    if not named or not ended or not {"command", "date", "revision"} <= head.keys():
        return None
    date, gpu, revision, part = named.groups()
    known = re.match(r"[0-9a-f]{7,40}(?:-dirty)?$", head["revision"])
    gpu = re.sub(r", ([0-9.]+)$", r", driver \1", head.get("GPU", "").replace("NVIDIA ", "")) or gpu.upper().replace(
        "X", " x ", 1
    )
    counts = _counts(part, text)
    whole = len(_SECTION.findall(head["command"])) <= (part in _FENCE) and "not exercised" not in counts
    minutes = head["date"].partition(",")[0]
    return Run(part, minutes or date, gpu, known[0] if known else revision, counts, int(ended[-1]), whole, name)


def _counts(part: str, text: str) -> dict[str, int]:
    if part == "memcheck":
        errors = re.findall(r"ERROR SUMMARY: (\d+) error", text)
        return {} if not errors else {"errors": int(errors[-1])} if int(errors[-1]) else {"no finding": 1}
    if summaries := _SUMMARY.findall(text):
        counted = {kind: int(count) for count, kind in _COUNTED.findall(summaries[-1])}
        return {kind: counted[kind] for kind in ("passed", "failed", "error", "skipped") if kind in counted}
    figures = Counter(_FIGURE.findall(text))
    return {kind: figures[kind] for kind in ("met", "missed", "not exercised") if figures[kind]}


def runs(folder: Path = RESULTS) -> list[Run]:
    """Those of a folder, the newest first."""
    found = [run for path in folder.glob("*.log") if (run := read(path.name, path.read_text("utf-8", "replace")))]
    return sorted(found, key=lambda run: (run.date, run.log), reverse=True)


def latest(found: Sequence[Run]) -> Iterator[tuple[str, Run | None, Run | None]]:
    """Each part with its last run, and its last that passed."""
    for part in PARTS:
        own = [run for run in found if run.part == part]
        yield part, next(iter(own), None), next((run for run in own if run.passed), None)


def table(found: Sequence[Run]) -> str:
    """Markdown, with links for a page of tests/gpu."""
    lines = ["| part | last run | what it gave | last seen to pass whole |", "|---|---|---|---|"]
    for part, last, good in latest(found):
        ran = f"{_linked(last)} | {last.result}" if last else "in no log | "
        passed = "in no log" if good is None else "then" if good is last else f"{_linked(good)}: {good.result}"
        lines.append(f"| `{part}`: {PARTS[part].what} | {ran} | {passed} |")
    return "\n".join(lines)


def _linked(run: Run) -> str:
    return f"{run.date} at [{run.revision}](results/{run.log}), {run.gpu}"


def written(page: str, found: Sequence[Run]) -> str:
    """The page with the table in place of the one that it has."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} has no lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}"


def changed(revision: str, covers: Iterable[str], root: Path = ROOT) -> str | None:
    """The folders that differ from a revision now, with the number of files; None where git does not know it."""
    command = ["git", "diff", "--name-only", revision.removesuffix("-dirty"), "--", *covers]
    try:
        ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    files = [Path(line) for line in ran.stdout.splitlines() if not line.startswith("tests/gpu/results/")]
    folders = Counter("/".join(each.parent.parts[:2]) for each in files)
    return ", ".join(f"{folder} ({count})" for folder, count in sorted(folders.items())) or "nothing"


def report(found: Sequence[Run], root: Path = ROOT) -> str:
    """For each part its last run, its last that passed, and what has changed since."""
    lines = []
    for part, last, good in latest(found):
        lines.append(f"{part}: {PARTS[part].what}")
        for label, run in [("last run", last)] + ([("last passed", good)] if good is not last else []):
            if run is None:
                lines.append(f"  {label:12} never")
                continue
            lines.append(f"  {label:12} {run.date} at {run.revision}, {run.gpu}: {run.result}  ({run.log})")
            differs = changed(run.revision, PARTS[part].covers, root)
            lines.append(
                f"    since then changed: {'not known, as git does not have the revision' if differs is None else differs}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.truth", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--write", action="store_true", help="write the table into tests/gpu/RUNS.md")
    found = runs()
    if parser.parse_args(arguments).write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    print(report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
