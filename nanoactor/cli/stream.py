"""The commands `nanoactor generate` and `nanoactor chat`, which print text as it is generated, and
then a line with statistics."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from nanoactor.api.engine import AsyncLLM, Prompt
from nanoactor.cli.batch import run_batch
from nanoactor.cli.options import given_values
from nanoactor.cli.stdin import LineReader
from nanoactor.errors import InvalidRequest
from nanoactor.media.prompt import IMAGE_PLACEHOLDER, VISION_END, VISION_START
from nanoactor.options.config import EngineConfig
from nanoactor.requests.outputs import CompletionOutput, Logprobs, RequestOutput, RequestOutputKind
from nanoactor.requests.params import SamplingParams

ONE_USER = {"max_num_seqs": 8}
"""Engine options for commands with a single user. With fewer batch sizes to prepare, the engine
starts faster. A file of prompts uses the engine's own defaults."""
_MIN_RATE_SECONDS = 1e-3
"""Minimum time from first to last token for which a rate is shown, in seconds."""


def _params(args: Any) -> SamplingParams:
    parameters = given_values(args, SamplingParams)
    params = SamplingParams.for_model(**parameters, output_kind=RequestOutputKind.DELTA)
    if not args.json and not params.detokenize:
        raise InvalidRequest("--no-detokenize requires --json because there is no text to print")
    if not args.json and (params.logprobs, params.prompt_logprobs) != (None, None):
        raise InvalidRequest("--logprobs and --prompt-logprobs require --json")
    return params


def _engine(args: Any, **defaults: Any) -> AsyncLLM:
    return AsyncLLM(EngineConfig(args.model, **{**defaults, **given_values(args, EngineConfig)}))


async def generate(args: Any) -> None:
    """Run the `generate` command: complete one prompt, or all prompts of a file. For a file, exit
    with status 1 if any prompt failed."""
    if args.prompts is not None:
        await _generate_all(args)
        return
    prompt = args.prompt if args.prompt is not None else sys.stdin.read()
    params = _params(args)
    _check_writable(args.trace)
    async with _engine(args, **ONE_USER) as llm:
        if not args.json:
            print(prompt, end="", flush=True)
        await _stream(llm, _with_images(prompt, args.image), params, args.json)
        await _report(llm, args)


async def _generate_all(args: Any) -> None:
    if args.prompt is not None or args.image:
        raise InvalidRequest(
            "--prompts cannot be combined with a prompt or --image, because the file "
            "contains the prompts"
        )
    parameters = given_values(args, SamplingParams)
    SamplingParams.for_model(**parameters)  # to raise errors before the engine starts
    _check_writable(args.trace)
    async with _engine(args) as llm:
        succeeded = await run_batch(llm, args.prompts, parameters)
        if args.trace is not None:
            (await llm.trace()).save(args.trace)
    if not succeeded:
        sys.exit(1)


def _with_images(text: str, files: list[str]) -> Prompt:
    """Return a prompt with a text and images. If the text has no image placeholders, one per image
    is put in front of the text."""
    if not files:
        return text
    if IMAGE_PLACEHOLDER not in text:
        text = VISION_START + IMAGE_PLACEHOLDER + VISION_END + text
        text = (VISION_START + IMAGE_PLACEHOLDER + VISION_END) * (len(files) - 1) + text
    return {"prompt": text, "multi_modal_data": {"image": [Path(file) for file in files]}}


def _check_writable(path: str | None) -> None:
    """Raise `InvalidRequest` if the file at `path` cannot be written. Do nothing if `path` is
    None."""
    if path is not None:
        try:
            with open(path, "a"):
                pass
        except OSError as error:
            raise InvalidRequest(f"--trace: {path} cannot be written: {error.strerror}") from None


async def _report(llm: AsyncLLM, args: Any) -> None:
    """Print a summary of the trace, and write the timeline to a file if one was requested."""
    trace = await llm.trace()
    if not args.json:
        print(trace.summary().line, file=sys.stderr, flush=True)
    if args.trace is not None:
        trace.save(args.trace)


async def chat(args: Any) -> None:
    """Run the `chat` command. Each request repeats the conversation so far, which is found in the
    prefix cache."""
    messages: list[dict[str, Any]] = []
    if args.system:
        messages.append({"role": "system", "content": args.system})
    params = _params(args)
    if params.n > 1:
        raise InvalidRequest(
            "--n must be 1 for a chat, because the conversation continues from one answer"
        )
    _check_writable(args.trace)
    line_reader = LineReader(sys.stdin.fileno())
    images = list(args.image)
    async with _engine(args, **ONE_USER) as llm:
        if sys.stdin.isatty() and not args.json:
            print("Press Ctrl-D on an empty line to leave.")
        while (user_text := await _read_user_line(line_reader, args.json)) is not None:
            messages.append({"role": "user", "content": _user_content(user_text, images)})
            images = []
            try:
                answer = await _stream(llm, messages, params, args.json)
            except InvalidRequest as error:  # such as a conversation that has become too long
                print(f"nanoactor: {error}", file=sys.stderr)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})
        if args.trace is not None:
            (await llm.trace()).save(args.trace)


def _user_content(text: str, files: list[str]) -> str | list[dict[str, Any]]:
    """Return the content of a user message: the images in `files`, and then the text. Images of the
    command line belong to the first message."""
    if not files:
        return text
    parts: list[dict[str, Any]] = [{"type": "image", "image": Path(file)} for file in files]
    return [*parts, {"type": "text", "text": text}]


async def _read_user_line(line_reader: LineReader, is_quiet: bool) -> str | None:
    """Print a prompt, and return the next line of input, or None at its end."""
    prompt = "" if is_quiet or not sys.stdin.isatty() else "\n> "
    print(prompt, end="", flush=True)
    return await line_reader.next()


async def _stream(llm: AsyncLLM, prompt: Prompt, params: SamplingParams, as_json: bool) -> str:
    """Print the output as it arrives, and then a summary. Return the text of the first answer.

    Several answers are printed one after the other, once all of them are complete.
    """
    texts, counts = [""] * params.n, [0] * params.n
    finish_reasons: list[str | None] = [None] * params.n
    output: RequestOutput | None = None
    async for output in llm.generate(prompt, params):
        for completion in output.outputs:
            texts[completion.index] += completion.text
            finish_reasons[completion.index] = completion.finish_reason
            counts[completion.index] += len(completion.token_ids)
            if as_json:
                print(json.dumps(_as_json(output, completion)), flush=True)
            elif params.n == 1:
                print(completion.text, end="", flush=True)
    assert output is not None
    if not as_json:
        for number, text in enumerate(texts, 1) if params.n > 1 else ():
            print(f"\n\n[{number}] {text}", end="", flush=True)
        summary = await _summary(llm, output, counts, finish_reasons)
        print(f"\n\n{summary}", file=sys.stderr, flush=True)
    return texts[0]


def _as_json(output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    metrics = output.metrics
    line: dict[str, Any] = {
        "request_id": output.request_id,
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
    }
    if completion.logprobs is not None:
        line["logprobs"] = [_token_logprobs(logprobs) for logprobs in completion.logprobs]
    if output.prompt_logprobs is not None:
        line["prompt_logprobs"] = [
            logprobs and _token_logprobs(logprobs) for logprobs in output.prompt_logprobs
        ]
    if completion.finish_reason is not None:
        line["finish_reason"] = completion.finish_reason
        line["stop_reason"] = completion.stop_reason
    if output.finished:
        line["prompt_tokens"] = len(output.prompt_token_ids)
        line["cached_tokens"] = output.num_cached_tokens
        if metrics.first_scheduled_time is not None:
            line["queue_seconds"] = metrics.first_scheduled_time - metrics.arrival_time
        line["ttft_seconds"] = metrics.time_to_first_token
        line["seconds"] = time.monotonic() - metrics.arrival_time
    return line


def _token_logprobs(logprobs: Logprobs) -> dict[int, float]:
    return {token: logprob.logprob for token, logprob in logprobs.items()}


def _rate(tokens: int, seconds: float) -> str:
    """Format the generation rate. `seconds` is the time from the first to the last token."""
    if tokens == 1:
        return "1 token"
    if seconds < _MIN_RATE_SECONDS:
        return "too few for a rate"  # all arrived at once
    return f"{(tokens - 1) / seconds:.1f} tokens/s"


async def _summary(
    llm: AsyncLLM, output: RequestOutput, counts: list[int], finish_reasons: list[str | None]
) -> str:
    metrics, prompt, tokens = output.metrics, len(output.prompt_token_ids), sum(counts)
    first, last = metrics.first_token_time, metrics.finished_time
    if first is None or last is None:
        return "no token was generated"
    facts = llm.facts
    block_size = facts["block_size"]
    shared = prompt // block_size  # all answers share the prompt's full blocks
    blocks = shared + sum(-(-(prompt + count - 1) // block_size) - shared for count in counts)
    return (
        f"{prompt} + {tokens} tokens, {_rate(tokens, last - first)}, "
        f"TTFT {1000 * (first - metrics.arrival_time):.0f} ms, "
        f"{blocks} of {facts['num_blocks']} KV blocks ({output.num_cached_tokens} tokens from "
        f"the prefix cache), {facts['dtype']}, finished: {', '.join(map(str, finish_reasons))}"
    )
