// The ring of tiles in shared memory. One producer thread copies this block's boxes of weights in
// the order of the table. It waits only for room (and for the choice of experts). Eight consumer
// warps process the boxes in the same order.
//
// A *tile* is 8 outputs of a matrix with all their columns. It is copied in *boxes* of 8 rows of up
// to 2,048 bytes, one box per slot of the ring. A box consists of *units*: 8 rows of 128 bytes (64
// columns of bf16, 128 of e4m3), in which the copy engine swizzles 16-byte chunks (chunk ^ row).
// Therefore eight threads that read chunks of two rows have no bank conflict. A packed box also has
// a scale for each unit.
//
// Two mbarriers hand over a slot: `full` completes when the bytes of the copy have arrived, `empty`
// when all consumer warps have read them.

constexpr int SLOT = 16384;  // bytes
constexpr int TILE_UNIT = 1024;  // bytes of a unit of a tile
constexpr u32 END_OF_HEAD = 0xffffffffu;

// The position of the producer or of a consumer in the ring. Both advance in the same way.
struct Cursor {
  int slot = 0;
  u32 parity = 0;
  DEVICE void next() {
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }
  // Returns the position `slots` later, which is less than a round.
  DEVICE Cursor later(int slots) const {
    const bool wraps = slot + slots >= SLOTS;
    return Cursor{wraps ? slot + slots - SLOTS : slot + slots, parity ^ wraps};
  }
};

struct Ring {
  u32 data, full, empty;  // shared addresses
  int* chunks;            // with HEAD: the head's chunk in each slot, or END_OF_HEAD
  float* scales;          // [SLOTS][UNITS], with PACKED
  Cursor at;

  DEVICE void wait(const Args& a, u32 bar, u32 parity, Wait kind, int where) {
    if (barrier_passed(bar, parity)) return;
    Patience patience;
    while (!barrier_passed(bar, parity)) patience.poll(a, kind, where);
  }
  // Waits, in a consumer, until the slot's bytes have arrived.
  DEVICE void wait_full(const Args& a, const Cursor& c, int where) {
    wait(a, full + 8 * c.slot, c.parity, WAIT_TILE, where);
  }
  // Waits, in the producer, until the slot's previous bytes have been read. Returns at once in the
  // first round.
  DEVICE void wait_empty(const Args& a, int where) {
    wait(a, empty + 8 * at.slot, at.parity ^ 1, WAIT_ROOM, where);
  }
};

DEVICE void make_ring(Ring& ring, Choice& choice) {
  for (int i = 0; i < SLOTS; ++i) {
    barrier_init(ring.full + 8 * i, 1);
    barrier_init(ring.empty + 8 * i, WARPS);
  }
  barrier_init(address_of(&choice.listed), 1);
  barriers_are_ready();
}

// -- the tiles of a block ---------------------------------------------------------------------

// Tiles are assigned to blocks in turn: tile i of a block is tile `block + i * BLOCKS` of the
// matrix.
DEVICE int tiles_of(int tiles, int block) { return block < tiles ? (tiles - block + BLOCKS - 1) / BLOCKS : 0; }

// -- producer ---------------------------------------------------------------------------------

struct Producer {
  const Args& a;
  Ring& ring;
  const Choice& choice;
  u32 sent = 0;  // number of boxes

  // Keeps at most `flight` boxes in flight. A deeper queue gains no bandwidth, and the words that
  // blocks hand over to each other would wait in it.
  DEVICE void bound_flight(int flight, int where) {
    if (flight >= SLOTS || sent < flight) return;
    const bool wrapped = ring.at.slot < flight;
    const int slot = wrapped ? ring.at.slot - flight + SLOTS : ring.at.slot - flight;
    ring.wait(a, ring.full + 8 * slot, ring.at.parity ^ wrapped, WAIT_FLIGHT, where);
  }

  // Copies a box into the next slot, with its part of `scales` if the matrix is packed.
  DEVICE void send(const Product& p, const TensorMap* map, const float* scales, int row, int box, int where, u32 chunk) {
    ring.wait_empty(a, where);
    bound_flight(p.flight, where);
    const u32 bar = ring.full + 8 * ring.at.slot;
    if (HEAD) put_shared4(ring.chunks + ring.at.slot, chunk);
    // All bytes of a box are counted, although parts outside the matrix are not read but set to zero.
    barrier_expect(bar, p.box * TILE_UNIT + (p.packed ? UNITS * 4 : 0));
    if (p.packed)
      copy_line(address_of(ring.scales + ring.at.slot * UNITS), scales + (row / 8 * p.boxes + box) * UNITS, UNITS * 4, bar);
    copy_box(ring.data + ring.at.slot * SLOT, map, row, box * p.box, bar);
    ring.at.next();
    ++sent;
  }

  // Copies the matrix of a phase of a layer. The order is: pieces of the columns, tiles, gate and
  // up of a tile, boxes of a piece.
  template <int P>
  DEVICE void stream(int layer) {
    constexpr Product p = PRODUCTS[P];
    const TensorMap* map = a.maps + layer * MAPS + p.map;
    const float* scales = p.packed ? a.layers[layer].scales + p.scales : nullptr;
    prefetch_map(map + 1);  // there is always one more map: the head's is the last
    const int tiles = tiles_of(p.tiles, block_index()), where = place(layer, P);
    if constexpr (EXPERTS > 0 && P == GATE_UP) {
      ring.wait(a, address_of(&choice.listed), layer & 1, WAIT_CHOICE, where);
      return stream_chosen(p, map, scales, where);
    }
    if constexpr (EXPERTS > 0 && P == DOWN) return stream_back(p, map, scales, tiles, where);
#pragma unroll 1
    for (int piece = 0; piece < p.pieces; ++piece)
#pragma unroll 1
      for (int i = 0; i < tiles; ++i)
#pragma unroll 1
        for (int half = 0; half < p.stacked; ++half)
#pragma unroll 1
          for (int box = piece * p.piece_boxes; box < p.boxes && box < (piece + 1) * p.piece_boxes; ++box)
            send(p, map, scales, (half * p.tiles + block_index() + i * BLOCKS) * 8, box, where, 0);
  }

  // Copies the tiles of all listed experts, one expert after the other.
  DEVICE void stream_chosen(const Product& p, const TensorMap* map, const float* scales, int where) {
    const int all = p.tiles * get_shared4(&choice.count);
#pragma unroll 1
    for (int tile = block_index(); tile < all; tile += BLOCKS) {
      const int first = get_shared4(choice.experts + tile / p.tiles) * p.stacked * p.tiles + tile % p.tiles;
#pragma unroll 1
      for (int half = 0; half < p.stacked; ++half)
#pragma unroll 1
        for (int box = 0; box < p.boxes; ++box) send(p, map, scales, (first + half * p.tiles) * 8, box, where, 0);
    }
  }

  // Copies each tile for all listed experts, one tile after the other.
  DEVICE void stream_back(const Product& p, const TensorMap* map, const float* scales, int tiles, int where) {
    const int count = get_shared4(&choice.count);
#pragma unroll 1
    for (int i = 0; i < tiles; ++i)
#pragma unroll 1
      for (int n = 0; n < count; n += 1 + p.doubled) {
        const int tile = block_index() + i * BLOCKS, first = get_shared4(choice.experts + n) * p.tiles + tile;
        if (p.doubled) {
          const bool both = n + 1 < count;
          send_two(p, map, scales, first, both ? get_shared4(choice.experts + n + 1) * p.tiles + tile : -1, where);
        } else {
#pragma unroll 1
          for (int box = 0; box < p.boxes; ++box) send(p, map, scales, first * 8, box, where, 0);
        }
      }
  }

  // Copies the boxes of one or two tiles into the halves of the next slot.
  DEVICE void send_two(const Product& p, const TensorMap* map, const float* scales, int tile, int other, int where) {
    ring.wait_empty(a, where);
    bound_flight(p.flight, where);
    const u32 bar = ring.full + 8 * ring.at.slot;
    barrier_expect(bar, (other < 0 ? 1 : 2) * (p.box * TILE_UNIT + UNITS / 2 * 4));
#pragma unroll 1
    for (int half = 0; half < (other < 0 ? 1 : 2); ++half) {
      const int from = half ? other : tile, unit = half * (UNITS / 2);
      copy_line(address_of(ring.scales + ring.at.slot * UNITS + unit), scales + from * UNITS, UNITS / 2 * 4, bar);
      copy_box(ring.data + ring.at.slot * SLOT + unit * TILE_UNIT, map, from * 8, 0, bar);
    }
    ring.at.next();
    ++sent;
  }

  // Copies the matrices of all phases that have one, in the table's order.
  template <int P>
  DEVICE void stream_layer(int layer) {
    if constexpr (P < LAYER_PHASES) {
      if constexpr (PRODUCTS[P].tiles > 0) stream<P>(layer);
      stream_layer<P + 1>(layer);
    }
  }

  // Copies the head. Blocks claim chunks of it dynamically, because some have slower paths to
  // memory than others.
  DEVICE void stream_head(const TensorMap* map) {
    constexpr Product p = PRODUCTS[LOGITS];
    const int where = place(LAYERS, LOGITS);
    const u32 chunks = (p.tiles + HEAD_TILES - 1) / HEAD_TILES;
    u32 chunk = add_relaxed(&a.control->ticket, 1);
    while (chunk < chunks) {
      const u32 next = add_relaxed(&a.control->ticket, 1);  // requested while this chunk is sent
      // Boxes past the last row are zero.
      for (int i = 0; i < HEAD_TILES; ++i)
        for (int box = 0; box < p.boxes; ++box)
          send(p, map, nullptr, (chunk * HEAD_TILES + i) * 8, box, where, chunk);
      chunk = next;
    }
    ring.wait_empty(a, where);
    put_shared4(ring.chunks + ring.at.slot, END_OF_HEAD);
    barrier_arrive(ring.full + 8 * ring.at.slot);
  }
};

DEVICE void produce(const Args& a, Ring ring, const Choice& choice) {
  Producer producer{a, ring, choice};
#pragma unroll 1
  for (int layer = 0; layer < LAYERS; ++layer) producer.stream_layer<0>(layer);
  if (HEAD) producer.stream_head(a.maps + LAYERS * MAPS);
}
