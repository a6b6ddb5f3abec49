"""The phases of a decode step, and the division of a model's matrices into tiles and boxes.

`PHASES` and `EXPERT_PHASES` are the only definition of the order of phases. The kernel's producer,
its consumers and the simulator in the tests all follow it, and `constants` writes it into the CUDA
source.

A tile is 8 outputs (rows) of a matrix. A box is a part of a tile's columns that is copied to shared
memory by one instruction. A unit is 128 bytes of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from nanoactor.models.model_config import ModelConfig
from nanoactor.models.weights.whole_step import Mixture

MAX_ROWS = 16
WARPS = 8
"""Number of warps of a thread block that compute (consumers)."""
SLOT_BYTES = 16384
"""Size in bytes of a slot of the ring buffer for weights in shared memory: 8 rows of 1,024 columns
in bfloat16."""
SHARED_LIMIT = 232_448 - 1024
"""Maximum size in bytes of a block's shared memory at compute capability 9.0, minus the
alignment."""
PARAMETER_LIMIT = 32_764
UNIT_BYTES = 128
"""Number of bytes of a row within which the copy engine swizzles chunks. In FP8, this is also the
number of inputs that share a scale."""
UNITS = SLOT_BYTES // (8 * UNIT_BYTES)
"""Maximum number of units in a box."""
HEAD_TILES = 4
"""Number of tiles of the language-modeling head that a thread block claims at a time."""
_MIN_SLOTS, _MAX_SLOTS = 4, 12
_MAX_WHOLE_INPUT_BYTES, _MAX_PIECE_BYTES = 100 << 10, 64 << 10
"""Maximum size in bytes of inputs that are read as a whole, and of the pieces in which larger
inputs are read."""
_MAX_PACKED_PIECE_BYTES = 32 << 10
"""Maximum size in bytes of inputs in FP8 that are read at a time, unless hidden states are larger.
While a block reads a piece, its ring buffer fills."""
_WIDE_HIDDEN = 4096
"""Hidden size from which a dense model with few rows reads the inputs of its down projections in
pieces, so that the ring buffer fills again while a block multiplies a piece."""
_WIDE_ROWS, _WIDE_PACKED_ROWS = (2, 3, 4), (1, 2)
"""Numbers of rows with which it does, in bfloat16 and in FP8. Measured with Qwen3-8B on an H200."""
_EXPERT_PIECE_ROWS = (1,)
"""Numbers of rows with which a mixture of experts in FP8 reads the inputs of its output projections
in pieces. Measured with Qwen3-30B-A3B on an H200; in bfloat16, it is slower."""
_UNITS_AT_ONCE = 8
"""Number of units of an FP8 tile that one instruction multiplies."""


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a layer: where its inputs come from, which matrix it uses, and where its outputs
    go."""

    name: str
    matrix: str | None
    """Name of the weight matrix, whose rows are outputs and whose columns are inputs; None if the
    phase has none."""
    rows: str | None
    """Name of the attribute of `Shape` that is the number of outputs; None without a matrix."""
    columns: str | None
    """Name of the attribute of `Shape` that is the number of inputs; None without a matrix."""
    source: str
    sink: str
    stacked: int = 1
    """Number of stacked matrices whose outputs are combined: 2 for gate and up projections, else
    1."""
    to_all: bool = False
    """True if all thread blocks read the outputs."""
    experts: Literal["outputs", "inputs"] | None = None
    """Dimension along which the matrices of the chosen experts are concatenated; None if there is
    only one matrix."""

    @property
    def is_flagged(self) -> bool:
        """True if each word of the inputs is stored with a flag, which shows readers that the word
        is written, regardless of the number of rows."""
        return self.source in ("QUERIES", "PARTS", "SCORES")


PHASES = (
    Phase("PROJECT", "qkv", "qkv", "hidden", "X1", "QUERIES"),
    Phase("ATTENTION", None, None, None, "QUERIES", "PARTS"),
    Phase("COMBINE", None, None, None, "PARTS", "ATTENDED", to_all=True),
    Phase("OUTPUT", "o", "hidden", "width", "ATTENDED", "X2", to_all=True),
    Phase("GATE_UP", "gate_up", "inter", "hidden", "X2", "ACTIVATED", stacked=2, to_all=True),
    Phase("DOWN", "down", "hidden", "inter", "ACTIVATED", "X1", to_all=True),
)
"""Phases of a dense layer. The first phase reads the outputs of the previous layer's last phase, or
the embedding."""
ROUTE = Phase("ROUTE", None, None, None, "X2", "SCORES")
"""Phase in which each thread block multiplies the rows by the router weights of some experts."""
_GATE_UP, _DOWN = PHASES[-2:]
EXPERT_PHASES = (
    *PHASES[:-2],
    ROUTE,
    dataclasses.replace(_GATE_UP, source="SCORES", experts="outputs"),
    dataclasses.replace(_DOWN, experts="inputs"),
)
"""Phases of a layer with a mixture of experts.

All blocks receive the rows for `ROUTE` and keep them. Each block then determines the rows' chosen
experts from the scores.
"""
MAX_EXPERT_ROWS = 8
_MAX_EXPERTS, _MAX_TOP_K, _MAX_PAIRS = 256, 32, 254
LOGITS = Phase("LOGITS", "head", "vocab", "hidden", "X1", "LOGITS")
"""Phase after the last layer, which computes logits. Its tiles are assigned to blocks
dynamically."""


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """The matrix of a phase, divided into tiles (8 outputs) and boxes (the columns of a tile that
    one instruction copies)."""

    tiles: int
    """Number of tiles; for stacked matrices, the number of tiles of each of them."""
    stacked: int
    columns: int
    unit: int
    """Number of columns in a unit of 128 bytes: 64 in bfloat16, 128 in FP8."""
    box: int
    """Number of units in a box."""
    boxes: int
    """Number of boxes in a tile. The last one may extend past the end of the matrix."""
    piece_boxes: int
    pieces: int
    """Number of pieces in which the inputs are read. Each consists of `piece_boxes` boxes."""
    packed: bool = False
    """True if the matrix is in FP8."""
    matrices: int = 1
    """Number of experts that each have such a matrix; 1 for a phase without experts."""
    experts: Literal["outputs", "inputs"] | None = None
    """Dimension along which the experts' matrices are concatenated, as in `Phase.experts`."""

    @property
    def doubled(self) -> bool:
        """True if a slot of the ring buffer has the boxes of two experts, one in each half."""
        return self.experts == "inputs" and self.packed and self.box <= _UNITS_AT_ONCE

    @property
    def scales(self) -> int:
        """Number of scales of all matrices: `UNITS` for each tile and box; 0 for a bfloat16
        matrix."""
        return self.matrices * self.stacked * self.tiles * self.boxes * UNITS * self.packed

    def tiles_of(self, block: int, blocks: int, active_experts: int = 1) -> int:
        """Return the number of tiles that thread block `block` of `blocks` computes. Its tile i is
        tile `block + i * blocks` of all tiles.

        If `experts` is "outputs", each of the `active_experts` experts adds tiles. If it is
        "inputs", each tile spans all of them.
        """
        tiles = self.tiles * (active_experts if self.experts == "outputs" else 1)
        return max(0, -(-(tiles - block) // blocks))

    def boxes_of(
        self, block: int, blocks: int, active_experts: int = 1
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield (piece, tile of the block, matrix of the stack, box) for each slot of the ring
        buffer that a thread block fills, in the order in which boxes are copied.

        `active_experts` is the number of experts that the rows have chosen. A slot has one box, or
        two if `doubled` is True.
        """
        experts = active_experts if self.experts == "inputs" else 1
        if self.doubled:
            experts = -(-experts // 2)
        for piece in range(self.pieces):
            first_box = piece * self.piece_boxes
            end = min(self.boxes, first_box + self.piece_boxes)
            for tile in range(self.tiles_of(block, blocks, active_experts)):
                for matrix in range(self.stacked):
                    for box in range(first_box, end * experts):
                        yield piece, tile, matrix, box


def _whole_instructions(units: int) -> int:
    return -(-units // _UNITS_AT_ONCE) * _UNITS_AT_ONCE


NO_PRODUCT = Product(0, 1, 0, 64, 0, 0, 0, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The sizes and options for which a kernel is compiled."""

    layers: int
    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    qk_norm: bool
    qkv_bias: bool
    rows: int
    block_size: int
    blocks: int
    """Number of thread blocks, one for each multiprocessor."""
    packed: bool = False
    """True if the layers' matrices are in FP8, with one scale for each tile and 128 inputs."""
    mixture: Mixture | None = None
    """The experts of each layer, whose inner size is `inter`; None for dense layers."""
    head: int = 0
    """Results besides hidden states: 0 for none, 1 for bfloat16 logits, 2 for float32 logits."""
    flagged: bool | None = None
    """True if each word that all blocks read is stored with a flag, which shows that the word is
    written. None means True for one row, and False for more."""
    in_flight: int | None = None
    """Maximum number of boxes being copied at a time. None means 2 for narrow models (4 in FP8) and
    3 for others."""
    delays: bool = False
    """True if thread blocks are delayed at random, for tests."""
    trace: bool = False
    """True if block 0 records the time of each phase."""
    poison: bool = False
    """True if shared memory is filled with NaN at the start, for tests."""
    fixed_registers: bool = False
    """True if threads keep their initial number of registers, which instrumentation tools
    require."""

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        rows: int,
        block_size: int,
        blocks: int,
        head: int,
        packed: bool = False,
        mixture: Mixture | None = None,
    ) -> Shape:
        """Return the shape for a model's configuration, with the defaults of all other options."""
        return cls(
            config.num_layers,
            config.hidden_size,
            config.intermediate_size if mixture is None else mixture.inner,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            config.qk_norm,
            config.qkv_bias,
            rows,
            block_size,
            blocks,
            packed,
            mixture,
            head,
        )

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases of each layer."""
        return PHASES if self.mixture is None else EXPERT_PHASES

    @property
    def pairs(self) -> int:
        """Number of pairs of a row and one of its chosen experts; 0 for dense layers."""
        return 0 if self.mixture is None else self.rows * self.mixture.top_k

    @property
    def width(self) -> int:
        """Number of columns of all query heads together."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Number of outputs of the first phase: query, key and value heads."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def has_flags(self) -> bool:
        """True if each word that all blocks read is stored with a flag, which shows that the word
        is written. If False, readers wait for a counter to show that all blocks have finished."""
        return self.rows == 1 if self.flagged is None else self.flagged

    @property
    def hidden_tiles(self) -> int:
        """Maximum number of tiles of the residual stream that one thread block updates."""
        return -(-self.hidden // 8 // self.blocks)


def packed_rows(shape: Shape) -> int:
    """Return the number of rows of inputs in FP8 in shared memory, a power of two. It is at least
    the number of rows."""
    return 1 << (shape.rows - 1).bit_length()


def _max_whole_columns(shape: Shape) -> int:
    """Return the maximum number of input columns that are read as a whole, not in pieces."""
    widest = max(shape.hidden, shape.width, shape.inter)
    if shape.mixture is not None and shape.packed and shape.rows in _EXPERT_PIECE_ROWS:
        return shape.hidden
    few_rows = _WIDE_PACKED_ROWS if shape.packed else _WIDE_ROWS
    if shape.mixture is None and shape.hidden >= _WIDE_HIDDEN and shape.rows in few_rows:
        return max(shape.hidden, shape.width)
    if shape.packed:
        return max(shape.hidden, _MAX_PACKED_PIECE_BYTES // packed_rows(shape))
    if 2 * shape.rows * widest <= _MAX_WHOLE_INPUT_BYTES:
        return widest
    return max(shape.hidden, _MAX_PIECE_BYTES // (2 * shape.rows))


def product_of(shape: Shape, phase: Phase) -> Product:
    """Return the division of a phase's matrix into tiles, boxes and pieces, or `NO_PRODUCT` if the
    phase has no matrix."""
    if phase.rows is None or phase.columns is None:
        return NO_PRODUCT
    packed = shape.packed and phase is not LOGITS
    matrices = shape.mixture.experts if shape.mixture and phase.experts else 1
    columns, unit = getattr(shape, phase.columns), UNIT_BYTES if packed else UNIT_BYTES // 2
    boxes = -(-columns // (UNITS * unit))
    box = -(-columns // unit // boxes)
    if packed and boxes > 1:
        box = _whole_instructions(box)
    max_columns = _max_whole_columns(shape)
    piece_boxes, pieces = boxes, 1
    if columns > max_columns and phase.experts != "inputs":
        # Rows are received in blocks of 256 columns, so pieces are multiples of these blocks.
        multiple = next(n for n in (1, 2, 4) if n * box * unit % 256 == 0)
        piece_boxes = max(1, max_columns // (unit * box) // multiple) * multiple
        pieces = -(-boxes // piece_boxes)
    tiles = -(-getattr(shape, phase.rows) // 8)
    return Product(
        tiles, phase.stacked, columns, unit, box, boxes, piece_boxes, pieces, packed, matrices,
        phase.experts,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The division of a thread block's shared memory.

    `inputs`, `work` and `rest` are sizes in bytes, `slots` is the number of slots of the ring
    buffer for weights, and `group` is the number of tiles that are summed at a time.
    """

    group: int
    input_columns: int
    """Number of input columns that are stored in bfloat16 for each row."""
    packed_columns: int
    """Number of input columns that are stored in FP8 for each row; 0 if no matrix is in FP8."""
    pair_bytes: int
    """Size in bytes of the FP8 inputs of a pair of a row and an expert; 0 if there are none."""
    inputs: int
    work: int
    rest: int
    slots: int

    @property
    def total(self) -> int:
        """Total size in bytes, without alignment."""
        return self.slots * SLOT_BYTES + self.inputs + self.work + self.rest


def layout_of(shape: Shape) -> Layout:
    """Return the layout of shared memory for a shape. The ring buffer for weights fills the memory
    that remains, up to its maximum size."""
    products = [product_of(shape, phase) for phase in (*shape.phases, LOGITS)]
    group = 8 if shape.rows == 1 else 4 if shape.rows <= 8 else 2
    if any(product.pieces > 1 for product in products):
        group = max(group, -(-shape.hidden_tiles // 2))
    row_products = [p for p in products if p.experts != "inputs"]
    columns = max(
        min(p.columns, p.piece_boxes * p.box * p.unit) for p in row_products if not p.packed
    )
    packed = [p.piece_boxes * _whole_instructions(p.box) for p in row_products if p.packed]
    packed_columns = UNIT_BYTES * max(packed, default=0)
    inputs = max(shape.rows * (columns + 32) * 2, packed_rows(shape) * packed_columns)
    pair_bytes = 0
    for product in products:
        if product.experts == "inputs" and product.packed:
            pair_bytes = product.boxes * _whole_instructions(product.box) * UNIT_BYTES
            inputs = max(inputs, shape.pairs * pair_bytes)
        elif product.experts == "inputs":  # a line for each pair, and one of zeros
            inputs = max(inputs, (shape.pairs + 1) * (shape.inter + 32) * 2)
    inputs = -(-inputs // 1024) * 1024
    sums = 2 * group * WARPS * shape.rows * 8 * 4
    partials = WARPS * shape.heads // shape.kv_heads * shape.head_dim * 4
    work, inputs = (
        (max(sums, partials), inputs) if shape.has_flags else (sums, max(inputs, partials))
    )
    work = -(-work // 1024) * 1024
    attention = 16 * (shape.head_dim + 32) + 8 * shape.head_dim + 64 * (WARPS + 1)
    rest = 20 * _MAX_SLOTS + shape.rows * (WARPS * 4 + shape.hidden_tiles * 32 + 16) + attention
    if shape.packed:  # scales of the ring's boxes, and of the inputs
        rest += 4 * UNITS * _MAX_SLOTS + 4 * (input_scales(shape, packed_columns) + UNITS)
    if shape.mixture is not None:  # scores of the rows, and their chosen experts
        rest += 4 * shape.rows * WARPS * scored_experts(shape) + 40 * shape.pairs + 80
    rest = (rest + 448) // 16 * 16
    slots = min(_MAX_SLOTS, (SHARED_LIMIT - inputs - work - rest) // SLOT_BYTES)
    return Layout(group, columns, packed_columns, pair_bytes, inputs, work, rest, slots)


def scored_experts(shape: Shape) -> int:
    """Return the maximum number of experts for which one thread block computes router scores; 0
    for dense layers."""
    return 0 if shape.mixture is None else -(-shape.mixture.experts // shape.blocks)


def input_scales(shape: Shape, columns: int) -> int:
    """Return the number of scales in shared memory for inputs of up to `columns` columns; 0 if the
    matrices are in bfloat16."""
    row_scales = shape.rows * (columns // UNIT_BYTES + 1)
    return max(row_scales, shape.pairs * (shape.inter // UNIT_BYTES + 1)) * shape.packed


def _experts_unsupported_reason(shape: Shape) -> str | None:
    mixture = shape.mixture
    if mixture is None:
        return None
    if shape.rows > MAX_EXPERT_ROWS:
        return f"{shape.rows} rows of a mixture of experts are more than {MAX_EXPERT_ROWS}"
    if mixture.experts > _MAX_EXPERTS or mixture.top_k > _MAX_TOP_K:
        return (
            f"{mixture.top_k} of {mixture.experts} experts exceed the maximum of {_MAX_TOP_K} "
            f"of {_MAX_EXPERTS}"
        )
    if shape.pairs > _MAX_PAIRS:
        return f"{shape.pairs} pairs of a row and an expert are more than {_MAX_PAIRS}"
    if shape.packed and shape.inter > UNITS * UNIT_BYTES:
        return f"experts of {shape.inter} in FP8 are larger than {UNITS * UNIT_BYTES}"
    if mixture.top_k * shape.inter < 8 * shape.blocks:
        return f"{mixture.top_k} experts of {shape.inter} are too small for {shape.blocks} blocks"
    return None


def shape_unsupported_reason(shape: Shape) -> str | None:
    """Return why no kernel can be compiled for a shape, or None if one can."""
    return _experts_unsupported_reason(shape) or _sizes_unsupported_reason(shape)


def _sizes_unsupported_reason(shape: Shape) -> str | None:
    for name in ("hidden", "width", "inter"):
        if getattr(shape, name) % 256:
            return f"{name} {getattr(shape, name)} is not a multiple of 256"
    if shape.head_dim not in (64, 128):
        return f"head_dim {shape.head_dim} is neither 64 nor 128"
    if shape.heads // shape.kv_heads > WARPS:
        return f"{shape.heads // shape.kv_heads} query heads share a key-value head, more than 8"
    if not 1 <= shape.rows <= MAX_ROWS:
        return f"the number of rows, {shape.rows}, is not between 1 and {MAX_ROWS}"
    if shape.block_size % 16:
        return f"block_size {shape.block_size} is not a multiple of 16"
    if shape.rows > 1 and shape.flagged:
        return "flagged words support only one row"
    if parameter_bytes(shape) > PARAMETER_LIMIT:
        return f"{shape.layers} layers are too many for the kernel's parameters"
    if layout_of(shape).slots < _MIN_SLOTS:
        return f"{shape.rows} rows of {shape.hidden} inputs leave no room for weights"
    return None


def parameter_bytes(shape: Shape) -> int:
    """Return the size in bytes of the kernel's parameters: tensor maps, the layers' pointers, and
    the rest."""
    maps = sum(phase.matrix is not None for phase in PHASES)
    return 128 * (maps * shape.layers + 1) + 72 * shape.layers + 264


def _enumerators(shape: Shape) -> Iterator[str]:
    """Yield C++ constants that number the phases and their outputs. Outputs that all thread blocks
    read have a second number, for the counters of blocks that have finished writing."""
    for number, phase in enumerate((*shape.phases, LOGITS)):
        yield f"constexpr int {phase.name} = {number};"
    if ROUTE not in shape.phases:
        yield f"constexpr int {ROUTE.name} = -1;"
        yield f"constexpr unsigned {ROUTE.sink} = 0;"
    arrivals = 0
    for number, phase in enumerate(shape.phases, 1):
        yield f"constexpr unsigned {phase.sink} = {number};"
        if phase.to_all:
            arrivals += 1
            yield f"constexpr unsigned ARRIVED_{phase.sink} = {arrivals};"
    count = len(shape.phases)
    yield f"constexpr int LAYER_PHASES = {count}, LAYER_FLAGS = {count};"
    yield f"constexpr int LAYER_ARRIVALS = {arrivals};"


def _products(shape: Shape) -> Iterator[str]:
    yield "struct Product {"
    yield "  int tiles, stacked, columns, unit, box, boxes, piece_boxes, pieces;"
    yield "  bool packed, doubled;"
    yield "  int flight;       // boxes on their way at most"
    yield "  int scales, map;  // where the matrix's scales begin; its map's number"
    yield "};"
    yield "constexpr Product PRODUCTS[] = {"
    maps = scales = 0
    for phase in (*shape.phases, LOGITS):
        product = product_of(shape, phase)
        geometry = (
            product.tiles,
            product.stacked,
            product.columns,
            product.unit,
            product.box,
            product.boxes,
            product.piece_boxes,
            product.pieces,
        )
        rest = (
            int(product.packed),
            int(product.doubled),
            _max_boxes_in_flight(shape, product),
            scales,
            maps,
        )
        yield f"  {{{', '.join(map(str, (*geometry, *rest)))}}},  // {phase.name}"
        maps += phase.matrix is not None
        scales += product.scales
    yield "};"
    yield f"constexpr int MAPS = {maps - 1};"


def _max_boxes_in_flight(shape: Shape, product: Product) -> int:
    """Return the maximum number of boxes of a matrix that are copied to shared memory at a time."""
    is_narrow = shape.hidden <= 1536
    boxes = shape.in_flight or ((4 if shape.packed else 2) if is_narrow else 3)
    if product.experts is not None:  # their boxes may be small
        boxes = -(-boxes * UNITS // (product.box * (1 + product.doubled)))
    return min(boxes, layout_of(shape).slots)


def constants(shape: Shape) -> str:
    """Return the constants of the CUDA source: sizes, the table of phases, and the layout of shared
    memory."""
    layout, mixture = layout_of(shape), shape.mixture
    names = {
        "LAYERS": shape.layers,
        "HIDDEN": shape.hidden,
        "INTER": shape.inter,
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "HEAD_DIM": shape.head_dim,
        "WIDTH": shape.width,
        "QKV": shape.qkv,
        "VOCAB": shape.vocab,
        "ROWS": shape.rows,
        "BLOCK_SIZE": shape.block_size,
        "BLOCKS": shape.blocks,
        "WARPS": WARPS,
        "THREADS": 32 * WARPS,
        "HIDDEN_TILES": shape.hidden_tiles,
        "GROUP": layout.group,
        "TOGETHER": 4 if shape.rows <= 8 else 2,
        "SLOTS": layout.slots,
        "XS_COLUMNS": layout.input_columns,
        "XS_SCALES": layout.packed_columns // UNIT_BYTES + 1 if shape.packed else 0,
        "ALL_SCALES": input_scales(shape, layout.packed_columns),
        "PACKED_ROWS": packed_rows(shape),
        "PAIR_BYTES": layout.pair_bytes,
        "EXPERTS": mixture.experts if mixture else 0,
        "CHOSEN": mixture.top_k if mixture else 1,
        "PAIRS": max(1, shape.pairs),
        "SCORED": max(1, scored_experts(shape)),
        "UNITS": UNITS,
        "XS_BYTES": layout.inputs,
        "WORK_BYTES": layout.work,
        "SHARED_BYTES": layout.rest,
        "HEAD": shape.head,
        "HEAD_FLOAT": 2,
        "HEAD_TILES": HEAD_TILES,
        "STEP_FLAGS": len(shape.phases) * shape.layers + 1,
    }
    switches = {
        "PACKED": shape.packed,
        "NORMALIZES": mixture is not None and mixture.renormalize,
        "QK_NORM": shape.qk_norm,
        "QKV_BIAS": shape.qkv_bias,
        "FLAGGED": shape.has_flags,
        "DELAYS": shape.delays,
        "POISON": shape.poison,
        "TRACE": shape.trace,
        "FIXED_REGISTERS": shape.fixed_registers,
    }
    lines = [f"constexpr int {name} = {value};" for name, value in names.items()]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in switches.items()]
    return "\n".join([*lines, *_enumerators(shape), *_products(shape)]) + "\n"
