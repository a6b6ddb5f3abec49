"""`nanoactor generate --prompts FILE`: a file of prompts, one JSON object per answer."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from nanoactor.api.engine import AsyncLLM, Prompt
from nanoactor.errors import ComputationFailed, InvalidRequest, PoisonRequest
from nanoactor.requests.outputs import RequestOutput, RequestOutputKind
from nanoactor.requests.params import SamplingParams

_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_OF_ONE_REQUEST = (InvalidRequest, PoisonRequest, ComputationFailed)
_AHEAD = 4
"""Number of lines that are submitted before the first of them is complete, as a multiple of the
requests that can run at once. Answers are printed in order, so a long one delays those after it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A line of the file."""

    prompt: Prompt
    parameters: Mapping[str, Any]
    """Sampling parameters, which take precedence over those of the command line."""
    id: Any = None
    """Returned with the answer, if given."""


def parse(text: str) -> Line:
    """Parse a line: a JSON string, or an object with a `prompt`, `prompt_token_ids` or `messages`,
    and optionally an `id` and sampling parameters. Raises `InvalidRequest`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the line is not valid JSON: {error}") from None
    if isinstance(value, str):
        return Line(value, {})
    if not isinstance(value, dict):
        raise InvalidRequest("the line must be a JSON string or a JSON object")
    given = [name for name in _PROMPTS if name in value]
    if len(given) != 1:
        raise InvalidRequest(f"the object must have exactly one of {', '.join(_PROMPTS)}")
    (name,) = given
    prompt = {name: value[name]} if name == "prompt_token_ids" else value[name]
    if not isinstance(value[name], str if name == "prompt" else list):
        raise InvalidRequest(f"`{name}` must be a {'string' if name == 'prompt' else 'list'}")
    rest = {key: one for key, one in value.items() if key not in {name, "id"}}
    return Line(prompt, rest, value.get("id"))


def read(path: str) -> Iterator[str]:
    """Yield the lines of a file that are not blank; "-" is standard input. Raises `InvalidRequest`
    if the file cannot be read."""
    try:
        with sys.stdin if path == "-" else open(path, encoding="utf-8") as file:
            yield from (line for line in file if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--prompts: {path} cannot be read: {error}") from None


async def run(llm: AsyncLLM, path: str, given: Mapping[str, Any]) -> bool:
    """Answer every line of a file, with the sampling parameters `given`. Prints one JSON object per
    line, in the order of the file, each once it and all before it are complete. Returns False if a
    line has failed. Raises `InvalidRequest` if the file cannot be read."""
    most = _AHEAD * llm.config.max_num_seqs
    lines, succeeded = enumerate(read(path)), True
    pending: collections.deque[asyncio.Task[dict[str, Any]]] = collections.deque()
    try:
        while (one := await asyncio.to_thread(next, lines, None)) is not None or pending:
            if one is not None:
                pending.append(asyncio.create_task(answer(llm, *one, given)))
            if one is None or len(pending) == most:
                found = await pending.popleft()
                succeeded &= "error" not in found
                print(json.dumps(found), flush=True)
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return succeeded


async def answer(llm: AsyncLLM, number: int, text: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a line, or the error that concerns only this line. Errors that end the
    engine are raised."""
    found: dict[str, Any] = {"index": number}
    try:
        line = parse(text)
        found |= {} if line.id is None else {"id": line.id}
        params = SamplingParams.for_model(
            **{**given, **line.parameters, "output_kind": RequestOutputKind.FINAL_ONLY}
        )
        async for output in llm.generate(line.prompt, params):
            found |= as_json(output)
    except _OF_ONE_REQUEST as error:
        found["error"] = {"type": type(error).__name__, "message": str(error)}
    return found


def as_json(output: RequestOutput) -> dict[str, Any]:
    """Return a finished request as a JSON object."""
    return {
        "outputs": [
            {
                "index": one.index,
                "text": one.text,
                "token_ids": list(one.token_ids),
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
            }
            for one in output.outputs
        ],
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
    }
