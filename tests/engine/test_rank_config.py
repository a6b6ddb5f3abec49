"""What a runner makes of its rank: its part of the model, and whether it asks for steps."""

from types import SimpleNamespace

import pytest

import nanoactor.runner.model.model as runner_model
from nanoactor.actors.runner import RunnerActor
from nanoactor.models.devices import open_device
from nanoactor.runner.model.model import LoadedModel
from tests.engine.harness import rank_config
from tests.models.checkpoints import make_checkpoint


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_holds_its_half_of_the_heads(monkeypatch, tmp_path, rank):
    make_checkpoint(tmp_path)
    met = []

    def meet(*arguments):
        met.append(arguments[:2])
        return SimpleNamespace(rank=arguments[0], size=arguments[1])

    monkeypatch.setattr(runner_model, "RankGroup", meet)
    options = dict(device="cpu", dtype="float32", tensor_parallel_size=2)
    config = rank_config(tmp_path, rank=rank, **options)
    shard = LoadedModel(config, open_device("cpu")).network.shard
    assert met == [(rank, 2)]
    assert (shard.heads.start, shard.heads.size) == (2 * rank, 2)
    assert (shard.kv_heads.start, shard.kv_heads.size) == (rank, 1)


@pytest.mark.parametrize(
    ("lead", "rank", "asks"), [("late", 0, True), ("late", 1, False), ("eager", 0, False)]
)
def test_rank_0_alone_asks_for_steps_where_plans_are_late(tmp_path, lead, rank, asks):
    make_checkpoint(tmp_path)
    config = rank_config(tmp_path, rank=rank, plan_lead=lead, tensor_parallel_size=2)
    assert RunnerActor(config)._requests_steps is asks
