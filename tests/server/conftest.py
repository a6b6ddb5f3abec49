"""Servers that tests share."""

import openai
import pytest

from tests.server.harness import CPU, IN_ONE, served


@pytest.fixture(scope="session")
def demo_server():
    """The demo model on the CPU."""
    with served(*CPU) as server:
        yield server


@pytest.fixture(scope="session")
def fast_server():
    """The demo's tokenizer on a device that computes nothing."""
    with served(*IN_ONE, "--idle-timeout", "4", "--body-timeout", "4") as server:
        yield server


@pytest.fixture
def client(demo_server):
    """OpenAI's own, of the demo server."""
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
