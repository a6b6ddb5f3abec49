"""Text work that is no generation, in a process of its own: the server's loop only passes it on.

A second small system of actors beside the engine's: whoever tokenizes a book for its own purposes
delays neither prompts nor streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanoactor.errors import EngineDead, EngineOverloaded, InvalidRequest, NanoactorError
from nanoactor.messages import Int32
from nanoactor.models.errors import ModelError
from nanoactor.runtime.actor import Actor, Context, Handler, ReadyInfo
from nanoactor.runtime.codec import message
from nanoactor.runtime.errors import PeerBroken, RecordTooLarge, RuntimeFault
from nanoactor.runtime.ring import ring_capacity
from nanoactor.runtime.system import System
from nanoactor.runtime.topology import ActorSpec, EdgeSpec, NodeSpec, Topology
from nanoactor.runtime.wiring import Options
from nanoactor.text.renderer import RenderLimits, RenderQueue
from nanoactor.text.template import TemplateFacts

log = logging.getLogger("nanoactor.server")

_OUTSTANDING = 32
"""Questions that may be under way; more wait in the server, ..."""
_WAITING = 256
"""... up to so many."""
_PATIENCE, _SHORT = 30.0, 3.0
"""Seconds until an answer is no longer waited for; the short one where a stream waits."""
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
"""Seconds before a dead desk is started again."""
_OPENING = 64
_NONE = np.empty(0, np.int32)
_HEAVY = ("torch", "transformers", "torch_npu")
_NICE = 10


@message(100)
class Question:
    """Server to desk: exactly one of text, messages (JSON) and token ids, and what is wanted."""

    number: int
    wanted: str
    """"encode", "encode plain" (no special tokens), "decode", or "opening": what the prompt of a
    conversation ends with."""
    text: str
    options: str
    token_ids: Int32
    counts: Int32
    """To decode: how many of the ids belong to each text."""


@message(101)
class Answer:
    """Desk to server."""

    number: int
    token_ids: Int32
    texts: list[str]
    error: str


@message(102)
class Withdraw:
    """Server to desk: nobody waits for the answer to a question any more."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeskConfig:
    """Where the tokenizer lies, and what a chat template may take."""

    directory: Path
    limits: RenderLimits


class DeskActor(Actor):
    """Answers questions, one after the other."""

    def __init__(self, config: DeskConfig) -> None:
        self._config = config
        self._templates: RenderQueue | None = None

    def setup(self) -> TemplateFacts:
        """Read the tokenizer."""
        from nanoactor.text.tokenizer import TextEncoder

        self._templates = RenderQueue(self._config.directory, self._config.limits)
        self._encoder = TextEncoder(self._config.directory)
        try:
            facts, _ = self._templates.describe()  # a tokenizer has told what is wrong
        except InvalidRequest:
            facts = TemplateFacts(exists=True)
        return facts

    def stop(self) -> None:
        """End the template's process."""
        if self._templates is not None:
            self._templates.close()

    def handlers(self) -> Mapping[type, Handler]:
        """Questions, and that nobody waits for an answer."""
        return {Question: self._question, Withdraw: self._withdraw}

    def _withdraw(self, event: Withdraw) -> None:
        assert self._templates is not None
        self._templates.cancel(event.number)

    def _question(self, event: Question) -> None:
        if event.options:  # a conversation
            wanted = event.number, event.wanted == "opening"
            done = functools.partial(self.context.call_soon, self._rendered, *wanted)
            assert self._templates is not None
            self._templates.render(event.number, event.text, event.options, done)
        else:
            self._say(event.number, lambda: self._answer(event))

    def _rendered(self, number: int, opening: bool, result: str | Exception) -> None:
        def answer() -> tuple[Int32, list[str]]:
            if isinstance(result, Exception):
                raise result
            if opening:
                return _NONE, [result[-_OPENING:]]
            return self._encoder.encode_rendered(result), []

        self._say(number, answer)

    def _say(self, number: int, answer: Callable[[], tuple[Int32, list[str]]]) -> None:
        ids, texts, problem = _NONE, list[str](), ""
        try:
            ids, texts = answer()
        except Exception as error:  # nothing that a client asks may end the desk
            problem = str(error) or repr(error)
        outbox = self.context.outbox("server")
        try:
            outbox.send(Answer(number, ids, texts, problem[:2000]))
        except RecordTooLarge as error:
            outbox.send(Answer(number, _NONE, [], f"too long: {error}"))

    def _answer(self, event: Question) -> tuple[Int32, list[str]]:
        encoder = self._encoder
        if event.wanted == "decode":
            parts = np.split(event.token_ids, np.cumsum(event.counts)[:-1])
            return _NONE, [encoder.decode(part.tolist()) for part in parts]
        return encoder.encode_text(event.text, event.wanted == "encode"), []


class ClerkActor(Actor):
    """The server's end, on its loop."""

    def __init__(self, config: None) -> None:
        self._open: dict[int, asyncio.Future[Answer]] = {}
        self._next = 0
        self._room = asyncio.Semaphore(_OUTSTANDING)
        self._waiting = 0

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Find the edge."""
        super().start(context, ready)
        self._desk = context.outbox("desk")

    def handlers(self) -> Mapping[type, Handler]:
        """Answers."""
        return {Answer: self._answer}

    async def ask(
        self, wanted: str, text: str, options: str, token_ids: Int32, counts: Int32
    ) -> Answer:
        """Send a question and wait for its answer; `EngineOverloaded` where too many wait."""
        if self._waiting >= _WAITING:
            raise EngineOverloaded(f"{_WAITING} texts wait to be tokenized already")
        self._waiting += 1
        try:
            await self._room.acquire()  # given back by the answer, even if nobody waits for it
        finally:
            self._waiting -= 1
        number, self._next = self._next, self._next + 1
        answer: asyncio.Future[Answer] = self.context.loop.create_future()
        self._open[number] = answer
        self._desk.send(Question(number, wanted, text, options, token_ids, counts))
        try:
            return await answer
        except asyncio.CancelledError:  # its client has gone, or it takes too long
            with contextlib.suppress(PeerBroken):
                self._desk.send(Withdraw(number))
            raise

    def _answer(self, event: Answer) -> None:
        self._room.release()
        answer = self._open.pop(event.number)
        if not answer.done():
            answer.set_result(self.context.own(event))

    def fail(self, error: BaseException) -> None:
        """Nobody answers any more."""
        for answer in self._open.values():
            self._room.release()
            if not answer.done():
                answer.set_exception(error)
        self._open.clear()


class Desk:
    """Tokenizes, detokenizes and renders templates elsewhere. Every method raises
    `InvalidRequest` for what cannot be done and `EngineDead` while its process is dead or does not
    answer; a dead one is started again."""

    def __init__(self, directory: Path, longest: int, limits: RenderLimits) -> None:
        """`longest`: bytes of the longest text that is accepted; `limits` of its templates."""
        self._config = DeskConfig(directory, limits)
        self._longest = longest
        self._dead: EngineDead | None = None
        self._silent = False
        self._restarting: asyncio.Task[None] | None = None
        self._clerk: ClerkActor | None = None
        """None until the process has started: what fails before that, `start` raises."""
        self.template = TemplateFacts()
        """What the model's chat template can do; known once started."""

    async def start(self) -> None:
        """Start the process."""
        self._clerk = None
        self._system = System(_topology(self._config, self._longest), Options(), self._on_death)
        await self._system.start()
        clerk = self._system.actor("server")
        assert isinstance(clerk, ClerkActor)
        self._clerk = clerk
        template = self._system.ready["desk"]
        assert isinstance(template, TemplateFacts)
        self.template = template
        self._dead, self._silent = None, False

    async def close(self) -> None:
        """End it."""
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        await self._system.close()

    @property
    def state(self) -> str:
        """Either "ok", "silent" since a question was not answered in time, or "dead"."""
        if self._dead is not None:
            return "dead"
        return "silent" if self._silent else "ok"

    def _on_death(self, error: BaseException) -> None:
        if self._clerk is None:
            return
        self._dead = EngineDead(f"the desk, which tokenizes for clients, has died: {error}")
        self._clerk.fail(self._dead)
        log.error("%s; it is started again", self._dead)
        self._restarting = asyncio.ensure_future(self._restart())

    async def _restart(self) -> None:
        wait = _FIRST_WAIT
        while True:
            await self._system.close()
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
            try:
                await self.start()
            except (RuntimeFault, NanoactorError, ModelError) as error:
                log.error("the desk cannot be started: %s", error)
            else:
                log.warning("the desk answers again")
                return

    async def encode(self, text: str, special: bool) -> list[int]:
        """Ids of a text; with `special`, those that the tokenizer adds by itself too."""
        answer = await self._ask("encode" if special else "encode plain", text)
        ids: list[int] = answer.token_ids.tolist()
        return ids

    async def encode_chat(self, messages: Any, options: Any) -> list[int]:
        """Ids of a conversation."""
        answer = await self._ask("encode", _json(messages), _json(options))
        ids: list[int] = answer.token_ids.tolist()
        return ids

    async def decode_all(self, several: Sequence[Sequence[int]]) -> list[str]:
        """The text of each of these ids, special tokens included."""
        counts = np.array([len(ids) for ids in several], np.int32)
        try:
            ids = np.array([token for ids in several for token in ids], np.int32)
        except OverflowError:
            raise InvalidRequest("token ids must be from 0 to 2147483647") from None
        return (await self._ask("decode", token_ids=ids, counts=counts)).texts

    async def opening(self, options: Any) -> str:
        """The last characters of a prompt with these template options: where an answer begins."""
        messages = [{"role": "user", "content": "?"}]
        answer = await self._ask("opening", _json(messages), _json(options), patience=_SHORT)
        return answer.texts[0]

    async def _ask(
        self,
        wanted: str,
        text: str = "",
        options: str = "",
        token_ids: Int32 = _NONE,
        counts: Int32 = _NONE,
        patience: float = _PATIENCE,
    ) -> Answer:
        try:
            size = len(text.encode()) + len(options.encode()) + token_ids.nbytes
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text is not valid Unicode: {error}") from None
        if size > self._longest:
            raise InvalidRequest(f"{size} bytes are too many, at most {self._longest} are accepted")
        if self._dead is not None or self._clerk is None:
            raise self._dead or EngineDead("the desk is not started")
        try:
            async with asyncio.timeout(patience):
                answer = await self._clerk.ask(wanted, text, options, token_ids, counts)
        except PeerBroken:
            raise self._dead or EngineDead("the desk is closed") from None
        except TimeoutError:
            self._silent = True
            raise EngineDead(f"the desk has not answered within {patience:g} s") from None
        self._silent = False
        if answer.error:
            raise InvalidRequest(answer.error)
        return answer


def _topology(config: DeskConfig, longest: int) -> Topology:
    record = ring_capacity(8 * longest + (1 << 20))
    return Topology(
        (
            ActorSpec("server", "nanoactor.server.desk:ClerkActor", None),
            ActorSpec("desk", "nanoactor.server.desk:DeskActor", config),
        ),
        (
            NodeSpec("user", ("server",)),
            NodeSpec("desk", ("desk",), {"TOKENIZERS_PARALLELISM": "false"}, _HEAVY, nice=_NICE),
        ),
        (
            EdgeSpec("server", ("desk",), record),
            EdgeSpec("desk", ("server",), record, bound=_OUTSTANDING),
        ),
        "user",
    )


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"messages must be plain values, as in JSON: {error}") from None
