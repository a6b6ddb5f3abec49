"""Steps captured as graphs, and the sizes that are captured. A step is padded to the next larger
captured size and replayed."""

from __future__ import annotations

import bisect
import dataclasses
import logging

import torch

from nanoactor.models.collective import Group
from nanoactor.models.devices.protocols import CapturedFunction, CapturedStep, Device
from nanoactor.models.seq_lens import NO_SEQ_LENS, HostSeqLens

log = logging.getLogger("nanoactor.runner")


MAX_PROMPTS = 64
"""Maximum number of prompt chunks in a captured mixed step (a step with prompts)."""
# Number of prompt chunks by minimum number of tokens. More padding rows would slow down small
# steps.
_PROMPTS = ((1024, MAX_PROMPTS), (512, 32), (0, 16))
_PREFILL_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
# Mixed steps pad their decode rows to a few sizes. Computing some more rows costs less than
# capturing many sizes.
_FEW_ROWS = 32


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows for which decode steps are captured, in ascending order."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 32), *range(512, max_num_seqs, 64)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def max_prompts(tokens: int) -> int:
    """Return the maximum number of prompt chunks in a captured step with `tokens` prompt tokens."""
    return next(prompts for min_tokens, prompts in _PROMPTS if tokens >= min_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class MixedSize:
    """The size of a captured mixed step (a step with prompts): prompt tokens, decode rows and
    whether there are images."""

    tokens: int
    """Number of prompt tokens."""
    rows: int
    """Number of decode rows."""
    has_images: bool
    """True if the prompts contain images or videos."""

    @property
    def prompts(self) -> int:
        """Maximum number of prompt chunks."""
        return max_prompts(self.tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class MixedSizes:
    """The sizes of mixed steps (steps with prompts) that are captured. Larger steps are not
    captured, because they keep the device busy while the host launches them."""

    tokens: tuple[int, ...]
    """Numbers of prompt tokens, ascending."""
    rows: tuple[int, ...]
    """Numbers of decode rows, ascending."""
    has_images: bool = False
    """True if each size is also captured for prompts with images."""

    def __len__(self) -> int:
        """Return the total number of sizes."""
        return len(self.tokens) * len(self.rows) * (1 + self.has_images)

    @classmethod
    def of(
        cls, max_num_batched_tokens: int, max_num_seqs: int, has_images: bool = False
    ) -> MixedSizes:
        """Return the sizes to capture for an engine with these limits."""
        tokens = [size for size in _PREFILL_TOKENS if size < max_num_batched_tokens]
        if max_num_batched_tokens <= _PREFILL_TOKENS[-1]:
            tokens.append(max_num_batched_tokens)
        some_rows = (_FEW_ROWS,) if max_num_seqs > 2 * _FEW_ROWS else ()
        return cls(tuple(tokens), (0, *some_rows, max_num_seqs), has_images)

    def fit(self, tokens: int, prompts: int, rows: int, *, has_images: bool) -> MixedSize | None:
        """Return the smallest size into which a step fits; None if there is none. `prompts` is the
        number of prompt chunks, and `rows` that of decode rows."""
        sizes = self.tokens[bisect.bisect_left(self.tokens, tokens) :]
        num_tokens = next((size for size in sizes if max_prompts(size) >= prompts), None)
        if num_tokens is None:
            return None
        return MixedSize(num_tokens, self.rows[bisect.bisect_left(self.rows, rows)], has_images)


def smallest_at_least(sizes: list[int], needed: int) -> int:
    """Return the smallest of `sizes`, in ascending order, that is at least `needed`."""
    return sizes[bisect.bisect_left(sizes, needed)]


class CapturedSteps:
    """The captured decode steps, by number of rows, and the captured mixed steps (steps with
    prompts), by size.

    Sizes that the device cannot capture are left out. Decode steps of these sizes are padded to the
    next larger captured size, if there is one. All other steps run operator by operator.
    """

    def __init__(self, device: Device, group: Group, in_flight: int) -> None:
        """Prepare for at most `in_flight` steps at once. A size is used only if all ranks have
        captured it, because step sizes must be equal on all ranks."""
        self._device, self._group, self._in_flight = device, group, in_flight
        self._decode: dict[int, CapturedStep] = {}
        self._sizes: list[int] = []
        self._mixed: dict[MixedSize, CapturedStep] = {}
        self.failed = 0

    def add_decode(self, rows: int, function: CapturedFunction, lengths: HostSeqLens) -> None:
        """Capture a decode step of `rows` rows; `function` queues its operators."""
        captured = self._record(f"decode steps of {rows} rows", function, lengths)
        if captured is not None:
            self._decode[rows] = captured
            bisect.insort(self._sizes, rows)

    def add_mixed(self, size: MixedSize, function: CapturedFunction) -> None:
        """Capture a mixed step of this size; `function` queues its operators."""
        name = f"steps of {size.tokens} prompt tokens and {size.rows} decode rows"
        captured = self._record(name, function, NO_SEQ_LENS)
        if captured is not None:
            self._mixed[size] = captured

    def _record(
        self, name: str, function: CapturedFunction, lengths: HostSeqLens
    ) -> CapturedStep | None:
        function(lengths)  # compiles code specific to this size
        self._device.synchronize()
        captured: CapturedStep | None = None
        reason = "another rank cannot capture them"
        try:
            captured = self._device.capture(function, lengths, self._in_flight)
        except RuntimeError as error:
            reason = str(error)
        if self._group.all_reduce_min(int(captured is not None)):
            return captured
        if not self.failed:
            log.warning(
                "%s, and perhaps other steps, cannot be captured; decode steps are padded to "
                "the next captured size, and other steps run operator by operator, which may "
                "be several times slower: %s",
                name,
                reason,
            )
        self.failed += 1
        return None

    def replay_decode(self, rows: int, lengths: HostSeqLens) -> torch.Tensor | None:
        """Replay the smallest captured decode step with at least `rows` rows, and return its hidden
        states; None if there is none."""
        if not self._sizes or rows > self._sizes[-1]:
            return None
        size = smallest_at_least(self._sizes, rows)
        return self._decode[size].replay(lengths.padded_to(size))

    def has_mixed(self, size: MixedSize) -> bool:
        """Return True if a mixed step of this size was captured."""
        return size in self._mixed

    def replay_mixed(self, size: MixedSize) -> torch.Tensor:
        """Replay the captured mixed step of this size, and return its hidden states."""
        return self._mixed[size].replay(NO_SEQ_LENS)
