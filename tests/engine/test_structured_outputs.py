"""Answers under a grammar through whole engines: the tokens are those of transformers' logits under
the masks that llguidance gives offline."""

import asyncio
import dataclasses
import json

import jsonschema
import numpy as np
import pytest
import torch

import nanoactor.models.devices as devices
from nanoactor import EngineConfig, SamplingParams
from nanoactor.errors import ComputationFailed, InvalidRequest
from nanoactor.grammar.matcher import CompiledGrammar
from nanoactor.grammar.vocabulary import Vocabulary
from nanoactor.model_files.files import read_model_files
from nanoactor.requests.structured_outputs import StructuredOutputsParams
from tests.engine.conftest import DEMO
from tests.engine.harness import TIE, collect, engine, greedy
from tests.engine.schedules import schedules
from tests.models.checkpoints import make_checkpoint
from tests.models.interpreted import InterpretedDevice

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "roles": {"type": "array", "items": {"enum": ["king", "fool"]}, "maxItems": 3},
    },
    "required": ["name", "age", "roles"],
    "additionalProperties": False,
}
CONSTRAINTS = [
    {"json": PERSON, "disable_any_whitespace": True},
    {"regex": r"[a-z]{3,9} \d{2}"},
    {"choice": ["to be", "not to be", "that is the question"]},
    {"grammar": 'start: "(" inner ")"\ninner: /[a-c]+/ | start'},
    {"json_object": True, "disable_any_whitespace": True},
    None,
]
STEM = "ROMEO:\nBut soft, what light through yonder window breaks? It is the east"


@pytest.fixture(scope="module")
def vocabulary():
    files = read_model_files(EngineConfig("demo"))
    return Vocabulary(DEMO / "tokenizer.json", files.config.vocab_size, files.eos_token_ids)


def allowed_ids(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def check_masked(reference, vocabulary, constraint, output):
    """Every token is the likeliest of those that the grammar allows behind the ones before."""
    prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
    with torch.inference_mode():
        logits = reference.model(torch.tensor([[*prompt, *tokens]])).logits[0].float().numpy()
    spec = StructuredOutputsParams(**constraint).spec()
    matcher = CompiledGrammar(spec, vocabulary).matcher()
    mask = np.empty(vocabulary.words, np.int32)
    for at, token in enumerate(tokens):
        matcher.fill(mask)
        ids = allowed_ids(mask)
        row = logits[len(prompt) - 1 + at][ids]
        assert token in ids, f"token {at}, {token}, of {constraint} is not allowed"
        reference.positions += 1
        if len(row) > 1 and np.diff(np.sort(row)[-2:])[0] < TIE:
            reference.ties += 1
        else:
            assert token == ids[row.argmax()], f"token {at} of {constraint}"
        matcher.consume([token])


def wanted(number, **sampling):
    return SamplingParams.for_model(
        structured_outputs=CONSTRAINTS[number % len(CONSTRAINTS)], temperature=0, **sampling
    )


async def answers(count, **changes):
    async with structured_engine(**changes) as llm:
        requests = [
            collect(llm, STEM[: 7 + 9 * (n % 7)], wanted(n, max_tokens=40)) for n in range(count)
        ]
        outputs = await asyncio.gather(*requests)
        return outputs, await llm.statistics()


def structured_engine(**changes):
    return engine(DEMO, skip_tokenizer_init=False, **changes)


@schedules(usual=["token by token", "small chunks", "preempted"])
def test_every_schedule_keeps_to_the_grammar(demo, vocabulary, schedule):
    outputs, figures = asyncio.run(answers(12, **schedule.changes))
    for number, output in enumerate(outputs):
        constraint = CONSTRAINTS[number % len(CONSTRAINTS)]
        if constraint is not None:
            check_masked(demo, vocabulary, constraint, output)
    demo.conclude()
    schedule.check(figures)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # 32-bit products wrap around in NumPy
def test_rows_keep_the_logits_that_their_step_computes(tmp_path, monkeypatch):
    """As on a GPU, in captured steps that are padded: chunks, and then row by row with others;
    the same tokens as from hidden states."""
    heads = dict(num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    make_checkpoint(tmp_path, vocab_size=2048, eos_token_id=2, **heads)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(DEMO / name)
    limits = dict(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64, num_kv_blocks=40)
    asked = [
        *(wanted(number, max_tokens=6) for number in (1, 5)),
        dataclasses.replace(wanted(0, max_tokens=6), temperature=0.9, seed=1),
        dataclasses.replace(wanted(4, max_tokens=6), repetition_penalty=1.2),
    ]

    async def outputs(**changes):
        options = dict(skip_tokenizer_init=False, placement="single", **limits, **changes)
        async with engine(tmp_path, **options) as llm:
            found = await asyncio.gather(*(collect(llm, STEM[:9], how) for how in asked))
            told = [output.outputs[0].token_ids for output in found]
            return told, (await llm.statistics())["runner.0"]["actor"]

    expected, _ = asyncio.run(outputs())
    monkeypatch.setattr(devices, "open_device", lambda *_: InterpretedDevice())
    found, figures = asyncio.run(outputs())
    assert figures["steps_uncaptured"] == figures["steps_too_large"] == 0
    assert found == expected


def test_a_finished_answer_is_valid():
    async def main():
        async with structured_engine() as llm:
            wanted = [
                SamplingParams.for_model(
                    structured_outputs=CONSTRAINTS[0], max_tokens=200, seed=seed, n=2, logprobs=1
                )
                for seed in range(6)
            ]
            return await asyncio.gather(*(collect(llm, STEM, how) for how in wanted))

    texts = [answer for output in asyncio.run(main()) for answer in output.outputs]
    assert len({answer.text for answer in texts}) > 6
    for answer in texts:
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), PERSON)
        assert len(answer.logprobs) == len(answer.token_ids)
        assert all(
            token in told for token, told in zip(answer.token_ids, answer.logprobs, strict=True)
        )


def test_a_constrained_request_changes_nothing_for_others():
    async def main(others):
        async with structured_engine() as llm:
            plain = [greedy(24), SamplingParams.for_model(temperature=0.8, seed=5, max_tokens=24)]
            requests = [collect(llm, STEM, how) for how in plain]
            requests += [collect(llm, STEM, wanted(n, max_tokens=24)) for n in range(5 * others)]
            outputs = await asyncio.gather(*requests)
            return [output.outputs[0].token_ids for output in outputs[:2]]

    assert asyncio.run(main(True)) == asyncio.run(main(False))


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"regex": "(((("}, "regex"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "json"),
        ({"grammar": "start: missing"}, "missing"),
        ({"json": {"enum": []}}, ""),
    ],
)
def test_a_grammar_that_is_wrong_ends_its_request_alone(constraint, reason):
    async def main():
        async with structured_engine() as llm:
            return await asyncio.gather(
                collect(
                    llm, STEM, SamplingParams.for_model(structured_outputs=constraint, max_tokens=9)
                ),
                collect(llm, STEM, greedy(9)),
                collect(llm, STEM, wanted(1, max_tokens=20)),
                return_exceptions=True,
            )

    wrong, plain, right = asyncio.run(main())
    assert isinstance(wrong, InvalidRequest)
    assert reason in str(wrong)
    assert len(plain.outputs[0].token_ids) == 9
    assert right.outputs[0].finish_reason == "stop"


def test_rules_and_a_grammar_that_leave_nothing_end_the_request_alone():
    async def main():
        async with structured_engine() as llm:
            how = SamplingParams.for_model(
                structured_outputs={"choice": ["yes"]}, allowed_token_ids=[5], max_tokens=9
            )
            return await asyncio.gather(
                collect(llm, STEM, how), collect(llm, STEM, greedy(9)), return_exceptions=True
            )

    ended, plain = asyncio.run(main())
    assert isinstance(ended, InvalidRequest)
    assert "grammar together with allowed_token_ids" in str(ended)
    assert len(plain.outputs[0].token_ids) == 9


def test_a_mask_that_does_not_come_ends_its_request_alone(monkeypatch):
    from nanoactor.actors.grammar import GrammarActor

    monkeypatch.setattr(GrammarActor, "_on_compiled", lambda *arguments: None)

    async def main():
        async with structured_engine(mask_timeout=0.2) as llm:
            return await asyncio.gather(
                collect(llm, STEM, wanted(0, max_tokens=9)),
                collect(llm, STEM, greedy(9)),
                return_exceptions=True,
            )

    ended, plain = asyncio.run(main())
    assert isinstance(ended, ComputationFailed)
    assert "mask_timeout" in str(ended)
    assert len(plain.outputs[0].token_ids) == 9


def test_forced_tokens_are_those_that_would_be_chosen():
    """Names of properties have several spellings; of few ids, only one is allowed at a time."""

    async def main(jumps):
        async with structured_engine(jump_forward=jumps) as llm:
            wanted = [
                SamplingParams.for_model(structured_outputs=CONSTRAINTS[n], max_tokens=40, seed=n)
                for n in (0, 1, 2, 3, 4)
            ]
            single = {"grammar": "start: " + " ".join(f"<[{token}]>" for token in (41, 42, 43))}
            wanted.append(SamplingParams.for_model(structured_outputs=single, max_tokens=40))
            wanted.append(SamplingParams.for_model(structured_outputs=single, max_tokens=2))
            stops = SamplingParams.for_model(structured_outputs=single, stop_token_ids=[42])
            outputs = await asyncio.gather(*(collect(llm, STEM, how) for how in [*wanted, stops]))
            forced = (await llm.statistics())["scheduler"]["actor"]["forced_tokens"]
            answers = [output.outputs[0] for output in outputs]
            return [(one.token_ids, one.text, one.finish_reason) for one in answers], forced

    (jumped, forced), (chosen, none) = asyncio.run(main(True)), asyncio.run(main(False))
    assert jumped == chosen
    assert forced > 0 == none
    whole, short, stopped = (tokens for tokens, _, _ in jumped[-3:])
    assert (whole[:3], len(whole)) == ([41, 42, 43], 4)  # an end-of-sequence token is chosen
    assert short == stopped == [41, 42]
