"""LangChain against the scripted model: `make test-clients` installs it."""

import importlib.util
import re
import urllib.request

import pytest

from tests.clients.scripted_model import SAID
from tests.clients.scripted_process import scripted_server
from tests.examples.running import run

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("langchain_openai") is None,
        reason="langchain-openai is not installed: pip install 'nanoactor[clients]'",
    ),
]


def test_a_chain_is_streamed_invoked_and_batched(tmp_path):
    with scripted_server(tmp_path / "model") as url:
        said = run("langchain_chat.py", "--url", f"{url}/v1")
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            figures = answer.read().decode()
    asked = r'^nanoactor_requests_total{outcome="ok",path="/v1/chat/completions"} 5.0$'
    assert re.search(asked, figures, re.M)
    reused = re.search(r'^nanoactor_turn_tokens_total{fate="reused"} (.*)$', figures, re.M)
    assert float(reused[1]) > 0, "the second turn has the first one before it"
    _, streamed, turn, batch = said.split("--- ")
    assert streamed == f"a stream ---\n{SAID}\n"
    assert turn == f"a second turn ---\n{SAID}\n"
    lines = [f"{name}: {SAID!r}" for name in ("Hamlet", "King Lear", "Ophelia")]
    assert batch == "\n".join(["a batch ---", *lines]) + "\n"
