"""Which requests a web page or a proxy sent, by their headers."""

import socket

import pytest

from server.api.browsers import cross_origin, is_from_page, proxy_header, unknown_host


@pytest.mark.parametrize(
    "name",
    [
        "via",
        "forwarded",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-x",
        "x-real-ip",
        "cf-connecting-ip",
        "true-client-ip",
    ],
)
def test_proxy_headers_are_recognized(name: str) -> None:
    assert proxy_header({"host": "localhost", name: "1.2.3.4"}) == name
    assert proxy_header({name: ""}) == name


def test_headers_of_clients_show_no_proxy() -> None:
    assert proxy_header({"host": "localhost", "x-tenant": "acme", "forwarded-by": "x", "user-agent": "curl"}) is None


HOST = "gpu1:8000"


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ({}, None),
        ({"sec-fetch-site": "none"}, None),
        ({"sec-fetch-site": "same-origin"}, None),
        ({"sec-fetch-site": "same-origin", "origin": "http://gpu1:8000"}, None),
        ({"origin": "https://GPU1:8000"}, None),
        ({"sec-fetch-site": "same-site"}, "Sec-Fetch-Site: same-site"),
        ({"sec-fetch-site": "cross-site"}, "Sec-Fetch-Site: cross-site"),
        ({"sec-fetch-site": ""}, "Sec-Fetch-Site: "),
        ({"origin": "http://gpu1:3000"}, "Origin: http://gpu1:3000"),
        ({"origin": "http://gpu1"}, "Origin: http://gpu1"),
        ({"origin": "https://evil.example"}, "Origin: https://evil.example"),
        ({"origin": "null"}, "Origin: null"),
        ({"origin": ""}, "Origin: "),
    ],
)
def test_cross_origin_pages_are_recognized(headers: dict[str, str], shown: str | None) -> None:
    assert cross_origin({"host": HOST, **headers}) == shown


@pytest.mark.parametrize(
    ("headers", "page"),
    [({}, False), ({"sec-fetch-site": "none"}, False), ({"sec-fetch-site": "same-origin"}, True), ({"origin": "null"}, True)],
)
def test_requests_from_pages_are_recognized(headers: dict[str, str], page: bool) -> None:
    assert is_from_page(headers) == page


@pytest.mark.parametrize(
    "host",
    [
        *["localhost", "LOCALHOST:8000", "a.localhost", "localhost.", socket.gethostname()],
        *["127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "[::1]", "10.0.0.7:80"],
        *["gpu1.example.com", "GPU1.example.com:8000"],
    ],
)
def test_names_of_this_machine_allowed_hosts_and_addresses_are_known_hosts(host: str) -> None:
    assert unknown_host({"host": host}, ["gpu1.Example.com"]) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "1.2.3.4.evil.example", "", "[evil.example]:80", "1.2"],
)
def test_other_names_are_unknown_hosts(host: str) -> None:
    assert unknown_host({"host": host}, ["gpu1"]) == f"Host: {host}"


def test_a_request_without_host_has_no_unknown_host() -> None:
    assert unknown_host({}, []) is None
