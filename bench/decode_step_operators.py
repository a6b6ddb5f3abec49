"""The engine's own operators, for `bench/decode_step.py`: a decode step, head included."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from bench.decode_step_reference import EPS
from bench.decode_step_walk import LONGEST
from nanoactor.models.batch import AttentionBatch, ForwardInputs, KVCache
from nanoactor.models.decoder import Decoder
from nanoactor.models.devices.cuda.kernels.decode_step.arguments import StepInputs
from nanoactor.models.devices.cuda.kernels.decode_step.table import Shape
from nanoactor.models.families.qwen3_moe import ExpertOptions
from nanoactor.models.layers.kinds import ExpertsSpec
from nanoactor.models.model_config import ModelConfig, RopeConfig
from nanoactor.models.seq_lens import NO_SEQ_LENS
from nanoactor.models.weights.files import Selection
from nanoactor.models.weights.fp8 import Fp8Blocks
from nanoactor.models.weights.linear import Dense, LinearWeights, Projection
from nanoactor.models.weights.weights import Weights
from nanoactor.models.weights.whole_step import (
    LayerWeights,
    Matrix,
    ModelWeights,
    PackedMatrix,
)

DEVICE = "cuda"
GROUP = 64
"""Outputs of a packed matrix that have the same scale: the fewest for which all kernels run."""


class GivenWeights(Weights):
    """Weights by name, out of fused tensors that are there already."""

    def __init__(self, shape: Shape, weights: ModelWeights) -> None:
        super().__init__("given tensors", torch.bfloat16, weights.embed.device)
        self._tensors: dict[str, torch.Tensor | None] = {
            "model.embed_tokens.weight": weights.embed,
            "model.norm.weight": weights.norm,
            "lm_head.weight": weights.head,
        }
        self._packed: dict[str, PackedMatrix] = {}
        self._stacked: dict[str, Matrix] = {}
        for index, layer in enumerate(weights.layers):
            self._add_layer(shape, f"model.layers.{index}", layer)

    def _add_layer(self, shape: Shape, prefix: str, layer: LayerWeights) -> None:
        kv = shape.kv_heads * shape.head_dim
        named = self._tensors
        named[f"{prefix}.self_attn.q_norm.weight"] = layer.q_norm
        named[f"{prefix}.self_attn.k_norm.weight"] = layer.k_norm
        named[f"{prefix}.input_layernorm.weight"] = layer.norm1
        named[f"{prefix}.post_attention_layernorm.weight"] = layer.norm2
        if layer.router is not None:
            named[f"{prefix}.mlp.gate.weight"] = layer.router.weight
            self._stacked[f"{prefix}.mlp.experts.0.gate_proj"] = layer.gate_up
            self._stacked[f"{prefix}.mlp.experts.0.down_proj"] = layer.down
        else:
            mlp, sizes = f"{prefix}.mlp", [shape.inter] * 2
            self._add_matrix(mlp, ("gate_proj", "up_proj"), layer.gate_up, sizes)
            self._add_matrix(mlp, ("down_proj",), layer.down, [shape.hidden])
        attention, sizes = f"{prefix}.self_attn", [shape.width, kv, kv]
        self._add_matrix(attention, ("q_proj", "k_proj", "v_proj"), layer.qkv, sizes, layer.bias)
        self._add_matrix(attention, ("o_proj",), layer.o, [shape.hidden])

    def _add_matrix(
        self,
        prefix: str,
        names: tuple[str, ...],
        matrix: Matrix,
        sizes: list[int],
        bias: torch.Tensor | None = None,
    ) -> None:
        """Name the parts of a matrix; a packed one stays whole, under the first name."""
        if isinstance(matrix, PackedMatrix):
            self._packed[f"{prefix}.{names[0]}"] = matrix
            self._tensors[f"{prefix}.{names[0]}.bias"] = bias
            return
        for kind, whole in (("weight", matrix), ("bias", bias)):
            parts = [None] * len(names) if whole is None else whole.split(sizes)
            for name, part in zip(names, parts, strict=True):
                self._tensors[f"{prefix}.{name}.{kind}"] = part

    def __contains__(self, name: str) -> bool:
        """Tell whether there is such a tensor."""
        return self._tensors.get(name) is not None

    def linear(self, projection: Projection) -> LinearWeights:
        first = projection.parts[0].name
        if first not in self._packed:
            return super().linear(projection)
        bias = self._tensors.get(f"{first}.bias")
        return dataclasses.replace(_packed(self._packed[first]), bias=bias)

    def load_stacked(self, projections: Sequence[Projection]) -> LinearWeights:
        """All experts' matrices as they are: twice they would not fit."""
        matrix = self._stacked[projections[0].parts[0].name]
        return _packed(matrix) if isinstance(matrix, PackedMatrix) else Dense(matrix)

    def shape_of(self, name: str) -> tuple[int, ...]:
        tensor = self._tensors[name]
        assert tensor is not None, name
        return tuple(tensor.shape)

    def _load(
        self, name: str, part: Selection, dtype: torch.dtype, stored: torch.dtype | None
    ) -> torch.Tensor:
        tensor = self._tensors[name]
        assert tensor is not None, name
        assert part.shape == part.sizes == tuple(tensor.shape), name
        return tensor


def _packed(matrix: PackedMatrix) -> Fp8Blocks:
    scales = matrix.scales[..., :: GROUP // 8, :]
    return Fp8Blocks(matrix.weight, scales, 128, 0, torch.bfloat16, GROUP)


def config_of(shape: Shape) -> ModelConfig:
    family = "Qwen3" if shape.qk_norm else "Qwen2" if shape.qkv_bias else "Llama"
    options = None
    if (mixture := shape.mixture) is not None:
        sizes = mixture.experts, mixture.top_k, mixture.inner, mixture.renormalize
        family, options = "Qwen3Moe", ExpertOptions(ExpertsSpec(*sizes), 1, ())
    return ModelConfig(
        architecture=f"{family}ForCausalLM",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inter,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_positions=40960,
        rms_norm_eps=EPS,
        rope=RopeConfig("default", 1e6),
        qk_norm=shape.qk_norm,
        qkv_bias=shape.qkv_bias,
        output_bias=False,
        mlp_bias=False,
        tie_embeddings=False,
        dtype="bfloat16",
        eos_token_ids=(),
        family_options=options,
    )


class Operators:
    """A decode step by the engine's operators, head included."""

    def __init__(self, shape: Shape, weights: ModelWeights) -> None:
        from nanoactor.models.devices.cuda.device import CUDADevice

        self.device = CUDADevice()
        self.device.prepare_thread(1)
        self.shape = shape
        given, longest = GivenWeights(shape, weights), LONGEST + 512
        self.decoder = Decoder(config_of(shape), given, self.device, longest)
        self.hidden = self.logits = torch.empty(0)

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines as the decoder has them."""
        rope = self.decoder._rope
        return rope.cos, rope.sin

    def step(self, shape: Shape, inputs: StepInputs, caches: list[KVCache]) -> Any:
        rows = shape.rows
        scratch = self.device.scratch(rows, shape.heads, shape.kv_heads, shape.head_dim, 64)
        nothing = torch.zeros(4, 0, dtype=torch.int32, device=DEVICE)
        batch = AttentionBatch(
            inputs.slot_mapping, inputs.tables, shape.block_size, 0, nothing, nothing[:2],
            inputs.slots, inputs.contexts, NO_SEQ_LENS,
        )  # fmt: skip

        def run() -> None:
            planned = self.device.plan(scratch, batch)
            forward = ForwardInputs(inputs.token_ids, inputs.positions, caches, planned)
            self.hidden = self.decoder.forward(forward)
            self.logits = self.decoder.logits(self.hidden)

        return run
