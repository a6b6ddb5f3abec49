"""The tokenizer's shell: prompts become ids and hashes, or a reason why not."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from nanoactor.actors.config import ActorConfig, RunnerReady, encoder_limits, render_limits
from nanoactor.admission import Admission
from nanoactor.errors import InvalidRequest
from nanoactor.grammar.freeing import freed
from nanoactor.kv.hashing import block_hashes
from nanoactor.messages import Abort, FreeText, Int32, Reject, Submit, TokenRules
from nanoactor.models.columns import rows_of
from nanoactor.runtime.actor import Actor, Context, Handler, ReadyInfo
from nanoactor.text.bad_words import check_choice, with_words
from nanoactor.text.renderer import Cancelled, RenderQueue
from nanoactor.text.template import TemplateFacts
from nanoactor.vision.gather import ItemGathering
from nanoactor.vision.media import ReadItem
from nanoactor.vision.messages import Items, ItemsRead
from nanoactor.vision.prompt import VisualItem, block_extras, expand_prompt, items_message

log = logging.getLogger("nanoactor.tokenizer")

# A template's complaint may quote the prompt.
_LONGEST_REASON = 2000
_MADE_UP = "Speak the speech, I pray you, as I pronounced it to you, trippingly on the tongue. " * 8


class TokenizerActor(Actor):
    """Owns nothing: a request that was not answered can be sent again."""

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._requests = 0
        self._tokens = 0
        self._lives = 0
        """How often everybody began anew."""
        self._templates: RenderQueue | None = None
        self._facts: TemplateFacts | None = None
        """None where the template is broken."""
        self._items = ItemGathering()
        self._tags: dict[str, int | None] = {}
        """Ids of the tags that end free text, as far as they were asked for."""
        self._held: dict[int, tuple[Submit, Callable[[Submit], Int32]]] = {}
        """Requests that wait for what their pictures are."""
        self._workers: dict[int, int] = {}
        """By request: the vision worker that has its pictures."""

    def setup(self) -> None:
        """Read the tokenizer and the template, so that a broken one is found at the start."""
        directory = self._config.files.tokenizer_directory
        if directory is not None:
            from nanoactor.text.tokenizer import TextEncoder

            limits = render_limits(self._config.engine, self._config.files)
            self._templates = RenderQueue(directory, limits)
            vision = self._config.files.config.vision
            reserved = (vision.image_token_id, vision.video_token_id) if vision else ()
            self._encoder = TextEncoder(directory, reserved)
            self._check_template(self._templates)

    def _check_template(self, templates: RenderQueue) -> None:
        try:
            self._facts, problem = templates.describe()
        except InvalidRequest as error:
            problem = str(error)
        if problem:
            log.warning("conversations that need a chat template will be refused: %s", problem)

    def renew(self) -> None:
        """Keep the tokenizer, and the template's process."""
        if self._templates is not None:
            self._templates.cancel_all()
        self._items, self._held, self._workers = ItemGathering(), {}, {}
        self._lives += 1

    def _number(self, uid: int) -> int:
        """The conversation's for the template's queue, which may still be at one of before."""
        return self._lives << 48 | uid

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Learn the block size, for the hashes."""
        super().start(context, ready)
        cache = RunnerReady.find(ready)
        files, salt = self._config.files, self._config.salt
        self._admission = Admission(files, salt, cache.block_size)
        self._limits = encoder_limits(self._config, cache)

    def handlers(self) -> Mapping[type, Handler]:
        """Requests, what their pictures are, and that one is wanted no more."""
        return {Submit: self._submit, Abort: self._abort, ItemsRead: self._items_read}

    def span_names(self) -> Mapping[type, str]:
        """A prompt's."""
        return {Submit: "tokenize"}

    def _submit(self, event: Submit) -> None:
        if event.chat is None:
            self._answer(event, self._tokenize)
            return
        assert self._templates is not None
        own = self.context.own(event)  # it outlives this handler
        try:
            self._check_options(event.chat_options)
        except InvalidRequest as error:
            self._refuse(own, str(error))
            return
        done = functools.partial(self.context.call_soon, self._rendered, own)
        chat = self._encoder.hide_placeholders(event.chat)
        self._templates.render(self._number(event.uid), chat, event.chat_options, done)

    def _check_options(self, options: str) -> None:
        """Raise `InvalidRequest` for what the template does not read."""
        try:
            decoded = json.loads(options)
        except RecursionError:  # the user's process may have a higher limit
            raise InvalidRequest("chat_template_kwargs are nested too deeply") from None
        if self._facts is not None:
            self._facts.check(decoded)

    def _abort(self, event: Abort) -> None:
        if self._templates is not None:
            self._templates.cancel(self._number(event.uid))
        if event.uid in self._held:
            submit, _ = self._held.pop(event.uid)
            self._refuse(submit, "")

    def _items_read(self, event: ItemsRead) -> None:
        for row, (uid, item) in enumerate(
            zip(event.uids.tolist(), event.items.tolist(), strict=True)
        ):
            error = event.errors[row]
            read = ReadItem(bytes(event.keys[row]), tuple(event.grids[row].tolist()))
            count = self._items.add(uid, item, error or read)
            if count:
                self._workers[uid] = event.worker
            if uid in self._held and count == len(self._held[uid][0].item_times):
                self._answer(*self._held.pop(uid))

    def _rendered(self, event: Submit, result: str | Exception) -> None:
        if isinstance(result, Cancelled):
            self._refuse(event, "")
            return

        def tokenize(_: Submit) -> Int32:
            if isinstance(result, Exception):
                raise result
            return self._encoder.encode_rendered(result)

        self._answer(event, tokenize)

    def _refuse(self, event: Submit, reason: str) -> None:
        self._forget_items(event)
        answers = len(rows_of(event.sampling))
        reject = Reject(event.uid, event.epoch, reason[:_LONGEST_REASON], answers)
        self.context.outbox("scheduler").send(reject)

    def _forget_items(self, event: Submit) -> None:
        if event.item_times:
            self._items.forget(event.uid, len(event.item_times))
            self._workers.pop(event.uid, None)

    def _answer(self, event: Submit, tokenize: Callable[[Submit], Int32]) -> None:
        count = len(event.item_times)
        if count and not self._items.has(event.uid, count):
            self._held[event.uid] = self.context.own(event), tokenize
            return
        try:
            tokens, items = self._place_items(event, tokenize(event)[-event.keep_last :])
            stopping = self._admission.check(tokens, event.stopping)
            rules = self._rules(event)
            grammar, free = self._freed(event)
        except Exception as error:  # nothing in a prompt may end the engine
            known = isinstance(error, InvalidRequest)
            reason = str(error) if known else f"the prompt cannot be tokenized: {error!r}"
            self._refuse(event, reason)
            return
        self._forget_items(event)
        self._requests += 1
        self._tokens += len(tokens)
        extras = block_extras(items[0], self._admission.block_size) if items else {}
        admit = self._admission.admit(
            event, tokens, stopping, items, extras, rules=rules, grammar=grammar, free=free
        )
        self.context.outbox("scheduler").send(admit)

    def _freed(self, event: Submit) -> tuple[str, tuple[FreeText, ...]]:
        """Return the grammar without the free text before it, and where that ends."""
        if not event.grammar:
            return "", ()
        text, free = freed(event.grammar, self._id_of)
        return text, () if free is None else (free,)

    def _id_of(self, tag: str) -> int | None:
        if tag not in self._tags:
            id_ = self._tags[tag] = self._encoder.id_of(tag)
            if id_ is None:
                log.warning(
                    "%s is no token of its own: text before it is chosen under masks, at a third "
                    "of the pace",
                    tag,
                )
        return self._tags[tag]

    def _rules(self, event: Submit) -> tuple[TokenRules, ...]:
        """Return the rules with the ids of the bad words. Raises `InvalidRequest` where they leave
        nothing to choose from the start."""
        if not event.rules:
            return ()
        rules = with_words(event.rules[0], event.bad_words, self._encode)
        check_choice(rules, event.stopping)
        return (rules,)

    def _place_items(self, event: Submit, tokens: Int32) -> tuple[Int32, tuple[Items, ...]]:
        """Return the prompt with a token for each row of its pictures, and where they stand."""
        vision = self._config.files.config.vision
        if vision is None:
            return tokens, ()
        kinds = ["video" if times else "picture" for times in event.item_times]
        visual = [
            VisualItem(one.key, one.grid[1], one.grid[2], times or None)
            for one, times in zip(self._items.of(event.uid, kinds), event.item_times, strict=True)
        ]
        self._check_room(visual, len(tokens))
        prompt = expand_prompt(tokens, visual, vision, self._encode)
        if not visual:
            return tokens, ()
        items = items_message(prompt, visual, vision, self._workers[event.uid])
        return prompt.token_ids, (items,)

    def _check_room(self, visual: list[VisualItem], tokens: int) -> None:
        """Raise `InvalidRequest` where pictures are too many or too large to be placed at all."""
        rows, limit = sum(item.tokens for item in visual), self._config.files.max_model_len
        if rows + tokens > 2 * limit:  # else the whole prompt's length is told
            raise InvalidRequest(
                f"the request's pictures and videos have {rows} tokens, but max_model_len is "
                f"{limit}"
            )
        pages = sum(-(-item.tokens // self._limits.page_rows) for item in visual)
        if pages > self._limits.pages:
            room = self._limits.pages * self._limits.page_rows
            raise InvalidRequest(
                f"the request's pictures and videos have {rows} tokens, rounded up for each, but "
                f"the encoder cache holds {room}: give fewer or smaller ones, or raise "
                "encoder_cache_tokens"
            )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoder.encode_text(text, special=False).tolist()
        return ids

    def _tokenize(self, event: Submit) -> Int32:
        if event.text is not None:
            return self._encoder.encode_text(event.text)
        return event.token_ids.copy()

    def rehearse(self) -> Iterator[object]:
        """A text's ids and hashes."""
        if self._config.files.tokenizer_directory is not None:
            yield self._encoder.encode_text(_MADE_UP)
        yield block_hashes(np.zeros(512, np.int32), self._admission.block_size, bytes(16))

    def stop(self) -> None:
        """End the template's process."""
        if self._templates is not None:
            self._templates.close()

    def statistics(self) -> dict[str, Any]:
        """Prompts and tokens so far."""
        return {
            "requests": self._requests,
            "tokens": self._tokens,
            "held": len(self._held) + len(self._items),
        }
