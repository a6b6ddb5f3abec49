"""The parameters of the decode step kernel, laid out as in `arguments.cuh`, and its scratch
memory."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from nanoactor.models.batch import KVCache
from nanoactor.models.devices.cuda.kernels.decode_step.table import (
    PHASES,
    UNITS,
    Shape,
    product_of,
)
from nanoactor.models.devices.cuda.kernels.driver import MAP_BYTES
from nanoactor.models.weights.whole_step import LayerWeights, ModelWeights, PackedMatrix

MATRICES = tuple(phase.matrix for phase in PHASES if phase.matrix is not None)
"""Names of a layer's matrices, in the order of the layer's tensor maps."""
_ALIGNMENT = 64
_CONTROL_WORDS = 128


@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a step's rows. A captured step reads these tensors at their addresses, which
    must not change."""

    token_ids: torch.Tensor
    """Token ids, int32 (rows,)."""
    positions: torch.Tensor
    """Rotary positions, int32 (rows,)."""
    contexts: torch.Tensor
    """Context lengths, including the new token, int32 (rows,)."""
    slots: torch.Tensor
    """Slot of each row, an index into `tables`, int32 (rows,)."""
    slot_mapping: torch.Tensor
    """Cache position of the new token's key and value, int64 (rows,)."""
    tables: torch.Tensor
    """Block table of each slot, int32 (slots, blocks)."""


class Scratch:
    """The memory through which the kernel's thread blocks exchange data, and the kernel's
    results."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        """Allocate the memory. It is zeroed, because the kernel waits until flags in it have the
        number of the current step, which stale memory might contain."""
        rows, words_per_pair = shape.rows, 2 if shape.has_flags else 1
        group = shape.heads // shape.kv_heads
        words = {
            "x1": rows * shape.hidden // 2 * words_per_pair,
            "x2": rows * shape.hidden // 2 * words_per_pair,
            "attended": rows * shape.width // 2 * words_per_pair,
            "activated": (shape.pairs or rows) * shape.inter // 2 * words_per_pair,
            "queries": 2 * rows * shape.qkv,
            "parts": 2 * shape.blocks * group * shape.head_dim * 2,
            "weights": 2 * shape.blocks * group * 4,
            "scores": 2 * rows * shape.mixture.experts if shape.mixture else 0,
        }
        offsets, total = {}, 0
        for name, count in words.items():
            offsets[name] = total
            total += -(-count // 32) * 32
        self.words = torch.zeros(total, dtype=torch.int32, device=device)
        self.addresses = {n: self.words.data_ptr() + 4 * offset for n, offset in offsets.items()}
        self.control = torch.zeros(_CONTROL_WORDS, dtype=torch.int32, device=device)
        self.control[0] = 1  # the first step
        self.hidden = torch.empty(rows, shape.hidden, dtype=torch.bfloat16, device=device)
        logits_dtype = torch.float32 if shape.head == 2 else torch.bfloat16
        logits_width = shape.vocab if shape.head else 0
        self.trace = torch.zeros(shape.layers + 1, 16, dtype=torch.int64, device=device)
        self.logits = torch.empty(rows, logits_width, dtype=logits_dtype, device=device)


class _Layer(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            "norm1", "norm2", "q_norm", "k_norm", "bias", "keys", "values", "scales", "router",
        )
    ]  # fmt: skip


_INPUTS = ("embed", "norm", "cos", "sin", "tokens", "positions", "contexts", "slots", "places")
_BUFFERS = (
    "x1", "x2", "attended", "activated", "queries", "parts", "weights", "scores", "scratch",
)  # fmt: skip
_POINTERS = (*_INPUTS, "tables", "control", *_BUFFERS)


def _args_type(shape: Shape) -> type[ctypes.Structure]:
    fields: list[tuple[str, type]] = [
        ("maps", ctypes.c_ubyte * (MAP_BYTES * (len(MATRICES) * shape.layers + 1))),
        ("layers", _Layer * shape.layers),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("scratch_words", ctypes.c_uint64),
        ("hidden", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        ("trace", ctypes.c_void_p),
        ("patience", ctypes.c_uint64),
        ("table_stride", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]
    size = ctypes.sizeof(type("Unpadded", (ctypes.Structure,), {"_fields_": fields}))
    # The kernel reads a padded struct, so the size is rounded up.
    fields.append(("padding", ctypes.c_ubyte * (-size % _ALIGNMENT or _ALIGNMENT)))
    return type("Args", (ctypes.Structure,), {"_fields_": fields})


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _layer(weights: LayerWeights, cache: KVCache, scales: torch.Tensor | None) -> _Layer:
    norms = weights.norm1, weights.norm2, weights.q_norm, weights.k_norm, weights.bias
    router = None if weights.router is None else weights.router.weight
    return _Layer(*map(_address, (*norms, cache.keys, cache.values, scales, router)))


def lay_out_scales(shape: Shape, weights: ModelWeights) -> list[torch.Tensor | None]:
    """Return the scales of each layer's matrices in the order in which the kernel reads them, by
    tile and box; None for each layer if the matrices are not in FP8.

    The result does not depend on the number of rows.
    """
    return [
        _lay_out_layer_scales(shape, layer) if shape.packed else None for layer in weights.layers
    ]


def _lay_out_layer_scales(shape: Shape, layer: LayerWeights) -> torch.Tensor:
    layouts = []
    for phase in shape.phases:
        matrix = getattr(layer, phase.matrix) if phase.matrix else None
        if isinstance(matrix, PackedMatrix):
            product, tile_scales = product_of(shape, phase), matrix.scales.flatten(0, -2)
            tiles, units = tile_scales.shape
            boxes = F.pad(tile_scales, (0, product.boxes * product.box - units))
            boxes = F.pad(boxes.view(tiles, product.boxes, product.box), (0, UNITS - product.box))
            layouts.append(boxes.flatten())
            assert boxes.numel() == product.scales
    return torch.cat(layouts)


def arguments_of(
    shape: Shape,
    weights: ModelWeights,
    caches: Sequence[KVCache],
    inputs: StepInputs,
    scratch: Scratch,
    maps: Sequence[bytes],
    scales: Sequence[torch.Tensor | None],
    status: torch.Tensor,
    eps: float,
    wait_timeout: float,
) -> ctypes.Structure:
    """Return the kernel's parameters.

    `maps` are the tensor maps of each layer's matrices and of the head. `scales` are those of each
    layer, as returned by `lay_out_scales`. `status`, int32 (2,) in page-locked memory, receives the
    reason if the kernel stops itself. `wait_timeout` is in seconds.
    """
    args = _args_type(shape)()
    map_bytes = b"".join(maps)
    ctypes.memmove(args.maps, map_bytes, len(map_bytes))
    layers = zip(weights.layers, caches, scales, strict=True)
    for index, (layer, cache, layer_scales) in enumerate(layers):
        args.layers[index] = _layer(layer, cache, layer_scales)
    values = {
        "embed": weights.embed,
        "norm": weights.norm,
        "cos": weights.cos,
        "sin": weights.sin,
        "tokens": inputs.token_ids,
        "positions": inputs.positions,
        "contexts": inputs.contexts,
        "slots": inputs.slots,
        "places": inputs.slot_mapping,
        "tables": inputs.tables,
        "control": scratch.control,
        "scratch": scratch.words,
        "hidden": scratch.hidden,
        "logits": scratch.logits,
        "status": status,
        "trace": scratch.trace,
    }
    for name, tensor in values.items():
        setattr(args, name, tensor.data_ptr())
    for name, address in scratch.addresses.items():
        setattr(args, name, address)
    numbers = {
        "scratch_words": scratch.words.numel() // 4,
        "patience": int(wait_timeout * 1e9),
        "table_stride": inputs.tables.stride(0),
        "eps": eps,
        "scale": shape.head_dim**-0.5 * 1.4426950408889634,
    }
    for name, number in numbers.items():
        setattr(args, name, number)
    return args
