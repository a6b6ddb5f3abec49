"""Sampling after the layers of a step, with log-probabilities and pooling."""

from __future__ import annotations

import torch

from nanoactor.runner.batch.inputs import Inputs, KeptRows, SampledRows, Update
from nanoactor.runner.model.model import LoadedModel
from nanoactor.runner.steps.choosing import KeptStates, TokenChooser, row_indices
from nanoactor.runner.steps.pooling import StepPooler
from nanoactor.runner.steps.scoring import StepScorer
from nanoactor.runner.steps.step_buffers import StepBuffers


class StepChoices:
    """Samples the tokens of steps on one rank. For a row that a grammar constrains, the hidden
    state is kept, and a later step samples from it once the grammar's mask has arrived."""

    def __init__(self, model: LoadedModel, chooser: TokenChooser, slots: int) -> None:
        self._device = model.device
        self._chooser = chooser
        self._scorer = StepScorer(model)
        self._pooler = None if model.pooling is None else StepPooler(model, model.pooling)
        shape = slots, model.config.hidden_size
        states = model.device.zeros(*shape, dtype=model.dtype)
        logits = None
        if chooser.logits is not None:
            shape = slots, model.config.vocab_size
            logits = model.device.zeros(*shape, dtype=model.dtype)
        self.kept = KeptStates(states, logits)

    def warm_up(self, rows: int, num_logprobs: int) -> None:
        """Sample a token under a mask, and score `rows` tokens with `num_logprobs` top tokens
        each."""
        self._chooser.warm_up()
        self._scorer.warm_up(rows, num_logprobs)

    def choose(
        self,
        update: Update,
        inputs: Inputs[torch.Tensor],
        states: tuple[torch.Tensor | None, torch.Tensor],
        buffers: StepBuffers,
        *,
        prompt_capacity: int | None,
    ) -> list[torch.Tensor]:
        """Return the ids of all sampled tokens as int32 tensors, which together are in the order of
        `Update.positions`. Scores and pooled vectors are copied to `buffers`.

        `states` are the hidden states of the prompt tokens (None if they are not needed), and of
        the rows that sample. `prompt_capacity` is the number of prompts for which a captured step
        has room; None if the step is not captured.
        """
        prompt_states, hidden = states
        num_prompts = padded = 0
        if update.prefill:
            num_prompts, padded = len(update.prefill.sampling), len(update.prefill.ends)
        if prompt_capacity is not None:
            padded = prompt_capacity
        for part in inputs.fallback:
            self._chooser.choose_fallback(hidden, part, (num_prompts, padded))
        if update.pooled and self._pooler:
            first = num_prompts + (len(inputs.kept.prompts) if inputs.kept else 0)
            pooled_states = hidden[first : first + len(update.pooled.numbers)]
            vectors = self._pooler.pool(prompt_states, pooled_states, update.pooled)
            buffers.copy_vectors(self._device, update.pooled, vectors)
        if inputs.kept:
            self._keep(inputs.kept, hidden, num_prompts, padded + update.decode_rows)
        chosen, rows = self._chooser.chosen, padded + update.decodes + update.resumed
        from_kept = [self._chooser.choose_from(self.kept, part) for part in inputs.choices]
        if inputs.scored and update.scored:
            hidden = self._with_kept(hidden[:rows], inputs.choices)
            places = row_indices(inputs.scored.samplers, (num_prompts, padded))
            all_chosen, num_logprobs = (
                torch.cat((chosen[:rows], *from_kept)),
                update.scored.max_logprobs,
            )
            table = self._scorer.score(
                prompt_states, hidden, inputs.scored, places, all_chosen, num_logprobs=num_logprobs
            )
            buffers.copy_scores(self._device, update.scored, table)
        parts = [
            part for part in (chosen[:num_prompts], chosen[padded:rows], *from_kept) if len(part)
        ]
        self._chooser.compare(update.step, *parts)
        return parts

    def _keep(
        self, kept: KeptRows[torch.Tensor], hidden: torch.Tensor, first: int, end: int
    ) -> None:
        """Store hidden states at the slots (indices of sequences in the batch) that `kept` lists.
        The states of its prompts start at row `first` of `hidden`, and those of its decode rows are
        the last ones before row `end`."""
        for slots, begin in ((kept.prompts, first), (kept.continued, end - len(kept.continued))):
            if not (count := len(slots)):
                continue
            at = slice(begin, begin + count)
            self.kept.states.index_copy_(0, slots, hidden[at])
            if self.kept.logits is not None and self._chooser.logits is not None:
                self.kept.logits.index_copy_(0, slots, self._chooser.logits[at])

    def _with_kept(
        self, hidden: torch.Tensor, parts: tuple[SampledRows[torch.Tensor], ...]
    ) -> torch.Tensor:
        """Return `hidden`, followed by the kept states from which the rows in `parts` sample: (rows
        of both, hidden)."""
        kept = [self.kept.states.index_select(0, part.index) for part in parts]
        return torch.cat((hidden, *kept)) if kept else hidden
