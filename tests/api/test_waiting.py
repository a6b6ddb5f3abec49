"""The queue of requests that wait for their first token: what counts, and who is let in."""

import asyncio
from types import SimpleNamespace

import pytest

from nanoactor.admission.waiting import WaitingQueue
from nanoactor.errors import EngineOverloaded, InvalidRequest
from nanoactor.options.config import EngineConfig


def queue(requests=4, tokens=100):
    limits = dict(max_waiting_requests=requests, max_waiting_tokens=tokens)
    return WaitingQueue(EngineConfig("any", **limits, max_waiting_media_bytes=1000))


def request(*uids, charge=10, media=0):
    return SimpleNamespace(
        waiting_uids=list(uids), charge=charge, media_bytes=media, has_left_queue=False
    )


def test_the_prompt_of_a_request_counts_until_its_first_sequence_leaves():
    waiting, entry = queue(), request(0, 1, charge=7, media=5)
    waiting.add(entry)
    waiting.set_prompt_length(entry, 3)
    assert (len(waiting), waiting.tokens, waiting.media_bytes) == (2, 3, 5)
    waiting.leave(entry, 1)
    waiting.set_prompt_length(entry, 9)
    assert (len(waiting), waiting.tokens, waiting.media_bytes) == (1, 0, 0)
    assert 0 in waiting
    assert 1 not in waiting
    waiting.leave(entry, 0)
    assert not waiting


def test_what_has_no_room_is_refused():
    waiting = queue()
    with pytest.raises(InvalidRequest, match="5 answers"):
        waiting.check_room([request(0, 1), request(2, 3, 4)])
    waiting.check_room([request(0, charge=1000, media=10_000)])  # nothing else waits
    waiting.add(request(0, charge=90, media=900))
    waiting.check_room([request(1, charge=10, media=100)])
    for entry, reason in (
        (request(1, 2, 3, 4), "1 requests are"),
        (request(1, charge=11), "90 prompt tokens"),
        (request(1, media=101), "900 bytes"),
    ):
        with pytest.raises(EngineOverloaded, match=reason):
            waiting.check_room([entry])


def test_who_waits_for_room_goes_on_with_the_next_first_token():
    async def main():
        waiting, entry = queue(), request(0, 1)
        await waiting.wait_for_capacity()
        waiting.add(entry)
        tasks = [asyncio.ensure_future(waiting.wait_for_capacity()) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        waiting.leave(entry, 0)
        await asyncio.wait_for(asyncio.gather(*tasks), 10)

    asyncio.run(main())
