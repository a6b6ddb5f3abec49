"""Programs and outputs on pages: the program of docs/offline.md runs, and quoted lines are ours."""

import json
import os
import re
import subprocess
import sys

import pytest

from nanoactor import InvalidRequest, SamplingParams
from tests.docs.messages import is_of_the_code
from tests.product_files import ROOT

PAGE = ROOT / "docs" / "offline.md"
ENGINE = 'AsyncLLM("demo", max_num_seqs=64)'


def program():
    """The page's program, on a simulated device: it is about files and requests."""
    (text,) = (
        block
        for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.DOTALL)
        if ENGINE in block
    )
    return text.replace(ENGINE, ENGINE.replace(")", ', device="simulated:1")'))


def test_a_file_is_answered_line_by_line_and_continued(tmp_path):
    prompts = [f"ROMEO {number}:" for number in range(40)] + [""]
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    target = tmp_path / "stored.jsonl"
    kept = [json.dumps({"line": number, "text": "kept"}) for number in range(0, 41, 2)]
    target.write_text("".join(f"{line}\n" for line in kept[:-1]))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    subprocess.run(
        [sys.executable, "-c", program()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        timeout=200,
    )
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(one["line"] for one in found) == list(range(41))
    assert sum(one.get("text") == "kept" for one in found) == 20
    assert [one["line"] for one in found if "error" in one] == [40]
    assert all(one["text"] for one in found if "error" not in one)


def test_the_doctors_lines_are_those_that_it_prints():
    text = (ROOT / "docs" / "quickstart.md").read_text()
    said = re.findall(r"^(?:ok|note|bad) {2,}\S.*? {2,}(\S.*)$", text, re.MULTILINE)
    assert len(said) > 8
    sentences = [line for line in said if re.fullmatch(r"[a-zA-Z_,;: ]{12,}", line)]
    assert len(sentences) >= 4
    assert all(is_of_the_code(line) for line in sentences)


def test_a_quoted_error_is_the_one_that_is_raised():
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams.for_model(max_token=3)
    assert f"`{refused.value}`" in " ".join(PAGE.read_text().split())
