"""A repository that is watched: which tenant is served which new version, and when."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from server.config.schema import ModelsConfig
from server.config.tenant import TenantConfig
from server.control.watcher import Watcher
from server.errors import BadRequest, NotFound, RequestError, Unavailable
from server.repository.model_repository import Repository
from tests.fakes import PATIENCE

HOURS = 9999.0
ENSEMBLE = """platform: "ensemble"
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling { step { model_name: "b" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }
"""


class FakeController:
    """Remembers what it was to refresh; `errors` are raised once each, by tenant and model."""

    def __init__(self, root: Path) -> None:
        self.tenants = {
            "acme": TenantConfig(name="acme", granules=1, models=("*",)),
            "globex": TenantConfig(name="globex", granules=1, models=("b", "new")),
        }
        self.models = ModelsConfig(repository=root, watch=HOURS)
        self.state = "serving"
        self.reconfiguring = False
        self.on_reconfigured: Callable[[], None] = lambda: None
        self.refreshed: list[str] = []
        self.errors: dict[str, RequestError] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self._heard = asyncio.Event()

    def watch(self, seconds: float) -> None:
        self.models = self.models.model_copy(update={"watch": seconds})

    async def hears(self, *keys: str) -> None:
        """Wait until just these are refreshed, or have been."""
        async with asyncio.timeout(PATIENCE):
            while sorted(self.refreshed) != list(keys):
                await self._heard.wait()
                self._heard.clear()

    async def refresh(self, tenant: str, name: str) -> str:
        key = f"{tenant} {name}"
        self.refreshed.append(key)
        self._heard.set()
        if gate := self.gates.get(tenant):
            await gate.wait()
        if error := self.errors.pop(key, None):
            raise error
        return ""


class Site:
    def __init__(self, root: Path, controller: FakeController | None, watcher: Callable[[FakeController], Watcher]) -> None:
        self.root = root
        self.controller = controller or FakeController(root)
        self.watcher = watcher(self.controller)

    def write(self, name: str, text: str = "", version: int = 1) -> None:
        (self.root / name / str(version)).mkdir(parents=True, exist_ok=True)
        (self.root / name / str(version) / "model.onnx").write_text(text)

    async def looks(self, count: int = 1) -> list[str]:
        """What is refreshed by so many looks."""
        self.controller.refreshed.clear()
        for _ in range(count):
            await self.watcher.poll()
            await self.watcher.settled()
        return self.controller.refreshed


@asynccontextmanager
async def watching(
    root: Path, controller: FakeController | None = None, watcher: Callable[[FakeController], Watcher] = Watcher
) -> AsyncIterator[Site]:
    site = Site(root, controller, watcher)
    site.write("a")
    site.write("b")
    async with site.watcher:
        yield site


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with watching(tmp_path) as site:
        yield site


async def test_what_changes_during_a_reload_is_refreshed_for_the_tenants_that_it_adds(site: Site) -> None:
    """A tenant that comes may have loaded the model before it changed."""
    site.controller.reconfiguring = True
    site.write("b", "another")
    assert await site.looks(3) == []
    site.controller.tenants["hooli"] = TenantConfig(name="hooli", granules=1, models=("b",))
    site.controller.reconfiguring = False
    assert sorted(await site.looks(3)) == ["acme b", "globex b", "hooli b"]


async def test_only_what_changed_is_refreshed_for_those_who_may_call_it_once_it_has_settled(site: Site) -> None:
    assert await site.looks(2) == []
    site.write("new", "half")
    assert await site.looks() == []
    site.write("new", "the whole of it")
    assert await site.looks() == []
    assert sorted(await site.looks(3)) == ["acme new", "globex new"]
    site.write("a", "another")
    site.write("b", version=2)
    assert sorted(await site.looks(4)) == ["acme a", "acme b", "globex b"]
    (site.root / "a" / "config.pbtxt").write_text("max_batch_size: 4")
    assert await site.looks(4) == ["acme a"]
    (site.root / "a").rename(site.root / ".a")
    assert await site.looks() == []
    assert await site.looks(3) == ["acme a"]


async def test_an_ensemble_comes_after_its_steps(site: Site) -> None:
    (site.root / "an_ensemble" / "1").mkdir(parents=True)
    (site.root / "an_ensemble" / "config.pbtxt").write_text(ENSEMBLE)
    site.write("b", "another")
    site.write("c")
    found = [each for each in await site.looks(3) if each.startswith("acme")]
    assert found == ["acme b", "acme c", "acme an_ensemble"]


async def test_what_failed_is_not_tried_again_before_it_changes_but_what_waited_for_a_process_is(site: Site) -> None:
    site.controller.errors |= {"acme b": BadRequest("it is wrong"), "globex b": Unavailable("it is started again")}
    site.write("b", "another")
    assert sorted(await site.looks(2)) == ["acme b", "globex b"]
    assert await site.looks(2) == ["globex b"]
    site.write("b", "a third one")
    assert sorted(await site.looks(3)) == ["acme b", "globex b"]


async def test_no_error_is_logged_of_a_tenant_that_goes_while_its_models_are_refreshed(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    gate = site.controller.gates["globex"] = asyncio.Event()
    site.controller.errors["globex b"] = NotFound("globex: there is no such tenant")
    site.write("b", "another")
    await site.watcher.poll()
    await site.watcher.poll()
    await site.controller.hears("acme b", "globex b")
    del site.controller.tenants["globex"]
    gate.set()
    await site.watcher.settled()
    assert not caplog.records


async def test_a_tenant_whose_models_take_long_holds_up_no_other_one(site: Site) -> None:
    site.controller.gates["acme"] = gate = asyncio.Event()
    site.write("b", "another")
    for _ in range(2):
        await site.watcher.poll()
    await site.controller.hears("acme b", "globex b")
    site.write("b", "a third one")
    for _ in range(2):
        await site.watcher.poll()
    await site.controller.hears("acme b", "globex b", "globex b")
    gate.set()
    await site.watcher.settled()
    assert await site.looks() == ["acme b"], "what came meanwhile"


async def test_nothing_is_done_before_the_server_serves_and_after_that_what_changed_meanwhile(site: Site) -> None:
    site.controller.state = "starting"
    site.write("new")
    assert await site.looks(3) == []
    site.controller.state = "incomplete"
    assert sorted(await site.looks()) == ["acme new", "globex new"]
    site.controller.state = "draining"
    site.write("new", "another")
    assert await site.looks(3) == []


async def test_a_repository_that_cannot_be_read_takes_no_model_away(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.root.rename(site.root.with_name("elsewhere"))
    assert await site.looks(3) == []
    assert [record.message for record in caplog.records if "cannot be read" in record.message] == [
        f"watch: the model repository cannot be read, so what is served stays: [Errno 2] No such file or directory: "
        f"'{site.root}'"
    ]
    site.root.with_name("elsewhere").rename(site.root)
    assert await site.looks(3) == []


async def test_it_looks_by_itself_while_the_configuration_says_so_and_follows_what_changed_before(tmp_path: Path) -> None:
    controller = FakeController(tmp_path)
    controller.watch(0.0)
    async with watching(tmp_path, controller) as site:
        looking = vars(site.watcher)["_looking"]
        site.write("a", "changed")
        controller.watch(0.001)
        controller.on_reconfigured()
        await controller.hears("acme a")
        controller.watch(0.0)
        controller.on_reconfigured()
        assert " every 0 s, " in repr(site.watcher)
        assert not looking.done()
    assert looking.cancelled()


async def test_a_look_that_does_not_end_is_logged_once_and_again_when_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a disk of the network is away: until then nothing new is served, which is not to go unnoticed."""
    async with watching(tmp_path, watcher=partial(Watcher, late=0.001)) as site:
        site.write("a", "another")
        assert await site.looks(2) == ["acme a"]
        gate, names = threading.Event(), Repository.names
        monkeypatch.setattr(Repository, "names", lambda repository: names(repository) if gate.wait(PATIENCE) else None)
        caplog.clear()
        look = asyncio.ensure_future(site.looks())
        async with asyncio.timeout(PATIENCE):
            while not caplog.messages:
                await asyncio.sleep(0)
        gate.set()
        assert await look == []
        (late, ended) = caplog.messages
        assert late == f"watch: looking at {tmp_path} has taken 0.001 s; what has changed there is not served before it ends"
        assert ended.startswith(f"watch: looking at {tmp_path} has ended, after ")


async def test_a_pipe_in_place_of_a_configuration_and_a_large_one_hold_up_nothing_else(site: Site) -> None:
    for name in ("pipe", "large"):
        site.write(name)
    os.mkfifo(site.root / "pipe" / "config.pbtxt")
    (site.root / "large" / "config.pbtxt").write_text("#" * (5 << 20))
    site.write("b", "another")
    assert sorted(await site.looks(3)) == ["acme b", "acme large", "acme pipe", "globex b"]
    site.write("c")
    assert await site.looks(3) == ["acme c"]
