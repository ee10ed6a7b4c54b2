"""Short models run on the event loop of a server in one process, if it has a single tenant; nothing else of it changes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.config.tenant import TenantConfig
from server.link.messages import Done, Ticket
from server.link.ring import Link

from .harness import Served, configuration, serving
from .virtual import VirtualDevice
from .wire import FOREVER, Connection, client, data, infer, lane, posted, request, spin, tensor, until

DOCUMENT = request(tensor("x", "FP32", [1, 3], [1.0, 2.0, 3.0]))


class Recorder:
    """In place of a link's `run_now`: counts what ran, and remembers the cores of the thread."""

    def __init__(self, link: Link) -> None:
        assert link.tickets.run_now
        self.ran = 0
        self.cores: set[int] = set()
        self._run_now: Callable[[Ticket], Done | None] = link.tickets.run_now
        link.tickets.run_now = self.run

    def run(self, ticket: Ticket) -> Done | None:
        done = self._run_now(ticket)
        if done:
            self.ran += 1
            self.cores = os.sched_getaffinity(0)
        return done


def link(served: Served, name: str = "acme") -> Link:
    return served.runtime.frontends[name].link


def infer_until_on_the_loop(http: httpx.Client, recorder: Recorder, model: str = "identity", document: Any = DOCUMENT) -> None:
    """Send requests until one has run on the event loop."""
    before = recorder.ran

    def ran() -> bool:
        data(infer(http, model, document))
        return recorder.ran > before

    until(ran)


@pytest.mark.parametrize("direct", [False, True], ids=["asgi", "direct"])
def test_a_short_model_runs_on_the_event_loop_also_after_a_repartition(standard: Path, direct: bool) -> None:
    tenant = TenantConfig(name="acme", granules=1, models=("identity", "rows"))
    with serving(configuration(standard, tenant), VirtualDevice(8), direct) as served, client(served) as http:
        for granules in (1, 2, 1):
            moved = http.put("/admin/partitions", json={"acme": granules})
            assert moved.status_code == 200, moved.text
            recorder = Recorder(link(served))
            infer_until_on_the_loop(http, recorder)
            assert data(infer(http, "identity", DOCUMENT)) == [1.0, 2.0, 3.0]
            assert recorder.cores == served.runtime.manager.held["acme"].host_cores
        statistics = http.get("/v2/models/identity/stats").json()["model_stats"][0]
        assert statistics["inference_stats"]["success"]["count"] == statistics["inference_count"]
        assert statistics["inference_stats"]["fail"]["count"] == 0


def test_nothing_runs_on_the_event_loop_of_several_tenants(standard: Path) -> None:
    tenants = [TenantConfig(name=name, granules=1, models=("identity",)) for name in ("acme", "globex")]
    with serving(configuration(standard, *tenants), VirtualDevice(8)) as served, client(served) as http:
        for name in ("acme", "globex"):
            http.headers["X-Tenant"] = name
            assert data(infer(http, "identity", DOCUMENT)) == [1.0, 2.0, 3.0]
            assert link(served, name).tickets.run_now is None


@pytest.mark.parametrize("direct", [False, True], ids=["asgi", "direct"])
def test_a_model_that_suddenly_does_not_end_leaves_the_event_loop_and_can_be_stopped(standard: Path, direct: bool) -> None:
    with serving(configuration(standard), direct=direct) as served, client(served) as http:
        recorder = Recorder(link(served))
        infer_until_on_the_loop(http, recorder, "spin", spin(1))
        ran = recorder.ran
        with Connection(served) as connection:
            connection.send(posted("spin", spin(FOREVER)))
            until(lambda: lane(http)["in_flight"] == 1)
            assert http.get("/v2/health/live").status_code == 200
        until(lambda: lane(http)["in_flight"] == 0)
        assert recorder.ran == ran
        assert data(infer(http, "identity", DOCUMENT)) == [1.0, 2.0, 3.0]
