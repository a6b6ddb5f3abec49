"""Triton compiles a kernel again for arrays with another alignment, which must not happen while
requests wait."""

import ast

import pytest

from tests.models.test_dependent_launch import FOLDER, functions

OF_A_STEP = {
    "contexts",
    "given_positions",
    "given_token_ids",
    "positions",
    "sampled_ids",
    "slot_mapping",
    "slots",
    "token_ids",
}
"""Arrays that can be views of a larger one, from any row on."""


def unlisted(text):
    """Kernels, and their parameters of these names on whose alignment Triton specializes."""
    for name, node in functions(text).items():
        decorator = node.decorator_list[0]
        lists = {k.arg: k.value for k in getattr(decorator, "keywords", ())}
        listed = ast.literal_eval(lists.get("do_not_specialize_on_alignment", ast.List([])))
        if name.startswith("_"):  # others are functions that kernels call
            for argument in node.args.args:
                if argument.arg in OF_A_STEP and argument.arg not in listed:
                    yield name, argument.arg


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_kernels_accept_views_that_begin_at_any_row(path):
    assert not list(unlisted(path.read_text()))


def test_a_kernel_that_does_not_say_so_is_found():
    text = "@triton.jit(do_not_specialize=['rows'])\ndef _kernel(x, slots, rows): pass"
    assert list(unlisted(text)) == [("_kernel", "slots")]
    listed = text.replace("['rows']", "['rows'], do_not_specialize_on_alignment=['slots']")
    assert not list(unlisted(listed))
    assert list(unlisted("@triton.jit\ndef _kernel(positions): pass")) == [("_kernel", "positions")]
