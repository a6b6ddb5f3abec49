"""The size of the KV cache: how many blocks fit into the memory that weights and steps leave."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from nanoactor.models.collective import Group
from nanoactor.models.devices.protocols import DeviceTraits
from nanoactor.models.errors import NotEnoughMemory
from nanoactor.models.layers.state import StateSpec
from nanoactor.runner.config import RankConfig, check_cache
from nanoactor.runner.model.layer_states import block_bytes, slot_bytes

log = logging.getLogger("nanoactor.runner")

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class CacheSizing:
    """The properties of a rank, its model and its device that determine the size of the KV cache.
    After the warm-up, the executor asks it for the number of blocks."""

    config: RankConfig
    traits: DeviceTraits
    group: Group
    states: Sequence[StateSpec]
    """The state that each layer keeps for sequences."""
    block_size: int
    """Number of tokens in a block."""
    free_bytes: int
    """Free memory of the device in bytes before anything was loaded."""

    @property
    def block_bytes(self) -> int:
        """Size of a block in bytes: the per-token states of all layers, and the token ids."""
        return block_bytes(self.states, self.block_size)

    @property
    def slots_bytes(self) -> int:
        """Size in bytes of the state that layers keep, outside of blocks, for all sequences of a
        full batch and the dummy sequence of padding rows."""
        return slot_bytes(self.states) * (self.config.engine.max_num_seqs + 1)

    def num_blocks(self, used: int, peak: int) -> int:
        """Return the number of KV cache blocks: `num_kv_blocks` if set, otherwise as many as fit
        and can be used. All ranks get the same number.

        `used` is the size of the weights, and `peak` is the memory that steps need in addition,
        both in bytes. Raises `NotEnoughMemory`, with the arithmetic, if the blocks do not fit or
        are too few for one sequence.
        """
        config, files = self.config.engine, self.config.files
        needed = -(-files.max_model_len // self.block_size)
        if config.num_kv_blocks is not None:
            blocks, arithmetic = config.num_kv_blocks, "num_kv_blocks"
            self._check_fits(blocks, used, peak)
        else:
            share = config.memory_utilization or self.traits.default_memory_utilization
            if self.traits.shared_memory:  # free and used bytes are totals of all ranks
                share, used = share / self.group.size, used // self.group.size
            free = int(self.free_bytes * share) - used - peak - self.slots_bytes
            blocks = min(free // self.block_bytes, config.max_num_seqs * needed)
            arithmetic = (
                f"{share:.0%} of {self.free_bytes // _MIB} MiB free - {used // _MIB} MiB of "
                f"weights - {peak // _MIB} MiB for a step{self._slots_term()} = {free // _MIB} MiB "
                f"in blocks of {self.block_bytes / _MIB:.2f} MiB"
            )
        has_states = self.slots_bytes > 0
        check_cache(blocks, files, self.block_size, arithmetic, has_states=has_states)
        blocks = self.group.all_reduce_min(blocks)
        log.info("KV cache: %d blocks of %d tokens", blocks, self.block_size)
        return blocks

    def _check_fits(self, blocks: int, used: int, peak: int) -> None:
        """Raise `NotEnoughMemory` if `blocks` blocks would exceed the memory once all are in use.
        `used` and `peak` are as in `num_blocks`."""
        share = self.group.size if self.traits.shared_memory else 1
        free = self.free_bytes // share - used // share - peak - self.slots_bytes
        if blocks * self.block_bytes > free:
            raise NotEnoughMemory(
                f"num_kv_blocks {blocks} is too large: {blocks} blocks of "
                f"{self.block_bytes / _MIB:.2f} MiB take "
                f"{blocks * self.block_bytes // _MIB} MiB, but {self.free_bytes // _MIB} MiB "
                f"free - {used // _MIB} MiB of weights - {peak // _MIB} MiB for a "
                f"step{self._slots_term()} leave {max(0, free) // _MIB} MiB, enough for only "
                f"{max(0, free) // self.block_bytes} blocks"
            )

    def _slots_term(self) -> str:
        """Return the part of an error message that subtracts the memory of slot states (layer state
        outside of blocks), or an empty string if no layer keeps any."""
        bytes_per_slot = slot_bytes(self.states)
        if not bytes_per_slot:
            return ""
        sequences = self.config.engine.max_num_seqs
        return (
            f" - {self.slots_bytes // _MIB} MiB of states ({bytes_per_slot / _MIB:.2f} MiB for "
            f"each of {sequences} sequences (max_num_seqs) and one more slot)"
        )
