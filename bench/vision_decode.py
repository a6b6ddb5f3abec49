"""Compare a Qwen3-VL's decode step on a GPU with that of a Qwen3 of the same sizes.

    python bench/vision_decode.py --model 2b|8b [--batches 1 8 64] [--rounds 3] [--out FILE]

True configurations, random weights in bfloat16. `sees`: every prompt holds one image of its own
(768 tokens) and 32 tokens of text. `text`: the same model, prompts of as many text tokens. `dense`:
the text model alone, as `Qwen3ForCausalLM`, the same prompts. Milliseconds per step by the device's
own clock over 150 steps in which all rows decode: medians of the rounds, and every value.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import importlib.metadata
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from vision import IDS, MODELS, TEXT, Runs, configuration, write_model

import nanoactor
from nanoactor import AsyncLLM

PROMPT = 770 + TEXT
STEPS, TOKENS = 150, 600


def write_dense(name: str, directory: Path) -> str:
    """A directory with the text model's configuration alone."""
    config = configuration(name)["text_config"]
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    del config["rope_scaling"]
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


class Windows:
    """Stretches in which all rows of an engine decode."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm, self.runs = llm, Runs(llm, IDS, 10_000)
        self.params = dataclasses.replace(self.runs.params, max_tokens=TOKENS)

    def prompt(self, sees: bool) -> dict[str, Any]:
        return self.runs.prompt() if sees else {"prompt_token_ids": self.runs.text(PROMPT)}

    async def figures(self) -> dict[str, float]:
        actor = (await self.llm.statistics())["runner.0"]["actor"]
        return {name: actor[name] for name in ("steps_done", "busy_seconds", "idle_seconds")}

    async def window(self, rows: int, sees: bool) -> dict[str, float]:
        """Milliseconds a step, and the share that the device idled."""
        decoding, left = 0, asyncio.Event()
        started = asyncio.Event()

        async def one(prompt: dict[str, Any]) -> None:
            nonlocal decoding
            first = True
            async for _ in self.llm.generate(prompt, self.params):
                decoding += first
                first = False
                if decoding == rows:
                    started.set()
            left.set()

        tasks = [asyncio.ensure_future(one(self.prompt(sees))) for _ in range(rows)]
        await started.wait()
        await asyncio.sleep(0.02)  # what was prefilled in between is behind us
        before = after = await self.figures()
        while after["steps_done"] < before["steps_done"] + STEPS:
            await asyncio.sleep(0.003)
            after = await self.figures()
        assert not left.is_set(), "a row ended inside the window"
        await asyncio.gather(*tasks)
        steps, busy, idle = (after[name] - before[name] for name in before)
        return {"ms": busy / steps * 1e3, "idle_share": idle / (busy + idle)}

    async def rounds(self, batches: list[int], rounds: int, sees: bool) -> dict[str, Any]:
        found = {}
        for rows in batches:
            await self.window(rows, sees)
            made = [await self.window(rows, sees) for _ in range(rounds)]
            found[str(rows)] = {
                "ms": round(statistics.median(row["ms"] for row in made), 4),
                "all": [{name: round(value, 5) for name, value in row.items()} for row in made],
            }
        return found


async def measure(model: str, args: argparse.Namespace, kinds: dict[str, bool]) -> dict[str, Any]:
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    async with AsyncLLM(model, device="cuda", max_model_len=2048, **options) as llm:
        windows = Windows(llm)
        return {
            name: await windows.rounds(args.batches, args.rounds, sees)
            for name, sees in kinds.items()
        }


def main() -> None:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--model", choices=MODELS, default="2b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for write, kinds in (
        (write_model, {"sees": True, "text": False}),
        (write_dense, {"dense": False}),
    ):
        with tempfile.TemporaryDirectory() as directory:
            model = write(args.model, Path(directory))
            found |= asyncio.run(measure(model, args, kinds))
    import torch

    given = [word for word in sys.argv[1:] if word not in ("--out", str(args.out))]
    report = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", "bench/vision_decode.py", *given]),
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "nanoactor": nanoactor.__version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        },
        "decode": found,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
