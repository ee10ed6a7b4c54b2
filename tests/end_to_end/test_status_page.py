"""The status page's files from every way to serve; tests/browser has what a browser makes of them."""

import re
from pathlib import Path

import httpx
import pytest

from server.api import status_page

FOLDER = Path(status_page.__file__).parent / "page"
FILES = sorted(path.name for path in FOLDER.iterdir() if path.suffix != ".html")


def test_the_page_and_its_files_are_all_that_it_loads(http: httpx.Client) -> None:
    page = http.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.text == (FOLDER / "index.html").read_text()
    loaded = set(re.findall(r'(?:src|href)="/status/([^"]+)"', page.text))
    for name in FILES:
        answer = http.get(f"/status/{name}")
        assert (answer.status_code, answer.content) == (200, (FOLDER / name).read_bytes())
        loaded |= set(re.findall(r'from "\./([^"]+)"', answer.text))
    assert loaded == set(FILES)
    assert http.head("/").headers["content-length"] == str(len(page.content))


@pytest.mark.parametrize("path", ["/", "/status/page.js"])
def test_nothing_from_elsewhere_may_run_on_it_or_show_it(http: httpx.Client, path: str) -> None:
    headers = http.get(path).headers
    policy = headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"} <= set(
        policy
    )
    assert "unsafe" not in headers["content-security-policy"]
    assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")


@pytest.mark.parametrize("name", ["nothing.js", "index.html", "..%2fdocs.py", "%2e%2e"])
def test_there_are_no_other_files(http: httpx.Client, name: str) -> None:
    assert http.get(f"/status/{name}").status_code == 404


def test_it_belongs_to_no_tenant(http: httpx.Client) -> None:
    for headers in ({"Authorization": "Bearer of no tenant"}, {"X-Tenant": "acme"}, {"X-Tenant": "none such"}):
        assert http.get("/", headers=headers).status_code == 200
        assert http.get("/status/page.css", headers=headers).status_code == 200
