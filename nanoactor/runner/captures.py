"""Which steps are captured: sizes, to which a step is padded."""

from __future__ import annotations

import bisect
import dataclasses

PREFILL_ROWS = 16
"""Prompt chunks that a captured mixed step has at most."""
_PREFILL_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
# Between these a mixed step pads its decode rows: to compute a few more rows costs less than many
# captures.
_FEW_ROWS = 32


def decode_sizes(most: int) -> list[int]:
    """The numbers of rows for which a decode step is captured, ascending."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 32), *range(512, most, 64)]
    return [*(size for size in sizes if size < most), most]


@dataclasses.dataclass(frozen=True, slots=True)
class MixedSizes:
    """The sizes of mixed steps; larger ones keep the device busy while the host launches them."""

    tokens: tuple[int, ...]
    """Of prompts."""
    rows: tuple[int, ...]
    """That decode."""

    @classmethod
    def of(cls, max_num_batched_tokens: int, max_num_seqs: int) -> MixedSizes:
        """Those that an engine of these limits can meet."""
        tokens = [size for size in _PREFILL_TOKENS if size < max_num_batched_tokens]
        if max_num_batched_tokens <= _PREFILL_TOKENS[-1]:
            tokens.append(max_num_batched_tokens)
        few = (_FEW_ROWS,) if max_num_seqs > 2 * _FEW_ROWS else ()
        return cls(tuple(tokens), (0, *few, max_num_seqs))

    def fit(self, tokens: int, prompts: int, rows: int) -> tuple[int, int] | None:
        """The least (tokens, rows) that hold a step; None where there are none."""
        at = bisect.bisect_left(self.tokens, tokens)
        if at == len(self.tokens) or prompts > PREFILL_ROWS:
            return None
        return self.tokens[at], self.rows[bisect.bisect_left(self.rows, rows)]


def smallest(sizes: list[int], wanted: int) -> int:
    """The least of ascending sizes that is no less than what is wanted."""
    return sizes[bisect.bisect_left(sizes, wanted)]
