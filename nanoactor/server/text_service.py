"""Tokenization, detokenization and template rendering for the server, in a separate process.

The service is a small actor system of its own, next to the engine's. The server's event loop only
forwards requests to it. A client that tokenizes a book therefore delays no other request or stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import msgspec
import numpy as np

from nanoactor.errors import (
    EngineDead,
    EngineOverloaded,
    InvalidRequest,
    NanoactorError,
    OutOfResources,
    out_of_resources,
)
from nanoactor.placement.topology import LIGHT_ENVIRONMENT
from nanoactor.requests.grammar_spec import Thoughts
from nanoactor.runtime.actor import Actor, Context, Handler, ReadyInfo
from nanoactor.runtime.codec import message
from nanoactor.runtime.errors import PeerBroken, RecordTooLarge, is_out_of_resources
from nanoactor.runtime.native import native_calls
from nanoactor.runtime.ring import ring_capacity
from nanoactor.runtime.system import System
from nanoactor.runtime.topology import ActorSpec, EdgeSpec, NodeSpec, Topology
from nanoactor.runtime.wiring import Options
from nanoactor.runtime.worker_thread import WorkerThread
from nanoactor.text.patterns import LONG_TEXT
from nanoactor.text.renderer import RenderOptions, RenderQueue
from nanoactor.text.spans import SpanFinder, Spans
from nanoactor.text.template import TemplateFacts, thoughts_after

if TYPE_CHECKING:
    from nanoactor.text.tokenizer import Piece

log = logging.getLogger("nanoactor.server")

T = TypeVar("T")

_MAX_IN_FLIGHT = 32
"""Maximum number of requests in flight to the service. Further requests wait in the server."""
_MAX_WAITING = 256
"""Maximum number of requests that wait in the server. Further requests are rejected."""
_REPLY_TIMEOUT, _STREAM_REPLY_TIMEOUT = 30.0, 3.0
"""Maximum time to wait for a reply, in seconds. The shorter time applies if a stream waits for the
reply."""
_MIN_RESTART_DELAY, _MAX_RESTART_DELAY = 0.5, 30.0
"""Minimum and maximum delay before a dead process is restarted, in seconds."""
_MAX_CACHED_OPTIONS = 256
_HEAVY_MODULES = ("torch", "transformers", "torch_npu")
_NICE = 10
_SAMPLE_CHAT = '[{"role": "user", "content": "?"}]'


@message(100)
class TextRequest:
    """Message from the server to the service that calls a method."""

    number: int
    method: str
    arguments: bytes
    """List of arguments, encoded with msgpack."""


@message(101)
class TextReply:
    """Message from the service to the server with the result of a method."""

    number: int
    result: bytes
    """Result of the method, encoded with msgpack. Empty after an error."""
    error: str
    refused: bool = False
    """True if the machine ran out of a resource. False if the request caused the error."""


@message(102)
class Withdraw:
    """Message from the server to the service that cancels a request."""

    number: int


class TextWorker(Actor):
    """Actor of the service, in its own process. It handles short requests one after the other. Long
    texts are processed on a thread. A child process renders chat templates, and runs tokenizers
    whose time and memory are not bounded by the length of the text."""

    def __init__(self, config: tuple[Path, RenderOptions, tuple[int, ...]]) -> None:
        """Store the configuration: the tokenizer's directory, the template and its limits, and the
        token ids reserved for images and videos."""
        self._directory, self._render_options, self._reserved = config
        self._templates: RenderQueue | None = None
        self._long_texts = WorkerThread("long texts")
        self._span_finder: SpanFinder | None = None
        """Finder of token positions. It is created on first use, because its tables take a moment
        to build and few requests need them."""

    def setup(self) -> TemplateFacts:
        """Load the tokenizer. Return the capabilities of the chat template."""
        from nanoactor.text.tokenizer import TextEncoder

        self._templates = RenderQueue(self._directory, self._render_options)
        self._encoder = TextEncoder(self._directory, self._reserved)
        try:
            facts, _ = self._templates.describe()  # the engine's tokenizer reports errors
        except InvalidRequest:
            facts = TemplateFacts(exists=True)
        return facts

    def stop(self) -> None:
        """Stop the thread for long texts and the child process."""
        self._long_texts.close()
        if self._templates is not None:
            self._templates.close()

    def handlers(self) -> Mapping[type, Handler]:
        """Return the handlers of `TextRequest` and `Withdraw` messages."""
        return {TextRequest: self._request, Withdraw: self._withdraw}

    def _withdraw(self, event: Withdraw) -> None:
        assert self._templates is not None
        self._templates.cancel(event.number)

    def _request(self, event: TextRequest) -> None:
        arguments = msgspec.msgpack.decode(event.arguments)
        if event.method == "encode":
            text, add_special_tokens = arguments
            self._encode(event.number, [(text, add_special_tokens)], lambda ids: ids[0])
        elif event.method == "spans" and not self._encoder.is_bounded:
            assert self._templates is not None
            done = functools.partial(self.context.call_soon, self._encoded, event.number, _as_spans)
            self._templates.spans(event.number, arguments[0], done)
        elif event.method == "render":
            messages, options, tokenize = arguments
            done = functools.partial(self.context.call_soon, self._rendered, event.number, tokenize)
            assert self._templates is not None
            hide = self._encoder.hide_placeholders
            self._templates.render(event.number, hide(messages), hide(options), done)
        else:
            method = functools.partial(self._METHODS[event.method], self, *arguments)
            if len(event.arguments) > LONG_TEXT:
                self._run_on_thread(event.number, method, lambda result: result)
            else:
                self._reply(event.number, method)

    def _encode(self, number: int, pieces: Sequence[Piece], convert: Callable[[Any], Any]) -> None:
        """Encode `pieces`, and send a reply to request `number`. The result in the reply is
        `convert(ids)`, where `ids` contains a list of token ids per piece."""
        if not self._encoder.is_bounded and self._templates is not None:
            done = functools.partial(self.context.call_soon, self._encoded, number, convert)
            self._templates.encode(number, pieces, done)
        elif sum(len(text) for text, _ in pieces) > LONG_TEXT:
            self._run_on_thread(number, lambda: self._encoder.encode(pieces), convert)
        else:
            self._reply(number, lambda: convert(self._encoder.encode(pieces)))

    def _run_on_thread(
        self, number: int, work: Callable[[], Any], convert: Callable[[Any], Any]
    ) -> None:
        done = functools.partial(self.context.call_soon, self._encoded, number, convert)
        try:
            self._long_texts.put(work, done)
        except RuntimeError as error:  # no thread could be started
            self._encoded(number, convert, error)

    def _encoded(self, number: int, convert: Callable[[Any], Any], result: Any) -> None:
        def compute() -> Any:
            if isinstance(result, Exception):
                raise result
            return convert(result)

        self._reply(number, compute)

    def _decode(self, token_id_lists: list[list[int]]) -> list[str]:
        return [self._encoder.decode(ids) for ids in token_id_lists]

    def _spans(self, prompts: list[str | list[int]]) -> list[Spans]:
        from nanoactor.text.tokenizer import load_tokenizer

        if self._span_finder is None:
            self._span_finder = SpanFinder(load_tokenizer(self._directory))
        finder = self._span_finder
        return [
            finder.of_text(prompt) if isinstance(prompt, str) else finder.of_ids(prompt)
            for prompt in prompts
        ]

    _METHODS: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "decode": _decode,
        "spans": _spans,
    }

    def _rendered(self, number: int, tokenize: bool, prompt: str | Exception) -> None:
        if tokenize and isinstance(prompt, str):
            pieces = self._encoder.split_rendered(prompt)
            self._encode(number, pieces, lambda ids: self._encoder.join_pieces(prompt, ids))
        else:
            self._encoded(number, thoughts_after, prompt)

    def _reply(self, number: int, compute: Callable[[], Any]) -> None:
        try:
            with native_calls():
                result = msgspec.msgpack.encode(compute(), enc_hook=np.ndarray.tolist)
            reply = TextReply(number, result, "")
        except Exception as error:  # no request of a client may end this process
            if is_out_of_resources(error):
                error = out_of_resources(error)
            refused = isinstance(error, OutOfResources)
            reply = TextReply(number, b"", (str(error) or repr(error))[:2000], refused)
        outbox = self.context.outbox("server")
        try:
            outbox.send(reply)
        except RecordTooLarge as error:
            outbox.send(TextReply(number, b"", f"the reply is too long: {error}"))


def _as_spans(pairs: list[tuple[list[int], list[int]]]) -> list[Spans]:
    return [(bytes(first), starts) for first, starts in pairs]


class TextClient(Actor):
    """Actor on the server's event loop that sends requests to the service."""

    def __init__(self, config: None) -> None:
        self._replies: dict[int, asyncio.Future[TextReply]] = {}
        self._numbers = itertools.count()
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._waiting = 0

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Start the actor and open its outbox to the service."""
        super().start(context, ready)
        self._outbox = context.outbox("text_service")

    def handlers(self) -> Mapping[type, Handler]:
        """Return the handler of `TextReply` messages."""
        return {TextReply: self._reply}

    async def call(self, method: str, arguments: bytes) -> TextReply:
        """Send a request and return its reply. Raises `EngineOverloaded` if too many requests are
        waiting."""
        if self._waiting >= _MAX_WAITING:
            raise EngineOverloaded(
                f"{_MAX_WAITING} texts are already waiting to be tokenized; try again later"
            )
        self._waiting += 1
        try:
            await self._slots.acquire()  # the reply releases it, even after a cancellation
        finally:
            self._waiting -= 1
        number = next(self._numbers)
        reply: asyncio.Future[TextReply] = self.context.loop.create_future()
        self._replies[number] = reply
        self._outbox.send(TextRequest(number, method, arguments))
        try:
            return await reply
        except asyncio.CancelledError:  # the client has disconnected, or the request has timed out
            with contextlib.suppress(PeerBroken):
                self._outbox.send(Withdraw(number))
            raise

    def _reply(self, event: TextReply) -> None:
        self._slots.release()
        reply = self._replies.pop(event.number)
        if not reply.done():
            reply.set_result(event)

    def fail(self, error: BaseException) -> None:
        """Make all pending calls raise `error`."""
        for reply in self._replies.values():
            self._slots.release()
            if not reply.done():
                reply.set_exception(error)
        self._replies.clear()


class TextService:
    """Tokenizes, detokenizes and renders templates in another process, which is restarted if it
    dies.

    All text methods except `thoughts` raise `InvalidRequest` for invalid input, and `EngineDead`
    while the process is dead or does not reply.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        render_options: RenderOptions,
        reserved: tuple[int, ...] = (),
    ) -> None:
        """Create the service without starting it. `max_bytes` is the maximum size of a request's
        arguments. `render_options` are the template and its limits. `reserved` are the token ids
        reserved for images and videos."""
        self._config = directory, render_options, reserved
        self._max_bytes = max_bytes
        self._dead: EngineDead | None = EngineDead("the text service has not been started")
        self._is_silent = False
        self._restarting: asyncio.Task[None] | None = None
        self._client: TextClient | None = None
        """None until the process has started. Until then, `start` raises the errors of the process;
        later errors cause a restart."""
        self._thoughts: dict[bytes, Thoughts] = {}
        """Cached results of `thoughts`, by a digest of the template options."""
        self._is_guessing = False
        self.template = TemplateFacts()
        """Capabilities of the model's chat template; set by `start`."""

    async def start(self) -> None:
        """Start the process, and return when it is ready."""
        self._client = None
        self._system = System(_topology(self._config, self._max_bytes), Options(), self._on_death)
        await self._system.start()
        client = self._system.actor("server")
        assert isinstance(client, TextClient)
        self._client = client
        template = self._system.ready["text_service"]
        assert isinstance(template, TemplateFacts)
        self.template = template
        self._dead, self._is_silent = None, False

    async def close(self) -> None:
        """Stop the process. Pending calls fail."""
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        await self._system.close()

    @property
    def state(self) -> str:
        """State of the service: "ok", "silent" if a request has timed out since the last reply, or
        "dead" while the process is not running."""
        if self._dead is not None:
            return "dead"
        return "silent" if self._is_silent else "ok"

    def _on_death(self, error: BaseException) -> None:
        if self._client is None:
            return
        self._dead = EngineDead(
            "the text service, which tokenizes for clients, has died and is being restarted"
        )
        self._client.fail(self._dead)
        log.error("%s: %s", self._dead, error)
        self._restarting = asyncio.ensure_future(self._restart())

    async def _restart(self) -> None:
        delay = _MIN_RESTART_DELAY
        while True:
            await asyncio.sleep(delay)
            delay = min(2 * delay, _MAX_RESTART_DELAY)
            try:
                await self._system.close()
                await self.start()
            except Exception as error:  # whatever the error, the next attempt may succeed
                log.error("the text service could not be started: %s", error)
            else:
                log.warning("the text service is available again")
                return

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encode a text to token ids. `add_special_tokens` includes the special tokens that the
        tokenizer adds."""
        return await self._call(list[int], "encode", text, add_special_tokens)

    async def encode_conversation(self, messages: str, options: str) -> list[int]:
        """Render a conversation and encode the prompt to token ids. `messages` and `options`, the
        template's variables, are JSON texts."""
        return await self._call(list[int], "render", messages, options, True)

    async def encode_chat(self, messages: Any, options: Mapping[str, Any]) -> list[int]:
        """Render a conversation and encode the prompt to token ids."""
        return await self.encode_conversation(_json(messages), _json(options))

    async def decode_all(self, token_id_lists: Sequence[Sequence[int]]) -> list[str]:
        """Decode each list of token ids to text, including special tokens."""
        return await self._call(list[str], "decode", token_id_lists)

    async def spans(self, prompts: Sequence[Any]) -> list[Spans]:
        """Find the position of each token in each prompt, which is a text or a list of token ids.
        Return one `Spans` per prompt: the bytes of its first token, and the index of each token's
        first character."""
        return await self._call(list[Spans], "spans", prompts)

    async def thoughts(self, options: Mapping[str, Any], messages: Any) -> Thoughts:
        """Render the messages with these template options, and return whether reasoning follows the
        prompt: "none", "open" (the prompt starts it) or "optional" (the model may start it). If the
        service does not reply, return the value for a prompt without options."""
        if self.template.reasoning_varies:
            return await self._thoughts_after(_json(messages), _json(options))
        options = {name: value for name, value in options.items() if name != "tools"}
        if not options:
            return self.template.thoughts
        encoded = _json(options)
        key = hashlib.sha256(encoded.encode()).digest()
        if key not in self._thoughts:
            if len(self._thoughts) >= _MAX_CACHED_OPTIONS:
                self._thoughts.clear()
            thoughts = await self._thoughts_after(_SAMPLE_CHAT, encoded)
            if self._is_guessing:
                return thoughts
            self._thoughts[key] = thoughts
        return self._thoughts[key]

    async def _thoughts_after(self, messages: str, options: str) -> Thoughts:
        try:
            thoughts = await self._call(
                str, "render", messages, options, False, reply_timeout=_STREAM_REPLY_TIMEOUT
            )
        except InvalidRequest:
            return "none"  # the engine's tokenizer will reject these options, too
        except NanoactorError as error:
            if not self._is_guessing:
                self._is_guessing = True
                log.warning(
                    "reasoning and content may not be separated correctly until the text "
                    "service answers: %s",
                    error,
                )
            return self.template.thoughts
        self._is_guessing = False
        return self.template.effective_thoughts(cast(Thoughts, thoughts))

    async def _call(
        self, kind: type[T], method: str, *arguments: Any, reply_timeout: float = _REPLY_TIMEOUT
    ) -> T:
        """Call a method of the worker, and decode its result as `kind`."""
        try:
            encoded = msgspec.msgpack.encode(arguments)
        except OverflowError:
            raise InvalidRequest("token ids must be from 0 to 2147483647") from None
        if len(encoded) > self._max_bytes:
            raise InvalidRequest(
                f"the input has {len(encoded)} bytes, but at most {self._max_bytes} are accepted"
            )
        if self._dead is not None:
            raise self._dead
        assert self._client is not None
        try:
            async with asyncio.timeout(reply_timeout):
                reply = await self._client.call(method, encoded)
        except PeerBroken:
            raise self._dead or EngineDead("the text service is closed") from None
        except TimeoutError:
            self._is_silent = True
            raise EngineDead(
                f"the text service did not answer within {reply_timeout:g} s"
            ) from None
        self._is_silent = False
        if reply.error:
            raise (OutOfResources if reply.refused else InvalidRequest)(reply.error)
        return msgspec.msgpack.decode(reply.result, type=kind)


def _topology(config: tuple[Path, RenderOptions, tuple[int, ...]], max_bytes: int) -> Topology:
    ring_bytes = ring_capacity(8 * max_bytes + (1 << 20))
    nodes = (
        NodeSpec("user", ("server",)),
        NodeSpec(
            "text_service",
            ("text_service",),
            LIGHT_ENVIRONMENT,
            _HEAVY_MODULES,
            nice=_NICE,
        ),
    )
    actors = (
        ActorSpec("server", f"{__name__}:TextClient", None),
        ActorSpec("text_service", f"{__name__}:TextWorker", config),
    )
    edges = (
        EdgeSpec("server", ("text_service",), ring_bytes),
        EdgeSpec("text_service", ("server",), ring_bytes, bound=_MAX_IN_FLIGHT),
    )
    return Topology(actors, nodes, edges, "user")


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequest(f"messages must contain only JSON values: {error}") from None
