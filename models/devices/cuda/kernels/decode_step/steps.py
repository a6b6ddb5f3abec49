"""Decode steps that each run as a single CUDA kernel, for use by executors."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch

from nanoactor.models.batch import KVCache, RowBuffers
from nanoactor.models.devices.cuda.kernels.decode_step.arguments import (
    Scratch,
    StepInputs,
    arguments_of,
    lay_out_scales,
)
from nanoactor.models.devices.cuda.kernels.decode_step.compile import load_or_compile
from nanoactor.models.devices.cuda.kernels.decode_step.launch import encode_map, load_kernel
from nanoactor.models.devices.cuda.kernels.decode_step.table import (
    LOGITS,
    Shape,
    product_of,
    shape_unsupported_reason,
)
from nanoactor.models.devices.cuda.kernels.driver import DriverError
from nanoactor.models.devices.cuda.kernels.nvrtc import CompileError
from nanoactor.models.devices.protocols import WholeStep
from nanoactor.models.model_config import ModelConfig
from nanoactor.models.weights.whole_step import Mixture, ModelWeights, flat_matrix

log = logging.getLogger("nanoactor.models.decode_step")

WAIT_TIMEOUT = 10.0
"""Seconds for which a thread block waits for another block, or for its own copies, before it stops
the kernel."""
_WAIT_DESCRIPTIONS = {
    1: "words from another block",
    2: "the arrival of all blocks",
    3: "a tile of weights",
    4: "space in the ring",
    5: "copies in flight",
    6: "the experts that the rows choose",
}
_STOPPED_BIT = 0x80000000
_WIDE_HIDDEN_SIZE, _WIDE_MAX_ROWS = 4096, 8
"""Hidden size from which a model counts as wide, and the maximum number of rows for which the
kernel is faster for wide models.

Measured on an H200 with contexts of 1,024 tokens (docs/gpu_measurements.md): in an 8B model, 16
rows take 5.51 ms with the kernel and 5.43 ms with operators, and 8 rows take 4.63 and 5.32 ms. In a
0.6B model, 16 rows take 1.32 and 1.72 ms.
"""
_SLOWDOWN = "decode steps with few rows run operator by operator, which takes up to twice as long"


class StepStopped(RuntimeError):
    """A decode step stopped itself because a wait took too long. The message names the phase. The
    device must be reopened."""


_SUPPORTED_FIELDS = frozenset(
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
"""Fields of `ModelConfig` that the kernel supports or does not depend on.

Decode steps contain no images, rotations are read from tables, no sequence is longer than a
window, and weights that the kernel cannot read are not passed to it.
"""
_EXPERT_OPTIONS = {"spec", "step", "dense"}
"""Fields of `ExpertOptions`, the options of families with experts."""
_NEUTRAL = {"output_bias": False, "mlp_bias": False}
"""Other fields, each with the value that the kernel requires. All remaining fields must have their
default values, so that a new option of a model is never ignored silently."""


def step_unsupported_reason(
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
    """Return why steps of `rows` rows cannot run as one kernel, or None if they can.

    `processors` is the number of multiprocessors of the GPU. `packed` is True if the matrices are
    in FP8. `mixture` describes the experts of each layer; None for dense layers.
    """
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]} is not 9.0"
    if dtype != torch.bfloat16:
        return f"{dtype} is not bfloat16"
    if ranks > 1:
        return f"{ranks} ranks share the model"
    if rows > _WIDE_MAX_ROWS and config.hidden_size >= _WIDE_HIDDEN_SIZE:
        return f"operators are as fast with more than {_WIDE_MAX_ROWS} rows at this hidden_size"
    supported_fields = set(_SUPPORTED_FIELDS)
    if mixture is not None and _are_about_experts(config.family_options):
        supported_fields.add("family_options")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in supported_fields and value != _NEUTRAL.get(field.name, field.default):
            return f"the kernel does not support {field.name} {value!r:.50}"
    return shape_unsupported_reason(
        Shape.of(config, rows, block_size, processors, 1, packed, mixture)
    )


def _are_about_experts(options: object) -> bool:
    """Return True if a family's own options only determine which layers have experts, and which
    ones. The weights of the layers show the rest."""
    if not dataclasses.is_dataclass(options):
        return False
    return {field.name for field in dataclasses.fields(options)} <= _EXPERT_OPTIONS


class DecodeStep:
    """The kernel for decode steps with a fixed number of rows, and the tensors that it reads and
    writes."""

    def __init__(
        self,
        shape: Shape,
        weights: ModelWeights,
        eps: float,
        wait_timeout: float = WAIT_TIMEOUT,
        shared_from: DecodeStep | None = None,
    ) -> None:
        """Load the kernel from disk, or compile it.

        `shared_from` is a step with the same weights but a different number of rows; its tensor
        maps and scales are reused. Raises `CompileError` or `DriverError` if the kernel cannot be
        compiled or loaded.
        """
        self.shape = shape
        self._weights, self._eps, self._wait_timeout = weights, eps, wait_timeout
        self._kernel = load_kernel(load_or_compile(shape).cubin, shape)
        self.scratch = Scratch(shape, weights.embed.device)
        self.status = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self.maps: Sequence[bytes] = (
            shared_from.maps if shared_from else encode_maps(shape, weights)
        )
        self.scales: Sequence[torch.Tensor | None] = (
            shared_from.scales if shared_from else lay_out_scales(shape, weights)
        )

    def __call__(
        self,
        inputs: StepInputs,
        caches: Sequence[KVCache],
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queue a step on the current stream, and return the hidden states after the final norm,
        bfloat16 (rows, hidden).

        The step also writes the new tokens' keys and values, and the logits to `logits`, (rows,
        vocabulary). If that is None, they are written to the tensor of the previous call, or to a
        buffer of this object if no call has passed one. The next step overwrites the results.
        Tensors must keep their addresses as long as a graph exists that has captured this call.
        """
        if logits is not None:
            self.scratch.logits = logits
        args = arguments_of(
            self.shape, self._weights, caches, inputs, self.scratch, self.maps, self.scales,
            self.status, self._eps, self._wait_timeout,
        )  # fmt: skip
        self._kernel.launch_cooperative(args)
        return self.scratch.hidden

    @property
    def logits(self) -> torch.Tensor:
        """Logits of the last queued step, (rows, vocabulary), or (rows, 0) if the kernel computes
        none."""
        return self.scratch.logits

    def raise_if_stopped(self) -> None:
        """Raise `StepStopped` if the kernel has stopped itself. Call this after an error of the
        device."""
        status, block = (int(word) & 0xFFFFFFFF for word in self.status)
        if status:
            raise StepStopped(describe(status, block, self.shape))


def describe(word: int, block: int, shape: Shape) -> str:
    """Return an error message that says where a step has stopped. `word` and `block` are the
    kernel's two status words."""
    assert word & _STOPPED_BIT
    wait_code, phase_index = word >> 24 & 0x7F, word & 0xFFFFFF
    layer, phase = divmod(phase_index, 16)
    name = (*shape.phases, LOGITS)[phase].name.lower()
    location = f"layer {layer} of {shape.layers}" if layer < shape.layers else "the head"
    return (
        f"a decode step with {shape.rows} rows has stopped: block {block} waited too long for "
        f"{_WAIT_DESCRIPTIONS.get(wait_code, wait_code)} in {name} of {location}"
    )


def encode_maps(shape: Shape, weights: ModelWeights) -> list[bytes]:
    """Return the tensor maps of each layer's matrices, followed by that of the head. They do not
    depend on the number of rows."""
    phases = [phase for phase in shape.phases if phase.matrix is not None]
    boxes = [product_of(shape, phase).box for phase in phases]
    layer_maps = [
        encode_map(flat_matrix(getattr(layer, str(phase.matrix))), box)
        for layer in weights.layers
        for phase, box in zip(phases, boxes, strict=True)
    ]
    return [*layer_maps, encode_map(weights.head, product_of(shape, LOGITS).box)]


@dataclasses.dataclass(slots=True)
class DecodeSteps:
    """Decode step kernels by number of rows. Steps of other sizes run operator by operator."""

    steps: dict[int, DecodeStep]

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        weights: ModelWeights,
        sizes: Sequence[int],
        block_size: int,
        wait_timeout: float = WAIT_TIMEOUT,
    ) -> DecodeSteps:
        """Load a kernel for each number of rows in `sizes` that is supported.

        If one of them cannot be compiled or loaded, log a warning and load no more.
        """
        device = weights.embed.device
        if device.type != "cuda":
            return cls({})
        properties = torch.cuda.get_device_properties(device)
        capability = properties.major, properties.minor
        processors = properties.multi_processor_count
        steps: dict[int, DecodeStep] = {}
        packed, mixtures = weights.is_packed, {layer.mixture for layer in weights.layers}
        if packed is None or len(mixtures) > 1:
            packed_part = "matrices are in FP8" if packed is None else "layers have experts"
            log.warning("%s: only some of the model's %s", _SLOWDOWN, packed_part)
            return cls(steps)
        step, (mixture,) = None, mixtures
        for rows in sizes:
            device_options = weights.embed.dtype, capability, 1, processors
            options = (*device_options, packed, mixture)
            if step_unsupported_reason(config, rows, block_size, *options) is not None:
                continue
            shape = Shape.of(config, rows, block_size, processors, 1, packed, mixture)
            try:
                step = DecodeStep(shape, weights, config.rms_norm_eps, wait_timeout, step)
            except (CompileError, DriverError) as error:
                log.warning("%s: %s", _SLOWDOWN, error)
                return cls(steps)
            steps[rows] = step
        return cls(steps)

    def run(
        self,
        buffers: RowBuffers,
        slots: torch.Tensor,
        tables: torch.Tensor,
        caches: Sequence[KVCache],
        logits_out: torch.Tensor | None,
    ) -> WholeStep | None:
        """Queue a decode step and return its results, or None if the step must run operator by
        operator.

        `buffers` contains the inputs computed by `BatchOperators.advance`. `slots` is int32
        (rows,), and `tables` is int32 (slots, blocks). Logits are written to `logits_out`, bfloat16
        (rows, vocabulary), if it is not None.
        """
        step = self.steps.get(len(slots))
        if step is None:
            return None
        inputs = StepInputs(
            buffers.token_ids,
            buffers.positions,
            buffers.contexts,
            slots,
            buffers.slot_mapping,
            tables,
        )
        try:
            hidden = step(inputs, caches, logits_out)
            return WholeStep(hidden, step.logits)
        except DriverError as error:
            log.warning("%s: %s", _SLOWDOWN, error)
            self.steps.clear()
            return None

    def raise_if_stopped(self) -> None:
        """Raise `StepStopped` if one of the kernels has stopped itself."""
        for step in self.steps.values():
            step.raise_if_stopped()
