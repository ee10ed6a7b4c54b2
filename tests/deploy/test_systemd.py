"""The systemd units: what systemd-analyze says of them, and what they promise."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
ONE, EACH = DEPLOY / "greenlane.service", DEPLOY / "greenlane@.service"
EXPOSURE = 2.0
"""What `systemd-analyze security` may say at most, of 10. A unit that sets nothing is at 9.6."""

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def settings(unit: Path) -> dict[str, list[str]]:
    """The settings of all sections; those that may be given several times have several values."""
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


@pytest.fixture(params=[ONE, EACH], ids=lambda unit: unit.name)
def installed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the unit that names a program which is there, as systemd-analyze looks for it."""
    unit: Path = request.param
    text = unit.read_text().replace("/opt/greenlane/.venv/bin/greenlane", sys.executable)
    place = tmp_path / unit.name.replace("@.", "@0.")
    place.write_text(text)
    return place


@needs_systemd
def test_systemd_finds_no_mistake_in_the_units(installed: Path) -> None:
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", installed], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_the_units_are_hardened(installed: Path) -> None:
    security = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE * 10:.0f}"]
    done = subprocess.run([*security, installed], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_unit_for_several_servers_is_the_unit_for_one() -> None:
    one, each = settings(ONE), settings(EACH)
    for setting in ("Description", "ExecStart", "CacheDirectory", "StateDirectory", "Environment"):
        assert all("%i" in value for value in each.pop(setting)), f"{setting} has to differ"
        del one[setting]
    assert each == one


def test_the_unit_restarts_after_a_lost_device_but_not_after_a_wrong_configuration() -> None:
    unit = settings(ONE)
    assert (unit["Restart"], unit["RestartPreventExitStatus"]) == (["on-failure"], ["2"])


def test_the_unit_starts_after_what_makes_gpus_usable() -> None:
    """Before it, a GPU cannot be opened, which is status 2; on hosts with NVSwitch the fabric manager is needed as well."""
    (after,) = settings(ONE)["After"]
    assert {"nvidia-persistenced.service", "nvidia-fabricmanager.service"} <= set(after.split())


def test_systemctl_reload_sends_the_signal_on_which_the_server_reads_its_configuration_again() -> None:
    assert settings(ONE)["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
