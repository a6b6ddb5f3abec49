"""What a checkpoint says of its pooling, and what becomes of checkpoints that say it wrong."""

import json

import pytest

from nanoactor import (
    AsyncLLM,
    InvalidConfig,
    InvalidRequest,
    ModelError,
    PoolingParams,
    SamplingParams,
)
from nanoactor.models.errors import UnsupportedModel
from nanoactor.options.pooling import read_pooling
from tests.engine.harness import engine, ids, on_a_loop
from tests.models.checkpoints import make_checkpoint
from tests.pooling.checkpoints import describe_pooling, make_embedder


@pytest.mark.parametrize(
    ("mode", "kind"), [("lasttoken", "last"), ("mean_tokens", "mean"), ("cls_token", "cls")]
)
def test_the_kind_is_the_files_unless_it_is_given(tmp_path, mode, kind):
    describe_pooling(tmp_path, mode)
    found = read_pooling(tmp_path)
    assert (found.kind, found.normalize, found.prompts) == (kind, True, {})
    assert read_pooling(tmp_path, "cls").kind == "cls"
    assert read_pooling(tmp_path, "none") is None


def test_the_newer_form_of_a_pooling_module_is_read(tmp_path):
    describe_pooling(tmp_path)
    path = tmp_path / "1_Pooling" / "config.json"
    path.write_text(json.dumps(dict(pooling_mode="mean")))
    assert read_pooling(tmp_path).kind == "mean"


def test_without_a_normalizing_module_vectors_are_left_as_they_are(tmp_path):
    describe_pooling(tmp_path, modules=("Transformer", "Pooling"))
    assert not read_pooling(tmp_path).normalize


def test_a_checkpoint_that_says_nothing_pools_only_if_it_is_told_to(tmp_path):
    assert read_pooling(tmp_path) is None
    assert read_pooling(tmp_path, "last").kind == "last"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(mode="max_tokens"), "the pooling mode max is not supported"),
        (dict(pooling_mode_mean_tokens=True), "the pooling mode mean, lasttoken is not supported"),
        (dict(include_prompt=False), "include_prompt must be true"),
        (dict(modules=("Transformer", "Pooling", "Dense")), "the module 'Dense' is not supported"),
        (dict(modules=("Transformer",)), "has no Pooling module, so the option pooling"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, change, says):
    describe_pooling(tmp_path, **change)
    with pytest.raises(UnsupportedModel, match=says):
        read_pooling(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("modules.json", "[{", "cannot be read as JSON"),
        ("modules.json", "[1]", "must be a list of modules that each have a type"),
        (
            "modules.json",
            '[{"type": "a.Pooling", "path": "../x"}]',
            "must be inside the model's directory",
        ),
        ("modules.json", '[{"type": "a.Pooling", "path": "missing"}]', "does not exist"),
        ("1_Pooling/config.json", "{", "as JSON"),
        ("config_sentence_transformers.json", '{"prompts": [1]}', "must map names to strings"),
        (
            "config_sentence_transformers.json",
            '{"default_prompt_name": "q"}',
            "is not one of the names in prompts",
        ),
    ],
)
def test_files_that_are_wrong_are_refused_before_the_weights_are_read(tmp_path, name, text, says):
    make_checkpoint(tmp_path)
    describe_pooling(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=says):
        AsyncLLM(str(tmp_path), skip_tokenizer_init=True)


def test_a_decoder_without_a_head_must_be_told_how_it_pools(tmp_path):
    make_embedder(tmp_path)
    (tmp_path / "modules.json").unlink()
    with pytest.raises(
        ModelError,
        match="has no language-modeling head, so it cannot generate text; set the option pooling",
    ):
        AsyncLLM(str(tmp_path), skip_tokenizer_init=True)
    assert AsyncLLM(str(tmp_path), skip_tokenizer_init=True, pooling="mean").files.pooling


def test_judgements_need_their_words():
    with pytest.raises(
        InvalidConfig, match="requires a reranker, but .* does not contain the tokens no and yes"
    ):
        AsyncLLM("demo", pooling="yes_no")
    with pytest.raises(InvalidConfig, match="requires the tokenizer"):
        AsyncLLM("demo", pooling="yes_no", skip_tokenizer_init=True)
    with pytest.raises(InvalidConfig, match="pooling"):
        AsyncLLM("demo", pooling="max")


@on_a_loop
async def test_an_embedding_model_generates_nothing_and_the_other_way_round(tmp_path):
    make_embedder(tmp_path)
    async with engine(tmp_path) as llm:
        with pytest.raises(InvalidRequest, match="does not generate text"):
            await anext(llm.generate(ids([1, 2]), SamplingParams()))
        with pytest.raises(InvalidRequest, match="computes vectors"):
            llm.submit_pooled(ids([1]), PoolingParams(), scores=True)
    async with engine("demo") as llm:
        with pytest.raises(InvalidRequest, match="load an embedding model or a reranker"):
            await llm.embed(ids([1, 2]))
