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
_MIN_LENGTH = 2
"""Number of tokens in the shortest possible context: one prompt token and one output token."""


def check_cache(blocks: int, files: ModelFiles, block_size: int, why: str) -> None:
    """Raise `NotEnoughMemory` if the longest sequence does not fit into `blocks` blocks of
    `block_size` tokens. If `max_model_len` is "auto", only the shortest possible sequence (two
    tokens) has to fit. `why` explains the number of blocks in the error message."""
    needed = -(-files.max_model_len // block_size)
    if files.is_length_auto:
        needed = min(needed, -(-_MIN_LENGTH // block_size))
    if blocks < needed:
        capacity = max(0, blocks) * block_size
        lower = f"lower max_model_len to {capacity} or less, or " if capacity > 1 else ""
        raise NotEnoughMemory(
            f"the KV cache would have {max(0, blocks)} blocks of {block_size} tokens ({why}), "
            f"but one sequence of max_model_len {files.max_model_len} needs {needed} blocks; "
            f"{lower}give the cache more memory (num_kv_blocks, memory_utilization), or use a "
            "smaller model or dtype"
        )


def check_weights(
    weights: int, sequence: int, free: int, ranks: int, *, shared: bool, what: str
) -> None:
    """Raise `NotEnoughMemory`, with advice, if not even the weights fit into memory.

    `weights` and `sequence` (the KV cache of the longest sequence) are sizes in bytes, in total
    over all ranks. `free` is the free memory in bytes: of one device, or of all ranks together if
    they share memory (`shared`). `what` names the dtype of the weights in the error message.
    """
    available = free // ranks if shared else free
    if weights // ranks <= available:
        return
    device = "this machine" if shared else "each device"
    needed = weights if shared else weights // ranks
    text = (
        f"the weights in {what} take at least {needed // _MIB} MiB of {device}, which has "
        f"{free // _MIB} MiB free; in addition, the cache takes {sequence // _MIB} MiB for one "
        "sequence of max_model_len, and steps need memory for activations"
    )
    larger_sizes = (2**n for n in range(_MAX_RANKS.bit_length()) if 2**n > ranks)
    ranks_needed = next((n for n in larger_sizes if (weights + sequence) // n < 0.9 * free), None)
    if ranks_needed and not shared:
        mebibytes = weights // ranks_needed // _MIB
        text += f". tensor_parallel_size {ranks_needed} would take {mebibytes} MiB of each device"
    raise NotEnoughMemory(f"{text}. Use a smaller model, a smaller dtype or packed weights")
