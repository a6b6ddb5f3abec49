"""Coding agents and packages of npm against the scripted model: a call, its result, an answer."""

import urllib.request
from pathlib import Path

import pytest

from tests.clients.scripted_model import SAID
from tests.product_files import matching

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def asked(url, path):
    """How many requests of a path were answered with 200, and tokens computed again."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    counts = {}
    for line in text.splitlines():
        if line.startswith("nanoactor_") and " " in line:
            name, _, value = line.rpartition(" ")
            counts[name] = float(value)
    count = counts.get(f'nanoactor_requests_total{{outcome="ok",path="{path}"}}', 0)
    return count, counts.get('nanoactor_turn_tokens_total{fate="computed"}', 0.0)


def test_claude_code(url, run):
    before, computed = asked(url, "/v1/messages")
    said = run(
        *("claude", "-p", "List the files in this folder.", "--allowedTools", "Glob Bash LS Read"),
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL="m",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert SAID in said
    count, again = asked(url, "/v1/messages")
    assert count >= before + 2, "a call, and the answer to its result"
    assert again == computed, "the second prompt finds all of the first in the cache"


def test_codex(url, run):
    before, computed = asked(url, "/v1/responses")
    provider = f'model_providers.local={{name="local", base_url="{url}/v1"}}'
    said = run(
        *("codex", "exec", "--skip-git-repo-check", "-c", "model_provider=local", "-c", "model=m"),
        *("-c", provider, "List the files in this folder."),
    )
    assert SAID in said
    count, again = asked(url, "/v1/responses")
    assert count >= before + 2
    assert again == computed


SCRIPTS = Path(__file__).parent / "npm"


@pytest.mark.parametrize("script", [path.name for path in matching("tests/clients/npm/*.mjs")])
def test_packages_of_npm(url, run, script, tmp_path):
    # Packages are looked for from where a script lies.
    root = Path(__file__).parents[2] / ".clients"
    if not root.exists():
        pytest.skip("make test-clients")
    copied = root / f"{tmp_path.name}-{script}"
    copied.write_text((SCRIPTS / script).read_text())
    try:
        assert "all passed" in run("node", str(copied), BASE=url)
    finally:
        copied.unlink()
