"""The tokenizer actor, which converts prompts to token ids and block hashes, or rejects
requests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nanoactor.admission.admission import Admission
from nanoactor.admission.held import HeldRequests
from nanoactor.admission.tokenized import TokenizedAdmission, rejection
from nanoactor.errors import InvalidRequest
from nanoactor.grammar.freeing import FreeTextSplitter
from nanoactor.kv.hashing import block_hashes
from nanoactor.messages.engine import Abort, Submit
from nanoactor.messages.vision import ItemsRead
from nanoactor.runtime.actor import Actor, Context, Handler, ReadyInfo
from nanoactor.runtime.native import native_calls
from nanoactor.setup.actors import ActorConfig, RunnerReady, encoder_limits, render_options
from nanoactor.text.prompt_encoder import Encoded, PromptEncoder
from nanoactor.text.renderer import Cancelled, RenderQueue
from nanoactor.text.template_jobs import TemplateJobs
from nanoactor.vision.placing import ItemPlacer

_DUMMY_TEXT = (
    "Speak the speech, I pray you, as I pronounced it to you, trippingly on the tongue. " * 8
)


class TokenizerActor(Actor):
    """Actor that tokenizes submitted requests and sends them to the scheduler. After a restart, the
    frontend submits unanswered requests again."""

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._requests = 0
        self._tokens = 0
        self._jobs: TemplateJobs | None = None
        self._prompts: PromptEncoder | None = None
        self._free_text = FreeTextSplitter(config.files.has_slot_state, self._id_of)
        self._held = HeldRequests()

    def setup(self) -> None:
        """Load the tokenizer and the chat template at startup, so that broken ones are detected
        early."""
        directory = self._config.files.tokenizer_directory
        if directory is not None:
            from nanoactor.text.tokenizer import TextEncoder

            limits = render_options(self._config.engine, self._config.files)
            self._jobs = TemplateJobs(RenderQueue(directory, limits))
            self._encoder = TextEncoder(directory, self._config.files.placeholders)
            self._prompts = PromptEncoder(self._encoder, self._jobs)
            self._jobs.check_template()

    def reset(self) -> None:
        """Forget all requests, but keep the tokenizer and the template process."""
        if self._jobs is not None:
            self._jobs.restart()
        self._held = HeldRequests()

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Set the limits on requests and images according to the size of the KV and encoder
        caches that the runners have allocated."""
        super().start(context, ready)
        cache = RunnerReady.find(ready)
        files, salt = self._config.files.fit_to_cache(cache.capacity_tokens), self._config.salt
        self._config = dataclasses.replace(self._config, files=files)
        self._block_size = cache.block_size
        admission = Admission(files, salt, cache.block_size)
        placer = ItemPlacer(files, encoder_limits(self._config, cache), self._encode)
        self._admission = TokenizedAdmission(admission, placer, self._free_text)

    def _id_of(self, tag: str) -> int | None:
        return self._encoder.id_of(tag)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoder.encode_text(text, special=False).tolist()
        return ids

    def handlers(self) -> Mapping[type, Handler]:
        """Return the handlers of requests, of aborts, and of the keys (content hashes) and sizes of
        images."""
        return {Submit: self._on_submit, Abort: self._on_abort, ItemsRead: self._on_items_read}

    def span_names(self) -> Mapping[type, str]:
        """Return the trace span name for processing a prompt."""
        return {Submit: "tokenize"}

    def _on_submit(self, event: Submit) -> None:
        if event.chat is None:
            self._encode_text(event, event.text)
            return
        assert self._jobs is not None
        own = self.context.owned_copy(event)  # it outlives this handler
        try:
            self._jobs.check_options(event.chat_options)
        except InvalidRequest as error:
            self._refuse(own, error)
            return
        done = functools.partial(self.context.call_soon, self._on_rendered, own)
        hide = self._encoder.hide_placeholders
        self._jobs.render(event.uid, hide(event.chat), hide(event.chat_options), done)

    def _on_rendered(self, event: Submit, result: str | Exception) -> None:
        if isinstance(result, str):
            self._encode_text(event, result)
        else:
            self._finish(event, result)

    def _encode_text(self, event: Submit, text: str | None) -> None:
        """Encode the prompt and the bad words of a request; a prompt of token ids is used as it
        is."""
        if text is None and not event.bad_words:  # there may be no tokenizer at all
            self._finish(event, Encoded(event.token_ids.copy(), {}))
            return
        assert self._prompts is not None
        texts = self._prompts.texts_of(event, text)
        if self._prompts.is_quick(texts):
            self._finish(event, self._prompts.encode(texts))
            return
        own = self.context.owned_copy(event)
        done = functools.partial(self.context.call_soon, self._finish, own)
        try:
            self._prompts.encode_later(event.uid, texts, done)
        except RuntimeError as error:  # no thread can be started
            self._finish(event, error)

    def _on_abort(self, event: Abort) -> None:
        if self._jobs is not None:
            self._jobs.cancel(event.uid)
        if (held := self._held.pop(event.uid)) is not None:
            self._refuse(held)

    def _on_items_read(self, event: ItemsRead) -> None:
        for submit, result in self._held.release(event):
            self._finish(submit, result)

    def _finish(self, event: Submit, result: Encoded | Exception) -> None:
        if isinstance(result, Cancelled):
            self._refuse(event)
            return
        if not self._held.has_items(event):
            self._held.hold(self.context.owned_copy(event), result)
            return
        try:
            with native_calls():
                if isinstance(result, Exception):
                    raise result
                visual, worker = self._held.collect(event), self._held.worker_of(event)
                admit = self._admission.admit(event, result, visual, worker)
        except Exception as error:  # no prompt may crash the engine
            self._refuse(event, error)
            return
        self._held.forget(event)
        self._requests += 1
        self._tokens += len(admit.token_ids)
        self.context.outbox("scheduler").send(admit)

    def _refuse(self, event: Submit, error: Exception | None = None) -> None:
        """Reject a request with `error`, or end it as aborted if `error` is None."""
        self._held.forget(event)
        self.context.outbox("scheduler").send(rejection(event, error))

    def rehearse(self) -> Iterator[object]:
        """Tokenize a dummy text and hash dummy blocks, to warm up the CPU caches. If texts have to
        be encoded in another process, none is tokenized here."""
        if self._config.files.tokenizer_directory is not None and self._encoder.is_bounded:
            yield self._encoder.encode_text(_DUMMY_TEXT)
        yield block_hashes(np.zeros(512, np.int32), self._block_size, bytes(16))

    def stop(self) -> None:
        """Stop the worker thread and the template process."""
        if self._prompts is not None:
            self._prompts.close()
        if self._jobs is not None:
            self._jobs.close()

    def statistics(self) -> dict[str, Any]:
        """Return the numbers of prompts and tokens since the start, and the number of requests that
        wait for images (`held`)."""
        return {
            "requests": self._requests,
            "tokens": self._tokens,
            "held": len(self._held),
        }
