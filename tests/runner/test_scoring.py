"""Log-probabilities behind a step: which rows, and never many rows of logits at once."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanoactor.messages.scores import ScoreRequests
from nanoactor.models.collective import SingleRank
from nanoactor.runner.batch.batch import BatchTraits, HostBatch
from nanoactor.runner.batch.inputs import ScoredResults, ScoredRows
from nanoactor.runner.batch.score_table import ScoreTable
from nanoactor.runner.steps.scoring import AT_ONCE, StepScorer
from tests.runner.steps import DECODE, SAMPLE, SCORE, int32, introduced, step_of

WIDTH, VOCABULARY = 8, 31


def model(weight, sizes):
    def logits(hidden):
        sizes.append(len(hidden))
        return hidden @ weight

    shard = SimpleNamespace(vocabulary=SimpleNamespace(start=0))
    network = SimpleNamespace(logits=logits, shard=shard)
    config = SimpleNamespace(vocab_size=VOCABULARY)
    return SimpleNamespace(network=network, group=SingleRank(), config=config)


@pytest.mark.parametrize(("prompts", "rows"), [(1000, 3), (0, 300), (129, 0), (128, 128)])
def test_a_few_rows_of_logits_at_a_time(prompts, rows):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(WIDTH, VOCABULARY, generator=generator)
    hidden = torch.randn(prompts + 5, WIDTH, generator=generator)
    sampling = torch.randn(rows + 9, WIDTH, generator=generator)
    chosen = torch.randint(0, VOCABULARY, (rows + 9,), generator=generator).int()
    targets = torch.randint(0, VOCABULARY, (prompts,), generator=generator)
    places = torch.arange(rows + 9)[9:].flip(0)
    order = torch.randperm(prompts + 5, generator=generator)[:prompts]
    sizes = []
    scorer = StepScorer(model(weight, sizes))
    wanted = ScoredRows(order, targets, torch.arange(rows))
    table = scorer.score(hidden, sampling, wanted, places, chosen, num_logprobs=2)
    assert max(sizes) <= AT_ONCE
    assert sum(sizes) == len(table) == prompts + rows
    logits = torch.cat((hidden[order], sampling[places])) @ weight
    right = logits.log_softmax(-1).gather(1, torch.cat((targets, chosen[places].long()))[:, None])
    torch.testing.assert_close(table[:, :1].contiguous().view(torch.float32), right)


def test_those_who_ask_are_known_until_somebody_else_has_their_slot():
    table, every = ScoreTable(8), np.arange(8)
    assert not len(table.requesting(every))
    wanted = ScoreRequests(int32(0, 2), int32(3, -1), int32(-1, 1))
    table.admit(int32(5, 2, 7), int32(9, 9, 9), wanted)
    assert table.requesting(every).tolist() == [5]
    assert table.requesting(np.array([7, 5, 2])).tolist() == [1]
    table.admit(int32(5), int32(9), None)
    assert not len(table.requesting(every))


def test_rows_are_found_among_the_chunks_of_a_step():
    """Slots 1, 7 and 2 have chunks of prompts of 15; slot 7 scores, but not its prompt's last."""
    batch = HostBatch(8, 4, BatchTraits())
    wanted = ScoreRequests(int32(5, 7), int32(3, -1), int32(-1, 1))
    rows = [(5, 20, 1, SAMPLE | DECODE), (1, 0, 4, SAMPLE), (7, 12, 3, SAMPLE | SCORE)]
    new = introduced(8, [15] * 8, scores=wanted)
    update = batch.update(step_of(*rows, (2, 9, 1, SAMPLE), new=new))
    found, results = update.inputs.scored, update.scored
    assert found.prompt_rows.tolist() == [4, 5]
    assert found.targets.tolist() == [105, 106]  # the tokens from 104 on are slot 7's
    assert found.samplers.tolist() == [3]  # behind the three prompts that end
    assert results.rows.tolist() == [0]  # of the decode row
    assert results.counts.tolist() == [1, 1, 3]
    assert results.max_logprobs == 3


def test_each_row_is_told_what_it_asked_for():
    found = ScoredResults(int32(0, 1, 2), int32(2, 0, 9))
    words = np.arange(3 * 8, dtype=np.int32).reshape(3, 8)  # three of the likeliest, all there are
    message = found.message(words)
    assert message.rows.tolist() == [0, 1, 2]
    assert message.scores.counts.tolist() == [2, 0, 3]
    assert message.scores.ranks.tolist() == [1, 9, 17]
    assert message.scores.top_ids.tolist() == [2, 3, 18, 19, 20]
    assert message.scores.top_logprobs.view(np.int32).tolist() == [5, 6, 21, 22, 23]
