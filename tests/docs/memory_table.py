"""Prints the tables of docs/memory.md and docs/quickstart.md: `python -m tests.docs.memory_table`.

Sizes come from the engine's own classes: the decoder asks a `Weights` for its tensors, which are
counted and not made, and its layers say what they keep of a sequence.
"""

import dataclasses
import functools
import math
from typing import Any

import torch

from nanoactor.models.config import parse_config
from nanoactor.models.decoder import Decoder
from nanoactor.models.devices.cuda.device import PORTABLE_TRAITS
from nanoactor.models.devices.portable import PortableOperators
from nanoactor.models.weights.linear import Dense
from nanoactor.models.weights.random_weights import RandomWeights
from nanoactor.models.weights.weights import format_of
from nanoactor.runner.model.layer_states import block_bytes

GIB = 1 << 30
CONTEXTS = (4_096, 32_768, 40_960)
LEAST = (8_192, 40_960)
FREE = (23, 46, 79, 139)
"""GiB that are free on cards of 24, 48, 80 and 141 GB, roughly."""
STEPS = 4
"""GiB that steps and captured graphs take at most, as measured on an H200 (docs/memory.md)."""
_SHARED = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 151_645,
    "dtype": "bfloat16",
}
_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "num_key_value_heads": 4,
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
MODELS: dict[str, dict[str, Any]] = {
    f"Qwen3-{name}": {
        **_SHARED,
        **dict(zip(_SIZES, sizes, strict=True)),
        "tie_word_embeddings": tied,
    }
    for name, tied, *sizes in (
        ("0.6B", True, 1_024, 3_072, 28, 16),
        ("1.7B", True, 2_048, 6_144, 28, 16),
        ("4B", True, 2_560, 9_728, 36, 32),
        ("8B", False, 4_096, 12_288, 36, 32),
        ("14B", False, 5_120, 17_408, 40, 40),
        ("32B", False, 5_120, 25_600, 64, 64),
        ("30B-A3B", False, 2_048, 6_144, 48, 32),
        ("235B-A22B", False, 4_096, 12_288, 94, 64),
    )
}
MODELS["Qwen3-30B-A3B"] |= _EXPERTS | {"moe_intermediate_size": 768}
MODELS["Qwen3-235B-A22B"] |= _EXPERTS | {"moe_intermediate_size": 1_536}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


class Counted(RandomWeights):
    """Weights that are counted and have no memory."""

    def __init__(self, packed: Any = None) -> None:
        super().__init__(torch.bfloat16, torch.device("cpu"), packed)
        self.device = torch.device("meta")
        self.parameters = self.bytes = 0

    def load(self, name: str, *shape: int, dtype: Any = None, stored: Any = None, **_: Any) -> Any:
        tensor = torch.empty(shape, dtype=stored or dtype or self.dtype, device="meta")
        self.parameters += tensor.numel()
        self.bytes += tensor.nbytes
        return tensor

    def linear(self, projection: Any) -> Any:
        """Count a packed projection as its format stores it: a byte for each value, and a float32
        for each block."""
        if self.format is None or not self.format.is_quantized(projection):
            return super().linear(projection)
        blocks = math.ceil(projection.inputs / 128)
        for part in projection.parts:
            self.parameters += part.outputs * projection.inputs
            self.bytes += part.outputs * projection.inputs
            self.bytes += 4 * math.ceil(part.outputs / 128) * blocks
        outputs = sum(part.outputs for part in projection.parts)
        return Dense(torch.empty(outputs, projection.inputs, device="meta"))


class Nothing(PortableOperators):
    """A device that takes weights and computes nothing."""

    torch_device = torch.device("meta")
    traits = PORTABLE_TRAITS

    def linear(self, weights: Any) -> Any:
        return lambda x: x

    def experts(self, weights: Any) -> Any:
        return lambda x: x


@dataclasses.dataclass(frozen=True)
class Size:
    """What a model takes, in bytes."""

    parameters: int
    weights: int
    packed: int
    """Weights of an FP8 checkpoint."""
    token: int
    """KV cache of a position."""


def size_of(raw: dict[str, Any]) -> Size:
    """Return the size of a model in bfloat16."""
    found = []
    for quantization in ({}, {"quantization_config": FP8}):
        config = parse_config(raw | quantization)
        weights = Counted(format_of(config.quantization))
        decoder = Decoder(config, weights, Nothing(), 1)
        found.append((weights, decoder))
    (plain, decoder), (packed, _) = found
    return Size(plain.parameters, plain.bytes, packed.bytes, block_bytes(decoder.states, 1))


@functools.cache
def models() -> dict[str, Size]:
    """Return the size of each model."""
    return {name: size_of(raw) for name, raw in MODELS.items()}


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size < 10 * GIB else f"{size / GIB:,.1f}"


def sizes() -> str:
    """The table of weights and of a sequence's cache."""
    lengths = " | ".join(f"{length:,} tokens" for length in CONTEXTS)
    lines = [
        f"| model | parameters | weights, bfloat16 | weights, FP8 | one token | {lengths} |",
        "| --- | ---: | ---: | ---: | ---: |" + " ---: |" * len(CONTEXTS),
    ]
    for name, size in models().items():
        contexts = " | ".join(_gib(size.token * length) for length in CONTEXTS)
        lines.append(
            f"| {name} | {size.parameters / 1e9:.2f} B | {_gib(size.weights)} | "
            f"{_gib(size.packed)} | {size.token / 1024:.1f} KiB | {contexts} |"
        )
    return "\n".join(lines) + "\n"


def rooms() -> str:
    """The table of how many tokens a cache holds."""
    lines = [
        f"| model | {' | '.join(f'{free} GiB free' for free in FREE)} |",
        "| --- |" + " ---: |" * len(FREE),
    ]
    for name, size in models().items():
        for weights, what in ((size.weights, "bfloat16"), (size.packed, "FP8")):
            held = [int(0.9 * free * GIB - weights - STEPS * GIB) // size.token for free in FREE]
            cells = " | ".join(f"{tokens:,}" if tokens > 0 else "-" for tokens in held)
            lines.append(f"| {name}, {what} | {cells} |")
    return "\n".join(lines) + "\n"


def least() -> str:
    """The table of how much memory must be free to start with one sequence."""
    kinds = [f"{kind}, {length:,}" for kind in ("bfloat16", "FP8") for length in LEAST]
    lines = [f"| model | {' | '.join(kinds)} |", "| --- |" + " ---: |" * len(kinds)]
    for name, size in models().items():
        needs = [
            math.ceil((weights + STEPS * GIB + length * size.token) / 0.9 / GIB)
            for weights in (size.weights, size.packed)
            for length in LEAST
        ]
        lines.append(f"| {name} | {' | '.join(map(str, needs))} |")
    return "\n".join(lines) + "\n"


TABLES = {"memory.md": {"sizes": sizes, "rooms": rooms}, "quickstart.md": {"least": least}}
"""The tables of each page in docs/, by the marker above them."""


def marked(title: str, table: str) -> str:
    """Return a table with the markers that enclose it in a page."""
    return f"<!-- {title} -->\n{table}<!-- end -->\n"


if __name__ == "__main__":
    for page, tables in TABLES.items():
        for title, table in tables.items():
            print(f"docs/{page}:\n{marked(title, table())}")
