"""The documents say what is there: links lead somewhere, and the size of the core is true."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "bench/README.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page):
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def core():
    """The files of the reading tour."""
    page = ROOT / "docs/reading.md"
    links = dict.fromkeys(link for link in LINK.findall(page.read_text()) if link.endswith(".py"))
    return [(page.parent / link).resolve() for link in links]


def test_the_core_is_as_large_as_the_documents_say():
    lines = sum(len(path.read_text().splitlines()) for path in core())
    for page in ("README.md", "docs/reading.md"):
        (said,) = re.findall(r"([\d,]+) lines of\s+Python", (ROOT / page).read_text())
        assert abs(int(said.replace(",", "")) - lines) <= 0.02 * lines, (page, lines)


QUESTIONS = {"What", "How", "Whether", "Who", "Whose", "Which", "Where", "When", "Why"}
SOURCES = [
    path
    for room in ("nanoactor", "models", "runtime", "bench")
    for path in sorted((ROOT / room).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents)
]


def docstrings(path):
    """(name, docstring) of a module and of all that it defines."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield getattr(node, "name", path.name), text


def test_no_docstring_opens_like_an_indirect_question():
    """PEP 257: say what it does, as a command; say what it is, as a noun."""
    found = [
        f"{path.relative_to(ROOT)}: {name}: {text.splitlines()[0]}"
        for path in SOURCES
        for name, text in docstrings(path)
        if text.split()[0].strip(",:;") in QUESTIONS
    ]
    assert len(SOURCES) > 150
    assert not found, "\n".join(found)


def test_both_pages_on_ascend_have_the_same_figures():
    """Of what a decode step asks of the host: the Chinese page had drifted."""

    def figures(name):
        text = (ROOT / "docs" / name).read_text()
        modes = ("| `npugraph`", "| `max-autotune`", "| `reduce-overhead`", "| `eager`")
        rows = [row for row in text.splitlines() if row.startswith(modes)]
        return [re.findall(r"\d+", row) for row in rows], re.findall(r"\d+ \+ 1", text)

    assert figures("ascend.md") == figures("ascend.zh.md")
    assert len(figures("ascend.md")[0]) >= 4
