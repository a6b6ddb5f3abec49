"""Messages between ingress and replica: msgpack of the structs below, never a pickle.

One long-lived *link* joins an ingress and a replica. On it the replica sends *reports*, each with
what is ready for all streams of the link; the ingress sends *orders*, one batch at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from nanoactor.requests.grammar_spec import ToolGrammar
from nanoactor.requests.outputs import Logprob, Logprobs, OutputSoFar, RequestOutputKind
from nanoactor.requests.params import DefaultTokens, SamplingParams, TokenCap
from nanoactor.requests.structured_outputs import StructuredOutputsParams
from nanoactor.vision.media import Media

VERSION = 2
"""Version of this format: part of the fingerprint, so that replicas with another are not used."""


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of messages that are encoded as positional arrays."""


# -- ingress to replica --------------------------------------------------------------------------


class Begin(_Wire, frozen=True, tag="begin"):
    """Run a request, or the rest of one of its sequences."""

    stream: int
    """The ingress's number of the stream on this link."""
    request_id: str
    token_ids: bytes
    """int32: the prompt, in which a picture is one placeholder."""
    params: bytes
    priority: int
    media: tuple[bytes, ...]
    told_ids: bytes
    """int32: tokens of its single sequence that were reported before."""
    told_characters: int
    """Characters reported before; -1: the stream is new."""
    is_alone: bool
    """True if it must run alone because it may crash the replica."""
    pools: bool
    """True if it returns a vector; `params` are then unused."""


class Abort(_Wire, frozen=True, tag="abort"):
    """End a stream that is no longer read."""

    stream: int


class Reserve(_Wire, frozen=True, tag="reserve"):
    """Accept only new streams that run alone, or accept all again."""

    wanted: bool


class Close(_Wire, frozen=True, tag="close"):
    """End the link, and all of its streams."""


Order = Begin | Abort | Reserve | Close


class Orders(_Wire, frozen=True):
    """A batch. The next one is sent when the replica has taken this one."""

    link: str
    read: int
    """Number of reports that the ingress has read: the window for further ones."""
    orders: list[Order]


# -- replica to ingress --------------------------------------------------------------------------


class Hello(_Wire, frozen=True):
    """The first message of a replica on a link."""

    fingerprint: str
    """Replicas with the same fingerprint resume each other's sequences."""
    facts: dict[str, Any]
    """Those of `AsyncLLM.facts`, and the location of the replica's process."""
    max_num_seqs: int
    max_waiting_requests: int


class Load(_Wire, frozen=True):
    """The load of a replica, all ingresses together."""

    running: int
    """Sequences with a slot."""
    waiting: int
    """Requests without a first token."""
    waiting_tokens: int
    """Tokens of their prompts."""
    free_blocks: int
    """Free blocks of the KV cache."""
    streams: int
    """Streams of all ingresses."""
    token_seconds: float
    """Prefill time per token; 0: not known yet."""
    is_reserved: bool
    figures: dict[str, float] = {}
    """For /metrics, by name; empty without a new look since."""


class Delta(_Wire, frozen=True):
    """News of a sequence."""

    stream: int
    index: int
    text: str
    token_ids: bytes
    """Token ids, int32."""
    logprobs: list[Any] | None
    offsets: list[int] | None
    finish_reason: str | None
    stop_reason: int | str | None
    vector: bytes
    """float32: the result of a pooling request, with its end; else empty."""


class Progress(_Wire, frozen=True):
    """News of a stream as a whole; news of its sequences is sent separately."""

    stream: int
    accepted: bytes | None
    """int32: the prompt, with a token for each row of its pictures."""
    prompt_logprobs: list[Any] | None
    is_over: bool
    cached_tokens: int
    preemptions: int
    queued: float
    """Seconds waited for the first step; below 0: not known."""


class Failure(_Wire, frozen=True):
    """A stream has ended with an error."""

    stream: int
    kind: str
    """The name of the error's class."""
    text: str


class IndexNews(_Wire, frozen=True):
    """Changes of the prefix index: hashes of 16 bytes each, concatenated."""

    cleared: bool
    forgotten: bytes
    remembered: bytes


class Report(_Wire, frozen=True):
    """News of all streams of a link."""

    number: int
    """From 1 on, without gaps."""
    orders: int
    """Number of orders that the replica has taken."""
    hello: Hello | None = None
    load: Load | None = None
    deltas: list[Delta] = []
    progress: list[Progress] = []
    failures: list[Failure] = []
    declined: list[int] = []
    """Streams refused here, which have to go elsewhere."""
    is_alone: bool = False
    """True if the ingress that reserved the replica now has it to itself."""
    index: list[IndexNews] = []


_ENCODER = msgspec.msgpack.Encoder()
_ORDERS = msgspec.msgpack.Decoder(Orders)
_REPORT = msgspec.msgpack.Decoder(Report)


def encode(message: Orders | Report) -> bytes:
    """Return a message as bytes."""
    return _ENCODER.encode(message)


def decode_orders(data: bytes) -> Orders:
    """Read a batch. Raises `msgspec.DecodeError`, or its `ValidationError`."""
    return _ORDERS.decode(data)


def decode_report(data: bytes) -> Report:
    """Decode a report. Raises the same errors as `decode_orders`."""
    return _REPORT.decode(data)


# -- values --------------------------------------------------------------------------------------


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """Return token ids as int32."""
    return np.asarray(ids, np.int32).tobytes()


def bytes_to_ids(data: bytes) -> list[int]:
    """Return the token ids encoded as int32 in these bytes."""
    found: list[int] = np.frombuffer(data, np.int32).tolist()
    return found


_CAP = "max_tokens_cap"


def params_to_bytes(params: SamplingParams) -> bytes:
    """Return parameters without default values and without the kind of output."""
    given = {
        field.name: value
        for field in dataclasses.fields(SamplingParams)
        if (value := getattr(params, field.name)) != field.default and field.name != "output_kind"
    }
    if isinstance(given.get("max_tokens"), DefaultTokens):
        del given["max_tokens"]
    if isinstance(given.get("max_tokens"), TokenCap):
        given[_CAP] = int(given.pop("max_tokens"))
    return msgspec.msgpack.encode(given)


def bytes_to_params(data: bytes) -> SamplingParams:
    """Return parameters for delta outputs. Raises `InvalidRequest`."""
    given = msgspec.msgpack.decode(data)
    if _CAP in given:
        given["max_tokens"] = TokenCap(given.pop(_CAP))
    if wanted := given.get("structured_outputs"):
        if wanted.get("tools") is not None:
            wanted["tools"] = msgspec.convert(wanted["tools"], ToolGrammar)
        given["structured_outputs"] = StructuredOutputsParams.of(wanted)
    return SamplingParams(**given, output_kind=RequestOutputKind.DELTA)


def media_to_bytes(media: Media) -> bytes:
    """Return a picture or a video, undecoded."""
    return msgspec.msgpack.encode(media)


def bytes_to_media(data: bytes) -> Media:
    """Return a picture or a video that was written so."""
    given = msgspec.msgpack.decode(data)
    return Media(
        form=given["form"],
        shape=tuple(given["shape"]),
        area=tuple(given["area"]),
        data=given["data"],
        frames=tuple(given["frames"]),
        times=tuple(given["times"]),
    )


def so_far_of(order: Begin) -> OutputSoFar | None:
    """Return the output emitted before, or None for a new stream."""
    if order.told_characters < 0:
        return None
    return OutputSoFar(bytes_to_ids(order.told_ids), order.told_characters)


def pack_logprobs(given: Sequence[Logprobs | None] | None) -> list[Any] | None:
    """Return log-probabilities as plain lists."""
    if given is None:
        return None
    return [
        None
        if each is None
        else [(token, one.logprob, one.rank, one.bytes) for token, one in each.items()]
        for each in given
    ]


def unpack_logprobs(given: list[Any] | None) -> list[Any] | None:
    """Return log-probabilities that were written so."""
    if given is None:
        return None
    return [None if each is None else _logprobs(each) for each in given]


def _logprobs(given: Sequence[Sequence[Any]]) -> Mapping[int, Logprob]:
    return {token: Logprob.of(logprob, rank, piece) for token, logprob, rank, piece in given}
