"""Answers of whole engines to schemas of every kind: those that end are valid, and no token is one
that its grammar does not allow."""

import asyncio

import numpy as np
import pytest

from nanoactor import EngineConfig, SamplingParams
from nanoactor.grammar.matcher import CompiledGrammar
from nanoactor.grammar.vocabulary import Vocabulary
from nanoactor.model_files.files import read_model_files
from nanoactor.requests.structured_outputs import StructuredOutputsParams
from tests.engine.conftest import DEMO
from tests.engine.harness import collect, engine
from tests.grammar.schemas import schemas
from tests.grammar.test_schemas import validate

SCHEMAS = schemas()
MOST = 900


def constraint(schema):
    """Without white space, which models that know no JSON write for ever."""
    return {"json": schema, "disable_any_whitespace": True}


def check_allowed(vocabulary, constraint, answer):
    """Each token is allowed behind the ones before."""
    matcher = CompiledGrammar(StructuredOutputsParams(**constraint).spec(), vocabulary).matcher()
    mask = np.empty(vocabulary.words, np.int32)
    for at, token in enumerate(answer.token_ids):
        matcher.fill(mask)
        allowed = mask[token // 32] >> token % 32 & 1
        assert allowed, f"token {at}, {token}, of {constraint}"
        matcher.consume([token])


async def answers(load_format, seed):
    """An answer to each schema."""
    limits = dict(max_num_seqs=32, max_waiting_requests=len(SCHEMAS), mask_timeout=600)
    async with engine(DEMO, skip_tokenizer_init=False, load_format=load_format, **limits) as llm:
        requests = [
            collect(
                llm,
                f"{name}:",
                SamplingParams.for_model(
                    structured_outputs=constraint(schema), seed=seed + at, max_tokens=MOST
                ),
            )
            for at, (name, schema) in enumerate(SCHEMAS)
        ]
        return [output.outputs[0] for output in await asyncio.gather(*requests)]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1000])
@pytest.mark.parametrize(("load_format", "least"), [("auto", 0.6), ("dummy", 0.8)])
def test_answers_of_a_model_are_valid(load_format, least, seed):
    """With the demo's weights, which know verse and seldom close a string, and with random ones."""
    files = read_model_files(EngineConfig("demo"))
    vocabulary = Vocabulary(DEMO / "tokenizer.json", files.config.vocab_size, files.eos_token_ids)
    found = asyncio.run(answers(load_format, seed))
    cut = []
    for (name, schema), answer in zip(SCHEMAS, found, strict=True):
        check_allowed(vocabulary, constraint(schema), answer)
        if answer.finish_reason == "stop":
            validate(schema, answer.text)
        else:
            cut.append(name)
    print(f"{len(cut)} of {len(SCHEMAS)} are cut at {MOST} tokens ({load_format}, {seed}): {cut}")
    assert 1 - len(cut) / len(SCHEMAS) >= least
