"""docs/upgrading.md has the present wire version and names public modules that exist."""

import importlib.util
import re

import nanoactor
from nanoactor.fleet.wire import VERSION
from tests.product_files import ROOT

TEXT = (ROOT / "docs" / "upgrading.md").read_text()


def test_the_wire_version_is_the_codes():
    (said,) = re.findall(r"wire\.py\), now (\d+)\.", TEXT)
    assert int(said) == VERSION


def test_public_modules_are_there():
    row = next(line for line in TEXT.splitlines() if line.startswith("| Python |"))
    modules = [name for name in re.findall(r"`(nanoactor[\w.]*)`", row) if "__" not in name]
    assert len(modules) == 3
    assert all(importlib.util.find_spec(name) for name in modules)


def test_the_pinned_version_is_the_release():
    (pinned,) = re.findall(r"`nanoactor==([\d.]+)\.\*`", TEXT)
    assert nanoactor.RELEASE.startswith(f"{pinned}.")


def test_narrow_bounds_are_those_of_the_project():
    project = (ROOT / "pyproject.toml").read_text()
    assert "transformers>=4.56,<6" in project
    assert 'ray = ["ray[serve]>=2.60,<2.61"]' in project
    assert 'requires-python = ">=3.11,<3.14"' in project
