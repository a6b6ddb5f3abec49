"""The division of a model among the ranks of a tensor-parallel group. Imports no torch.

This is Megatron's scheme (arXiv:1909.08053). Attention heads and the inner dimension of the MLP are
divided, so that each layer needs two all-reduces. The vocabulary is divided for the embedding and
the head.
"""

from __future__ import annotations

import dataclasses

from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A range of rows or columns of a matrix, or of heads or token ids: `start` to `stop` - 1."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements in the range."""
        return self.stop - self.start

    def shifted(self, by: int) -> Span:
        """Return the range moved by `by` elements."""
        return Span(self.start + by, self.stop + by)

    def intersection(self, other: Span) -> Span:
        """Return the overlap with another range, which may be empty."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def scaled(self, factor: int) -> Span:
        """Return the range with both ends multiplied by `factor`, for example from heads to
        columns."""
        return Span(self.start * factor, self.stop * factor)


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of a model."""

    rank: int
    ranks: int
    heads: Span
    """Query heads of this rank."""
    kv_heads: Span
    """Key-value heads of this rank. If there are more ranks than heads, several ranks share a
    head."""
    vocabulary: Span
    """Token ids of this rank. The range may extend past the end of the vocabulary, into padding."""

    def part(self, size: int) -> Span:
        """Return this rank's share of a dimension of `size` elements. Shares of different ranks may
        differ in size by one."""
        return Span(size * self.rank // self.ranks, size * (self.rank + 1) // self.ranks)


def shard_of(config: ModelConfig, rank: int = 0, ranks: int = 1) -> Shard:
    """Return the share of rank `rank` of `ranks`. Raises `UnsupportedModel` if the model cannot be
    divided among that many ranks."""
    check_parallel(config, ranks)
    heads_per_rank, num_kv_heads = config.num_heads // ranks, config.num_kv_heads
    if num_kv_heads % ranks == 0:
        kv_heads = Span(rank * num_kv_heads // ranks, (rank + 1) * num_kv_heads // ranks)
    else:
        kv_heads = Span(rank * num_kv_heads // ranks, rank * num_kv_heads // ranks + 1)
    ids_per_rank = -(-config.vocab_size // ranks)
    return Shard(
        rank,
        ranks,
        Span(rank * heads_per_rank, (rank + 1) * heads_per_rank),
        kv_heads,
        Span(rank * ids_per_rank, (rank + 1) * ids_per_rank),
    )


def check_parallel(config: ModelConfig, ranks: int) -> None:
    """Raise `UnsupportedModel` if the model cannot be divided among `ranks` ranks. The message
    lists the numbers of ranks that are possible."""
    heads, kv = config.num_heads, config.num_kv_heads
    if ranks <= config.intermediate_size and _divides(heads, kv, ranks):
        return
    possible = [n for n in range(1, heads + 1) if _divides(heads, kv, n)]
    raise UnsupportedModel(
        f"tensor_parallel_size {ranks} cannot divide this model, which has {heads} attention heads "
        f"and {kv} key-value heads; possible sizes: {', '.join(map(str, possible))}"
    )


def _divides(heads: int, kv: int, ranks: int) -> bool:
    return heads % ranks == 0 and (kv % ranks == 0 or ranks % kv == 0)
