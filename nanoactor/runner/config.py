"""What a runner is told; apart from the executor, as the user's process must not import torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nanoactor.models.errors import NotEnoughMemory
from nanoactor.models.options import DeviceOptions

_NO_OPTIONS = DeviceOptions()
SIMULATED = "simulated:"
"""The prefix of devices that only take time; the milliseconds of a step follow."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """What a runner needs to know of the engine's configuration."""

    directory: Path
    device: str
    dtype: str
    threads: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int | None
    num_kv_blocks: int | None
    memory_utilization: float | None
    rank: int = 0
    ranks: int = 1
    meeting_port: int = 0
    """Of the loopback interface, where the ranks meet."""
    meeting_socket: int | None = None
    """The descriptor that listens there, for rank 0."""
    depth: int = 2
    """How many steps may be submitted and not done."""
    enforce_eager: bool = False
    """Capture no graphs."""
    load_format: str = "auto"
    """"dummy" for random weights."""
    debug: bool = False
    """Compare after each step what the ranks have chosen."""
    options: DeviceOptions = _NO_OPTIONS
    check_weights: bool = True
    """Refuse weights that are not finite."""


def check_cache(blocks: int, config: ExecutorConfig, block_size: int, why: str) -> None:
    """Raise `NotEnoughMemory` where the longest sequence would not fit into so many blocks."""
    needed = -(-config.max_model_len // block_size)
    if blocks < needed:
        room = max(0, blocks) * block_size
        lower = f"lower max_model_len to {room} or less, or " if room > 1 else ""
        raise NotEnoughMemory(
            f"the KV cache would have {max(0, blocks)} blocks of {block_size} tokens ({why}), but "
            f"one sequence of max_model_len {config.max_model_len} takes {needed}; {lower}give the "
            "cache more (num_kv_blocks, memory_utilization), or take a smaller model or dtype"
        )
