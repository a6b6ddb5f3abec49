"""A prompt has the same ids wherever it is encoded; a request's jobs are those since a restart."""

import queue

import pytest

from nanoactor.errors import InvalidRequest
from nanoactor.text import prompt_encoder
from nanoactor.text.prompt_encoder import PromptEncoder
from nanoactor.text.template_jobs import TemplateJobs
from nanoactor.text.tokenizer import TextEncoder
from tests.api.test_admission import submit
from tests.text.tokenizers_for_tests import DEMO

TEXT = "To be, or not to be"
WORDS = ("question", "noble")


class Templates:
    """Stands where a `RenderQueue` does, over a tokenizer of its own."""

    def __init__(self):
        self.encoder, self.jobs, self.cancelled = TextEncoder(DEMO), [], []

    def encode(self, number, pieces, done):
        self.jobs.append(number)
        done(self.encoder.encode(pieces))

    def render(self, number, messages, options, done):
        self.jobs.append(number)

    def cancel(self, number):
        self.cancelled.append(number)

    def cancel_all(self):
        self.cancelled.append("all")


@pytest.fixture
def prompts():
    found = PromptEncoder(TextEncoder(DEMO), TemplateJobs(Templates()))
    yield found
    found.close()


@pytest.mark.parametrize("where", ["at once", "on the thread", "in the process"])
@pytest.mark.parametrize("kind", ["text", "chat", "ids"])
def test_ids_do_not_depend_on_where_they_are_found(prompts, monkeypatch, where, kind):
    text = TEXT if kind != "ids" else None
    given = {kind: TEXT} if text else {"tokens": (3, 4)}
    event = submit(**given, bad_words=WORDS)
    if where == "on the thread":
        monkeypatch.setattr(prompt_encoder, "LONG_TEXT", -1)
    prompts._encoder.is_bounded = where != "in the process"
    texts = prompts.texts_of(event, text)
    assert prompts.is_quick(texts) == (where == "at once")
    if where == "at once":
        found = prompts.encode(texts)
    else:
        results = queue.SimpleQueue()
        prompts.encode_later(7, texts, results.put)
        found = results.get(timeout=10)
    encoder = TextEncoder(DEMO)
    expected = encoder.encode_text(TEXT, special=kind == "text").tolist()
    assert found.prompt.tolist() == (expected if text else [3, 4])
    assert found.words == {
        word: encoder.encode_text(word, special=False).tolist()
        for one in WORDS
        for word in (one, f" {one}")
    }


def test_an_error_is_a_result(prompts):
    found = prompts.encode(prompts.texts_of(submit(), "\ud800"))
    assert isinstance(found, InvalidRequest)


def test_a_restart_gives_other_numbers():
    templates = Templates()
    jobs = TemplateJobs(templates)
    jobs.render(7, "[]", "{}", print)
    jobs.restart()
    jobs.render(7, "[]", "{}", print)
    jobs.cancel(7)
    first, second = templates.jobs
    assert first != second
    assert templates.cancelled == ["all", second]
