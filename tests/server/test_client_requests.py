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


def test_no_client_is_refused(monkeypatch):
    async def main():
        script = Script(monkeypatch)
        options = dict(placement="single", device="simulated:0.1", max_num_batched_tokens=40_960)
        config = {"served_model_name": "m"}
        refused, answered = [], set()
        async with (
            here("demo", config, **options) as server,
            httpx.AsyncClient(base_url=url(server), timeout=120) as client,
        ):
            for one in RECORDED:
                script.say("Well.")
                body = bounded(one["body"])
                answer = await client.post(one["path"], params=one["query"], json=body)
                expected = 400 if sees(body) else 200
                if answer.status_code != expected:
                    refused.append((one["client"], one["path"], answer.text[:300]))
                elif body.get("stream"):
                    assert not BROKEN.search(answer.text), one["client"]
                answered.add(one["client"])
        assert refused == []
        assert len(answered) >= 30

    asyncio.run(main())
