"""The systemd units: what systemd-analyze says of them, and what they promise."""

import platform
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
ONE, EACH = DEPLOY / "greenlane.service", DEPLOY / "greenlane@.service"
EXPOSURE = 2.0
"""What `systemd-analyze security` may say at most, of 10. A unit that sets nothing is at 9.6."""

CALLED = """
    landlock_create_ruleset landlock_restrict_self mbind memfd_create mlock mq_notify mq_open pidfd_open pidfd_send_signal
    prctl sched_setaffinity sched_setattr sched_setscheduler setpriority setuid
"""
"""System calls of the server and of MPS that not every program makes."""
PROBE = """
import ctypes, struct, sys
from server.host.watchdog import open_exit

call, *families = map(int, sys.argv[1:])  # As the kernel's seccomp does it: other families are refused with EAFNOSUPPORT.
load, equal, answer, refused, allowed = 0x20, 0x15, 0x06, 0x50000 | 97, 0x7FFF0000
steps = [(load, 0, 0, 0), (equal, 0, len(families) + 2, call), (load, 0, 0, 16)]
steps += [(equal, len(families) - at, 0, family) for at, family in enumerate(families)]
code = b"".join(struct.pack("HBBI", *step) for step in [*steps, (answer, 0, 0, refused), (answer, 0, 0, allowed)])
kept, libc = ctypes.create_string_buffer(code), ctypes.CDLL(None)
program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(kept))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
print(open_exit(70) >= 0)
"""
"""Whether the watchdog has its message queue in a process that may use these families of addresses only."""

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
    assert each.pop("User") == ["greenlane-%i"], "or all servers have one user, and may end each other's processes"
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


@needs_systemd
def test_the_units_allow_the_system_calls_that_the_server_makes() -> None:
    def expand(name: str) -> set[str]:
        if not name.startswith("@"):
            return {name}
        done = subprocess.run(
            ["systemd-analyze", "--no-pager", "syscall-filter", name], capture_output=True, text=True, check=True
        )
        return set().union(*map(expand, re.findall(r"^ +(@?\w[\w-]*)$", done.stdout, re.MULTILINE)))

    allowed: set[str] = set()
    for value in settings(ONE)["SystemCallFilter"]:
        named = set().union(*map(expand, value.removeprefix("~").split()))
        allowed = allowed - named if value.startswith("~") else allowed | named
    assert set(CALLED.split()) - allowed == set()


def test_with_the_addresses_that_the_units_allow_a_supervisor_that_hangs_ends_with_its_status() -> None:
    (families,) = settings(ONE)["RestrictAddressFamilies"]
    call = {"x86_64": 41, "aarch64": 198}[platform.machine()]
    numbers = [getattr(socket, name) for name in families.split()]
    done = subprocess.run([sys.executable, "-c", PROBE, *map(str, map(int, [call, *numbers]))], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
