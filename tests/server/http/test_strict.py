import pytest

from server.http.strict import find_violation


@pytest.mark.parametrize(
    "host",
    ["", "a", "a:", "a_b-c.d~:80", "1.2.3.4:80", "[::1]", "[::1]:", "[fe80::1%eth0]:80", "[fe80::1%25eth0]", "a%20b", "a,b"],
)
def test_a_host_that_the_standard_has_is_taken(host: str) -> None:
    assert find_violation("1.1", b"/v2", [(b"host", host.encode())]) is None


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize(
    "host",
    [
        *(
            "a b",
            "a, b",
            "a\tb",
            "a/b",
            "a?b",
            "a#b",
            "http://a",
            "u@a",
            "a:b",
            "a:80:80",
            "a:-1",
            "a%2",
            "a\\b",
            '"a"',
            "<a>",
            "\xe4",
        ),
        *("::1", "[::1", "::1]", "[::1]a", "[::1]80", "[]", "[a b]", "[[::1]]", "a" * 60_000 + " "),
    ],
)
def test_a_host_that_is_none_is_refused(host: str, version: str) -> None:
    found = find_violation(version, b"/v2", [(b"x", b"y"), (b"host", host.encode("latin-1"))])
    assert found is not None
    assert found.status == b"400 Bad Request"
    assert found.text.startswith(f"Host: {host[:40]!r}")
    assert len(found.text) < 200
