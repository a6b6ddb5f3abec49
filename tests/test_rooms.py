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
    path
    for pattern in (
        "models/batch.py",
        "models/decoder.py",
        "models/devices/cuda/**/*.py",
        "models/devices/npu/*.py",
        "models/layers/*.py",
        "models/sampling/*.py",
        "nanoactor/runner/executor.py",
        "nanoactor/runner/batch/*.py",
        "nanoactor/runner/model/*.py",
        "nanoactor/runner/steps/*.py",
    )
    for path in matching(pattern)
]
READS = {"item", "tolist", "cpu", "numpy", "nonzero"}
"""Calls that wait for the device, unless a file does not import torch and has only arrays."""
MAY_WAIT = {
    # On the thread that waits for results.
    ("cuda/device.py", "wait"),
    ("npu/runtime.py", "wait"),
    ("model/model.py", "check_agreement"),
    ("steps/step_buffers.py", "_score_message"),
    ("steps/step_buffers.py", "_vector_message"),
    ("steps/step_buffers.py", "collect"),
    # At the start.
    ("cuda/device.py", "reset_peak_memory"),
    ("npu/runtime.py", "reset_peak_memory"),
    ("model/encoder.py", "warm_up"),
    ("model/model.py", "__init__"),
    ("runner/executor.py", "__init__"),
    ("steps/graphs.py", "_record"),
    ("steps/measuring.py", "_decode_once"),
    ("steps/measuring.py", "_run_mixed"),
    ("steps/measuring.py", "_run_once"),
    ("steps/measuring.py", "run"),
    ("steps/published.py", "__init__"),
    ("steps/scoring.py", "warm_up"),
    # Of the host's own memory.
    ("batch/staging.py", "begin"),
    ("steps/mixed.py", "fill"),
    # What waits by its name.
    ("cuda/device.py", "synchronize"),
    ("npu/device.py", "synchronize"),
    ("npu/runtime.py", "synchronize"),
}
"""The end of a file's path, and a function in it."""


def waits(path):
    """Names of the functions of a file that may wait for the device, and what they call."""
    has_tensors = "torch" in {name.partition(".")[0] for name in imports(path)}
    names = {"synchronize"} | (READS if has_tensors else set())
    for function in ast.walk(ast.parse(path.read_text())):
        for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            name = (
                node.func.attr if isinstance(node, ast.Call) and hasattr(node.func, "attr") else ""
            )
            if name in names:
                yield function.name, name


@pytest.mark.parametrize("path", HOT, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_on_the_way_to_the_device_waits_for_it(path):
    for function, call in waits(path):
        exempt = {name for end, name in MAY_WAIT if str(path).endswith(end)}
        assert function in exempt, f"{function}: .{call}()"


def test_each_exemption_from_not_waiting_is_used():
    found = {(str(path), function) for path in HOT for function, _ in waits(path)}
    unused = [
        exemption
        for exemption in MAY_WAIT
        if not any(path.endswith(exemption[0]) and exemption[1] == name for path, name in found)
    ]
    assert not unused
    assert {path.name for path in HOT} >= {"forward.py", "resident.py", "launch.py", "choosing.py"}


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
