"""What mkdocs has to do to show the same files as GitHub: see mkdocs.yml.

- README.md, CHANGELOG.md and CONTRIBUTING.md become pages, though they are not in docs/.
- Links from there into docs/, and from docs/ to files outside, lead to the page, or else to the file on GitHub.
- A link whose text is the name of a document, such as `protocol.md`, has it without the suffix.
- The theme's link to the repository stays a link: its script would ask api.github.com for the number of stars.
- A list may follow a line of text, as on GitHub; Python-Markdown wants an empty line between.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
GITHUB = "https://github.com/greenlane-server/greenlane"
PAGES = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
"""Files of the root, and what their pages are called."""

_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_NAME = re.compile(r"\[([\w-]+)\.md\](?=\()")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = {shown: name for name, shown in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    if source in PAGES:
        page.edit_url = f"{GITHUB}/edit/main/{source}"
    parts = _CODE.split(markdown)  # Every second one is code.
    parts[::2] = [_LINK.sub(lambda link: _target(link[0], source), _NAME.sub(r"[\1]", part)) for part in parts[::2]]
    return _with_lines_before_lists("".join(parts))


def on_post_page(output: str, **_: Any) -> str:
    return output.replace(' data-md-component="source"', "")


def _target(link: str, source: str) -> str:
    """Where a link of this file (its path in the repository) leads on the site."""
    path, hash_, section = link.partition("#")
    if path.startswith(tuple(homes := [f"{GITHUB}/{kind}/main/" for kind in ("blob", "tree")])):
        path = next(path.removeprefix(home) for home in homes if path.startswith(home))
    elif not path or "://" in path or path.startswith("mailto:"):
        return link
    else:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    page = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if page is None or (ROOT / path).is_dir():
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{GITHUB}/{kind}/main/{path}{hash_}{section}"
    here = posixpath.dirname(source.removeprefix("docs/")) if source.startswith("docs/") else ""
    return posixpath.relpath(page, here or ".") + hash_ + section


def _with_lines_before_lists(markdown: str) -> str:
    lines: list[str] = []
    code = False
    for line in markdown.split("\n"):
        before = lines[-1] if lines else ""
        text_before = before.strip() and not _ITEM.match(before.lstrip()) and not before.startswith(" ")
        if not code and _ITEM.match(line) and text_before:
            lines.append("")
        code ^= line.startswith("```")
        lines.append(line)
    return "\n".join(lines)
