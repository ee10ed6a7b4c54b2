"""What a request's headers tell of who sent it."""

import socket

import pytest

from server.api.origins import foreign_host, from_elsewhere, is_page, proxied


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
def test_what_proxies_add_shows_them(name: str) -> None:
    assert proxied({"host": "localhost", name: "1.2.3.4"}) == name
    assert proxied({name: ""}) == name


def test_what_clients_send_shows_no_proxy() -> None:
    assert proxied({"host": "localhost", "x-tenant": "acme", "forwarded-by": "x", "user-agent": "curl"}) is None


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
def test_a_page_is_from_elsewhere_unless_it_is_the_servers_own(headers: dict[str, str], shown: str | None) -> None:
    assert from_elsewhere({"host": HOST, **headers}) == shown


@pytest.mark.parametrize(
    ("headers", "page"),
    [({}, False), ({"sec-fetch-site": "none"}, False), ({"sec-fetch-site": "same-origin"}, True), ({"origin": "null"}, True)],
)
def test_a_browser_says_that_a_page_sent_it(headers: dict[str, str], page: bool) -> None:
    assert is_page(headers) == page


@pytest.mark.parametrize(
    "host",
    [
        *["localhost", "LOCALHOST:8000", "a.localhost", "localhost.", socket.gethostname()],
        *["127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "[::1]", "10.0.0.7:80"],
        *["gpu1.example.com", "GPU1.example.com:8000"],
    ],
)
def test_names_of_this_machine_and_allowed_ones_and_addresses_are_no_foreign_hosts(host: str) -> None:
    assert foreign_host({"host": host}, ["gpu1.Example.com"]) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "1.2.3.4.evil.example", "", "[evil.example]:80", "1.2"],
)
def test_other_names_are_foreign_hosts(host: str) -> None:
    assert foreign_host({"host": host}, ["gpu1"]) == f"Host: {host}"


def test_without_a_host_there_is_none_that_is_foreign() -> None:
    assert foreign_host({}, []) is None
