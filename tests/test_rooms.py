"""Imports: three rooms and one direction, and the same among the folders of the engine."""

import ast
import graphlib

import pytest

from tests.npu.ladder import RUNGS
from tests.product_files import ROOMS, ROOT, matching

FILES = [path for room in (*ROOMS, "bench", "tests") for path in matching(f"{room}/**/*.py")]


def imports(path):
    """Every module that a file names in an import, wherever in the file it stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def room_of(path):
    return path.relative_to(ROOT).parts[0]


FORBIDDEN = {
    "runtime": ("nanoactor.models", "torch", "transformers", "tokenizers", "aiohttp"),
    "models": ("nanoactor.runtime", "msgpack", "uvloop", "asyncio", "aiohttp"),
}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_rooms(path):
    names, room = imports(path), room_of(path)
    tops = {name.partition(".")[0] for name in names}
    assert not tops & {"models", "runtime"}, "write nanoactor.models, nanoactor.runtime"
    if room in FORBIDDEN:
        for name in names:
            assert not name.startswith(FORBIDDEN[room]), name
            if name.startswith("nanoactor."):
                assert name.startswith(f"nanoactor.{room}"), f"{room} imports the engine: {name}"
    if room == "nanoactor" and "runner/" not in str(path):
        assert "torch" not in tops
        assert "transformers" not in tops or path.name == "huggingface.py"


HOT = [
    *matching("models/devices/cuda/*.py"),
    *matching("models/devices/cuda/kernels/*.py"),
    *matching("models/devices/npu/*.py"),
    *matching("models/decoder.py"),
    *matching("models/layers/*.py"),
    *(
        path
        for name in ("executor", "batch/batch", "batch/staging", "steps/graphs", "steps/launcher")
        for path in matching(f"nanoactor/runner/{name}.py")
    ),
]
WAITS = {"item", "tolist", "cpu", "numpy", "synchronize", "nonzero"}
# What runs on the waiting thread, at the start, or on the host's own memory.
MAY_WAIT = {"__init__", "begin", "collect", "wait", "synchronize", "reset_peak_memory"}
MAY_WAIT |= {
    "_capture_decode",
    "_capture_mixed",
    "_host_seq_lens",
    "final_lengths",
    "_record",
}


@pytest.mark.parametrize("path", HOT, ids=lambda p: p.name)
def test_nothing_on_the_way_to_the_device_waits_for_it(path):
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and function.name not in MAY_WAIT:
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                    assert call.func.attr not in WAITS, f"{function.name}: .{call.func.attr}()"


def test_the_rooms_are_reached_through_committed_relative_links():
    for room in ("models", "runtime"):
        link = ROOT / "nanoactor" / room
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{room}"


PRODUCT = [str(p.relative_to(ROOT)) for p in FILES if room_of(p) not in ("tests", "bench")]
# What takes as many values as it is given, or takes none by name.
VARIADIC = {"info", "warning", "error", "debug", "log", "pack", "pack_into", "_pack"}


@pytest.mark.parametrize("path", [path for path in PRODUCT if "kernels" not in path])
def test_no_call_passes_more_than_six_positional_arguments(path):
    """Beyond that neither mypy nor a reader can tell arrays apart."""
    for call in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(call, ast.Call) and len(call.args) > 6:
            name = ast.unparse(call.func).rpartition(".")[2]
            assert name in VARIADIC, f"line {call.lineno}: {ast.unparse(call.func)}"


# Modules that belong to no room: the public face, the entry point, errors.
LOOSE = {"__init__", "__main__", "errors", "ray_data"}


def test_rooms_of_the_engine_import_each_other_one_way():
    """Below the public face, the folders of `nanoactor/` are floors of one house."""
    graph, loose = {}, set()
    for path in matching("nanoactor/**/*.py"):
        parts = path.relative_to(ROOT / "nanoactor").with_suffix("").parts
        if len(parts) == 1:
            loose.add(parts[0])
            continue
        named = {name.split(".")[1] for name in imports(path) if name.startswith("nanoactor.")}
        graph.setdefault(parts[0], set()).update(named - {parts[0]})
    assert loose == LOOSE
    # `from nanoactor import X` is the public face, which names all rooms.
    rooms = {room: named & graph.keys() for room, named in graph.items()}
    assert rooms["api"] > {"admission", "placement"}
    graphlib.TopologicalSorter(rooms).prepare()


def test_no_files_import_each_other_in_a_circle():
    """Wherever in a file an import stands, those for type checkers alone included."""
    names = {}
    for path in PRODUCT:
        dotted = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        inside = path.startswith("nanoactor/")
        names[dotted if inside else f"nanoactor.{dotted}"] = ROOT / path
    graph = {name: (imports(path) & names.keys()) - {name} for name, path in names.items()}
    assert any(graph.values())
    # `from package import name` names the package too: what is in a file of its own counts alone.
    for name, found in graph.items():
        graph[name] = {one for one in found if not any(o.startswith(f"{one}.") for o in found)}
    graphlib.TopologicalSorter(graph).prepare()


def test_every_test_of_an_npu_is_on_the_ladder():
    """`make test` leaves that folder out."""
    there = {str(path.relative_to(ROOT)) for path in matching("tests/npu/**/test_*.py")}
    assert {name for rung in RUNGS.values() for name in rung.files} == there
