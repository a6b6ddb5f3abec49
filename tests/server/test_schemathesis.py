"""Whatever the OpenAPI document allows, and much that it does not: no 5xx, no hang."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.harness import IN_ONE, served

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "unsupported_method", "allow_header_conformance"),
)


@pytest.fixture
def server():
    """A server that closes no idle connection, as `fast_server` does after 1.5 s.

    On a busy machine the client lets one rest for longer, and then finds it closed.
    """
    with served(*IN_ONE) as server:
        yield server


# Most of the time goes into making up the requests.
@pytest.mark.parametrize(
    ("examples", "phases", "least"),
    [
        (5, "fuzzing", 20),
        pytest.param(
            300, "coverage,fuzzing", 2500, marks=[pytest.mark.long, pytest.mark.timeout(1800)]
        ),
    ],
)
def test_no_request_makes_the_server_fail(server, examples, phases, least, tmp_path):
    # One worker: with two, Hypothesis iterates over `sys.modules` while the other thread imports.
    command = [
        str(Path(sys.executable).with_name("st")),
        *("run", f"{server.url}/openapi.json", "--url", server.url),
        *("--checks", ",".join(CHECKS), "--phases", phases, "--seed", "1"),
        *("--max-examples", str(examples), "--request-timeout", "10", "--workers", "1"),
        *("--exclude-path", "/trace", "--continue-on-failure", "--warnings", "off", "--no-color"),
        *("--suppress-health-check", "all"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    cases = int(re.search(r"(\d+) generated", done.stdout)[1])
    assert cases >= least, done.stdout[-2000:]
    assert server.get("/health").json()["status"] == "ok"
    assert not [line for line in server.lines if "Traceback" in line]
