"""Measure the vision tower on a GPU, and each of PyTorch's attention backends for it.

    python bench/tower.py [--size 1024x768] [--rounds 20] [--out FILE]

Random weights of Qwen3-VL-2B's and -8B's true towers in bfloat16, one image. `tower`: pixels to
rows, launched operator by operator as the engine does; `host_ms` until the launches are done,
`ms` until the GPU is. `graph`: the same, captured once and replayed. `attention`: one layer's, by
each backend of `scaled_dot_product_attention` and by its own choice. Medians.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent))

from vision import configuration

import nanoactor
from nanoactor.models.devices import open_device
from nanoactor.models.vision.config import VisionConfig, parse_vision
from nanoactor.models.vision.image_config import ImageConfig
from nanoactor.models.vision.patches import PatchMaker
from nanoactor.models.vision.tower import VisionTower
from nanoactor.models.weights.random_weights import RandomWeights

HALF = ((0.5,) * 3, (0.5,) * 3)
BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def measure(work: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Medians in ms."""
    host, device = [], []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started = time.perf_counter()
        begin.record()
        work()
        end.record()
        host.append((time.perf_counter() - started) * 1e3)
        torch.cuda.synchronize()
        device.append(begin.elapsed_time(end))
    middle = statistics.median
    return {"ms": round(middle(device[2:]), 4), "host_ms": round(middle(host[2:]), 4)}


def attention(config: VisionConfig, patches: int, rounds: int) -> dict[str, Any]:
    """One layer's, by each backend."""
    shape = 1, config.num_heads, patches, config.hidden_size // config.num_heads
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    found: dict[str, Any] = {"default": measure(attend, rounds)}
    for name in BACKENDS:
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                found[name] = measure(attend, rounds)
        except RuntimeError as error:
            found[name] = str(error)[:200]
    return found


def tower(name: str, height: int, width: int, rounds: int) -> dict[str, Any]:
    """Of one of the models."""
    config = parse_vision(configuration(name), name)
    device = open_device("cuda")
    device.prepare_thread(8)
    images = ImageConfig(65536, 1 << 24, 32, 1 / 255, *HALF)
    with device.stream():
        weights = RandomWeights(torch.bfloat16, device.torch_device)
        made = VisionTower(config, weights, device, "model.visual")
        patches = PatchMaker(config, images, device.torch_device)
        shape = 1, height, width, 3
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")

        def encode() -> torch.Tensor:
            rows, grid = patches(pixels)
            return made(rows.to(torch.bfloat16), [grid])

        found: dict[str, Any] = {"tower": measure(encode, rounds)}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            encode()
        found["graph"] = measure(graph.replay, rounds)
        count = height // config.patch_size * (width // config.patch_size)
        return {"patches": count, **found, "attention": attention(config, count, rounds)}


def main() -> None:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--size", default="1024x768")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    width, height = map(int, args.size.split("x"))
    found = {
        "date": datetime.date.today().isoformat(),
        "command": f"python bench/tower.py --size {args.size} --rounds {args.rounds}",
        "versions": {
            "python": platform.python_version(),
            "nanoactor": nanoactor.__version__,
            "torch": torch.__version__,
        },
        "gpu": torch.cuda.get_device_name(),
        **{name: tower(name, height, width, args.rounds) for name in ("2b", "8b")},
    }
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
