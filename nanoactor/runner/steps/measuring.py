"""The warm-up of an executor: large steps on a small cache, which compile code and show how much
memory and time steps need."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from nanoactor.messages.engine import Step
from nanoactor.runner.batch.batch import BatchTraits, HostBatch
from nanoactor.runner.config import RankConfig
from nanoactor.runner.model.model import LoadedModel
from nanoactor.runner.steps.launcher import StepLauncher
from nanoactor.runner.steps.scoring import AT_ONCE
from nanoactor.runner.steps.warmup import decode_update, mixed_update, prefill_step

log = logging.getLogger("nanoactor.runner")

_MIB = 1 << 20
# Upper estimates of driver memory: per captured step, in addition to its tensors, and in total.
_GRAPH_BYTES = 4 * _MIB
_DRIVER_BYTES = 256 * _MIB
# Maximum size of a warm-up step on synchronous devices, on which the largest step of a large model
# would take minutes. The memory that a step needs is proportional to its tokens.
_SMALL_WARMUP_TOKENS, _SMALL_WARMUP_ROWS = 256, 16
_MIXED_TOKENS = 16
"""Number of prompt tokens of the mixed steps in the warm-up."""


class WarmUp:
    """One run of the warm-up, and what it has measured. The executor sizes the KV cache by it, and
    the runner actor takes the first time limits of steps from it."""

    def __init__(
        self,
        config: RankConfig,
        model: LoadedModel,
        traits: BatchTraits,
        make_state: Callable[[int], tuple[HostBatch, StepLauncher]],
    ) -> None:
        """Prepare without running anything yet. `make_state` returns a new batch and launcher, with
        a cache of the given number of blocks."""
        self._config, self._model, self._device = config.engine, model, model.device
        self._max_model_len = config.files.max_model_len
        self._traits, self._make_state = traits, make_state
        self.durations: tuple[tuple[int, float], ...] = ()
        """(number of tokens, duration in seconds) of each measured step."""

    def run(self) -> tuple[int, int]:
        """Run large prefill and decode steps on a small cache. Return (size of the weights, memory
        that steps need), both in bytes."""
        config, device = self._config, self._device
        begin = time.monotonic()
        device.synchronize()
        free = device.memory().free
        used = max(0, self._model.free_bytes - free)
        max_prompt = self._max_model_len - 1
        rows = min(-(-config.max_num_batched_tokens // max_prompt), config.max_num_seqs)
        max_tokens = min(config.max_num_batched_tokens, rows * max_prompt)
        tokens, decode_rows = max_tokens, config.max_num_seqs
        if not device.traits.asynchronous:
            tokens, decode_rows = (
                min(max_tokens, _SMALL_WARMUP_TOKENS),
                min(decode_rows, _SMALL_WARMUP_ROWS),
            )
        prefill = prefill_step(tokens, min(rows, tokens), self._model.block_size)
        blocks = int(prefill.table_blocks.max()) + 1
        self._batch, self._launcher = self._make_state(blocks)
        self._run_once(prefill)  # compiles
        # Memory needed in addition to the cache and the states of layers, which `CacheSizing`
        # counts: buffers, and the libraries' own allocations.
        dummies = device.dummy_blocks(config.max_num_seqs, self._model.block_size)
        sizing = self._model.cache_sizing
        cache = (blocks + dummies) * sizing.block_bytes + sizing.slots_bytes
        overhead = max(0, free - device.memory().free - cache)
        if device.traits.asynchronous and self._traits.fused_sampling != "none":
            self._run_mixed(min(_MIXED_TOKENS, tokens), decode_rows - 1)
        peak = self._step_peak(prefill, tokens, max_tokens, decode_rows)
        log.info("warm-up took %.1f s", time.monotonic() - begin)
        self._launcher.resident.free_states()
        return used, peak + overhead + (_DRIVER_BYTES if device.traits.asynchronous else 0)

    def _step_peak(self, prefill: Step, tokens: int, max_tokens: int, decode_rows: int) -> int:
        """Return the memory in bytes that steps take while they run. `prefill` has `tokens` tokens;
        the result holds for steps of `max_tokens` tokens."""
        prefill_seconds, peak = self._measure(lambda: self._run_once(prefill))
        decode_seconds, decode_peak = self._measure(lambda: self._decode_once(decode_rows))
        self.durations = (tokens, prefill_seconds), (decode_rows, decode_seconds)
        _, top_p_peak = self._measure(lambda: self._decode_once(decode_rows, top_p=0.9))
        _, rules_peak = self._measure(
            lambda: self._decode_once(decode_rows, repetition_penalty=1.1)
        )
        choices = self._launcher.choices
        score_rows, num_logprobs = min(AT_ONCE, tokens), self._config.max_logprobs
        _, scores_peak = self._measure(lambda: choices.warm_up(score_rows, num_logprobs))
        decode_peak = max(decode_peak, peak)
        peak = max(peak * max_tokens // tokens, decode_peak, top_p_peak, rules_peak, scores_peak)
        peak += self._encoder_peak()  # partial encodings stay allocated during prefill
        if self._launcher.captures:
            peak += decode_peak + _GRAPH_BYTES * len(self._launcher.graphs)
        return peak

    def _encoder_peak(self) -> int:
        """Warm up the encoder, if there is one. Return the memory that encoding the largest image
        takes, in bytes."""
        if (encoder := self._model.encoder) is None:
            return 0
        max_rows = encoder.max_rows(self._max_model_len)
        rows = max_rows if self._device.traits.asynchronous else min(max_rows, _SMALL_WARMUP_TOKENS)
        encoder.warm_up(rows)
        seconds, peak = self._measure(lambda: encoder.warm_up(rows))
        self.durations += ((rows, seconds),)
        return peak * max_rows // rows

    def _measure(self, work: Callable[[], None]) -> tuple[float, int]:
        """Run `work`. Return (duration in seconds, peak memory in bytes)."""
        self._device.reset_peak_memory()
        begin = time.monotonic()
        work()
        return time.monotonic() - begin, self._device.peak_memory()

    def _run_once(self, step: Step) -> None:
        self._launcher.launch(self._batch.update(step)).wait()
        self._device.synchronize()

    def _run_mixed(self, tokens: int, max_rows: int) -> None:
        """Run mixed steps with one prompt of `tokens` tokens and the fewest and most decode rows.
        This compiles kernels that neither decode steps nor captured mixed steps need: there may be
        fewer decode rows beside a long prompt than in any captured mixed step."""
        for rows in sorted({min(1, max_rows), max_rows}):
            prefill = self._batch.update(prefill_step(tokens, 1, self._model.block_size))
            if prefill.prefill is not None:  # a single token is computed like a decode row
                self._launcher.launch(mixed_update(prefill, rows)).wait()
        self._device.synchronize()

    def _decode_once(self, rows: int, **sampling: float) -> None:
        dummy, max_model_len = self._launcher.resident.dummy, self._max_model_len
        update = decode_update(rows, dummy, self._traits, max_model_len, **sampling)
        self._launcher.launch(update).wait()
        self._device.synchronize()
