"""Log-probabilities in OpenAI's formats for completions and chats, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanoactor.requests.outputs import CompletionOutput, Logprob, Logprobs
from nanoactor.text.spans import Spans

Shape = dict[str, Any]


def spelled(token: int, logprob: Logprob, as_ids: bool) -> str:
    """Return a token's text, or its id if `as_ids` or if its bytes are unknown. Bytes that are not
    valid UTF-8 are escaped as in OpenAI's API, so that no two tokens are spelled alike."""
    if as_ids or logprob.bytes is None:
        return f"token_id:{token}"
    try:
        return logprob.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in logprob.bytes)


def cut(told: Logprobs, token: int, most: int) -> Logprobs:
    """Return the entries of the token itself and of the `most` likeliest tokens."""
    return {
        other: one
        for other, one in told.items()
        if other == token or (one.rank is not None and one.rank <= most)
    }


class TextLogprobs:
    """Log-probabilities of one choice of a completion, available in pieces and as a whole."""

    def __init__(self, most: int, as_ids: bool, spans: Spans = (b"", [])) -> None:
        """`most` is the number of likeliest tokens reported at each position. If `as_ids`, tokens
        are reported by id. `spans` are the spans of the prompt's tokens if it is echoed."""
        self._most, self._as_ids, self._spans = most, as_ids, spans
        self._echoed = 0
        self._pending = _no_text()
        self._all = _no_text()

    def add_prompt(
        self, ids: Sequence[int], logprobs: Sequence[Logprobs | None], echo: str
    ) -> None:
        """Add the log-probabilities of the prompt that the choice starts with."""
        first, starts = self._spans
        for token, told, start in zip(ids, logprobs, starts, strict=True):
            own = Logprob(0.0, bytes=first) if told is None else told[token]
            self._add(token, own, told, start)
        self._echoed = len(echo)

    def add(self, completion: CompletionOutput) -> None:
        """Add the log-probabilities of new tokens."""
        told, offsets = completion.logprobs or [], completion.text_offsets or []
        for token, logprobs, offset in zip(completion.token_ids, told, offsets, strict=True):
            self._add(token, logprobs[token], logprobs, self._echoed + offset)

    def _add(self, token: int, own: Logprob, told: Logprobs | None, offset: int) -> None:
        shape = self._pending
        shape["tokens"].append(spelled(token, own, self._as_ids))
        shape["token_logprobs"].append(None if told is None else own.logprob)
        shape["text_offset"].append(offset)
        top: dict[str, float] | None = None
        for other, logprob in cut(told or {}, token, self._most).items():
            top = top or {}
            name = spelled(other, logprob, self._as_ids)
            top[name] = max(logprob.logprob, top.get(name, logprob.logprob))
        shape["top_logprobs"].append(top)

    def take(self) -> Shape | None:
        """Return the new entries, or None if there are none."""
        if not self._pending["tokens"]:
            return None
        new, self._pending = self._pending, _no_text()
        for name, values in new.items():
            self._all[name] += values
        return new

    def whole(self) -> Shape:
        """Return all entries that `take` has returned."""
        return self._all


def _no_text() -> Shape:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class ChatLogprobs:
    """Log-probabilities of a chat message, available in pieces and as a whole."""

    def __init__(self, most: int, as_ids: bool) -> None:
        """`most` is the number of likeliest tokens reported at each position."""
        self._most, self._as_ids = most, as_ids
        self._pending: list[Shape] = []
        self._all: list[Shape] = []

    def add(self, completion: CompletionOutput) -> None:
        """Add the log-probabilities of new tokens."""
        told = completion.logprobs or []
        for token, logprobs in zip(completion.token_ids, told, strict=True):
            likeliest = sorted(logprobs.items(), key=lambda item: item[1].rank or 0)
            top = [self._shape(*item) for item in likeliest[: self._most]]
            self._pending.append(self._shape(token, logprobs[token]) | {"top_logprobs": top})

    def _shape(self, token: int, logprob: Logprob) -> Shape:
        replaced = logprob.decoded_token
        return {
            "token": replaced if replaced and not self._as_ids else spelled(token, logprob, True),
            "logprob": logprob.logprob,
            "bytes": None if logprob.bytes is None else list(logprob.bytes),
        }

    def take(self) -> Shape | None:
        """Return the new entries, or None if there are none."""
        if not self._pending:
            return None
        new, self._pending = self._pending, []
        self._all += new
        return {"content": new, "refusal": None}

    def whole(self) -> Shape:
        """Return all entries that `take` has returned."""
        return {"content": self._all, "refusal": None}


def of_prompt(
    ids: Sequence[int], logprobs: Sequence[Logprobs | None], most: int
) -> list[Shape | None]:
    """Return the log-probabilities of a prompt in vLLM's format: a dict by token id for each token,
    or None for a token without log-probabilities."""
    pairs = zip(ids, logprobs, strict=True)
    return [None if told is None else _by_id(cut(told, token, most)) for token, told in pairs]


def _by_id(told: Logprobs) -> Shape:
    return {
        str(token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
        for token, one in told.items()
    }
