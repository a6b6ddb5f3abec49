"""The documents say what is there: links lead somewhere, files that are named exist, and the size
of the core is true."""

import ast
import itertools
import re

import pytest

from tests.product_files import ROOMS, ROOT, matching

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "bench/README.md"]
PAGES += [*matching("docs/*.md"), *matching("examples/**/README.md")]
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


def test_the_core_is_as_large_as_the_documents_say():
    """The core is the files of the reading tour; no command prints this number."""
    page = ROOT / "docs/reading.md"
    links = dict.fromkeys(link for link in LINK.findall(page.read_text()) if link.endswith(".py"))
    files = [(page.parent / link).resolve() for link in links]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    for name in ("README.md", "docs/reading.md"):
        (said,) = re.findall(r"([\d,]+) lines of\s+Python", (ROOT / name).read_text())
        assert abs(int(said.replace(",", "")) - lines) <= 0.02 * lines, (name, lines)


def test_no_docstring_follows_another():
    """Of two in a row, one belongs to another field."""

    def is_text(node):
        return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)

    for room in ROOMS:
        for path in matching(f"{room}/**/*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                body = node.body if isinstance(node, ast.ClassDef | ast.Module) else []
                pairs = itertools.pairwise(body)
                assert not any(is_text(a) and is_text(b) for a, b in pairs), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    for name in re.findall(r"`([\w.]+/[\w/]+\.py)`", page.read_text()):
        # Some pages name them as imports do, from within the engine.
        assert any((ROOT / room / name).is_file() for room in ("", "nanoactor")), name


def test_both_pages_on_ascend_have_the_same_figures():
    """Of what a decode step asks of the host: the Chinese page had drifted."""

    def figures(name):
        text = (ROOT / "docs" / name).read_text()
        modes = ("| `npugraph`", "| `max-autotune`", "| `reduce-overhead`", "| `eager`")
        rows = [row for row in text.splitlines() if row.startswith(modes)]
        return [re.findall(r"\d+", row) for row in rows], re.findall(r"\d+ \+ 1", text)

    assert figures("ascend.md") == figures("ascend.zh.md")
    assert len(figures("ascend.md")[0]) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rows_of_a_table_have_the_same_cells(page):
    """A row that is broken over two lines ends its table."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = table.splitlines()
        cells = {len(re.findall(r"(?<!\\)\|", row)) for row in rows if row.rstrip().endswith("|")}
        assert len(cells) == 1, rows[0]
        assert all(row.rstrip().endswith("|") for row in rows), rows
