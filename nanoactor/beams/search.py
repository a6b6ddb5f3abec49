"""The logic of a beam search over one prompt. It does no I/O: it receives log-probabilities and
returns sequences."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Sequence

from nanoactor.requests.outputs import BeamSearchOutput, BeamSearchSequence, Logprob, Logprobs
from nanoactor.requests.params import BeamSearchParams


def candidates_per_beam(params: BeamSearchParams, eos_token_ids: Collection[int]) -> int:
    """Return the number of most likely tokens to consider as extensions of each beam. This is twice
    `beam_width`, or more if fewer than `beam_width` of these tokens could remain without the
    end-of-sequence ids."""
    ends = 0 if params.ignore_eos else len(set(eos_token_ids))
    return max(2 * params.beam_width, params.beam_width + ends)


def beam_score(cum_logprob: float, length: int, length_penalty: float) -> float:
    """Return the score that ranks sequences: `cum_logprob / length**length_penalty`. `length`
    counts the prompt, but not the end-of-sequence token that ended the sequence; it is at least
    1."""
    return float(cum_logprob / length**length_penalty)


class BeamSearch:
    """The beams of one prompt.

    Each step extends every live beam by its most likely tokens. An end-of-sequence token finishes a
    sequence. Of the other extended sequences, the `beam_width` most likely stay live. In a tie, the
    sequence from the better beam wins, then the one with the lower token id.
    """

    def __init__(
        self, prompt: Sequence[int], params: BeamSearchParams, eos_token_ids: Collection[int]
    ) -> None:
        """`prompt` contains the prompt's token ids, at least one."""
        self.live = [BeamSearchSequence(tokens=list(prompt))]
        """Sequences that the next step extends, most likely first."""
        self.parents: list[int] = []
        """For each live sequence, the index of the sequence that it extends, in the previous list
        of live sequences."""
        self._params = params
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._count = candidates_per_beam(params, eos_token_ids)
        self._final_length = len(prompt) + params.max_tokens
        self._steps_left = params.max_tokens
        self._ended: list[BeamSearchSequence] = []
        """The best finished sequences so far, at most `beam_width`, best first."""

    @property
    def is_over(self) -> bool:
        """True if no further step can change the result."""
        return not (self._steps_left and self.live) or self._cannot_improve()

    def _cannot_improve(self) -> bool:
        """Return True if no continuation of a live beam can beat the finished sequences.

        Log-probabilities are at most 0, so their sums never increase. The bound assumes the most
        favorable length.
        """
        if len(self._ended) < self._params.beam_width:
            return False
        best, penalty = self.live[0], self._params.length_penalty
        length = self._final_length if penalty > 0 else len(best.tokens)
        return self._score(self._ended[-1]) >= beam_score(best.cum_logprob, length, penalty)

    def advance(self, likeliest: Sequence[Logprobs]) -> None:
        """Extend all live beams by one token. `likeliest` contains, for each live beam, its most
        likely next tokens: at least `candidates_per_beam` of them, or the whole vocabulary."""
        ended: list[BeamSearchSequence] = []
        extended: list[tuple[float, int, int]] = []
        for index, (beam, logprobs) in enumerate(zip(self.live, likeliest, strict=True)):
            for token, logprob in self._candidates(logprobs):
                total = beam.cum_logprob + logprob
                if token in self._eos:
                    ended.append(_extend(beam, token, total, logprobs))
                    ended[-1].finish_reason, ended[-1].stop_reason = "stop", token
                else:
                    extended.append((total, index, token))
        best = heapq.nlargest(self._params.beam_width, extended, key=operator.itemgetter(0))
        self.live = [
            _extend(self.live[index], token, total, likeliest[index])
            for total, index, token in best
        ]
        self.parents = [index for _, index, _ in best]
        self._ended = self._best([*self._ended, *ended])
        self._steps_left -= 1

    def _candidates(self, logprobs: Logprobs) -> list[tuple[int, float]]:
        """Return (token id, log-probability) of the most likely tokens, most likely first."""

        def rank(item: tuple[int, Logprob]) -> tuple[float, int]:
            return -item[1].logprob, item[0]

        top = heapq.nsmallest(self._count, logprobs.items(), key=rank)
        return [(token, one.logprob) for token, one in top]

    def _score(self, sequence: BeamSearchSequence) -> float:
        length = len(sequence.tokens) - (sequence.finish_reason == "stop")
        return beam_score(sequence.cum_logprob, length, self._params.length_penalty)

    def _best(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        """Return the best sequences, at most `beam_width`, best first. In a tie, the earlier
        sequence wins."""
        return heapq.nlargest(self._params.beam_width, sequences, key=self._score)

    def result(self) -> BeamSearchOutput:
        """Return the best sequences, at most `beam_width`, without text. Live sequences end here,
        with finish reason "length". Call only after the search is over."""
        for beam in self.live:
            beam.finish_reason = "length"
        return BeamSearchOutput(self._best([*self._ended, *self.live]))


def _extend(
    beam: BeamSearchSequence, token: int, total: float, logprobs: Logprobs
) -> BeamSearchSequence:
    return BeamSearchSequence([*beam.tokens, token], [*beam.logprobs, logprobs], total)
