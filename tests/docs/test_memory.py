"""Tables of sizes in docs/ are those that the engine's classes give."""

import pytest

from tests.docs.memory_table import TABLES, marked, models
from tests.product_files import ROOT

CASES = [(page, title) for page, tables in TABLES.items() for title in tables]


@pytest.mark.parametrize(("page", "title"), CASES)
def test_a_page_has_the_table(page, title):
    text = (ROOT / "docs" / page).read_text()
    assert marked(title, TABLES[page][title]()) in text, "run python -m tests.docs.memory_table"


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-1.7B", 1.721),
        ("Qwen3-8B", 8.191),
        ("Qwen3-32B", 32.762),
        ("Qwen3-30B-A3B", 30.532),
        ("Qwen3-235B-A22B", 235.094),
    ],
)
def test_parameters_are_those_that_the_models_are_known_for(name, billions):
    """An error in the sizes of a configuration would show here."""
    assert abs(models()[name].parameters / 1e9 - billions) < 0.001


def test_a_token_takes_what_an_engine_has_allocated():
    """12,055 blocks of 64 tokens on an H200, as docs/memory.md says, with 139 GiB free."""
    size = models()["Qwen3-8B"]
    taken = size.weights + 12_055 * 64 * size.token
    assert 0.95 < taken / (0.9 * 139 * (1 << 30)) < 1.0
