"""The split of a model over the ranks of a tensor-parallel group; imports no torch.

Megatron's scheme (arXiv:1909.08053): attention heads and the MLP's inner dimension are divided, so
that each layer needs two all-reduces; the vocabulary is divided for the embedding and the head.
"""

from __future__ import annotations

import dataclasses

from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A range of rows or columns."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Return the number of rows or columns."""
        return self.stop - self.start

    def shifted(self, by: int) -> Span:
        """Return the same range shifted by `by`."""
        return Span(self.start + by, self.stop + by)

    def intersection(self, other: Span) -> Span:
        """Return the intersection, which may be empty."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def scaled(self, factor: int) -> Span:
        """Return the same range in units that are `factor` times smaller."""
        return Span(self.start * factor, self.stop * factor)


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model."""

    rank: int
    ranks: int
    heads: Span
    """Query heads of the rank."""
    kv_heads: Span
    """Key-value heads of the rank; if there are more ranks than heads, ranks share heads."""
    vocabulary: Span
    """Token ids of the rank; the range may extend past the vocabulary's end, into padding."""

    def part(self, size: int) -> Span:
        """Return this rank's part of a dimension; the parts' sizes may differ by one."""
        return Span(size * self.rank // self.ranks, size * (self.rank + 1) // self.ranks)


def shard_of(config: ModelConfig, rank: int = 0, ranks: int = 1) -> Shard:
    """Return a rank's part of the model. Raises `UnsupportedModel` if it cannot be divided."""
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
    """Raise `UnsupportedModel`, which lists the possible numbers of ranks, if the model cannot be
    divided among `ranks` ranks."""
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
