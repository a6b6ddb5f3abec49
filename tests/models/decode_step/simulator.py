"""The order of ring and hand-overs, without data: who waits for whom, driven by the kernel's table.

Each block has a producer and a consumer, which stop wherever the kernel's wait or touch what others
see; random ones of those that can go on do. A word is its hand-over's number. What must not happen
raises `Broken`: a deadlock, a word read before it is written or after it is overwritten, a slot
that is filled again before it is read.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Generator, Iterator

from nanoactor.models.kernels.decode_step.table import (
    PHASES,
    Phase,
    Shape,
    layout_of,
    product_of,
)

Ready = Callable[[], bool]
Actor = Generator[Ready | None, None, None]
BY_SINK = {phase.sink: number for number, phase in enumerate(PHASES)}


class Broken(AssertionError):
    """The protocol does what it must not."""


@dataclasses.dataclass
class Slot:
    """Of a block's ring."""

    holds: object = None
    full: int = 0
    """How many times it was filled, ..."""
    freed: int = 0
    """... and read."""


class Simulation:
    """A step of a shape; `bugs` names what is left out."""

    def __init__(self, shape: Shape, seed: int, bugs: frozenset[str] = frozenset()) -> None:
        self.shape, self.bugs, self.dice = shape, bugs, random.Random(seed)
        self.products = [product_of(shape, phase) for phase in PHASES]
        self.slots = [[Slot() for _ in range(layout_of(shape).slots)] for _ in range(shape.blocks)]
        self.flying = [0] * shape.blocks
        self.words: dict[str, list[int]] = {p.sink: [0] * shape.blocks for p in PHASES}
        self.arrivals = 0
        self._deal_attention()

    def _deal_attention(self) -> None:
        """Draw who attends, in which pairs, and whose queries each block needs."""
        blocks = range(self.shape.blocks)
        attends = self.dice.sample(blocks, self.dice.randint(1, self.shape.blocks))
        self.pairs: list[list[int]] = []
        while attends:
            size = self.dice.randint(1, min(6, len(attends)))
            self.pairs.append(attends[:size])
            attends = attends[size:]
        self.pair_of = {block: pair for pair in self.pairs for block in pair}
        self.combiners = {pair[i] for pair in self.pairs for i in range(-(-len(pair) // 2))}
        self.queries: dict[int, set[int]] = {block: set() for block in self.pair_of}
        for writer in self.writers(BY_SINK["QUERIES"]):
            readers = self.dice.sample(sorted(self.pair_of), min(2, len(self.pair_of)))
            for reader in readers:
                self.queries[reader].add(writer)

    def writers(self, number: int) -> list[int]:
        """Return the blocks that write words of a phase's sink."""
        blocks, product = self.shape.blocks, self.products[number]
        if product.tiles:
            return list(range(min(blocks, product.tiles)))
        if PHASES[number].sink == "PARTS":
            return sorted(self.pair_of)
        return sorted(self.combiners)

    def number_of(self, layer: int, sink: str) -> int:
        """Return the flag of a hand-over; X1 of the layer before is this layer's 0."""
        return layer * len(PHASES) + BY_SINK[sink] + 1

    # -- the ring -------------------------------------------------------------------------

    def produce(self, block: int) -> Actor:
        """Fill slots in the table's order."""
        slots, count = self.slots[block], 0
        for layer in range(self.shape.layers):
            for number, product in enumerate(self.products):
                for item in product.boxes_of(block, self.shape.blocks):
                    slot, round_ = slots[count % len(slots)], count // len(slots)
                    if "room" not in self.bugs:
                        yield lambda s=slot, r=round_: s.freed >= r
                    yield lambda: self.flying[block] < 3
                    if slot.full > slot.freed:
                        raise Broken(f"slot of {slot.holds} filled before it was read")
                    self.flying[block] += 1
                    slot.holds = None
                    self.actors.append((block, self.copy(block, slot, (layer, number, *item))))
                    count += 1

    def copy(self, block: int, slot: Slot, item: object) -> Actor:
        """Let a copy arrive when it likes."""
        yield None
        slot.holds = item
        slot.full += 1
        self.flying[block] -= 1

    def take(self, block: int, cursor: list[int], item: object) -> Actor:
        """Read the next slot, in which an item must be."""
        slots = self.slots[block]
        slot, round_ = slots[cursor[0] % len(slots)], cursor[0] // len(slots)
        yield lambda: slot.full > round_
        yield None
        if slot.holds != item:
            raise Broken(f"wanted {item}, found {slot.holds}")
        slot.freed += 1
        cursor[0] += 1

    # -- hand-overs -----------------------------------------------------------------------

    def read(self, sink: str, wanted: int, writers: list[int], flagged: bool) -> Actor:
        """Read words one after the other."""
        words = self.words[sink]
        for writer in writers:
            if flagged:
                yield lambda w=writer: words[w] >= wanted
            if words[writer] != wanted:
                raise Broken(f"{sink} of {writer}: wanted {wanted}, found {words[writer]}")
            if self.dice.random() < 0.2:
                yield None

    def await_source(self, layer: int, phase: Phase, block: int, reads: bool) -> Actor:
        """Wait for what all blocks read, as the kernel does."""
        before = layer - (phase.source == "X1")
        if before < 0:
            return
        each = sum(p.to_all for p in PHASES)
        target = (before * each + self._arrivals_until(phase.source)) * self.shape.blocks
        flagged = self.shape.has_flags
        if not flagged and (reads or "skip" not in self.bugs):
            yield lambda: self.arrivals >= target
        if reads:
            writers = self.writers(BY_SINK[phase.source])
            yield from self.read(
                phase.source, self.number_of(before, phase.source), writers, flagged
            )

    @staticmethod
    def _arrivals_until(sink: str) -> int:
        return sum(phase.to_all for phase in PHASES[: BY_SINK[sink] + 1])

    def write(self, layer: int, phase: Phase, block: int) -> None:
        """Write this block's words of a sink."""
        self.words[phase.sink][block] = self.number_of(layer, phase.sink)

    # -- consumers ------------------------------------------------------------------------

    def consume(self, block: int) -> Actor:
        """Go through the phases in the table's order."""
        cursor = [0]
        for layer in range(self.shape.layers):
            for number, phase in enumerate(PHASES):
                if phase.matrix:
                    yield from self._multiply(layer, number, block, cursor)
                elif block in self.pair_of:
                    yield from self._attend(layer, phase, block)
                yield None
                if phase.to_all:
                    self.arrivals += 1

    def _multiply(self, layer: int, number: int, block: int, cursor: list[int]) -> Actor:
        phase, product = PHASES[number], self.products[number]
        mine = product.tiles_of(block, self.shape.blocks) > 0
        yield from self.await_source(layer, phase, block, mine or "idle" in self.bugs)
        for item in self._order(list(product.boxes_of(block, self.shape.blocks)), number):
            yield from self.take(block, cursor, (layer, number, *item))
        if mine:
            self.write(layer, phase, block)

    def _order(self, items: list[tuple[int, ...]], number: int) -> Iterator[tuple[int, ...]]:
        if "order" in self.bugs and PHASES[number].stacked > 1:
            items = sorted(items, key=lambda item: (item[0], item[2], item[1], item[3]))
        yield from items

    def _attend(self, layer: int, phase: Phase, block: int) -> Actor:
        wanted = self.number_of(layer, phase.source)
        if phase.sink == "PARTS":
            yield from self.read("QUERIES", wanted, sorted(self.queries[block]), flagged=True)
            self.write(layer, phase, block)
        elif block in self.combiners:
            yield from self.read("PARTS", wanted, self.pair_of[block], flagged=True)
            self.write(layer, phase, block)

    # -- all together ---------------------------------------------------------------------

    def _speeds(self) -> dict[int, float]:
        """Draw how often blocks move; one is so slow that the others overtake it, if they can."""
        blocks = range(self.shape.blocks)
        speeds = {block: self.dice.choice((1.0, 1.0, 0.5)) for block in blocks}
        slowest = self.dice.choice((self.dice.choice(blocks), self.dice.choice(blocks[-6:])))
        speeds[slowest] = self.dice.choice((0.3, 0.05, 0.01))
        return speeds

    def run(self) -> None:
        """Raise `Broken` where anything goes wrong."""
        blocks = range(self.shape.blocks)
        self.actors: list[tuple[int, Actor]] = [(b, self.produce(b)) for b in blocks]
        self.actors += [(b, self.consume(b)) for b in blocks]
        waits: dict[int, Ready | None] = {}
        speed = self._speeds()
        while self.actors:
            moved, kept = False, []
            batch, self.actors = self.actors, []
            self.dice.shuffle(batch)
            for block, actor in batch:
                ready = waits.get(id(actor))
                if (ready and not ready()) or self.dice.random() > speed[block]:
                    moved = moved or not ready or ready()
                    kept.append((block, actor))
                    continue
                moved = True
                try:
                    waits[id(actor)] = next(actor)
                    kept.append((block, actor))
                except StopIteration:
                    waits.pop(id(actor), None)
            self.actors += kept
            if not moved:
                raise Broken(f"deadlock: {len(kept)} wait")
