"""Functions of a model over a real socket: what clients see, send and get, and what a function can do wrong."""

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton

from greenlane.load.server_process import free_port
from server.config.schema import Config
from server.config.tenant import TenantConfig

from . import repository
from .harness import Served, configuration, cores, serving
from .processes import configure, running, running_device, tenant
from .wire import client, until

SUM = "sum (float[n, m] x) => (float[n, m] y) { y = Add(x, x) }"
LENGTHS = '''
"""Texts to their lengths, doubled by the model, and back to texts."""
import numpy as np

INPUTS = [{"name": "text", "datatype": "BYTES", "shape": [-1, -1]}]
OUTPUTS = [{"name": "said", "datatype": "BYTES", "shape": [-1, -1]}, {"name": "total", "datatype": "FP32", "shape": [-1, 1]}]


def preprocess(inputs):
    texts = inputs["text"]
    if (texts == b"").any():
        raise ValueError("text: empty; expected something to measure")
    return {"x": np.vectorize(len, otypes=[np.float32])(texts)}


def postprocess(outputs):
    y = outputs["y"]
    y += 0  # The array is the function's own.
    return {"said": np.array([[f"{v:g}" for v in row] for row in y], object), "total": y.sum(1, keepdims=True)}
'''
RAISES = "def preprocess(inputs):\n    return inputs['nothing']\n"
NO_SHAPE = "def postprocess(outputs):\n    return {'y': outputs['y'][0]}\n"
NO_INPUT = "def preprocess(inputs):\n    return {'x': inputs['x'][:, :, None]}\n"
SPINS = "def preprocess(inputs):\n    while inputs['x'][0, 0]:\n        pass\n    return inputs\n"
BROKEN = "import nothing_of_this_name\ndef preprocess(inputs):\n    return inputs\n"
MISSING = "ModuleNotFoundError: No module named 'nothing_of_this_name'"
MODULES = {
    "lengths": LENGTHS,
    "raises": RAISES,
    "no_shape": NO_SHAPE,
    "no_input": NO_INPUT,
    "spins": SPINS,
    "broken": BROKEN,
}


def fill(root: Path) -> Path:
    for name, text in MODULES.items():
        repository.write(root, name, SUM, config="max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 100 }")
        (root / name / "1" / "model.py").write_text(text)
    return root


def of(root: Path, tenant: TenantConfig, python: bool = True) -> Config:
    config = configuration(root, tenant)
    return config.model_copy(update={"models": config.models.model_copy(update={"python": python})})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = fill(tmp_path_factory.mktemp("functions"))
    with serving(of(root, TenantConfig(name="acme", granules=1, models=("*",), max_execution=0.3)), direct=True) as served:
        yield served


def ask(http: httpx.Client, model: str, rows: list[list[float]], **parameters: object) -> httpx.Response:
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(rows), len(rows[0])], "data": rows}
    return http.post(f"/v2/models/{model}/infer", json={"inputs": [tensor], "parameters": parameters})


def test_clients_see_the_tensors_of_the_functions(http: httpx.Client) -> None:
    found = http.get("/v2/models/lengths").json()
    assert found["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1, -1]}]
    assert [each["name"] for each in found["outputs"]] == ["said", "total"]
    config = http.get("/v2/models/lengths/config").json()
    assert (config["max_batch_size"], config["input"][0]["data_type"]) == (8, "TYPE_STRING")


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_texts_go_through_functions_and_model(served: Served, binary: bool) -> None:
    texts = np.array([[b"a", "\u00e4h".encode()], [b"four", b"sixsix"]], object)
    with triton.InferenceServerClient(served.address) as client:
        given = triton.InferInput("text", list(texts.shape), "BYTES")
        given.set_data_from_numpy(texts, binary_data=binary)
        wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("total", "said")]
        for _ in range(3):  # The second has its JSON cached.
            answer = client.infer("lengths", [given], outputs=wanted)
            assert answer.as_numpy("total").tolist() == [[8.0], [20.0]]
            said = answer.as_numpy("said").reshape(-1).tolist()
            assert [each.decode() if isinstance(each, bytes) else each for each in said] == ["2", "6", "8", "12"]


def test_value_error_is_the_clients_400(http: httpx.Client) -> None:
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 2], "data": ["a", ""]}]}
    answer = http.post("/v2/models/lengths/infer", json=body)
    assert (answer.status_code, answer.json()["error"]) == (400, "text: empty; expected something to measure")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("raises", "model 'raises': preprocess raised KeyError"),
        ("no_shape", "model 'no_shape': postprocess returned 'y' of shape [2]; expected FP32[-1, -1], as an array of float32"),
        (
            "no_input",
            "model 'no_input': preprocess returned 'x' of shape [1, 2, 1]; expected FP32[-1, -1], as an array of float32",
        ),
    ],
)
def test_a_function_that_fails_is_a_500_with_its_name(http: httpx.Client, model: str, text: str) -> None:
    for _ in range(2):
        answer = ask(http, model, [[1.0, 2.0]])
        assert answer.status_code == 500
        assert answer.json()["error"].startswith(f"{text} (request ")


def test_a_function_that_spins_meets_the_deadline_and_is_stopped(http: httpx.Client) -> None:
    answer = ask(http, "spins", [[1.0]], timeout=50_000)
    assert (answer.status_code, "50000 microseconds" in answer.json()["error"]) == (504, True)
    assert ask(http, "spins", [[0.0]]).status_code == 200  # It waited until the first one was stopped.
    answer = ask(http, "spins", [[1.0]])
    assert answer.status_code == 504
    assert "model 'spins': preprocess ran for 0.3 s and was stopped (tenants.acme.max_execution)" in answer.json()["error"]


def test_a_module_that_cannot_be_run_makes_its_model_unavailable(http: httpx.Client) -> None:
    index = {each["name"]: each for each in http.post("/v2/repository/index").json()}
    assert index["broken"]["state"] == "UNAVAILABLE"
    assert index["broken"]["reason"] == f"broken/1/model.py, line 1: {MISSING}"
    answer = http.post("/v2/repository/models/broken/load")
    assert (answer.status_code, answer.json()["error"]) == (
        400,
        f"failed to load 'broken': broken/1/model.py, line 1: {MISSING}",
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BROKEN, f", line 1: {MISSING}"),
        ("open('no-such-file')\n" + RAISES, ", line 1: FileNotFoundError: [Errno 2] No such file or directory: 'no-such-file'"),
        ("import os\nopen(os.path.dirname(__file__) + '/x')\n" + RAISES,
         ", line 2: FileNotFoundError: [Errno 2] No such file or directory: 'raises/1/x'"),
        (RAISES + "raise SystemExit\n", ", line 3: SystemExit"),
        (RAISES + "preprocess = 7\n", ": preprocess is int once the file has run; expected a function"),
        ("def preprocess(a, b):\n    return a\n",
         ": preprocess(a, b): missing a required argument: 'b'; expected one argument, arrays by name"),
        (RAISES + "break\n", ", line 3: SyntaxError: 'break' outside loop (model.py, line 3)"),
    ],
    ids=["import", "file", "path", "exit", "no_function", "arguments", "syntax"],
)  # fmt: skip
def test_a_load_with_a_module_that_cannot_be_run_is_refused_and_changes_nothing(
    served: Served, http: httpx.Client, text: str, reason: str
) -> None:
    path = Path(served.application.service().config.models.repository) / "raises" / "1" / "model.py"
    path.write_text("def preprocess(inputs):\n    return {'x': inputs['x'] * 10}\n")
    assert http.post("/v2/repository/models/raises/load").status_code == 200
    try:
        path.write_text(text)
        answer = http.post("/v2/repository/models/raises/load")
        assert (answer.status_code, answer.json()["error"]) == (400, f"failed to load 'raises': raises/1/model.py{reason}")
        assert ask(http, "raises", [[1.0]]).json()["outputs"][0]["data"] == [20.0]
        assert {"name": "raises", "version": "1", "state": "READY"} in http.post("/v2/repository/index").json()
    finally:
        path.write_text(RAISES)
        assert http.post("/v2/repository/models/raises/load").status_code == 200


def test_a_model_is_reloaded_with_its_functions(served: Served, http: httpx.Client, tmp_path: Path) -> None:
    root = served.application.service().config.models.repository
    path = Path(root) / "raises" / "1" / "model.py"
    path.write_text("def preprocess(inputs):\n    return {'x': inputs['x'] * 10}\n")
    try:
        assert http.post("/v2/repository/models/raises/load").status_code == 200
        assert ask(http, "raises", [[1.0]]).json()["outputs"][0]["data"] == [20.0]
    finally:
        path.write_text(RAISES)
        assert http.post("/v2/repository/models/raises/load").status_code == 200


def test_code_is_not_run_unless_the_operator_says_so(tmp_path: Path) -> None:
    root = fill(tmp_path)
    with serving(of(root, TenantConfig(name="acme", granules=1, models=("raises",)), python=False)) as served:
        (entry,) = httpx.post(f"{served.url}/v2/repository/index").json()
    assert entry["state"] == "UNAVAILABLE"
    assert "models.python" in entry["reason"]


WHERE = """
import os
import numpy as np
OUTPUTS = [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}, {"name": "pid", "datatype": "INT64", "shape": [-1, 1]}]

def preprocess(inputs):
    return {"x": inputs["x"] + 1}

def postprocess(outputs):
    return {"y": outputs["y"], "pid": np.full((len(outputs["y"]), 1), os.getpid())}
"""


@pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")
def test_functions_run_in_the_tenants_own_processes_over_http_and_grpc(tmp_path: Path) -> None:
    root, port = tmp_path / "models", free_port()
    repository.write(root, "where", "where (float[n, 2] x) => (float[n, 2] y) { y = Add(x, x) }", config="max_batch_size: 8")
    (root / "where" / "model.py").write_text(WHERE)
    tenants = tenant(grpc_port=port, http_processes=2) + tenant("globex")
    path = configure(tmp_path / "greenlane.toml", root, f"python = true\n{tenants}")

    def ask(name: str, value: float) -> int:
        """Twice the value and one more, and the process that says so. A connection of its own."""
        with triton.InferenceServerClient(server.address) as http:
            tensor = triton.InferInput("x", [2, 2], "FP32")
            tensor.set_data_from_numpy(np.full((2, 2), value, np.float32))
            for _ in range(3):
                answer = http.infer("where", [tensor], headers={"X-Tenant": name})
                assert answer.as_numpy("y").tolist() == [[2 * value + 2] * 2] * 2
            return int(answer.as_numpy("pid")[0, 0])

    with running_device(path) as server:
        with ThreadPoolExecutor(8) as pool:  # So that requests of both processes share batches.
            found = set(pool.map(partial(ask, "acme"), range(24)))
        assert (len(found), server.pid("acme") in found) == (2, True)
        assert ask("globex", 3) == server.pid("globex")
        with closing(triton_grpc.InferenceServerClient(f"127.0.0.1:{port}")) as grpc:
            tensor = triton_grpc.InferInput("x", [1, 2], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 2), np.float32))
            answer = grpc.infer("where", [tensor], headers={"x-tenant": "acme"})
            assert (answer.as_numpy("y").tolist(), answer.as_numpy("pid").tolist()) == ([[4, 4]], [[server.pid("acme")]])


FORMS = {"cores": running, "device": running_device}
TENANTS = {"cores": tenant(), "device": tenant(http_processes=2)}


@pytest.mark.parametrize("form", FORMS)
def test_a_module_that_cannot_be_run_leaves_what_is_served_in_every_form(tmp_path: Path, form: str) -> None:
    root = tmp_path / "models"
    repository.write(root, "ten", "ten (float[n, 2] x) => (float[n, 2] y) { y = Add(x, x) }", config="max_batch_size: 8")
    module = root / "ten" / "model.py"
    module.write_text("def preprocess(inputs):\n    return {'x': inputs['x'] * 5}\n")
    settings = f'python = true\nwatch = "100ms"\n{TENANTS[form]}'
    path = configure(tmp_path / "greenlane.toml", root, settings, default_tenant='"acme"')

    def answers() -> set[float]:
        """Of a few connections, as one of a tenant with two processes may be at either."""
        found = set()
        for _ in range(6):
            with client(server) as http:
                found.add(ask(http, "ten", [[1.0, 1.0]]).json()["outputs"][0]["data"][0])
        return found

    def entry() -> dict[str, str]:
        return httpx.post(f"{server.url}/v2/repository/index").json()[0]

    with FORMS[form](path) as server:
        until(lambda: httpx.get(f"{server.url}/v2/models/ten/ready").status_code == 200)
        module.write_text("import nothing_of_this_name\n" + module.read_text())
        until(lambda: entry().get("reason", "").endswith(f"ten/model.py, line 1: {MISSING}"))
        assert (entry()["state"], entry()["version"]) == ("READY", "1")
        answer = httpx.post(f"{server.url}/v2/repository/models/ten/load", timeout=20)
        assert (answer.status_code, answer.json()["error"].endswith(f"ten/model.py, line 1: {MISSING}")) == (400, True)
        assert answers() == {10.0}
        module.write_text("def preprocess(inputs):\n    return {'x': inputs['x'] * 50}\n")
        until(lambda: answers() == {100.0})
        assert entry() == {"name": "ten", "version": "1", "state": "READY"}


FORKS = """
import os, signal, subprocess, sys
import numpy as np
OUTPUTS = [{"name": "pid", "datatype": "INT64", "shape": [-1, 4]}]

def sleep():
    signal.pause()

def twice(report):
    if not os.fork():
        os.setsid()
        os.write(report, str(os.getpid()).encode())
        sleep()

def left():
    \"\"\"A fork, a program of its own session, and a fork of a fork that has ended.\"\"\"
    if not (fork := os.fork()):
        sleep()
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, env={})
    report, written = os.pipe()
    if not (between := os.fork()):
        twice(written)
        os._exit(0)
    os.waitpid(between, 0)
    return [fork, program.pid, int(os.read(report, 99))]

def postprocess(outputs):
    return {"pid": np.array([[os.getpid(), *left()]])}
"""


@pytest.mark.parametrize("end", ["SIGKILL of the process", "SIGTERM", "SIGKILL of the server"])
def test_what_a_function_forks_ends_with_its_process_and_holds_no_port(tmp_path: Path, end: str) -> None:
    root, own, grpc = tmp_path / "models", free_port(), free_port()
    repository.write(root, "forks", SUM.replace("n, m", "n, 1"), config="max_batch_size: 8")
    (root / "forks" / "model.py").write_text(FORKS)
    tenants = f"python = true\n{tenant(port=own, grpc_port=grpc)}"
    path = configure(tmp_path / "greenlane.toml", root, tenants, default_tenant='"acme"')

    def leave() -> list[int]:
        """The numbers of the processes that a request has left."""
        with httpx.Client(timeout=20) as http:
            body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
            asked = server.pid("acme")  # Now, as its forks have the same name, and their numbers may be lower.
            answer = http.post(f"http://127.0.0.1:{own}/v2/models/forks/infer", json=body)
            assert answer.status_code == 200, answer.text
            tenant, *found = answer.json()["outputs"][0]["data"]
            assert (tenant, len(found)) == (asked, 3)
            return found

    def gone(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    with running(path) as server:
        until(lambda: httpx.get(f"{server.url}/v2/models/forks/ready").status_code == 200)
        with socket.create_connection(("127.0.0.1", own), 20) as kept:
            kept.sendall(b"GET /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
            assert kept.recv(1 << 16)
            left = leave()
            kept.sendall(b"GET /v2 HTTP/1.0\r\n\r\n")
            while kept.recv(1 << 16):  # Until its end, which no fork keeps from this client.
                pass
        if end == "SIGKILL of the process":
            before = server.pid("acme")
            os.kill(before, signal.SIGKILL)
            until(lambda: all(map(gone, left)))
            until(lambda: server.pid("acme") != before)
            until(lambda: httpx.get(f"{server.url}/v2/models/forks/ready").status_code == 200)
            left = leave()
        if end == "SIGKILL of the server":
            server.popen.kill()
        else:
            server.signal()
            assert server.wait() == 0
        until(lambda: all(map(gone, left)))
    for port in (own, grpc):
        until(lambda port=port: can_listen(port))


def can_listen(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            tried.bind(("127.0.0.1", port))
            tried.listen()
            return True
    return False
