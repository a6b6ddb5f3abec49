"""No client fills the queue for all others."""

import asyncio

import openai
import pytest

from nanoactor.server.errors import APIError
from nanoactor.server.keys import Keys
from nanoactor.server.shares import Shares
from tests.server.harness import here, url


def test_a_client_has_its_share_and_others_have_theirs():
    shares = Shares(5)
    with shares.hold("a", 3):
        with pytest.raises(
            APIError, match="3 answers .* requested 3 more, but at most 5"
        ) as caught:
            shares.hold("a", 3).__enter__()
        assert (caught.value.status, caught.value.code) == (429, "too_many_answers")
        assert caught.value.headers["Retry-After"]
        with shares.hold("b", 5), shares.hold("a", 2):
            assert len(shares) == 2
    assert len(shares) == 0, "nothing is kept of who has nothing under way"
    with pytest.raises(APIError), shares.hold("a", 6):
        pass
    assert len(shares) == 0


def test_a_client_is_its_key_or_its_address():
    keys = Keys(["one", "two"])
    assert keys.client("Bearer one", None, "1.1.1.1") == keys.client(None, "one", "2.2.2.2")
    assert keys.client("Bearer one", None, "") != keys.client("Bearer two", None, "")
    assert "one" not in keys.client("Bearer one", None, "")
    assert Keys([]).client("Bearer one", None, "1.1.1.1") == "1.1.1.1"


def test_one_key_that_asks_for_everything_leaves_room_for_another():
    async def main():
        options = dict(max_num_seqs=2, max_waiting_requests=40, device="simulated:20")
        async with here(config=dict(api_keys=("a", "b")), **options) as server:
            base = f"{url(server)}/v1"
            clients = [
                openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0) for key in "ab"
            ]
            greedy, other = clients
            params = dict(model="demo", prompt="x", max_tokens=20, n=11)
            asked = [asyncio.ensure_future(greedy.completions.create(**params)) for _ in range(4)]
            done = await asyncio.wait_for(other.completions.create(**params | {"n": 1}), 60)
            assert done.choices
            found = await asyncio.gather(*asked, return_exceptions=True)
            refused = [one for one in found if isinstance(one, openai.RateLimitError)]
            assert len(refused) == 2, "22 answers, all that run and half of the queue"
            assert {one.code for one in refused} == {"too_many_answers"}
            assert len((await greedy.completions.create(**params)).choices) == 11
            for client in clients:
                await client.close()

    asyncio.run(main())


def test_what_is_no_number_of_answers_is_refused_as_that():
    async def main():
        async with (
            here(config=dict(max_answers_per_client=4)) as server,
            openai.AsyncOpenAI(base_url=f"{url(server)}/v1", api_key="x", max_retries=0) as client,
        ):
            for wrong in (0, -1, 129, 5000):
                with pytest.raises(openai.BadRequestError, match="n must be"):
                    await client.completions.create(model="demo", prompt="a", n=wrong)
            with pytest.raises(openai.RateLimitError, match="at most 4 are allowed"):
                await client.completions.create(model="demo", prompt="a", n=5)

    asyncio.run(main())
