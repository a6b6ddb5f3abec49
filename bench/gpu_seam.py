"""Does the device protocol hold on an NVIDIA GPU? One forward pass, before the CUDA device exists.

    python bench/gpu_seam.py [--out FILE]

Runs the portable operators on `cuda` behind the protocol of `nanoactor.models.device`:
logits of the demo model against the CPU's; prefill and decode of a Qwen3-0.6B with random
weights, eager; and the decode step captured as one CUDA graph, whose replay must give the
tokens of the eager step. It shows what the seam allows, not how fast a CUDA device will be:
the operators are plain PyTorch. Needs torch with CUDA and safetensors, nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent))

from nanoactor.models.batch import AttentionBatch, KVCache, PrefillRow, SamplingBatch
from nanoactor.models.config import parse_config, read_config
from nanoactor.models.device import Device, Memory
from nanoactor.models.devices.cpu import CPUDevice
from nanoactor.models.devices.portable import PortableOperators
from nanoactor.models.registry import build_model
from nanoactor.models.weights import Weights

DEMO = Path(__file__).parent.parent / "models" / "demo"
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
BLOCK = 16


class _CudaEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def record(self) -> None:
        self._event.record()

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class PortableCuda(PortableOperators):
    """The protocol on a GPU with plain PyTorch operators: what the seam needs, and no more."""

    name = "cuda"
    torch_device = torch.device("cuda")
    collective_backend = "nccl"
    default_dtype = torch.bfloat16
    default_block_size = BLOCK
    default_memory_utilization = 0.9

    def prepare_thread(self, threads: int) -> None:
        torch.cuda.set_device(0)

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.float16, torch.bfloat16)

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info()
        return Memory(total, free)

    def reset_peak(self) -> None:
        self._base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self._base

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def event(self) -> _CudaEvent:
        return _CudaEvent()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def allocate(config, blocks, dtype, device):
    shape = (blocks, BLOCK, config.num_kv_heads, config.head_dim)
    return [
        KVCache(device.zeros(*shape, dtype=dtype), device.zeros(*shape, dtype=dtype))
        for _ in range(config.num_layers)
    ]


def prefill_batch(tokens, device):
    blocks = torch.arange(-(-tokens // BLOCK), device=device.torch_device)
    none = torch.empty(0, dtype=torch.int64, device=device.torch_device)
    slots = torch.arange(tokens, device=device.torch_device)
    row = PrefillRow(0, tokens, tokens, blocks)
    return AttentionBatch(slots, (row,), tokens, none[:, None], none)


def decode_batch(rows, context, device):
    per_row = -(-(context + 1) // BLOCK)
    tables = torch.arange(rows * per_row, device=device.torch_device).view(rows, per_row)
    slots = tables[:, context // BLOCK] * BLOCK + context % BLOCK
    contexts = torch.full((rows,), context + 1, device=device.torch_device)
    return AttentionBatch(slots, (), 0, tables, contexts)


def greedy(rows, device):
    i64 = {"dtype": torch.int64, "device": device.torch_device}
    ones, none = torch.ones(rows, device=device.torch_device), torch.empty(0, **i64)
    zeros, every = torch.zeros(rows, **i64), torch.arange(rows, **i64)
    return SamplingBatch(
        ones, zeros, ones, ones * 0, zeros, zeros, every, none, none, none, none, none
    )


@torch.inference_mode()
def demo_logits(device: Device, dtype: torch.dtype) -> torch.Tensor:
    """Logits of a fixed prompt, float32 on the host."""
    config = read_config(DEMO)
    with Weights(DEMO, dtype, device.torch_device) as weights:
        model = build_model(config, weights, device, 1024)
    ids = (torch.arange(200, device=device.torch_device) * 37) % config.vocab_size
    caches = allocate(config, 20, dtype, device)
    positions = torch.arange(200, device=device.torch_device)
    hidden = model.forward(ids, positions, caches, prefill_batch(200, device))
    return model.logits(hidden).float().cpu()


def random_checkpoint(directory: Path, config) -> None:
    """A Qwen3-0.6B with seeded random weights, bfloat16."""
    torch.manual_seed(0)
    hidden, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    shapes = {"model.embed_tokens": (config.vocab_size, hidden), "model.norm": (hidden,)}
    for index in range(config.num_layers):
        at = f"model.layers.{index}"
        shapes |= {
            f"{at}.input_layernorm": (hidden,),
            f"{at}.post_attention_layernorm": (hidden,),
            f"{at}.self_attn.q_proj": (q, hidden),
            f"{at}.self_attn.k_proj": (kv, hidden),
            f"{at}.self_attn.v_proj": (kv, hidden),
            f"{at}.self_attn.o_proj": (hidden, q),
            f"{at}.self_attn.q_norm": (d,),
            f"{at}.self_attn.k_norm": (d,),
            f"{at}.mlp.gate_proj": (inner, hidden),
            f"{at}.mlp.up_proj": (inner, hidden),
            f"{at}.mlp.down_proj": (hidden, inner),
        }
    tensors = {
        f"{name}.weight": (
            torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape)
        ).bfloat16()
        for name, shape in shapes.items()
    }
    (directory / "config.json").write_text(json.dumps(QWEN3_06B))
    save_file(tensors, directory / "model.safetensors")


def milliseconds(function, repeat=20) -> float:
    """Median time of a call on the GPU."""
    times = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


@torch.inference_mode()
def qwen3_06b(device: PortableCuda, rows: int, context: int) -> dict[str, object]:
    """Prefill of 512 tokens, decode eager and as one captured graph."""
    config = parse_config(QWEN3_06B)
    with tempfile.TemporaryDirectory() as name:
        random_checkpoint(Path(name), config)
        with Weights(Path(name), torch.bfloat16, device.torch_device) as weights:
            model = build_model(config, weights, device, 4096)
    caches = allocate(config, rows * (context // BLOCK + 1), torch.bfloat16, device)
    device.reset_peak()
    ids, positions = (torch.arange(512, device="cuda") for _ in range(2))
    prefill = prefill_batch(512, device)
    prefill_ms = milliseconds(
        lambda: model.logits(model.forward(ids, positions, caches, prefill)[-1:])
    )
    batch, sampling = decode_batch(rows, context, device), greedy(rows, device)
    last = torch.zeros(rows, dtype=torch.int64, device="cuda")
    at = torch.full((rows,), context, device="cuda")

    def step():
        hidden = model.forward(last, at, caches, batch)
        last.copy_(device.sample(model.logits(hidden), sampling))

    for _ in range(3):
        step()
    eager_ms = milliseconds(step)
    last.zero_()
    step()
    expected = last.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    last.zero_()
    graph.replay()
    event = device.event()
    event.record()
    host = device.pinned(rows, dtype=torch.int64)
    host.copy_(last, non_blocking=True)
    event.wait()
    device.synchronize()
    assert torch.equal(last, expected), "the captured step gives other tokens than the eager one"
    return {
        "rows": rows,
        "context": context,
        "prefill_512_ms": round(prefill_ms, 3),
        "decode_eager_ms": round(eager_ms, 3),
        "decode_graph_ms": round(milliseconds(graph.replay), 3),
        "peak_mib": device.peak() >> 20,
        "graph_equals_eager": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = PortableCuda()
    reference = demo_logits(CPUDevice(), torch.float32)
    exact = demo_logits(device, torch.float32)
    result = {
        "question": "does the device protocol hold on an NVIDIA GPU (portable operators)?",
        "command": "python bench/gpu_seam.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "demo_float32_largest_difference_from_cpu": float((exact - reference).abs().max()),
        "demo_float32_same_argmax": bool((exact.argmax(-1) == reference.argmax(-1)).all()),
        "demo_bfloat16_same_argmax_share": float(
            (demo_logits(device, torch.bfloat16).argmax(-1) == reference.argmax(-1)).float().mean()
        ),
        "qwen3_0.6b_random_bfloat16": [qwen3_06b(device, rows, 1024) for rows in (1, 64)],
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
