"""nginx with deploy/nginx.conf in front of a server: TLS, tenants by host, large bodies, and what it keeps to itself."""

import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from greenlane.load.server_process import free_port
from tests.end_to_end import repository
from tests.end_to_end.processes import configure, running, tenant
from tests.end_to_end.wire import binary, request, tensor, until

FILE = Path(__file__).parents[2] / "deploy" / "nginx.conf"
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")

pytestmark = pytest.mark.skipif(NGINX is None and "CI" not in os.environ, reason="needs nginx; in CI it is an error")


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an nginx, in front of a server with two tenants of one name each; globex has only `identity`."""
    folder = tmp_path_factory.mktemp("nginx")
    config = configure(folder / "c.toml", repository.standard(folder / "models"), tenant())
    with running(config) as server, _nginx(folder, server.url.removeprefix("http://")) as address:
        yield address


@contextmanager
def _nginx(folder: Path, upstream: str) -> Iterator[str]:
    assert NGINX, "there is no nginx; apt-get install nginx-light"
    names = ["-subj", "/CN=models.test", "-addext", "subjectAltName=DNS:models.test,DNS:*.models.test"]
    key = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subprocess.run(
        [*key, *names, "-keyout", folder / "models.key", "-out", folder / "models.crt"], check=True, capture_output=True
    )
    port = free_port()
    text = FILE.read_text().replace("server 127.0.0.1:8000;", f"server {upstream};").replace("/etc/nginx/tls", str(folder))
    site = re.sub(r"listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;", text)
    places = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    logs = f"access_log off;\nerror_log {folder}/error.log;\n"
    main = f"daemon off;\npid {folder}/pid;\nworker_processes 1;\nevents {{}}\nhttp {{\n{places}{logs}{site}}}\n"
    (folder / "nginx.conf").write_text(f"error_log {folder}/error.log;\n{main}")
    with subprocess.Popen([NGINX, "-p", folder, "-c", folder / "nginx.conf", "-e", folder / "error.log"]) as nginx:
        try:
            until(lambda: _listens(port) or nginx.poll() is not None)
            assert nginx.poll() is None, (folder / "error.log").read_text()
            yield f"127.0.0.1:{port}"
        finally:
            nginx.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def client(proxy: str) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=f"https://{proxy}", verify=_trusting(), headers={"Host": "acme.models.test"}, timeout=30
    ) as http:
        yield http


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


ONE = request(tensor("x", "FP32", [1, 2], [1, 2.5]))


def test_a_tenant_is_known_by_the_name_of_the_host(client: httpx.Client) -> None:
    answer = client.post("/v2/models/identity/infer", json=ONE)
    assert answer.json()["outputs"][0]["data"] == [1, 2.5]
    assert client.post("/v2/models/identity/infer", json=ONE, headers={"X-Tenant": "globex"}).status_code == 200, "replaced"
    other = client.post("/v2/models/identity/infer", json=ONE, headers={"Host": "globex.models.test"})
    assert (other.status_code, "globex" in other.text) == (401, True)
    without = client.post("/v2/models/identity/infer", json=ONE, headers={"Host": "models.test", "X-Tenant": "globex"})
    assert without.status_code == 200, "what the client says of its tenant is not passed on: it is the only one's request"


def test_a_large_binary_tensor_goes_through(client: httpx.Client) -> None:
    numbers = np.arange(2_000_000, dtype=np.float32)
    answer = client.post("/v2/models/identity/infer", **_in_binary(numbers))
    length = int(answer.headers["Inference-Header-Content-Length"])
    assert answer.content[length:] == numbers.tobytes()


def _in_binary(numbers: "np.ndarray[Any, Any]") -> dict[str, Any]:
    one = tensor("x", "FP32", [1, len(numbers)], binary_data_size=numbers.nbytes)
    return binary(request(one, parameters={"binary_data_output": True}), numbers.tobytes())


def test_a_body_that_is_too_large_is_refused_before_it_comes(proxy: str) -> None:
    host, port = proxy.split(":")
    with socket.create_connection((host, int(port))) as plain, _trusting().wrap_socket(plain) as one:
        one.sendall(b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: acme.models.test\r\nContent-Length: 70000000\r\n\r\n")
        assert one.recv(64).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/health/ready", 200),
        ("GET", "/v2", 200),
        ("GET", "/metrics", 404),
        ("PUT", "/admin/partitions", 404),
        ("GET", "/", 404),
        ("POST", "/v2/repository/models/identity/unload", 403),
        ("POST", "/v2//repository/%6dodels/identity/unload", 403),
        ("POST", "/v2/repository/index", 200),
    ],
)
def test_only_what_tenants_may_do_is_passed_on(client: httpx.Client, method: str, path: str, status: int) -> None:
    assert client.request(method, path).status_code == status
