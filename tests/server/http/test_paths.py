import pytest

from server.errors import NotFound, WrongMethod
from server.http.paths import is_infer, is_shared, is_tenantless, of_request_line, parse_infer


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
    "path", [b"/v2/models/m/versions/x/infer", b"/v2/models/m/n/infer", b"/v2/models/m/versions/1/2/infer"]
)
def test_malformed_infer_path_is_not_found(path: bytes) -> None:
    assert is_infer(path.decode())
    with pytest.raises(NotFound, match=f"^there is nothing at {path.decode()}$"):
        parse_infer("POST", path)


def test_infer_takes_post_only() -> None:
    with pytest.raises(WrongMethod, match=r"^GET is not possible here; use POST$"):
        parse_infer("GET", b"/v2/models/m/infer")


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
    [(b"GET /v2?a=b HTTP/1.1", b"/v2"), (b"GET /v2 HTTP/1.1", b"/v2"), (b"GET /v2", b""), (b"", b"")],
)
def test_path_of_a_request_line(line: bytes, path: bytes) -> None:
    assert of_request_line(line) == path
