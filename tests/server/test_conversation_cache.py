"""The conversations of coding agents stay in the prefix cache, whatever varies without meaning."""

import asyncio
import itertools
import json
import re
import shutil
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.server.harness import here, url
from tests.server.scripted import directory, with_weights
from tests.server.test_images import data_url, drawn
from tests.text.test_chat import THINKING

BLOCK = 16
SYSTEM = "You work in a folder of files. Read before you write, and say what you did. " * 4
SCHEMAS = {
    "read": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["path"],
        "additionalProperties": False,
    },
    "run": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
        "required": ["command"],
    },
}
TURNS = 5


def shuffled(value, turn):
    """The same value, its members in a different order with every second turn."""
    if isinstance(value, dict):
        names = sorted(value, reverse=bool(turn % 2))
        return {name: shuffled(value[name], turn) for name in names}
    return [shuffled(one, turn) for one in value] if isinstance(value, list) else value


# -- as Claude Code writes its requests ---------------------------------------------------


def anthropic_turns(parallel, thoughts):
    """The body of each turn: one message of the user's, then calls and their results."""
    ids = itertools.count()
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "List the files."}]},
        {"role": "system", "content": [{"type": "text", "text": "Today is Friday. " * 6}]},
    ]
    for turn in range(TURNS):
        yield {
            "model": "m",
            "max_tokens": 8,
            "messages": json.loads(json.dumps(messages)),
            "system": [
                {
                    "type": "text",
                    "text": f"x-anthropic-billing-header: cc_version=2.{turn}; cch={turn:05}",
                },
                {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
            ],
            "tools": [
                {"name": name, "description": f"to {name}", "input_schema": schema}
                for name, schema in SCHEMAS.items()
            ],
            "thinking": {"type": "adaptive" if thoughts else "disabled"},
            "metadata": {"user_id": f"u{turn}"},
        }
        uses = [
            {"type": "tool_use", "id": f"t{next(ids)}", "name": name, "input": arguments}
            for name, arguments in (
                ("read", {"path": f"a{turn}", "limit": 9}),
                ("run", {"command": "ls"}),
            )
        ][: 2 if parallel else 1]
        said = [{"type": "text", "text": f"I look, turn {turn}."}]
        if thoughts:
            said = [{"type": "thinking", "thinking": f"Hm {turn}.", "signature": "s"}, *said]
        shown = [{"type": "text", "text": f"README.md, setup.py, {turn}"}]
        results = [
            {"type": "tool_result", "tool_use_id": use["id"], "content": shown} for use in uses
        ]
        messages += [
            {"role": "assistant", "content": [*said, *uses]},
            {"role": "user", "content": results},
        ]


def varied_anthropic(body, turn):
    """The same body with what changes between turns and means nothing."""
    body = shuffled(body, turn)
    for message in body["messages"]:
        content = message["content"]
        if (
            isinstance(content, list)
            and len(content) == 1
            and content[0]["type"] == "text"
            and turn % 2
        ):
            message["content"] = content[0]["text"]
        for block in message["content"] if isinstance(message["content"], list) else ():
            if block["type"] in ("tool_result", "text"):
                block["cache_control"] = {"type": "ephemeral", "ttl": f"{turn}m"}
    body["messages"][-1]["id"] = f"m{turn}"
    return body


# -- as Codex writes them -----------------------------------------------------------------


def responses_turns(parallel, thoughts):
    """The body of each turn."""
    ids = itertools.count()
    items = [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": SYSTEM}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List."}]},
    ]
    for turn in range(TURNS):
        yield {
            "model": "m",
            "max_output_tokens": 8,
            "input": json.loads(json.dumps(items)),
            "tools": [
                {"type": "function", "name": name, "parameters": schema, "strict": False}
                for name, schema in SCHEMAS.items()
            ],
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": f"k{turn}",
        }
        if thoughts:
            told = [{"type": "reasoning_text", "text": f"Hm {turn}."}]
            items.append({"type": "reasoning", "id": f"r{turn}", "summary": [], "content": told})
        calls = [(f"c{next(ids)}", name) for name in SCHEMAS][: 2 if parallel else 1]
        items += [
            {
                "type": "function_call",
                "id": f"f{call}",
                "call_id": call,
                "name": name,
                "arguments": '{"path": "a"}',
            }
            for call, name in calls
        ]
        items += [
            {"type": "function_call_output", "call_id": call, "output": f"README.md {turn}"}
            for call, _ in calls
        ]


def varied_responses(body, turn):
    """The same body with what changes between turns and means nothing."""
    body = shuffled(body, turn)
    for item in body["input"]:
        item["id"] = f"{turn}-{item.get('id')}"
        content = item.get("content")
        if item["type"] == "message" and turn % 2:
            item["content"] = content[0]["text"]
        if item["type"] == "function_call_output" and turn % 2:
            item["output"] = [{"type": "input_text", "text": item["output"]}]
    return body


def anthropic_usage(answer):
    usage = answer["usage"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage[
        "cache_read_input_tokens"
    ]


def responses_usage(answer):
    usage = answer["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


KINDS = {
    "messages": ("/v1/messages", anthropic_turns, varied_anthropic, anthropic_usage),
    "responses": ("/v1/responses", responses_turns, varied_responses, responses_usage),
}


def computed_again(server):
    """Tokens of turns before that the cache did not hold, as the metric tells."""
    text = server.metrics.text().decode()
    return float(re.search(r'nanoactor_turn_tokens_total{fate="computed"} (\S+)', text)[1])


async def play(client, path, bodies, usage_of):
    """Send each turn; the prompt of the turn before comes from the cache."""
    before = 0
    for turn, body in enumerate(bodies):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        prompt, cached = usage_of(answer.json())
        assert cached >= (before - 1) // BLOCK * BLOCK if before else cached == 0, turn
        assert prompt > before
        before = prompt


USUAL = {("messages", True, True), ("responses", True, False), ("messages", False, False)}


@pytest.mark.parametrize(
    ("kind", "parallel", "thoughts"),
    [
        pytest.param(*case, marks=() if case in USUAL else pytest.mark.long)
        for case in itertools.product(KINDS, [False, True], [False, True])
    ],
)
def test_each_turn_finds_the_prompt_of_the_one_before(tmp_path, kind, parallel, thoughts):
    path, turns, varied, usage_of = KINDS[kind]

    async def main():
        model = str(with_weights(directory(tmp_path)))
        options = dict(device="cpu", threads=1, num_kv_blocks=512, block_size=BLOCK)
        async with (
            here(model, config={"served_model_name": "m"}, placement="single", **options) as server,
            httpx.AsyncClient(base_url=url(server), timeout=120) as client,
        ):
            bodies = turns(parallel, thoughts)
            sent = (varied(body, turn) for turn, body in enumerate(bodies))
            await play(client, path, sent, usage_of)
            assert computed_again(server) == 0

    asyncio.run(main())


def test_what_a_template_drops_from_the_history_is_counted(tmp_path):
    """As Qwen3's, it shows no thoughts of turns before the user's last message."""

    async def main():
        model = str(with_weights(directory(tmp_path)))
        options = dict(device="cpu", threads=1, num_kv_blocks=512, block_size=BLOCK)
        async with (
            here(model, config={"served_model_name": "m"}, placement="single", **options) as server,
            httpx.AsyncClient(base_url=url(server), timeout=120) as client,
        ):
            bodies = list(anthropic_turns(parallel=False, thoughts=True))
            asked = bodies[-1]["messages"] + [{"role": "user", "content": "And now?"}]
            for body in (bodies[-1], {**bodies[-1], "messages": asked}):
                answer = await client.post("/v1/messages", json=body)
                assert answer.status_code == 200, answer.text
            text = server.metrics.text().decode()
            counted = dict(re.findall(r'nanoactor_turn_tokens_total{fate="(\w+)"} (\S+)', text))
            assert float(counted["computed"]) > 0
            assert float(counted["reused"]) > 0, "the system's text and the tools"

    asyncio.run(main())


# -- images -----------------------------------------------------------------------------

SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
DEMO_VL = Path(__file__).parents[2] / "models" / "demo_vl"


def seeing(path):
    """The demo that sees, with room for such a conversation and a template for tools."""
    shutil.copytree(DEMO_VL, path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py"))
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 16_384
    (path / "config.json").write_text(json.dumps(config))
    part = "{{ part.text if part is mapping else part }}"
    assert part in THINKING
    template = THINKING.replace(
        part, f"{{% if part.type == 'image' %}}{SHOWN}{{% else %}}{part}{{% endif %}}"
    )
    named = json.loads((path / "tokenizer_config.json").read_text())
    named |= {"chat_template": template, "model_max_length": 16_384}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    return path


def image(number):
    return data_url(drawn(f"{number}{number + 1}"))


def seen_messages(body):
    """The same turn with an image in the question, and one in each result of a tool."""
    for number, message in enumerate(body["messages"]):
        if message["role"] == "user":
            data = image(number).partition(",")[2]
            source = {"type": "base64", "media_type": "image/png", "data": data}
            one = {"type": "image", "source": source}
            first = message["content"][0]
            (first if first["type"] == "tool_result" else message)["content"].append(one)
    return body


def seen_responses(body):
    """Likewise."""
    for number, item in enumerate(body["input"]):
        one = {"type": "input_image", "image_url": image(number)}
        if item.get("role") == "user":
            item["content"].append(one)
        elif item["type"] == "function_call_output":
            item["output"] = [{"type": "input_text", "text": item["output"]}, one]
    return body


SEEN = {"messages": seen_messages, "responses": seen_responses}


@pytest.mark.parametrize("kind", KINDS)
def test_each_turn_finds_the_images_of_those_before(tmp_path, kind):
    path, turns, _, usage_of = KINDS[kind]

    async def main():
        options = dict(device="cpu", threads=1, num_kv_blocks=1024, block_size=BLOCK)
        async with (
            here(str(seeing(tmp_path)), config={"served_model_name": "m"}, **options) as server,
            httpx.AsyncClient(base_url=url(server), timeout=120) as client,
        ):
            bodies = [
                shuffled(SEEN[kind](body), turn) for turn, body in enumerate(turns(False, False))
            ]
            await play(client, path, bodies, usage_of)
            assert computed_again(server) == 0
            count = {"messages": "count_tokens", "responses": "input_tokens"}[kind]
            known = {"model", "input", "messages", "system", "tools", "thinking"}
            asked = {name: value for name, value in bodies[-1].items() if name in known}
            counted = await client.post(f"{path}/{count}", json=asked)
            whole = usage_of((await client.post(path, json=bodies[-1])).json())[0]
            assert counted.json()["input_tokens"] == whole

    asyncio.run(main())
