"""The frontend: who tokenizes a request, and what becomes of one with several answers."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nanoactor.actors.frontend import FrontendActor
from nanoactor.admission.untokenized import UntokenizedRequests
from nanoactor.errors import InvalidRequest
from nanoactor.messages.engine import (
    Abort,
    Admit,
    Opened,
    OutputDelta,
    RequestSpec,
    Stopping,
    Submit,
    Terminal,
    TextOptions,
)
from nanoactor.messages.scores import TokenScores, ToldScores
from nanoactor.model_files.files import ModelFiles
from nanoactor.model_files.generation_config import GenerationConfig
from nanoactor.options.config import EngineConfig
from nanoactor.recovery.journal import Entry
from nanoactor.requests.outputs import RequestOutputKind
from nanoactor.setup.actors import ActorConfig, RunnerReady


def new_frontend():
    engine = EngineConfig("any", num_tokenizers=1, max_waiting_tokens=10**9)
    files = ModelFiles(
        Path(),
        SimpleNamespace(vocab_size=100, vision=None),
        generation=GenerationConfig({}),
        eos_token_ids=(),
        max_model_len=100,
        tokenizer_directory=None,
        hf_tokenizer_directory=Path(),
    )
    return FrontendActor(ActorConfig(engine, files, b""))


def test_long_prompts_never_stand_before_short_ones_at_the_first_tokenizer():
    requests = UntokenizedRequests(3)
    assert requests.choose_tokenizer(100) == 0
    assert requests.choose_tokenizer(1_000_000) == 1
    requests.add(0, 1, 10**9)
    requests.add(1, 2, 10**9)
    assert requests.choose_tokenizer(1_000_000) == 1
    assert requests.choose_tokenizer(100) == 0
    alone = UntokenizedRequests(1)
    assert alone.choose_tokenizer(1_000_000) == 0


class Outbox:
    """Keeps what is sent."""

    ready = True

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)


def started(answers, text=None, **asked):
    """(a frontend with one request of so many answers, its entry, what it has sent)."""
    frontend, outboxes = new_frontend(), {}
    track = SimpleNamespace(kind=lambda *names: 0, add=lambda *span: None)
    context = SimpleNamespace(track=track, outbox=lambda name: outboxes.setdefault(name, Outbox()))
    frontend.start(context, {"runner.0": RunnerReady(8, 16, "float32", "cpu")})
    prompt = np.array([] if text else [1, 2, 3], np.int32)
    spec = RequestSpec(0, b"", Stopping(9, 0, (), ()), TextOptions((), False, True, 0), **asked)

    def make(uid):
        submit = Submit(uid, spec, text, None, "", prompt)
        return Entry("one", submit, RequestOutputKind.CUMULATIVE, answers=answers)

    return frontend, frontend.submit(make), outboxes


def delivered(frontend, *terminals, opened=(), scores=None, tokens=()):
    """Have news arrive; `tokens` are (uid, text, token) of one token each."""
    uids, texts, ids = zip(*tokens, strict=True) if tokens else ((), (), ())
    counts = np.ones(len(ids), np.int32)
    new = np.array(uids, np.int64), list(texts), counts, np.array(ids, np.int32)
    frontend._deliver(OutputDelta(1, opened, *new, terminals, scores))


def terminal(uid, reason):
    return Terminal(uid, reason, None, "because" * (reason == "error"), 0, 0, 0, 0, -1)


def test_the_error_of_one_answer_ends_the_others():
    frontend, entry, outboxes = started(4)
    delivered(frontend, terminal(2, "length"), terminal(1, "error"))
    sent = outboxes["scheduler"].sent
    assert [(type(message), message.uid) for message in sent] == [
        (Admit, 0),
        (Abort, 0),
        (Abort, 3),
    ]
    with pytest.raises(InvalidRequest, match="because"):
        entry.raise_error()
    assert frontend.journal.find_by_id("one") is entry
    delivered(frontend, terminal(0, "abort"), terminal(3, "error"))
    assert frontend.journal.find_by_id("one") is None
    assert not frontend.has_work
    assert frontend.statistics()["waiting_requests"] == frontend.statistics()["waiting_tokens"] == 0
    assert len(outboxes["scheduler"].sent) == 3


def test_what_is_told_of_an_answer_counts_until_its_own_end():
    """Its sibling has failed, and the request with it: the answer goes on until it is aborted."""
    frontend, entry, _ = started(2, prompt_logprobs=0)
    delivered(frontend, opened=(Opened(0, np.array([1, 2, 3], np.int32)),))
    delivered(frontend, terminal(1, "error"))
    assert entry.error is not None
    delivered(frontend, scores=prompt_scores(0, 2), tokens=[(0, "x", 9), (1, "y", 8)])
    assert [list(answer.token_ids) for answer in entry.answers] == [[9], []]
    assert len(entry._prompt_logprobs.values) == 3
    delivered(frontend, terminal(0, "abort"), tokens=[(0, "z", 7)])
    assert list(entry.answers[0].token_ids) == [9, 7]
    assert not frontend.has_work


def test_a_request_ends_with_its_last_answer():
    frontend, entry, _ = started(2)
    delivered(frontend, terminal(1, "stop"))
    assert not entry.is_over
    assert not entry.ended.is_set()
    delivered(frontend, terminal(0, "stop"))
    assert entry.is_over
    assert entry.ended.is_set()


def prompt_scores(uid, count):
    """Log-probabilities of so many tokens of a prompt."""
    ids, reals = np.zeros(count, np.int32), np.zeros(count, np.float32)
    scores = TokenScores(reals, ids, ids, ids[:0], reals[:0])
    run = np.array([uid]), np.array([True]), np.array([count], np.int32)
    return ToldScores(*run, ids, b"", ids, scores)


def test_an_abort_before_the_prompt_is_known_stays_an_abort():
    frontend, entry, _ = started(1, text="abc", prompt_logprobs=0)
    frontend.abort(entry)
    frontend.end_for_reader(entry)
    opened = Opened(0, np.array([5, 6, 7], np.int32))
    delivered(frontend, opened=(opened,), scores=prompt_scores(0, 2))
    entry.raise_error()
    assert entry.answers[0].terminal.reason == "abort"
    delivered(frontend, terminal(0, "abort"))
    assert not frontend.has_work
    assert frontend.statistics()["waiting_requests"] == frontend.statistics()["waiting_tokens"] == 0
