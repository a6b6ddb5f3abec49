"""Servers that tests share."""

import pytest

from tests.server.harness import CPU, SIMULATED, served


@pytest.fixture(scope="session")
def demo_server():
    """The demo model on the CPU."""
    with served(*CPU) as server:
        yield server


@pytest.fixture(scope="session")
def fast_server():
    """The demo's tokenizer on a device that computes nothing."""
    with served(*SIMULATED, "--idle-timeout", "1.5", "--body-timeout", "1.5") as server:
        yield server
