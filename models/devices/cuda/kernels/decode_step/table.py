"""The phases of a decode step, and how a model's matrices are cut for them.

Only `PHASES` and `EXPERT_PHASES` define the order of phases for the kernel's producer, its
consumers and the tests' simulator: `constants` writes it into the CUDA source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from nanoactor.models.model_config import ModelConfig
from nanoactor.models.weights.whole_step import Mixture

MAX_ROWS = 16
WARPS = 8
"""Number of consumer warps of a block."""
SLOT_BYTES = 16384
"""Size of a slot of the ring in bytes: 8 rows of 1,024 columns in bfloat16."""
SHARED_LIMIT = 232_448 - 1024
"""Maximum shared memory of a block in bytes at compute capability 9.0, minus the alignment."""
PARAMETER_LIMIT = 32_764
UNIT_BYTES = 128
"""Number of bytes of a row within which the copy engine swizzles chunks; in FP8, also the number of
inputs that share a scale."""
UNITS = SLOT_BYTES // (8 * UNIT_BYTES)
"""Maximum number of units in a box."""
HEAD_TILES = 4
"""Number of tiles in a chunk of the head."""
_MIN_SLOTS, _MAX_SLOTS = 4, 12
_MAX_WHOLE_INPUT_BYTES, _MAX_PIECE_BYTES = 100 << 10, 64 << 10
"""Sizes in bytes: sources up to the first size are not cut into pieces, and pieces have up to the
second size."""


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a layer: its input, its matrix, and the recipients of its output."""

    name: str
    matrix: str | None
    """Name of the weight, with outputs as rows and inputs as columns; None if the phase has
    none."""
    rows: str | None
    """Name of the dimension that counts outputs."""
    columns: str | None
    """Name of the dimension that counts inputs."""
    source: str
    sink: str
    stacked: int = 1
    """Number of stacked matrices whose outputs are combined: 2 for gate and up."""
    to_all: bool = False
    """True if all blocks read the sink."""
    experts: Literal["outputs", "inputs"] | None = None
    """Dimension along which the matrices of the chosen experts are concatenated; None if there is
    one matrix."""

    @property
    def is_flagged(self) -> bool:
        """Return True if the source consists of flagged words for any number of rows."""
        return self.source in ("QUERIES", "PARTS", "SCORES")


PHASES = (
    Phase("PROJECT", "qkv", "qkv", "hidden", "X1", "QUERIES"),
    Phase("ATTENTION", None, None, None, "QUERIES", "PARTS"),
    Phase("COMBINE", None, None, None, "PARTS", "ATTENDED", to_all=True),
    Phase("OUTPUT", "o", "hidden", "width", "ATTENDED", "X2", to_all=True),
    Phase("GATE_UP", "gate_up", "inter", "hidden", "X2", "ACTIVATED", stacked=2, to_all=True),
    Phase("DOWN", "down", "hidden", "inter", "ACTIVATED", "X1", to_all=True),
)
"""Phases of a layer. The first source is the previous layer's last sink, or the embedding."""
ROUTE = Phase("ROUTE", None, None, None, "X2", "SCORES")
"""Phase in which each block multiplies the rows by the router's weights for its experts."""
_GATE_UP, _DOWN = PHASES[-2:]
EXPERT_PHASES = (
    *PHASES[:-2],
    ROUTE,
    dataclasses.replace(_GATE_UP, source="SCORES", experts="outputs"),
    dataclasses.replace(_DOWN, experts="inputs"),
)
"""Phases of a layer with a mixture of experts. All blocks receive the rows for `ROUTE` and keep
them; then each block derives the rows' chosen experts from the scores."""
MAX_EXPERT_ROWS = 8
_MAX_EXPERTS, _MAX_TOP_K = 256, 32
LOGITS = Phase("LOGITS", "head", "vocab", "hidden", "X1", "LOGITS")
"""The phase after the last layer; its tiles are assigned to blocks dynamically."""


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A phase's matrix, cut into tiles of 8 outputs and boxes of columns."""

    tiles: int
    """Number of tiles of 8 rows; for stacked matrices, the number in each of them."""
    stacked: int
    columns: int
    unit: int
    """Number of columns in 128 bytes: 64 in bfloat16, 128 in FP8."""
    box: int
    """Number of units in a box."""
    boxes: int
    """Number of boxes in a tile; the last one may extend past the matrix."""
    piece_boxes: int
    pieces: int
    """Number of pieces in which the inputs are read, of `piece_boxes` boxes each."""
    packed: bool = False
    """True if the matrix is in FP8."""
    matrices: int = 1
    """Number of experts, each of which has such a matrix; 1 without experts."""
    experts: Literal["outputs", "inputs"] | None = None
    """Dimension along which the experts' matrices are concatenated, see `Phase`."""

    @property
    def scales(self) -> int:
        """Return the number of scales of all matrices: `UNITS` for each tile and box."""
        return self.matrices * self.stacked * self.tiles * self.boxes * UNITS * self.packed

    def tiles_of(self, block: int, blocks: int, active_experts: int = 1) -> int:
        """Return the number of tiles of a block; its tile i is tile `block + i * blocks` of all
        tiles. If `experts` is "outputs", each of the `active_experts` experts adds tiles; if it is
        "inputs", each tile spans all of them."""
        tiles = self.tiles * (active_experts if self.experts == "outputs" else 1)
        return max(0, -(-(tiles - block) // blocks))

    def boxes_of(
        self, block: int, blocks: int, active_experts: int = 1
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield (piece, tile of the block, matrix of the stack, box) in the order of the ring.
        `active_experts` is the number of experts that the rows have chosen."""
        for piece in range(self.pieces):
            first_box = piece * self.piece_boxes
            end = min(self.boxes, first_box + self.piece_boxes)
            for tile in range(self.tiles_of(block, blocks, active_experts)):
                for matrix in range(self.stacked):
                    for box in range(
                        first_box, end * (active_experts if self.experts == "inputs" else 1)
                    ):
                        yield piece, tile, matrix, box


NO_PRODUCT = Product(0, 1, 0, 64, 0, 0, 0, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that a kernel is compiled for."""

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
    """Number of blocks, one for each multiprocessor."""
    packed: bool = False
    """True if the layers' matrices are in FP8, with a scale for each tile and 128 inputs."""
    mixture: Mixture | None = None
    """The experts of each layer, whose inner size is `inter`; None if layers have no experts."""
    head: int = 0
    """Output besides hidden states: 0 for none, 1 for logits in bfloat16, 2 for logits in
    float32."""
    flagged: bool | None = None
    """True if words that all blocks read carry flags; None to flag them only if there is one
    row."""
    in_flight: int | None = None
    """Maximum number of boxes in flight; None for 2 in narrow models (4 in FP8) and 3 in others."""
    delays: bool = False
    """True if blocks are delayed at random, for tests."""
    trace: bool = False
    """True if block 0 records its clock."""
    poison: bool = False
    """True if shared memory is filled with NaN first, for tests."""
    fixed_registers: bool = False
    """True if threads keep their initial number of registers, for instrumentation tools."""

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
        """Return the shape for a model's configuration."""
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
        """Return the phases of a layer."""
        return PHASES if self.mixture is None else EXPERT_PHASES

    @property
    def pairs(self) -> int:
        """Return the number of pairs of a row and a chosen expert; 0 without experts."""
        return 0 if self.mixture is None else self.rows * self.mixture.top_k

    @property
    def width(self) -> int:
        """Return the combined width of all query heads."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Return the number of outputs of the first phase."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def has_flags(self) -> bool:
        """Return True if words that all blocks read carry flags; otherwise they are guarded by
        counting arrivals."""
        return self.rows == 1 if self.flagged is None else self.flagged

    @property
    def hidden_tiles(self) -> int:
        """Return the maximum number of residual tiles of a block."""
        return -(-self.hidden // 8 // self.blocks)


def _max_whole_columns(shape: Shape) -> int:
    """Return the maximum number of columns of a source that is not cut into pieces."""
    widest = max(shape.hidden, shape.width, shape.inter)
    if 2 * shape.rows * widest <= _MAX_WHOLE_INPUT_BYTES:
        return widest
    return max(shape.hidden, _MAX_PIECE_BYTES // (2 * shape.rows))


def product_of(shape: Shape, phase: Phase) -> Product:
    """Cut a phase's matrix into tiles, boxes and pieces."""
    if phase.rows is None or phase.columns is None:
        return NO_PRODUCT
    packed = shape.packed and phase is not LOGITS
    matrices = shape.mixture.experts if shape.mixture and phase.experts else 1
    columns, unit = getattr(shape, phase.columns), UNIT_BYTES if packed else UNIT_BYTES // 2
    boxes = -(-columns // (UNITS * unit))
    box = -(-columns // unit // boxes)
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
    """The parts of a block's shared memory in bytes, and the number of tiles summed at a time."""

    group: int
    input_columns: int
    """Number of columns of a row of inputs."""
    inputs: int
    work: int
    rest: int
    slots: int

    @property
    def total(self) -> int:
        """Return the total size in bytes, without alignment."""
        return self.slots * SLOT_BYTES + self.inputs + self.work + self.rest


def layout_of(shape: Shape) -> Layout:
    """Lay out shared memory; the ring gets the remainder."""
    products = [product_of(shape, phase) for phase in (*shape.phases, LOGITS)]
    group = 8 if shape.rows == 1 else 4 if shape.rows <= 8 else 2
    if any(product.pieces > 1 for product in products):
        group = max(group, -(-shape.hidden_tiles // 2))
    row_products = [p for p in products if p.experts != "inputs"]
    columns = max(min(p.columns, p.piece_boxes * p.box * p.unit) for p in row_products)
    inputs = shape.rows * (columns + 32) * 2
    if shape.pairs:  # a line for each pair, and one of zeros
        inputs = max(inputs, (shape.pairs + 1) * (shape.inter + 32) * 2)
    sums = 2 * group * WARPS * shape.rows * 8 * 4
    work = max(sums, WARPS * shape.heads // shape.kv_heads * shape.head_dim * 4)
    attention = 16 * (shape.head_dim + 32) + 8 * shape.head_dim + 64 * (WARPS + 1)
    rest = 20 * _MAX_SLOTS + shape.rows * (WARPS * 4 + shape.hidden_tiles * 32 + 16) + attention
    if shape.packed:  # scales of the ring's boxes, and of the inputs
        rest += 4 * UNITS * _MAX_SLOTS + 4 * input_scales(shape, columns)
    if shape.mixture is not None:  # scores of the rows, and their chosen experts
        rest += 4 * shape.rows * WARPS * scored_experts(shape) + 24 * shape.pairs + 64
    rest = (rest + 448) // 16 * 16
    slots = min(_MAX_SLOTS, (SHARED_LIMIT - inputs - work - rest) // SLOT_BYTES)
    return Layout(group, columns, inputs, work, rest, slots)


def scored_experts(shape: Shape) -> int:
    """Return the maximum number of experts that a block scores."""
    return 0 if shape.mixture is None else -(-shape.mixture.experts // shape.blocks)


def input_scales(shape: Shape, columns: int) -> int:
    """Return the number of scales in shared memory for inputs of at most `columns` columns."""
    row_scales = shape.rows * (columns // UNIT_BYTES + 1)
    return max(row_scales, (shape.pairs + 1) * (shape.inter // UNIT_BYTES + 1)) * shape.packed


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
    if mixture.top_k * shape.inter < 8 * shape.blocks:
        return f"{mixture.top_k} experts of {shape.inter} are too small for {shape.blocks} blocks"
    return None


def shape_unsupported_reason(shape: Shape) -> str | None:
    """Return why no kernel supports a shape, or None if one does."""
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
    """Return the size in bytes of the kernel's parameters: tensor maps, pointers of layers, and the
    rest."""
    maps = sum(phase.matrix is not None for phase in PHASES)
    return 128 * (maps * shape.layers + 1) + 72 * shape.layers + 264


def _enumerators(shape: Shape) -> Iterator[str]:
    """Yield constants that number the phases and the hand-overs, by flags and by arrivals."""
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
    yield "  bool packed;"
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
        rest = int(product.packed), _max_boxes_in_flight(shape, product), scales, maps
        yield f"  {{{', '.join(map(str, (*geometry, *rest)))}}},  // {phase.name}"
        maps += phase.matrix is not None
        scales += product.scales
    yield "};"
    yield f"constexpr int MAPS = {maps - 1};"


def _max_boxes_in_flight(shape: Shape, product: Product) -> int:
    """Return the maximum number of a matrix's boxes that may be in flight at once."""
    is_narrow = shape.hidden <= 1536
    boxes = shape.in_flight or ((4 if shape.packed else 2) if is_narrow else 3)
    if product.experts is not None:  # their boxes may be small
        boxes = -(-boxes * UNITS // product.box)
    return min(boxes, layout_of(shape).slots)


def constants(shape: Shape) -> str:
    """Return the constants of the CUDA source: sizes, the table of phases, and the layout."""
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
        "XS_SCALES": layout.input_columns // UNIT_BYTES + 1 if shape.packed else 0,
        "ALL_SCALES": input_scales(shape, layout.input_columns),
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
