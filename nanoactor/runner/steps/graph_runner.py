"""Execution of steps: captured ones are replayed as graphs, and others are queued operator by
operator."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

import torch
from tqdm import tqdm

from nanoactor.models.seq_lens import HostSeqLens
from nanoactor.options.config import EngineConfig
from nanoactor.runner.batch.inputs import Inputs, Update
from nanoactor.runner.model.model import LoadedModel
from nanoactor.runner.steps.forward import StepForward
from nanoactor.runner.steps.graphs import CapturedSteps, MixedSize, MixedSizes, decode_sizes
from nanoactor.runner.steps.mixed import MixedInputs

log = logging.getLogger("nanoactor.runner")

_MIB = 1 << 20


class GraphRunner:
    """The captured steps of one rank. A step is padded to the next larger captured size, and runs
    operator by operator if there is none."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        forward: StepForward,
        mixed: MixedSizes,
        in_flight: int,
    ) -> None:
        """Prepare without capturing anything yet. `mixed` are the sizes of steps with prompts to
        capture, and `in_flight` is the maximum number of steps in flight."""
        device = model.device
        self._device, self._model, self._forward = device, model, forward
        self._sizes = decode_sizes(config.max_num_seqs)
        self._mixed, self._in_flight = mixed, in_flight
        self._captured = CapturedSteps(device, model.group, in_flight)
        self._inputs = MixedInputs(device, mixed, in_flight + 2)
        self.too_large = self.uncaptured = 0

    @property
    def captures_prompts(self) -> bool:
        """True if steps with prompts are captured."""
        return self._inputs.max_tokens > 0

    def __len__(self) -> int:
        """Return the number of graphs that `capture` records."""
        # If the host writes lengths into a graph, each step in flight needs its own graph.
        in_flight = self._in_flight if self._device.traits.needs_host_seq_lens else 1
        return in_flight * len(self._sizes) + len(self._mixed)

    def capture(
        self, tokens_per_program: int, dummy: int, max_lengths: Callable[[int], HostSeqLens]
    ) -> None:
        """Capture all steps, largest first, so that smaller ones fit into the same memory.

        `tokens_per_program` is the number of prompt tokens that one program of the prefill kernel
        processes. `dummy` is the slot (index in the batch) of padding rows. `max_lengths` returns
        the maximum sequence lengths for a number of decode rows.
        """
        self._model.make_whole_steps(self._sizes)
        begin, before = time.monotonic(), self._device.memory().free
        captures = [
            functools.partial(self._capture_mixed, size)
            for size in self._inputs.allocate(tokens_per_program, dummy)
        ]
        captures += [
            functools.partial(self._capture_decode, rows, max_lengths(rows))
            for rows in self._sizes[::-1]
        ]
        for capture in tqdm(captures, desc="capturing steps", disable=None, leave=False):
            capture()
        seconds, used = time.monotonic() - begin, before - self._device.memory().free
        log.info(
            "captured %d of %d steps in %.1f s: decode steps up to %d rows%s; they take %d MiB",
            len(captures) - self._captured.failed,
            len(captures),
            seconds,
            self._sizes[-1],
            f", prompts up to {self._inputs.max_tokens} tokens" if self._inputs.max_tokens else "",
            used // _MIB,
        )

    def _capture_decode(self, rows: int, max_lengths: HostSeqLens) -> None:
        step = functools.partial(self._forward.decode, rows)
        self._captured.add_decode(rows, step, max_lengths)

    def _capture_mixed(self, size: MixedSize) -> None:
        prefill, visual = self._inputs.inputs_of(size)
        kept = self._forward.captured_states
        step = functools.partial(self._forward.mixed, prefill, size.rows, visual, kept=kept)
        self._captured.add_mixed(size, step)

    # -- running --------------------------------------------------------------------------

    def fit(self, update: Update) -> MixedSize | None:
        """Return the size of the captured step with prompts into which a step fits; None if there
        is none. Count the steps with prompts that are larger than all sizes (`too_large`) or whose
        size could not be captured (`uncaptured`)."""
        size = self._inputs.fit(update)
        if size is None and update.prefill is not None and self._inputs.max_tokens:
            self.too_large += 1
        if size is not None and not self._captured.has_mixed(size):
            self.uncaptured += 1
            return None
        return size

    def fill(self, size: MixedSize, update: Update) -> None:
        """Queue a copy of a step's prompt inputs to the device memory that the captured step of
        this size reads."""
        self._inputs.fill(size, update)

    def run(
        self, update: Update, inputs: Inputs[torch.Tensor], size: MixedSize | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Queue a step, as a graph if its size was captured. `size` is the result of `fit`.

        Return the hidden states of the prompt tokens (None if they are not needed), and those of
        the rows that sample.
        """
        forward = self._forward
        forward.prompt_states = None
        if inputs.prefill is not None:
            narrows = self._device.traits.narrows_last_layer and inputs.visual is None
            final_lengths = update.final_lengths if narrows else None
            rows = update.decode_rows
            hidden = forward.mixed(
                inputs.prefill, rows, inputs.visual, update.lengths, final_lengths=final_lengths
            )
            return forward.prompt_states, hidden
        if size:
            return forward.captured_states, self._captured.replay_mixed(size)
        if not update.decode_rows:  # a step that only encodes, or chooses from kept states
            return None, forward.no_rows
        return None, self._decode(update)

    def _decode(self, update: Update) -> torch.Tensor:
        hidden = self._captured.replay_decode(update.decode_rows, update.lengths)
        if hidden is not None:
            return hidden
        self.uncaptured += self._captured.failed > 0
        return self._forward.decode(update.decode_rows, update.lengths)
