"""Messages that pages quote, and the strings of the code."""

import ast
import functools
import re

from tests.product_files import ROOMS, matching


@functools.cache
def corpus():
    """Every string of the code, with a mark for what an f-string or a log's format puts in."""
    found = []
    for room in ROOMS:
        for path in matching(f"{room}/**/*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%[-\d.]*[sdfr]", "\0", node.value).replace("%%", "%"))
    return found


def is_of_the_code(message):
    """Whether a string of the code has the fixed parts of a message, in their order. In a message,
    three dots stand for a part that differs from case to case."""
    parts = map(re.escape, re.split(r"\.\.\.|\0", message))
    pattern = re.compile(".*?".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in corpus())
