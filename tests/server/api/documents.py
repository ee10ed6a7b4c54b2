"""The OpenAPI documents as files with a line for each operation and each schema, which `test_docs.py` compares with them.

`python -m tests.server.api.documents` writes them again: do so where an answer is meant to be another one.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from server.admin import docs as admin_docs
from server.api import docs
from server.api.openapi import Document

WRITTEN = {
    Path(__file__).with_name("openapi.txt"): docs.document,
    Path(__file__).with_name("admin_openapi.txt"): admin_docs.document,
}


def lines(document: Document) -> Iterator[str]:
    """Everything in a document but the version, in its order."""
    content = json.loads(document.json)
    del content["info"]["version"]
    parts = {"": content, "paths": content.pop("paths"), "schemas": content["components"].pop("schemas")}
    for part, entries in parts.items():
        for name, entry in entries.items():
            yield f"{part} {name}: {json.dumps(entry, ensure_ascii=False)}".lstrip()


if __name__ == "__main__":
    for path, document in WRITTEN.items():
        path.write_text("".join(f"{line}\n" for line in lines(document())), encoding="utf-8")
