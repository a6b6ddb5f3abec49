"""Log-probabilities in the formats of responses: OpenAI's for outputs, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanoactor.requests.outputs import CompletionOutput, Logprob, Logprobs
from nanoactor.text.spans import Spans

JsonObject = dict[str, Any]


def token_text(token: int, logprob: Logprob, as_ids: bool) -> str:
    """Return the text of a token as in OpenAI's API, or "token_id:ID" if `as_ids` is set or the
    bytes are unknown. Bytes that are not valid UTF-8 are escaped, so that different tokens have
    different texts."""
    if as_ids or logprob.bytes is None:
        return f"token_id:{token}"
    try:
        return logprob.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in logprob.bytes)


def keep_top(entries: Logprobs, token: int, num_top: int) -> Logprobs:
    """Keep only the entries of the token itself and of the `num_top` likeliest tokens."""
    return {
        other: entry
        for other, entry in entries.items()
        if other == token or (entry.rank is not None and entry.rank <= num_top)
    }


class TextLogprobs:
    """Log-probabilities of one choice of a text completion, returned in parts for a stream or all
    at once."""

    def __init__(self, num_top: int, as_ids: bool, spans: Spans = (b"", [])) -> None:
        """Create an empty collection. `num_top` is the number of likeliest tokens to report per
        position. `as_ids` reports tokens by id. `spans` locates the prompt's tokens, and is
        required only if the prompt is echoed."""
        self._num_top, self._as_ids, self._spans = num_top, as_ids, spans
        self._echoed = 0
        self._pending = _no_entries()
        self._all = _no_entries()

    def add_prompt(
        self, ids: Sequence[int], logprobs: Sequence[Logprobs | None], echo: str
    ) -> None:
        """Add the log-probabilities of the echoed prompt, whose text is `echo`."""
        first_bytes, starts = self._spans
        for token, entries, start in zip(ids, logprobs, starts, strict=True):
            own = Logprob(0.0, bytes=first_bytes) if entries is None else entries[token]
            self._add(token, own, entries, start)
        self._echoed = len(echo)

    def add(self, completion: CompletionOutput) -> None:
        """Add the log-probabilities of an output's new tokens."""
        new_logprobs, offsets = completion.logprobs or [], completion.text_offsets or []
        for token, logprobs, offset in zip(
            completion.token_ids, new_logprobs, offsets, strict=True
        ):
            self._add(token, logprobs[token], logprobs, self._echoed + offset)

    def _add(self, token: int, own: Logprob, entries: Logprobs | None, offset: int) -> None:
        pending = self._pending
        pending["tokens"].append(token_text(token, own, self._as_ids))
        pending["token_logprobs"].append(None if entries is None else own.logprob)
        pending["text_offset"].append(offset)
        top: dict[str, float] | None = None
        for other, logprob in keep_top(entries or {}, token, self._num_top).items():
            top = top or {}
            name = token_text(other, logprob, self._as_ids)
            top[name] = max(logprob.logprob, top.get(name, logprob.logprob))
        pending["top_logprobs"].append(top)

    def pop_new(self) -> JsonObject | None:
        """Return the entries added since the last call, or None if there are none."""
        if not self._pending["tokens"]:
            return None
        new, self._pending = self._pending, _no_entries()
        for name, values in new.items():
            self._all[name] += values
        return new

    def all_entries(self) -> JsonObject:
        """Return all entries that `pop_new` has returned so far."""
        return self._all


def _no_entries() -> JsonObject:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class ChatLogprobs:
    """Log-probabilities of a chat message, returned in parts for a stream or all at once."""

    def __init__(self, num_top: int, as_ids: bool) -> None:
        """Create an empty collection. `num_top` is the number of likeliest tokens to report per
        position. `as_ids` reports tokens by id."""
        self._num_top, self._as_ids = num_top, as_ids
        self._pending: list[JsonObject] = []
        self._all: list[JsonObject] = []

    def add(self, completion: CompletionOutput) -> None:
        """Add the log-probabilities of an output's new tokens."""
        new_logprobs = completion.logprobs or []
        for token, logprobs in zip(completion.token_ids, new_logprobs, strict=True):
            likeliest = sorted(logprobs.items(), key=lambda item: item[1].rank or 0)
            top = [self._entry(*item) for item in likeliest[: self._num_top]]
            self._pending.append(self._entry(token, logprobs[token]) | {"top_logprobs": top})

    def _entry(self, token: int, logprob: Logprob) -> JsonObject:
        decoded = logprob.decoded_token
        return {
            "token": decoded if decoded and not self._as_ids else token_text(token, logprob, True),
            "logprob": logprob.logprob,
            "bytes": None if logprob.bytes is None else list(logprob.bytes),
        }

    def pop_new(self) -> JsonObject | None:
        """Return the entries added since the last call, or None if there are none."""
        if not self._pending:
            return None
        new, self._pending = self._pending, []
        self._all += new
        return {"content": new, "refusal": None}

    def all_entries(self) -> JsonObject:
        """Return all entries that `pop_new` has returned so far."""
        return {"content": self._all, "refusal": None}


def prompt_logprobs(
    ids: Sequence[int], logprobs: Sequence[Logprobs | None], num_top: int
) -> list[JsonObject | None]:
    """Return the log-probabilities of a prompt in vLLM's format: for each token, a dict by token
    id, or None if the token has no log-probabilities."""
    pairs = zip(ids, logprobs, strict=True)
    return [
        None if entries is None else _entries_by_id(keep_top(entries, token, num_top))
        for token, entries in pairs
    ]


def _entries_by_id(entries: Logprobs) -> JsonObject:
    return {
        str(token): {
            "logprob": entry.logprob,
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token, entry in entries.items()
    }
