"""/v1/embeddings and /v1/rerank over a real socket, with OpenAI's own client and without."""

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import numpy as np
import onnxruntime
import openai
import pytest
from tokenizers import Tokenizer

from server.config.schema import Config, ModelOptions
from server.config.tenant import TenantConfig
from server.tenants.auth import digest
from tests import encoders

from . import repository
from .harness import Served, configuration, cores, serving
from .processes import configure, running, running_device, tenant
from .test_several_http_processes import each_process
from .wire import SMALL, Connection, failures, post, posted, statistics, until
from .wire import client as client_to

TEXTS = [*encoders.texts(3, 5), *encoders.texts(9, 14, 1), "cat", "a small red car sat under the old tree near the road"]
"""More than a batch, and of different lengths."""


class Reference:
    """The same by ONNX Runtime and numpy alone: one text at a time, without padding."""

    def __init__(self, folder: Path) -> None:
        self._session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()

    def run(self, text: Any) -> Any:
        pair = text if isinstance(text, tuple) else (text,)
        found = self.tokenizer.encode(*pair)
        values = (found.ids, [1] * len(found.ids), found.type_ids)
        return self._session.run(None, {name: np.array([each]) for name, each in zip(encoders.NAMES, values, strict=True)})[0][
            0
        ]

    def embedding(self, text: str) -> Any:
        mean = self.run(text).mean(0)
        return mean / np.linalg.norm(mean)


def options(**tables: Any) -> MappingProxyType[str, ModelOptions]:
    return MappingProxyType({name: ModelOptions.model_validate({"text": table}) for name, table in tables.items()})


def of(root: Path, tenant: TenantConfig, **tables: Any) -> Config:
    config = configuration(root, tenant)
    return config.model_copy(update={"models": config.models.model_copy(update={"options": options(**tables)})})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("encoders")
    for name in ("encoder", "first", "short"):
        encoders.write(root, name, encoders.encoder(), most=16 if name == "short" else 0)
    encoders.write(root, "cross", encoders.encoder(scores=True))
    encoders.write(root, "sentence", encoders.encoder(positions=32))
    said = {
        "modules.json": [
            {"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        ],
        "1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        "config.json": {"max_position_embeddings": 32},
    }
    (root / "sentence" / "1_Pooling").mkdir()
    for name, content in said.items():
        (root / "sentence" / name).write_text(json.dumps(content))
    repository.write(root, "identity", repository.IDENTITY)
    return root


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[Served]:
    tenant = TenantConfig(name="acme", granules=1, models=("*",), keys_sha256=(digest("secret"),))
    tables = {"first": {"pooling": "cls", "normalize": False, "truncate": True, "max_tokens": 4}, "cross": {"task": "rerank"}}
    tables |= {"encoder": {"token_ids": True}}
    with serving(of(root, tenant, **tables), direct=True) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with client_to(served, Authorization="Bearer secret") as http:
        yield http


def test_openais_client_gets_the_embeddings(client: openai.OpenAI, root: Path) -> None:
    reference = Reference(root / "encoder")
    answer = client.embeddings.create(model="encoder", input=TEXTS)  # It asks for base64.
    assert [each.index for each in answer.data] == list(range(len(TEXTS)))
    expected = np.stack([reference.embedding(text) for text in TEXTS])
    np.testing.assert_allclose([each.embedding for each in answer.data], expected, atol=2e-5)
    tokens = sum(len(reference.tokenizer.encode(text).ids) for text in TEXTS)
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("encoder", tokens, tokens)


def test_floats_base64_tokens_and_one_text_are_the_same(http: httpx.Client, root: Path) -> None:
    ids = Reference(root / "encoder").tokenizer.encode(TEXTS[0]).ids
    found = []
    for given in (TEXTS[0], [TEXTS[0]], ids, [ids]):
        for encoding in ("float", "base64"):
            body = {"model": "encoder", "input": given, "encoding_format": encoding}
            (each,) = http.post("/v1/embeddings", json=body).raise_for_status().json()["data"]
            raw = each["embedding"]
            found.append(raw if encoding == "float" else np.frombuffer(base64.b64decode(raw), "<f4").tolist())
    np.testing.assert_allclose(found, [found[0]] * len(found), atol=1e-6)
    body = {"model": "encoder", "input": TEXTS[0], "dimensions": 8}
    (each,) = http.post("/v1/embeddings", json=body).json()["data"]
    assert len(each["embedding"]) == 8
    assert np.linalg.norm(each["embedding"]) == pytest.approx(1, abs=1e-5)


def test_pooling_length_and_truncation_are_configured(client: openai.OpenAI, root: Path) -> None:
    reference = Reference(root / "first")
    reference.tokenizer.enable_truncation(4)
    answer = client.embeddings.create(model="first", input=TEXTS[4])
    np.testing.assert_allclose(answer.data[0].embedding, reference.run(TEXTS[4])[0], atol=2e-5)
    assert answer.usage.prompt_tokens == 4


def test_a_folder_of_sentence_transformers_is_read(client: openai.OpenAI, root: Path) -> None:
    """The first token's features, as they are, of texts of up to 32 tokens."""
    answer = client.embeddings.create(model="sentence", input=TEXTS[4])
    np.testing.assert_allclose(answer.data[0].embedding, Reference(root / "sentence").run(TEXTS[4])[0], atol=2e-5)
    assert client.embeddings.create(model="sentence", input="cat " * 30).usage.prompt_tokens == 32
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]: 33 tokens; expected 1 to 32 "):
        client.embeddings.create(model="sentence", input="cat " * 31)


def test_models_that_take_texts_are_listed(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["cross", "encoder", "first", "sentence", "short"]
    assert client.models.retrieve("encoder").owned_by == "acme"
    with pytest.raises(openai.NotFoundError, match=r"model 'identity' does not take texts: it has no tokenizer.json"):
        client.models.retrieve("identity")


@pytest.mark.parametrize(
    ("body", "status", "code", "text"),
    [
        ({"model": "encoder"}, 400, None, "input: null; expected text, a list of texts, or tokens"),
        ({"model": "encoder", "input": []}, 400, None, "input: 0 texts; expected 1 to 2048"),
        (
            {"model": "encoder", "input": ["a", ""]},
            400,
            None,
            'input[1]: "" is a string; expected text that is not empty, or a list of tokens',
        ),
        ({"model": "encoder", "input": [[1, -1]]}, 400, None, "expected text that is not empty, or a list of tokens"),
        ({"model": "encoder", "input": [9999]}, 400, None, "input[0]: token 9999; the model's tokenizer has tokens 0 to "),
        (
            {"model": "short", "input": [[1]]},
            400,
            None,
            "input[0]: tokens; expected text, as tokens of another tokenizer would",
        ),
        (
            {"model": "short", "input": ["cat", "cat " * 15]},
            400,
            None,
            "input[1]: 17 tokens; expected 1 to 16 (models.NAME.text: ",
        ),
        (
            {"model": "encoder", "input": "a", "encoding_format": "x"},
            400,
            None,
            "encoding_format: 'x'; expected 'float' or 'base64'",
        ),
        ({"model": "encoder", "input": "a", "dimensions": 999}, 400, None, "dimensions: 999; expected at most 32"),
        ({"model": "none", "input": "a"}, 404, "model_not_found", "Request for unknown model: 'none' is not found"),
        ({"model": "identity", "input": "a"}, 404, "model_not_found", "it has no tokenizer.json"),
        ({"model": "cross", "input": "a"}, 404, "model_not_found", "gives scores, not embeddings; use /v1/rerank"),
    ],
)
def test_errors_are_openais(http: httpx.Client, body: dict[str, Any], status: int, code: str | None, text: str) -> None:
    answer = http.post("/v1/embeddings", json=body)
    found = answer.json()["error"]
    assert (answer.status_code, found["code"], found["type"], found["param"]) == (status, code, "invalid_request_error", None)
    assert text in found["message"]


@pytest.mark.parametrize(
    ("asked", "status", "text"),
    [
        ({"url": "/v1/nothing"}, 404, "there is nothing at /v1/nothing"),
        ({"url": "/v1/chat/completions"}, 404, "no language models are served here"),
        ({"method": "GET"}, 405, "GET is not possible here; use POST"),
        ({"headers": {"Content-Encoding": "br"}}, 415, "Content-Encoding: 'br'; expected gzip, deflate or identity"),
        ({"headers": {"Content-Encoding": "gzip"}}, 400, "but the body is not gzip"),
        ({"content": b"{" + b" " * (1 << 20)}, 413, "a body of more than 1048576 bytes"),
        ({"content": b""}, 400, "the request body is empty; expected an object"),
    ],
)
def test_errors_before_a_model_is_known_are_openais(http: httpx.Client, asked: dict[str, Any], status: int, text: str) -> None:
    answer = http.request(**{"method": "POST", "url": "/v1/embeddings", "content": b"{}", **asked})
    found = answer.json()["error"]
    assert (answer.status_code, found["code"], found["type"]) == (status, None, "invalid_request_error")
    assert text in found["message"]


def test_a_wrong_key_is_an_authentication_error(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError) as caught:
        client.embeddings.create(model="encoder", input="a")
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_a_cross_encoder_ranks_documents(http: httpx.Client, root: Path, path: str) -> None:
    reference, documents = Reference(root / "cross"), [*TEXTS[:9], {"text": TEXTS[9]}]
    expected = [1 / (1 + np.exp(-reference.run((TEXTS[12], text))[0])) for text in TEXTS[:10]]
    body = {"model": "cross", "query": TEXTS[12], "documents": documents, "top_n": 4, "return_documents": True}
    answer = http.post(path, json=body).raise_for_status().json()
    best = np.argsort(expected)[::-1][:4].tolist()
    assert [each["index"] for each in answer["results"]] == best
    assert [each["document"]["text"] for each in answer["results"]] == [TEXTS[index] for index in best]
    np.testing.assert_allclose([each["relevance_score"] for each in answer["results"]], [expected[i] for i in best], atol=1e-5)


def test_embeddings_rank_documents_by_cosine(http: httpx.Client, root: Path) -> None:
    reference = Reference(root / "encoder")
    query, *others = (reference.embedding(text) for text in TEXTS[:6])
    body = {"model": "encoder", "query": TEXTS[0], "documents": TEXTS[1:6]}
    results = http.post("/v1/rerank", json=body).raise_for_status().json()["results"]
    found = {each["index"]: each["relevance_score"] for each in results}
    np.testing.assert_allclose([found[index] for index in range(5)], np.stack(others) @ query, atol=2e-5)
    assert [each["relevance_score"] for each in results] == sorted(found.values(), reverse=True)


def test_runs_are_counted_and_a_deadline_is_504(http: httpx.Client) -> None:
    def count() -> int:
        return int(http.get("/v2/models/encoder/stats").json()["model_stats"][0]["inference_stats"]["success"]["count"])

    before = count()
    assert http.post("/v1/embeddings", json={"model": "encoder", "input": TEXTS}).status_code == 200
    assert count() - before == 2  # 14 texts in batches of up to 8.
    answer = http.post("/v1/embeddings", json={"model": "encoder", "input": TEXTS, "timeout": 1})
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "server_error")


def test_a_request_is_charged_once_however_many_runs_it_takes(root: Path) -> None:
    tenant = TenantConfig(name="acme", granules=1, models=("encoder",), requests_per_second=1, burst_requests=2)
    with serving(of(root, tenant), direct=True) as served, client_to(served) as http:
        answers = [http.post("/v1/embeddings", json={"model": "encoder", "input": TEXTS}) for _ in range(3)]
    assert [each.status_code for each in answers] == [200, 200, 429]
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert "requests_per_second" in answers[2].json()["error"]["message"]
    assert int(answers[2].headers["retry-after"]) >= 1


def test_a_request_whose_client_leaves_is_one_failure_however_many_runs_it_takes(root: Path) -> None:
    with (
        serving(of(root, TenantConfig(name="acme", granules=1, models=("encoder",))), direct=True) as served,
        client_to(served) as http,
    ):
        body = json.dumps({"model": "encoder", "input": TEXTS * 140})
        with Connection(served) as leaving:
            leaving.send(post("/v1/embeddings", body.encode()))
            until(lambda: statistics(http, "encoder")["inference_count"] > 0)
        until(lambda: failures(http, "encoder") > 0)
        assert failures(http, "encoder") == 1


def test_a_full_queue_of_the_models_own_refuses_requests_and_no_run_of_one_that_has_begun(tmp_path: Path) -> None:
    encoders.write(tmp_path, "encoder", encoders.encoder())
    with (tmp_path / "encoder" / "config.pbtxt").open("a") as config:
        config.write("\ndynamic_batching { default_queue_policy { max_queue_size: 1 } }")
    tenant = TenantConfig(name="acme", granules=1, models=("encoder",))
    with (
        serving(of(tmp_path, tenant), direct=True) as served,
        client_to(served) as http,
        ThreadPoolExecutor(4) as pool,
    ):
        body = {"model": "encoder", "input": TEXTS * 12}
        asked = [pool.submit(httpx.post, f"{served.url}/v1/embeddings", json=body, timeout=60) for _ in range(40)]
        statuses = [each.result().status_code for each in asked]
        assert set(statuses) == {200, 503}
        counted = statistics(http, "encoder")["inference_stats"]
        assert (counted["success"]["count"], counted["fail"]["count"]) == (21 * statuses.count(200), statuses.count(503))


def test_all_embeddings_of_a_request_are_of_one_model_when_that_is_replaced(tmp_path: Path) -> None:
    encoders.write(tmp_path, "encoder", encoders.encoder())
    files = encoders.encoder(seed=1), encoders.encoder()
    tenant = TenantConfig(name="acme", granules=1, models=("encoder",))
    with (
        serving(of(tmp_path, tenant), direct=True) as served,
        client_to(served) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        models, replaced = [Reference(tmp_path / "encoder")], 0
        for file in files:
            before = statistics(http, "encoder")["inference_count"]
            asked = pool.submit(
                httpx.post, f"{served.url}/v1/embeddings", json={"input": TEXTS * 140, "model": "encoder"}, timeout=60
            )
            until(lambda before=before: statistics(http, "encoder")["inference_count"] > before)
            (tmp_path / "encoder" / "1" / "model.onnx").write_bytes(file)
            assert http.post("/v2/repository/models/encoder/load").status_code == 200
            replaced += not asked.done()
            models.append(Reference(tmp_path / "encoder"))
            answer = asked.result()
            assert answer.status_code == 200, answer.text
            found = np.array([each["embedding"] for each in answer.json()["data"]])
            of_one = [np.tile([model.embedding(text) for text in TEXTS], (140, 1)) for model in models[-2:]]
            assert any(np.allclose(found, each, atol=2e-5) for each in of_one)
        assert replaced


def test_a_request_of_many_runs_is_answered_by_a_server_that_drains(root: Path, tmp_path: Path) -> None:
    path = configure(
        tmp_path / "greenlane.toml", root, tenant("acme", "encoder"), default_tenant='"acme"', drain_timeout='"60s"'
    )
    with running(path) as server, client_to(server) as http, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            httpx.post, f"{server.url}/v1/embeddings", json={"model": "encoder", "input": TEXTS * 40}, timeout=30
        )
        until(lambda: statistics(http, "encoder")["inference_count"] > 0)
        server.signal()
        answer = asked.result()
        assert (answer.status_code, len(answer.json().get("data", []))) == (200, len(TEXTS) * 40), answer.text[:200]
        assert server.wait() == 0


@pytest.mark.skipif(len(cores()) < 2, reason="several processes need two cores")
def test_so_is_one_that_another_process_than_that_of_the_queue_has_read(root: Path, tmp_path: Path) -> None:
    tenants = tenant("acme", "encoder", "identity", http_processes=3)
    path = configure(tmp_path / "greenlane.toml", root, tenants, default_tenant='"acme"', drain_timeout='"60s"')
    with running_device(path) as server, client_to(server) as http, ExitStack() as stack:
        *_, helper = each_process(server, stack).values()
        body = json.dumps({"model": "encoder", "input": TEXTS * 40})
        helper.send(post("/v1/embeddings", body.encode()))
        until(lambda: statistics(http, "encoder")["inference_count"] > 0)
        server.signal()
        answer = helper.answer()
        assert (answer.status, len(answer.json.get("data", []))) == (200, len(TEXTS) * 40), answer.body[:200]


@pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")
def test_tenants_of_python_m_server_have_their_own(root: Path, tmp_path: Path) -> None:
    tenants = '[models.first.text]\npooling = "cls"\n' + tenant("acme", "encoder", keys_sha256=[digest("a")])
    tenants += tenant("globex", "first", keys_sha256=[digest("g")])
    with running(configure(tmp_path / "greenlane.toml", root, tenants)) as server:
        for key, name in (("a", "encoder"), ("g", "first")):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=30) as client:
                assert [each.id for each in client.models.list()] == [name]
                assert len(client.embeddings.create(model=name, input=TEXTS).data) == len(TEXTS)


@pytest.mark.skipif(len(cores()) < 2, reason="several processes need two cores")
def test_a_request_that_has_begun_is_completed_beside_others_that_fill_the_queue(root: Path, tmp_path: Path) -> None:
    """Its later runs wait for room, where the process of the queue finds none for them as well."""
    tenants = tenant("acme", "encoder", "identity", queue=1, http_processes=3)
    path = configure(tmp_path / "greenlane.toml", root, tenants, default_tenant='"acme"')
    with running_device(path) as server, client_to(server) as http, ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        lead, *others = each_process(server, stack).values()
        ended, refused = threading.Event(), 0

        def fill(connection: Connection) -> None:
            while not ended.is_set():
                connection.send(posted("identity", SMALL, "X-Tenant: acme") * 4)
                assert {connection.answer().status for _ in range(4)} <= {200, 429}

        body = json.dumps({"model": "encoder", "input": TEXTS * 40})
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        filling = [pool.submit(fill, connection) for connection in (lead, others[0])]
        try:
            for _ in range(5):
                before = statistics(http, "encoder")["inference_count"]
                others[1].send(head)
                answer = others[1].answer()
                count = statistics(http, "encoder")["inference_count"] - before
                refused += answer.status == 429
                assert answer.status == 200 or (answer.status == 429 and not count), (answer.status, count, answer.body[:200])
        finally:
            ended.set()
        for each in filling:
            each.result()
        assert failures(http, "encoder") == refused, "a run that is tried again is no failure of the request"
