"""TRL's client of vLLM's server, unmodified, by `nanoactor.compat.vllm`."""

import subprocess
import sys
import textwrap

import pytest

from tests.server.harness import CPU, served

# `make test-long` installs what this needs; without that it fails.
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PROGRAM = """
import sys
import nanoactor.compat.vllm
nanoactor.compat.vllm.install()
from trl.generation.vllm_client import VLLMClient

client = VLLMClient(base_url=sys.argv[1], connection_timeout=30.0)
prompts = [[5, 6, 7], [8, 9]]
found = client.generate(prompts, n=2, max_tokens=4, temperature=1.0)
assert found["prompt_ids"] == prompts
assert all(1 <= len(ids) <= 4 for ids in found["completion_ids"])
assert [len(one) for one in found["logprobs"]] == [len(one) for one in found["completion_ids"]]
assert all(told[0] <= 0 for one in found["logprobs"] for told in one)
messages = [[{"role": "user", "content": "hi"}]]
chat = client.chat(messages, n=2, max_tokens=4)
assert len(chat["completion_ids"]) == 2
function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
tools = [{"type": "function", "function": function}]
shown = client.chat(messages, n=1, max_tokens=2, logprobs=None, tools=tools)
assert len(shown["prompt_ids"][0]) > len(chat["prompt_ids"][0]), "tools are in the prompt"
scored = client.get_sequence_logprobs([[5, 6, 7, 8, 9], [5, 6, 7]], [3, 2])
assert len(scored["logprobs"][0][0]) == 100
regular = client.generate([[5, 6, 7]], max_tokens=4, structured_outputs_regex="[ab]{4}")
assert len(regular["completion_ids"][0]) >= 1
assert client.get_world_size() == 1
client.reset_prefix_cache()
assert client.get_server_info()["model_config"]["logprobs_mode"] == "raw_logprobs"
print("all of it")
"""


def test_the_client_reads_what_it_needs():
    options = ("--enable-control-endpoints", "--max-logprobs", "100")
    with served(*CPU, *options) as server:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), server.url],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("all of it\n")
