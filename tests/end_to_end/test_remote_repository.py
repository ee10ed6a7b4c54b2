"""A repository in a bucket: copied before it is served, followed while it is, and served on without the bucket.

The buckets are of moto's server, which speaks S3's protocol over HTTP, and of gcp-storage-emulator, which speaks Google Cloud
Storage's; s3fs and gcsfs read from them, in a process of its own. So does HfFileSystem from a server of ours (`hub`).
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import boto3
import gcp_storage_emulator.server
import httpx
import pytest
from moto.server import ThreadedMotoServer

from server.config.file import load
from server.config.schema import ModelsConfig
from server.config.tables import ConfigError
from server.repository.mirror import fetch_first
from server.repository.model_repository import Repository

from . import repository, test_paging
from .harness import cores
from .hub import Hub
from .processes import Load, running
from .test_watch import index
from .wire import client, until

URL = "s3://models/onnx"
CONFIG = f"""
[server]
port = 0
drain_grace = "0s"
default_tenant = "acme"
[models]
repository = "{URL}"
cache = "cache"
watch = "100ms"
[tenants.acme]
granules = 1
models = ["*"]
"""


class Bucket:
    def __init__(self, folder: Path, endpoint: str) -> None:
        self._folder = folder
        self._client: Any = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        self._client.create_bucket(Bucket="models")

    def put(self, name: str, version: int, config: str = "") -> None:
        """Upload a model that answers what it is sent."""
        path = repository.write(self._folder, name, repository.IDENTITY, version, config)
        if config:
            self._client.put_object(Bucket="models", Key=f"onnx/{name}/config.pbtxt", Body=config.encode())
        self._client.put_object(Bucket="models", Key=f"onnx/{name}/{version}/model.onnx", Body=path.read_bytes())

    def remove(self, name: str, version: int) -> None:
        self._client.delete_object(Bucket="models", Key=f"onnx/{name}/{version}/model.onnx")

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedMotoServer]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # Five take 10 s without a server.
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    yield server
    server.stop()


@pytest.fixture
def bucket(s3: ThreadedMotoServer, tmp_path: Path) -> Iterator[Bucket]:
    host, port = s3.get_host_and_port()
    bucket = Bucket(tmp_path / "uploads", f"http://{host}:{port}")
    bucket.put("identity", 1)
    yield bucket
    bucket.close()


class GoogleBucket:
    def __init__(self, folder: Path, endpoint: str) -> None:
        self._folder = folder
        self._client = httpx.Client(timeout=60, base_url=endpoint)

    def put(self, name: str, version: int) -> None:
        """Upload a model that answers what it is sent."""
        path, asked = repository.write(self._folder, name, repository.IDENTITY, version), {"uploadType": "media"}
        asked["name"] = f"onnx/{name}/{version}/model.onnx"
        self._client.post("/upload/storage/v1/b/models/o", params=asked, content=path.read_bytes()).raise_for_status()

    def remove(self, name: str, version: int) -> None:
        self._client.delete(f"/storage/v1/b/models/o/onnx%2F{name}%2F{version}%2Fmodel.onnx").raise_for_status()


@pytest.fixture
def google_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleBucket]:
    server = gcp_storage_emulator.server.create_server("127.0.0.1", 0, in_memory=True, default_bucket="models")
    with server:
        endpoint = f"http://127.0.0.1:{server._api._httpd.server_port}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        monkeypatch.setenv("NO_GCE_CHECK", "true")  # Google's libraries look for a machine of Google's otherwise.
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # The emulator has no such buckets.
        bucket = GoogleBucket(tmp_path / "uploads", endpoint)
        bucket.put("identity", 1)
        yield bucket
        bucket._client.close()


def test_a_bucket_of_google_s_is_served_and_followed(google_bucket: GoogleBucket, tmp_path: Path) -> None:
    file = tmp_path / "greenlane.toml"
    file.write_text(CONFIG.replace(URL, "gs://models/onnx"))
    with running(file) as server, client(server) as http:
        until(lambda: http.get("/v2/health/ready").status_code == 200)
        with Load(server) as asking:
            google_bucket.put("identity", 2)
            until(lambda: index(http, "identity") == {"2": "READY"})
            google_bucket.put("new", 1)
            until(lambda: index(http, "new") == {"1": "READY"})
            google_bucket.remove("new", 1)
            until(lambda: http.get("/v2/models/new/ready").status_code == 404)
            asking.more()
        assert asking.wrong == []


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    found = Hub()
    monkeypatch.setenv("HF_ENDPOINT", found.url)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("HF_TOKEN", "secret")
    found.token = "secret"
    found.start()
    yield found
    found.stop()


def test_a_repository_of_hugging_face_s_hub_is_served_and_followed_and_its_copy_is_served_without_it(
    hub: Hub, tmp_path: Path
) -> None:
    def put(name: str, version: int, config: str = "") -> None:
        path = repository.write(tmp_path / "uploads", name, repository.IDENTITY, version, config)
        hub.files |= {f"onnx/{name}/config.pbtxt": config.encode()} if config else {}
        hub.files[f"onnx/{name}/{version}/model.onnx"] = path.read_bytes()

    url, file = "hf://owner/models/onnx", tmp_path / "greenlane.toml"
    file.write_text(CONFIG.replace(URL, url))
    for name in ("identity", "second", "third"):
        put(name, 1)  # More than a page of the listing.
    with running(file) as server, client(server) as http:
        until(lambda: http.get("/v2/health/ready").status_code == 200)
        with Load(server) as asking:
            put("identity", 2)
            until(lambda: index(http, "identity") == {"2": "READY"})
            put("new", 1, "max_batch_size: 2")
            until(lambda: index(http, "new") == {"1": "READY"})
            del hub.files["onnx/new/1/model.onnx"], hub.files["onnx/new/config.pbtxt"]
            until(lambda: http.get("/v2/models/new/ready").status_code == 404)
            hub.token = "another one"
            server.wait_for_log("models.repository: hf://owner/models/onnx cannot be read")
            hub.token = "secret"
            put("later", 1)
            until(lambda: index(http, "later") == {"1": "READY"})
            hub.stop()
            asking.more()
        assert asking.wrong == []
    fetch_first(load(file).models)
    assert [each.version for each in Repository(load(file).models.repository, {}).read("identity").files] == [2]
    with pytest.raises(ConfigError, match=f"models.repository: {url} cannot be read: .*HF_TOKEN for a repository that is not"):
        fetch_first(ModelsConfig(repository=tmp_path / "elsewhere", remote=url))


def test_a_bucket_is_served_and_followed_and_its_copy_is_served_without_it(
    s3: ThreadedMotoServer, bucket: Bucket, tmp_path: Path
) -> None:
    file = tmp_path / "greenlane.toml"
    file.write_text(CONFIG)
    with running(file) as server, client(server) as http:
        until(lambda: http.get("/v2/health/ready").status_code == 200)
        with Load(server) as asking:
            bucket.put("identity", 2)
            until(lambda: index(http, "identity") == {"2": "READY"})
            bucket.put("new", 1, "max_batch_size: 2")
            until(lambda: index(http, "new") == {"1": "READY"})
            asking.more()
            s3.stop()
            asking.more()
        assert asking.wrong == []
    fetch_first(load(file).models)
    assert [each.version for each in Repository(load(file).models.repository, {}).read("identity").files] == [2]
    elsewhere = ModelsConfig(repository=tmp_path / "elsewhere", remote=URL)
    with pytest.raises(ConfigError) as refused:
        fetch_first(elsewhere)
    assert str(refused.value).startswith(f"models.repository: {URL} cannot be read: Could not connect to the endpoint URL")
    assert str(refused.value).endswith("and AWS_ENDPOINT_URL for another service")


@pytest.mark.skipif(len(cores()) < 2, reason="two servers need two cores")
def test_two_servers_of_one_cache_copy_follow_and_page_at_the_same_time(hub: Hub, tmp_path: Path) -> None:
    """One directory has the copy of both; each answers from it, whichever of them has replaced a model in it."""
    uploads, numbers = tmp_path / "uploads", range(1, 7)
    for number in numbers:
        test_paging.add_matrix(uploads, number)
    files = {number: (uploads / f"m{number}" / "1" / "model.onnx").read_bytes() for number in numbers}
    hub.files |= {f"onnx/m{number}/1/model.onnx": content for number, content in files.items()}
    some = 3 * test_paging.size_of(uploads / "m1" / "1" / "model.onnx")
    file = tmp_path / "greenlane.toml"
    file.write_text(f"{CONFIG.replace(URL, 'hf://owner/models/onnx')}device_memory = {some}\npaging = true\n")
    wrong: list[str] = []

    def ask_all(http: httpx.Client, times: int) -> None:
        for number in [*numbers] * times:
            answer = test_paging.ask(http, number)
            if not test_paging.is_right(answer, number):
                wrong.append(f"m{number}: {answer.status_code} {answer.text[:200]}")

    with ExitStack() as stack:
        servers = [stack.enter_context(running(file)) for _ in range(2)]
        clients = [stack.enter_context(client(server)) for server in servers]
        for http in clients:
            until(lambda http=http: http.get("/v2/health/ready").status_code == 200)  # type: ignore[misc]
        pool = stack.enter_context(ThreadPoolExecutor(2))
        for version in ("2", "3"):
            asking = [pool.submit(ask_all, stack.enter_context(client(server)), 10) for server in servers]
            for number in (1, 2):
                hub.files[f"onnx/m{number}/{version}/model.onnx"] = files[number]
            for http in clients:
                for number in (1, 2):
                    until(lambda http=http, each=(f"m{number}", version): [*index(http, each[0])] == [each[1]])  # type: ignore[misc]
            for each in asking:
                each.result()
        for http in clients:
            assert test_paging.memory(http)["page_ins"] > 5
    assert wrong == []
