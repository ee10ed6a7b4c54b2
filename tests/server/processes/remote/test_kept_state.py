"""What is sent to the process that replaces one with a device side."""

import pytest

from server.control.descriptions import AtStart
from server.control.fence import Fence
from server.control.stretch import Wide
from server.processes.channels.device_protocols import Change
from server.processes.remote.kept_state import KeptState
from server.processes.remote.remote_frontend import RemoteFrontend
from server.tenants.catalog import UNLOADED


def test_placements_that_were_planned_before_a_move_are_not_those_of_a_replacement() -> None:
    """Their granules may be other tenants' by now."""
    kept = KeptState()
    kept.on_started({"acme": (0, 1), "globex": (2, 3)})
    kept.wide = {"acme": Wide((0, 1, 3), {"globex": (3,)}, 0.001)}
    kept.fences = {"acme": Fence(("globex",), 10**12, (1,))}
    kept.on_moved({"acme": (0,), "globex": (1, 2, 3)})
    assert kept.wide == kept.fences == {}
    assert kept.start({})[0] == {"acme": (0,), "globex": (1, 2, 3)}


def test_configurations_of_loads_are_not_kept_without_end(caplog: pytest.LogCaptureFixture) -> None:
    """The supervisor does not see whether a process has loaded a model at all."""
    kept = KeptState()
    for number in range(5):
        kept.on_changed(Change("acme", f"m{number}", True, "{}" * (2 << 20)))
    assert [each.override is None for each in kept.changes("acme").values()] == [False] * 4 + [True]
    assert "when its process is started again, 'm4' has none" in caplog.text
    kept.on_changed(Change("globex", "m", True, "{}" * (2 << 20)))
    assert kept.changes("globex")["m"].override


def test_a_tenant_whose_wide_partition_was_taken_away_has_none_and_the_others_keep_theirs() -> None:
    kept = KeptState()
    kept.wide = {name: Wide((0, 1), {"globex": (1,)}, 0.001) for name in ("acme", "initech")}
    kept.on_narrowed(["acme"])
    assert list(kept.wide) == ["initech"]


class UsedFrontend(RemoteFrontend):
    """A tenant's HTTP side whose models were used at these times."""

    def __init__(self, **last_uses: int) -> None:
        self._last_uses = last_uses

    def __repr__(self) -> str:
        return "<UsedFrontend>"

    def last_uses_known(self) -> dict[str, int]:
        return self._last_uses


def test_what_was_used_last_is_loaded_first_and_what_may_have_ended_the_process_last() -> None:
    kept = KeptState()
    kept.on_started({"acme": (0,), "globex": (1,)})
    kept.crashes.on_loading("acme", "late")
    kept.crashes.on_end("its process")
    _, _, found = kept.start({"acme": UsedFrontend(old=5, new=9, never=0, late=10), "globex": UsedFrontend(never=0)})
    ranks = found.ranks["acme"]
    assert sorted(["never", "late", "old", "new"], key=lambda name: ranks.get(name, 0)) == ["new", "old", "never", "late"]
    assert found.left_out == {}, "it ended once"
    assert list(found.ranks) == ["acme"]


def test_models_are_loaded_as_the_last_request_for_each_said() -> None:
    kept = KeptState()
    kept.on_started({"acme": (0,)})
    for change in (Change("acme", "a", True), Change("acme", "b", False), Change("acme", "a", True, "{}")):
        kept.on_changed(change)
    _, _, found = kept.start({})
    assert found == AtStart({("acme", "a"): "{}"}, {("acme", "b"): UNLOADED}, again=True)
