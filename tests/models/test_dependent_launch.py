"""Kernels that may start before the previous one has ended: each of them waits for it first."""

import ast
from pathlib import Path

import pytest

AWAIT = "await_previous(overlaps)"
WEIGHTS = {"weight", "q_weight", "k_weight"}
"""Parameters that no kernel writes."""
HARMLESS = {"arange", "load", "program_id", "to"}
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


def touched(kernel, statements):
    """Names of the kernel's parameters in memory, or of scalars, that these statements use. They
    may call nothing but functions that load or compute."""
    parameters = {argument.arg for argument in kernel.args.args if argument.annotation is None}
    nodes = [node for statement in statements for node in ast.walk(statement)]
    calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    names = {node.id for node in nodes if isinstance(node, ast.Name)} & parameters
    return names | {call for call in calls if call.split(".")[-1] not in HARMLESS}


def mistakes(text):
    """What is wrong with a module's kernels."""
    compiled, (early, others) = functions(text), launched(text)
    for name in sorted(early):
        body = [ast.unparse(statement) for statement in compiled[name].body]
        if AWAIT not in body:
            yield f"{name} does not wait"
            continue
        before = compiled[name].body[: body.index(AWAIT)]
        if used := touched(compiled[name], before) - WEIGHTS:
            yield f"{name} touches {', '.join(sorted(used))} before it waits"
    for name in sorted(others & compiled.keys()):
        if "await_previous" in ast.unparse(compiled[name]):
            yield f"{name} is launched without the options"


MODULES = [path for path in FOLDER.glob("*.py") if "await_previous(overlaps)" in path.read_text()]


def test_the_kernels_between_products_start_early():
    early = set().union(*(launched(path.read_text())[0] for path in MODULES))
    assert {"_rms_norm", "_quantize", "_multiply", "_decode_chunks", "_align_blocks"} <= early
    assert {"_combine_chunks", "_compute_logit_parts", "_select_experts"} <= early
    assert len(early) >= 17


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_kernel_that_may_start_early_waits_before_all_but_weights(path):
    """The next kernel waits only for this one. If this one ended without waiting, the next could
    read the results of an earlier kernel that is still running."""
    assert not list(mistakes(path.read_text()))


def test_mistakes_are_found():
    module = """
@triton.jit
def _late(x, overlaps):
    y = tl.load(x)
    await_previous(overlaps)

@triton.jit
def _never(x):
    y = tl.load(x)

@triton.jit
def _sometimes(x):
    if x:
        await_previous(overlaps)

@triton.jit
def _stores(x, weight):
    tl.store(weight, 0.0)
    await_previous(overlaps)

@triton.jit
def _prepared(x, weight, overlaps):
    '''Loads weights first.'''
    y = tl.load(weight + tl.arange(0, 8)).to(tl.float32)
    await_previous(overlaps)
    z = tl.load(x)

@triton.jit
def _usual(x, overlaps):
    '''Does something.'''
    await_previous(overlaps)

def run():
    _late[(1,)](x, **dependent_launch())
    _never[(1,)](x, **dependent_launch())
    _sometimes[(1,)](x, **dependent_launch())
    _stores[(1,)](x, weight, **dependent_launch())
    _prepared[(1,)](x, weight, **dependent_launch())
    _usual[(1,)](x, num_warps=4)
"""
    assert list(mistakes(module)) == [
        "_late touches x before it waits",
        "_never does not wait",
        "_sometimes does not wait",
        "_stores touches tl.store before it waits",
        "_usual is launched without the options",
    ]


def test_the_rounding_of_activations_waits_before_the_product_may_start():
    """So when a kernel has ended, all earlier ones have."""
    source = (FOLDER / "fp8_products/product.cu").read_text()
    body = source[source.index("DEVICE void round_all") :]
    assert body.index("await_previous();") < body.index("allow_next();")


def test_a_product_waits_before_the_next_one_may_start():
    """The second product of experts reads what the first one's predecessor has written."""
    source = (FOLDER / "fp8_products/product.cu").read_text()
    body = source[source.index("DEVICE void run(ScaledRing") : source.index("// -- sums --")]
    assert body.count("allow_next();") == source.count("allow_next();") - 2 == 2
    assert body.index("\n    await_previous();\n") < body.index("allow_next();")


@pytest.mark.parametrize("package", ["fp8_products", "expert_products"])
def test_the_first_product_of_experts_waits_before_it_reads_who_owns_its_tiles(package):
    """All of its threads do; the previous kernel writes it."""
    source = (FOLDER / package / "product.cu").read_text()
    body = source[source.index("DEVICE void run(const Args& a)") :]
    waits = body.index("await_previous();\n    allow_next();")
    assert waits < body.index("sync_block();") < body.index(".run(ring)") < body.index("consume<")


def test_blocks_wait_for_each_other_only_in_cooperative_launches_and_clusters():
    """Otherwise two kernels at once, each with half of the GPU, could wait forever."""
    waiting = {
        path.parent.name
        for path in FOLDER.rglob("*.cu*")
        if path.name != "machine.cuh" and "get4_acquire(" in path.read_text()
    }
    assert waiting == {"decode_step"}
    assert (
        "launch_cooperative("
        in (FOLDER / "decode_step/steps.py").read_text()
        + (FOLDER / "decode_step/launch.py").read_text()
    )
    clusters = {
        path.parent.name
        for path in FOLDER.rglob("*.cu*")
        if path.name != "machine.cuh" and "sync_cluster<" in path.read_text()
    }
    assert clusters == {"fp8_products"}
    assert "cluster=args.cluster" in (FOLDER / "tiles.py").read_text()
    for path in FOLDER.rglob("*.py"):  # Triton has no cooperative launch here
        assert "atomic_cas" not in path.read_text(), path


def test_the_interpreter_launches_nothing_early():
    triton = pytest.importorskip("triton")
    from nanoactor.models.devices.cuda.kernels import dependent_launch

    if isinstance(dependent_launch.await_previous, triton.JITFunction):
        pytest.skip("kernels are compiled here")
    assert dependent_launch.dependent_launch() == {"overlaps": False}


def test_each_device_has_its_own_options(monkeypatch):
    pytest.importorskip("triton")
    import torch

    from nanoactor.models.devices.cuda.kernels import dependent_launch

    capabilities = {0: (9, 0), 1: (8, 9), 2: (10, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    dependent_launch.options_of.cache_clear()
    early = {"overlaps": True, "launch_pdl": True}
    found = [dependent_launch.options_of(device) for device in capabilities]
    dependent_launch.options_of.cache_clear()
    assert found == [early, {"overlaps": False}, early]
