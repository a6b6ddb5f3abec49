"""Replicas on Ray: one is killed, and its streams continue."""

import importlib.util
import re
import socket

import pytest

from tests.examples.running import run

# It takes both cores for minutes, like the tests of tests/ray_serve.
pytestmark = [
    pytest.mark.long,
    pytest.mark.deadly,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed: pip install 'nanoactor[ray]'",
    ),
]


def test_streams_of_a_killed_replica_continue():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = run("ray_replicas.py", "--port", port, RAY_USAGE_STATS_ENABLED="0")
    assert f"2 replicas behind http://127.0.0.1:{port}" in said
    streams = int(re.search(r"killing process \d+ with (\d) streams", said)[1])
    lines = re.findall(r"^[A-Z]+: +(\d+) characters, (.*) as undisturbed$", said, re.M)
    assert [told for _, told in lines] == ["the same text"] * 6
    assert all(int(count) > 300 for count, _ in lines)
    assert int(re.search(r"streams moved: (\d+)", said)[1]) == streams >= 3
