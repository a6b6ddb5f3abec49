"""The tokenizer actor, which converts prompts to token ids and block hashes, or rejects
requests."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoactor.admission.admission import Admission
from nanoactor.errors import InvalidRequest, OutOfResources, out_of_resources
from nanoactor.grammar.freeing import split_free_text
from nanoactor.kv.hashing import block_hashes
from nanoactor.media.prompt import VisualItem, expand_prompt, items_message
from nanoactor.messages.engine import Abort, Admit, FreeText, Int32, Reject, Submit, TokenRules
from nanoactor.messages.vision import Items, ItemsRead
from nanoactor.models.sampling.columns import split_rows
from nanoactor.runtime.actor import Actor, Context, Handler, ReadyInfo
from nanoactor.runtime.errors import is_out_of_resources
from nanoactor.runtime.native import native_calls
from nanoactor.runtime.worker_thread import WorkerThread
from nanoactor.setup.actors import ActorConfig, RunnerReady, encoder_limits, render_options
from nanoactor.text.bad_words import check_tokens_remain, spellings, with_bad_words
from nanoactor.text.patterns import LONG_TEXT
from nanoactor.text.renderer import Cancelled, RenderQueue
from nanoactor.text.template import TemplateFacts
from nanoactor.vision.gather import ItemCollector
from nanoactor.vision.media import ReadItem, Unusable

if TYPE_CHECKING:
    from nanoactor.text.tokenizer import Piece

log = logging.getLogger("nanoactor.tokenizer")

# Maximum length of a rejection's reason, in characters; a chat template's error may quote the
# prompt.
_MAX_REASON_CHARS = 2000
_DUMMY_TEXT = (
    "Speak the speech, I pray you, as I pronounced it to you, trippingly on the tongue. " * 8
)


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a request's prompt and, by spelling, of its bad words."""

    prompt: Int32
    words: Mapping[str, Sequence[int]]


def _result_of(work: Callable[[], Encoded]) -> Encoded | Exception:
    try:
        with native_calls():
            return work()
    except Exception as error:
        return error


class TokenizerActor(Actor):
    """Actor that tokenizes submitted requests and sends them to the scheduler. After a restart, the
    frontend submits unanswered requests again."""

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._requests = 0
        self._tokens = 0
        self._restarts = 0
        """Number of restarts since the process started."""
        self._templates: RenderQueue | None = None
        self._facts: TemplateFacts | None = None
        """Properties of the chat template; None if there is no usable template."""
        self._items = ItemCollector()
        self._tags: dict[str, int | None] = {}
        """Token ids of the tags around free text that have been looked up; None for a tag that is
        not a single token."""
        self._awaiting_items: dict[int, tuple[Submit, Encoded | Exception]] = {}
        """Encoded requests that wait for the keys and sizes of their pictures, by uid."""
        self._long_texts = WorkerThread("long texts")
        self._workers: dict[int, int] = {}
        """Index of the vision worker that has each request's pictures, by uid."""

    def setup(self) -> None:
        """Load the tokenizer and the chat template at startup, so that broken ones are detected
        early."""
        directory = self._config.files.tokenizer_directory
        if directory is not None:
            from nanoactor.text.tokenizer import TextEncoder

            limits = render_options(self._config.engine, self._config.files)
            self._templates = RenderQueue(directory, limits)
            self._encoder = TextEncoder(directory, self._config.files.placeholders)
            self._check_template(self._templates)

    def _check_template(self, templates: RenderQueue) -> None:
        try:
            self._facts, problem = templates.describe()
        except InvalidRequest as error:
            problem = str(error)
        if problem:
            log.warning("conversations that need a chat template will be refused: %s", problem)
        elif templates.note:
            log.warning("%s", templates.note)

    def reset(self) -> None:
        """Forget all requests, but keep the tokenizer and the template process."""
        if self._templates is not None:
            self._templates.cancel_all()
        self._items, self._awaiting_items, self._workers = ItemCollector(), {}, {}
        self._restarts += 1

    def _queue_number(self, uid: int) -> int:
        """Return a request's number in the template queue. It differs after each restart, because
        the queue may still contain requests from before."""
        return self._restarts << 48 | uid

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Set the limits on requests and pictures according to the size of the KV and encoder
        caches that the runners have allocated."""
        super().start(context, ready)
        cache = RunnerReady.find(ready)
        files, salt = self._config.files.fit_to_cache(cache.capacity_tokens), self._config.salt
        self._config = dataclasses.replace(self._config, files=files)
        self._admission = Admission(files, salt, cache.block_size)
        self._limits = encoder_limits(self._config, cache)

    def handlers(self) -> Mapping[type, Handler]:
        """Return the handlers of requests, of aborts, and of the keys (content hashes) and sizes of
        pictures."""
        return {Submit: self._on_submit, Abort: self._on_abort, ItemsRead: self._on_items_read}

    def span_names(self) -> Mapping[type, str]:
        """Return the trace span name for processing a prompt."""
        return {Submit: "tokenize"}

    def _on_submit(self, event: Submit) -> None:
        if event.chat is None:
            self._encode_text(event, event.text)
            return
        assert self._templates is not None
        own = self.context.owned_copy(event)  # it outlives this handler
        try:
            self._check_options(event.chat_options)
        except InvalidRequest as error:
            self._refuse(own, error)
            return
        done = functools.partial(self.context.call_soon, self._on_rendered, own)
        hide = self._encoder.hide_placeholders
        chat, options = hide(event.chat), hide(event.chat_options)
        self._templates.render(self._queue_number(event.uid), chat, options, done)

    def _check_options(self, options: str) -> None:
        """Raise `InvalidRequest` if `options` (JSON text) contain one that the chat template does
        not read."""
        try:
            decoded = json.loads(options)
        except RecursionError:  # the user's process may have a higher limit
            raise InvalidRequest("chat_template_kwargs are nested too deeply") from None
        if self._facts is not None:
            self._facts.check(decoded)

    def _on_abort(self, event: Abort) -> None:
        if self._templates is not None:
            self._templates.cancel(self._queue_number(event.uid))
        if event.uid in self._awaiting_items:
            submit, _ = self._awaiting_items.pop(event.uid)
            self._refuse(submit)

    def _on_items_read(self, event: ItemsRead) -> None:
        for row, (uid, item) in enumerate(
            zip(event.uids.tolist(), event.items.tolist(), strict=True)
        ):
            error = event.errors[row]
            read = ReadItem(bytes(event.keys[row]), tuple(event.grids[row].tolist()))
            unusable = Unusable(error, bool(event.refused[row])) if error else None
            count = self._items.add(uid, item, unusable or read)
            if count:
                self._workers[uid] = event.worker
            if uid in self._awaiting_items and count == len(
                self._awaiting_items[uid][0].item_times
            ):
                self._finish(*self._awaiting_items.pop(uid))

    def _on_rendered(self, event: Submit, result: str | Exception) -> None:
        if isinstance(result, str):
            self._encode_text(event, result)
        else:
            self._finish(event, result)

    # -- encoding -------------------------------------------------------------------------

    def _encode_text(self, event: Submit, text: str | None) -> None:
        """Encode the prompt and the bad words of a request; a prompt of token ids is used as it is.
        Short texts are encoded at once, and long ones on a worker thread. If the tokenizer's run
        time is not bounded, all texts are encoded in a disposable process."""
        own_ids = event.token_ids.copy()
        if text is None and not event.bad_words:  # there may be no tokenizer at all
            self._finish(event, Encoded(own_ids, {}))
            return
        pieces: list[Piece] = []
        if text is not None:
            pieces = self._encoder.split_rendered(text) if event.chat else [(text, True)]
        words = spellings(event.bad_words)
        every = [*pieces, *((word, False) for word in words)]

        def encoded(ids: Sequence[Sequence[int]]) -> Encoded:
            own, spelt = ids[: len(pieces)], ids[len(pieces) :]
            if text is None:
                prompt = own_ids
            elif event.chat:
                prompt = self._encoder.join_pieces(text, own)
            else:
                prompt = np.array(own[0], np.int32)
            return Encoded(prompt, dict(zip(words, spelt, strict=True)))

        if not self._encoder.is_bounded and self._templates is not None:
            done = self._callback(event, encoded)
            self._templates.encode(self._queue_number(event.uid), every, done)
        elif len(text or "") > LONG_TEXT:
            done = self._callback(event, lambda found: found)
            self._encode_on_thread(event, lambda: encoded(self._encoder.encode(every)), done)
        else:
            self._finish(event, _result_of(lambda: encoded(self._encoder.encode(every))))

    def _encode_on_thread(
        self, event: Submit, work: Callable[[], Encoded], done: Callable[[Any], None]
    ) -> None:
        try:
            self._long_texts.put(work, done)
        except RuntimeError as error:  # no thread can be started
            self._finish(event, error)

    def _callback(self, event: Submit, convert: Callable[[Any], Encoded]) -> Callable[[Any], None]:
        """Return a callback for another thread to call with its result. On this actor's event loop,
        the result is converted with `convert`, and the request is finished; an exception rejects
        it."""
        own = self.context.owned_copy(event)

        def answer(result: Any) -> None:
            failed = isinstance(result, Exception)
            self._finish(own, result if failed else _result_of(lambda: convert(result)))

        return functools.partial(self.context.call_soon, answer)

    def _refuse(self, event: Submit, error: Exception | None = None) -> None:
        """Reject a request with `error`, or end it as aborted if `error` is None."""
        self._forget_items(event)
        if error is not None and is_out_of_resources(error):
            error = out_of_resources(error)
        reason, refused = "", isinstance(error, OutOfResources)
        if isinstance(error, InvalidRequest | OutOfResources):
            reason = str(error)
        elif error is not None:
            reason = f"the prompt cannot be tokenized: {error!r}"
        answers = len(split_rows(event.spec.sampling))
        reject = Reject(event.uid, reason[:_MAX_REASON_CHARS], answers, refused)
        self.context.outbox("scheduler").send(reject)

    def _forget_items(self, event: Submit) -> None:
        if event.item_times:
            self._items.finish(event.uid, len(event.item_times))
            self._workers.pop(event.uid, None)

    def _finish(self, event: Submit, result: Encoded | Exception) -> None:
        if isinstance(result, Cancelled):
            self._refuse(event)
            return
        count = len(event.item_times)
        if count and not self._items.is_complete(event.uid, count):
            self._awaiting_items[event.uid] = self.context.owned_copy(event), result
            return
        try:
            with native_calls():
                if isinstance(result, Exception):
                    raise result
                admit = self._admitted(event, result)
        except Exception as error:  # no prompt may crash the engine
            self._refuse(event, error)
            return
        self._forget_items(event)
        self._requests += 1
        self._tokens += len(admit.token_ids)
        self.context.outbox("scheduler").send(admit)

    def _admitted(self, event: Submit, encoded: Encoded) -> Admit:
        tokens, items = self._place_items(event, encoded.prompt[-event.keep_last :])
        spec = self._admission.check(tokens, event)
        rules = self._rules(event, encoded.words)
        grammar, free = self._split_free_text(spec.grammar)
        spec = dataclasses.replace(spec, rules=rules, grammar=grammar)
        return self._admission.admit(event, spec, tokens, items, free)

    def _split_free_text(self, grammar: str) -> tuple[str, FreeText | None]:
        """Return a grammar without its leading free text, and the tokens that delimit that text, or
        None if no free text is removed.

        If layers keep recurrent states outside the KV cache, the grammar is returned unchanged, so
        that free text is sampled under masks. Without masks, a sequence that rejects the end of
        free text returns to a position that the device has already computed, and a recurrent state
        would include that position twice.
        """
        if not grammar or self._config.files.has_slot_state:
            return grammar, None
        return split_free_text(grammar, self._id_of)

    def _id_of(self, tag: str) -> int | None:
        if tag not in self._tags:
            id_ = self._tags[tag] = self._encoder.id_of(tag)
            if id_ is None:
                log.warning(
                    "%s is not a single token of this model, so text before it is sampled with "
                    "token masks, at a third of the speed",
                    tag,
                )
        return self._tags[tag]

    def _rules(self, event: Submit, words: Mapping[str, Sequence[int]]) -> TokenRules | None:
        """Return the token rules of a request, including the ids of its bad words; None if it has
        no rules. Raises `InvalidRequest` if the rules leave no choice for the first token."""
        if event.spec.rules is None:
            return None
        rules = with_bad_words(event.spec.rules, event.bad_words, words.__getitem__)
        check_tokens_remain(rules, event.spec.stopping)
        return rules

    def _place_items(self, event: Submit, tokens: Int32) -> tuple[Int32, Items | None]:
        """Return the prompt with one placeholder token for each embedding of its pictures, and the
        `Items` message that describes the pictures, or None if there are none."""
        vision = self._config.files.config.vision
        if vision is None:
            return tokens, None
        kinds = ["video" if times else "picture" for times in event.item_times]
        visual = [
            VisualItem(one.key, one.grid[1], one.grid[2], times or None)
            for one, times in zip(
                self._items.collect(event.uid, kinds), event.item_times, strict=True
            )
        ]
        self._check_room(visual, len(tokens))
        prompt = expand_prompt(tokens, visual, vision, self._encode)
        if not visual:
            return tokens, None
        items = items_message(prompt, visual, vision, self._workers[event.uid])
        return prompt.token_ids, items

    def _check_room(self, visual: list[VisualItem], tokens: int) -> None:
        """Raise `InvalidRequest` if the pictures and videos have too many tokens for the context or
        the encoder cache. `tokens` is the length of the rest of the prompt."""
        rows, limit = sum(item.tokens for item in visual), self._config.files.max_model_len
        if rows + tokens > 2 * limit:  # otherwise a later error states the whole prompt's length
            raise InvalidRequest(
                f"the request's pictures and videos have {rows} tokens, but max_model_len is "
                f"{limit}; send fewer or smaller ones"
            )
        pages = sum(-(-item.tokens // self._limits.page_rows) for item in visual)
        if pages > self._limits.pages:
            room = self._limits.pages * self._limits.page_rows
            raise InvalidRequest(
                f"the request's pictures and videos have {rows} tokens and do not fit into the "
                f"encoder cache, which holds {room} tokens and rounds up the size of each "
                "item; send fewer or smaller ones, or raise encoder_cache_tokens"
            )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoder.encode_text(text, special=False).tolist()
        return ids

    def rehearse(self) -> Iterator[object]:
        """Tokenize a dummy text and hash dummy blocks, to warm up the CPU caches."""
        if self._config.files.tokenizer_directory is not None:
            yield self._encoder.encode_text(_DUMMY_TEXT)
        yield block_hashes(np.zeros(512, np.int32), self._admission.block_size, bytes(16))

    def stop(self) -> None:
        """Stop the worker thread and the template process."""
        self._long_texts.close()
        if self._templates is not None:
            self._templates.close()

    def statistics(self) -> dict[str, Any]:
        """Return the numbers of prompts and tokens since the start, and the number of requests that
        wait for pictures (`held`)."""
        return {
            "requests": self._requests,
            "tokens": self._tokens,
            "held": len(self._awaiting_items) + len(self._items),
        }
