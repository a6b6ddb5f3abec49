"""A Chinese page says what its English page says: headings, code, tables, links and numbers agree.

Code spans, links and numbers may change their order, but only between two headings. So the line of
a difference can be reported: if a page lacks a value, that of the heading above.
A link is named as from its English page's folder, wherever its own page is.
"""

import os
import re
from bisect import bisect
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.product_files import ROOT, matching

PAGES = matching("docs/*.zh.md") + sorted(ROOT.glob("*.zh.md"))
NOTE = re.compile(r"^English: \[.*?(?=\n\s*\n)", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#{1,6}) +(.*)", re.MULTILINE)
FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\s*\n).)+?)(?<!`)\1(?!`)", re.DOTALL)
TABLE = re.compile(r"(?:^ *\|.*\n?)+", re.MULTILINE)
LINK = re.compile(
    r"\]\((?P<inline>[^)\s]+)[^)]*\)|^ *\[[^]]+\]: *(?P<reference>\S+)"
    r'|<(?P<plain>https?://[^>]+)>|(?:href|src)="(?P<html>[^"]+)"',
    re.MULTILINE,
)
NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?: ?%)?")


def english_of(page):
    """Return the page next to it, or that of the folder above for docs/README.zh.md."""
    folder = page.parent
    if page.name == "README.zh.md" and folder.name == "docs":
        folder = folder.parent
    return folder / page.name.replace(".zh.md", ".md")


def blank(pattern, text, count=0):
    """Put spaces in the place of what matches, so that all other lines keep their numbers."""
    return pattern.sub(lambda match: re.sub(r"\S", " ", match[0]), text, count)


def found(pattern, text, value):
    """Return the line and the value of each match."""
    matches = pattern.finditer(text)
    return [(text.count("\n", 0, match.start()) + 1, value(match)) for match in matches]


def read(page):
    """Return a page's text without a Chinese page's note on its English page."""
    return blank(NOTE, page.read_text(), 1) if page.name.endswith(".zh.md") else page.read_text()


def without_blocks(page):
    return blank(FENCE, read(page))


def without_code(page):
    return blank(SPAN, without_blocks(page))


def headings(page):
    return found(HEADING, without_blocks(page), lambda match: match[1])


def code_blocks(page):
    return found(FENCE, read(page), lambda match: match[0])


def tables(page):
    """Return each row: its table, its place there and its columns."""
    text = without_code(page)
    rows = []
    for number, (line, table) in enumerate(found(TABLE, text, lambda match: match[0]), 1):
        for place, row in enumerate(table.splitlines()):
            columns = len(re.findall(r"(?<!\\)\|", row)) - 1
            rows.append((line + place, f"table {number}, row {place + 1}, columns {columns}"))
    return rows


def code_spans(page):
    return found(SPAN, without_blocks(page), lambda match: " ".join(match[2].split()))


def links(page):
    """Return the targets in English; an English page's links to Chinese pages do not count."""
    targets = found(LINK, without_code(page), lambda match: match[match.lastgroup])
    if not page.name.endswith(".zh.md"):
        targets = [(line, target) for line, target in targets if ".zh.md" not in target]
    return [(line, in_english(target, page)) for line, target in targets]


def numbers(page):
    text = blank(LINK, without_code(page))
    return found(NUMBER, text, lambda match: match[0].replace(" ", ""))


def in_english(target, page):
    """Return the English target from the English page's folder, with its heading's anchor."""
    path, _, anchor = target.partition("#")
    if "://" in path:
        return target
    base = english_of(page) if page.name.endswith(".zh.md") else page
    file = english = Path(os.path.normpath(page.parent / path)) if path else page
    if file.name.endswith(".zh.md"):
        english = english_of(file)
        pairs = zip(anchors(file), anchors(english), strict=False) if anchor else ()
        anchor = dict(pairs).get(anchor, anchor)
    path = os.path.relpath(english, base.parent) if path else ""
    return f"{path}#{anchor}" if anchor else path


def anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    names = [match[2].lower() for match in HEADING.finditer(without_blocks(page))]
    return [re.sub(r"[^\w\- ]", "", name).replace(" ", "-") for name in names]


def in_order(english, chinese, values):
    """Return the first pair that differs; a page that has too few is named by its last line."""
    last = [(len(read(page).splitlines()), None) for page in (english, chinese)]
    for pair in zip_longest(values(english), values(chinese)):
        pair = [item or end for item, end in zip(pair, last, strict=True)]
        if pair[0][1] != pair[1][1]:
            return pair
    return None


def by_section(english, chinese, values):
    """Return what differs first between two headings, in any order."""
    ours, theirs = sections(english, values), sections(chinese, values)
    for (line, items), (other_line, others) in zip(ours, theirs, strict=True):
        missing, added = unmatched(items, others), unmatched(others, items)
        if missing or added:
            return [*missing, (line, None)][0], [*added, (other_line, None)][0]
    return None


def sections(page, values):
    """Return the line of each heading, with what follows it up to the next."""
    starts = [1, *(line for line, _ in headings(page))]
    parts = [(start, []) for start in starts]
    for item in values(page):
        parts[bisect(starts, item[0]) - 1][1].append(item)
    return parts


def unmatched(items, others):
    """Return the items whose values are not among the others, each of which matches one item."""
    spare = Counter(value for _, value in others)
    rest = []
    for line, value in items:
        spare[value] -= 1
        if spare[value] < 0:
            rest.append((line, value))
    return rest


PROPERTIES = {
    headings: in_order,
    code_blocks: in_order,
    tables: in_order,
    code_spans: by_section,
    links: by_section,
    numbers: by_section,
}


def first_difference(chinese):
    """Return a line of text about it, or None. Headings come first: sections rely on them."""
    english = english_of(chinese)
    for values, compare in PROPERTIES.items():
        if different := compare(english, chinese, values):
            (line, ours), (other_line, theirs) = different
            places = f"{english.name}:{line} has {ours!r}, {chinese.name}:{other_line} {theirs!r}"
            return f"{values.__name__}: {places}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_chinese_page_agrees_with_its_english_page(page):
    assert first_difference(page) is None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_english_page_is_named_after_the_title(page):
    title, note = re.split(r"\n\s*\n", page.read_text())[:2]
    english = english_of(page)
    target = os.path.relpath(english, page.parent)
    assert title.startswith("# ")
    assert note.startswith(f"English: [{english.name}]({target})")
    assert "以英文版为准" in note


ENGLISH = """# Pages ([中文](page.zh.md))

One `run` in 2.5 s ([how](#the-end)), `stop` in 1,024; see [others](other.md) from 3.11.2.

| a | b |
| --- | --- |
| `x | y` | 30 % |

```console
run 1  # no heading
```

### Costs

None: `free`.

## The end
"""
CHINESE = """# 页面

English: [page.md](page.md)。以英文版为准。

3.11.2 起见[其他页面](other.zh.md)：`stop` 为 1,024，`run`（[方法](#完)）为 2.5 s。

| 甲 | 乙 |
| --- | --- |
| `x | y` | 30% |

```console
run 1  # no heading
```

### 费用

免费：`free`。

## 完
"""


def difference(folder, old, new):
    """Return that between the two pages, after a change to the Chinese one."""
    assert old in CHINESE
    (folder / "page.md").write_text(ENGLISH)
    (folder / "page.zh.md").write_text(CHINESE.replace(old, new))
    return first_difference(folder / "page.zh.md")


def test_a_faithful_page_passes(tmp_path):
    assert difference(tmp_path, "", "") is None


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("### 费用", "## 费用", "headings: page.md:13 has '###', page.zh.md:15 '##'"),
        ("## 完\n", "", "headings: page.md:17 has '##', page.zh.md:18 None"),
        ("# 页面", "# 页面\n\n# 又一页", "headings: page.md:13 has '###', page.zh.md:3 '#'"),
        ("| `x | y` | 30% |\n", "", "tables: page.md:7 has 'table 1, row 3, columns 2', "),
        ("| 30% |", "| 30% | |", "page.zh.md:9 'table 1, row 3, columns 3'"),
        (
            "| 甲 | 乙 |\n| --- | --- |\n| `x | y` | 30% |\n",
            "`x | y` 30%\n",
            ", page.zh.md:17 None",
        ),
        ("`run`", "run", "code_spans: page.md:3 has 'run', page.zh.md:1 None"),
        ("`run`", "`walk`", "code_spans: page.md:3 has 'run', page.zh.md:5 'walk'"),
        ("：`free`", "：`free`、`stop`", "code_spans: page.md:13 has None, page.zh.md:17 'stop'"),
        ("other.zh.md", "another.zh.md", "has 'other.md', page.zh.md:5 'another.md'"),
        ("(#完)", "(#费用)", "links: page.md:3 has '#the-end', page.zh.md:5 '#costs'"),
        ("1,024", "1024", "numbers: page.md:3 has '1,024', page.zh.md:5 '1024'"),
        ("2.5 s", "2.6 s", "numbers: page.md:3 has '2.5', page.zh.md:5 '2.6'"),
        ("3.11.2", "3.11.3", "numbers: page.md:3 has '3.11.2', page.zh.md:5 '3.11.3'"),
        ("30%", "30", "numbers: page.md:7 has '30%', page.zh.md:9 '30'"),
        ("免费", "第 1 项免费", "numbers: page.md:13 has None, page.zh.md:17 '1'"),
    ],
)
def test_a_difference_is_found(tmp_path, old, new, expected):
    assert expected in difference(tmp_path, old, new)


@pytest.mark.parametrize("new", ["run 2", "run 1 ", "# 注释\nrun 1"])
def test_a_code_block_that_differs_is_found(tmp_path, new):
    message = difference(tmp_path, "run 1", new)
    assert message.startswith("code_blocks: page.md:9 has '```console\\nrun 1 ")
    assert ", page.zh.md:11 '```console" in message


ENGLISH_HOME = """# Home

[中文](docs/README.zh.md)

[Page](docs/page.md#the-end), [code](src/a.py), [web](https://a.org/b) ![one](docs/images/a.svg)
"""
CHINESE_HOME = """# 首页

English: [README.md](../README.md)。以英文版为准。

[页面](page.zh.md#完)、[代码](../src/a.py)、[网站](https://a.org/b) ![一](images/a.svg)
"""


def home_difference(root, old, new):
    """Return that between a README and docs/README.zh.md, after a change to the Chinese one."""
    assert old in CHINESE_HOME
    (root / "docs").mkdir()
    difference(root / "docs", "", "")
    (root / "README.md").write_text(ENGLISH_HOME)
    (root / "docs/README.zh.md").write_text(CHINESE_HOME.replace(old, new))
    return first_difference(root / "docs/README.zh.md")


@pytest.mark.parametrize(("old", "new"), [("", ""), ("page.zh.md#完", "page.md#the-end")])
def test_links_are_compared_from_each_pages_own_folder(tmp_path, old, new):
    assert home_difference(tmp_path, old, new) is None


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("#完", "#费用", "'docs/page.md#the-end', README.zh.md:5 'docs/page.md#costs'"),
        ("(../src", "(src", "README.md:5 has 'src/a.py', README.zh.md:5 'docs/src/a.py'"),
        ("(images", "(docs/images", "'docs/images/a.svg', README.zh.md:5 'docs/docs/images/a.svg'"),
        ("a.org/b", "a.org/c", "'https://a.org/b', README.zh.md:5 'https://a.org/c'"),
    ],
)
def test_a_link_that_leads_elsewhere_is_found(tmp_path, old, new, expected):
    assert expected in home_difference(tmp_path, old, new)


def test_a_page_may_link_to_either_readme(tmp_path):
    home_difference(tmp_path, "", "")
    english, chinese = tmp_path / "docs/page.md", tmp_path / "docs/page.zh.md"
    english.write_text(ENGLISH.replace("other.md", "../README.md#home"))
    for target in ("README.zh.md#首页", "../README.md#home"):
        chinese.write_text(CHINESE.replace("other.zh.md", target))
        assert first_difference(chinese) is None
