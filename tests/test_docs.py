"""Files, sections, modules and names that the documentation mentions exist."""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BESIDE_CODE = [
    ROOT / "benchmarks/noisy_neighbour/README.md",
    ROOT / "tests/EDGES.md",
    ROOT / "tests/gpu/RUNS.md",
    *sorted((ROOT / "server").rglob("DESIGN.md")),
]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")), *BESIDE_CODE]
HOME = re.compile(r"https://github\.com/greenlane-server/greenlane/(?:blob|tree)/main/(.*)")
"""README.md is the package's description elsewhere too, so its links are absolute."""
FOLDERS = "benchmarks|deploy|docs|engines|examples|greenlane|partitions|scripts|server|tests"
SETTINGS = "".join(path.read_text() for path in (ROOT / "server" / "config").glob("*.py"))
ROUTES = {
    re.sub(r"\\{\w+\\}", r"\\w+", re.escape(path)): json.loads(methods)
    for name in ("openapi", "admin_openapi")
    for path, methods in re.findall(r"^paths (\S+): (.*)$", (ROOT / f"tests/server/api/{name}.txt").read_text(), re.MULTILINE)
}
"""The methods of each route, by a pattern of its paths."""
LAB = ROOT / "docs/lab"
"""Notes that are not edited: what they name may have gone, and they link to other notes and to recorded results only."""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=_name)
current_page = pytest.mark.parametrize("page", [page for page in PAGES if page.parent != LAB], ids=_name)


@every_page
def test_links_lead_to_files_and_sections_that_exist(page: Path) -> None:
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        home = HOME.fullmatch(link)
        if home is None and re.match(r"\w+://", link):
            continue
        path, _, section = (home[1] if home else link).partition("#")
        target = (ROOT if home else page.parent) / path if path else page
        if not target.exists() or (section and section not in _sections(target)):
            missing.append(link)
    assert missing == []


def test_notes_of_the_laboratory_are_listed_by_date_and_topic() -> None:
    listed = re.findall(r"^- \[(\d{4}-\d\d-\d\d)\]\(\1-([\w-]+)\.md\): \w", (LAB / "README.md").read_text(), re.MULTILINE)
    assert [f"{date}-{topic}" for date, topic in listed] == sorted(page.stem for page in LAB.glob("2*.md"))


@pytest.mark.parametrize(("page", "most"), [("README.md", 450), ("docs/performance.md", 2500), ("docs/architecture.md", 3500)])
def test_pages_that_are_read_first_stay_short(page: str, most: int) -> None:
    assert len((ROOT / page).read_text().split()) <= most


def test_all_pages_that_users_read_are_short_together() -> None:
    """Where a page says more, another one can say less, or a note of the laboratory or a DESIGN.md says it."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(page for page in (ROOT / "docs").rglob("*.md") if page.parent != LAB)]
    assert sum(len(page.read_text().split()) for page in pages) <= 40_000


@current_page
def test_paths_in_code_exist(page: Path) -> None:
    named = re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w./@-]*\w", page.read_text())
    folders = ROOT, ROOT / "tests"  # tests/EDGES.md leaves out the latter.
    found = [path for path in named if _is_module(path) or any((folder / path).exists() for folder in folders)]
    assert sorted({*named} - {*found}) == []


@current_page
def test_modules_in_code_exist(page: Path) -> None:
    named = re.findall(r"(?<![\w./-])(?:benchmarks|engines|partitions|server)(?:\.\w+)+", _code(page))
    assert [name for name in named if not name.endswith((".toml", ".service")) and not _is_named(name)] == []


def test_modules_that_the_list_of_packages_names_alone_exist() -> None:
    """`loads` and `observer` were none."""
    packages = (ROOT / "docs/architecture.md").read_text().partition("\n## Packages\n")[2].partition("\n## ")[0]
    sources = [path for package in ("greenlane", "server", "engines", "partitions") for path in (ROOT / package).rglob("*.py")]
    named = set(re.findall(r"`([a-z_]+)`", packages))
    assert len(named) > 50
    assert sorted(named - {path.stem for path in sources} - {path.parent.name for path in sources}) == []


def test_members_of_classes_that_are_named_exist() -> None:
    """In pages and in docstrings; `Frontend.page_out` was none. Only of our classes, with what those of the same name have."""
    sources = [path for package in ("greenlane", "server", "engines", "partitions") for path in (ROOT / package).rglob("*.py")]
    classes = [node for path in sources for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    words = {node.name: set[str]() for node in classes}
    for node in classes:
        words[node.name] |= set(re.findall(r"\w+", ast.unparse(node)))
    for _ in range(4):  # Bases, and theirs: as deep as they are.
        for node in classes:
            words[node.name] |= set().union(*(words.get(ast.unparse(base).partition("[")[0], ()) for base in node.bases))
    wrong = [
        f"{_name(path)}: {name}.{member}"
        for path in [*sources, *(page for page in PAGES if page.parent != LAB)]
        for name, member in re.findall(r"`(?:[a-z_]+\.)*([A-Z]\w+)\.(\w+)[`(]", path.read_text())
        if name in words and member not in words[name]
    ]
    assert wrong == []


@current_page
def test_routes_are_named_with_a_method_that_they_have(page: Path) -> None:
    """`GET /v2/repository/index` was in two rows of the alerts, and is 405."""
    wrong = []
    for method, path in re.findall(r"\b(GET|POST|PUT) (/[\w/]+)", page.read_text()):
        methods = [methods for route, methods in ROUTES.items() if re.fullmatch(route, path)]
        if methods and not any(method.lower() in each for each in methods):
            wrong.append(f"{method} {path}")
    assert wrong == []


def _prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def _code(page: Path) -> str:
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL))


def _sections(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _is_module(path: str) -> bool:
    """Whether this is a module without its suffix, possibly followed by a name in it, such as server/http/body.Body."""
    return _is_named(path.replace("/", "."))


def _is_named(name: str) -> bool:
    """Whether this is a module, a name in one, or a key of `[server]` in the configuration."""
    words = name.split(".")
    if words[0] == "server" and len(words) == 2 and re.search(rf"^    {words[1]}:", SETTINGS, re.MULTILINE):
        return True
    for end in range(len(words), 0, -1):
        place = ROOT.joinpath(*words[:end])
        sources = [place.with_suffix(".py"), place / "__init__.py"]
        if found := next((source for source in sources if source.is_file()), None):
            text = found.read_text()
            return all(re.search(rf"\b{word}\b", text) for word in words[end:])
    return False
