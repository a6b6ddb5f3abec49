"""The phases of a decode step and how one model's matrices are cut for them.

`PHASES` is the one list from which the kernel's producer, its consumers and the tests' simulator
take their order: `constants` writes it into the CUDA source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from nanoactor.models.model_config import ModelConfig

MOST_ROWS = 16
WARPS = 8
"""Consumer warps of a block."""
SLOT_BYTES = 16384
"""Of the ring: 8 rows of 1,024 columns."""
SHARED_LIMIT = 232_448 - 1024
"""Bytes that a block of compute capability 9.0 may have, less what aligns them."""
PARAMETER_LIMIT = 32_764
UNIT_BYTES = 128
"""Of a row: what the copy engine exchanges chunks in, and of FP8 the inputs that share a scale."""
UNITS = SLOT_BYTES // (8 * UNIT_BYTES)
"""Of a box at most."""
HEAD_TILES = 4
"""Of a chunk of the head."""
_LEAST_SLOTS, _MOST_SLOTS = 4, 12
_WHOLE_ROWS, _PIECE_ROWS = 100 << 10, 64 << 10
"""Bytes: sources that fit into the first are not cut; pieces take up to the second."""


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a layer: who reads what, multiplies it by what, and hands it to whom."""

    name: str
    matrix: str | None
    """The weight, whose rows are outputs and whose columns are inputs; None: attention's."""
    rows: str | None
    """The dimension that counts outputs, ..."""
    columns: str | None
    """... and the one that counts inputs."""
    source: str
    sink: str
    stacked: int = 1
    """Matrices on top of each other, of which outputs are combined: gate and up."""
    to_all: bool = False
    """Whether all blocks read the sink."""


PHASES = (
    Phase("PROJECT", "qkv", "qkv", "hidden", "X1", "QUERIES"),
    Phase("ATTENTION", None, None, None, "QUERIES", "PARTS"),
    Phase("COMBINE", None, None, None, "PARTS", "ATTENDED", to_all=True),
    Phase("OUTPUT", "o", "hidden", "width", "ATTENDED", "X2", to_all=True),
    Phase("GATE_UP", "gate_up", "inter", "hidden", "X2", "ACTIVATED", stacked=2, to_all=True),
    Phase("DOWN", "down", "hidden", "inter", "ACTIVATED", "X1", to_all=True),
)
"""Of a layer. The first source is the last sink: of the layer before, or the embedding."""
LOGITS = Phase("LOGITS", "head", "vocab", "hidden", "X1", "LOGITS")
"""Behind the last layer; its tiles are dealt out as blocks come to them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A phase's matrix, cut into tiles of 8 outputs and boxes of columns."""

    tiles: int
    """Of 8 rows; where two matrices are stacked, of each."""
    stacked: int
    columns: int
    unit: int
    """Columns of 128 bytes: 64 in bfloat16, 128 in FP8."""
    box: int
    """Units of a box."""
    boxes: int
    """Of a tile; the last may stand out of the matrix."""
    piece_boxes: int
    pieces: int
    """The inputs are read in so many pieces, each of so many boxes."""
    packed: bool = False
    """Whether it is in FP8."""

    @property
    def scales(self) -> int:
        """A matrix's scales: for each tile and box as many as a box may have units."""
        return self.stacked * self.tiles * self.boxes * UNITS if self.packed else 0

    def tiles_of(self, block: int, blocks: int) -> int:
        """Return how many tiles a block has: tile i of it is `block + i * blocks`."""
        return max(0, -(-(self.tiles - block) // blocks))

    def boxes_of(self, block: int, blocks: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (piece, tile of the block, matrix of the stack, box) in the order of the ring."""
        for piece in range(self.pieces):
            first = piece * self.piece_boxes
            for tile in range(self.tiles_of(block, blocks)):
                for half in range(self.stacked):
                    for box in range(first, min(self.boxes, first + self.piece_boxes)):
                        yield piece, tile, half, box


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
    """Multiprocessors."""
    packed: bool = False
    """Whether the layers' matrices are in FP8, with a scale for each tile and 128 inputs."""
    head: int = 0
    """0: hidden states alone; 1: logits in bfloat16, 2: in float32."""
    flagged: bool | None = None
    """Whether what all blocks read has flags; None: with one row."""
    in_flight: int | None = None
    """Boxes on their way at most; None: 2 for narrow models, 3 for others."""
    delays: bool = False
    """Tests delay blocks at random, ..."""
    trace: bool = False
    """Whether block 0 records its clock."""
    poison: bool = False
    """... and fill shared memory with NaN first."""
    fixed_registers: bool = False
    """Whether threads keep the registers that the kernel begins with, as tools that instrument it
    want it."""

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        rows: int,
        block_size: int,
        blocks: int,
        head: int,
        packed: bool = False,
    ) -> Shape:
        """Take the sizes of a model."""
        return cls(
            config.num_layers,
            config.hidden_size,
            config.intermediate_size,
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
            head,
        )

    @property
    def width(self) -> int:
        """Of all query heads."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Outputs of the first phase."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def has_flags(self) -> bool:
        """Tell whether what all blocks read is flagged words; else it lies behind arrivals."""
        return self.rows == 1 if self.flagged is None else self.flagged

    @property
    def hidden_tiles(self) -> int:
        """Tiles of the residual that a block has at most."""
        return -(-self.hidden // 8 // self.blocks)


def _columns_whole(shape: Shape) -> int:
    """Return the columns up to which a source is not cut."""
    widest = max(shape.hidden, shape.width, shape.inter)
    if 2 * shape.rows * widest <= _WHOLE_ROWS:
        return widest
    return max(shape.hidden, _PIECE_ROWS // (2 * shape.rows))


def product_of(shape: Shape, phase: Phase) -> Product:
    """Cut a phase's matrix."""
    if phase.rows is None or phase.columns is None:
        return NO_PRODUCT
    packed = shape.packed and phase is not LOGITS
    columns, unit = getattr(shape, phase.columns), UNIT_BYTES if packed else UNIT_BYTES // 2
    boxes = -(-columns // (UNITS * unit))
    box = -(-columns // unit // boxes)
    most = _columns_whole(shape)
    piece, pieces = boxes, 1
    if columns > most:
        # Rows are received in blocks of 256 columns, so pieces are multiples of them.
        step = next(n for n in (1, 2, 4) if n * box * unit % 256 == 0)
        piece = max(1, most // (unit * box) // step) * step
        pieces = -(-boxes // piece)
    tiles = -(-getattr(shape, phase.rows) // 8)
    return Product(tiles, phase.stacked, columns, unit, box, boxes, piece, pieces, packed)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A block's shared memory, in bytes, and how many tiles are summed at a time."""

    group: int
    input_columns: int
    """Of a row of inputs."""
    inputs: int
    work: int
    rest: int
    slots: int

    @property
    def total(self) -> int:
        """Without what aligns it."""
        return self.slots * SLOT_BYTES + self.inputs + self.work + self.rest


def layout_of(shape: Shape) -> Layout:
    """Lay out shared memory; what the rest leaves is the ring's."""
    products = [product_of(shape, phase) for phase in (*PHASES, LOGITS)]
    group = 8 if shape.rows == 1 else 4 if shape.rows <= 8 else 2
    if any(product.pieces > 1 for product in products):
        group = max(group, -(-shape.hidden_tiles // 2))
    columns = max(min(p.columns, p.piece_boxes * p.box * p.unit) for p in products)
    inputs = shape.rows * (columns + 32) * 2
    sums = 2 * group * WARPS * shape.rows * 8 * 4
    work = max(sums, WARPS * shape.heads // shape.kv_heads * shape.head_dim * 4)
    attention = 16 * (shape.head_dim + 32) + 8 * shape.head_dim + 64 * (WARPS + 1)
    rest = 20 * _MOST_SLOTS + shape.rows * (WARPS * 4 + shape.hidden_tiles * 32 + 16) + attention
    if shape.packed:  # scales of the ring's boxes, and of the inputs
        rest += 4 * UNITS * _MOST_SLOTS + 4 * shape.rows * (columns // UNIT_BYTES + 1)
    rest = (rest + 448) // 16 * 16
    slots = min(_MOST_SLOTS, (SHARED_LIMIT - inputs - work - rest) // SLOT_BYTES)
    return Layout(group, columns, inputs, work, rest, slots)


def refusal(shape: Shape) -> str | None:
    """Return why no kernel is made for a shape, or None."""
    for name in ("hidden", "width", "inter"):
        if getattr(shape, name) % 256:
            return f"{name} {getattr(shape, name)} is no multiple of 256"
    if shape.head_dim not in (64, 128):
        return f"head_dim {shape.head_dim} is neither 64 nor 128"
    if shape.heads // shape.kv_heads > WARPS:
        return f"{shape.heads // shape.kv_heads} query heads share a key-value head, more than 8"
    if not 1 <= shape.rows <= MOST_ROWS:
        return f"{shape.rows} rows are not 1 to {MOST_ROWS}"
    if shape.block_size % 16:
        return f"block_size {shape.block_size} is no multiple of 16"
    if shape.rows > 1 and shape.flagged:
        return "flagged words are for one row"
    if parameter_bytes(shape) > PARAMETER_LIMIT:
        return f"{shape.layers} layers are too many for the kernel's parameters"
    if layout_of(shape).slots < _LEAST_SLOTS:
        return f"{shape.rows} rows of {shape.hidden} inputs leave no room for weights"
    return None


def parameter_bytes(shape: Shape) -> int:
    """Return the size of the kernel's parameters: maps, pointers of layers, the rest."""
    maps = sum(phase.matrix is not None for phase in PHASES)
    return 128 * (maps * shape.layers + 1) + 64 * shape.layers + 256


def _enumerators() -> Iterator[str]:
    """Write the phases' numbers, and those of hand-overs: of flags, and of arrivals."""
    for number, phase in enumerate((*PHASES, LOGITS)):
        yield f"constexpr int {phase.name} = {number};"
    arrivals = 0
    for number, phase in enumerate(PHASES, 1):
        yield f"constexpr unsigned {phase.sink} = {number};"
        if phase.to_all:
            arrivals += 1
            yield f"constexpr unsigned ARRIVED_{phase.sink} = {arrivals};"
    yield f"constexpr int LAYER_PHASES = {len(PHASES)}, LAYER_FLAGS = {len(PHASES)};"
    yield f"constexpr int LAYER_ARRIVALS = {arrivals};"


def _products(shape: Shape) -> Iterator[str]:
    yield "struct Product {"
    yield "  int tiles, stacked, columns, unit, box, boxes, piece_boxes, pieces;"
    yield "  bool packed;"
    yield "  int scales, map;  // where the matrix's scales begin; its map's number"
    yield "};"
    yield "constexpr Product PRODUCTS[] = {"
    maps = scales = 0
    for phase in (*PHASES, LOGITS):
        product = product_of(shape, phase)
        cut = (*map(int, dataclasses.astuple(product)), scales, maps)
        yield f"  {{{', '.join(map(str, cut))}}},  // {phase.name}"
        maps += phase.matrix is not None
        scales += product.scales
    yield "};"
    yield f"constexpr int MAPS = {maps - 1};"


def constants(shape: Shape) -> str:
    """Write the CUDA source's constants: sizes, table, layout."""
    layout = layout_of(shape)
    narrow = shape.hidden <= 1536
    in_flight = shape.in_flight or ((4 if shape.packed else 2) if narrow else 3)
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
        "IN_FLIGHT": min(in_flight, layout.slots),
        "XS_COLUMNS": layout.input_columns,
        "XS_SCALES": layout.input_columns // UNIT_BYTES + 1 if shape.packed else 0,
        "UNITS": UNITS,
        "XS_BYTES": layout.inputs,
        "WORK_BYTES": layout.work,
        "SHARED_BYTES": layout.rest,
        "HEAD": shape.head,
        "HEAD_FLOAT": 2,
        "HEAD_TILES": HEAD_TILES,
        "STEP_FLAGS": len(PHASES) * shape.layers + 1,
    }
    switches = {
        "PACKED": shape.packed,
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
    return "\n".join([*lines, *_enumerators(), *_products(shape)]) + "\n"
