"""The order of ring and hand-overs, without data: who waits for whom, by the kernel's table.

What a block's producer and consumer do is a list of operations, each a wait or something that
others see, the same in every run; only when they do it is open. A word is its hand-over's number.
What must not happen raises `Broken`: a deadlock, a word read before it is written or after it is
overwritten, a slot that is filled again before it is read.

`Simulation` plays real shapes in random orders; `explore` goes through all orders of a machine. A
block's ring and the hand-overs between blocks meet only in that each may delay the other, so they
are explored apart: `ring_of` and `handovers_of` leave the other's operations out.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nanoactor.models.devices.cuda.kernels.decode_step.table import (
    EXPERT_PHASES,
    ROUTE,
    Phase,
    Shape,
    layout_of,
    product_of,
)

SINKS = {phase.sink for phase in EXPERT_PHASES}
IN_FLIGHT = 3
"""Copies of a block on their way at most."""

Op = tuple[Any, ...]
"""A kind and what it is about:

("room", n)               the producer's n-th slot has been read as often as it was filled before
("send", item)            a copy into the next slot begins; it ends when it likes
("take", item)            the consumer's next slot is full of an item, and is freed
("flagged", sink, w, n)   block w's word is hand-over n: polled, so that what came later is a hang
("arrivals", n)           the counter has reached n
("read", sink, w, n)      block w's word is hand-over n, without looking
("write", sink, n)        this block's word becomes hand-over n
("arrive",)               this block counts
("choose", n)             this block's list of experts becomes layer n's, counted from 1
("choice", n)             the list has been layer n's
("list", n)               the list is layer n's, without looking
"""


class Broken(AssertionError):
    """The protocol does what it must not."""


class Protocol:
    """The operations of each block."""

    def __init__(
        self,
        shape: Shape,
        seed: int,
        bugs: Container[str] = (),
        idle: Mapping[str, Container[int]] = MappingProxyType({}),
    ) -> None:
        """`bugs` names what is left out. `idle` has, by sink, blocks that write nothing, as if
        there were no tiles for them."""
        self.shape, self.bugs, self.dice = shape, bugs, random.Random(seed)
        self.phases = shape.phases
        self.by_sink = {phase.sink: number for number, phase in enumerate(self.phases)}
        self.products = [product_of(shape, phase) for phase in self.phases]
        self.idle = idle
        self.chosen = [self._draw_choice() for _ in range(shape.layers)]
        self._deal_attention()

    def _draw_choice(self) -> int:
        """Draw how many experts the rows have chosen in a layer."""
        mixture = self.shape.mixture
        if mixture is None:
            return 1
        return self.dice.randint(mixture.top_k, min(self.shape.pairs, mixture.experts))

    def _deal_attention(self) -> None:
        """Draw who attends, in which pairs, and whose queries each block needs."""
        blocks = range(self.shape.blocks)
        attends = self.dice.sample(blocks, self.dice.randint(1, self.shape.blocks))
        pairs: list[list[int]] = []
        while attends:
            size = self.dice.randint(1, min(6, len(attends)))
            pairs.append(attends[:size])
            attends = attends[size:]
        self.pair_of = {block: pair for pair in pairs for block in pair}
        self.combiners = {pair[i] for pair in pairs for i in range(-(-len(pair) // 2))}
        self.queries: dict[int, set[int]] = {block: set() for block in self.pair_of}
        for writer in self.writers(self.by_sink["QUERIES"]):
            readers = self.dice.sample(sorted(self.pair_of), min(2, len(self.pair_of)))
            for reader in readers:
                self.queries[reader].add(writer)

    def writers(self, number: int) -> list[int]:
        """Return the blocks that write words of a phase's sink."""
        phase, product = self.phases[number], self.products[number]
        if phase is ROUTE and self.shape.mixture is not None:
            return list(range(min(self.shape.blocks, self.shape.mixture.experts)))
        if product.tiles:
            most = product.tiles if phase.experts != "outputs" else self.shape.blocks
            writers = range(min(self.shape.blocks, most))
            return [block for block in writers if block not in self.idle.get(phase.sink, ())]
        return sorted(self.pair_of if phase.sink == "PARTS" else self.combiners)

    def number_of(self, layer: int, sink: str) -> int:
        """Return the flag of a hand-over; X1 of the layer before is this layer's 0."""
        return layer * len(self.phases) + self.by_sink[sink] + 1

    def produce(self, block: int) -> Iterator[Op]:
        """Fill slots in the table's order."""
        count = 0
        for layer in range(self.shape.layers):
            for number, product in enumerate(self.products):
                experts = self.phases[number].experts
                if experts == "outputs" and "choice" not in self.bugs:
                    yield "choice", layer + 1
                for item in product.boxes_of(block, self.shape.blocks, self.chosen[layer]):
                    if experts:
                        yield "list", layer + 1
                    if "room" not in self.bugs:
                        yield "room", count
                    yield "send", (layer, number, *item)
                    count += 1

    def consume(self, block: int) -> Iterator[Op]:
        """Go through the phases in the table's order."""
        for layer in range(self.shape.layers):
            for number, phase in enumerate(self.phases):
                if phase is ROUTE:
                    yield from self._await_source(layer, phase, True)
                    if block in self.writers(number):
                        yield "write", phase.sink, self.number_of(layer, phase.sink)
                elif phase.matrix:
                    yield from self._multiply(layer, number, block)
                elif block in self.pair_of:
                    yield from self._attend(layer, phase, block)
                if phase.to_all:
                    yield ("arrive",)

    def _multiply(self, layer: int, number: int, block: int) -> Iterator[Op]:
        phase, product = self.phases[number], self.products[number]
        mine = block in self.writers(number)
        yield from self._await_source(layer, phase, mine or "idle" in self.bugs)
        if phase.experts == "outputs":
            yield "choose", layer + 1
        boxes = product.boxes_of(block, self.shape.blocks, self.chosen[layer])
        for item in self._order(boxes, number):
            yield "take", (layer, number, *item)
        if phase.experts:
            yield "list", layer + 1
        if mine:
            yield "write", phase.sink, self.number_of(layer, phase.sink)

    def _order(self, items: Iterable[tuple[int, ...]], number: int) -> list[tuple[int, ...]]:
        if "order" in self.bugs and self.phases[number].stacked > 1:
            return sorted(items, key=lambda item: (item[0], item[2], item[1], item[3]))
        return list(items)

    def _await_source(self, layer: int, phase: Phase, reads: bool) -> Iterator[Op]:
        """Wait for what all blocks read, as the kernel does."""
        before = layer - (phase.source == "X1")
        if before < 0:
            return
        flagged = self.shape.has_flags or phase.is_flagged
        number = self.number_of(before, phase.source)
        if not flagged and (reads or "skip" not in self.bugs):
            each = sum(p.to_all for p in self.phases)
            until = sum(p.to_all for p in self.phases[: self.by_sink[phase.source] + 1])
            yield "arrivals", (before * each + until) * self.shape.blocks
        if reads:
            kind = "flagged" if flagged else "read"
            for writer in self.writers(self.by_sink[phase.source]):
                yield kind, phase.source, writer, number

    def _attend(self, layer: int, phase: Phase, block: int) -> Iterator[Op]:
        wanted = self.number_of(layer, phase.source)
        if phase.sink != "PARTS" and block not in self.combiners:
            return
        writers = self.queries if phase.sink == "PARTS" else self.pair_of
        for writer in sorted(writers[block]):
            yield "flagged", phase.source, writer, wanted
        yield "write", phase.sink, self.number_of(layer, phase.sink)


class Ring:
    """A block's slots."""

    def __init__(self, slots: int) -> None:
        self.holds: list[object] = [None] * slots
        self.full, self.freed = [0] * slots, [0] * slots
        self.sent = self.taken = 0
        self.flying: list[tuple[int, object]] = []

    def key(self) -> tuple[Any, ...]:
        return self.sent, self.taken, tuple(slot for slot, _ in self.flying)

    def fork(self) -> Ring:
        other = copy.copy(self)
        other.holds, other.full, other.freed = self.holds[:], self.full[:], self.freed[:]
        other.flying = self.flying[:]
        return other

    def send(self, item: object) -> None:
        slot = self.sent % len(self.holds)
        if self.full[slot] > self.freed[slot]:
            raise Broken(f"slot of {self.holds[slot]} filled before it was read")
        self.holds[slot] = None
        self.flying.append((slot, item))
        self.sent += 1

    def land(self, which: int) -> None:
        """Let a copy end."""
        slot, item = self.flying.pop(which)
        self.holds[slot] = item
        self.full[slot] += 1

    def can_take(self) -> bool:
        slot, turn = self.taken % len(self.holds), self.taken // len(self.holds)
        return self.full[slot] > turn

    def take(self, item: object) -> None:
        slot = self.taken % len(self.holds)
        if self.holds[slot] != item:
            raise Broken(f"wanted {item}, found {self.holds[slot]}")
        self.freed[slot] += 1
        self.taken += 1

    def has_room(self, count: int) -> bool:
        return self.freed[count % len(self.holds)] >= count // len(self.holds)


class Machine:
    """Blocks, how far each of their threads is, and what they share."""

    def __init__(
        self, threads: Sequence[tuple[int, Sequence[Op]]], blocks: int, slots: int
    ) -> None:
        """A thread is the block it belongs to and its operations."""
        self.threads = threads
        self.at = [0] * len(threads)
        self.words = {sink: [0] * blocks for sink in SINKS}
        self.lists = [0] * blocks
        self.arrivals = 0
        self.rings = [Ring(slots) for _ in range(blocks)]

    def key(self) -> tuple[Any, ...]:
        """Tell states apart: all else follows from how far everybody is."""
        return tuple(self.at), tuple(ring.key() for ring in self.rings)

    def fork(self) -> Machine:
        other = copy.copy(self)
        other.at = self.at[:]
        other.words = {sink: words[:] for sink, words in self.words.items()}
        other.lists = self.lists[:]
        other.rings = [ring.fork() for ring in self.rings]
        return other

    def is_over(self) -> bool:
        return all(at == len(ops) for at, (_, ops) in zip(self.at, self.threads, strict=True))

    def choices(self) -> list[tuple[int, int]]:
        """Return what can happen next: (thread, 0), or (-1 - block, which of its copies ends)."""
        found = [(thread, 0) for thread in range(len(self.threads)) if self.can(thread)]
        for block, ring in enumerate(self.rings):
            found += [(-1 - block, which) for which in range(len(ring.flying))]
        return found

    def can(self, thread: int) -> bool:
        block, ops = self.threads[thread]
        if self.at[thread] == len(ops):
            return False
        kind, *about = ops[self.at[thread]]
        ring = self.rings[block]
        if kind == "room":
            return ring.has_room(about[0])
        if kind == "send":
            return len(ring.flying) < IN_FLIGHT
        if kind == "take":
            return ring.can_take()
        if kind == "flagged":
            sink, writer, number = about
            return bool(self.words[sink][writer] >= number)
        if kind == "arrivals":
            return bool(self.arrivals >= about[0])
        if kind == "choice":
            return bool(self.lists[block] >= about[0])
        return True

    def do(self, choice: tuple[int, int]) -> None:
        """Let it happen. Raises `Broken`."""
        thread, which = choice
        if thread < 0:
            self.rings[-1 - thread].land(which)
            return
        block, ops = self.threads[thread]
        kind, *about = ops[self.at[thread]]
        self.at[thread] += 1
        if kind == "send":
            self.rings[block].send(about[0])
        elif kind == "take":
            self.rings[block].take(about[0])
        elif kind in ("flagged", "read"):
            sink, writer, number = about
            if self.words[sink][writer] != number:
                found = self.words[sink][writer]
                raise Broken(f"{sink} of {writer}: wanted {number}, found {found}")
        elif kind == "write":
            sink, number = about
            self.words[sink][block] = number
        elif kind == "arrive":
            self.arrivals += 1
        elif kind == "choose":
            self.lists[block] = about[0]
        elif kind == "list" and self.lists[block] != about[0]:
            raise Broken(f"list: wanted {about[0]}, found {self.lists[block]}")


def explore(machine: Machine) -> int:
    """Go through all orders; return the number of states. Raises `Broken`."""
    seen, left = {machine.key()}, [machine]
    while left:
        state = left.pop()
        choices = state.choices()
        if not choices and not state.is_over():
            raise Broken(f"deadlock at {state.at}")
        for choice in choices:
            after = state.fork() if len(choices) > 1 else state
            after.do(choice)
            key = after.key()
            if key not in seen:
                seen.add(key)
                left.append(after)
    return len(seen)


def ring_of(protocol: Protocol, block: int, slots: int) -> Machine:
    """A block's producer and what its consumer takes."""
    takes = [op for op in protocol.consume(block) if op[0] in ("take", "choose", "list")]
    return Machine([(0, list(protocol.produce(block))), (0, takes)], 1, slots)


def handovers_of(protocol: Protocol) -> Machine:
    """All consumers without their rings."""
    blocks = range(protocol.shape.blocks)
    threads = [(b, [op for op in protocol.consume(b) if op[0] != "take"]) for b in blocks]
    return Machine(threads, len(blocks), 1)


class Simulation:
    """A step of a shape, in a random order."""

    def __init__(self, shape: Shape, seed: int, bugs: Container[str] = ()) -> None:
        protocol = Protocol(shape, seed, bugs)
        self.dice = protocol.dice
        blocks = range(shape.blocks)
        threads = [(b, list(protocol.produce(b))) for b in blocks]
        threads += [(b, list(protocol.consume(b))) for b in blocks]
        self.machine = Machine(threads, shape.blocks, layout_of(shape).slots)

    def _speeds(self) -> list[float]:
        """Draw how often blocks move; one is so slow that the others overtake it, if they can."""
        blocks = range(len(self.machine.rings))
        speeds = [self.dice.choice((1.0, 1.0, 0.5)) for _ in blocks]
        slowest = self.dice.choice((self.dice.choice(blocks), self.dice.choice(blocks[-6:])))
        speeds[slowest] = self.dice.choice((0.3, 0.05, 0.01))
        return speeds

    def run(self) -> None:
        """Raise `Broken` where anything goes wrong."""
        speeds, machine = self._speeds(), self.machine
        while choices := machine.choices():
            self.dice.shuffle(choices)
            for thread, which in choices:
                block = machine.threads[thread][0] if thread >= 0 else -1 - thread
                if self.dice.random() > speeds[block]:
                    continue
                if thread >= 0:
                    self._go_on(thread)
                elif which < len(machine.rings[block].flying):
                    machine.do((thread, which))
        if not machine.is_over():
            raise Broken(f"deadlock at {machine.at}")

    def _go_on(self, thread: int) -> None:
        """Some operations of a thread at once, as long as it need not wait."""
        self.machine.do((thread, 0))
        while self.dice.random() < 0.8 and self.machine.can(thread):
            self.machine.do((thread, 0))
