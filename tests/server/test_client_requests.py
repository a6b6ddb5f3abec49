"""Requests in the shapes of some thirty clients' are answered by the demo model, none with 4xx.

`client_requests.jsonl` has a request a line: client, path, query and body. Their shapes are those
of real requests of November 2026 (docs/clients.md has the versions); all free text is ours.
"""

import asyncio
import json
import re
from pathlib import Path

import httpx2 as httpx

from tests.server.harness import here, url
from tests.server.scripted import Script

RECORDED = [
    json.loads(line)
    for line in Path(__file__).with_name("client_requests.jsonl").read_text().splitlines()
]
BROKEN = re.compile(r"^event: (error|response.failed)|^data: .\"error\"", re.MULTILINE)
FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
MORE_FORMS = ("guided_grammar", "regex", "ebnf", "json_schema", "text", "output_config")


def bounded(body):
    """A body whose answer has few tokens even where a grammar keeps it from ending."""
    if not any(body.get(name) for name in (*FORMS, *MORE_FORMS)) and not body.get("tool_choice"):
        return body
    names = {"max_tokens", "max_completion_tokens", "max_output_tokens"} & body.keys()
    name = "max_output_tokens" if "input" in body else "max_tokens"
    return body | {(names or {name}).pop(): 8}


def sees(body):
    said = json.dumps([body.get("messages"), body.get("input")])
    return any(f'"type": "{kind}"' in said for kind in ("image", "image_url", "input_image"))


def turn_tokens(server):
    """(tokens of turns before that the cache held, those that were computed again)."""
    text = server.metrics.text().decode()
    found = dict(re.findall(r'nanoactor_turn_tokens_total{fate="(\w+)"} (\S+)', text))
    return float(found.get("reused", 0)), float(found.get("computed", 0))


def test_no_client_is_refused_and_each_turn_finds_the_one_before(monkeypatch):
    async def main():
        script = Script(monkeypatch)
        options = dict(placement="single", device="simulated:0.1", max_num_batched_tokens=40_960)
        config = {"served_model_name": "m"}
        refused, answered, going_on = [], set(), set()
        async with (
            here("demo", config, **options) as server,
            httpx.AsyncClient(base_url=url(server), timeout=120) as client,
        ):
            for one in RECORDED:
                script.say("Well.")
                body = bounded(one["body"])
                before, _ = turn_tokens(server)
                answer = await client.post(one["path"], params=one["query"], json=body)
                expected = 400 if sees(body) else 200
                if answer.status_code != expected:
                    refused.append((one["client"], one["path"], answer.text[:300]))
                elif body.get("stream"):
                    assert not BROKEN.search(answer.text), one["client"]
                answered.add(one["client"])
                if turn_tokens(server)[0] > before:
                    going_on.add(one["client"])
            _, computed = turn_tokens(server)
        assert refused == []
        assert len(answered) >= 30
        assert {"claude", "codex", "qwen", "opencode", "continue", "pi", "mini"} <= going_on
        assert len(going_on) >= 18
        assert computed == 0, "tokens of a turn before whose blocks the cache has lost"

    asyncio.run(main())
