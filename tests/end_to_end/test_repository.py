"""Models that are loaded, changed and unloaded while others are served."""

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from server.config.schema import ModelOptions
from server.config.tenant import TenantConfig

from . import repository
from .harness import Served, configuration, serving
from .wire import SMALL, Connection, busy, client, data, index, infer, lane, post, posted, tensor, until
from .wire import request as asked

ONE = asked(tensor("x", "FP32", [1], [1]))
"""A request for `scaled`, which answers its factor."""


both_ways = pytest.mark.parametrize("changing", [False, True], ids=["asgi", "direct"], indirect=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository that a test may change."""
    repository.write(tmp_path, "identity", repository.IDENTITY)
    repository.write(tmp_path, "rows", repository.ROWS, config="max_batch_size: 4")
    repository.write(tmp_path, "scaled", scaled(1), config="version_policy { all {} }")
    repository.write(tmp_path, "spin", repository.SPIN)
    return tmp_path


@pytest.fixture
def changing(root: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server with a changeable repository; it runs one request at a time."""
    one_by_one = TenantConfig(name="acme", granules=1, models=("*",), in_flight=1)
    with serving(configuration(root, one_by_one), direct=getattr(request, "param", False)) as served:
        yield served


@pytest.fixture
def mine(changing: Served) -> Iterator[httpx.Client]:
    with client(changing) as http:
        yield http


def scaled(factor: int) -> str:
    return repository.SCALED.replace("FACTOR", str(factor))


def states(http: httpx.Client, name: str) -> list[str]:
    return [entry["state"] for entry in index(http) if entry["name"] == name]


def load(http: httpx.Client, name: str, **parameters: Any) -> httpx.Response:
    return http.post(f"/v2/repository/models/{name}/load", json={"parameters": parameters} if parameters else None)


def unload(http: httpx.Client, name: str) -> httpx.Response:
    return http.post(f"/v2/repository/models/{name}/unload")


def test_unknown_model_cannot_be_loaded_but_unloaded(mine: httpx.Client) -> None:
    answer = load(mine, "nowhere")
    assert (answer.status_code, answer.json()["error"]) == (400, "failed to load 'nowhere': not in the repository")
    assert (unload(mine, "nowhere").status_code, unload(mine, "nowhere").content) == (200, b"")
    assert states(mine, "nowhere") == []


@both_ways
def test_repaired_model_is_served_after_load(root: Path, changing: Served, mine: httpx.Client) -> None:
    path = repository.write(root, "new", repository.IDENTITY)
    good = path.read_bytes()
    path.write_bytes(good[:-20])
    answer = load(mine, "new")
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("failed to load 'new': new/1/model.onnx: failed to load: ")
    assert states(mine, "new") == ["UNAVAILABLE"]
    assert infer(mine, "new", SMALL).status_code == 503
    path.write_bytes(good)
    assert infer(mine, "new", SMALL).status_code == 503, "only a load looks at the files"
    assert (load(mine, "new").status_code, load(mine, "new").content) == (200, b"")
    assert states(mine, "new") == ["READY"]
    assert data(infer(mine, "new", SMALL)) == [1, 2]


def test_failed_reload_keeps_the_served_model(root: Path, mine: httpx.Client) -> None:
    (root / "scaled" / "1" / "model.onnx").write_bytes(b"no model")
    for _ in range(2):
        answer = load(mine, "scaled")
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("failed to load 'scaled': scaled/1/model.onnx: failed to load: ")
        assert states(mine, "scaled") == ["READY"]
        assert data(infer(mine, "scaled", ONE)) == [1]


@both_ways
def test_a_reload_under_load_answers_with_the_old_model_or_the_new_one(root: Path, changing: Served) -> None:
    begun = ended = 1
    answers = 0

    async def ask(http: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        nonlocal answers
        while not stop.is_set():
            oldest = ended
            async with http.post("/v2/models/scaled/infer", json=ONE) as answer:
                document = await answer.json()
                assert answer.status == 200, document
            assert oldest <= document["outputs"][0]["data"][0] <= begun
            answers += 1

    async def reload(http: aiohttp.ClientSession) -> None:
        nonlocal begun, ended
        for begun in range(2, 32):
            repository.replace(root, "scaled", scaled(begun))
            async with http.post("/v2/repository/models/scaled/load") as answer:
                assert answer.status == 200, await answer.text()
            ended = begun

    async def run() -> None:
        stop = asyncio.Event()
        async with aiohttp.ClientSession(changing.url) as http:
            clients = [asyncio.ensure_future(ask(http, stop)) for _ in range(6)]
            await reload(http)
            stop.set()
            await asyncio.gather(*clients)

    asyncio.run(run())
    assert answers > 30
    assert len(changing.runtime.workers["acme"].executors) == 4, "what was replaced is closed"


@both_ways
def test_unload_answers_accepted_requests_and_refuses_new_ones(changing: Served, mine: httpx.Client) -> None:
    with Connection(changing) as asking, Connection(changing) as unloading:
        with busy(changing, mine):
            asking.send(posted("identity", SMALL))
            until(lambda: lane(mine)["waiting"] + lane(mine)["in_flight"] == 2)
            unloading.send(post("/v2/repository/models/identity/unload"))
            until(lambda: states(mine, "identity") == ["UNAVAILABLE"])
            answer = infer(mine, "identity", SMALL)
            assert (answer.status_code, answer.json()["error"]) == (503, "model 'identity' is unavailable: unloaded")
            assert lane(mine)["waiting"] + lane(mine)["in_flight"] == 2
        assert asking.answer().status == 200
        assert unloading.answer().status == 200
    assert data(infer(mine, "scaled", ONE)) == [1]
    assert unload(mine, "identity").status_code == load(mine, "identity").status_code == 200
    assert data(infer(mine, "identity", SMALL)) == [1, 2]


def test_a_configuration_may_come_with_the_load_and_lasts_until_the_next(mine: httpx.Client) -> None:
    def largest() -> tuple[int, list[int]]:
        sizes = [infer(mine, "rows", asked(tensor("x", "FP32", [n, 3], [1] * 3 * n))).status_code for n in (2, 4, 5)]
        return mine.get("/v2/models/rows/config").json()["max_batch_size"], sizes

    assert largest() == (4, [200, 200, 400])
    assert load(mine, "rows", config='{"max_batch_size": 2}').status_code == 200
    assert largest() == (2, [200, 400, 400])
    for config in ('{"name": "other"}', '{"max_batch_size": -1}', '{"input": [{"name": "nope", "data_type": "TYPE_FP32"}]}'):
        answer = load(mine, "rows", config=config)
        assert answer.status_code == 400
        assert re.match("failed to load 'rows': (version 1: )?the config parameter", answer.json()["error"])
    assert largest() == (2, [200, 400, 400])
    assert load(mine, "rows").status_code == 200
    assert largest() == (4, [200, 200, 400])


def test_misspelt_key_in_load_is_refused_with_a_suggestion(mine: httpx.Client) -> None:
    answer = load(mine, "rows", config='{"max_batch_siz": 2}')
    reason = "the config parameter: max_batch_siz (did you mean max_batch_size?)"
    assert (answer.status_code, answer.json()["error"]) == (400, f"failed to load 'rows': {reason}")
    assert mine.get("/v2/models/rows/config").json()["max_batch_size"] == 4


@pytest.fixture
def overruling(root: Path) -> Iterator[httpx.Client]:
    """A server whose configuration sets the batching of `rows` and `scaled`."""
    options = {
        "rows": ModelOptions(max_batch=3, batch_delay=0.001, preferred_batches=(2, 3)),
        "scaled": ModelOptions(max_batch=0),
    }
    config = configuration(root, TenantConfig(name="acme", granules=1, models=("rows", "identity")))
    config = config.model_copy(update={"models": config.models.model_copy(update={"options": options})})
    with serving(config) as served, client(served) as http:
        yield http


@pytest.mark.parametrize(
    ("config", "key", "setting"),
    [
        ({"max_batch_size": 4}, "max_batch_size", "models.rows.max_batch"),
        ({"max_batch_size": 0}, "max_batch_size", "models.rows.max_batch"),
        (
            {"dynamic_batching": {"max_queue_delay_microseconds": 5}},
            "dynamic_batching.max_queue_delay_microseconds",
            "models.rows.batch_delay",
        ),
        (
            {"dynamic_batching": {"preferred_batch_size": [3]}},
            "dynamic_batching.preferred_batch_size",
            "models.rows.preferred_batches",
        ),
    ],
)
def test_overruled_configuration_in_load_is_refused(overruling: httpx.Client, config: Any, key: str, setting: str) -> None:
    answer = load(overruling, "rows", config=json.dumps(config))
    why = f"{key} would mean nothing: {setting} in the server's configuration overrules it; leave it out"
    assert (answer.status_code, answer.json()["error"]) == (400, f"failed to load 'rows': the config parameter: {why}")


def test_agreeing_configuration_in_load_is_accepted(overruling: httpx.Client) -> None:
    shown = overruling.get("/v2/models/rows/config").json()
    assert (shown["max_batch_size"], shown["dynamic_batching"]["preferred_batch_size"]) == (3, [2, 3])
    assert load(overruling, "rows", config=json.dumps(shown)).status_code == 200
    assert load(overruling, "rows", config="{}").status_code == 200
    assert overruling.get("/v2/models/rows/config").json() == shown
    assert load(overruling, "identity", config='{"max_batch_size": 4}').status_code == 200, "nothing overrules it"


def test_load_of_anothers_model_reveals_no_settings(overruling: httpx.Client) -> None:
    others, unknown = (load(overruling, name, config='{"max_batch_size": 4}') for name in ("scaled", "nothing"))
    assert others.status_code == unknown.status_code == 404
    assert others.text == unknown.text.replace("nothing", "scaled")


def test_unreadable_configuration_in_load_is_refused(overruling: httpx.Client) -> None:
    answer = load(overruling, "rows", config="[]")
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("failed to load 'rows': the config parameter: ")


def test_versions_come_and_go_with_a_load(root: Path, mine: httpx.Client) -> None:
    repository.write(root, "scaled", scaled(3), version=3)
    repository.write(root, "scaled", scaled(12), version=12)
    assert infer(mine, "scaled/versions/3", ONE).status_code == 404
    assert load(mine, "scaled").status_code == 200
    paths = ("scaled", "scaled/versions/1", "scaled/versions/3", "scaled/versions/12")
    assert [data(infer(mine, path, ONE)) for path in paths] == [[12], [1], [3], [12]]
    shutil.rmtree(root / "scaled" / "12")
    assert load(mine, "scaled").status_code == 200
    assert data(infer(mine, "scaled", ONE)) == [3]
    for version in ("12", "2", "01", "0"):
        answer = infer(mine, f"scaled/versions/{version}", ONE)
        assert (answer.status_code, answer.json()["error"]) == (
            404,
            f"Request for unknown model: 'scaled' version {version} is not found",
        )


def test_load_is_all_or_nothing(root: Path, mine: httpx.Client) -> None:
    good = repository.write(root, "scaled", scaled(2), version=2)
    assert load(mine, "scaled").status_code == 200
    good.write_bytes(b"no model")
    answer = load(mine, "scaled")
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("failed to load 'scaled': scaled/2/model.onnx: failed to load: ")
    assert data(infer(mine, "scaled", ONE)) == [2]
    assert data(infer(mine, "scaled/versions/1", ONE)) == [1]
    assert states(mine, "scaled") == ["READY", "READY"]


@both_ways
def test_index_lists_loadable_models_and_drops_removed_ones(root: Path, changing: Served, mine: httpx.Client) -> None:
    repository.write(root, "new", repository.IDENTITY)
    assert [entry for entry in index(mine) if entry["name"] == "new"] == [
        {"name": "new", "state": "UNAVAILABLE", "reason": "not loaded"}
    ]
    assert "new" not in {entry["name"] for entry in index(mine, '{"ready": true}')}
    assert infer(mine, "new", SMALL).status_code == 404
    assert load(mine, "new").status_code == 200
    shutil.rmtree(root / "new")
    assert states(mine, "new") == ["READY"], "it serves on"
    assert unload(mine, "new").status_code == 200
    assert states(mine, "new") == []
    assert load(mine, "new").status_code == 400
    assert states(mine, "new") == []


def test_index_hides_models_of_other_tenants(root: Path) -> None:
    limited = TenantConfig(name="acme", granules=1, models=("rows",))
    with serving(configuration(root, limited)) as served, client(served) as http:
        assert [entry["name"] for entry in index(http)] == ["rows"]


def test_served_models_survive_a_missing_repository(root: Path, changing: Served, mine: httpx.Client) -> None:
    shutil.rmtree(root)
    assert data(infer(mine, "identity", SMALL)) == [1, 2]
    answer = load(mine, "identity")
    assert (answer.status_code, answer.json()["error"]) == (400, "failed to load 'identity': not in the repository")
    assert data(infer(mine, "identity", SMALL)) == [1, 2]
