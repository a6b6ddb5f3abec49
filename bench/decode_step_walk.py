"""A batch that lives for thousands of steps: sequences join, grow and leave, as in an engine."""

from __future__ import annotations

import dataclasses
import random

import torch

from nanoactor.models.batch import KVCache
from nanoactor.models.devices.cuda.kernels.decode_step.arguments import StepInputs
from nanoactor.models.devices.cuda.kernels.decode_step.table import Shape

SLOTS = 16
LONGEST = 32_768
_SHORT, _LEAVES, _JOINS = 200, 0.01, 0.12
"""New tokens that a sequence may get at most in addition to its first ones; chances in a step."""


@dataclasses.dataclass
class _Sequence:
    context: int
    """Tokens in the cache, the next one's place included."""
    pages: list[int]
    left: int


class Walk:
    """Two caches that get the same tokens, one for the kernel and one for the operators.

    Pages that belong to nobody are NaN.
    """

    def __init__(self, shape: Shape, generator: torch.Generator, seed: int) -> None:
        self._shape, self._generator = shape, generator
        self._draw = random.Random(seed)
        self._device = generator.device
        most = -(-LONGEST // shape.block_size)
        pages = 5 * most
        size = (pages + 1, shape.block_size, shape.kv_heads, shape.head_dim)

        def empty() -> list[KVCache]:
            def one() -> torch.Tensor:
                return torch.full(size, torch.nan, dtype=torch.bfloat16, device=self._device)

            return [KVCache(one(), one()) for _ in range(shape.layers)]

        self.ours, self.theirs = empty(), empty()
        self._free = list(range(pages))
        self._draw.shuffle(self._free)
        self._tables = torch.zeros(SLOTS + 1, most + 1, dtype=torch.int32, device=self._device)
        self._tables[SLOTS] = pages
        self._live: dict[int, _Sequence] = {}
        self.joined = self.left = self.page_ends = self.longest = 0

    def step(self) -> tuple[list[int], StepInputs]:
        """Have some come and go; then return one step of all that live: (slots, inputs)."""
        for slot in [s for s, q in self._live.items() if q.left == 0 or self._lucky(_LEAVES)]:
            self._leave(slot)
        while not self._live or (len(self._live) < SLOTS and self._lucky(_JOINS)):
            if not self._join():
                break
        for slot, sequence in self._live.items():
            sequence.left -= 1
            if len(sequence.pages) * self._shape.block_size < sequence.context + 1:
                self._extend(slot, sequence, 1)
                self.page_ends += 1
            sequence.context += 1
        slots = sorted(self._live)
        return slots, self._inputs(slots, len(slots))

    def padded(self, slots: list[int], inputs: StepInputs, rows: int) -> StepInputs:
        """Return the inputs with dummy rows behind them."""
        missing = rows - len(slots)
        if not missing:
            return inputs
        place = int(self._tables[SLOTS, 0]) * self._shape.block_size
        fill = {"contexts": 1, "slots": SLOTS, "slot_mapping": place}
        changes = {}
        for field in ("token_ids", "positions", "contexts", "slots", "slot_mapping"):
            tensor = getattr(inputs, field)
            more = tensor.new_full((missing,), fill.get(field, 0))
            changes[field] = torch.cat((tensor, more))
        return dataclasses.replace(inputs, **changes)

    def _lucky(self, chance: float) -> bool:
        return self._draw.random() < chance

    def _leave(self, slot: int) -> None:
        gone = self._live.pop(slot)
        at = torch.tensor(gone.pages, device=self._device)
        for cache in (*self.ours, *self.theirs):
            cache.keys[at] = torch.nan
            cache.values[at] = torch.nan
        self._free += gone.pages
        self.left += 1

    def _join(self) -> bool:
        """Begin with a prompt in the cache; False where there is no room."""
        context = int(2 ** self._draw.uniform(0, 15))
        need = -(-context // self._shape.block_size)
        if need + SLOTS > len(self._free):
            return False
        slot = self._draw.choice([s for s in range(SLOTS) if s not in self._live])
        sequence = _Sequence(context, [], self._draw.randint(1, _SHORT))
        self._live[slot] = sequence
        self._extend(slot, sequence, need)
        self.joined += 1
        self.longest = max(self.longest, context)
        return True

    def _extend(self, slot: int, sequence: _Sequence, count: int) -> None:
        new = [self._free.pop() for _ in range(count)]
        first = len(sequence.pages)
        sequence.pages += new
        at = torch.tensor(new, device=self._device)
        self._tables[slot, first : first + count] = at.int()
        size = (count, *self.ours[0].keys.shape[1:])
        for mine, other in zip(self.ours, self.theirs, strict=True):
            for a, b in ((mine.keys, other.keys), (mine.values, other.values)):
                drawn = torch.randn(
                    size, device=self._device, generator=self._generator, dtype=torch.bfloat16
                )
                a[at] = drawn
                b[at] = drawn

    def _inputs(self, slots: list[int], rows: int) -> StepInputs:
        live = [self._live[slot] for slot in slots]
        size = self._shape.block_size

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._device)

        lasts = [sequence.context - 1 for sequence in live]
        places = [
            sequence.pages[last // size] * size + last % size
            for sequence, last in zip(live, lasts, strict=True)
        ]
        tokens = [self._draw.randrange(self._shape.vocab) for _ in range(rows)]
        return StepInputs(
            ints(tokens),
            ints(lasts),
            ints([sequence.context for sequence in live]),
            ints(slots),
            torch.tensor(places, device=self._device),
            self._tables,
        )
