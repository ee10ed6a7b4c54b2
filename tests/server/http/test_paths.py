import pytest

from server.http.paths import in_v2, is_infer, is_shared, is_tenantless, nothing_at, of_request_line, parse_infer


@pytest.mark.parametrize(
    ("path", "model"),
    [
        (b"/v2/models/m/infer", ("m", None)),
        (b"/v2/models/m/versions/3/infer", ("m", "3")),
        (b"/v2/models/a%2Fb%20c/infer", ("a/b c", None)),
        (b"/v2/models/versions/infer", ("versions", None)),
    ],
)
def test_infer_path_names_a_model_and_a_version(path: bytes, model: tuple[str, str | None]) -> None:
    assert is_infer(path.decode())
    assert parse_infer("POST", path) == model


@pytest.mark.parametrize(
    ("path", "same"),
    [
        ("/v1/models/m:predict", "/v2/models/m/infer"),
        ("/v1/models/m:explain", "/v2/models/m/infer"),
        ("/v1/models/a b:predict", "/v2/models/a%20b/infer"),
        ("/v1/models/a:b:predict", "/v2/models/a%3Ab/infer"),
        ("/v1/models/m/versions/2:predict", "/v2/models/m/versions/2/infer"),
        ("/v1/models/m", None),
        ("/v1/models/:predict", None),
        ("/v1/models/m:run", None),
        ("/v1/models/m/n:predict", None),
        ("/v2/models/m:predict", None),
    ],
)
def test_a_path_of_kserves_protocol_v1_has_one_of_v2(path: str, same: str | None) -> None:
    assert in_v2(path) == same


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("/v1/chat/completions", "no language models are served here; of OpenAI's API there are /v1/embeddings and "),
        ("/v2/models/", "POST /v2/repository/index lists the models"),
        ("/health", "ask GET /v2/health/ready"),
        ("/embed", "texts go to POST /v1/embeddings"),
    ],
)
def test_what_is_often_asked_for_is_met_with_where_to_look(path: str, where: str) -> None:
    assert str(nothing_at(path)).startswith(f"there is nothing at {path}; {where}")
    assert str(nothing_at(f"{path}x")) == f"there is nothing at {path}x"


@pytest.mark.parametrize("path", ["/v2/models/infer", "/v2/models/m", "/v2/models/m/infer/", "/v1/models/m/infer", "/infer"])
def test_other_paths_are_not_infer(path: str) -> None:
    assert not is_infer(path)


@pytest.mark.parametrize(
    ("path", "shared", "tenantless"),
    [
        (b"/admin/partitions", True, False),
        (b"/metrics", True, False),
        (b"/", True, False),
        (b"/status/page.js", True, False),
        (b"/status", False, False),
        (b"/v2", False, True),
        (b"/v2/health/ready", False, True),
        (b"/openapi.json", False, True),
        (b"/v2/models/m", False, False),
        (b"", False, False),
    ],
)
def test_paths_of_the_shared_process(path: bytes, shared: bool, tenantless: bool) -> None:
    assert (is_shared(path), is_tenantless(path)) == (shared, tenantless)


@pytest.mark.parametrize(
    ("line", "path"),
    [
        (b"GET /v2?a=b HTTP/1.1", b"/v2"),
        (b"GET /v2 HTTP/1.1", b"/v2"),
        (b"GET http://a HTTP/1.1", b"/"),
        (b"GET http://a?b HTTP/1.1", b"/"),
        (b"GET a:b HTTP/1.1", b""),
        (b"GET /v2", b""),
        (b"", b""),
    ],
)
def test_path_of_a_request_line(line: bytes, path: bytes) -> None:
    assert of_request_line(line) == path
