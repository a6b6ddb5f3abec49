"""What a user asks for, as the message that the tokenizer gets."""

import dataclasses
import functools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nanoactor import EngineConfig, SamplingParams
from nanoactor.admission.request_builder import RequestBuilder
from nanoactor.errors import InvalidRequest
from nanoactor.model_files.files import ModelFiles, max_prompt_bytes, read_model_files
from nanoactor.model_files.generation_config import GenerationConfig
from nanoactor.models.sampling import columns
from nanoactor.models.sampling.columns import pack, unpack

DEFAULTS = {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125}
CHAT = [{"role": "user", "content": "和"}]


@pytest.fixture(scope="module")
def demo():
    return read_model_files(EngineConfig("demo"))


def builder(files: ModelFiles, seed=0, **options):
    config = EngineConfig("demo", **options)
    made = RequestBuilder(config, dataclasses.replace(files, **CHANGES), random.Random(seed))
    return SimpleNamespace(build=lambda *given, **named: made.build(*given, **named)[0])


CHANGES = dict(
    directory=Path(), generation=GenerationConfig(DEFAULTS), eos_token_ids=(2, 0), max_model_len=64
)


def test_a_prompt_comes_in_one_of_three_forms(demo):
    build = builder(demo).build
    params = SamplingParams()
    text, chat = build("To be", params), build(CHAT, params)
    ids = build({"prompt_token_ids": [3, 4]}, params)
    assert build({"prompt": "To be"}, params).text == text.text == "To be"
    assert json.loads(chat.chat) == CHAT
    assert (ids.token_ids.tolist(), ids.token_ids.dtype) == ([3, 4], np.int32)
    for submit in (text, chat, ids):
        given = (submit.text is not None, submit.chat is not None, len(submit.token_ids) > 0)
        assert sum(given) == 1
        assert (submit.uid, submit.spec.priority) == (0, 0)


def test_template_options_travel_as_json(demo):
    build = builder(demo).build
    assert build("x", SamplingParams()).chat_options == "{}"
    submit = build(CHAT, SamplingParams(), 3, {"enable_thinking": False, "tools": [{"a": "和"}]})
    assert json.loads(submit.chat_options) == {"enable_thinking": False, "tools": [{"a": "和"}]}
    assert submit.spec.priority == 3


def test_what_a_request_leaves_open_the_models_files_say(demo):
    build = builder(demo).build
    plain = build("x", SamplingParams.for_model(seed=9))
    assert plain.spec.sampling == pack({**DEFAULTS, "seed": 9})
    # What is left out of a constructor called by hand is vLLM's; None is the model's.
    assert build("x", SamplingParams(seed=9)).spec.sampling == pack({**columns.NEUTRAL, "seed": 9})
    params = SamplingParams(seed=9, top_k=None)
    expected = {**columns.NEUTRAL, "top_k": DEFAULTS["top_k"], "seed": 9}
    assert build("x", params).spec.sampling == pack(expected)
    for name, value in (("temperature", 0), ("top_k", 3), ("top_p", 1), ("min_p", 0)):
        sampling = build("x", SamplingParams.for_model(seed=9, **{name: value})).spec.sampling
        assert sampling == pack({**DEFAULTS, name: value, "seed": 9})


def test_minus_one_means_no_limit(demo):
    build = builder(demo).build
    assert unpack(build("x", SamplingParams(top_k=-1)).spec.sampling).top_k == 0
    files = dataclasses.replace(
        demo, generation=GenerationConfig({**columns.DEFAULTS, "top_k": -1})
    )
    without = RequestBuilder(EngineConfig("demo"), files, random.Random())
    assert unpack(without.build("x", SamplingParams.for_model())[0].spec.sampling).top_k == 0


def test_every_column_is_a_parameter_of_its_name():
    assert {*columns.NAMES} <= {field.name for field in dataclasses.fields(SamplingParams)}


def test_seeds_are_drawn_for_requests_without_one(demo):
    def seeds(builder, *given):
        submits = [builder.build("x", SamplingParams(seed=seed)) for seed in given]
        return [unpack(submit.spec.sampling).seed for submit in submits]

    drawn = seeds(builder(demo, seed=5), None, None)
    assert drawn[0] != drawn[1]
    assert seeds(builder(demo, seed=5), 1, None, 0, None) == [1, drawn[0], 0, drawn[1]]
    assert all(0 <= seed < 2**64 for seed in drawn)


def test_when_a_request_ends(demo):
    build = builder(demo).build

    def stopping(params, build=build):
        return dataclasses.astuple(build("x", params).spec.stopping)

    assert stopping(SamplingParams.for_model()) == (0, 0, (2, 0), (), False)
    assert stopping(SamplingParams(max_tokens=None)) == (0, 0, (2, 0), (), False)
    assert stopping(SamplingParams()) == (16, 0, (2, 0), (), True)
    recommends = dataclasses.replace(demo, generation=GenerationConfig(DEFAULTS, (), 50))
    made = RequestBuilder(EngineConfig("demo"), recommends, random.Random())
    by_model = functools.partial(stopping, build=lambda *given: made.build(*given)[0])
    assert by_model(SamplingParams.for_model())[0::4] == (50, True)
    assert by_model(SamplingParams.for_model(min_tokens=60))[0::4] == (60, True)
    assert by_model(SamplingParams.for_model(max_tokens=70))[0::4] == (70, False)
    params = SamplingParams(max_tokens=9, min_tokens=2, ignore_eos=True, stop_token_ids=[5, 6])
    assert stopping(params) == (9, 2, (), (5, 6), False)


def test_how_text_is_made(demo):
    build = builder(demo).build
    assert dataclasses.astuple(build("x", SamplingParams()).spec.text_options) == (
        (),
        False,
        True,
        0,
        True,
        -1,
    )
    params = SamplingParams(
        stop=["a", "b"], include_stop_str_in_output=True, skip_special_tokens=False, min_tokens=4
    )
    assert dataclasses.astuple(build("x", params).spec.text_options) == (
        ("a", "b"),
        True,
        False,
        4,
        True,
        -1,
    )
    assert not build("x", SamplingParams(detokenize=False)).spec.text_options.detokenize


def test_limits_are_the_models(demo):
    made = builder(demo)
    made.build({"prompt_token_ids": [1] * 63}, SamplingParams())
    with pytest.raises(
        InvalidRequest, match="64 tokens, but max_model_len is 64, so it may have at most 63"
    ):
        made.build({"prompt_token_ids": [1] * 64}, SamplingParams())
    most = max_prompt_bytes(dataclasses.replace(demo, **CHANGES))
    made.build("x" * most, SamplingParams())
    with pytest.raises(InvalidRequest, match=f"{most + 1} bytes"):
        made.build("x" * (most + 1), SamplingParams())
    with pytest.raises(InvalidRequest, match="5000, which is outside the vocabulary of 2048"):
        made.build("x", SamplingParams(stop_token_ids=[5000]))


def test_a_prompt_may_be_cut(demo):
    made = builder(demo)
    long = {"prompt_token_ids": range(100)}
    for asked, others, kept in (
        (None, dict(max_tokens=9), 0),
        (5, dict(max_tokens=60), 5),
        (63, {}, 63),
        (-1, {}, 63),
        (-1, dict(max_tokens=9), 55),
        (-1, dict(min_tokens=9), 55),
        (-1, dict(max_tokens=500), 1),
    ):
        params = SamplingParams.for_model(truncate_prompt_tokens=asked, **others)
        assert made.build("x", params).keep_last == made.build(CHAT, params).keep_last == kept
        if kept:
            submit = made.build(long, params)
            assert (submit.token_ids.tolist(), submit.keep_last) == ([*range(100)][-kept:], kept)
    with pytest.raises(
        InvalidRequest, match=r"truncate_prompt_tokens is 64, but may be at most 63, because .* 64"
    ):
        made.build("x", SamplingParams(truncate_prompt_tokens=64))
    most = max_prompt_bytes(dataclasses.replace(demo, **CHANGES))
    with pytest.raises(InvalidRequest, match=f"{most + 1} bytes"):
        made.build("x" * (most + 1), SamplingParams(truncate_prompt_tokens=5))


@pytest.mark.parametrize("asked", [5, -1])
def test_a_prompt_with_images_is_not_cut(demo, asked):
    params = SamplingParams(truncate_prompt_tokens=asked)
    with pytest.raises(InvalidRequest, match=r"truncate_prompt_tokens .* images and videos"):
        builder(demo).build("x", params, media=(SimpleNamespace(times=()),))


def test_without_a_tokenizer_there_are_token_ids_alone(demo):
    made = builder(demo, skip_tokenizer_init=True)
    made.build({"prompt_token_ids": [1]}, SamplingParams())
    for prompt in ("x", {"prompt": "x"}, CHAT):
        with pytest.raises(InvalidRequest, match="skip_tokenizer_init"):
            made.build(prompt, SamplingParams())
    with pytest.raises(InvalidRequest, match="stop strings require a tokenizer"):
        made.build({"prompt_token_ids": [1]}, SamplingParams(stop="x"))


def test_bad_arguments_beside_the_prompt_are_named(demo):
    build = builder(demo).build
    for priority in (1.5, True, 2**31, "1"):
        with pytest.raises(InvalidRequest, match="priority"):
            build("x", SamplingParams(), priority)
    assert build("x", SamplingParams(), np.int64(-(2**31))).spec.priority == -(2**31)
    with pytest.raises(InvalidRequest, match="sampling_params"):
        build("x", {"temperature": 0})
    with pytest.raises(InvalidRequest, match="only if the prompt is a list of messages"):
        build("x", SamplingParams(), 0, {"enable_thinking": False})
