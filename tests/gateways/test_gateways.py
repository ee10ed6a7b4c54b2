"""Two tenants behind a gateway that shares its connections to the server: each request is answered as on one of its own."""

import http.client
import json
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from greenlane.load.server_process import free_port
from tests.end_to_end import repository
from tests.end_to_end.harness import PATIENCE, cores
from tests.end_to_end.processes import Running, configure, running, tenant
from tests.end_to_end.wire import SMALL, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

CLIENTS, REQUESTS = 8, 60
TENANTS = tenant() + tenant("globex")
HAPROXY = """
defaults
    mode http
    option forwardfor
    http-reuse {reuse}
    timeout connect 30s
    timeout client 30s
    timeout server 30s
frontend front
    bind 127.0.0.1:{port}
    default_backend back
backend back
    server one {upstream}
"""
NGINX = """
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream server {{ server {upstream}; keepalive 16; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://server;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_request_buffering {buffering};
        }}
    }}
}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("gateways")
    with running(configure(folder / "c.toml", repository.standard(folder / "models"), TENANTS)) as server:
        yield server


def program(name: str) -> str:
    """The path of a program; the test is skipped without it, which in CI is an error."""
    if found := shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin"):
        return found
    if "CI" not in os.environ:
        pytest.skip(f"needs {name}")
    raise AssertionError(f"there is no {name}; scripts/install installs it")


@contextmanager
def started(port: int, *words: object) -> Iterator[int]:
    """A gateway, from when it listens."""
    with subprocess.Popen([str(word) for word in words]) as gateway:
        try:
            until(lambda: listens(port) or gateway.poll() is not None)
            assert gateway.poll() is None
            yield port
        finally:
            gateway.terminate()


def listens(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def haproxy(folder: Path, upstream: str, reuse: str) -> Iterator[int]:
    port, file = free_port(), folder / "haproxy.cfg"
    file.write_text(HAPROXY.format(reuse=reuse, port=port, upstream=upstream))
    with started(port, program("haproxy"), "-db", "-f", file) as found:
        yield found


@contextmanager
def nginx(folder: Path, upstream: str, buffering: str) -> Iterator[int]:
    port, file = free_port(), folder / "nginx.conf"
    file.write_text(NGINX.format(folder=folder, buffering=buffering, port=port, upstream=upstream))
    with started(port, program("nginx"), "-p", folder, "-c", file, "-e", folder / "error.log") as found:
        yield found


GATEWAYS = {
    "haproxy": (haproxy, "safe"),
    "haproxy, always": (haproxy, "always"),
    "nginx": (nginx, "on"),
    "nginx, unbuffered": (nginx, "off"),
}


def ask(connection: http.client.HTTPConnection, kind: str, tenant: str, number: int) -> tuple[int, bytes, bool]:
    """The status and body of the answer to a request of this kind, and whether that is right."""
    headers = {"X-Tenant": tenant, "X-Forwarded-For": "192.0.2.1"}
    path, asked = "/v2/models/identity/infer", SMALL["inputs"][0]
    body = json.dumps({"inputs": [{**asked, "data": [number, 1]}]}).encode()
    method, expected, right = "POST", 200, f'"data":[{number}.0,1.0]'.encode()
    if kind in ("generate", "generate_stream"):
        path, body, right = f"/v2/models/identity/{kind}", json.dumps({"x": [number, 1]}).encode(), b"%d.0,1.0" % number
    elif kind == "metadata":
        method, path, body, right = "GET", "/v2/models/identity", b"", b'"name":"identity"'
    elif kind == "wrong method":
        method, path, expected, right = "PUT", "/v2/models/identity", 405, b"error"
    elif kind == "health":
        method, path, body, right = "GET", "/v2/health/ready", b"", b""
    connection.putrequest(method, path)
    for name, value in headers.items():
        connection.putheader(name, value)
    if kind == "repeated":
        for name, value in (("X-Forwarded-For", "192.0.2.2"), ("Accept", "a/b"), ("Accept", "*/*"), ("Via", "a"), ("Via", "b")):
            connection.putheader(name, value)
    if kind == "expect":
        connection.putheader("Expect", "100-continue")
    if kind == "chunked":
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders(iter([body[:9], body[9:]]), encode_chunked=True)
    else:
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
    answer = connection.getresponse()
    data = answer.read()
    return answer.status, data, answer.status == expected and right in data


KINDS = (
    *("length", "length", "chunked", "expect", "repeated"),
    *("generate", "generate_stream", "metadata", "wrong method", "health"),
)


@pytest.mark.parametrize("name", GATEWAYS)
def test_tenants_that_share_a_gateways_connections_get_the_right_answers(server: Running, name: str, tmp_path: Path) -> None:
    gateway, option = GATEWAYS[name]

    def work(port: int, client: int) -> list[object]:
        chosen, wrong = random.Random(client), list[object]()
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
            before = ""
            for number in range(REQUESTS):
                kind, tenant = chosen.choice(KINDS), chosen.choice(("acme", "globex"))
                try:
                    status, data, right = ask(connection, kind, tenant, client * REQUESTS + number)
                except http.client.RemoteDisconnected:
                    # Without buffering nginx closes a client's connection where an answer came before it had read the whole
                    # request, and a refused method is answered at once.
                    if (name, before) != ("nginx, unbuffered", "wrong method"):
                        raise
                    connection.close()
                    status, data, right = ask(connection, kind, tenant, client * REQUESTS + number)
                before = kind
                if not right:
                    wrong.append((kind, tenant, status, data))
        return wrong

    with gateway(tmp_path, server.url.removeprefix("http://"), option) as port, ThreadPoolExecutor(CLIENTS) as pool:
        assert [each for wrong in pool.map(lambda client: work(port, client), range(CLIENTS)) for each in wrong] == []


def test_tenants_that_share_the_connections_of_gos_pool_get_the_right_answers(server: Running, tmp_path: Path) -> None:
    built = tmp_path / "pool"
    words = [program("go"), "build", "-o", built, Path(__file__).with_name("pool.go")]
    subprocess.run(words, check=True, env={**os.environ, "GOCACHE": str(tmp_path / "cache"), "GO111MODULE": "off"})
    done = subprocess.run([built, server.url.removeprefix("http://"), "1000"], capture_output=True, text=True, check=True)
    assert done.stdout == "1000 right\n"
