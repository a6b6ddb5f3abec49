"""Prints the tables of names for docs/migrating_from_vllm.md: `python -m tests.compat.names_table`.

With `--write` they take the places of those that stand there.
"""

import dataclasses
import re
import sys
from pathlib import Path

from nanoactor.requests.known_names import ENGINE, SAMPLING, SERVER, ForeignOption
from nanoactor.requests.params import SamplingParams

DOCUMENT = Path(__file__).parents[2] / "docs" / "migrating_from_vllm.md"
_LISTED = {name.theirs for name in SAMPLING}
SAME = [
    ForeignOption(field.name, "sampling", field.name)
    for field in dataclasses.fields(SamplingParams)
    if field.name not in _LISTED
]
TABLES = {"engine": ENGINE, "server": SERVER, "sampling": [*SAME, *SAMPLING]}
_MARKED = re.compile(r"(<!-- names: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def of_name(name):
    """(what it is called elsewhere, what becomes of it, the difference or the reason)."""
    called = f"`{name.theirs}`" + (" (SGLang)" if name.engine == "SGLang" else "")
    if name.scope != "sampling" and name.other_flags:
        called += ", " + ", ".join(f"`{flag}`" for flag in name.other_flags)
    if name.treatment == "same":
        treatment = "the same"
    elif name.treatment == "alias":
        treatment = f"`{name.ours}`" + (", switched off" if name.inverts else "")
    elif name.treatment == "moot":
        values = [repr(value) for value in name.accepts if value is not None]
        treatment = f"accepted: {', '.join(f'`{v}`' for v in values) or '`None`'}"
    else:
        treatment = "refused"
    return called, treatment, name.note


def table(names):
    """One table in Markdown: what has a counterpart first."""
    order = {"same": 0, "alias": 1, "moot": 2, "refused": 3}
    rows = [
        of_name(name) for name in sorted(names, key=lambda one: (order[one.treatment], one.theirs))
    ]
    lines = ["| there | here | |", "| --- | --- | --- |"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def written(text):
    """The document with the tables of today."""
    return _MARKED.sub(lambda m: f"{m[1]}{table(TABLES[m[2]])}\n{m[3]}", text)


if __name__ == "__main__":
    if "--write" in sys.argv:
        DOCUMENT.write_text(written(DOCUMENT.read_text()))
    for title, names in TABLES.items():
        print(f"## {title}\n\n{table(names)}\n")
