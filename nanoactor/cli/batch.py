"""`nanoactor generate --prompts FILE`: answers each line of a file, and prints one JSON object per
line."""

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

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
_REQUEST_ERRORS = (InvalidRequest, PoisonRequest, ComputationFailed)
_SUBMIT_AHEAD = 4
"""Maximum number of lines in progress or waiting to be printed, as a multiple of `max_num_seqs`.
Answers are printed in order, so a slow answer delays those after it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A line of the prompt file: a prompt and its parameters."""

    prompt: Prompt
    parameters: Mapping[str, Any]
    """Sampling parameters of this line, which override those of the command line."""
    id: Any = None
    """Identifier that is copied to the answer; None for no identifier."""


def parse_line(text: str) -> Line:
    """Parse a line: a JSON string, or an object with `prompt`, `prompt_token_ids` or `messages`,
    and optionally `id` and sampling parameters. Raises `InvalidRequest` for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the line is not valid JSON: {error}") from None
    if isinstance(value, str):
        return Line(value, {})
    if not isinstance(value, dict):
        raise InvalidRequest("the line must be a JSON string or a JSON object")
    present = [name for name in _PROMPT_KEYS if name in value]
    if len(present) != 1:
        raise InvalidRequest(
            f"the object must have exactly one of the keys {', '.join(_PROMPT_KEYS)}"
        )
    (name,) = present
    prompt = {name: value[name]} if name == "prompt_token_ids" else value[name]
    if not isinstance(value[name], str if name == "prompt" else list):
        raise InvalidRequest(f"`{name}` must be a {'string' if name == 'prompt' else 'list'}")
    parameters = {key: parameter for key, parameter in value.items() if key not in {name, "id"}}
    return Line(prompt, parameters, value.get("id"))


def read_lines(path: str) -> Iterator[str]:
    """Yield all lines of a file that are not blank. "-" reads standard input. Raises
    `InvalidRequest` if the file cannot be read."""
    try:
        with sys.stdin if path == "-" else open(path, encoding="utf-8") as file:
            yield from (line for line in file if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--prompts: {path} cannot be read: {error}") from None


async def run_batch(llm: AsyncLLM, path: str, parameters: Mapping[str, Any]) -> bool:
    """Answer every line of a file. `parameters` are the sampling parameters of the command line.

    One JSON object is printed per line, in the order of the file, as soon as it and all earlier
    ones are complete. Return False if any line failed. Raises `InvalidRequest` if the file cannot
    be read.
    """
    max_pending = _SUBMIT_AHEAD * llm.config.max_num_seqs
    lines, succeeded = enumerate(read_lines(path)), True
    pending: collections.deque[asyncio.Task[dict[str, Any]]] = collections.deque()
    try:
        while (numbered_line := await asyncio.to_thread(next, lines, None)) is not None or pending:
            if numbered_line is not None:
                pending.append(asyncio.create_task(answer_line(llm, *numbered_line, parameters)))
            if numbered_line is None or len(pending) == max_pending:
                result = await pending.popleft()
                succeeded &= "error" not in result
                print(json.dumps(result), flush=True)
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return succeeded


async def answer_line(
    llm: AsyncLLM, number: int, text: str, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the answer to a line as a JSON object. If the line is invalid or fails, the object has
    the error instead. Errors that end the engine are raised."""
    result: dict[str, Any] = {"index": number}
    try:
        line = parse_line(text)
        result |= {} if line.id is None else {"id": line.id}
        params = SamplingParams.for_model(
            **{**parameters, **line.parameters, "output_kind": RequestOutputKind.FINAL_ONLY}
        )
        async for output in llm.generate(line.prompt, params):
            result |= as_json(output)
    except _REQUEST_ERRORS as error:
        result["error"] = {"type": type(error).__name__, "message": str(error)}
    return result


def as_json(output: RequestOutput) -> dict[str, Any]:
    """Convert the output of a finished request to a JSON object."""
    return {
        "outputs": [
            {
                "index": completion.index,
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for completion in output.outputs
        ],
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
    }
