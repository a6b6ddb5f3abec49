"""The configuration of a rank (one process with one device), and checks of memory sizes. Imports no
torch, because the user's process must not load it."""

from __future__ import annotations

import dataclasses

from nanoactor.model_files.files import ModelFiles
from nanoactor.models.errors import NotEnoughMemory
from nanoactor.options.config import EngineConfig
from nanoactor.setup.actors import ActorConfig

SIMULATED = "simulated:"
"""Prefix of the names of simulated devices; it is followed by the duration of a step in
milliseconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankConfig:
    """The configuration of one tensor-parallel rank: what all actors share, and the rank's
    number."""

    shared: ActorConfig
    rank: int = 0
    rendezvous_port: int = 0
    """Port on the loopback interface through which the ranks find each other; 0 if there is only
    one rank."""
    rendezvous_socket: int | None = None
    """File descriptor of the socket that listens on this port; None except on rank 0."""

    @property
    def engine(self) -> EngineConfig:
        """The options of the engine."""
        return self.shared.engine

    @property
    def files(self) -> ModelFiles:
        """The parsed contents of the model's files."""
        return self.shared.files


_MIB = 1 << 20
_MAX_RANKS = 64
MIN_LENGTH = 2
"""Number of tokens in the shortest possible context: one prompt token and one output token."""


def check_cache(
    blocks: int, files: ModelFiles, block_size: int, why: str, *, has_states: bool = False
) -> None:
    """Raise `NotEnoughMemory` if the longest sequence does not fit into `blocks` blocks of
    `block_size` tokens. If `max_model_len` is "auto", only the shortest possible sequence (two
    tokens) has to fit. `why` explains the number of blocks in the error message. `has_states` is
    True if layers also keep a state for each of `max_num_seqs` sequences.
    """
    needed = -(-files.max_model_len // block_size)
    if files.is_length_auto:
        needed = min(needed, -(-MIN_LENGTH // block_size))
    if blocks < needed:
        capacity = max(0, blocks) * block_size
        lower = f"lower max_model_len to {capacity} or less, or " if capacity > 1 else ""
        raise NotEnoughMemory(
            f"the KV cache would have {max(0, blocks)} blocks of {block_size} tokens ({why}), "
            f"but one sequence of max_model_len {files.max_model_len} needs {needed} blocks; "
            f"{lower}{'lower max_num_seqs, ' if has_states else ''}"
            "give the cache more memory (num_kv_blocks, memory_utilization), or use a "
            "smaller model or dtype"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Lower bounds on the memory that a model takes, in total over all ranks."""

    weights: int
    """Size of the weights in bytes."""
    weights_format: str
    """Dtype or format of the weights, for error messages."""
    bytes_per_token: int
    """Size in bytes of a token in the KV cache."""
    length: int
    """Number of tokens of the longest sequence, which must fit into the KV cache."""

    @property
    def cache(self) -> int:
        """Size in bytes of the KV cache of the longest sequence."""
        return self.bytes_per_token * self.length


def check_weights(needs: MemoryNeeds, free: int, share: float, ranks: int, *, shared: bool) -> None:
    """Raise `NotEnoughMemory`, with the arithmetic and what would fit, if the weights and the KV
    cache of one sequence do not fit into memory.

    `free` is the free memory in bytes: of one device, or of all ranks together if they share memory
    (`shared`). The engine may use the fraction `share` of it.
    """
    usable = int(free * share) // ranks if shared else int(free * share)
    if (needs.weights + needs.cache) // ranks <= usable:
        return
    device, divisor = ("this machine", 1) if shared else ("each device", ranks)
    text = (
        f"the weights in {needs.weights_format} take at least {needs.weights // divisor // _MIB} "
        f"MiB of {device}, and the KV cache of one sequence of {needs.length} tokens takes "
        f"{needs.cache // divisor // _MIB} MiB; the engine may use {share:.0%} of {free // _MIB} "
        "MiB free (memory_utilization), also for the activations of steps"
    )
    room = usable * ranks - needs.weights
    if room >= MIN_LENGTH * needs.bytes_per_token:
        text += f". max_model_len {room // needs.bytes_per_token} might fit"
    larger_sizes = (2**n for n in range(_MAX_RANKS.bit_length()) if 2**n > ranks)
    total = needs.weights + needs.cache
    ranks_needed = next((n for n in larger_sizes if total // n < 0.9 * usable), None)
    if ranks_needed and not shared:
        mebibytes = needs.weights // ranks_needed // _MIB
        text += (
            f". With tensor_parallel_size {ranks_needed}, the weights would take {mebibytes} MiB "
            "of each device"
        )
    raise NotEnoughMemory(f"{text}. Use a smaller model, a smaller dtype or packed weights")
