"""The autopilot and ladders in a whole server: a load that comes and goes moves granules and back, a dry run moves none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from server.config.tenant import TenantConfig
from server.observing.autopilot import Pace
from server.observing.pilot import Mode, Pilot

from .harness import Served, configuration, serving
from .processes import configure, running, tenant
from .virtual import VirtualDevice
from .wire import SMALL, client, infer, until

PACE = Pace(period=0.1, window=0.4, patience=2, calm=5, bar=30.0, after_operator=30.0)
"""As the server's, but fifty times as fast."""
TENANTS = (
    TenantConfig(name="acme", granules=1, models=("identity",), target_p99=0.0001, ladder=(1, 2)),
    TenantConfig(name="globex", granules=3, models=("identity",), min_granules=2, ladder=(2, 3)),
)
"""acme misses its target with any request, so that nothing depends on how fast this machine is."""


@asynccontextmanager
async def asked(served: Served) -> AsyncIterator[None]:
    """acme is asked back to back."""

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=60, base_url=served.url, headers={"X-Tenant": "acme"}) as client:
            while True:
                assert (await client.post("/v2/models/identity/infer", json=SMALL)).status_code == 200

    asking = asyncio.create_task(ask())
    yield
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


async def fly(served: Served, mode: Mode) -> None:
    """Start an autopilot with this pace in place of the server's, which is off."""

    async def start() -> None:
        observers = served.application.observers()
        observers.pilot = Pilot(served.controller, mode, PACE)
        observers.pilot.start()

    await asyncio.to_thread(served.call, start())


def counts(served: Served) -> dict[str, int]:
    return {name: len(granules.granules) for device in served.controller.devices for name, granules in device.held.items()}


async def reached(served: Served, wanted: dict[str, int]) -> None:
    async with asyncio.timeout(30):
        while counts(served) != wanted:
            await asyncio.sleep(0.05)


async def admin(served: Served, path: str, body: object = None) -> Any:
    async with httpx.AsyncClient(timeout=60, base_url=served.url) as client:
        answer = await (client.get(path) if body is None else client.put(path, json=body))
        assert answer.status_code == 200
        return answer.json()


async def ladders_stand(served: Served) -> None:
    """Wait until both tenants' model is ready on the other share of their ladder."""
    async with asyncio.timeout(30):
        while [rung["models"] for each in (await shares(served)).values() for rung in each.get("ladder", ())] != [1, 1]:
            await asyncio.sleep(0.05)


async def shares(served: Served) -> dict[str, Any]:
    return (await admin(served, "/admin/partitions"))["partitions"]


async def moves(served: Served) -> list[dict[str, Any]]:
    return (await admin(served, "/admin/moves"))["moves"]


async def test_a_load_that_comes_and_goes_moves_a_core_and_back_by_ladder(standard: Path) -> None:
    with serving(configuration(standard, *TENANTS), VirtualDevice(4)) as served:
        await ladders_stand(served)
        await fly(served, "on")
        await asyncio.sleep(3 * PACE.window)
        assert await moves(served) == []
        async with asked(served):
            await reached(served, {"acme": 2, "globex": 2})
        await reached(served, {"acme": 1, "globex": 3})
        back, gave = await moves(served)
        assert (gave["by"], gave["outcome"], gave["before"]) == ("autopilot", "moved", {"acme": 1, "globex": 3})
        assert gave["reason"].startswith("1 core from globex (no requests) to acme (p99 ")
        assert all(paused["ladder"] for paused in gave["paused"].values())
        assert back["reason"] == "1 core back from acme (no requests) to globex, which has 2 of its own 3"
        assert back["at"] - gave["at"] > PACE.window + PACE.calm * PACE.period / 2, "not too early"


async def test_a_dry_run_only_explains_and_an_operator_pauses_it(standard: Path) -> None:
    with serving(configuration(standard, *TENANTS), VirtualDevice(4)) as served:
        await fly(served, "dry-run")
        async with asked(served):
            async with asyncio.timeout(30):
                while not await moves(served):
                    await asyncio.sleep(0.05)
            (proposed,) = await moves(served)
            assert (proposed["outcome"], proposed["paused"]) == ("proposed", {})
            assert counts(served) == {"acme": 1, "globex": 3}
        seen = await admin(served, "/admin/autopilot")
        assert (seen["mode"], seen["paused_for_seconds"]) == ("dry-run", 0.0)
        assert seen["tenants"]["acme"] | {"measured": None} == {
            "granules": 1,
            "own_granules": 1,
            "min_granules": 1,
            "target_ms": 0.1,
            "measured": None,
        }
        await admin(served, "/admin/partitions", {"globex": 2})
        assert (await admin(served, "/admin/autopilot"))["paused_for_seconds"] > 0


def test_a_process_that_is_killed_has_its_ladder_again(tmp_path: Path, standard: Path) -> None:
    """The tenant's own process on a core of this machine, as users run it; a move is asked for while there is none."""
    config = configure(tmp_path / "greenlane.toml", standard, tenant("acme", "identity", ladder=[1, 2]))
    with running(config) as server, client(server) as http:
        switches = "acme can switch to cores"
        server.wait_for_log(switches)
        server.kill("acme")
        moved = http.put("/admin/partitions", json={"acme": 2}).status_code
        until(lambda: infer(http, "identity", SMALL, headers={"X-Tenant": "acme"}).status_code == 200)
        if moved == 503:  # It had not been replaced yet, and nothing has changed.
            assert http.get("/admin/moves").json()["moves"][0]["outcome"] == "refused"
            until(lambda: http.put("/admin/partitions", json={"acme": 2}).status_code == 200)
        until(lambda: http.put("/admin/partitions", json={"acme": 1}).status_code == 200)
        until(lambda: "ladder" in http.get("/admin/partitions").json()["partitions"]["acme"])
        server.wait_for_log(switches, 2)
        assert http.put("/admin/partitions", json={"acme": 2}).status_code == 200
        assert http.get("/admin/moves").json()["moves"][0]["paused"]["acme"]["ladder"]
