"""Admission of requests that the tokenizer actor has encoded, and their rejection."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from nanoactor.admission.admission import Admission
from nanoactor.errors import InvalidRequest, OutOfResources, out_of_resources
from nanoactor.grammar.freeing import FreeTextSplitter
from nanoactor.media.prompt import VisualItem
from nanoactor.messages.engine import Admit, Reject, Submit, TokenRules
from nanoactor.models.sampling.columns import split_rows
from nanoactor.runtime.errors import is_out_of_resources
from nanoactor.text.bad_words import check_tokens_remain, with_bad_words
from nanoactor.text.prompt_encoder import Encoded
from nanoactor.vision.placing import ItemPlacer

# Maximum length of a rejection's reason, in characters; a chat template's error may quote the
# prompt.
_MAX_REASON_CHARS = 2000


class TokenizedAdmission:
    """Converts encoded requests to `Admit` messages: places their images, converts their bad
    words to token ids, and separates free text from their grammars. Used by the tokenizer actor."""

    def __init__(
        self, admission: Admission, placer: ItemPlacer, free_text: FreeTextSplitter
    ) -> None:
        self._admission, self._placer, self._free_text = admission, placer, free_text

    def admit(
        self, event: Submit, encoded: Encoded, visual: Sequence[VisualItem], worker: int
    ) -> Admit:
        """Return the `Admit` message of a request. `visual` are its images and videos, and
        `worker` is the index of the vision worker that has them. Raises `InvalidRequest` if the
        request cannot be admitted."""
        prompt = encoded.prompt[-event.keep_last :]
        tokens, items = self._placer.place(prompt, visual, worker)
        spec = self._admission.check(tokens, event)
        rules = _rules(event, encoded.words)
        grammar, free = self._free_text.split(spec.grammar)
        spec = dataclasses.replace(spec, rules=rules, grammar=grammar)
        return self._admission.admit(event, spec, tokens, items, free)


def _rules(event: Submit, words: Mapping[str, Sequence[int]]) -> TokenRules | None:
    """Return the token rules of a request, including the ids of its bad words; None if it has no
    rules. Raises `InvalidRequest` if the rules leave no choice for the first token."""
    if event.spec.rules is None:
        return None
    rules = with_bad_words(event.spec.rules, event.bad_words, words.__getitem__)
    check_tokens_remain(rules, event.spec.stopping)
    return rules


def rejection(event: Submit, error: Exception | None) -> Reject:
    """Return the message that rejects a request with `error`, or that ends it as aborted if `error`
    is None."""
    if error is not None and is_out_of_resources(error):
        error = out_of_resources(error)
    reason, refused = "", isinstance(error, OutOfResources)
    if isinstance(error, InvalidRequest | OutOfResources):
        reason = str(error)
    elif error is not None:
        reason = f"the prompt cannot be tokenized: {error!r}"
    answers = len(split_rows(event.spec.sampling))
    return Reject(event.uid, reason[:_MAX_REASON_CHARS], answers, refused)
