"""Read several streams at once and print each piece of text when it arrives.

    python examples/streaming.py
    python examples/streaming.py "Once upon a time" "A good morning begins" --model Qwen/Qwen3-0.6B

All streams run in the same steps of the engine, so three take hardly longer than one.
"""

import argparse
import asyncio
import contextlib
import time

from nanoactor import AsyncLLM, RequestOutputKind, SamplingParams


async def read(llm: AsyncLLM, number: int, prompt: str, max_tokens: int) -> str:
    """Print the pieces of one stream and return its whole text."""
    # With `DELTA`, each output has only the text since the previous one; the default,
    # `CUMULATIVE`, repeats all of it.
    params = SamplingParams(max_tokens=max_tokens, seed=number, output_kind=RequestOutputKind.DELTA)
    begin, text = time.monotonic(), ""
    # `aclosing` closes the stream as soon as the block is left. That aborts the request and frees
    # its memory, whether the block is left by `break`, by an error or by cancellation.
    async with contextlib.aclosing(llm.generate(prompt, params)) as outputs:
        async for output in outputs:
            (answer,) = output.outputs
            text += answer.text
            print(f"{time.monotonic() - begin:6.3f} s  stream {number}  {answer.text!r}")
    return text


async def run(model: str, prompts: list[str], max_tokens: int) -> None:
    """Start the engine, read all streams, and print the whole texts."""
    async with AsyncLLM(model) as llm, asyncio.TaskGroup() as group:
        streams = [
            group.create_task(read(llm, number, prompt, max_tokens))
            for number, prompt in enumerate(prompts, 1)
        ]
    for number, (prompt, stream) in enumerate(zip(prompts, streams, strict=True), 1):
        print(f"\n--- stream {number} ---\n{prompt}{stream.result()}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Read several streams at once.")
    parser.add_argument("prompts", nargs="*", default=["ROMEO:\n", "JULIET:\n", "HAMLET:\n"])
    parser.add_argument("--model", default="demo", help="a directory, or a name on the hub")
    parser.add_argument("--max-tokens", type=int, default=24)
    given = parser.parse_args()
    asyncio.run(run(given.model, given.prompts, given.max_tokens))


if __name__ == "__main__":
    main()
