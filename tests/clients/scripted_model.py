"""A server whose model answers sensibly: `python -m tests.clients.scripted_model DIRECTORY PORT`.

The server is the real one, on a simulated device. A text is chosen for each chat, by whichever API
it came: a harmless call where tools are offered and none was answered yet, an example of the schema
where a form is asked for, else a short sentence. The device samples that text, character by
character, and under a grammar the longest of its tokens that the mask allows.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from pathlib import Path

import numpy as np

from nanoactor import AsyncLLM
from nanoactor.runner.simulated import SimulatedExecutor
from nanoactor.server.app import Server
from nanoactor.server.config import ServerConfig
from nanoactor.server.live_answers import LiveAnswers
from nanoactor.server.requests import ChatRequest
from nanoactor.text.tokenizer import load_tokenizer
from tests.server.scripted import END, directory
from tests.text.test_chat import DEMO

CONTEXT = 262_144
SAID = "All is well."
HARMLESS = (
    *("get_weather", "list_directory", "list_files", "glob", "Glob", "LS", "ls", "exec_command"),
    *("run_shell_command", "bash", "Bash", "shell", "read_file", "Read", "read"),
)
"""Tools that agents have, and that a test may let them call."""
_VALUES = {"command": "ls", "cmd": "ls", "pattern": "*.md", "path": ".", "file_path": "README.md"}


def example(schema, root=None, depth=0):
    """A value that a schema allows, with little in it."""
    root = schema if root is None else root
    if not isinstance(schema, dict) or depth > 8:
        return "x"
    if "$ref" in schema:
        found = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found.get(part, {})
        return example(found, root, depth + 1)
    for word in ("anyOf", "oneOf", "allOf"):
        if schema.get(word):
            return example(schema[word][0], root, depth + 1)
    if "const" in schema or schema.get("enum"):
        return schema.get("const", (schema.get("enum") or [None])[0])
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object" or "properties" in schema:
        members = schema.get("properties", {})
        wanted = [name for name in members if name in schema.get("required", ())]
        return {name: example(members[name], root, depth + 1) for name in wanted}
    if kind == "array":
        return [example(schema.get("items", {}), root, depth + 1)] * schema.get("minItems", 0)
    plain = {"integer": schema.get("minimum", 1), "number": 1, "boolean": True, "null": None}
    return plain.get(kind, "Oslo")


def arguments(schema):
    """Arguments with which a call does no harm."""
    found = example(schema)
    members = schema.get("properties", {})
    for name, value in _VALUES.items():
        if name in members and (name in found or name in ("command", "cmd", "pattern")):
            is_list = members[name].get("type") == "array"
            found[name] = [value] if is_list else value
    return found


def plan(body: ChatRequest) -> str:
    """The answer to a chat."""
    tools = {tool.function.name: tool.function for tool in body.tools or ()}
    roles = [message.role for message in body.messages]
    last = max((n for n, role in enumerate(roles) if role == "user"), default=0)
    answered = "tool" in roles[last:]
    choice, named = body.tool_choice, getattr(body.tool_choice, "function", None)
    demanded = named is not None or choice == "required"
    if tools and choice != "none" and (demanded or not answered):
        others = [one for one in tools if one not in HARMLESS]
        name = next((one for one in HARMLESS if one in tools), None)
        if answered and others:  # a tool that takes the final answer
            name = others[0]
        name = named.name if named else name
        if name is None and (demanded or len(tools) < 4):
            name = next(iter(tools))
        if name is not None:
            call = {"name": name, "arguments": arguments(tools[name].parameters or {})}
            return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    form, other = body.response_format, body.structured_outputs
    if form is not None and form.json_schema is not None:
        return json.dumps(example(form.json_schema.schema))
    if other is not None and other.json is not None:
        schema = other.json if isinstance(other.json, dict) else json.loads(other.json)
        return json.dumps(example(schema))
    if other is not None and other.choice is not None:
        return other.choice[0]
    is_object = form is not None and form.type == "json_object"
    return "{}" if is_object or other is not None else SAID


class Sayings:
    """The texts of the requests under way, by their seeds."""

    def __init__(self) -> None:
        self._tokenizer = load_tokenizer(DEMO)
        self._seeds = itertools.count(1 << 40)
        self._ids: dict[int, list[int]] = {}
        self._texts: dict[int, str] = {}
        self._begins: dict[int, int] = {}

    def install(self) -> None:
        """Have every chat of this process be answered so."""
        submit = LiveAnswers._submit

        def submitted(answers, body, wanted, how):
            if isinstance(body, ChatRequest):
                body.seed = next(self._seeds)
                text = self._texts[body.seed] = plan(body)
                encoded = [self._tokenizer.encode(c, add_special_tokens=False).ids for c in text]
                self._ids[body.seed] = [token for ids in encoded for token in ids] + [END]
            return submit(answers, body, wanted, how)

        LiveAnswers._submit = submitted
        SimulatedExecutor._tokens = lambda device, positions, seeds: self._sampled(positions, seeds)
        SimulatedExecutor._masked = lambda device, masks, positions, seeds: self._masked(
            seeds.tolist(), masks
        )

    def _sampled(self, positions, seeds):
        tokens = []
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True):
            ids = self._ids.get(seed, [END])
            at = position - self._begins.setdefault(seed, position)
            tokens.append(ids[min(at, len(ids) - 1)])
        return np.array(tokens, np.int32)

    def _masked(self, seeds, masks):
        tokens = np.zeros(len(seeds), np.int32)
        for row, (seed, mask) in enumerate(zip(seeds, masks, strict=True)):
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            tokens[row] = self._allowed(seed, np.flatnonzero(bits).tolist())
        return tokens

    def _allowed(self, seed, allowed):
        """The longest allowed token with which what is left of a text begins. White space that is
        not allowed is skipped; what the grammar demands besides is put in."""
        words = {token: self._tokenizer.decode([token]) for token in allowed if token != END}
        left = self._texts.get(seed, "")
        while True:
            fitting = [t for t, word in words.items() if word and left.startswith(word)]
            if fitting or not left[:1].isspace():
                break
            left = left[1:]
        if fitting:
            token = max(fitting, key=lambda one: len(words[one]))
            left = left[len(words[token]) :]
        elif END in allowed:
            token = END
        else:
            token = next((t for t, word in words.items() if word.strip()), allowed[0])
        self._texts[seed] = left
        return token


async def serve(model: Path, port: int) -> None:
    """Serve until a signal comes."""
    Sayings().install()
    llm = AsyncLLM(
        str(model),
        placement="single",
        device="simulated:1",
        max_num_seqs=8,
        max_num_batched_tokens=65536,
        jump_forward=False,
    )
    server = Server(llm, ServerConfig(port=port, served_model_name="m"))
    await server.start()
    print(f"listening on http://127.0.0.1:{server.port}", flush=True)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    await server.stop()


def main() -> None:
    """Make the model's directory and serve it."""
    path, port = Path(sys.argv[1]), int(sys.argv[2])
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads((directory(path) / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    asyncio.run(serve(path, port))


if __name__ == "__main__":
    main()
