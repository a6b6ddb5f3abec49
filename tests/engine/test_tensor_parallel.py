"""Two and four ranks give the tokens of one, over the load of the matrix; and they die as one."""

import asyncio
import gc
import os
import signal
from pathlib import Path

import pytest
import torch

from nanoactor import AsyncLLM
from nanoactor.errors import EngineDead, InvalidConfig
from nanoactor.models.config import read_config
from nanoactor.models.errors import RanksDisagree, UnsupportedModel
from nanoactor.models.parallel import shard_of
from nanoactor.runner.model.model import LoadedModel
from tests.conftest import children
from tests.engine.harness import collect, greedy, ids
from tests.engine.test_matrix import loads, run, schedules
from tests.models.checkpoints import make_checkpoint
from tests.promises import Delay, check_promise

__all__ = ["loads"]

# What 2 and 4 ranks divide; the others are refused by name, which tests/models show.
OTHERS = ["qwen2", "llama3", "qwen3_vl", "mistral", "granite", "fp8"]
OTHERS += ["qwen3_moe", "qwen3_vl_moe", "qwen3_moe_fp8", "qwen2_moe"]
DIVIDED = {
    2: ["untied", "tied", "gqa_5", "gqa_8", "attention_bias", "rope_yarn", *OTHERS],
    4: ["untied", "tied", "gqa_8", "attention_bias", "wide_heads", *OTHERS],
}
ALL = [(ranks, name) for ranks, names in DIVIDED.items() for name in names]
ALWAYS = [((2, "gqa_8"), (8, 64), 3, "late"), ((2, "qwen3_moe"), (4, 5), 2, "eager")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("divided", "budget", "depth", "lead"), schedules(ALWAYS, ALL), ids=str)
def test_ranks_give_the_tokens_of_one(loads, divided, budget, depth, lead):
    ranks, name = divided
    load = loads(name)
    figures = asyncio.run(
        run(load, budget, depth, lead, placement="default", tensor_parallel_size=ranks)
    )
    assert figures["aborted"] == figures["cut_short"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory)
    return directory


def listening(pid):
    """The addresses at which a process listens, as /proc writes them."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.append(words[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def of_two_ranks(checkpoint, **options):
    options = dict(tensor_parallel_size=2, dtype="float32", skip_tokenizer_init=True) | options
    return AsyncLLM(str(checkpoint), **options)


@pytest.mark.deadly
def test_ranks_listen_on_loopback_and_are_replaced_together(checkpoint):
    """With the stream that they were computing; the new ones meet at the same place."""

    async def main():
        async with of_two_ranks(checkpoint) as llm:
            wanted = await collect(llm, ids(range(20)), greedy(150))
            request = asyncio.ensure_future(collect(llm, ids(range(20)), greedy(150)))
            await asyncio.sleep(0.1)
            before, ranks = llm.pids, ("runner.0", "runner.1")
            os.kill(before["runner.1"], signal.SIGKILL)
            assert (await request).outputs[0].token_ids == wanted.outputs[0].token_ids
            assert llm.restarts[0] == dict.fromkeys(ranks, 1)
            replaced = {name for name, pid in llm.pids.items() if pid != before[name]}
            assert replaced == {*ranks}
            found = [a for name in ranks for a in listening(llm.pids[name])]
            assert found, "the rendezvous is not seen at all"
            assert set(found) <= LOOPBACK

    asyncio.run(main())
    assert not children()


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_without_restarts_the_death_of_a_rank_is_the_engines_within_100_ms(checkpoint, rank):
    async def death():
        async with of_two_ranks(checkpoint, max_restarts=0) as llm:
            request = asyncio.ensure_future(collect(llm, ids(range(20)), greedy(400)))
            await asyncio.sleep(0.3)
            async with Delay() as delay:
                os.kill(llm.pids[f"runner.{rank}"], signal.SIGKILL)
                with pytest.raises(EngineDead):
                    await request
        assert not children()
        return delay

    check_promise(death)


def test_what_cannot_be_divided_is_refused_before_anything_starts(checkpoint):
    with pytest.raises(UnsupportedModel, match="possible sizes: 1, 2, 4"):
        AsyncLLM(str(checkpoint), skip_tokenizer_init=True, tensor_parallel_size=3)
    with pytest.raises(InvalidConfig, match="needs its own; use device 'cuda'"):
        AsyncLLM(str(checkpoint), tensor_parallel_size=2, device="cuda:1")
    with pytest.raises(InvalidConfig, match="requires a process for each rank"):
        AsyncLLM(
            str(checkpoint), skip_tokenizer_init=True, tensor_parallel_size=2, placement="single"
        )


def test_an_engine_that_never_starts_leaves_no_socket(checkpoint):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        AsyncLLM(str(checkpoint), skip_tokenizer_init=True, tensor_parallel_size=2)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


class Disagreeing:
    """A group in which rank 1 has chosen something else."""

    def all_gather(self, x):
        return torch.stack((x, x + 1))


def test_ranks_that_disagree_are_caught_in_debug_mode():
    model = LoadedModel.__new__(LoadedModel)
    model.group = Disagreeing()
    with pytest.raises(RanksDisagree, match="step 7"):
        model.check_agreement(7, torch.tensor([3, 4]))


def test_key_value_heads_are_replicated_where_ranks_are_more(checkpoint):
    config = read_config(checkpoint)
    assert [shard_of(config, rank, 4).kv_heads.start for rank in range(4)] == [0, 0, 1, 1]
