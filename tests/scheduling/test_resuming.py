"""Requests whose output began before a death: what is computed of it, step by step."""

import dataclasses

import pytest

from nanoactor.messages.rows import Want
from tests.scheduling.events import admit, answered, done, int32, rows_of, scheduler, turn_of


def planned(prompt, tokens, hits, chunk=32):
    """(start, count, samples) of each chunk of a request of so many tokens, of which `prompt` are
    its prompt, and `hits` are found in the cache; blocks have four."""
    logic = scheduler(depth=1, max_num_batched_tokens=chunk)
    event = dataclasses.replace(admit(range(tokens), 1), prompt_length=prompt)
    turn = turn_of(logic.handle(event))
    answer = dataclasses.replace(answered(turn, [0]), hits=int32(hits))
    found, sent = [], logic.handle(answer)
    turn = turn if turn.plan else turn_of(sent)
    while not (turn.plan.rows.wants & Want.DECODE).any():
        samples = (turn.plan.rows.wants & Want.SAMPLE > 0).tolist()
        for (_, start, count), sampled in zip(rows_of(turn.plan), samples, strict=True):
            covered = max(0, hits - start)  # by the hit, which the block manager takes off
            found.append((start + covered, count - covered, sampled))
        counts = () if all(samples) else samples
        turn = turn_of(logic.handle(done(turn.plan, [7] * sum(samples), counts)))
    return found


@pytest.mark.parametrize(
    ("prompt", "tokens", "hits", "chunks"),
    [
        pytest.param(6, 15, 14, [(14, 1, True)], id="the newest"),
        pytest.param(6, 15, 12, [(12, 1, False), (13, 1, False), (14, 1, True)], id="the last"),
        pytest.param(6, 16, 12, [(n, 1, n == 15) for n in range(12, 16)], id="a full last block"),
        pytest.param(4, 8, 4, [(n, 1, n == 7) for n in range(4, 8)], id="a full only block"),
        pytest.param(6, 8, 4, [(4, 2, False), (6, 1, False), (7, 1, True)], id="behind a prompt"),
        pytest.param(6, 15, 8, [(8, 7, True)], id="more than a block"),
        pytest.param(15, 15, 12, [(12, 3, True)], id="a prompt"),
    ],
)
def test_what_a_last_block_lacks_is_computed_token_by_token(prompt, tokens, hits, chunks):
    assert planned(prompt, tokens, hits) == chunks
