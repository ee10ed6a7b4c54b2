"""The report: text, page and JSON of findings that were made up, and the verdict on all."""

import json
import math
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest

from greenlane.load.figures import Samples
from greenlane.load.intervals import Interval
from greenlane.load.jobs import Ask
from greenlane.load.rules import NO_GROWTH, Ruling, Word, rule
from greenlane.prove import text
from greenlane.prove.attacks import KINDS, WHAT, Attack, fenced, held
from greenlane.prove.confinement import Located
from greenlane.prove.document import VERSION, document
from greenlane.prove.findings import Findings
from greenlane.prove.lending import Borrowed, Lent
from greenlane.prove.measure import Beside, Measured, Result
from greenlane.prove.page import render
from greenlane.prove.plan import Pair
from greenlane.prove.survey import Surveyed
from partitions.strain import STRAINS

PAIR = Pair("acme", "<b>globex</b>")


def samples(microseconds: float, count: int = 200) -> Samples:
    return Samples([number / 400 for number in range(count)], [microseconds] * count, [200] * count)


@cache
def result(beside: float = 1000, control: float = 9000, word: Word | None = None) -> Result:
    attack = Attack("batches", (Ask(b""),), 4, frozenset({200}), "m")
    rounds = {"alone": (samples(1000),), "beside": (samples(beside),), "control": (samples(control),)}
    ruling, held, shared = rule(rounds["alone"], rounds["beside"], rounds["control"], 1.0)
    ruling = Ruling(word, "as the test says") if word else ruling
    return Result(Beside(attack, attack), rounds, held, shared, ruling, {"beside": 5.0, "control": 6.0}, 1.0, {200: 9})  # type: ignore[arg-type]


def findings(*results: Result, untried: dict[Pair, str] | None = None) -> Findings:
    located = [Located("acme", "core", (0, 1, 2, 5), "isolated", "it ran", (0, 1), "not exercised", "unseen")]
    measured = [Measured(PAIR, "m", 100.0, 0.0001, 0.02, results)] if results else []
    tenants = [Surveyed("acme", undriven={"broken": "it is <not> ready"})]
    return Findings("c.toml", 60.0, {"date": "today"}, located, tenants, measured, untried or {})


@pytest.mark.parametrize(
    ("found", "word", "status"),
    [
        (findings(result()), "isolated", 0),
        (findings(result(beside=2000)), "leaks", 1),
        (findings(result(), result(beside=2000)), "leaks", 1),
        (findings(result(control=1000)), "not exercised", 3),
        (findings(result(word="too noisy")), "too noisy", 3),
        (findings(result(), untried={Pair("b", "a"): "no time"}), "not exercised", 3),
        (findings(result(), result(word="too noisy"), untried={Pair("b", "a"): "no time"}), "not exercised", 3),
        (findings(), "not exercised", 3),
        (replace(findings(result()), ended="killed"), "not exercised", 3),
        (replace(findings(result()), located=[Located("a", "core", (0,), "leaks", "")]), "leaks", 1),
        (replace(findings(result()), located=[Located("a", "core", (0,), "isolated", "", (1,), "leaks", "")]), "leaks", 1),
    ],
)
def test_all_is_isolated_only_if_every_part_is(found: Findings, word: Word, status: int) -> None:
    assert (found.word, found.status) == (word, status)


def strained(beside: float = 3400, word: Word | None = None, kind: str = "memory copy") -> Findings:
    """Findings of isolated tenants, one of which feels a strain of memory."""
    attack = Attack(kind, (), 1, frozenset({200}), "no model", "once", lasting=lambda _: Ask(b""), rate=2800.0)
    one = replace(result(beside, word=word), attack=Beside(attack, attack), moved={"beside": 2700.4, "control": math.nan})
    return replace(
        findings(result()), unfenced=[Measured(PAIR, "m", 100.0, 0.0001, 0.02, (one,), fenced=("not fenced: <all>",))]
    )


def test_what_no_partition_fences_is_said_and_counts_only_if_asked_to() -> None:
    assert (strained().word, strained().status) == ("isolated", 0)
    assert (replace(strained(), memory=True).word, replace(strained(), memory=True).status) == ("leaks", 1)
    assert replace(strained(beside=1000), memory=True).status == 0
    assert replace(strained(word="too noisy"), memory=True).status == 3
    assert replace(strained(beside=1000), memory=True, untried={PAIR: "no time"}).status == 3
    leaking = replace(findings(result(beside=2000)), memory=True, untried={PAIR: "strains are refused"})
    assert (leaking.counts, leaking.status) == ({"leaks": 1}, 1)


@pytest.mark.parametrize(("memory", "said"), [(False, text.ONLY_SAID), (True, text.COUNTED)])
def test_a_strain_is_reported_with_by_how_much_it_was_felt_and_what_it_moved(memory: bool, said: str) -> None:
    found = replace(strained(), memory=memory)
    lines = text.render(found).splitlines()
    (line,) = [line for line in lines if line.startswith("memory copy")]
    assert "p50 3.40 (3.40-3.40)" in line
    assert line.split()[-3:] == ["2,800", "2,700", "leaks"]
    assert any(line.startswith("  memory copy: leaks: ") for line in lines)
    assert any(line.startswith("What partitions do not fence: acme beside <b>globex</b>: m, ") for line in lines)
    assert f"  {said}" in lines
    page = render(found)
    assert "What partitions do not fence" in page
    assert "2,800" in page
    assert "  not fenced: <all>" in lines
    assert "<li>not fenced: &lt;all&gt;</li>" in page
    assert said in page
    (pair,) = json.loads(json.dumps(document(found), allow_nan=False))["unfenced"]
    assert (pair["counts"], pair["fenced"]) == (memory, ["not fenced: <all>"])
    assert pair["attacks"][0]["gigabytes_per_second"] == {"alone": 2800, "beside": 2700.4, "control": None}
    assert "gigabytes_per_second" not in document(found)["pairs"][0]["attacks"][0]


@pytest.mark.parametrize(("planned", "said"), [(60.0, "60 s)"), (25.0, "60 s: --seconds 25, and more for strains")])
def test_a_run_that_took_longer_than_was_asked_for_says_why(planned: float, said: str) -> None:
    assert f"(a growth of at most 1.3 is allowed; {said}" in text.render(replace(findings(result()), planned=planned))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (None, None, ""),
        ({"launches": 5, "waits": 7}, {"launches": 5, "waits": 7}, ""),
        ({"launches": 5, "waits": 7}, {"launches": 0, "waits": 0}, ""),  # Of another process.
        ({"launches": 5, "waits": 7}, {"launches": 305, "waits": 7}, "300 inferences that ran on fewer granules"),
        (None, {"launches": 3, "waits": 1}, "3 inferences that ran on fewer granules and 1 inference that waited for PCIe"),
    ],
)
def test_a_victim_that_is_held_to_its_own_shares_is_said_to_be(
    before: dict[str, int] | None, after: dict[str, int] | None, said: str
) -> None:
    """Its latency grows beside any tenant that works."""
    found = held("acme", before, after)
    why = "acme is slower also as its own memory_bandwidth and pcie held it while others worked"
    assert found == ((f"{why}: {said}",) if said else ())
    measured = replace(findings(result()).measured[0], fenced=found)
    report = replace(findings(), measured=[measured])
    assert [f"  {line}" in text.render(report).splitlines() for line in found] == [True] * bool(said)
    assert [f"<li>{line}</li>" in render(report) for line in found] == [True] * bool(said)
    assert document(report)["pairs"][0]["fenced"] == list(found)


MB, L3 = "MB:0=40, % of each L3 cache's memory bandwidth", "L3:0=f, a mask of 11 ways"


@pytest.mark.parametrize(
    ("fence", "expected"),
    [
        (None, ["not fenced: what acme does to memory and the last cache (L2)", "acme: it has no memory_bandwidth"]),
        (
            {"cores": "", "notes": ["unfenced"]},
            ["not fenced: what acme does to memory and the last cache (L2)", "acme: unfenced"],
        ),
        (
            {"cores": f"core 1: {MB}, by resctrl", "notes": []},
            [
                f"fenced: what acme does to memory: core 1: {MB}, by resctrl",
                "not fenced: what acme does to the last cache (L2)",
            ],
        ),
        (
            {"cores": f"core 1: {L3}, by resctrl", "notes": []},
            [
                f"fenced: what acme does to the last cache (L2): core 1: {L3}, by resctrl",
                "not fenced: what acme does to memory",
            ],
        ),
        (
            {"cores": f"core 1: {MB}; {L3}, by resctrl", "notes": []},
            [f"fenced: what acme does to memory and the last cache (L2): core 1: {MB}; {L3}, by resctrl"],
        ),
    ],
)
def test_it_is_said_which_strains_on_cores_something_holds(fence: dict[str, Any] | None, expected: list[str]) -> None:
    assert list(fenced("acme", fence)) == expected


def test_every_kind_is_explained() -> None:
    assert set(WHAT) == {*KINDS, *STRAINS}


def test_the_document_has_a_version_the_verdicts_and_no_number_that_json_has_not() -> None:
    empty = replace(result(), rounds={"alone": (Samples(),), "beside": (Samples(),), "control": (Samples(),)}, held=NO_GROWTH)
    found = json.loads(json.dumps(document(findings(result(beside=2000), empty)), allow_nan=False))
    assert found["version"] == VERSION == 1
    assert (found["verdict"], found["exit_status"]) == ("leaks", 1)
    (pair,) = found["pairs"]
    assert (pair["victim"], pair["verdict"]) == ("acme", "leaks")
    assert pair["attacks"][0]["growth"]["tail"]["value"] == 2
    assert pair["attacks"][1]["growth"]["tail"]["value"] is None


def test_the_document_has_the_bound_of_what_was_proven() -> None:
    lent = Lent(Pair("globex", "acme"), "m", 0.001, 0.0, Borrowed(20, 5), (), Interval(0.0, 0.0, 0.0), Ruling("isolated", ""))
    assert document(findings(result()))["bound"] == 1.3
    assert document(replace(findings(), lending=[lent]))["bound"] == 1.15


def test_the_text_says_the_verdict_last_and_why_what_is_not_isolated_is_not() -> None:
    lines = text.render(findings(result(), result(beside=2000), untried={Pair("b", "a"): "there was no time"})).splitlines()
    assert lines[-1].startswith("leaks: ")
    assert any("acme: probe on cores 0-2,5: isolated" in line for line in lines)
    assert any("acme: models on cores 0-1: not exercised" in line for line in lines)
    assert any("at most 1.3 is allowed" in line for line in lines)
    assert "Pairs: 1 leaks, 1 not tried" in lines
    assert "  b beside a: there was no time" in lines
    assert "  acme: broken was not asked: it is <not> ready" in lines


def test_models_that_were_not_asked_for_one_reason_are_a_line() -> None:
    undriven = {**dict.fromkeys((f"m{number}" for number in range(12)), "no time"), "broken": "it is not ready"}
    lines = text.render(replace(findings(), tenants=[Surveyed("acme", undriven=undriven)])).splitlines()
    assert [line for line in lines if "not asked" in line] == [
        "  acme: 12 of 13 models were not asked: no time",
        "  acme: broken was not asked: it is not ready",
    ]


def test_text_and_page_say_of_what_a_growth_is_and_what_that_means() -> None:
    """The median may decide, whose growth is not that of the p99 beside it."""
    found = replace(findings(result(beside=2000)), unfenced=strained().unfenced)
    lines = text.render(found).splitlines()
    assert any("p50 2.00 (2.00-2.00)" in line for line in lines)
    assert text.TIMES in lines
    page = render(found)
    assert "<td>p50 2.00 (2.00-2.00)</td>" in page
    assert "<td>p50 3.40 (3.40-3.40)</td>" in page


def test_a_verdict_points_to_no_place_as_the_page_has_it_first_and_the_text_last() -> None:
    for found in (findings(), findings(result(word="too noisy"))):
        assert text.MEANS[found.word] in render(found)
        assert not {"above", "below"} & set(text.MEANS[found.word].split())


def test_failures_that_differ_in_their_time_only_are_one_line() -> None:
    failures = ("3.892 s: 429, full: the queue", "3.893 s: 429, full: the queue", "4.100 s: 500, broken")
    found = findings(result())
    lines = text.render(replace(found, measured=[replace(found.measured[0], failures=failures)])).splitlines()
    assert [line for line in lines if "failed" in line] == [
        "  requests failed, the first at 3.892 s: 429, full: the queue",
        "  a request failed at 4.100 s: 500, broken",
    ]


class Page(HTMLParser):
    """Collects what a page would load, and checks that its tags match."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.svgs = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attributes if name in ("src", "href")]
        self.svgs += tag == "svg"
        if tag not in ("meta", "line", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "circle"):
            assert self.open.pop() == tag


def test_the_page_is_whole_by_itself_and_has_a_plot_for_each_pair() -> None:
    said = render(findings(result(), result(beside=2000), untried={Pair("b", "a"): "no time"}))
    page = Page()
    page.feed(said)
    assert (page.loads, page.open, page.svgs) == ([], [], 1)
    assert "<b>globex" not in said
    assert "it is &lt;not&gt; ready" in said
    assert "no time" in said
