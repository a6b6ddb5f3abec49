"""docs/limits.md has the numbers of the code, and every constant that is a limit."""

import ast
import dataclasses
import functools
import importlib
import re

import pytest

from tests.product_files import ROOMS, ROOT, matching

PAGE = ROOT / "docs" / "limits.md"
ROW = re.compile(r"^\|(.*)\| \[`([\w.]+)`\]\(\.\./([\w/]+\.py)\) \|$", re.MULTILINE)
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "s": 1, "seconds": 1}
NAMED = re.compile(r"_?(MAX|MOST|LARGEST)(_[A-Z_]+)?|MAX_[A-Z_]+")
NOT_FOR_USERS = {
    "nanoactor/text/patterns.py": "which regular expressions of a tokenizer are simple",
    "nanoactor/text/scores.py": "bytes of a token, longer than in any vocabulary",
    "nanoactor/actors/blocks.py": "changes to the index in one message",
    "nanoactor/actors/grammar.py": "masks whose times a statistic remembers",
    "nanoactor/admission/tokenized.py": "the length of a reason that is reported",
    "nanoactor/recovery/suspects.py": "how far a reader may lag behind",
    "nanoactor/runner/batch/row_layout.py": "forced tokens that are laid out as rows",
    "nanoactor/runner/timing/clock.py": "how the device's clock is read",
    "nanoactor/scheduling/rehearsal.py": "the size of a rehearsal",
    "nanoactor/messages/grammar.py": "the length of a reason that is reported",
    "nanoactor/runner/steps/graphs.py": "steps that are captured; others run as well",
    "nanoactor/runner/config.py": "how many ranks an error message suggests",
    "nanoactor/fleet/client.py": "attempts to tokenize a text",
    "nanoactor/fleet/links.py": "the delay before a reconnection",
    "nanoactor/fleet/monitor.py": "samples that the web page shows",
    "nanoactor/fleet/routing.py": "ratios in the cost of a replica",
    "nanoactor/options/config.py": "short steps in flight, by default",
    "nanoactor/placement/topology.py": "the sizes of rings, which follow from other limits",
    "nanoactor/ray_serve/options.py": "the range of an option",
    "nanoactor/ray_serve/ports.py": "ports that are tried",
    "nanoactor/server/connections.py": "the length of a quotation in an error message",
    "nanoactor/server/json_calls.py": "how far a call may be looked for before it is held back",
    "nanoactor/server/media.py": "the length of the head of a data: URL",
    "nanoactor/server/monitor.py": "snapshots that the web page shows",
    "nanoactor/server/sealed.py": "the ratio of a compression",
    "nanoactor/server/text_service.py": "what a cache holds, and messages between processes",
    "nanoactor/server/tool_calls.py": "how far a call may be looked for before it is held back",
    "nanoactor/server/xml_calls.py": "the length of a name in a call, and of its tags",
    "nanoactor/setup/actors.py": "the sizes of messages between processes",
    "nanoactor/server/turns.py": "turns that a metric remembers",
    "nanoactor/vision/decoding.py": "the length of a reason that is reported",
    "nanoactor/vision/reports.py": "items in one message",
    "nanoactor/vision/rules.py": "the range of a multiplication",
    "models/vision/image_config.py": "the range of a multiplication",
    "nanoactor/grammar/compiling.py": "threads",
    "nanoactor/grammar/book.py": "tokens that one turn handles",
    "nanoactor/grammar/matcher.py": "the parser's own limits",
    "nanoactor/api/llm.py": "texts of one call that are pooled at once",
    "models/demo_vl/layout.py": "what the demo model was trained on",
    "runtime/children.py": "calls between processes",
    "runtime/abandoning.py": "the interval of a check",
    "runtime/control.py": "the length of a summary, and descriptors in one message",
    "runtime/recovery.py": "the delay before a restart",
    "runtime/stall.py": "how old a report of progress may be",
    "models/weights/files.py": "names in an error message",
    "models/limits.py": "the width of a table; a model with more end tokens is refused",
}
"""Files with such constants that limit no request, and what they are."""


def rows():
    """Each row: what and how much, the name of the constant, and its file."""
    return [match.groups() for match in ROW.finditer(PAGE.read_text())]


def found(name, path):
    """The value of a name, which may be a field of a dataclass or a member of a class."""
    dotted = path.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(
        dotted if dotted.startswith("nanoactor.") else f"nanoactor.{dotted}"
    )
    owner, _, member = name.rpartition(".")
    holder = getattr(module, owner) if owner else module
    if owner and dataclasses.is_dataclass(holder):
        (field,) = (one for one in dataclasses.fields(holder) if one.name == member)
        return field.default
    return getattr(holder, member)


def number(cell):
    """The first number of a cell, in bytes, seconds or whatever is counted; None if it has none."""
    match = re.match(r"(?:less than |at least )?([\d,]+)(?: (KiB|MiB|GiB|s|seconds)\b)?", cell)
    return match and int(match[1].replace(",", "")) * UNITS[match[2] or ""]


@pytest.mark.parametrize(("cells", "name", "path"), rows(), ids=[row[1] for row in rows()])
def test_a_row_has_the_number_of_the_code(cells, name, path):
    what, much = (cell.strip() for cell in cells.split(" | ")[:2])
    value = found(name, path)
    if isinstance(value, dict):
        words = {"vocabulary": "vocab_size", "`max_position_embeddings`": "max_position_embeddings"}
        value = value[words[what]]
    if name == "MAX_RECORD_BYTES":
        assert value < number(much) < 1.001 * value
    elif isinstance(value, int | float):
        assert number(much) == value
    elif value is None:
        assert number(much) is None, "the default is computed"
    else:
        assert callable(value), "what enforces the limit"


def test_there_are_as_many_rows_as_the_page_has():
    """A row that the pattern does not match would not be compared."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    headings = [line for line in lines if line.startswith(("| what |", "| --- |"))]
    foreign = [line for line in lines if line.endswith("| aiohttp |")]
    assert len(rows()) == len(lines) - len(headings) - len(foreign)
    assert len(foreign) == 3
    assert len(rows()) > 90


@functools.cache
def constants():
    """Constants whose names say that they are a limit, by file."""
    there = set()
    for room in ROOMS:
        for path in matching(f"{room}/**/*.py"):
            for node in ast.parse(path.read_text()).body:
                targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
                for target in targets if isinstance(node, ast.Assign | ast.AnnAssign) else ():
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name) and NAMED.fullmatch(name.id):
                            there.add((str(path.relative_to(ROOT)), name.id))
    return there


def test_each_constant_that_is_a_limit_is_on_the_page():
    kernels = {one for one in constants() if one[0].startswith("models/devices/")}
    listed = {(path, name) for _, name, path in rows()}
    missing = constants() - kernels - listed
    assert {path for path, _ in missing} <= NOT_FOR_USERS.keys(), missing
    # A file on that list has one such constant, or is also on the page for its others.
    assert NOT_FOR_USERS.keys() <= {path for path, _ in missing}


def test_the_options_that_are_limits_are_on_the_page():
    from nanoactor.options.config import EngineConfig
    from nanoactor.server.config import ServerConfig

    listed = {name for _, name, _ in rows()}
    for config in (EngineConfig, ServerConfig):
        for field in dataclasses.fields(config):
            if field.name.startswith("max_") or field.name.endswith("_timeout"):
                if field.name == "max_pipeline_depth":
                    continue
                assert f"{config.__name__}.{field.name}" in listed
