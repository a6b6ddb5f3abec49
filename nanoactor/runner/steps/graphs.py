"""Steps that a device has captured, and their sizes. A step is padded to the next captured size and
replayed."""

from __future__ import annotations

import bisect
import dataclasses
import logging

import torch

from nanoactor.models.collective import Group
from nanoactor.models.devices.protocols import Captured, CapturedFunction, Device
from nanoactor.models.seq_lens import NO_SEQ_LENS, HostSeqLens

log = logging.getLogger("nanoactor.runner")


MOST_PROMPTS = 64
"""Maximum number of prompt chunks in any captured mixed step."""
# Number of prompt chunks by minimum number of tokens: more padded rows would slow down small steps.
_PROMPTS = ((1024, MOST_PROMPTS), (512, 32), (0, 16))
_PREFILL_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
# Mixed steps pad their decode rows to a few sizes: computing some more rows costs less than
# capturing many sizes.
_FEW_ROWS = 32


def decode_sizes(most: int) -> list[int]:
    """Return the numbers of rows for which decode steps are captured, ascending."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 32), *range(512, most, 64)]
    return [*(size for size in sizes if size < most), most]


def most_prompts(tokens: int) -> int:
    """Return the maximum number of prompt chunks in a captured step of `tokens` prompt tokens."""
    return next(prompts for least, prompts in _PROMPTS if tokens >= least)


@dataclasses.dataclass(frozen=True, slots=True)
class MixedSize:
    """The size of a captured mixed step."""

    tokens: int
    """Number of prompt tokens."""
    rows: int
    """Number of decode rows."""
    sees: bool
    """Whether the prompts have images."""

    @property
    def prompts(self) -> int:
        """Return the maximum number of prompt chunks."""
        return most_prompts(self.tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class MixedSizes:
    """The sizes of captured mixed steps. Larger steps are not captured, as they keep the device
    busy while the host launches them."""

    tokens: tuple[int, ...]
    """Numbers of prompt tokens."""
    rows: tuple[int, ...]
    """Numbers of decode rows."""
    sees: bool = False
    """Whether each size is also captured for prompts with images."""

    def __len__(self) -> int:
        """Return the number of sizes."""
        return len(self.tokens) * len(self.rows) * (1 + self.sees)

    @classmethod
    def of(cls, max_num_batched_tokens: int, max_num_seqs: int, sees: bool = False) -> MixedSizes:
        """Return the sizes to capture for an engine with these limits."""
        tokens = [size for size in _PREFILL_TOKENS if size < max_num_batched_tokens]
        if max_num_batched_tokens <= _PREFILL_TOKENS[-1]:
            tokens.append(max_num_batched_tokens)
        few = (_FEW_ROWS,) if max_num_seqs > 2 * _FEW_ROWS else ()
        return cls(tuple(tokens), (0, *few, max_num_seqs), sees)

    def fit(self, tokens: int, prompts: int, rows: int, *, sees: bool) -> MixedSize | None:
        """Return the smallest size that holds a step; None if there is none."""
        large = self.tokens[bisect.bisect_left(self.tokens, tokens) :]
        found = next((size for size in large if most_prompts(size) >= prompts), None)
        if found is None:
            return None
        return MixedSize(found, self.rows[bisect.bisect_left(self.rows, rows)], sees)


def smallest(sizes: list[int], wanted: int) -> int:
    """Return the smallest of ascending sizes that is at least `wanted`."""
    return sizes[bisect.bisect_left(sizes, wanted)]


class CapturedSteps:
    """Captured decode steps by number of rows, and captured mixed steps by size.

    Sizes that the device cannot capture are left out. Their decode steps are padded to the next
    larger captured size, if there is one; all other steps run operator by operator.
    """

    def __init__(self, device: Device, group: Group, in_flight: int) -> None:
        """Set up for at most `in_flight` steps at once. A size is used only if all ranks have
        captured it, as step sizes must be the same on all ranks."""
        self._device, self._group, self._in_flight = device, group, in_flight
        self._decode: dict[int, Captured] = {}
        self._sizes: list[int] = []
        self._mixed: dict[MixedSize, Captured] = {}
        self.failed = 0

    def add_decode(self, rows: int, function: CapturedFunction, lengths: HostSeqLens) -> None:
        """Capture a decode step of this many rows."""
        captured = self._record(f"decode steps of {rows} rows", function, lengths)
        if captured is not None:
            self._decode[rows] = captured
            bisect.insort(self._sizes, rows)

    def add_mixed(self, size: MixedSize, function: CapturedFunction) -> None:
        """Capture a mixed step."""
        name = f"steps of {size.tokens} prompt tokens and {size.rows} decode rows"
        captured = self._record(name, function, NO_SEQ_LENS)
        if captured is not None:
            self._mixed[size] = captured

    def _record(
        self, name: str, function: CapturedFunction, lengths: HostSeqLens
    ) -> Captured | None:
        function(lengths)  # compiles code specific to this size
        self._device.synchronize()
        captured: Captured | None = None
        why = "another rank cannot capture them"
        try:
            captured = self._device.capture(function, lengths, self._in_flight)
        except RuntimeError as error:
            why = str(error)
        if self._group.all_reduce_min(int(captured is not None)):
            return captured
        if not self.failed:
            log.warning(
                "%s cannot be captured, and perhaps other steps, too; decode steps are padded to "
                "the next captured size, and other steps run operator by operator, which may be "
                "several times slower: %s",
                name,
                why,
            )
        self.failed += 1
        return None

    def decode(self, rows: int, lengths: HostSeqLens) -> torch.Tensor | None:
        """Replay the smallest captured decode step that fits this many rows; return None if there
        is none."""
        if not self._sizes or rows > self._sizes[-1]:
            return None
        size = smallest(self._sizes, rows)
        return self._decode[size].replay(lengths.padded(size))

    def has_mixed(self, size: MixedSize) -> bool:
        """Return True if a step of this size was captured."""
        return size in self._mixed

    def mixed(self, size: MixedSize) -> torch.Tensor:
        """Replay the captured mixed step of this size."""
        return self._mixed[size].replay(NO_SEQ_LENS)
