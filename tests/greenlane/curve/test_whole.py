"""`greenlane curve --all`: what every tenant needs, whether it fits, and what is said when it does not."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenlane.__main__ import main
from greenlane.curve.curve import Curve
from greenlane.curve.options import Target
from greenlane.curve.points import P99, AtRate, Fit, Point
from greenlane.curve.whole import Need, conclude, concluded
from server.config.tenant import TenantConfig
from tests import models

CONFIG = """
[device]
backend = "cpu"
cores = "{core}"
[models]
repository = "models"
[tenants.acme]
cores = 1
models = ["*"]
{acme}
[tenants.globex]
cores = 1
models = ["tiny"]
"""
TARGET = 'target_p99 = "20s"\ntarget_rate = 250'


def need(name: str, granules: int | None, size: int = 1, word: str = "misses") -> Need:
    """A tenant that was measured on the whole of a small device."""
    seen = AtRate(800.0, word, 0.002, P99(0.02, 0.018, 0.022, 1000))  # type: ignore[arg-type]
    curve = Curve(name, 1, "a fake", "SM", 4 * size, (Point(4, 4 * size, 900.0, 0.001, 0.002, seen),), Target(800.0, 0.005))
    return Need(name, granules, (granules or 0) * size, curve)


@given(st.dictionaries(st.text(min_size=1), st.integers(1, 50), min_size=1), st.integers(1, 200))
def test_what_is_left_and_what_tenants_need_is_the_device(needs: dict[str, int], total: int) -> None:
    fit = Fit(needs, total)
    assert fit.left + sum(needs.values()) == total
    assert needs[fit.largest] == max(needs.values())


def test_shares_that_fit_are_status_0_with_what_is_left_and_the_lines_to_paste() -> None:
    status, lines = conclude([need("acme", 2, 8), Need("globex", 1, 8, None)], "SM", (8,) * 4)
    assert status == 0
    assert lines == [
        "acme 16 + globex 8 = 24 SMs of 32: 8 left",
        *("", "[tenants.acme]", "sms = 16", 'target_p99 = "5ms"', "target_rate = 800", ""),
    ]


def test_shares_that_do_not_fit_are_status_2_with_by_how_much_and_who_is_the_largest() -> None:
    status, lines = conclude([need("acme", 3, 8), need("globex", 2, 8)], "SM", (8,) * 4)
    assert status == 2
    assert lines == ["acme 24 + globex 16 = 40 SMs, but the device has 32: 8 too many; the largest is acme with 24"]


@pytest.mark.parametrize(("word", "status"), [("misses", 2), ("overloaded", 2), ("too noisy", 1), ("too few", 1)])
def test_a_tenant_whose_target_no_share_keeps_is_not_counted(word: str, status: int) -> None:
    found, lines = conclude([need("acme", 3), need("globex", None, word=word)], "core", (1,) * 4)
    assert found == status
    assert lines == ["acme 3 = 3 cores of 4: 1 left", "not counted, as no share was seen to keep its target: globex"]


@pytest.mark.parametrize(
    ("least", "doubts"), [(1, ["1 core: too noisy to say (p99 4.50 to 5.50 ms); raise --seconds"]), (2, [])]
)
def test_smaller_shares_that_were_too_noisy_are_named_unless_the_tenant_cannot_have_them(least: int, doubts: list[str]) -> None:
    unclear = AtRate(800.0, "too noisy", 0.002, P99(0.005, 0.0045, 0.0055, 1000))
    keeps = AtRate(800.0, "keeps", 0.002, P99(0.003, 0.0027, 0.0033, 1000))
    points = tuple(Point(count, count, 900.0, 0.001, 0.0011, found) for count, found in ((1, unclear), (2, keeps)))
    curve = Curve("acme", 1, "a fake", "core", 4, points, Target(800.0, 0.005))
    found, lines = concluded(TenantConfig(name="acme", granules=1, models=("*",), min_granules=least), curve, (1,) * 4)
    assert found.granules == 2
    assert lines == ["acme needs 2 cores", *(f"acme: {doubt}" for doubt in doubts)]


@pytest.fixture
def core() -> int:
    return min(os.sched_getaffinity(0))


def written(folder: Path, core: int, acme: str = TARGET) -> list[str]:
    """The words of a command with a configuration of two tenants on one core."""
    for name in ("tiny", "other"):
        (folder / "models" / name / "1").mkdir(parents=True)
        source = f"{name} (float[8] x) => (float[8] y) {{ y = Neg(x) }}"
        models.save(folder / "models" / name / "1" / "model.onnx", source)
    (folder / "c.toml").write_text(CONFIG.format(core=core, acme=acme))
    return ["curve", "--all", "--config", str(folder / "c.toml"), "--seconds", "3"]


def test_tenants_that_do_not_fit_a_core_together(tmp_path: Path, core: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The target is generous: one core keeps it on any machine, and both tenants want one."""
    words = [*written(tmp_path, core), "--mix", "other=3", "--json", str(tmp_path / "all.json")]
    assert main(words) == 2
    out = capsys.readouterr().out
    assert "acme: other (3), tiny; a p99 of 20000 ms at 250 requests a second" in out
    assert "acme needs 1 core" in out
    assert "globex: no target, so it keeps its 1 core" in out
    assert "acme 1 + globex 1 = 2 cores, but the device has 1: 1 too many; the largest is acme with 1" in out
    found = json.loads((tmp_path / "all.json").read_text())["devices"]["0"]
    assert found["left"] == -1
    assert found["tenants"]["acme"]["points"][0]["at_rate"]["requests"] >= 500


@pytest.fixture
def busy(core: int) -> Iterator[None]:
    """This process has a single core, on which a program of others runs all the time."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    orphan = f"{quote(sys.executable)} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["sh", "-c", orphan], capture_output=True, text=True, check=True).stdout)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.sched_setaffinity(0, allowed)


@pytest.mark.usefixtures("busy")
def test_what_other_programs_used_while_a_tenant_was_measured_is_said(
    tmp_path: Path, core: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be why a tenant seems to need more, or to have a target that no share keeps."""
    main([*written(tmp_path, core), "--json", str(tmp_path / "all.json")])
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("acme: other programs used ")]
    tenants = json.loads((tmp_path / "all.json").read_text())["devices"]["0"]["tenants"]
    assert [f"acme: {note}" for note in tenants["acme"]["notes"]] == [said]
    assert tenants["globex"]["notes"] == []


def test_a_shape_without_a_model_is_for_every_input_of_that_name_whose_sizes_vary(
    tmp_path: Path, core: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tiny` and `other` have an `x` of 8 numbers, for which it would be wrong."""
    words = [*written(tmp_path, core), "--shape", "x:1x64"]
    (tmp_path / "models" / "wide" / "1").mkdir(parents=True)
    source = "wide (float[n, m] x) => (float[n, m] y) { y = Neg(x) }"
    models.save(tmp_path / "models" / "wide" / "1" / "model.onnx", source)
    assert main(words) == 2
    out = capsys.readouterr().out
    assert "acme: other, tiny, wide; a p99 of 20000 ms" in out
    assert "acme needs 1 core" in out


def test_a_tenant_gets_its_minimum(tmp_path: Path, core: int, capsys: pytest.CaptureFixture[str]) -> None:
    """On two cores, of which one keeps the target on any machine."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    words = written(tmp_path, core, f"{TARGET}\nmin_granules = 2")
    text = (tmp_path / "c.toml").read_text().replace(f'cores = "{core}"', f'cores = "{cores[0]},{cores[1]}"')
    (tmp_path / "c.toml").write_text(text.replace("[tenants.acme]\ncores = 1", "[tenants.acme]\ncores = 2"))
    assert main(words) == 2
    assert "acme needs 2 cores, as its min_granules is 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("acme", "more", "said"),
    [
        ("", [], "no tenant has a target; set target_p99 and target_rate, or give --target acme=800/5ms"),
        ("target_rate = 5", [], "tenants.acme.target_rate is set, but target_p99 is not; set both, or give --target acme="),
        (TARGET, ["--target", "acmee=5/5ms"], "--target acmee: not a tenant of c.toml; did you mean 'acme'?"),
        (TARGET, ["--mix", "tini=2"], "there is no model 'tini' in the repository of c.toml; did you mean 'tiny'?"),
    ],
)
def test_what_cannot_be_planned_is_status_2_and_a_sentence(
    acme: str, more: Sequence[str], said: str, tmp_path: Path, core: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*written(tmp_path, core, acme), *more]) == 2
    assert said in capsys.readouterr().err
