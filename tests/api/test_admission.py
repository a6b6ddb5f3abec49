"""Requests of token ids, which the frontend admits itself, and what it leaves to a tokenizer."""

import dataclasses

import numpy as np
import pytest

from nanoactor import EngineConfig
from nanoactor.admission.admission import DIRECT_TOKENS, Admission
from nanoactor.kv.hashing import block_hashes
from nanoactor.messages.engine import RequestSpec, Stopping, Submit, TextOptions, TokenRules
from nanoactor.model_files.files import read_model_files

SALT = bytes(range(16))
EMPTY = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def files():
    return dataclasses.replace(read_model_files(EngineConfig("demo")), max_model_len=8192)


def submit(tokens=(5, 6, 7), max_tokens=0, **changes):
    given = dict(
        priority=2,
        sampling=b"sampling",
        stopping=Stopping(max_tokens, 0, (1,), ()),
        text_options=TextOptions(("stop",), False, True, 0),
        logprobs=2,
        prompt_logprobs=1,
        held=True,
    )
    names = {field.name for field in dataclasses.fields(RequestSpec)}
    given |= {name: changes.pop(name) for name in names & changes.keys()}
    prompt = dict(text=None, chat=None, chat_options="", token_ids=np.array(tokens, np.int32))
    return Submit(3, RequestSpec(**given), **{**prompt, **changes})


def test_token_ids_are_admitted_as_a_tokenizer_would(files):
    tokens = range(40)
    told = submit(tokens)
    admit = Admission(files, SALT, 16).direct(told)
    assert admit.token_ids.tolist() == list(tokens)
    assert admit.prompt_length == 40
    stopping = dataclasses.replace(told.spec.stopping, max_tokens=8192 - 40)  # as many as fit
    assert str(admit.spec) == str(dataclasses.replace(told.spec, stopping=stopping))
    assert (admit.hashes == block_hashes(np.arange(40, dtype=np.int32), 16, SALT)).all()
    assert len(admit.hashes) == 2
    assert (admit.uid, admit.items, admit.free) == (3, None, None)


RULES = TokenRules(np.array([1], np.int32), EMPTY, EMPTY.astype(np.float32), EMPTY, EMPTY)


@pytest.mark.parametrize(
    "changes",
    [
        dict(text="To be"),
        dict(chat="[]"),
        dict(grammar="{}"),
        dict(rules=RULES),
        dict(bad_words=("no",)),
        dict(item_times=((),)),
        dict(tokens=[1] * (DIRECT_TOKENS + 1)),
        # What is wrong the tokenizer tells, as ever.
        dict(tokens=[]),
        dict(tokens=[5, 1 << 20]),
        dict(tokens=[5, -1]),
        dict(max_tokens=8192),
    ],
    ids=str,
)
def test_what_only_a_tokenizer_can_do_or_refuse_is_left_to_it(files, changes):
    assert Admission(files, SALT, 16).direct(submit(**changes)) is None


def test_placeholders_of_images_are_left_to_a_tokenizer_which_refuses_them():
    files = read_model_files(EngineConfig("demo-vl"))
    admission, vision = Admission(files, SALT, 16), files.config.vision
    assert admission.direct(submit([5, 6])) is not None
    for placeholder in (vision.image_token_id, vision.video_token_id):
        assert admission.direct(submit([5, placeholder])) is None
