"""Options and parameters by vLLM's names: those that mean the same, and those that are refused."""

import pytest

from nanoactor import AsyncLLM, SamplingParams
from nanoactor.errors import InvalidConfig, InvalidRequest
from nanoactor.options.config import EngineConfig
from nanoactor.options.engine_options import engine_config
from nanoactor.requests.known_names import ANY, ENGINE
from nanoactor.requests.named_parameters import suggestion
from nanoactor.requests.params import IGNORED as IGNORED_PARAMETERS


def test_names_that_mean_the_same():
    made = engine_config("demo", {"gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 9})
    assert (made.memory_utilization, made.num_kv_blocks) == (0.5, 9)
    assert engine_config("demo", {"dtype": "half"}).dtype == "float16"
    assert engine_config("demo", {"dtype": "float"}).dtype == "float32"
    with pytest.raises(InvalidConfig, match="are two names for the same option"):
        engine_config("demo", {"gpu_memory_utilization": 0.5, "memory_utilization": 0.5})


MOOT = [name for name in ENGINE if not name.ours]


@pytest.mark.parametrize("name", MOOT, ids=[name.theirs for name in MOOT])
def test_an_option_without_a_counterpart_is_accepted_where_it_asks_for_nothing(name):
    for value in (*name.accepts, None):
        assert engine_config("demo", {name.theirs: value}) == EngineConfig("demo")
    if ANY in name.accepts:
        return
    with pytest.raises(InvalidConfig, match=f"{name.theirs} is not supported") as caught:
        engine_config("demo", {name.theirs: "anything else"})
    assert name.note in str(caught.value)
    if any(one is False for one in name.accepts) and True not in name.accepts:
        with pytest.raises(InvalidConfig):
            engine_config("demo", {name.theirs: 0})


@pytest.mark.parametrize(
    ("name", "instead"),
    [("max_num_seq", "max_num_seqs"), ("gpu_memory_utilisation", "gpu_memory_utilization")],
)
def test_an_unknown_option_is_refused_with_the_name_that_was_meant(name, instead):
    with pytest.raises(
        InvalidConfig, match=f"unknown engine option '{name}': did you mean {instead}"
    ):
        AsyncLLM("demo", **{name: 1})


def test_nothing_is_meant_by_what_looks_like_nothing():
    assert suggestion("qqqq", ["temperature"]) == ""


@pytest.mark.parametrize("name", IGNORED_PARAMETERS)
def test_a_parameter_of_vllms_is_accepted_with_the_value_that_asks_for_nothing(name):
    plain = SamplingParams()
    for value in IGNORED_PARAMETERS[name]:
        assert SamplingParams(**{name: value}) == plain
    assert SamplingParams(**{name: None}) == plain
    with pytest.raises(InvalidRequest, match=f"{name} is not supported"):
        SamplingParams(**{name: "anything else"})


def test_an_unknown_parameter_is_refused_with_the_name_that_was_meant():
    with pytest.raises(InvalidRequest, match="no parameter 'temprature': did you mean temperature"):
        SamplingParams(temprature=1)
    with pytest.raises(InvalidRequest, match="by name"):
        SamplingParams(1, 0.5)


def test_minus_one_is_no_seed():
    assert SamplingParams(seed=-1).seed is None
