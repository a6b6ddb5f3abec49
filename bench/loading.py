"""How fast is a large checkpoint loaded, and how much host memory does that take?

    python bench/loading.py --model 30b-a3b-fp8 [--layers N] [--device cuda] [--directory DIR]
                            [--rounds 2] [--out FILE]

Writes a checkpoint of the true configuration in shards of 4 GB: random weights, a tensor for each
matrix of each expert, as published. Then measures bytes per second:

- cold: an engine loads it after the page cache has been emptied of it (`posix_fadvise`);
- warm: an engine loads it from the page cache;
- disk and page cache: its files are read from first to last with `readinto`, in pieces of 16 MiB,
  cold and warm. That is what a loader can hope for with one thread.

Host memory is sampled every 50 ms in the processes of the engine: the maximum of their anonymous
and shared memory. Pages of the files themselves, which the kernel can take back, are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import logging
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent))

import nanoactor
from bench.gpu import MODELS, arguments
from nanoactor import AsyncLLM

SHARD, PIECE, BLOCK = 4 << 30, 16 << 20, 128
LOADED = re.compile(r"loaded .* in ([\d.]+) s")
Tensor = tuple[str, str, tuple[int, ...]]
"""Name, type as safetensors writes it, shape."""


def tensors(config: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors of a checkpoint, in the order of the layers."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", "BF16", (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", "BF16", (hidden,)
        for name in "qk":
            yield f"{at}self_attn.{name}_norm.weight", "BF16", (head,)
        for name, outputs in (("q", heads), ("k", kv), ("v", kv)):
            yield from matrix(config, f"{at}self_attn.{name}_proj", outputs, hidden)
        yield from matrix(config, f"{at}self_attn.o_proj", hidden, heads)
        yield from feed_forward(config, f"{at}mlp.")
    yield "model.norm.weight", "BF16", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", "BF16", (config["vocab_size"], hidden)


def feed_forward(config: dict[str, Any], at: str) -> Iterator[Tensor]:
    """The matrices of a dense layer, or a router and those of each expert."""
    hidden, experts = config["hidden_size"], config.get("num_experts", 0)
    inner = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    if experts:
        yield f"{at}gate.weight", "BF16", (experts, hidden)
    for part in [f"{at}experts.{n}." for n in range(experts)] or [at]:
        yield from matrix(config, f"{part}gate_proj", inner, hidden)
        yield from matrix(config, f"{part}up_proj", inner, hidden)
        yield from matrix(config, f"{part}down_proj", hidden, inner)


def matrix(config: dict[str, Any], name: str, outputs: int, inputs: int) -> Iterator[Tensor]:
    """A matrix in the checkpoint's format."""
    if "quantization_config" not in config:
        yield f"{name}.weight", "BF16", (outputs, inputs)
        return
    yield f"{name}.weight", "F8_E4M3", (outputs, inputs)
    yield f"{name}.weight_scale_inv", "BF16", (-(-outputs // BLOCK), -(-inputs // BLOCK))


def noise(kind: str) -> memoryview:
    """Random bytes that are finite numbers of the type: bfloat16 about 0.02, or any FP8."""
    rng = np.random.default_rng(0)
    if kind == "BF16":
        words = rng.normal(0.0, 0.02, PIECE // 2).astype(np.float32).view(np.uint32) >> 16
        return memoryview(words.astype(np.uint16).tobytes())
    codes = rng.integers(0, 127, PIECE, dtype=np.uint8)  # 127 is not a number
    return memoryview((codes | rng.integers(0, 2, PIECE, dtype=np.uint8) << 7).tobytes())


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    _, kind, shape = tensor
    return int(np.prod(shape)) * (2 if kind == "BF16" else 1)


def write(directory: Path, config: dict[str, Any]) -> list[Path]:
    """Write a sharded checkpoint; returns its weight files."""
    (directory / "config.json").write_text(json.dumps(config))
    shards: list[list[Tensor]] = [[]]
    room = SHARD
    for tensor in tensors(config):
        if (size := size_of(tensor)) > room and shards[-1]:
            shards.append([])
            room = SHARD
        shards[-1].append(tensor)
        room -= size
    sources = {kind: noise(kind) for kind in ("BF16", "F8_E4M3")}
    home, paths = {}, []
    for number, shard in enumerate(shards, 1):
        paths.append(directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        write_shard(paths[-1], shard, sources)
        home |= {name: paths[-1].name for name, *_ in shard}
    index = {"metadata": {}, "weight_map": home}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return paths


def write_shard(path: Path, shard: list[Tensor], sources: dict[str, memoryview]) -> None:
    """Write a file in the layout of safetensors: length, header, bytes."""
    header, at = {}, 0
    for tensor in shard:
        name, kind, shape = tensor
        end = at + size_of(tensor)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in shard:
            left = size_of(tensor)
            while left:
                left -= file.write(sources[tensor[1]][:left])
        file.flush()
        os.fsync(file.fileno())


def forget(paths: list[Path]) -> None:
    """Remove the files from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(paths: list[Path]) -> float:
    """Read all files from first to last; returns the seconds."""
    buffer, begin = bytearray(PIECE), time.monotonic()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.monotonic() - begin


class Seconds(logging.Handler):
    """Takes the time of loading from the log of the process that loads."""

    found: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if found := LOADED.match(record.getMessage()):
            self.found = float(found.group(1))


def host_bytes() -> int:
    """Anonymous and shared memory of this process's descendants, the runner among them."""
    parents, sizes = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (folder / "status").read_text()
            pid, found = int(folder.name), re.search(r"^PPid:\s+(\d+)", text, re.M)
            parents[pid] = int(found.group(1)) if found else 0
            sizes[pid] = sum(map(int, re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", text, re.M)))
    return sum(size for pid, size in sizes.items() if descends(pid, parents)) << 10


def descends(pid: int, parents: dict[int, int]) -> bool:
    """Whether a process is below this one."""
    while pid := parents.get(pid, 0):
        if pid == os.getpid():
            return True
    return False


@contextlib.asynccontextmanager
async def watched(peak: list[int]) -> AsyncIterator[None]:
    """Keep the maximum of the descendants' memory while the block runs."""

    async def watch() -> None:
        while True:
            peak[0] = max(peak[0], host_bytes())
            await asyncio.sleep(0.05)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


async def load(directory: Path, device: str, options: dict[str, Any]) -> dict[str, float]:
    """Start an engine; returns the seconds of loading and of the start, and the peak of memory."""
    seconds, peak = Seconds(), [0]
    log = logging.getLogger("nanoactor")
    log.addHandler(seconds)
    begin = time.monotonic()
    try:
        engine = AsyncLLM(str(directory), device=device, max_restarts=0, **options)
        async with watched(peak), engine:
            ready = time.monotonic() - begin
            after = host_bytes()
    finally:
        log.removeHandler(seconds)
    assert seconds.found is not None, "the log has no line about loading"
    return {
        "load_s": seconds.found,
        "ready_s": ready,
        "host_peak_mib": peak[0] >> 20,
        "host_ready_mib": after >> 20,
    }


def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All figures of a checkpoint."""
    config = dict(MODELS[args.model])
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    begin = time.monotonic()
    paths = write(directory, config)
    size = sum(path.stat().st_size for path in paths)
    print(f"wrote {size / 1e9:.1f} GB in {time.monotonic() - begin:.0f} s", flush=True)
    options = {"skip_tokenizer_init": True, "max_model_len": 2048, "num_kv_blocks": 512}
    options["enforce_eager"] = True
    rounds = []
    for _ in range(args.rounds):
        forget(paths)
        one: dict[str, Any] = {"cold": uvloop.run(load(directory, args.device, options))}
        one["warm"] = uvloop.run(load(directory, args.device, options))
        one["page_cache_s"] = read(paths)
        forget(paths)
        one["disk_s"] = read(paths)
        rounds.append(one)
        rates = {kind: size / one[kind]["load_s"] / 1e9 for kind in ("cold", "warm")}
        rates |= {kind: size / one[f"{kind}_s"] / 1e9 for kind in ("disk", "page_cache")}
        print(", ".join(f"{kind} {rate:.2f} GB/s" for kind, rate in rates.items()), flush=True)
        for kind in ("cold", "warm"):
            print(f"{kind}: host memory at most {one[kind]['host_peak_mib']} MiB", flush=True)
    return {"tensors": sum(1 for _ in tensors(config)), "bytes": size, "rounds": rounds}


def main() -> None:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--model", choices=MODELS, default="30b-a3b-fp8")
    parser.add_argument("--layers", type=int, help="fewer layers than the configuration has")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--directory", type=Path, help="where the checkpoint is written")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logging.getLogger("nanoactor").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        found = measure(args, Path(name))
    report = {
        "question": "how fast is a large checkpoint loaded, and with how much host memory?",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python", "bench/loading.py", *arguments()]),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}",
        "versions": {"nanoactor": nanoactor.__version__, "python": platform.python_version()},
        **found,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
