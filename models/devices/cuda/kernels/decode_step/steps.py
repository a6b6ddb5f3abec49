"""Decode steps that run as a single kernel, for executors."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from collections.abc import Sequence

import torch

from nanoactor.models.batch import KVCache, RowBuffers
from nanoactor.models.devices.cuda.kernels.decode_step.arguments import (
    Scratch,
    StepInputs,
    arguments_of,
    scales_of,
)
from nanoactor.models.devices.cuda.kernels.decode_step.compile import compiled
from nanoactor.models.devices.cuda.kernels.decode_step.launch import kernel_of, map_of
from nanoactor.models.devices.cuda.kernels.decode_step.table import (
    LOGITS,
    Shape,
    product_of,
    refusal,
)
from nanoactor.models.devices.cuda.kernels.driver import DriverError
from nanoactor.models.devices.cuda.kernels.nvrtc import CompileError
from nanoactor.models.devices.protocols import WholeStep
from nanoactor.models.model_config import ModelConfig
from nanoactor.models.weights.whole_step import Mixture, ModelWeights, numbers_of

log = logging.getLogger("nanoactor.models.decode_step")

PATIENCE = 10.0
"""Seconds that a block waits for another block, or for its own copies, before it stops the
kernel."""
_WAITS = {
    1: "words from another block",
    2: "the arrival of all blocks",
    3: "a tile of weights",
    4: "space in the ring",
    5: "copies in flight",
    6: "the experts that the rows choose",
}
_STOPPED = 0x80000000
_WIDE, _FASTER_UP_TO = 4096, 8
"""Hidden size of wide models, and the maximum number of rows for which the kernel is faster for
them. Measured on an H200 with contexts of 1,024: 16 rows of 8B take 5.51 ms with the kernel and
5.43 with operators, 8 rows 4.63 and 5.32; 16 rows of 0.6B 1.32 and 1.72
(docs/gpu_measurements.md)."""
_PACKED_EXPERTS_UP_TO = 4
"""Maximum number of rows for which the kernel is faster with packed experts. Measured on an H200
with 30B-A3B in FP8: 4 rows take 3.95 ms with the kernel and 4.47 with operators, 8 rows 6.12 and
5.87."""
_SLOWER = "decode steps with few rows run operator by operator, which takes up to twice as long"


class StepStopped(RuntimeError):
    """A decode step waited too long. The message names the phase. The device must be reopened."""


_HONOURED = frozenset(
    [
        "architecture",
        "dtype",
        "eos_token_ids",
        "has_head",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "max_positions",
        "num_heads",
        "num_kv_heads",
        "num_layers",
        "qk_norm",
        "qkv_bias",
        "quantization",
        "rms_norm_eps",
        "rope",
        "tie_embeddings",
        "vision",
        "vocab_size",
        "window",
    ]
)
"""Fields of a model's configuration that the kernel supports or does not depend on: pictures are
already rows, rotations are read from tables, no sequence is longer than a window, and weights are
passed in FP8, unpacked, or not at all."""
_NEUTRAL = {"output_bias": False, "mlp_bias": False}
"""Other fields, with the value that has no effect. All remaining fields must have their default
value, so that a model family's new option is never ignored silently."""


def supports(
    config: ModelConfig,
    rows: int,
    block_size: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    ranks: int = 1,
    processors: int = 132,
    packed: bool = False,
    mixture: Mixture | None = None,
) -> str | None:
    """Return why steps of `rows` rows cannot run as one kernel, or None if they can. `mixture`
    describes the experts of each layer."""
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]} is not 9.0"
    if dtype != torch.bfloat16:
        return f"{dtype} is not bfloat16"
    if ranks > 1:
        return f"{ranks} ranks share the model"
    if rows > _FASTER_UP_TO and config.hidden_size >= _WIDE:
        return f"operators are as fast with more than {_FASTER_UP_TO} rows at this hidden_size"
    if mixture is not None and packed and rows > _PACKED_EXPERTS_UP_TO:
        return f"operators are faster with more than {_PACKED_EXPERTS_UP_TO} rows of packed experts"
    # If layers have experts, the family's own options concern only the experts.
    honoured = _HONOURED if mixture is None else _HONOURED | {"family_options"}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in honoured and value != _NEUTRAL.get(field.name, field.default):
            return f"the kernel does not support {field.name} {value!r:.50}"
    return refusal(Shape.of(config, rows, block_size, processors, 1, packed, mixture))


class DecodeStep:
    """Decode steps with a given number of rows, and the tensors that they read and write."""

    def __init__(
        self,
        shape: Shape,
        weights: ModelWeights,
        eps: float,
        patience: float = PATIENCE,
        like: DecodeStep | None = None,
    ) -> None:
        """Compile the kernel or load it from disk. `like` is a step with the same weights and
        another number of rows, which shares its tensor maps and scales.

        Raises `CompileError` or `DriverError` if that fails."""
        self.shape = shape
        self._weights, self._eps, self._patience = weights, eps, patience
        self._kernel = kernel_of(compiled(shape).cubin, shape)
        self.scratch = Scratch(shape, weights.embed.device)
        self.status = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self.maps: Sequence[bytes] = like.maps if like else maps_of(shape, weights)
        self.scales: Sequence[torch.Tensor | None] = (
            like.scales if like else scales_of(shape, weights)
        )
        self._launched: list[ctypes.Structure] = []

    def __call__(
        self,
        inputs: StepInputs,
        caches: Sequence[KVCache],
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queue a step on the current stream. Return hidden states after the final norm, bfloat16
        (rows, hidden), which the next step overwrites. The step also writes the new tokens' keys
        and values, and its logits to `logits`, (rows, vocabulary), or to its own buffer. Tensors
        must keep their addresses as long as any graph that has captured this call exists."""
        if logits is not None:
            self.scratch.logits = logits
        args = arguments_of(
            self.shape, self._weights, caches, inputs, self.scratch, self.maps, self.scales,
            self.status, self._eps, self._patience,
        )  # fmt: skip
        self._kernel.launch_cooperative(args)
        return self.scratch.hidden

    @property
    def logits(self) -> torch.Tensor:
        """Return the logits, (rows, vocabulary), of the step queued last, if the shape has a
        head."""
        return self.scratch.logits

    def check(self) -> None:
        """Raise `StepStopped` if the kernel has stopped itself. Call this when the device fails."""
        first, block = (int(word) & 0xFFFFFFFF for word in self.status)
        if first:
            raise StepStopped(describe(first, block, self.shape))


def describe(word: int, block: int, shape: Shape) -> str:
    """Describe where a step has stopped, from the kernel's status words."""
    assert word & _STOPPED
    wait, place = word >> 24 & 0x7F, word & 0xFFFFFF
    layer, phase = divmod(place, 16)
    name = (*shape.phases, LOGITS)[phase].name.lower()
    where = f"layer {layer} of {shape.layers}" if layer < shape.layers else "the head"
    return (
        f"a decode step with {shape.rows} rows has stopped: block {block} waited too long for "
        f"{_WAITS.get(wait, wait)} in {name} of {where}"
    )


def maps_of(shape: Shape, weights: ModelWeights) -> list[bytes]:
    """Encode the tensor maps of each layer's matrices, then the head's. They do not depend on the
    number of rows."""
    phases = [phase for phase in shape.phases if phase.matrix is not None]
    boxes = [product_of(shape, phase).box for phase in phases]
    found = [
        map_of(numbers_of(getattr(layer, str(phase.matrix))), box)
        for layer in weights.layers
        for phase, box in zip(phases, boxes, strict=True)
    ]
    return [*found, map_of(weights.head, product_of(shape, LOGITS).box)]


@dataclasses.dataclass(slots=True)
class DecodeSteps:
    """An engine's kernels by number of rows; other steps run operator by operator."""

    steps: dict[int, DecodeStep]

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        weights: ModelWeights,
        sizes: Sequence[int],
        block_size: int,
        patience: float = PATIENCE,
    ) -> DecodeSteps:
        """Load a kernel for each number of rows in `sizes` that is supported. If one fails, log a
        warning and load no more."""
        device = weights.embed.device
        if device.type != "cuda":
            return cls({})
        found = torch.cuda.get_device_properties(device)
        capability, processors = (found.major, found.minor), found.multi_processor_count
        made: dict[int, DecodeStep] = {}
        packed, mixtures = weights.is_packed, {layer.mixture for layer in weights.layers}
        if packed is None or len(mixtures) > 1:
            what = "matrices are in FP8" if packed is None else "layers have experts"
            log.warning("%s: only some of the model's %s", _SLOWER, what)
            return cls(made)
        step, (mixture,) = None, mixtures
        for rows in sizes:
            where = weights.embed.dtype, capability, 1, processors
            if supports(config, rows, block_size, *where, packed, mixture) is not None:
                continue
            shape = Shape.of(config, rows, block_size, processors, 1, packed, mixture)
            try:
                step = DecodeStep(shape, weights, config.rms_norm_eps, patience, step)
            except (CompileError, DriverError) as error:
                log.warning("%s: %s", _SLOWER, error)
                return cls(made)
            made[rows] = step
        return cls(made)

    def run(
        self,
        rows: RowBuffers,
        slots: torch.Tensor,
        tables: torch.Tensor,
        caches: Sequence[KVCache],
        into: torch.Tensor | None,
    ) -> WholeStep | None:
        """Queue a decode step, and write its logits to `into`, bfloat16 (rows, vocabulary), if
        given. Return None if the step must run operator by operator.

        `rows` is filled in by `BatchOperators.advance`, `slots` is int32 (rows,), and `tables` is
        int32 (slots, blocks)."""
        step = self.steps.get(len(slots))
        if step is None:
            return None
        inputs = StepInputs(
            rows.token_ids, rows.positions, rows.contexts, slots, rows.slot_mapping, tables
        )
        try:
            hidden = step(inputs, caches, into)
            return WholeStep(hidden, step.logits)
        except DriverError as error:
            log.warning("%s: %s", _SLOWER, error)
            self.steps.clear()
            return None

    def check(self) -> None:
        """Raise `StepStopped` if a kernel has stopped itself."""
        for step in self.steps.values():
            step.check()
