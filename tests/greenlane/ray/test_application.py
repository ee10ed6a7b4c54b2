"""Ray Serve on this machine, with real servers: requests, one killed under load, all repartitioned.

Needs greenlane[ray] and half a minute or more: `pytest -m ray -s tests/greenlane/ray/test_application.py`.
"""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from greenlane.load.server_process import free_port
from tests.end_to_end import repository

from .load import ACME, ADMIN, GLOBEX, TOML, Load, binary_request

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]
CHILD = ("-m", "tests.greenlane.ray.virtual_child")
ROOT = Path(__file__).parents[3]
CLIENTS = 8


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    repository.in_parts(folder / "models")
    path = folder / "greenlane.toml"
    path.write_text(TOML.replace("REPOSITORY", str(folder / "models")))
    return path


@pytest.fixture(scope="module")
def url(file: Path) -> Iterator[str]:
    """Two servers of one core each behind Ray Serve."""
    ray = pytest.importorskip("ray")
    from ray import serve

    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    port = free_port()
    ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env=environment, configure_logging=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "WARNING"})
    try:
        began = time.monotonic()
        deploy(file)
        print(f"\nboth servers ready after {time.monotonic() - began:.1f} s; Ray {ray.__version__}; {machine()}")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(file: Path) -> None:
    """As `serve run`; returns when all servers are ready."""
    from ray import serve

    from greenlane.ray import application, arguments

    given = {"config": str(file), "servers": "2", "gpus": "0", "cores": "1", "tenants": {"globex": [1]}}
    serve.run(application.deployments(arguments.read(given), CHILD), name="greenlane", route_prefix="/")


@pytest.fixture
def admin(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=120) as client:
        yield client


def servers(admin: httpx.Client) -> dict[str, dict[str, Any]]:
    """By number what each has."""
    return admin.get("/admin/partitions").raise_for_status().json()["servers"]


def granules(admin: httpx.Client) -> dict[str, dict[str, int]]:
    return {
        number: {name: len(share["granules"]) for name, share in each["partitions"].items()}
        for number, each in servers(admin).items()
    }


def test_requests_are_passed_on_byte_for_byte(url: str) -> None:
    values = np.arange(100_000, dtype=np.float32)
    headers, body = binary_request(values)
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {ACME}"}, timeout=60) as http:
        for _ in range(10):
            answer = http.post("/v2/models/identity/infer", headers=headers, content=body)
            assert answer.status_code == 200, answer.text
            assert answer.content[int(answer.headers["Inference-Header-Content-Length"]) :] == values.tobytes()
        assert http.get("/v2/models/none").status_code == 404
        assert http.get("/v2/models/identity", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert http.get("/admin/partitions").status_code == 401


@pytest.mark.parametrize("killed", ["server", "replica"])
async def test_one_is_killed_under_load(url: str, admin: httpx.Client, killed: str) -> None:
    """Only what was in flight there fails. Ray kills the processes of a replica that is killed, so both are alike."""
    load = Load(url, ACME, CLIENTS)
    running = asyncio.create_task(load.run())
    await load.until(200)
    quiet = summary(load)
    victim = (await asyncio.to_thread(pids_of_servers))[0]
    os.kill(victim if killed == "server" else parent(victim), signal.SIGKILL)
    began = time.monotonic()
    await load.until(50)
    await asyncio.to_thread(wait_for_replacement, admin, victim)
    recovered = time.monotonic() - began
    await load.until(200)
    load.stop()
    await running
    print(f"\n{killed} killed: {load.answers.total()} requests: {dict(load.answers)} {dict(load.failures)}")
    print(f"two servers again after {recovered:.1f} s; {CLIENTS} clients, before it {quiet}; {machine()}")
    assert load.wrong == 0
    assert set(load.answers) <= {200, 502}, load.failures
    assert all(re.search(r"server \d ended before it answered", text) for text in load.failures)
    assert load.answers[502] <= CLIENTS, "only what was in flight there"


def test_all_servers_are_repartitioned_and_replacements_too(url: str, admin: httpx.Client) -> None:
    assert granules(admin) == {"0": {"acme": 1, "globex": 3}, "1": {"acme": 1, "globex": 3}}
    refused = admin.put("/admin/partitions", json={"acme": 2})
    assert (refused.status_code, refused.json()["state"]) == (409, "unchanged")
    moved = admin.put("/admin/partitions", json={"acme": 2, "globex": 2})
    assert moved.status_code == 200, moved.text
    print(f"\n{moved.json()}")
    wanted = {"0": {"acme": 2, "globex": 2}, "1": {"acme": 2, "globex": 2}}
    assert granules(admin) == wanted
    victim = pids_of_servers()[1]
    os.kill(victim, signal.SIGKILL)
    wait_for_replacement(admin, victim)
    assert granules(admin) == wanted


def test_an_answer_comes_in_parts(url: str) -> None:
    values, headers = {"x": 20, "bad": -1, "turns": 30_000}, {"Authorization": f"Bearer {ACME}"}
    address = f"{url}/v2/models/countdown/generate_stream"
    with httpx.stream("POST", address, json=values, headers=headers, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [(time.monotonic(), line) for line in answer.iter_lines() if line]
    times = [at - lines[0][0] for at, _ in lines]
    assert [json.loads(line.removeprefix("data: "))["y"] for _, line in lines] == list(range(20, 0, -1))
    assert len({round(at, 3) for at in times}) > 5, "not all at the end"


async def test_a_changed_configuration_replaces_the_servers_under_load_and_no_request_fails(
    url: str, admin: httpx.Client, file: Path
) -> None:
    load = Load(url, ACME, CLIENTS)
    running = asyncio.create_task(load.run())
    await load.until(100)
    before = set(await asyncio.to_thread(pids_of_servers))
    began = time.monotonic()
    await asyncio.to_thread(change_and_deploy, file)
    took = time.monotonic() - began
    await load.until(100)
    load.stop()
    await running
    print(
        f"\nchanged in {took:.1f} s: {load.answers.total()} requests: {dict(load.answers)} {dict(load.failures)}; {machine()}"
    )
    assert set(load.answers) == {200}, load.failures
    assert load.wrong == 0
    assert not before & set(await asyncio.to_thread(pids_of_servers))
    shares = await asyncio.to_thread(granules, admin)
    assert shares == {"0": {"acme": 1, "globex": 2}, "1": {"acme": 1, "globex": 2}}, "the file's, not those set before"


def test_a_tenant_is_served_where_the_application_says(url: str, admin: httpx.Client) -> None:
    counts = [counted(admin, number) for number in "01"]
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {GLOBEX}"}, timeout=60) as http:
        headers, body = binary_request(np.zeros(4, np.float32))
        for _ in range(10):
            assert http.post("/v2/models/identity/infer", headers=headers, content=body).status_code == 200
    assert [counted(admin, number) for number in "01"] == [counts[0], counts[1] + 10]


def change_and_deploy(file: Path) -> None:
    file.write_text(file.read_text().replace("granules = 3", "granules = 2"))
    deploy(file)


def machine() -> str:
    return f"load of the machine {os.getloadavg()[0]:.1f}"


def counted(admin: httpx.Client, number: str) -> int:
    """Globex's requests at one server, by that server's metrics."""
    text = admin.get(f"/admin/servers/{number}/metrics").raise_for_status().text
    return sum(
        int(float(value))
        for value in re.findall(r'^nv_inference_request_success\{[^}]*tenant="globex"[^}]*\} (\S+)$', text, re.M)
    )


def wait_for_replacement(admin: httpx.Client, victim: int) -> None:
    """Until there are two servers again that answer, and the victim is none of them."""
    until = time.monotonic() + 240
    while True:
        now, found = pids_of_servers(), servers(admin)
        if len(now) == 2 and victim not in now and len(found) == 2 and not any("error" in each for each in found.values()):
            return
        assert time.monotonic() < until, found
        time.sleep(0.25)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def summary(load: Load) -> str:
    times = sorted(load.seconds)
    return f"median {times[len(times) // 2] * 1e3:.0f} ms, p99 {times[len(times) * 99 // 100] * 1e3:.0f} ms"


def pids_of_servers() -> list[int]:
    """The main processes of the servers, by age."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if CHILD[1].encode() in words and stat[0] != "Z" and words[1] == b"-m":
                found.append((int(stat[19]), int(entry.name)))
    return [pid for _, pid in sorted(found)]
