"""Time to the first token of a request with an image, and where it goes.

    python bench/vision.py --model demo|tiny|2b|8b [--device cpu] [--rounds 5] [--rate 8]
                           [--requests 40] [--peer transformers] [--out FILE]
    python bench/vision.py --streams 64 [--images 32] [--rounds 3] [--out FILE]

A JPEG of 1,024 x 768 pixels (768 tokens; every one is new) and 32 tokens of text, greedy. idle: one
request at a time: the whole, and of it what the worker took to name it and to decode and resize it,
the device to encode it and to prefill (by their own spans), and the rest, `wait`; for comparison, a
prompt of as many text tokens, which has no image to encode. second: the next turn of the same
conversation. worker_alone: decoding and resizing one after the other. rate: an open loop of so many
requests a second. transformers: its PIL processor and one forward pass of the same model, after the
engine has ended. Models other than the demo have random weights of the true configurations ("tiny":
of a few million parameters).

The second form runs so many text streams on a simulated device of 5 ms, round by round without and
with images of 12 megapixels that arrive at once: gaps between tokens as the user sees them,
how late that loop was at most (`loop_held_ms`; who shares the processor counts too), how long one
of its callbacks computed at most (`callback_cpu_ms`, of its thread), and the share of the time that
the device idled.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.metadata
import io
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))

import nanoactor
from nanoactor import AsyncLLM, SamplingParams
from nanoactor.model_files.files import resolve_model

WIDTH, HEIGHT, TEXT = 1024, 768, 32
IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
ROPE = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
TOWER = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 16}
SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304}
# (hidden, layers, heads, intermediate, tied, tower, deepstack levels)
MODELS = {
    "tiny": (256, 4, 4, 768, True, {"depth": 4, "hidden_size": 256, "intermediate_size": 512}),
    "2b": (2048, 28, 16, 6144, True, SMALL_TOWER),
    "8b": (4096, 36, 32, 12288, False, LARGE_TOWER),
}
LEVELS = {"tiny": [0, 1, 2], "2b": [5, 11, 17], "8b": [8, 16, 24]}


def configuration(name: str) -> dict[str, Any]:
    """The true configuration of a size, in the layout of a checkpoint."""
    hidden, layers, heads, inner, tied, tower = MODELS[name]
    text = {
        "model_type": "qwen3_vl_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": min(8, heads),
        "head_dim": 128,
        "intermediate_size": inner,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "rope_scaling": ROPE,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }
    vision = {**TOWER, **tower, "out_hidden_size": hidden, "num_position_embeddings": 2304}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": {**vision, "deepstack_visual_indexes": LEVELS[name]},
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        **IDS,
    }


def write_model(name: str, directory: Path) -> str:
    """A directory with everything but weights."""
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        **{key: TOWER[key] for key in ("patch_size", "temporal_patch_size")},
        "merge_size": 2,
    }
    (directory / "config.json").write_text(json.dumps(configuration(name)))
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(directory)


def jpeg(seed: int, size: tuple[int, int] = (WIDTH, HEIGHT)) -> bytes:
    """An image with large and small structures, as a camera's are."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3)).astype(np.uint8))
    image = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), np.int16)
    noisy = (image + rng.integers(-8, 9, image.shape)).clip(0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(noisy).save(out, "JPEG", quality=90)
    return out.getvalue()


SPANS = {
    "name image": "name",
    "decode image": "decode_and_resize",
    "encode": "encode",
    "forward": "prefill",
}
"""What a trace calls it, and what we do."""


def decode_alone(rounds: int) -> dict[str, float]:
    """Medians in ms of what the worker does with an image, here and one after the other."""
    found: dict[str, list[float]] = {"decode": [], "resize": []}
    for number in range(rounds):
        data = io.BytesIO(jpeg(10_000 + number))
        begin = time.perf_counter()
        image = Image.open(data).convert("RGB")
        decoded = time.perf_counter()
        np.asarray(image.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))
        found["decode"].append(decoded - begin)
        found["resize"].append(time.perf_counter() - decoded)
    return {name: round(statistics.median(v) * 1e3, 3) for name, v in found.items()}


class Runs:
    """Requests to one engine; every image is new."""

    def __init__(self, llm: AsyncLLM, ids: dict[str, int], vocabulary: int) -> None:
        self.llm, self.ids, self.seed = llm, ids, 0
        self.rng, self.vocabulary = random.Random(0), vocabulary
        self.params = SamplingParams.for_model(temperature=0.0, max_tokens=2, ignore_eos=True)

    def text(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocabulary) for _ in range(count)]

    def prompt(self) -> dict[str, Any]:
        self.seed += 1
        marks = [self.ids[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end")]
        return {
            "prompt_token_ids": [*marks, *self.text(TEXT)],
            "multi_modal_data": {"image": [jpeg(self.seed)]},
        }

    async def ask(self, prompt: dict[str, Any]) -> tuple[float, Any]:
        """(seconds to the first token, the last output)."""
        (request,) = self.llm.submit([prompt], self.params)
        async for output in request:
            last = output
        seconds = request.metrics.time_to_first_token
        assert seconds is not None
        return seconds, last

    async def idle(self, rounds: int) -> dict[str, Any]:
        """One request at a time."""
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            prompt, since = self.prompt(), time.monotonic_ns()
            first, output = await self.ask(prompt)
            spans = await self.spans(since, since + round(first * 1e9))
            spans["wait"] = first - sum(spans.values())
            answer = output.outputs[0].token_ids
            said = [*prompt["prompt_token_ids"], *answer, *self.text(TEXT)]
            turn = {**prompt, "prompt_token_ids": said}
            second, later = await self.ask(turn)
            alone, _ = await self.ask({"prompt_token_ids": self.text(len(output.prompt_token_ids))})
            row = {"ttft": first, "second_turn": second, "text_alone": alone, **spans}
            for name, value in row.items():
                found.setdefault(name, []).append(value)
            assert later.num_cached_tokens > len(output.prompt_token_ids) // 2
        middle = {name: round(statistics.median(v) * 1e3, 3) for name, v in found.items()}
        every = {name: [round(x * 1e3, 3) for x in values] for name, values in found.items()}
        return {"ms": middle, "all_ms": every}

    async def spans(self, since: int, until: int) -> dict[str, float]:
        """Seconds in the worker's spans and in the device's, before the first token."""
        total: dict[str, float] = {}
        for node in (await self.llm.trace(since)).nodes:
            for track in node.tracks:
                for span in track.spans:
                    name = SPANS.get(track.kinds[int(span["kind"])].name)
                    if name and span["begin"] < until:
                        seconds = float(min(span["end"], until) - span["begin"]) * 1e-9
                        total[name] = total.get(name, 0.0) + seconds
        return total

    async def rate(self, rate: float, requests: int) -> dict[str, Any]:
        """An open loop."""
        prompts = [self.prompt() for _ in range(requests)]
        tasks = []
        for prompt in prompts:
            tasks.append(asyncio.ensure_future(self.ask(prompt)))
            await asyncio.sleep(self.rng.expovariate(rate))
        seconds = sorted(s for s, _ in await asyncio.gather(*tasks))
        worst = seconds[min(len(seconds) - 1, round(0.99 * len(seconds)))]
        return {
            "requests": requests,
            "per_second": rate,
            "ttft_p50_ms": round(statistics.median(seconds) * 1e3, 3),
            "ttft_p99_ms": round(worst * 1e3, 3),
        }


async def run_engine(args: argparse.Namespace, model: str) -> dict[str, Any]:
    options: dict[str, Any] = {"device": args.device, "max_model_len": args.max_model_len}
    options["max_restarts"] = 0
    if args.model != "demo":
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
    async with AsyncLLM(model, **options) as llm:
        config = llm.files.config
        assert config.vision is not None
        ids = {name: getattr(config.vision, name) for name in ("image_token_id",)}
        ids["vision_start_token_id"] = config.vision.start_token_id
        ids["vision_end_token_id"] = config.vision.end_token_id
        runs = Runs(llm, ids, min(256, config.vocab_size))
        await runs.idle(2)  # warm
        found: dict[str, Any] = {"facts": llm.facts, "idle": await runs.idle(args.rounds)}
        found["worker_alone_ms"] = decode_alone(args.rounds)
        if args.rate:
            found["rate"] = await runs.rate(args.rate, args.requests)
        return found


async def run_streams(args: argparse.Namespace) -> dict[str, Any]:
    """Rounds alternate; the share that counts is with images by without, in pairs."""
    images = [jpeg(number, (4000, 3000)) for number in range(args.images)]
    rounds = []
    options: dict[str, Any] = {"device": "simulated:5", "max_num_seqs": 128}
    async with AsyncLLM("demo-vl", max_model_len=1024, **options) as llm:
        vision = llm.files.config.vision
        assert vision is not None
        await stream_round(llm, args.streams, [], vision.image_token_id)
        for number in range(args.rounds):
            # Other bytes behind the same images: nothing is found in a cache.
            fresh = [data + bytes([number]) * 8 for data in images]
            pair = {}
            for name, given in (("without", []), ("with", fresh)):
                pair[name] = await stream_round(llm, args.streams, given, vision.image_token_id)
            rounds.append(pair)
    return {"streams": args.streams, "images": args.images, "rounds": rounds}


class Callbacks:
    """Watches what an asyncio loop runs, and how long each computes."""

    def __init__(self) -> None:
        self.longest = 0.0
        """Seconds of the thread's CPU time."""

    def __enter__(self) -> Callbacks:
        """Begin."""
        self._run = run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            begin = time.thread_time()
            run(handle)
            self.longest = max(self.longest, time.thread_time() - begin)

        asyncio.Handle._run = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        asyncio.Handle._run = self._run  # type: ignore[method-assign]


async def stream_round(
    llm: AsyncLLM, streams: int, images: list[bytes], image: int
) -> dict[str, float]:
    gaps: list[float] = []
    held = [0.0]
    params = SamplingParams.for_model(max_tokens=600, ignore_eos=True, seed=1)

    async def stream(number: int) -> None:
        last, told = time.monotonic(), 0
        async for output in llm.generate({"prompt_token_ids": [number % 256, 1, 2]}, params):
            now, count = time.monotonic(), len(output.outputs[0].token_ids)
            if told:
                gaps.append((now - last) / max(1, count - told))
            last, told = now, count

    async def tick() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.001)
            held[0] = max(held[0], time.monotonic() - before - 0.001)

    async def show(data: bytes) -> None:
        one = SamplingParams.for_model(max_tokens=2, ignore_eos=True)
        prompt = {"prompt_token_ids": [image, 1], "multi_modal_data": {"image": [data]}}
        async for _ in llm.generate(prompt, one):
            pass

    ticking = asyncio.ensure_future(tick())
    before = (await llm.statistics())["runner.0"]["actor"]
    running = [asyncio.ensure_future(stream(number)) for number in range(streams)]
    await asyncio.sleep(0.5)
    with Callbacks() as callbacks:
        shown = [asyncio.ensure_future(show(data)) for data in images]
        await asyncio.gather(*running)
    after = (await llm.statistics())["runner.0"]["actor"]  # images may take longer than they
    ticking.cancel()
    seen = sum(task.done() for task in shown)
    await asyncio.gather(*shown)
    gaps.sort()
    busy, idle = (after[n] - before[n] for n in ("busy_seconds", "idle_seconds"))
    return {
        "gap_p50_ms": round(gaps[len(gaps) // 2] * 1e3, 3),
        "gap_p99_ms": round(gaps[int(0.99 * len(gaps))] * 1e3, 3),
        "loop_held_ms": round(held[0] * 1e3, 3),
        "callback_cpu_ms": round(callbacks.longest * 1e3, 3),
        "device_idle": round(idle / (busy + idle), 5),
        "steps": after["steps"] - before["steps"],
        "images_meanwhile": seen,
    }


def run_transformers(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Its processor and one forward pass, on the same device with random or the demo's weights."""
    import torch
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    kind = transformers.Qwen3VLForConditionalGeneration
    dtype = torch.bfloat16 if args.device != "cpu" else torch.float32
    with torch.device("cpu" if args.device == "cpu" else "cuda"), torch.inference_mode():
        if args.model == "demo":
            net = kind.from_pretrained(model, dtype=dtype)
        else:
            torch.set_default_dtype(dtype)
            net = kind(transformers.Qwen3VLConfig(**configuration(args.model)))
            torch.set_default_dtype(torch.float32)
        net = net.eval()
        processor = Qwen2VLImageProcessorPil.from_pretrained(model)
        times: dict[str, list[float]] = {"processor": [], "forward": []}
        for number in range(args.rounds + 1):
            begin = time.perf_counter()
            image = Image.open(io.BytesIO(jpeg(10_000 + number))).convert("RGB")
            made = processor([image], return_tensors="pt")
            read = time.perf_counter()
            count = int(made["image_grid_thw"].prod()) // 4
            token = net.config.image_token_id
            given = torch.tensor([[1, *[token] * count, *range(TEXT)]])
            net(
                given,
                mm_token_type_ids=(given == token).int(),
                pixel_values=made["pixel_values"].to(given.device, dtype),
                image_grid_thw=made["image_grid_thw"].to(given.device),
                logits_to_keep=1,
            ).logits.argmax(-1).tolist()
            times["processor"].append(read - begin)
            times["forward"].append(time.perf_counter() - read)
    middle = {name: statistics.median(values[1:]) for name, values in times.items()}
    middle["ttft"] = sum(middle.values())
    return {"ms": {name: round(value * 1e3, 3) for name, value in middle.items()}}


def main() -> None:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--model", choices=["demo", *MODELS], default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--peer", choices=["transformers"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.max_model_len is None and args.model != "demo":
        args.max_model_len = 8192
    given = [word for word in sys.argv[1:] if word not in ("--out", str(args.out))]
    with tempfile.TemporaryDirectory() as directory:
        model = "demo-vl" if args.model == "demo" else write_model(args.model, Path(directory))
        found = {
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python", "bench/vision.py", *given]),
            "versions": {
                "nanoactor": nanoactor.__version__,
                "python": platform.python_version(),
                **{n: importlib.metadata.version(n) for n in ("torch", "transformers", "pillow")},
            },
        }
        if args.streams:
            found["streams"] = asyncio.run(run_streams(args))
        else:
            found["engine"] = asyncio.run(run_engine(args, model))
        if args.peer:
            found["transformers"] = run_transformers(args, str(resolve_model(model)))
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
