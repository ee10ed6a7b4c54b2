"""The status page at `/`: a page, its scripts and its style, which are the same for everybody.

What it shows it asks `/admin/status` for, with the admin key that its reader enters, or without one where none is configured.
So only administrators see anything on it, and what they may do is decided there.
"""

from pathlib import Path

from fastapi import APIRouter, Response

from ..errors import NotFound

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FILES = {path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in (Path(__file__).parent / "page").iterdir()}

HEADERS = {
    # The page's own files, and nothing from elsewhere or in line. No other page may frame it, so no one is made to click
    # on something that they do not see. Scripts cannot make markup of text.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@router.head("/")
@router.get("/")
async def page() -> Response:
    """The page."""
    return _file("index.html")


@router.get("/status/{name}")
async def file(name: str) -> Response:
    """One of the files that the page consists of. Raises NotFound."""
    if name not in _FILES or name.endswith(".html"):
        raise NotFound(f"there is nothing at /status/{name}")
    return _file(name)


def _file(name: str) -> Response:
    body, kind = _FILES[name]
    return Response(body, headers={**HEADERS, "content-type": kind})
