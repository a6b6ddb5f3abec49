"""The site's navigation lists every page once, and links of pages work in the site.

`make docs` builds the site and refuses dead links and anchors; it needs tools that tests do not.
"""

import importlib.util
import re
import sys

import pytest
import yaml

import nanoactor
from tests.product_files import ROOT, matching

SITE = ROOT / "docs" / "site"
BASE = "https://example.org/repository"


class Loader(yaml.SafeLoader):
    """Reads the configuration without the objects that MkDocs makes of its tags."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


@pytest.fixture(scope="module")
def config():
    return yaml.load((SITE / "mkdocs.yml").read_text(), Loader)


def loaded():
    spec = importlib.util.spec_from_file_location("pages", SITE / "pages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pages"] = module
    spec.loader.exec_module(module)
    return module


pages = loaded()


def leaves(nav):
    """The pages of a navigation, in its order."""
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from leaves(value) if isinstance(value, list) else [value]


def test_the_navigation_lists_every_page_once(config):
    listed = [*leaves(config["nav"])]
    there = {path.name for path in matching("docs/*.md") if not path.name.endswith(".zh.md")}
    wanted = there | {name for name in pages.extra_pages() if not name.endswith(".zh.md")}
    assert sorted(wanted - {*listed}) == [], "add these pages to the nav of docs/site/mkdocs.yml"
    assert sorted({*listed} - wanted) == [], "these pages of docs/site/mkdocs.yml do not exist"
    assert len(listed) == len({*listed}), "a page is listed twice"


def test_a_translation_has_its_english_page():
    translations = [path.name for path in ROOT.glob("docs/*.zh.md")]
    for name in {*translations} - {path.split("/")[1] for path in pages.TRANSLATED.values()}:
        assert (ROOT / "docs" / name.replace(".zh.md", ".md")).exists(), name


def test_pages_for_users_come_first(config):
    sections = [next(iter(section)) for section in config["nav"]]
    assert sections == ["Start", "Use", "Run", "Devices and models", "Reference", "Develop"]


def test_a_dead_link_or_anchor_ends_the_build(config):
    assert config["strict"] is True
    levels = [level for part in config["validation"].values() for level in part.values()]
    assert set(levels) == {"warn"}
    assert len(levels) == 7


def test_the_site_loads_nothing_from_other_hosts(config):
    assert config["theme"]["font"] is False
    assert "repo_url" not in config, "the theme would query its host for stars"
    text = (SITE / "mkdocs.yml").read_text() + (SITE / "extra.css").read_text()
    assert not re.findall(r"https?://", text)


def test_the_reference_has_each_public_name_once():
    found = []
    for name in pages.REFERENCE:
        found += re.findall(r"^::: nanoactor\.[\w.]+\.(\w+)$", pages.reference_page(name), re.M)
    assert sorted(found) == sorted(nanoactor.__all__)
    overview = pages.reference_page("index")
    assert all(f"({name}.md)" in overview for name in pages.REFERENCE)


# -- links --------------------------------------------------------------------------------


def shown(text, name="server.md", language="en", url="server/"):
    return pages.rewritten(text, pages.Place(name, language, url), BASE)


@pytest.mark.parametrize(
    ("name", "link", "result"),
    [
        ("server.md", "[x](gpu.md)", "[x](gpu.md)"),
        ("server.md", "[x](#errors)", "[x](#errors)"),
        ("server.md", "[x](https://example.org)", "[x](https://example.org)"),
        ("server.md", "![x](images/page.png)", "![x](images/page.png)"),
        ("server.md", "[x](../README.md#which-torch)", "[x](index.md#which-torch)"),
        ("server.md", "[x](../bench/README.md)", "[x](benchmarks.md)"),
        ("server.md", "[x](../CHANGELOG.md)", "[x](changelog.md)"),
        ("server.md", "[x](../nanoactor/errors.py)", f"[x]({BASE}/blob/main/nanoactor/errors.py)"),
        ("server.md", "[`x`](../models/families)", f"[`x`]({BASE}/tree/main/models/families)"),
        ("index.md", "[x](docs/server.md#errors)", "[x](server.md#errors)"),
        ("index.md", "![x](docs/images/page.png)", "![x](images/page.png)"),
        ("benchmarks.md", "[x](../docs/gpu.md)", "[x](gpu.md)"),
        ("benchmarks.md", "[x](results)", f"[x]({BASE}/tree/main/bench/results)"),
    ],
)
def test_a_link_leads_to_the_same_file(name, link, result):
    assert shown(f"see {link}.", name) == f"see {result}."


def test_code_is_left_alone():
    block = "```python\n[x](nowhere.md)\n```\n"
    assert shown(block) == block


def test_a_link_to_nowhere_is_an_error():
    with pytest.raises(pages.DeadLink, match="nowhere.md"):
        shown("[x](nowhere.md)")
    with pytest.raises(pages.DeadLink, match="gone.py"):
        shown("[x](../nanoactor/gone.py)")


def test_links_between_languages():
    across = shown("[中文](ascend.zh.md)", "gpu.md", "en", "gpu/")
    assert across == '<a href="../zh/ascend/">中文</a>'
    back = shown("[English](ascend.md)", "ascend.zh.md", "zh", "zh/ascend/")
    assert back == '<a href="../../ascend/">English</a>'
    same = shown("[x](server.zh.md)", "ascend.zh.md", "zh", "zh/ascend/")
    assert same == "[x](server.md)"
    assert shown("[x](gpu.md)", "ascend.zh.md", "zh", "zh/ascend/") == "[x](gpu.md)"


def test_an_anchor_follows_its_heading_into_the_translation():
    """In the Chinese part, an English page without a translation links to Chinese ones."""
    english, chinese = (
        pages.anchors((ROOT / "docs" / name).read_text()) for name in ("ascend.md", "ascend.zh.md")
    )
    assert len(english) == len(chinese)
    link = shown(f"[x](ascend.md#{english[3]})", "gpu.md", "zh", "zh/gpu/")
    assert link == f"[x](ascend.md#{chinese[3]})"
    assert shown(f"[x](ascend.md#{english[3]})", "gpu.md") == f"[x](ascend.md#{english[3]})"


def test_anchors_are_those_of_github():
    text = "# The `/health` page\n```\n# no heading\n```\n## A, b - c\n## 健康检查与指标\n"
    assert pages.anchors(text) == ["the-health-page", "a-b---c", "健康检查与指标"]
