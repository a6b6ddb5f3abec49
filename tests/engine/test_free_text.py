"""Thoughts, and text before a call, are free: tokens are transformers' likeliest up to the tag that
ends them, and from there on the likeliest of those that the grammar allows."""

import asyncio
import collections
import json

import numpy as np
import pytest
import torch

from nanoactor import SamplingParams
from nanoactor.grammar.freeing import split_free_text
from nanoactor.grammar.matcher import CompiledGrammar
from nanoactor.grammar.vocabulary import Vocabulary
from nanoactor.requests.grammar_spec import GrammarSpec, ToolFunction, ToolGrammar
from nanoactor.requests.structured_outputs import StructuredOutputsParams
from tests.engine.conftest import DEMO
from tests.engine.harness import TIE, collect, engine
from tests.engine.schedules import schedules
from tests.engine.test_structured_outputs import PERSON, STEM, allowed_ids

SAID = 40
COMPACT = {"json": PERSON, "disable_any_whitespace": True}
TOOLS = ToolGrammar(
    functions=(ToolFunction(name="get", parameters=json.dumps(PERSON)),), required=False
)
CONSTRAINTS = [
    COMPACT | {"thoughts": "open"},
    {"choice": ["to be", "not to be"], "thoughts": "optional"},
    {"tools": TOOLS, "disable_any_whitespace": True},
    {"tools": TOOLS, "disable_any_whitespace": True, "thoughts": "open"},
    {"regex": r"[a-z]{3,9} \d{2}", "thoughts": "open"},
    COMPACT,
    None,
]


class Model:
    """The demo model, with tags and an end-of-sequence token among what it likes to say."""

    def __init__(self, directory, demo, encode):
        self.directory = directory
        stems = [STEM[: 7 + 5 * n] for n in range(14)]
        self.prompts = [encode(stem).ids for stem in stems]
        said = [self._greedy(demo, prompt) for prompt in self.prompts]
        vocabulary = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
        single = {0, 1, 2, *(id_ for text, id_ in vocabulary.items() if len(text) == 1)}
        firsts = collections.Counter(tokens[0] for tokens in said if tokens[0] not in single)
        self.think = firsts.most_common(1)[0][0]
        counts = collections.Counter(t for tokens in said for t in {*tokens[2:]} - single)
        del counts[self.think]
        self.close, self.call, self.end = (token for token, _ in counts.most_common(12)[::5])
        self._write()
        path = directory / "tokenizer.json"
        self.vocabulary = Vocabulary(path, 2048, (self.end,))

    def _greedy(self, demo, prompt):
        with torch.inference_mode():
            found = demo.model.generate(
                torch.tensor([prompt]), max_new_tokens=SAID, do_sample=False, eos_token_id=None
            )
        return found[0, len(prompt) :].tolist()

    def _write(self):
        """A token of the vocabulary becomes a tag where nothing is merged from it, or to it."""
        read = json.loads((DEMO / "tokenizer.json").read_text())
        tags = {self.think: "<think>", self.close: "</think>", self.call: "<tool_call>"}
        tags |= {1: "</tool_call>", self.end: "<|end|>"}
        names = {id_: text for text, id_ in read["model"]["vocab"].items()}
        gone = {names[id_] for id_ in tags}
        merges = [
            pair if isinstance(pair, list) else pair.split(" ") for pair in read["model"]["merges"]
        ]
        read["model"]["merges"] = [[a, b] for a, b in merges if not gone & {a, b, a + b}]
        names |= tags
        read["model"]["vocab"] = {text: id_ for id_, text in names.items()}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        kept = [token for token in read["added_tokens"] if token["id"] not in tags]
        added = [
            {"id": i, "content": text, "special": i == self.end, **flags}
            for i, text in tags.items()
        ]
        read["added_tokens"] = sorted([*kept, *added], key=lambda token: token["id"])
        (self.directory / "tokenizer.json").write_text(json.dumps(read))
        for name in ("config.json", "generation_config.json"):
            values = json.loads((DEMO / name).read_text())
            if "max_position_embeddings" in values:
                values["max_position_embeddings"] = 1024
            (self.directory / name).write_text(json.dumps(values | {"eos_token_id": [self.end]}))
        (self.directory / "model.safetensors").symlink_to(DEMO / "model.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory, demo, demo_tokenizer):
    return Model(tmp_path_factory.mktemp("tags"), demo, demo_tokenizer.encode)


class Check:
    """Goes through one answer, token by token."""

    def __init__(self, model, constraint):
        text, self.free = split_free_text(
            StructuredOutputsParams(**constraint).spec().to_text(),
            {"<think>": model.think, "</think>": model.close, "<tool_call>": model.call}.get,
        )
        self.model, self.kinds = model, collections.Counter()
        self.matcher = CompiledGrammar(GrammarSpec.of_text(text), model.vocabulary).matcher()
        self.until = -1
        if self.free is not None:
            self.until = self.free.close_id if self.free.thinks else self.free.call_id

    def allowed(self, at, row):
        """The ids that the token may be, given all logits of its position; None: any."""
        if self.until >= 0:
            if self.free.call_id >= 0 or row.argmax() != self.model.end:
                return None
            self.until, self.kinds["refused"] = -1, 1
        mask = np.empty(self.model.vocabulary.words, np.int32)
        self.matcher.fill(mask)
        self.kinds["masked"] += 1
        return allowed_ids(mask)

    def take(self, at, token):
        free = self.free
        if self.until < 0:
            self.matcher.consume([token])
        if free is None:
            return
        if at == 0 and not free.thinks and token == free.think_id:
            self.until = free.close_id
            self.kinds["thinks"] += 1
        elif self.until >= 0 and token == self.until:
            self.until = free.call_id if token == free.close_id else -1
            self.kinds["gates"] += 1
            if self.until < 0:
                self.matcher.consume([token])


def check(demo, model, constraint, output):
    prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
    with torch.inference_mode():
        logits = demo.model(torch.tensor([[*prompt, *tokens]])).logits[0].float().numpy()
    found = Check(model, constraint)
    for at, token in enumerate(tokens):
        row = logits[len(prompt) - 1 + at]
        ids = found.allowed(at, row)
        ids = np.arange(len(row)) if ids is None else ids
        demo.positions += 1
        if len(ids) > 1 and np.diff(np.sort(row[ids])[-2:])[0] < TIE:
            demo.ties += 1
        else:
            assert token == ids[row[ids].argmax()], f"token {at} of {tokens}, {constraint}"
        if token == model.end:
            assert at == len(tokens) - 1
            break
        found.take(at, token)
    return found.kinds


async def answers(model, **changes):
    changes = {"skip_tokenizer_init": False, **changes}
    async with engine(model.directory, **changes) as llm:
        requests = [
            collect(
                llm,
                {"prompt_token_ids": prompt},
                SamplingParams.for_model(
                    structured_outputs=CONSTRAINTS[n % len(CONSTRAINTS)],
                    temperature=0,
                    max_tokens=SAID,
                    logprobs=1 if n % 3 == 0 else None,
                ),
            )
            for n, prompt in enumerate(model.prompts)
        ]
        outputs = await asyncio.gather(*requests)
        return outputs, await llm.statistics()


@schedules(usual=["token by token", "preempted"])
def test_what_is_free_is_as_without_a_grammar(demo, model, schedule):
    outputs, figures = asyncio.run(answers(model, **schedule.changes))
    kinds = collections.Counter()
    for number, output in enumerate(outputs):
        constraint = CONSTRAINTS[number % len(CONSTRAINTS)]
        if constraint is not None:
            kinds += check(demo, model, constraint, output)
    demo.conclude()
    assert min(kinds[name] for name in ("gates", "thinks", "refused", "masked")) > 0, kinds
    schedule.check(figures)


def test_thoughts_take_a_step_for_each_token(model):
    """Those that nothing closes take as many as without a grammar."""

    async def steps(constraint):
        async with engine(model.directory, skip_tokenizer_init=False, pipeline_depth=2) as llm:
            params = SamplingParams.for_model(
                structured_outputs=constraint,
                max_tokens=60,
                temperature=0,
                logit_bias={model.close: -100, model.end: -100},
            )
            output = await collect(llm, {"prompt_token_ids": model.prompts[0]}, params)
            assert output.outputs[0].finish_reason == "length"
            return (await llm.statistics())["scheduler"]["actor"]["steps"]

    async def main():
        return await steps(COMPACT | {"thoughts": "open"}), await steps(None)

    thoughts, free = asyncio.run(main())
    assert thoughts <= free + 2  # a last one may be planned, or not, before the end is known
