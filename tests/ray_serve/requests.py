"""A model that sees and calls tools, and twelve kinds of seeded requests to it, long enough to be
met by a death."""

import base64
import json
import shutil
from pathlib import Path

import nanoactor

ROOT = Path(nanoactor.__file__).parent
IMAGE = ROOT.parent / "examples" / "three-digits.png"
TOOLS = "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
TEXT = "ROMEO:\nBut soft, what light through yonder window breaks? "
CHAT = [{"role": "user", "content": "Speak the speech, I pray you"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 60}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def make_model(directory):
    """demo-vl with a template that shows tools; its tokens are bytes, so that at a high temperature
    characters are cut everywhere."""
    shutil.copytree(ROOT / "models" / "demo_vl", directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = TOOLS + config["chat_template"]
    path.write_text(json.dumps(config))
    return directory


def kinds(seed, tokens):
    """(path, body) of each kind."""
    long = {"max_tokens": tokens, "seed": seed, "temperature": 3.0}
    free = {**long, "ignore_eos": True}
    least = {**long, "min_tokens": tokens // 2}
    text = {"model": "demo", "prompt": f"{TEXT}{seed}"}
    chat = {"model": "demo", "messages": CHAT}
    return [
        (COMPLETIONS, {**text, **free, "temperature": 0}),
        (COMPLETIONS, {**text, **free, "top_p": 0.9}),
        (COMPLETIONS, {**text, **least, "stop": ["e", "\n\n", "7"]}),
        (COMPLETIONS, {**text, **free, "logprobs": 2}),
        (COMPLETIONS, {**text, **free, "n": 3, "max_tokens": tokens // 2}),
        (COMPLETIONS, {**text, **free, "presence_penalty": 1.2, "frequency_penalty": 0.4}),
        (COMPLETIONS, {**text, **free, "stop": ["zzzz"], "include_stop_str_in_output": True}),
        (CHATS, {**chat, **least, "logprobs": True, "top_logprobs": 2}),
        (CHATS, {**chat, **long, "response_format": _schema()}),
        (CHATS, {**chat, **long, "tools": [TOOL], "tool_choice": "required"}),
        (COMPLETIONS, {**text, **long, "guided_regex": r"([a-z]{2,8} ){12,40}\d{3}"}),
        (CHATS, {"model": "demo", "messages": _seen(seed), **free}),
    ]


def _seen(seed):
    data = base64.b64encode(IMAGE.read_bytes()).decode()
    url = {"url": f"data:image/png;base64,{data}"}
    parts = [{"type": "text", "text": f"{seed}: "}, {"type": "image_url", "image_url": url}]
    return [{"role": "user", "content": parts}]


def _schema():
    return {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
    }
