"""Hooks of the site, which `mkdocs.yml` names: they connect `pages.py` with MkDocs."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pages
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

MERMAID = pages.ROOT / ".venv-docs" / "mermaid.min.js"
"""The script that draws diagrams, which `make docs` installs. Without it, a diagram stays text."""
_SCRIPT = "site/mermaid.min.js"
_DIAGRAM = re.compile(r"^```mermaid$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> None:
    """Mark diagrams, so that the script draws them."""
    if MERMAID.exists():
        from pymdownx.superfences import fence_code_format

        fence = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
        config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that have no file of their name in docs/."""
    for source in pages.TRANSLATED.values():
        if file := files.get_file_from_path(source.removeprefix(f"{pages.DOCS}/")):
            files.remove(file)
    for name in pages.extra_pages():
        files.append(File(name, config.docs_dir, config.site_dir, config.use_directory_urls))
    return files


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    """Return the source of a page that has no file of its name in docs/."""
    name = page.file.src_uri
    if name.startswith("api/"):
        return pages.reference_page(Path(name).stem)
    return (pages.ROOT / pages.source_of(name)).read_text()


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links, and load the script of diagrams where there are any."""
    name, language = page.file.src_uri, page.file.locale_alternate_of
    if not name.startswith("api/"):
        place = pages.Place(name, language, page.url)
        try:
            text = pages.rewritten(text, place, pages.repository())
        except pages.DeadLink as error:
            raise PluginError(str(error)) from None
    if MERMAID.exists() and _DIAGRAM.search(text):
        up = posixpath.relpath(".", page.url.rstrip("/") or ".")
        text += f'\n\n<script src="{up}/{_SCRIPT}"></script>\n'
    return text


def on_post_build(config: MkDocsConfig) -> None:
    """Copy the script of diagrams."""
    if MERMAID.exists():
        target = Path(config.site_dir) / _SCRIPT
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(MERMAID.read_bytes())
