"""Encoding of a request's prompt and bad words to token ids: at once, on a thread, or in another
process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoactor.messages.engine import Int32, Submit
from nanoactor.runtime.native import native_calls
from nanoactor.runtime.worker_thread import WorkerThread
from nanoactor.text.bad_words import spellings
from nanoactor.text.patterns import LONG_TEXT
from nanoactor.text.renderer import Done
from nanoactor.text.template_jobs import TemplateJobs

if TYPE_CHECKING:
    from nanoactor.text.tokenizer import Piece, TextEncoder


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a request's prompt and, by spelling, of its bad words."""

    prompt: Int32
    words: Mapping[str, Sequence[int]]


class PromptTexts:
    """The texts of one request that must be encoded: its prompt, unless it is given as token ids,
    and the spellings of its bad words."""

    def __init__(self, encoder: TextEncoder, event: Submit, text: str | None) -> None:
        """`text` is the prompt, rendered if it is a conversation; None if the prompt is given as
        token ids."""
        self._encoder, self._text = encoder, text
        self._is_chat, self._given_ids = bool(event.chat), event.token_ids.copy()
        self._words = spellings(event.bad_words)
        prompt: list[Piece] = []
        if text is not None:
            prompt = encoder.split_rendered(text) if self._is_chat else [(text, True)]
        self._num_prompt_pieces = len(prompt)
        self.pieces = [*prompt, *((word, False) for word in self._words)]
        """The pieces of the prompt, then the spellings of the bad words."""

    @property
    def length(self) -> int:
        """Length of the prompt's text, in characters."""
        return len(self._text or "")

    def encode(self) -> Encoded:
        """Encode the texts. Raises the errors of `TextEncoder.encode`."""
        return self.join(self._encoder.encode(self.pieces))

    def join(self, ids: Sequence[Sequence[int]]) -> Encoded:
        """Return the token ids of the request. `ids` are the token ids of each of `pieces`."""
        own, spelt = ids[: self._num_prompt_pieces], ids[self._num_prompt_pieces :]
        if self._text is None:
            prompt = self._given_ids
        elif self._is_chat:
            prompt = self._encoder.join_pieces(self._text, own)
        else:
            prompt = np.array(own[0], np.int32)
        return Encoded(prompt, dict(zip(self._words, spelt, strict=True)))


class PromptEncoder:
    """Encodes the texts of requests: short ones at once, and long ones on a worker thread. If the
    tokenizer's run time is not bounded, all are encoded in the template process. Used by the
    tokenizer actor."""

    def __init__(self, encoder: TextEncoder, jobs: TemplateJobs) -> None:
        self._encoder, self._jobs = encoder, jobs
        self._long_texts = WorkerThread("long texts")

    def texts_of(self, event: Submit, text: str | None) -> PromptTexts:
        """Return the texts of a request whose prompt is `text`; None if it is given as token
        ids."""
        return PromptTexts(self._encoder, event, text)

    def is_quick(self, texts: PromptTexts) -> bool:
        """Return True if encoding the texts takes too little time to block an event loop."""
        return self._encoder.is_bounded and texts.length <= LONG_TEXT

    def encode(self, texts: PromptTexts) -> Encoded | Exception:
        """Encode texts at once. Return the token ids or the error."""
        return _result_of(texts.encode)

    def encode_later(self, uid: int, texts: PromptTexts, done: Done) -> None:
        """Encode the texts of a request on the worker thread or in the template process. `done` is
        called on another thread, with the result of `encode` or `Cancelled`.

        Raises `RuntimeError` if the thread cannot be started.
        """
        if self._encoder.is_bounded:
            self._long_texts.put(texts.encode, done)
        else:
            self._jobs.encode(uid, texts.pieces, lambda found: done(_joined(texts, found)))

    def close(self) -> None:
        """Stop the worker thread."""
        self._long_texts.close()


def _joined(texts: PromptTexts, found: Any) -> Encoded | Exception:
    """Return the token ids of a request. `found` are those of its pieces, or an error, which is
    returned."""
    return found if isinstance(found, Exception) else _result_of(lambda: texts.join(found))


def _result_of(work: Callable[[], Encoded]) -> Encoded | Exception:
    try:
        with native_calls():
            return work()
    except Exception as error:
        return error
