"""The table, the JSON document and the page of an experiment."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fences, kinds, subjects
from benchmarks.arrangement import (
    EVERYONE,
    QUARTERS,
    SHARED,
    SPLIT,
    Cores,
    Impossible,
    deployments,
    fourth,
    halves,
    share_cores,
)
from benchmarks.asks import invalid, tensor, truth, unauthenticated, wrong
from benchmarks.clients import ANY, TENANTS, Clients, apart, place
from benchmarks.costs import COSTS
from benchmarks.experiment import BETWEEN, STARTS, Settings
from benchmarks.findings import Cost, Findings, Throughput, document, few, table
from benchmarks.isolation import status
from benchmarks.notes import notes
from benchmarks.page import render
from benchmarks.plots import cumulative, draw
from benchmarks.verdicts import (
    ALONE,
    CONTROL,
    CONTROL_ALONE,
    CONTROL_OWN,
    CONTROL_WARMING,
    KINDS,
    LEARNING,
    OWN,
    UNDER,
    WARMING,
    Combination,
    Phase,
)
from greenlane.load.figures import Samples
from greenlane.load.machine import describe
from greenlane.load.rules import ENOUGH
from server.config.file import load


def phase(kind: str, turn: int, began: float) -> Phase:
    slow = {UNDER: 1.1, CONTROL: 20.0}.get(kind, 1.0)
    latencies = [slow * (500 + number) for number in range(50)]
    busy = [{"name": "small", "rate": 100.0, "megabytes": 2.0, "statuses": {200: 100}}] if slow > 1 else []
    return Phase(kind, turn, began, Samples([n / 50 for n in range(50)], latencies, [200] * 50), busy)


def findings(*, control: bool = True, name: str = "small") -> Findings:
    wanted = KINDS if control else (ALONE, UNDER)
    phases = tuple(phase(kind, turn, 4.0 * turn + at) for turn in range(3) for at, kind in enumerate(wanted))
    return Findings(
        title="Isolation <of> everything",
        settings={"rate": "400 & more"},
        machine=describe("python -m x"),
        combinations=(Combination("mlp", name, phases, 1.3), Combination("resnet", name, phases, 1.3)),
        aggressors={"small": "many requests"},
        notes=("a note",),
        throughput=(Throughput("two tenants", 90.0, 100.0),),
    )


def test_the_table_has_a_line_for_each_combination_and_what_isolation_costs() -> None:
    text = table(findings())
    assert re.search(r"^mlp / small +0\.55 +0\.60 +11\.0 +1\.10 +1\.10 +1\.10 +20\.0  isolated$", text, re.MULTILINE), text
    assert "resnet / small" in text
    assert text.endswith("throughput of two tenants: 90 a second on partitions, 100 without: 0.90")


def test_the_table_has_the_reason_for_an_unproven_verdict() -> None:
    assert "mlp / small: no control: p99 grew 1.10 times" in table(findings(control=False))


def test_the_document_is_json_without_nan() -> None:
    found = json.loads(json.dumps(document(findings(control=False)), allow_nan=False))
    assert found["verdicts"][0]["control_ratio"] is None
    assert found["verdicts"][0]["ratios"]["p99"] == pytest.approx(1.1)
    assert len(found["combinations"][0]["rounds"][UNDER]) == 3
    assert found["throughput"][0]["ratio"] == 0.9


@pytest.mark.parametrize("control", [True, False])
def test_the_page_is_self_contained_and_escapes_text(control: bool) -> None:
    found = findings(control=control)
    pictures = draw(found)
    page = render(found, pictures)
    assert all(data.startswith(b"\x89PNG") for data in pictures.values())
    assert page.count("src=") == page.count('src="data:image/png;base64,') == len(pictures) == 3
    assert not re.search(r"https?://|<script|<link", page)
    assert "Isolation &lt;of&gt; everything" in page
    assert "400 &amp; more" in page


def test_a_victim_with_too_few_samples_for_its_p99_is_named_once() -> None:
    wanted = "mlp: few samples: as few as 50 in a phase, so its p99 is one of the slowest two; give it more --seconds"
    found = findings()
    assert table(found).count(wanted) == 1
    assert wanted in render(found, dict.fromkeys(("bars", "distributions", "timeline"), b""))
    assert few([replace(verdict, fewest=ENOUGH) for verdict in found.verdicts]) == []


def test_every_loaded_phase_follows_a_baseline_and_rounds_rotate_aggressors() -> None:
    plan = Settings(victims={"mlp": 400, "resnet": 40}, kinds=("small", "json"), rounds=2).steps()
    assert [str(step) for step in plan[:4]] == [
        "round 1: mlp: control, alone",
        "round 1: mlp: small: alone",
        "round 1: mlp: small: under load",
        "round 1: mlp: small: control, under load",
    ]
    alone = [(*step.victims, step.aggressor) for step in plan if step.kind == ALONE]
    assert alone[:4] == [("mlp", "small"), ("mlp", "json"), ("resnet", "small"), ("resnet", "json")]
    assert alone[4:] == [("mlp", "json"), ("mlp", "small"), ("resnet", "json"), ("resnet", "small")]
    assert [step.kind for step in plan].count(CONTROL_ALONE) == 4


def test_a_fence_is_compared_with_none_on_one_server_after_another_once_the_first_has_learnt_what_aggressors_move() -> None:
    kinds = ("memory-read", "random-sectors", "pcie-in")
    fence = {"fence": "0.4", "learning": 6.0, "trying": 30.0, "warming": 2.0}
    settings = Settings(victims={"mlp": 400, "gemm": 200}, kinds=kinds, rounds=2, **fence)
    plan = [(step.kind, step.aggressor, len(step.victims), settings.lasts(step)) for step in settings.steps()]
    learnt = [(OWN, "memory-read", 0, 6.0), (OWN, "random-sectors", 0, 6.0), (OWN, "pcie-in", 0, 1.0)]
    # A server that has seen a victim alone finds sooner that an aggressor that moves few bytes slows it.
    assert plan[:5] == [*learnt, (WARMING, "", 2, 2.0), (LEARNING, "random-sectors", 1, 30.0)]
    beside = [("", "memory-read", "", "random-sectors", "pcie-in", ""), ("", "random-sectors", "", "memory-read", "")]
    held = [[(UNDER if each else ALONE, each, 2, 1.0) for each in names] for names in beside]
    assert plan[5:16] == [*held[0], *held[1]], "what hardly hurts is beside victims in one round"
    free = [(CONTROL_WARMING, "", 2, 2.0), *((CONTROL_OWN, each, 0, 1.0) for each in kinds)]
    assert plan[16:] == [*free, *((CONTROL if each else CONTROL_ALONE, each, 2, 1.0) for each in beside[0])]


def test_the_table_of_the_fence_takes_as_long_as_its_limit_allows() -> None:
    script = Path("tests/gpu/all.sh").read_text()
    words = re.search(r"(--victim .*) --json \"\$out/fence", script)
    assert words is not None
    options = words[1].split()
    seconds, rounds = (options[options.index(name) + 1] for name in ("--seconds", "--rounds"))
    victims = dict.fromkeys(options[1 : options.index("--rate")], float(options[options.index("--rate") + 1]))
    settings = Settings(victims=victims, kinds=kinds.UNFENCED, seconds=float(seconds), rounds=int(rounds), fence="0.2")
    limit = re.search(r"LIMIT_fence:-(\d+)", script)
    assert limit is not None
    assert len(victims) == 4
    assert settings.duration + COSTS + STARTS <= int(limit[1])


def fenced_findings() -> Findings:
    """A fence that leaves an aggressor 0.45 of what it has alone, while the victim takes 1.1 times as long, and not 20."""
    found = findings(name="memory-read")
    rates = {OWN: 990.0, CONTROL_OWN: 1000.0, UNDER: 450.0, CONTROL: 900.0}
    own = [Phase(kind, 0, 0.0, Samples(), [{"name": "memory-read", "rate": rate}]) for kind, rate in rates.items()]
    loaded = [replace(phase(each.kind, 0, 0.0), busy=each.busy) for each in own[2:]]
    whole = (*(phase(kind, 0, 0.0) for kind in (ALONE, CONTROL_ALONE)), *own[:2], *loaded)
    held = {
        "memory_bandwidth": 960 * 10**9,
        "granules": [8],
        "launches": 7,
        "pcie": 0,
        "waits": 0,
        "notes": ["a note of the server's"],
        "problems": [],
        "models": [{"model": "reading/1", "moved": 2 * 10**9, "home_ms": 1.25, "narrow_ms": 2.5}],
    }
    combinations = tuple(Combination(victim, "memory-read", whole, 1.3) for victim in ("gemm", "mob"))
    costs = (Cost("mob", (990.0, 970.0, 900.0), (1000.0, 1000.0, 0.0)),)
    return replace(found, combinations=combinations, settings={"device": "cuda"}, held=held, costs=costs)


def test_what_a_fence_is_to_victims_and_aggressors_is_a_table_of_ratios_and_gigabytes() -> None:
    text = "\n".join(fences.lines(fenced_findings()))
    assert re.search(r"^aggressor +gemm +mob$", text, re.MULTILINE), text
    assert re.search(r"^memory-read( +20\.0 / 20\.0 -> 1\.10 / 1\.10){2}$", text, re.MULTILINE), text
    rates = r"^memory-read +2,147 +2,126 \(0\.99\) +1,933 \(0\.90\) +966 \(0\.45\) +960$"
    assert re.search(rates, text, re.MULTILINE), text
    assert "a note of the server's" in text
    assert "reading/1: 2 GB each, by the meter; 1.25 ms at home, 2.5 narrow" in text
    assert "a tenant that is no hog, mob: 0.980 of its 1,000 a second without a fence (0.970 to 0.990 in 2 turns)" in text
    assert "nothing is known of what holds the aggressor" in "\n".join(fences.lines(replace(fenced_findings(), held={})))


def test_the_fenced_aggressor_is_compared_with_the_same_one_without_a_fence() -> None:
    found = deployments("cuda", 16, ["resnet"], ["memory-read"], Cores((), ()), "0.4")
    assert [each.granules for each in found[SPLIT].tenants] == [each.granules for each in found[SHARED].tenants] == [8, 7]
    assert {each.mps for each in found.values()} == {"off"}
    streaming = deployments("cuda", 16, ["gemm"], ["pcie-stream"], Cores((), ()), "0.4", "on")[SHARED]
    written = tomllib.loads(streaming.config(Path()))
    assert written["models"]["streamed"] == {"weight_budget": "64MiB"}
    assert written["device"]["mps"] == "on"
    cores = deployments("cpu", 16, ["gemm"], ["pcie-stream"], Cores((), ()), "0.4")[SHARED].config(Path())
    assert "weight_budget" not in cores
    assert "memory_bandwidth = 0.4\npcie = 0.4" in found[SPLIT].config(Path())
    assert "memory_bandwidth" not in found[SHARED].config(Path())
    held = deployments("cuda", 16, ["resnet"], ["memory-read"], Cores((), ()), "1.2TB/s")[SPLIT]
    assert 'memory_bandwidth = "1.2TB/s"' in held.config(Path())


def test_without_a_control_there_are_fewer_phases_and_the_run_is_shorter() -> None:
    settings = Settings(victims={"mlp": 400}, kinds=("small",), rounds=2, control=False)
    assert [step.kind for step in settings.steps()] == [ALONE, UNDER, ALONE, UNDER]
    assert settings.duration == 4 * (settings.seconds + BETWEEN)


def test_clients_run_on_the_last_quarter_of_a_large_machine_or_with_their_tenants() -> None:
    assert apart(range(16), None) == (12, 13, 14, 15)
    assert apart(range(7), None) == apart(range(16), ANY) == ()
    assert apart(range(16), (3,)) == (3,)
    assert place("cuda", (), 16, (12, 13, 14), None) == Clients((12,), (13, 14), (12, 13, 14))
    assert place("cpu", (4, 5), 2, (), None) == Clients((4,), (5,))
    assert place("cpu", range(6), 6, (), TENANTS) == Clients((0,), (3, 4, 5))
    assert place("cpu", (4, 5), 2, (), ANY) == place("cuda", (), 16, (), None) == Clients()
    with pytest.raises(Impossible, match="a GPU's tenants have none"):
        place("cuda", (), 16, (), TENANTS)


@pytest.mark.parametrize(
    ("clients", "shown", "noted"),
    [
        (Clients(), "any", "on the same cores as the server"),
        (Clients((0,), (1, 2)), "0 for the victim's, 1,2 for the aggressors', of their tenants", "where their tenants do"),
        (Clients((3,), (), (3,)), "3 for the victim's, any for the aggressors', kept apart", "cores that no server uses"),
    ],
)
def test_the_notes_say_where_clients_ran(clients: Clients, shown: str, noted: str) -> None:
    settings = Settings(victims={"mlp": 400, "resnet": 2000}, kinds=("small",), clients=clients)
    servers = deployments("cpu", 4, ["mlp"], ["small"], Cores((), ()))
    found_notes = list(notes(settings, servers, findings().combinations))
    assert str(clients) == shown
    assert any(noted in note for note in found_notes)
    assert (
        "A phase has about 400 requests of mlp, so its p99 is number 4 from the slowest; with fewer than 1,000,"
        in found_notes[2]
    )
    assert found_notes[3] == "A phase has about 2,000 requests of resnet, so its p99 is number 20 from the slowest."


@pytest.mark.parametrize(
    ("device", "granules", "shares"),
    [
        ("cpu", 2, (1, 1)),
        ("cpu", 3, (1, 1)),
        ("cpu", 64, (4, 4)),
        ("cuda", 16, (8, 7)),
        ("cuda", 15, (7, 7)),
        ("cuda", 2, (1, 1)),
    ],
)
def test_two_partitions_fit_the_device(device: str, granules: int, shares: tuple[int, int]) -> None:
    assert halves(device, granules) == shares


def test_four_partitions_are_of_one_size() -> None:
    assert (fourth("cuda", 16), fourth("cpu", 64), fourth("cpu", 6)) == (4, 4, 1)


def test_a_device_that_is_too_small_is_refused_with_what_it_has() -> None:
    with pytest.raises(Impossible, match="the device has 1 granule; two tenants need 2"):
        halves("cpu", 1)
    with pytest.raises(Impossible, match="2 cores for each of 2 HTTP processes leave none of 4"):
        share_cores(range(6), own=(0, 1), each=2, tenants=2)
    with pytest.raises(Impossible, match="has 3 granules; four tenants need 4"):
        deployments("cpu", 3, ["mlp"], ["trio"], Cores((), ()))


def test_the_servers_are_configured_as_the_server_reads_it(tmp_path: Path) -> None:
    cores = share_cores(range(12), own=(0, 1), each=1, tenants=4)
    found = deployments("cpu", 6, ["mlp", "resnet"], ["small", "trio"], cores)
    for name, server in found.items():
        path = tmp_path / f"{name}.toml"
        path.write_text(server.config(tmp_path))
        config = load(path)
        assert {tenant.name: tenant.granules for tenant in config.tenants.values()} == {
            t.name: t.granules for t in server.tenants
        }
        assert config.device.cores == (2, 3, 4, 5, 6, 7)
        assert config.tenants[server.tenants[0].name].front_cores == ((8, 9) if name == SHARED else (8,))
    assert set(found) == {SPLIT, SHARED, QUARTERS}
    assert tomllib.loads(found[SHARED].config(tmp_path))["tenants"].keys() == {EVERYONE}
    assert found[SHARED].tenants[0].granules == sum(tenant.granules for tenant in found[SPLIT].tenants)


@pytest.mark.parametrize("kind", kinds.KINDS.values(), ids=lambda kind: kind.name)
def test_an_aggressor_s_connections_are_shared_by_its_processes(kind: kinds.Kind) -> None:
    jobs = kind.jobs(1, "aggressor", 1.0, rows=2, processes=2, cores=(3,))
    assert sum(job.connections for job in jobs) == kind.connections
    assert all(job.asks[0].data for job in jobs)


def test_only_unauthenticated_requests_name_no_tenant() -> None:
    assert all(b"X-Tenant: acme\r\n" in ask.data for ask in invalid("acme"))
    assert not any(b"acme" in ask.data for ask in unauthenticated())
    assert len({ask.data for ask in invalid("acme")}) == len(invalid("acme")) > 10


def test_an_answer_is_right_only_with_the_model_s_numbers() -> None:
    wanted = truth("identity")
    right, other = tensor("identity").tobytes(), (tensor("identity") + 1).tobytes()
    text = json.dumps({"outputs": [{"data": tensor("identity").ravel().tolist()}]}).encode()
    assert np.array_equal(wanted, tensor("identity"))
    assert wrong([b"{}" + right], "binary", wanted) == 0
    assert wrong([b"{}" + other, b"", b"{}" + right[:-4]], "binary", wanted) == 3
    assert wrong([text], "json", wanted) == 0


@pytest.mark.parametrize("victim", ["mob", "enc", "tiny"])
def test_a_victim_of_the_change_experiment_is_asked_for_one_row_and_has_an_answer_to_compare_with(victim: str) -> None:
    wanted = truth(victim)
    assert (len(tensor(victim)), len(wanted)) == (1, 1)
    assert np.ptp(wanted) > 0.1
    assert wrong([b"{}" + wanted.tobytes()], "binary", wanted) == 0


def test_a_victim_that_memory_bounds_is_nothing_but_weights_and_its_answer_depends_on_them() -> None:
    network = subjects.gemm(256, 2)
    assert len(network.onnx) == pytest.approx(2 * 256 * 256 * 4, rel=0.01)
    assert network.ranges["x"][1] == (1, 256), "it is made for one row"
    values = subjects.expected(network, np.random.default_rng(1).random((1, 256), np.float32))
    assert 0.1 < (values > 0).mean() < 0.9, "two layers do not die out"


def test_every_model_can_be_made(tmp_path: Path) -> None:
    subjects.write(tmp_path, {"identity", "numbers", "conv", "image", "wide"}, plans=False)
    assert sorted(path.parts[-3] for path in tmp_path.glob("*/1/model.onnx")) == [
        "conv",
        "identity",
        "image",
        "numbers",
        "wide",
    ]


@pytest.mark.parametrize(("name", "memory", "expected"), [("small", False, 1), ("l2-16", False, 0), ("l2-16", True, 1)])
def test_what_no_partition_fences_counts_as_a_leak_only_if_asked_to(name: str, memory: bool, expected: int) -> None:
    found = findings(name=name)
    leaking = replace(found, combinations=tuple(replace(each, bound=1.01) for each in found.combinations))
    assert {verdict.word for verdict in leaking.verdicts} == {"leaks"}
    assert status(leaking, memory) == expected


def test_a_distribution_keeps_its_slowest_requests_when_it_is_thinned() -> None:
    values, slower = cumulative(range(100_000), points=100)
    assert len(values) < 300
    assert (values[0], slower[0]) == (0, 1)
    assert (values[-1], slower[-1]) == (99_999, 1 / 100_000)
    assert cumulative([]) == ([], [])
