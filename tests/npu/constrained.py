"""Steps with constrained rows for an executor without an engine: the first slots decode freely, the
others choose under masks. The last is sampled from its best 20, the others are greedy."""

import dataclasses
import types

import numpy as np

from nanoactor.models.sampling.columns import WORDS, pack
from nanoactor.runner.open import open_executor
from nanoactor.runner.steps.warmup import prefill_step
from tests.engine.harness import rank_config
from tests.runner.steps import DECODE, KEEP, SAMPLE, step_of

LIMITS = dict(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64)
"""Of an executor, which captures decode steps of 1, 2 and 4 rows."""
SLOTS = 4
FREE, CONSTRAINED = (0, 1), (2, 3)
PROMPT = 15
"""Tokens of each."""
VOCABULARY = 211
"""Of the toy checkpoints."""


class Driver:
    """Lays steps out and runs them; knows what each slot has chosen last."""

    def __init__(self, executor):
        self.executor = executor
        self.chosen = {slot: [] for slot in range(SLOTS)}
        self._step = 0
        self._random = np.random.default_rng(5)
        self._computed = np.full(SLOTS, PROMPT)
        """Positions, by slot."""

    def prompts(self):
        """Compute all prompts; the constrained ones leave their states and choose nothing."""
        step = prefill_step(SLOTS * PROMPT, SLOTS, 128)
        tokens = self._random.integers(0, VOCABULARY, len(step.token_ids)).astype(np.int32)
        rows = [pack({"temperature": 0.0})] * (SLOTS - 1) + [pack({"top_k": 20, "seed": 7})]
        new = dataclasses.replace(
            step.admissions,
            sampling=np.frombuffer(b"".join(rows), np.int32).reshape(-1, WORDS),
            prompt_lengths=np.full(SLOTS, PROMPT, np.int32),
        )
        wants = np.where(np.isin(step.rows.slots, FREE), SAMPLE, KEEP).astype(np.uint8)
        rows = dataclasses.replace(step.rows, wants=wants)
        step = dataclasses.replace(step, token_ids=tokens, rows=rows, admissions=new)
        self._run(step, FREE)

    def step(self, continues=(), chooses=(), joins=()):
        """The free slots decode; of the constrained ones some compute what they chose last, some
        choose under masks."""
        last = [self.chosen[slot][-1] for slot in continues]
        rows = [(slot, int(self._computed[slot]), 1, KEEP) for slot in continues]
        rows += [(slot, int(self._computed[slot]), 1, SAMPLE | DECODE) for slot in joins]
        self._computed[[*continues, *FREE]] += 1
        rows += [(slot, int(self._computed[slot]), 0, SAMPLE) for slot in chooses]
        self._run(step_of(*rows, token_ids=np.array(last, np.int32)), [*FREE, *chooses])

    def _run(self, step, slots):
        self._step += 1
        rows = int(step.rows.choices.sum())
        words = -(-VOCABULARY // 32)
        masks = self._random.integers(-(1 << 31), 1 << 31, (rows, words)).astype(np.int32)
        step = dataclasses.replace(step, step=self._step)
        computed = self.executor.launch(self.executor.prepare(step, masks=masks)).wait()
        tokens = computed.token_ids.tolist()
        for row, (slot, token) in enumerate(zip(slots, tokens, strict=True)):
            self.chosen[slot].append(token)
            if slot in CONSTRAINED:
                mask = masks[row - len(FREE)]
                assert mask[token // 32] >> token % 32 & 1, "the mask forbids it"

    def begin(self):
        """Prompts, and the first choice of each slot."""
        self.prompts()
        self.step(chooses=CONSTRAINED, joins=FREE)

    def run(self, steps):
        """Begin, then so many steps, in which one constrained slot goes on, or both; returns the
        tokens by slot."""
        self.begin()
        for number in range(steps):
            slots = CONSTRAINED[: 1 + number % 2]
            self.step(continues=slots, chooses=slots)
        return self.chosen


def watch_replays(executor):
    """From now on note (rows, contexts) of each captured decode step that is replayed."""
    found = []

    def watched(rows, captured):
        def replay(lengths):
            found.append((rows, list(lengths.decode_contexts)))
            return captured.replay(lengths)

        return types.SimpleNamespace(replay=replay)

    decode = executor._launcher.graphs._captured._decode
    for rows, captured in decode.items():
        decode[rows] = watched(rows, captured)
    return found


def expected_replays(steps):
    """What `Driver.run` replays: the free slots alone, then three rows, padded to four, or four."""
    found, lengths = [(2, [PROMPT + 1] * 2)], [PROMPT, PROMPT]
    for number in range(steps):
        lengths[0] += 1
        lengths[1] += number % 2
        free = [PROMPT + 2 + number] * 2
        found.append((4, [*free, lengths[0], lengths[1] if number % 2 else 1]))
    return found


def on_the_cpu(directory, steps):
    """The tokens of `Driver.run` on the CPU."""
    values = dict(LIMITS, device="cpu", dtype="float32", block_size=128, num_kv_blocks=8)
    return Driver(open_executor(rank_config(directory, **values))).run(steps)
