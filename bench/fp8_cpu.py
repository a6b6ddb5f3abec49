"""FP8 weights on a CPU: what do they cost, and what do they save?

    python bench/fp8_cpu.py [--layers 16] [--rounds 3] [--tokens 32] [--out FILE]

Random weights of about 1 B parameters (--layers 16), as bfloat16 and packed in FP8 blocks of 128 x
128, in engines that take turns: output tokens/s of 1 and of 8 equal streams with prompts of 32
tokens, and the resident memory of the process that computes, less that of one with a model of a
single layer.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import uvloop
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent))

import nanoactor
from nanoactor import AsyncLLM, RequestOutputKind, SamplingParams

BLOCK, LARGEST = 128, 448.0
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}
PACKED = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}
STREAMS = 1, 8


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    heads, kv = 16 * 128, 8 * 128
    found = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden)}
    for number in range(layers):
        at = f"model.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{name}.weight"] = (hidden,)
        for name, outputs in (("q", heads), ("k", kv), ("v", kv)):
            found[f"{at}.self_attn.{name}_proj.weight"] = (outputs, hidden)
        for name in "qk":
            found[f"{at}.self_attn.{name}_norm.weight"] = (128,)
        found[f"{at}.self_attn.o_proj.weight"] = (hidden, heads)
        for name in ("gate", "up"):
            found[f"{at}.mlp.{name}_proj.weight"] = (inner, hidden)
        found[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
    return found | {"model.norm.weight": (hidden,)}


def write(directory: Path, layers: int, packed: bool) -> int:
    """Write a checkpoint; returns its number of parameters."""
    generator = torch.Generator().manual_seed(0)
    tensors, count = {}, 0
    for name, shape in shapes(layers).items():
        count += torch.Size(shape).numel()
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        matrix = torch.empty(shape).normal_(0, 0.02, generator=generator)
        if not packed or not name.endswith("_proj.weight"):
            tensors[name] = matrix.bfloat16()
            continue
        rows, columns = shape[0] // BLOCK, shape[1] // BLOCK
        blocks = matrix.view(rows, BLOCK, columns, BLOCK)
        scales = blocks.abs().amax((1, 3)) / LARGEST
        blocks /= scales[:, None, :, None]
        tensors[name] = matrix.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, directory / "model.safetensors")
    text = CONFIG | {"num_hidden_layers": layers}
    text |= {"quantization_config": PACKED} if packed else {}
    (directory / "config.json").write_text(json.dumps(text))
    return count


def resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


async def measure(directory: Path, tokens: int, seed: int) -> dict:
    params = SamplingParams.for_model(
        temperature=0.0,
        max_tokens=tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    options = {"dtype": "bfloat16", "num_kv_blocks": 128, "max_model_len": 512}
    options["max_num_seqs"] = 8
    begin = time.monotonic()
    async with AsyncLLM(str(directory), skip_tokenizer_init=True, **options) as llm:
        ready = time.monotonic() - begin

        async def one(number: int) -> None:
            prompt = [(seed * 991 + number * 31 + i * 7) % 32000 for i in range(32)]
            async for _ in llm.generate({"prompt_token_ids": prompt}, params):
                pass

        rates = {}
        for streams in STREAMS:
            await one(100 + streams)
            begin = time.monotonic()
            await asyncio.gather(*(one(n) for n in range(streams)))
            rates[streams] = streams * tokens / (time.monotonic() - begin)
        return {"start_s": ready, "rss": resident(llm.pids["runner.0"]), "tokens_per_s": rates}


async def run(args: argparse.Namespace) -> dict:
    found: dict[str, list[dict]] = {"bfloat16": [], "fp8": []}
    with tempfile.TemporaryDirectory() as home:
        places = {name: Path(home) / name for name in (*found, "small")}
        for name, place in places.items():
            place.mkdir()
            layers = 1 if name == "small" else args.layers
            count = write(place, layers, packed=name == "fp8")
            if name != "small":
                parameters = count
        small = await measure(places["small"], 4, 0)
        for number in range(args.rounds):
            for name in found:
                found[name].append(await measure(places[name], args.tokens, number))
                print(name, json.dumps(found[name][-1]))
    medians = {
        name: {
            "start_s": statistics.median(one["start_s"] for one in runs),
            "mib": (statistics.median(one["rss"] for one in runs) - small["rss"]) / 2**20,
            "tokens_per_s": {
                n: statistics.median(one["tokens_per_s"][n] for one in runs) for n in STREAMS
            },
        }
        for name, runs in found.items()
    }
    ratios = {
        n: [
            b["tokens_per_s"][n] / a["tokens_per_s"][n]
            for a, b in zip(found["bfloat16"], found["fp8"], strict=True)
        ]
        for n in STREAMS
    }
    return {
        "question": "what do FP8 weights cost and save on a CPU?",
        "command": " ".join(["python", "bench/fp8_cpu.py", *args.given]),
        "date": datetime.date.today().isoformat(),
        "versions": {
            "nanoactor": nanoactor.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "parameters": parameters,
        "medians": medians,
        "fp8_over_bfloat16": ratios,
        "memory_ratio": medians["fp8"]["mib"] / medians["bfloat16"]["mib"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.given = [a for a in sys.argv[1:] if not a.startswith("--out") and a != str(args.out)]
    report = uvloop.run(run(args))
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
