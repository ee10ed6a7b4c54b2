"""A small server of the Hugging Face Hub's API: what HfFileSystem asks of it to list a repository and to read its files.

Written after huggingface_hub 2.4.0 (hf_api.py and hf_file_system.py): `repo_info`, `list_repo_tree` with its pages,
`get_paths_info` and `resolve`, which sends readers of large files on to another address. It has one repository.
"""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

REPOSITORY = "owner/models"
_API = f"/api/models/{REPOSITORY}"
_PAGE = 3
"""Entries of a listing in one answer; the real one has a thousand."""


class Hub:
    """Serves the files in `files`, by their paths in the repository, to those who have `token` if that is set."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.token: str | None = None
        self.stopped = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the port, and connections that are kept at their next request."""
        if self.stopped:
            return
        self.stopped = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def entries(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        """The files and folders below a folder, in their order of paths."""
        found: dict[str, dict[str, Any]] = {}
        for path in sorted(self.files):
            if not path.startswith(f"{folder}/" if folder else ""):
                continue
            parts = path.split("/")
            for depth in range(folder.count("/") + 2 if folder else 1, len(parts)):
                parent = "/".join(parts[:depth])
                found.setdefault(parent, {"type": "directory", "oid": _digest(parent.encode()), "size": 0, "path": parent})
            found[path] = self.entry(path)
        depth = folder.count("/") + 1 if folder else 0
        return [each for _, each in sorted(found.items()) if recursive or each["path"].count("/") == depth]

    def entry(self, path: str) -> dict[str, Any]:
        content = self.files[path]
        found: dict[str, Any] = {"type": "file", "oid": _digest(content), "size": len(content), "path": path}
        if path.endswith(".onnx"):
            found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return found


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        if self.hub.stopped:
            self.close_connection = True
        elif path.startswith("/cdn/"):
            self._send_file(path.removeprefix("/cdn/"))
        elif self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._refuse(401, "RepoNotFound", "Repository not found")  # As for one that is private, to who has no token.
        elif path in (_API, f"{_API}/revision/main"):
            self._send_json({"id": REPOSITORY, "sha": "0" * 40, "private": False, "tags": [], "siblings": []})
        elif path.startswith(f"{_API}/tree/main"):
            self._send_page(path.removeprefix(f"{_API}/tree/main").strip("/"), query)
        elif path.startswith(f"/{REPOSITORY}/resolve/main/"):
            self._resolve(path.removeprefix(f"/{REPOSITORY}/resolve/main/"))
        else:
            self._refuse(404, "RepoNotFound", "Repository not found")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        found = [entry for entry in self.hub.entries("", True) if entry["path"] in asked.get("paths", [])]
        self._send_json(found)

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def _send_page(self, folder: str, query: dict[str, list[str]]) -> None:
        entries = self.hub.entries(folder, query.get("recursive") == ["true"] or query.get("recursive") == ["True"])
        if not entries:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        begin = int(query.get("cursor", ["0"])[0])
        more = {}
        if begin + _PAGE < len(entries):
            asked = "&".join(f"{key}={value}" for key, (value, *_) in query.items() if key != "cursor")
            url = f"{self.hub.url}{urlsplit(self.path).path}?{asked}&cursor={begin + _PAGE}"
            more["Link"] = f'<{url}>; rel="next"'
        self._send_json(entries[begin : begin + _PAGE], more)

    def _resolve(self, path: str) -> None:
        """A small file, or for a large one where it is."""
        if path not in self.hub.files:
            self._refuse(404, "EntryNotFound", "Entry not found")
        elif path.endswith(".onnx"):
            self._send(302, b"", {"Location": f"{self.hub.url}/cdn/{path}"})
        else:
            self._send_file(path)

    def _send_file(self, path: str) -> None:
        if (content := self.hub.files.get(path)) is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            self._send(200, content, {"ETag": f'"{_digest(content)}"'})

    def _send_json(self, content: object, headers: dict[str, str] | None = None) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _refuse(self, status: int, code: str, text: str) -> None:
        self._send(status, json.dumps({"error": text}).encode(), {"X-Error-Code": code, "X-Error-Message": text})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _digest(content: bytes) -> str:
    """The object's name in git, about."""
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
