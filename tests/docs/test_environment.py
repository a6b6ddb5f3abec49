"""docs/environment.md lists the environment variables that the code reads or sets."""

import ast
import re

from tests.product_files import ROOMS, ROOT, matching

PAGE = ROOT / "docs" / "environment.md"
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|PATH|HOME|CI|SCHEDULES")
NO_VARIABLES = {"DEPLOY_FAILED": "a status of Ray Serve", "SC_CLK_TCK": "a name for sysconf"}


def section(title):
    """The variables in the first column of the tables below a heading."""
    text = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([A-Z0-9_]+)`", cell)}


def named(text):
    """String constants of a module that look like variables."""
    strings = [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return {string for string in strings if VARIABLE.fullmatch(string)}


def in_code():
    """Those of the modules that look at the environment, or make one."""
    texts = [path.read_text() for room in ROOMS for path in matching(f"{room}/**/*.py")]
    found = set().union(*(named(text) for text in texts if "environ" in text))
    return found - NO_VARIABLES.keys()


def test_the_page_lists_what_the_code_reads_and_sets():
    listed = section("Variables that nanoactor reads") | section(
        "Variables that nanoactor sets for its processes"
    )
    assert listed == in_code()
    assert len(listed) > 30


def test_a_variable_of_a_library_is_not_read_by_the_code():
    libraries = section("Variables that libraries read")
    assert libraries
    assert not libraries & in_code()


def test_developers_variables_are_those_of_the_makefile_and_the_tests():
    listed = section("Variables for developers")
    makefile = (ROOT / "Makefile").read_text()
    made = set(re.findall(r"^(?:export )?(\w+) (?:\?=|:=)", makefile, re.MULTILINE))
    made |= set(re.findall(r"\$\(if \$\((\w+)\)", makefile))
    tests = set()
    for path in matching("tests/**/*.py"):
        for name in re.findall(r"os\.environ(?:\.get\(|\[)\"(\w+)\"", path.read_text()):
            tests.add(name)
    assert listed <= made | tests
    ours = {"PYTHON", "EXTRAS", "LONG", "SCHEDULES", "NANOACTOR_SOAK_MINUTES", "CI"}
    assert ours <= listed


def test_values_on_the_page_are_those_of_the_runners():
    from nanoactor.options.config import EngineConfig
    from nanoactor.placement.topology import LIGHT_ENVIRONMENT, _runner_nodes

    (node,) = _runner_nodes(EngineConfig("demo", device="npu"), (), None)
    page = PAGE.read_text()
    for name, value in {**LIGHT_ENVIRONMENT, **node.environment}.items():
        rows = [row for row in page.splitlines() if row.startswith("| ") and f"`{name}`" in row]
        assert f"| `{value}` |" in rows[0], name
