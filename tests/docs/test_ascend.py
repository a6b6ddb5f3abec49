"""docs/ascend.md counts the launches that rung 4 counts."""

import ast
import re

import pytest

from tests.product_files import ROOT

RUNG = ROOT / "tests" / "npu" / "wheel" / "test_soft_device.py"
LAYERS = 28
"""Of Qwen3-0.6B, the page's example."""


def constant(name):
    for node in ast.parse(RUNG.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise KeyError(name)


@pytest.mark.parametrize(
    ("page", "example", "more"),
    [
        ("ascend.md", r"(\d+) \+ 1 with `eager`", r"this takes (\d+) more launches"),
        ("ascend.zh.md", r"在 `eager` 下为 (\d+) \+ 1 次", r"则多 (\d+) 次下发"),
    ],
)
def test_launches_are_those_that_are_counted(page, example, more):
    text = (ROOT / "docs" / page).read_text()
    each, once = constant("EAGER_LAUNCHES")
    assert f"| `eager` | {each} L + {once} |" in text
    assert int(re.search(example, text)[1]) == each * LAYERS + once
    assert int(re.search(more, text)[1]) == constant("SAMPLED_LAUNCHES")
