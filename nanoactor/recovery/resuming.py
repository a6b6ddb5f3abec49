"""Resumption of requests after a restart, from the output recorded in the journal."""

from __future__ import annotations

import dataclasses

import numpy as np

from nanoactor.messages.engine import Submit, Terminal
from nanoactor.messages.resuming import ToldTokens
from nanoactor.models.sampling.columns import split_rows
from nanoactor.recovery.journal import Answer, Entry

LOST = (
    "a process of the engine has died, and an answer that its caller controls (as in beam "
    "search) cannot be continued after that; send the request again"
)
CHANGED = (
    "a process of the engine has died, and the chat template now renders the conversation "
    "differently, so the answer cannot be continued"
)
POISON = (
    "a process of the engine has died each time the request ran, the last time with no other "
    "request running, so it is not retried. The last process that died was {}"
)


def resume_submits(entry: Entry) -> list[Submit]:
    """Return the `Submit` messages that resume an unfinished request. If nothing was emitted, this
    is the original message. Otherwise each unfinished sequence resumes separately after its emitted
    tokens. Random numbers depend on the position, so sampling continues as it would have without
    the restart."""
    spec = entry.submit.spec
    prompt_logprobs = -1 if entry.has_prompt_logprobs else spec.prompt_logprobs
    if not any(answer.token_ids or answer.terminal for answer in entry.answers):
        spec = dataclasses.replace(spec, prompt_logprobs=prompt_logprobs)
        return [dataclasses.replace(entry.submit, spec=spec)]
    live = [uid for uid in entry.uids if entry.answer(uid).terminal is None]
    return [_resume_submit(entry, uid, prompt_logprobs if uid == live[0] else -1) for uid in live]


def _resume_submit(entry: Entry, uid: int, prompt_logprobs: int) -> Submit:
    spec, answer = entry.submit.spec, entry.answer(uid)
    emitted, characters = _emitted_ids(entry, answer), _emitted_characters(entry, answer)
    spec = dataclasses.replace(
        spec,
        sampling=split_rows(spec.sampling)[answer.index],
        text_options=dataclasses.replace(spec.text_options, delivered=characters),
        prompt_logprobs=prompt_logprobs,
    )
    submit = dataclasses.replace(
        entry.submit,
        uid=uid,
        spec=spec,
        output=ToldTokens(np.array(emitted, np.int32)) if emitted else None,
    )
    if entry.media:  # the text determines where its images belong
        return submit
    prompt = np.array(entry.prompt_token_ids, np.int32)
    return dataclasses.replace(
        submit, text=None, chat=None, chat_options="", token_ids=prompt, keep_last=0
    )


def local_terminal(entry: Entry, uid: int, reason: str, error: str = "") -> Terminal:
    """Return the `Terminal` (end message) of a sequence that ends without a message from the
    detokenizer. `reason` and `error` are as in `Finish`."""
    answer = entry.answer(uid)
    return Terminal(
        uid,
        reason=reason,
        stop_reason=None,
        error=error,
        tokens=len(_emitted_ids(entry, answer)),
        characters=_emitted_characters(entry, answer),
        cached_tokens=0,
        preemptions=0,
        began=-1,
    )


def _emitted_ids(entry: Entry, answer: Answer) -> list[int]:
    """Return the token ids of an answer that were emitted so far, including those emitted by
    another engine."""
    before = entry.submit.output
    return [*(before.token_ids.tolist() if before is not None else ()), *answer.token_ids]


def _emitted_characters(entry: Entry, answer: Answer) -> int:
    """Return the number of characters of an answer's text that were emitted so far, including those
    emitted by another engine."""
    return max(0, entry.submit.spec.text_options.delivered) + sum(map(len, answer.text))
