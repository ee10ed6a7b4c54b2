"""gRPC beside HTTP, through Triton's own clients: the same outputs and the same texts, from processes and from one process."""

import json
import queue
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from greenlane.load.server_process import free_port
from server.tenants.auth import digest

from .harness import cores
from .processes import Running, configure, running, running_device, running_plain, tenant, threads
from .wire import FOREVER, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

KEY = {"authorization": "Bearer secret"}
X = np.array([[1, 2.5]], np.float32)
BIG = np.arange(12 << 20, dtype=np.float32).reshape(1, -1)
Tensors = dict[str, np.ndarray[Any, Any]]


class Asked:
    """A server, its gRPC ports, and one client of each kind for tenant acme."""

    def __init__(self, server: Running, acme: int, globex: int, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.acme = f"127.0.0.1:{acme}"
        self.globex = f"127.0.0.1:{globex}"
        self.grpc = triton.InferenceServerClient(self.acme)
        self.http = triton_http.InferenceServerClient(server.address)
        until(lambda: self.ready(self.grpc))

    def close(self) -> None:
        self.grpc.close()
        self.http.close()

    @staticmethod
    def ready(client: triton.InferenceServerClient) -> bool:
        try:
            return bool(client.is_server_ready())
        except InferenceServerException:
            return False


@contextmanager
def serving(how: Any, repository: Path, folder: Path) -> Iterator[Asked]:
    """Serve both tenants in one of the ways of `processes`."""
    acme, globex = free_port(), free_port()
    tenants = tenant(queue=2, grpc_port=acme) + tenant("globex", "identity", keys_sha256=[digest("secret")], grpc_port=globex)
    config = configure(folder / "c.toml", repository, tenants, default_tenant='"acme"', audit='"audit.jsonl"')
    with how(config) as server, closing(Asked(server, acme, globex, folder)) as asked:
        yield asked


def inputs(kind: Any, tensors: Tensors, datatype: str = "") -> list[Any]:
    """The inputs of a request for the client in module `kind`."""
    made = []
    for name, value in tensors.items():
        each = kind.InferInput(name, list(value.shape), datatype or np_to_triton_dtype(value.dtype))
        made.append(each.set_data_from_numpy(value) if not datatype else each)
    return made


def outcome(kind: Any, client: Any, model: str, tensors: Tensors, outputs: tuple[str, ...], **options: Any) -> Any:
    """The outputs of an inference, or the text of its refusal."""
    try:
        requested = [kind.InferRequestedOutput(name) for name in outputs] or None
        result = client.infer(model, inputs(kind, tensors), outputs=requested, **options)
    except InferenceServerException as error:
        return error.message()
    answer = result.get_response()
    found = answer["outputs"] if isinstance(answer, dict) else answer.outputs
    names = [each["name"] if isinstance(each, dict) else each.name for each in found]
    return {name: (value.dtype, value.shape, value.tolist()) for name in names if (value := result.as_numpy(name)) is not None}


def same(asked: Asked, model: str, tensors: Tensors, *outputs: str, **options: Any) -> Any:
    """What both HTTP and gRPC answer."""
    over_grpc = outcome(triton, asked.grpc, model, tensors, outputs, **options)
    assert over_grpc == outcome(triton_http, asked.http, model, tensors, outputs, **options)
    return over_grpc


@pytest.fixture(scope="module", params=[running, running_device, running_plain], ids=["processes", "device", "plain"])
def asked(standard: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Asked]:
    with serving(request.param, standard, tmp_path_factory.mktemp("grpc")) as asked:
        yield asked


@pytest.mark.parametrize(
    ("model", "tensors"),
    [
        ("identity", {"x": X}),
        ("identity", {"x": np.zeros((0, 3), np.float32)}),
        ("identity", {"x": np.array([[np.nan, np.inf]], np.float32)}),
        ("add", {"a": np.array([1, -2], np.int32), "b": np.array([3, 4], np.int32)}),
        ("text", {"words": np.array([b"a", b"", "é".encode(), b"\xff\0"], object)}),
        ("rows", {"x": np.arange(12, dtype=np.float32).reshape(4, 3)}),
        ("half", {"x": np.array([1, 2.5], np.float16)}),
        ("pick", {"x": np.arange(4, dtype=np.float32), "at": np.array([2], np.int64)}),
    ],
    ids=str,
)
def test_outputs_are_those_of_http(asked: Asked, model: str, tensors: Tensors) -> None:
    over_grpc = outcome(triton, asked.grpc, model, tensors, ())
    over_http = outcome(triton_http, asked.http, model, tensors, ())
    assert isinstance(over_grpc, dict)
    assert repr(over_grpc) == repr(over_http)  # NaN is equal to nothing.


@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2), elements=st.floats(-9, 9, width=32)))
def test_any_tensor_comes_back(asked: Asked, x: np.ndarray[Any, Any]) -> None:
    assert same(asked, "identity", {"x": x}) == {"y": (np.dtype(np.float32), x.shape, x.tolist())}


def test_requested_outputs_come_in_their_order(asked: Asked) -> None:
    tensors = {"a": np.array([1], np.int32), "b": np.array([2], np.int32)}
    assert list(same(asked, "add", tensors, "difference", "sum")) == ["difference", "sum"]
    assert list(same(asked, "add", tensors, "sum")) == ["sum"]


@pytest.mark.parametrize("version", ["", "1", "2", "10"])
def test_versions_are_those_of_http(asked: Asked, version: str) -> None:
    answer = same(asked, "scaled", {"x": np.array([1], np.float32)}, model_version=version)
    assert answer["y"][2] == [10.0 * int(version or 10)]


@pytest.mark.parametrize(
    ("model", "tensors", "options"),
    [
        ("absent", {"x": X}, {}),
        ("identity", {"z": X}, {}),
        ("identity", {"x": X.astype(np.float64)}, {}),
        ("identity", {"x": X[0]}, {}),
        ("add", {"a": np.array([1], np.int32)}, {}),
        ("add", {"a": np.array([1, 2], np.int32), "b": np.array([1, 2, 3], np.int32)}, {}),
        ("rows", {"x": np.zeros((5, 3), np.float32)}, {}),
        ("scaled", {"x": X[0]}, {"model_version": "3"}),
        ("pick", {"x": np.zeros(4, np.float32)}, {}),
        ("identity", {"x": X}, {"sequence_id": 7}),
    ],
    ids=str,
)
def test_refusals_have_the_texts_of_http(asked: Asked, model: str, tensors: Tensors, options: dict[str, Any]) -> None:
    assert isinstance(same(asked, model, tensors, **options), str)


def test_what_the_model_raises_is_internal_and_has_a_request_id(asked: Asked) -> None:
    tensors = {"x": np.zeros(4, np.float32), "at": np.array([9], np.int64)}
    with pytest.raises(InferenceServerException, match=r"the model raised: .*\(request [0-9a-f]{32}\)") as refusal:
        asked.grpc.infer("pick", inputs(triton, tensors))
    assert refusal.value.status() == "StatusCode.INTERNAL"


def test_a_large_message_is_served_and_one_over_max_body_refused(asked: Asked) -> None:
    result = asked.grpc.infer("identity", inputs(triton, {"x": BIG}))
    assert result.as_numpy("y").tobytes() == BIG.tobytes()
    with pytest.raises(InferenceServerException, match=r"vs\. 67108864"):
        asked.grpc.infer("identity", inputs(triton, {"x": np.zeros((1, 17 << 20), np.float32)}))


def test_metadata_and_statistics_are_those_of_http(asked: Asked) -> None:
    for model in ("identity", "add", "text", "rows"):
        ours, theirs = asked.grpc.get_model_metadata(model, as_json=True), asked.http.get_model_metadata(model)
        for tensor in (*ours["inputs"], *ours["outputs"]):
            tensor["shape"] = [int(size) for size in tensor["shape"]]  # Protobuf's JSON has them as texts.
        assert ours == theirs
        config = asked.grpc.get_model_config(model).config
        assert (config.name, config.max_batch_size) == (model, 4 if model == "rows" else 0)
        assert asked.grpc.is_model_ready(model)
    counted = asked.grpc.get_inference_statistics("identity").model_stats[0].inference_stats.success.count
    same(asked, "identity", {"x": X})
    assert asked.grpc.get_inference_statistics("identity").model_stats[0].inference_stats.success.count == counted + 2
    assert len(asked.grpc.get_inference_statistics().model_stats) == len(asked.http.get_inference_statistics()["model_stats"])
    index = asked.grpc.get_model_repository_index(as_json=True)["models"]
    assert index == asked.http.get_model_repository_index()
    assert asked.grpc.get_server_metadata(as_json=True) == asked.http.get_server_metadata()


def test_models_are_loaded_and_unloaded_as_over_http(asked: Asked) -> None:
    asked.grpc.load_model("rows", config='{"max_batch_size": 2}')
    assert asked.http.get_model_config("rows")["max_batch_size"] == 2
    asked.grpc.load_model("rows")
    assert asked.grpc.get_model_config("rows").config.max_batch_size == 4
    asked.grpc.unload_model("half")
    assert not asked.grpc.is_model_ready("half")
    states = {each["name"]: each["state"] for each in asked.grpc.get_model_repository_index(as_json=True)["models"]}
    assert (states["half"], states["rows"]) == ("UNAVAILABLE", "READY")
    asked.grpc.load_model("half")
    assert asked.grpc.is_model_ready("half")


@pytest.mark.parametrize(
    "options",
    [
        {"model_name": "absent"},
        {"model_name": "rows", "config": "{"},
        {"model_name": "rows", "config": '{"max_batch": 4}'},
        {"model_name": "rows", "config": '{"max_batch_size": 8, "input": [{"name": "z"}]}'},
        {"model_name": "rows", "config": "{}", "files": {"file:1/model.onnx": b"\xff"}},
        {"model_name": "rows", "headers": {"x-forwarded-for": "10.0.0.1"}},
    ],
    ids=str,
)
def test_loads_are_refused_with_the_texts_of_http(asked: Asked, options: dict[str, Any]) -> None:
    texts = []
    for client in (asked.grpc, asked.http):
        with pytest.raises(InferenceServerException) as refusal:
            client.load_model(**options)
        texts.append(refusal.value.message())
    assert texts[0] == texts[1]


def test_loads_are_in_the_audit_as_those_over_http(asked: Asked) -> None:
    def lines() -> list[dict[str, Any]]:
        found = map(json.loads, (asked.folder / "audit.jsonl").read_text().splitlines())
        names = ("method", "path", "client", "status")
        return [{name: each[name] for name in names} for each in found if each["message"] == "call"]

    for client in (asked.http, asked.grpc):
        client.load_model("identity")
        with pytest.raises(InferenceServerException):
            client.load_model("absent")
    call = {"method": "POST", "client": "127.0.0.1"}
    path = "/v2/repository/models/{}/load".format
    made = [{**call, "path": path("identity"), "status": 200}, {**call, "path": path("absent"), "status": 400}]
    assert lines()[-4:] == [*made, *made]


def test_log_and_trace_settings_are_those_of_http(asked: Asked) -> None:
    settings = asked.grpc.get_log_settings(as_json=True)["settings"]
    assert {name: next(iter(value.values())) for name, value in settings.items()} == asked.http.get_log_settings()
    changed = asked.grpc.update_log_settings({"log_verbose_level": 1}).settings
    assert changed["log_verbose_level"].uint32_param == asked.http.get_log_settings()["log_verbose_level"] == 1
    asked.grpc.update_log_settings({"log_verbose_level": 0})
    with pytest.raises(InferenceServerException, match="the log goes to standard error") as refusal:
        asked.grpc.update_log_settings({"log_file": "/dev/null"})
    assert refusal.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(InferenceServerException, match="through a proxy") as refusal:
        asked.grpc.update_log_settings({"log_info": True}, headers={"via": "1.1 proxy"})
    assert refusal.value.status() == "StatusCode.UNAUTHENTICATED"
    for model in (None, "identity"):
        traces = {name: list(each.value) for name, each in asked.grpc.get_trace_settings(model).settings.items()}
        over_http = asked.http.get_trace_settings(model)
        assert traces == {name: value if isinstance(value, list) else [value] for name, value in over_http.items()}


def test_a_port_serves_its_own_tenant_alone(asked: Asked) -> None:
    with closing(triton.InferenceServerClient(asked.globex)) as globex:
        assert globex.infer("identity", inputs(triton, {"x": X}), headers=KEY).as_numpy("y").tolist() == X.tolist()
        with pytest.raises(InferenceServerException, match="unknown model: 'add'") as refusal:
            globex.get_model_metadata("add", headers=KEY)
        assert refusal.value.status() == "StatusCode.NOT_FOUND"
        globex.load_model("identity", headers=KEY)
        with pytest.raises(InferenceServerException, match="unknown model: 'add'"):
            globex.load_model("add", headers=KEY)
        with pytest.raises(InferenceServerException, match="this port belongs to tenant 'globex'; send requests of 'acme' on"):
            globex.load_model("identity")
        with pytest.raises(InferenceServerException, match="this port belongs to tenant 'globex'; send requests of 'acme' on"):
            globex.infer("identity", inputs(triton, {"x": X}))
    with pytest.raises(InferenceServerException, match="send requests of 'globex' on") as refusal:
        asked.grpc.infer("identity", inputs(triton, {"x": X}), headers=KEY)
    assert refusal.value.status() == "StatusCode.PERMISSION_DENIED"


def test_streams_of_the_sync_client_are_answered(asked: Asked) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with closing(triton.InferenceServerClient(asked.acme)) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for index in range(3):
            client.async_stream_infer("identity", inputs(triton, {"x": X + index}), request_id=str(index))
        for index in range(3):
            result, error = answers.get(timeout=30)
            assert error is None
            assert (result.get_response().id, result.as_numpy("y").tolist()) == (str(index), (X + index).tolist())
        client.stop_stream()


async def test_the_aio_client_is_served(asked: Asked) -> None:
    async with triton_aio.InferenceServerClient(asked.acme) as client:
        result = await client.infer("identity", inputs(triton_aio, {"x": X}), timeout=10_000_000, priority=1)
        assert result.as_numpy("y").tolist() == X.tolist()


def forever() -> list[Any]:
    return inputs(triton, {"turns": np.array(FOREVER), "x": np.full((64, 64), 0.1, np.float32)})


def test_a_flood_is_refused_and_a_cancelled_call_stops_its_inference(asked: Asked) -> None:
    ends: queue.Queue[Any] = queue.Queue()
    calls = [asked.grpc.async_infer("spin", forever(), lambda result, error: ends.put(error)) for _ in range(9)]
    refused = [ends.get(timeout=30) for _ in range(9 - 4)]  # At most two run or are handed over, and two wait.
    assert {error.status() for error in refused} == {"StatusCode.RESOURCE_EXHAUSTED"}
    assert all("tenants.acme.queue" in error.message() for error in refused)
    for call in calls:
        call.cancel()
    assert asked.grpc.infer("identity", inputs(triton, {"x": X}), client_timeout=30).as_numpy("y").tolist() == X.tolist()


def test_a_deadline_ends_the_call_and_its_inference(asked: Asked) -> None:
    for options in ({"client_timeout": 0.3}, {"timeout": 300_000}):
        with pytest.raises(InferenceServerException) as refusal:
            asked.grpc.infer("spin", forever(), **options)
        assert refusal.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    assert asked.grpc.infer("identity", inputs(triton, {"x": X}), client_timeout=30).as_numpy("y").tolist() == X.tolist()


@pytest.fixture(scope="module")
def mine(standard: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """A server of processes, one of which is killed."""
    with serving(running, standard, tmp_path_factory.mktemp("mine")) as asked:
        yield asked


def test_a_killed_process_is_replaced_on_the_same_port_and_the_other_tenant_notices_nothing(mine: Asked) -> None:
    with closing(triton.InferenceServerClient(mine.globex)) as globex:
        assert globex.infer("identity", inputs(triton, {"x": X}), headers=KEY)
        mine.server.kill("acme")
        for _ in range(20):
            assert globex.infer("identity", inputs(triton, {"x": X}), headers=KEY)

        def served_again() -> bool:
            return isinstance(outcome(triton, mine.grpc, "identity", {"x": X}, ()), dict)

        until(served_again)


def test_every_thread_of_a_tenants_process_is_on_the_tenants_cores(mine: Asked) -> None:
    held = {name: threads(mine.server.pid(name)) for name in ("acme", "globex")}
    assert all(len(cores) == 1 for cores in held.values())
    assert held["acme"] != held["globex"]


def test_a_server_with_an_open_stream_ends_with_status_0_at_once(standard: Path, tmp_path: Path) -> None:
    with serving(running, standard, tmp_path) as mine:
        answers: queue.Queue[Any] = queue.Queue()
        mine.grpc.start_stream(lambda result, error: answers.put((result, error)))
        mine.grpc.async_stream_infer("identity", inputs(triton, {"x": X}))
        assert answers.get(timeout=30)[1] is None
        mine.server.signal(signal.SIGTERM)
        assert mine.server.wait() == 0
        _, error = answers.get(timeout=30)
        assert error.status() == "StatusCode.UNAVAILABLE"
