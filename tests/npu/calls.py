"""What the device's source asks of torch_npu and torchair, read without running it."""

import ast

import torch

from tests.product_files import ROOT, matching

SOURCES = matching("models/devices/npu/*.py")
# What recording a graph puts in the place of an attention operator.
BEHIND = {
    "npu_fused_infer_attention_score.out",
    "_npu_fused_infer_attention_score_get_max_workspace",
    "_npu_fused_infer_attention_score_infer_output",
}


def chain(node):
    """ "a.b.c" for an attribute of an attribute of a name; None for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def trees():
    return [ast.parse(path.read_text()) for path in SOURCES]


def chains(prefix):
    """What follows a prefix, wherever in the sources, in its longest form."""
    found = set()
    for tree in trees():
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            name = (
                chain(node) if isinstance(node, ast.Attribute) and id(node) not in inner else None
            )
            if name and name.startswith(prefix):
                found.add(name.removeprefix(prefix))
    return found


def operators(space="npu"):
    """Names of the operators that are called."""
    return {name.partition(".")[0] for name in chains(f"torch.ops.{space}.")}


def call_sites():
    """(operator, number of positional arguments, names of the others) of each call."""
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = chain(node.func) or ""
                if name.startswith("torch.ops.npu."):
                    starred = any(isinstance(a, ast.Starred) for a in node.args)
                    names = [keyword.arg for keyword in node.keywords if keyword.arg]
                    yield name.rpartition(".")[2], None if starred else len(node.args), names


def attention_arguments():
    """The names under which `_attend` and its callers hand arguments to the operator."""
    tree = ast.parse((ROOT / "models/devices/npu/attention.py").read_text())
    own, given = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "_attend":
            own = {argument.arg for argument in node.args.args}
        if isinstance(node, ast.Call) and chain(node.func) in ("operator", "_attend"):
            given |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return given - (own - {"scale"})


def binds(schema, positional, names):
    """What is wrong with a call of a schema; empty where nothing is."""
    arguments = torch._C.parse_schema(schema).arguments
    known = {argument.name for argument in arguments}
    by_place = [argument.name for argument in arguments if not argument.kwarg_only]
    wrong = [f"{name} is unknown" for name in names if name not in known]
    if positional is None:
        return wrong
    if positional > len(by_place):
        wrong.append(f"{positional} positional arguments, {len(by_place)} possible")
    given = {*by_place[:positional], *names}
    wrong += [f"{n} is given twice" for n in by_place[:positional] if n in names]
    wrong += [
        f"{argument.name} is missing"
        for argument in arguments
        if not argument.has_default_value() and argument.name not in given
    ]
    return wrong
