"""Rung 1 for releases that are not installed: their wheels' files, read without importing them.

The schemas in them are written as before their registration, so they are held against those of the
release whose registered ones `wheel/test_schemas.py` holds against ours.
"""

import re
import subprocess
import sys
import zipfile

import pytest
import torch

from tests.npu import calls

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
REGISTERED = "2.13.0"
OTHERS = ["2.11.0", "2.12.0", "2.14.0"]
# How compiled graphs are made, and native ones recorded: file of the wheel, what must be in it.
NAMES = {
    "npu/graphs.py": ["def update(self, cpu_update_input)", "auto_dispatch_capture"],
    "npu/_npugraph_handlers/ifa_handler.py": ["npu_fused_infer_attention_score.out"],
    "dynamo/torchair/inference/_cache_compiler.py": ["def cache_compile(", "ge_cache"],
    "dynamo/torchair/ops/_npu_fused_infer_attention_score.py": ["actual_seq_lengths_kv"],
    "dynamo/torchair/configs/compiler_config.py": ["max-autotune", "reduce-overhead"],
}


def download(release, directory):
    asked = ["--no-deps", "--only-binary", ":all:", "--python-version", "3.11", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *asked, f"torch_npu=={release}"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"it cannot be downloaded: {done.stderr[-200:]}")
    (path,) = directory.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def registered(tmp_path_factory):
    with download(REGISTERED, tmp_path_factory.mktemp("registered")) as archive:
        yield archive


@pytest.fixture(scope="module", params=OTHERS)
def wheel(request, tmp_path_factory):
    with download(request.param, tmp_path_factory.mktemp("wheel")) as archive:
        yield archive


def schemas(archive):
    """Every schema that the wheel's lists of native functions hold."""
    found = set()
    for name in ("npu_native_functions.yaml", "npu_native_functions_by_codegen.yaml"):
        text = archive.read(f"torch_npu/csrc/aten/{name}").decode()
        found |= {line.strip() for line in re.findall(r"^\s*-? ?func: (.*)$", text, re.M)}
    return found


def listed(archive, name):
    found = [line for line in schemas(archive) if line.partition("(")[0] == name]
    assert len(found) == 1, f"{name} is listed {len(found)} times"
    return torch._C.parse_schema(found[0])


@pytest.mark.parametrize("name", sorted(calls.operators() | calls.BEHIND))
def test_the_wheel_lists_the_schema_that_we_call(wheel, registered, name):
    assert listed(wheel, name) == listed(registered, name)


@pytest.mark.parametrize("path", NAMES)
def test_the_wheel_has_the_names_that_we_use(wheel, path):
    text = wheel.read(f"torch_npu/{path}").decode()
    for name in NAMES[path]:
        assert name in text
