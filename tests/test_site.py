"""The documentation builds as a site: pages of all files, links that lead somewhere, nothing fetched from elsewhere."""

import os
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.browser.chromium import browsing

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds it, which fails where a link leads nowhere or a page has no place in the navigation."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-P",
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        folder,
    ]  # --quiet also hides mistakes from --strict.
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    documents = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    pages = {str(path.parent if path.name == "README.md" else path.with_suffix("")) for path in documents}
    assert [page for page in sorted(pages) if not (site / page / "index.html").is_file()] == []
    assert all((site / page / "index.html").is_file() for page in (".", "CHANGELOG", "CONTRIBUTING"))


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("index.html"):
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|link rel="stylesheet")[^>]* (?:src|href)="(\w+://[^"]*)"', text)
        assert loaded == [], page


async def test_a_browser_asks_nothing_of_elsewhere(site: Path, tmp_path: Path) -> None:
    """Nor do the scripts, one of which would ask GitHub for the stars."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            own = f"http://127.0.0.1:{served.server_port}/"
            async with browsing(tmp_path) as browser:
                for address in (own, f"{own}operations/run/"):
                    page = await browser.open(address)
                    await page.until(
                        "document.querySelector('[data-md-component=search-query]') && document.fonts.status == 'loaded'"
                    )
                    await page.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
                    await page.until(
                        "performance.getEntriesByType('resource').some((each) => each.name.includes('search_index'))"
                    )
                    assert len(page.requests) > 5
                    assert [each for each in page.requests if not each.startswith((own, "data:", f"blob:{own}"))] == []
        finally:
            served.shutdown()
            thread.join()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_links_to_other_files_lead_to_github_and_those_to_documents_stay(site: Path) -> None:
    start, operations = ((site / page / "index.html").read_text() for page in (".", "operations/run"))
    assert 'href="quickstart/"' in start
    assert "blob/main/docs/" not in start.partition("<article")[2].partition("</article>")[0].replace("edit/main", "")
    assert 'href="https://github.com/greenlane-server/greenlane/blob/main/deploy/Dockerfile"' in operations


def test_links_to_documents_are_called_by_their_names_and_not_by_their_files(site: Path) -> None:
    files = {path.name for path in (ROOT / "docs").rglob("*.md")}
    for page in site.rglob("index.html"):
        assert files & {*re.findall(r">([\w-]+\.md)</a>", page.read_text())} == set(), page


def test_lists_after_a_line_of_text_are_lists(site: Path) -> None:
    for page in site.rglob("index.html"):
        article = page.read_text().partition("<article")[2].partition("</article>")[0]
        text = re.sub(r"<pre.*?</pre>", "", article, flags=re.DOTALL)
        assert re.findall(r"^(?:- |\d\. ).*", text, re.MULTILINE) == [], page
