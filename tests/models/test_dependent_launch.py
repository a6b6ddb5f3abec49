"""Kernels that may start before the previous one has ended: each of them waits for it first."""

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "models/devices/cuda/kernels"


def decorator_of(node):
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def functions(text):
    """All functions of a module that are compiled, by name."""
    return {
        node.name: node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and "triton.jit" in map(decorator_of, node.decorator_list)
    }


def launched(text):
    """Names of the kernels that are launched with `dependent_launch()`, and of all others."""
    early, others = set(), set()
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
            continue
        options = [ast.unparse(k.value) for k in node.keywords if k.arg is None]
        (early if "dependent_launch()" in options else others).add(ast.unparse(node.func.value))
    return early, others


def mistakes(text):
    """What is wrong with a module's kernels."""
    compiled, (early, others) = functions(text), launched(text)
    for name in sorted(early):
        body = compiled[name].body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        if ast.unparse(body[0]) != "await_previous(overlaps)":
            yield f"{name} does not wait first"
    for name in sorted(others & compiled.keys()):
        if "await_previous" in ast.unparse(compiled[name]):
            yield f"{name} is launched without the options"


MODULES = [path for path in FOLDER.glob("*.py") if "**dependent_launch()" in path.read_text()]


def test_the_kernels_between_products_start_early():
    early = set().union(*(launched(path.read_text())[0] for path in MODULES))
    assert {"_rms_norm", "_quantize", "_multiply", "_decode_chunks", "_align_blocks"} <= early
    assert len(early) >= 16


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_kernel_that_may_start_early_waits_before_anything_else(path):
    """Its results must not be read before those of all kernels before it."""
    assert not list(mistakes(path.read_text()))


def test_mistakes_are_found():
    module = """
@triton.jit
def _late(x, overlaps):
    y = tl.load(x)
    await_previous(overlaps)

@triton.jit
def _usual(x, overlaps):
    '''Does something.'''
    await_previous(overlaps)

def run():
    _late[(1,)](x, **dependent_launch())
    _usual[(1,)](x, num_warps=4)
"""
    assert list(mistakes(module)) == [
        "_late does not wait first",
        "_usual is launched without the options",
    ]


def test_the_interpreter_launches_nothing_early():
    triton = pytest.importorskip("triton")
    from nanoactor.models.devices.cuda.kernels import dependent_launch

    if isinstance(dependent_launch.await_previous, triton.JITFunction):
        pytest.skip("kernels are compiled here")
    assert dependent_launch.dependent_launch() == {"overlaps": False}
