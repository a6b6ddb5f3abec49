"""Answer a file of prompts: one JSON object per line in, one per line out, in the same order.

    python examples/offline_batch.py examples/prompts.jsonl answers.jsonl
    python examples/offline_batch.py my_prompts.jsonl answers.jsonl --model Qwen/Qwen3-0.6B

An input line has a `prompt` (text) or `messages` (a conversation). It may have an `id`, and
fields of `SamplingParams`, as for `nanoactor generate --prompts`:

    {"id": "a", "prompt": "ROMEO:", "max_tokens": 20, "temperature": 0}
    {"id": "b", "messages": [{"role": "user", "content": "Who is there?"}]}

Each output line has the number and the `id` of its input line, and either the answer or an `error`.
A line that cannot be answered does not stop the others. Three lines of prompts.jsonl are wrong on
purpose.
"""

import argparse
import asyncio
import json
from collections import deque
from pathlib import Path
from typing import Any

from nanoactor import (
    AsyncLLM,
    EngineClosed,
    EngineDead,
    NanoactorError,
    RequestOutputKind,
    SamplingParams,
)

AT_ONCE = 1024
"""Lines that are read but not yet written. It is larger than `max_num_seqs`, the number of requests
that the engine runs at once (256), so that the engine stays full while the oldest one runs."""


async def answer(llm: AsyncLLM, line: bytes, number: int, max_tokens: int) -> dict[str, Any]:
    """Return the output line of an input line. Raises only if the engine is gone."""
    result: dict[str, Any] = {"line": number, "id": None}
    try:
        asked = json.loads(line)
        if not isinstance(asked, dict) or ("prompt" in asked) == ("messages" in asked):
            raise ValueError("a line must be an object with either `prompt` or `messages`")
        result["id"] = asked.get("id")
        prompt = asked["prompt"] if "prompt" in asked else asked["messages"]
        # The line's own parameters come last. Its number is its seed, so that a second run gives
        # the same answers.
        own = {name: asked[name] for name in asked.keys() - {"id", "prompt", "messages"}}
        given = {"max_tokens": max_tokens, "seed": number, **own}
        # `for_model` takes parameters that are not given from the model's generation_config.json.
        # `FINAL_ONLY` asks for one output, at the end.
        params = SamplingParams.for_model(**given | {"output_kind": RequestOutputKind.FINAL_ONLY})
        if params.n != 1:
            raise ValueError("`n` must be 1: repeat the line instead")
        (output,) = [output async for output in llm.generate(prompt, params)]
    except (EngineDead, EngineClosed):  # no other line could be answered either
        raise
    except (NanoactorError, ValueError, TypeError, RecursionError) as error:
        return result | {"error": f"{type(error).__name__}: {error}"}
    (found,) = output.outputs
    return result | {
        "text": found.text,
        "finish_reason": found.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": len(found.token_ids),
    }


async def run(source: Path, target: Path, model: str, max_tokens: int) -> None:
    """Answer all lines of a file, which may be larger than memory."""
    count = errors = 0
    waiting: deque[asyncio.Task[dict[str, Any]]] = deque()

    # If the engine dies, the group cancels the tasks that remain.
    async with AsyncLLM(model) as llm, asyncio.TaskGroup() as group:
        # The only text that UTF-8 cannot encode, half of a surrogate pair, is written as JSON's
        # escape for it.
        with (
            source.open("rb") as lines,
            target.open("w", encoding="utf-8", errors="backslashreplace") as out,
        ):

            async def write_oldest() -> None:
                nonlocal count, errors
                result = await waiting.popleft()
                out.write(json.dumps(result, ensure_ascii=False) + "\n")
                count, errors = count + 1, errors + ("error" in result)

            for number, line in enumerate(lines, 1):
                if len(waiting) == AT_ONCE:
                    await write_oldest()
                waiting.append(group.create_task(answer(llm, line, number, max_tokens)))
            while waiting:
                await write_oldest()
    print(f"{count} lines, {errors} with an error, written to {target}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Answer a file of prompts.")
    parser.add_argument("source", type=Path, help="the JSONL file to read")
    parser.add_argument("target", type=Path, help="the JSONL file to write")
    parser.add_argument("--model", default="demo", help="a directory, or a name on the hub")
    parser.add_argument("--max-tokens", type=int, default=64, help="for lines without their own")
    given = parser.parse_args()
    asyncio.run(run(given.source, given.target, given.model, given.max_tokens))


if __name__ == "__main__":
    main()
