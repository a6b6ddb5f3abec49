"""Admission of tokenized requests: checks, and the messages that admit them to the scheduler."""

from __future__ import annotations

import dataclasses

import numpy as np

from nanoactor.errors import InvalidRequest
from nanoactor.kv.hashing import block_hashes
from nanoactor.media.prompt import block_extras
from nanoactor.messages.engine import Admit, FreeText, Int32, RequestSpec, Submit
from nanoactor.messages.vision import Items
from nanoactor.model_files.files import ModelFiles

DIRECT_TOKENS = 4096
"""Maximum number of tokens of a request that the frontend admits without the tokenizer process.
Hashing more would block the user's event loop for too long."""
_NO_TOKENS = np.empty(0, np.int32)


class Admission:
    """Converts `Submit` messages to `Admit` messages, after checking the request. Used by the
    frontend and the tokenizers."""

    def __init__(self, files: ModelFiles, salt: bytes, block_size: int) -> None:
        self._limit, self._vocabulary = files.max_model_len, files.config.vocab_size
        vision = files.config.vision
        self._placeholders = (vision.image_token_id, vision.video_token_id) if vision else ()
        self._salt, self.block_size = salt, block_size

    def direct(self, submit: Submit) -> Admit | None:
        """Return the `Admit` message of a request that can skip the tokenizer process; None if it
        cannot. Also returns None for an invalid request, so that the tokenizer reports the
        error."""
        tokens, spec = submit.token_ids, submit.spec
        if submit.text is not None or submit.chat is not None or spec.grammar:
            return None
        if spec.rules or submit.bad_words or submit.item_times:
            return None
        if len(tokens) + len(_resumed_tokens(submit)) > DIRECT_TOKENS:
            return None
        if self._placeholders and np.isin(tokens, self._placeholders).any():
            return None
        try:
            spec = self.check(tokens, submit)
        except InvalidRequest:
            return None
        return self.admit(submit, spec, tokens)

    def admit(
        self,
        submit: Submit,
        spec: RequestSpec,
        tokens: Int32,
        items: Items | None = None,
        free: FreeText | None = None,
    ) -> Admit:
        """Return the `Admit` message of a request. `tokens` are its prompt tokens (int32), and
        `spec` is what `check` returned for them."""
        extras = block_extras(items, self.block_size) if items else {}
        return Admit(
            uid=submit.uid,
            spec=spec,
            token_ids=np.concatenate((tokens, _resumed_tokens(submit))),
            prompt_length=len(tokens),
            hashes=block_hashes(tokens, self.block_size, self._salt, extras=extras),
            items=items,
            free=free,
        )

    def check(self, tokens: Int32, submit: Submit) -> RequestSpec:
        """Return the options of a request with these prompt tokens. `max_tokens` is filled in if it
        is 0, and reduced to what fits if `clamp_max_tokens` is True. Raises `InvalidRequest` if the
        prompt, or the output emitted so far, violates a limit."""
        limit, stopping = self._limit, submit.spec.stopping
        if not len(tokens):
            raise InvalidRequest("the prompt is empty; it must have at least one token")
        check_length(len(tokens), limit, pools=submit.spec.pools)
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            invalid = int(tokens[(tokens < 0) | (tokens >= self._vocabulary)][0])
            raise InvalidRequest(
                f"token id {invalid} is outside the vocabulary of {self._vocabulary} ids (0 to "
                f"{self._vocabulary - 1})"
            )
        if submit.spec.pools:
            return submit.spec
        room = limit - len(tokens)
        if stopping.clamp_max_tokens:
            stopping = dataclasses.replace(stopping, max_tokens=min(stopping.max_tokens, room))
        for name in ("max_tokens", "min_tokens"):
            if (requested := getattr(stopping, name)) > room:
                raise InvalidRequest(
                    f"{name} is {requested}, but after a prompt of {len(tokens)} tokens, "
                    f"max_model_len ({limit}) leaves room for only {room}"
                )
        max_tokens = stopping.max_tokens or room
        if (resumed := len(_resumed_tokens(submit))) > max_tokens:
            raise InvalidRequest(
                f"so_far has {resumed} tokens, but max_tokens and max_model_len limit the "
                f"output to {max_tokens} tokens"
            )
        stopping = dataclasses.replace(stopping, max_tokens=max_tokens)
        return dataclasses.replace(submit.spec, stopping=stopping)


def check_length(tokens: int, limit: int, *, pools: bool) -> None:
    """Raise `InvalidRequest` if a prompt of `tokens` tokens exceeds `limit`. If `pools` is False,
    the request generates text, and there must also be room for one output token."""
    if tokens + (not pools) <= limit:
        return
    max_length = f"{limit}" if pools else f"{limit - 1}, to leave room for one output token"
    raise InvalidRequest(
        f"the prompt has {tokens} tokens, but max_model_len is {limit}, so it may have at most "
        f"{max_length}"
    )


def _resumed_tokens(submit: Submit) -> Int32:
    """Return the output tokens after which a request resumes (int32); empty for a new request."""
    return _NO_TOKENS if submit.output is None else submit.output.token_ids
