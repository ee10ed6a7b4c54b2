"""Two GPUs of one host: a process and a tenant on each. Skipped unless there are two.

The part `two` of tests/gpu/all.sh, within three minutes; with OUT set, the figures go to $OUT/two_devices.json.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from partitions.strain import STRAINS

from . import process
from .asking import asking
from .bench import MIB, assert_close, expected
from .networks import add, feed, mlp, plan, several
from .process import PATIENCE, Client, Served, gpu_section, mps

pytestmark = pytest.mark.gpu
NETWORKS = {"mlp": mlp, "several": several}
ASKED = 3_000
"""Inferences of which a 99th percentile is taken."""
PAUSE = 0.0
"""Seconds that `Asking` waits after each answer."""
MOVES = 6
AGAIN = 4.0
"""Seconds until a tenant is served again whose device process was killed, its kernels being known. The goal is 2."""
BESIDE = 5.0
"""Milliseconds by which a tenant's slowest answer may be slower beside a move to its GPU, in the median of the moves."""
MOVED = 60.0
"""The same of the tenant that moves."""
TENANTS = """
[tenants.acme]
device = "0"
granules = 4
models = ["*"]
[tenants.globex]
device = "1"
granules = 4
models = ["*"]
[tenants.initech]
device = "0"
granules = 4
models = ["*"]
"""


def devices() -> str:
    """Their sections of the configuration."""
    return "".join(gpu_section(f"[devices.{index}]", index) for index in (0, 1))


@pytest.fixture(scope="module", autouse=True)
def two(gpu: None) -> None:
    core = pytest.importorskip("cuda.core")
    if len(core.Device.get_all_devices()) < 2:
        pytest.skip("needs two GPUs")


def figures(file: str) -> Iterator[dict[str, Any]]:
    """A dictionary for what is measured; printed in the end, and written to this file in $OUT where that is set."""
    found: dict[str, Any] = {}
    yield found
    text = json.dumps(found, indent=2)
    print(f"\n{text}")
    if folder := os.environ.get("OUT"):
        (Path(folder) / file).write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """What was measured, for $OUT/two_devices.json."""
    yield from figures("two_devices.json")


@pytest.fixture(scope="module")
def models(two: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two") / "models"
    for name, network in NETWORKS.items():
        plan(add(root, name), network())
    return root


@contextmanager
def serving(
    models: Path,
    folder: Path,
    devices: str,
    tenants: str,
    module: str = "server",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    config = folder / "greenlane.toml"
    lines = ["[server]", 'drain_grace = "0s"', "[models]", f'repository = "{models}"', devices, tenants]
    config.write_text("\n".join(lines), encoding="utf-8")
    with process.serving([module, "--config", str(config), "--port", "0"], environment) as served:
        yield served


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(models, tmp_path_factory.mktemp("server"), devices(), TENANTS) as served:
        yield served


def free(index: int) -> int:
    """Free bytes of a GPU."""
    from cuda.bindings import driver
    from cuda.core import Device

    Device(index).set_current()
    error, there, _ = driver.cuMemGetInfo()
    assert error == driver.CUresult.CUDA_SUCCESS
    return int(there)


def check(client: Client, tenant: str, seed: int) -> None:
    """The answers of every model are right."""
    for name, network in NETWORKS.items():
        wanted = expected(network())
        for shapes in network().tries:
            arrays = feed(network(), shapes, seed)
            assert_close(list(client.infer(name, tenant, arrays).values()), wanted(arrays))


def milliseconds(client: Client, tenant: str, count: int = ASKED) -> list[float]:
    """How long each inference took."""
    arrays, took = feed(mlp(), {"x": (1, 784)}, 1), []
    for _ in range(count):
        began = time.perf_counter()
        client.infer("mlp", tenant, arrays)
        took.append((time.perf_counter() - began) * 1e3)
    return took


def p99(took: list[float]) -> float:
    return float(np.percentile(took, 99))


class Asking(threading.Thread):
    """Asks for one tenant, and checks every answer, until the end of the block. `wrong` has what was no right answer."""

    def __init__(self, port: int, tenant: str) -> None:
        super().__init__(daemon=True)
        self.took: list[float] = []
        self.wrong: list[str] = []
        self._port, self._tenant, self._stopping = port, tenant, threading.Event()

    def run(self) -> None:
        arrays = feed(mlp(), {"x": (1, 784)}, 7)
        wanted = expected(mlp())(arrays)
        client = Client(self._port)
        while not self._stopping.is_set():
            began = time.perf_counter()
            try:
                assert_close(list(client.infer("mlp", self._tenant, arrays).values()), wanted)
            except (AssertionError, OSError) as error:
                self.wrong.append(str(error)[:300])
            self.took.append((time.perf_counter() - began) * 1e3)
            self._stopping.wait(PAUSE)
        client.close()

    def more(self, count: int = 200) -> None:
        """Wait until so many more were asked."""
        enough, ends = len(self.took) + count, time.monotonic() + PATIENCE
        while len(self.took) < enough:
            assert time.monotonic() < ends
            time.sleep(0.001)

    def __enter__(self) -> "Asking":
        self.start()
        self.more(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.join()


def test_a_device_process_uses_its_gpu_alone(models: Path, tmp_path: Path, found: dict[str, Any]) -> None:
    before = [free(0), free(1)]
    tenants = '[tenants.acme]\ngranules = 4\nmodels = ["*"]'
    with serving(models, tmp_path, gpu_section("[devices.b]", 1), tenants) as served:
        taken = [was - free(index) for index, was in enumerate(before)]
        assert [each["name"] for each in served.admin("GET", "device")["devices"]] == ["b"]
        with closing(Client(served.port)) as client:
            check(client, "acme", 1)
    found["MiB taken of GPU 0 and 1 by a device process on GPU 1"] = [round(each / MIB) for each in taken]
    assert taken[1] > 100 * MIB
    assert taken[0] < 32 * MIB


def test_an_engine_on_the_second_gpu_takes_its_own_memory_and_refuses_the_first_s(
    tmp_path: Path, found: dict[str, Any]
) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.gpu.second", str(plan(tmp_path, mlp()))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=process.PATIENCE)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    said = json.loads(ran.stdout.splitlines()[-1])
    found["memory of an engine on the second GPU"] = said
    foreign = {name: said.pop(name) for name in list(said) if name.startswith("the first GPU's")}
    assert set(said.values()) == {"right"}
    assert len(foreign) == 2
    assert all("is device 0's, but the engine is bound to device 1" in text for text in foreign.values())


def test_each_tenant_gets_right_answers_from_its_own_gpu(server: Served, found: dict[str, Any]) -> None:
    devices = server.admin("GET", "device")["devices"]
    found["devices"] = [each["description"] for each in devices]
    assert [(each["kind"], each["tenants"], each["state"]) for each in devices] == [
        ("cuda", ["acme", "initech"], "serving"),
        ("cuda", ["globex"], "serving"),
    ]
    probed = server.admin("POST", "partitions/probe")
    assert probed["overlaps"] == []
    for each in probed["partitions"].values():
        assert each["located"] is None if mps() == "on" else len(each["located"]) == each["size"]
    with closing(Client(server.port)) as client:
        check(client, "acme", 2)
        check(client, "globex", 3)


def test_a_process_killed_under_load_is_replaced_soon_and_not_noticed_on_the_other_gpu(
    server: Served, found: dict[str, Any]
) -> None:
    other = server.process_of("globex", "1")
    with asking(server.port, "acme") as acme, asking(server.port, "globex") as globex:
        began = time.monotonic()
        with closing(Client(server.port)) as client:
            milliseconds(client, "initech", 1_500)
        killed = time.monotonic()
        os.kill(server.process_of("acme", "0"), signal.SIGKILL)
        _until_served(server, "acme", killed)
        _until_ready(server, "acme")
        with closing(Client(server.port)) as client:
            check(client, "acme", 4)
        ended = time.monotonic()
    assert acme.refused, "it was killed in the middle of work"
    assert all(text.startswith("refused") for text in acme.wrong), acme.wrong
    again = acme.again() - killed
    quiet, during = globex.during(began, killed), globex.during(killed, ended)
    found["a process killed under load: seconds until its tenant is served again"] = round(again, 2)
    found["p99 of the other GPU's tenant, ms: quiet, while a process is killed and replaced"] = [p99(quiet), p99(during)]
    found["its slowest answer, ms: quiet, meanwhile"] = [max(quiet), max(during)]
    assert globex.wrong == []
    assert p99(during) < max(3 * p99(quiet), p99(quiet) + 1)
    assert server.process_of("globex", "1") == other
    assert again < AGAIN


def _until_served(server: Served, tenant: str, began: float, failed: bool = False) -> float:
    """The seconds since `began` until this tenant gets an answer again, after it got errors or others have."""
    arrays = feed(mlp(), {"x": (1, 784)}, 1)
    while time.monotonic() < began + PATIENCE:
        with closing(Client(server.port)) as client:
            try:
                client.infer("mlp", tenant, arrays)
            except (AssertionError, OSError):
                failed = True
                time.sleep(0.05)
                continue
        if failed:
            return time.monotonic() - began
    raise AssertionError(server.log)


def _until_ready(server: Served, tenant: str) -> None:
    """Wait until this tenant's models are all served: after a kill they come back one after another."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        with closing(Client(server.port)) as client:
            if all(client.ask("GET", f"/v2/models/{name}/ready", tenant=tenant).status == 200 for name in NETWORKS):
                return
        time.sleep(0.05)
    raise AssertionError(server.log)


def test_a_repartition_of_one_gpu_is_not_noticed_on_the_other(server: Served, found: dict[str, Any]) -> None:
    with Asking(server.port, "acme") as moving, closing(Client(server.port)) as client, ThreadPoolExecutor(1) as pool:
        quiet = p99(milliseconds(client, "globex"))
        changing = pool.submit(_repartition, server)
        during: list[float] = []
        while not changing.done():
            during += milliseconds(client, "globex", 200)
        changing.result()
    assert moving.wrong == []
    found["p99 of the other GPU's tenant, ms: quiet, during 10 repartitions"] = [quiet, p99(during)]
    assert p99(during) < max(3 * quiet, quiet + 1)


def _repartition(server: Served) -> None:
    for count in (6, 2, 8, 3, 5, 4, 7, 1, 2, 4):
        assert server.admin("PUT", "partitions", {"acme": count})["moved"] == ["acme"]


def test_tenants_of_both_gpus_are_repartitioned_at_once(server: Served) -> None:
    with Asking(server.port, "acme") as one, Asking(server.port, "globex") as two:
        for count in (6, 4):
            assert server.admin("PUT", "partitions", {"acme": count, "globex": count})["moved"] == ["acme", "globex"]
            one.more()
            two.more()
    assert (one.wrong, two.wrong) == ([], [])


def test_a_tenant_s_share_is_strained_while_it_and_its_neighbour_are_served(server: Served, found: dict[str, Any]) -> None:
    with Asking(server.port, "acme") as own, Asking(server.port, "initech") as neighbour:
        for kind in STRAINS:
            done = server.admin("POST", "tenants/acme/strain", {"kind": kind, "seconds": 0.2})
            found[f"strain: {kind}, GB/s of 32 SMs beside its own tenant"] = done["gigabytes_per_second"]
            assert done["bytes"] > 0
            own.more()
            neighbour.more()
    assert (own.wrong, neighbour.wrong) == ([], [])


def test_a_tenant_moves_to_the_other_gpu_and_back_while_all_are_served(server: Served, found: dict[str, Any]) -> None:
    """Beside it on each GPU one tenant is asked: it feels no more than a repartition."""
    spans = list[tuple[float, float]]()
    with ExitStack() as stack:
        moving, *beside = [stack.enter_context(asking(server.port, name)) for name in ("acme", "initech", "globex")]
        client = stack.enter_context(closing(Client(server.port)))
        began = time.monotonic()
        for _ in range(4):
            check(client, "acme", 4)
        calm, seconds = time.monotonic(), list[float]()
        for turn in range(MOVES):
            to, since = str(1 - turn % 2), time.monotonic()
            moved = server.admin("PUT", "tenants/acme/device", {"device": to, "granules": 4})
            seconds.append(round(time.monotonic() - since, 2))
            assert moved["partitions"]["acme"]["device"] == to
            check(client, "acme", 5)
            spans.append((since, time.monotonic()))
            assert server.admin("POST", "partitions/probe")["overlaps"] == []
    assert [each.wrong for each in (moving, *beside)] == [[], [], []]
    found["seconds that a move to the other GPU takes"] = seconds
    over = {}
    for name, asked in zip(("the moved tenant", "beside on GPU 0", "beside on GPU 1"), (moving, *beside), strict=True):
        worst = [asked.worst(*span) for span in spans]
        found[f"slowest answers of {name}, ms: quiet, during each move"] = [asked.worst(began, calm), *worst]
        found[f"p99 of {name}, ms: quiet, during the moves"] = [
            p99(asked.during(began, calm)),
            p99([took for span in spans for took in asked.during(*span)]),
        ]
        over[name] = {to: median(worst[to::2]) - asked.worst(began, calm) for to in (0, 1)}
    mover, *others = over.values()
    assert max(mover.values()) <= MOVED, over
    assert max(max(each.values()) for each in others) <= BESIDE, over
    check_both(server)


def check_both(server: Served) -> None:
    with closing(Client(server.port)) as client:
        check(client, "acme", 5)
        check(client, "globex", 6)


def test_a_tenant_that_moved_is_served_there_again_when_that_process_was_killed(server: Served) -> None:
    assert server.admin("PUT", "tenants/acme/device", {"device": "1"})["partitions"]["acme"]["device"] == "1"
    began = time.monotonic()
    os.kill(server.process_of("acme", "1"), signal.SIGKILL)
    _until_served(server, "acme", began)
    _until_served(server, "globex", began, failed=True)
    for tenant in ("acme", "globex"):
        _until_ready(server, tenant)
    check_both(server)
    assert server.admin("GET", "partitions")["partitions"]["acme"]["device"] == "1"
