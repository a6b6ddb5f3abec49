"""Pages of the site that are not files in docs/, and links between all pages. Needs no MkDocs."""

from __future__ import annotations

import ast
import dataclasses
import posixpath
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
PAGES: Mapping[str, str] = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "bench/README.md",
}
"""Pages whose source lies outside docs/, by their name in the site."""
TRANSLATED: Mapping[str, str] = {"index.zh.md": "docs/README.zh.md"}
"""Sources of translations of these pages, which need not exist."""


class DeadLink(Exception):
    """A link that leads nowhere."""


# -- the reference of the Python API ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ReferencePage:
    """A page of the API reference."""

    title: str
    text: str
    modules: tuple[str, ...]
    """Modules and packages whose public names the page documents."""


REFERENCE: Mapping[str, ReferencePage] = {
    "engines": ReferencePage(
        "Engines",
        "`AsyncLLM` is the engine. `LLM` is the same engine for programs without asyncio.",
        ("nanoactor.api",),
    ),
    "options": ReferencePage(
        "Options",
        "The options of `AsyncLLM(...)`, `LLM(...)` and the command line, where names are written "
        "with hyphens.",
        ("nanoactor.options",),
    ),
    "parameters": ReferencePage(
        "Request parameters",
        "What a request may ask for.",
        (
            "nanoactor.requests.params",
            "nanoactor.requests.structured_outputs",
            "nanoactor.requests.pooling_params",
            "nanoactor.vision",
        ),
    ),
    "outputs": ReferencePage(
        "Outputs",
        "What a request returns.",
        ("nanoactor.requests.outputs", "nanoactor.requests.pooling_outputs"),
    ),
    "errors": ReferencePage(
        "Errors",
        "Every error that the engine raises is a `NanoactorError`.",
        ("nanoactor.errors",),
    ),
}
"""The pages of the API reference by name."""
_INHERITS = ("AsyncLLM",)
"""Classes that are documented with the methods of their bases."""


def public_names() -> dict[str, str]:
    """Return the names that `nanoactor` exports, with their modules, in alphabetical order."""
    tree = ast.parse((ROOT / "nanoactor" / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            homes: dict[str, str] = ast.literal_eval(node.value)
            return dict(sorted(homes.items(), key=lambda item: item[0].lower()))
    raise LookupError("nanoactor/__init__.py has no _HOMES")


def page_of(module: str) -> str:
    """Return the name of the reference page that documents a module's public names."""
    for name, page in REFERENCE.items():
        if any(module == one or module.startswith(f"{one}.") for one in page.modules):
            return name
    raise LookupError(f"no page of the API reference has the names of {module}")


def reference_page(name: str) -> str:
    """Return the source of a page of the API reference; "index" is the overview."""
    if name == "index":
        rows = (f"| [{page.title}]({one}.md) | {page.text} |" for one, page in REFERENCE.items())
        return (
            "# Python API\n\nThe names that `nanoactor` exports. All other modules may change in "
            "any release ([versions and upgrades](../upgrading.md)).\n\n"
            "| page | contents |\n| --- | --- |\n" + "\n".join(rows) + "\n"
        )
    page = REFERENCE[name]
    parts = [f"# {page.title}\n\n{page.text}\n"]
    if name == "errors":
        parts.append("[Troubleshooting](../troubleshooting.md#errors-by-name) lists what to do.\n")
    for public, module in public_names().items():
        if page_of(module) == name:
            inherited = str(public in _INHERITS).lower()
            options = f"    options:\n      inherited_members: {inherited}"
            parts.append(f"::: {module}.{public}\n{options}")
    return "\n".join(parts) + "\n"


# -- sources ------------------------------------------------------------------------------


def extra_pages() -> list[str]:
    """Return the names of the site's pages that have no file of that name in docs/."""
    there = [name for name, source in TRANSLATED.items() if (ROOT / source).exists()]
    return [*PAGES, *there, *(f"api/{name}.md" for name in ("index", *REFERENCE))]


def source_of(name: str) -> str:
    """Return the path of the file with a page's source, relative to the repository."""
    return PAGES.get(name) or TRANSLATED.get(name) or f"{DOCS}/{name}"


def repository() -> str:
    """Return the URL of the repository, from `[project.urls]` in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["urls"]["Repository"]).rstrip("/")


# -- links --------------------------------------------------------------------------------

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *$", re.MULTILINE)
_NAMES = {inner: outer for outer, inner in {**PAGES, **TRANSLATED}.items()}
"""Names in the site, by source."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a page is shown."""

    name: str
    """Name in the site: `server.md`, `server.zh.md`, `api/errors.md`."""
    language: str
    """Language of the part of the site: "en", or "zh", which shows English pages without a
    translation too."""
    url: str
    """URL relative to the root of the site: `zh/server/`."""


def rewritten(text: str, place: Place, base: str) -> str:
    """Return a page's source with links that work in the site.

    Links to pages become relative to `place`, in its language where there is a translation. Links
    to other files lead to the repository at `base`. Raises `DeadLink` if a file does not exist.
    """
    parts, at = [], 0
    for code in _FENCE.finditer(text):
        parts += [_rewritten(text[at : code.start()], place, base), code[0]]
        at = code.end()
    return "".join([*parts, _rewritten(text[at:], place, base)])


def _rewritten(text: str, place: Place, base: str) -> str:
    source = source_of(place.name)

    def change(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        name = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / name).exists():
            raise DeadLink(f"{source}: the link to {target} leads nowhere")
        inner = _NAMES.get(name) or _inside(name)
        if inner is not None:
            return _to_page(mark, label, inner, anchor, place)
        kind = "tree" if (ROOT / name).is_dir() else "blob"
        return f"[{label}]({base}/{kind}/main/{name}{hash_}{anchor})"

    return _LINK.sub(change, text)


def _inside(name: str) -> str | None:
    """Return the name in the site of a file in docs/; None for any other file."""
    folder, _, inner = name.partition("/")
    is_file = folder == DOCS and "." in inner and not inner.startswith("site/")
    return inner if is_file else None


def _to_page(mark: str, label: str, inner: str, anchor: str, place: Place) -> str:
    """Return a link to a page or an image of the site.

    The plugin for languages directs a link to `server.md` to the translation in the part of the
    site for another language. A link across languages is therefore written in HTML.
    """
    english = re.sub(r"\.zh\.md$", ".md", inner)
    to_translation, is_translation = english != inner, place.name.endswith(".zh.md")
    own = is_translation and english == place.name.replace(".zh.md", ".md")
    if to_translation and place.language == "en":
        return _across(label, "zh", english, anchor, place)
    if own and not to_translation:
        return _across(label, "", english, anchor, place)
    if anchor and place.language == "zh" and not to_translation:
        anchor = translated_anchor(english, anchor)
    up = posixpath.relpath(english, posixpath.dirname(place.name) or ".")
    return f"{mark}[{label}]({up}{'#' if anchor else ''}{anchor})"


def _across(label: str, part: str, english: str, anchor: str, place: Place) -> str:
    """Return a link to a page in another part of the site: "zh", or "" for English."""
    page = english.removesuffix(".md")
    home = posixpath.join(part, "" if page == "index" else f"{page}/")
    up = posixpath.relpath(".", place.url.rstrip("/") or ".")
    return f'<a href="{up}/{home}{"#" if anchor else ""}{anchor}">{label}</a>'


def anchors(text: str) -> list[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    titles = _HEADING.findall(_FENCE.sub("", text))
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def translated_anchor(english: str, anchor: str) -> str:
    """Return the anchor of the same heading in the page's translation. Headings of both agree in
    their order, which `tests/test_translations.py` checks. Without a translation, return the
    anchor itself."""
    translation = ROOT / source_of(english.replace(".md", ".zh.md"))
    if not translation.exists():
        return anchor
    ours = anchors((ROOT / source_of(english)).read_text())
    theirs = anchors(translation.read_text())
    if anchor not in ours or len(ours) != len(theirs):
        return anchor
    return theirs[ours.index(anchor)]
