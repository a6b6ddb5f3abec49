"""Messages between an ingress (an HTTP server) and a replica (an engine): the classes below,
encoded as msgpack and never pickled.

One long-lived *link* connects an ingress to a replica. The replica sends *reports*, each with the
new output of all streams on the link. The ingress sends *orders*, one batch at a time.
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
"""Version of this format. It is part of the fingerprint, so that no stream resumes on a replica
with another version."""


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base class of messages, which are encoded as arrays without field names."""


# -- ingress to replica --------------------------------------------------------------------------


class Begin(_Wire, frozen=True, tag="begin"):
    """Order to run a request, or to resume one of its sequences."""

    stream: int
    """Number of the stream, assigned by the ingress."""
    request_id: str
    token_ids: bytes
    """Token ids of the prompt, int32, with one placeholder per image."""
    params: bytes
    priority: int
    media: tuple[bytes, ...]
    emitted_ids: bytes
    """Ids of the output tokens that a resumed sequence has already sent to its reader, int32."""
    emitted_characters: int
    """Number of output characters that the sequence has already sent to its reader; -1 for a new
    stream."""
    is_alone: bool
    """True if the replica must run nothing else, because the stream may crash it."""
    is_pooling: bool
    """True if the request returns a vector. `params` is unused in that case."""


class Abort(_Wire, frozen=True, tag="abort"):
    """Order to abort a stream whose output is no longer read."""

    stream: int


class Reserve(_Wire, frozen=True, tag="reserve"):
    """Order to reserve the replica for a stream that must run alone, or to release the
    reservation."""

    is_wanted: bool


class Close(_Wire, frozen=True, tag="close"):
    """Order to end the link and all of its streams."""


Order = Begin | Abort | Reserve | Close


class Orders(_Wire, frozen=True):
    """A batch of orders. The next batch is sent after the replica has processed this one."""

    link: str
    last_report: int
    """Number of the last report that the ingress has read. This acknowledges that report and all
    earlier ones."""
    orders: list[Order]


# -- replica to ingress --------------------------------------------------------------------------


class Hello(_Wire, frozen=True):
    """Properties of a replica, sent with the first report on a link."""

    fingerprint: str
    """Digest that is equal for replicas which can resume each other's sequences."""
    facts: dict[str, Any]
    """`AsyncLLM.facts`, plus the pid and the host name of the replica's process."""
    max_num_seqs: int
    max_waiting_requests: int


class Load(_Wire, frozen=True):
    """Load of a replica, over all ingresses."""

    running: int
    """Number of streams that have produced output."""
    waiting: int
    """Number of streams without any output so far."""
    waiting_tokens: int
    """Number of prompt tokens of the waiting streams."""
    free_blocks: int
    """Number of free KV blocks."""
    streams: int
    """Number of unfinished streams."""
    token_seconds: float
    """Prefill time per token in seconds; 0 until it has been measured."""
    is_reserved: bool
    figures: dict[str, float] = {}
    """Figures for `/metrics`, by name; empty if there is no new sample."""


class Delta(_Wire, frozen=True):
    """New output of one sequence."""

    stream: int
    index: int
    text: str
    token_ids: bytes
    """Ids of the new tokens, int32."""
    logprobs: list[Any] | None
    offsets: list[int] | None
    finish_reason: str | None
    stop_reason: int | str | None
    vector: bytes
    """Result of a pooling request, float32, sent at its end; otherwise empty."""


class Progress(_Wire, frozen=True):
    """State of a stream besides its output: acceptance of the request, data about the prompt, and
    the end."""

    stream: int
    prompt_token_ids: bytes | None
    """Token ids of the prompt, int32, with image placeholders expanded to one token per embedding
    vector. Sent once, after the request was accepted; otherwise None."""
    prompt_logprobs: list[Any] | None
    is_finished: bool
    cached_tokens: int
    preemptions: int
    queue_seconds: float
    """Time from the request's arrival to its first step in seconds; negative if unknown."""


class Failure(_Wire, frozen=True):
    """Error that ended a stream."""

    stream: int
    kind: str
    """Name of the error's class."""
    text: str


class IndexUpdate(_Wire, frozen=True):
    """Changes of a replica's prefix index (the KV blocks that it has cached), as concatenated block
    hashes of 16 bytes each."""

    cleared: bool
    forgotten: bytes
    remembered: bytes


class Report(_Wire, frozen=True):
    """All new output on a link, and the current state of the replica."""

    number: int
    """Number of the report on its link, counted from 1."""
    orders_processed: int
    """Number of the link's orders that the replica has processed so far."""
    hello: Hello | None = None
    load: Load | None = None
    deltas: list[Delta] = []
    progress: list[Progress] = []
    failures: list[Failure] = []
    declined: list[int] = []
    """Numbers of the streams that the replica did not start because it is reserved. The ingress
    must run them elsewhere."""
    is_vacant: bool = False
    """True if this link has reserved the replica and no stream is running."""
    index: list[IndexUpdate] = []


_ENCODER = msgspec.msgpack.Encoder()
_ORDERS = msgspec.msgpack.Decoder(Orders)
_REPORT = msgspec.msgpack.Decoder(Report)


def encode(message: Orders | Report) -> bytes:
    """Encode a message as msgpack."""
    return _ENCODER.encode(message)


def decode_orders(data: bytes) -> Orders:
    """Decode a batch of orders. Raises `msgspec.DecodeError`, or its subclass `ValidationError`,
    for malformed data."""
    return _ORDERS.decode(data)


def decode_report(data: bytes) -> Report:
    """Decode a report. Raises the same errors as `decode_orders`."""
    return _REPORT.decode(data)


# -- values --------------------------------------------------------------------------------------


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """Encode token ids as int32 bytes."""
    return np.asarray(ids, np.int32).tobytes()


def bytes_to_ids(data: bytes) -> list[int]:
    """Decode token ids from int32 bytes."""
    ids: list[int] = np.frombuffer(data, np.int32).tolist()
    return ids


_CAP = "max_tokens_cap"


def params_to_bytes(params: SamplingParams) -> bytes:
    """Encode sampling parameters as msgpack. Defaults and `output_kind` are omitted."""
    changed = {
        field.name: value
        for field in dataclasses.fields(SamplingParams)
        if (value := getattr(params, field.name)) != field.default and field.name != "output_kind"
    }
    if isinstance(changed.get("max_tokens"), DefaultTokens):
        del changed["max_tokens"]
    if isinstance(changed.get("max_tokens"), TokenCap):
        changed[_CAP] = int(changed.pop("max_tokens"))
    return msgspec.msgpack.encode(changed)


def bytes_to_params(data: bytes) -> SamplingParams:
    """Decode sampling parameters, and set the output kind to DELTA. Raises `InvalidRequest` for an
    invalid value."""
    values = msgspec.msgpack.decode(data)
    if _CAP in values:
        values["max_tokens"] = TokenCap(values.pop(_CAP))
    if constraint := values.get("structured_outputs"):
        if constraint.get("tools") is not None:
            constraint["tools"] = msgspec.convert(constraint["tools"], ToolGrammar)
        values["structured_outputs"] = StructuredOutputsParams.of(constraint)
    return SamplingParams(**values, output_kind=RequestOutputKind.DELTA)


def media_to_bytes(media: Media) -> bytes:
    """Serialize an image or a video, without decoding it."""
    return msgspec.msgpack.encode(media)


def bytes_to_media(data: bytes) -> Media:
    """Deserialize an image or a video that `media_to_bytes` serialized."""
    fields = msgspec.msgpack.decode(data)
    return Media(
        form=fields["form"],
        shape=tuple(fields["shape"]),
        area=tuple(fields["area"]),
        data=fields["data"],
        frames=tuple(fields["frames"]),
        times=tuple(fields["times"]),
    )


def emitted_output(order: Begin) -> OutputSoFar | None:
    """Return the output that a resumed stream has already sent to its reader, or None for a new
    stream."""
    if order.emitted_characters < 0:
        return None
    return OutputSoFar(bytes_to_ids(order.emitted_ids), order.emitted_characters)


def pack_logprobs(logprobs: Sequence[Logprobs | None] | None) -> list[Any] | None:
    """Convert log-probabilities to lists, which msgpack can encode. None stays None."""
    if logprobs is None:
        return None
    return [
        None
        if entries is None
        else [(token, entry.logprob, entry.rank, entry.bytes) for token, entry in entries.items()]
        for entries in logprobs
    ]


def unpack_logprobs(packed: list[Any] | None) -> list[Any] | None:
    """Convert the lists of `pack_logprobs` back to log-probabilities."""
    if packed is None:
        return None
    return [None if entries is None else _logprobs(entries) for entries in packed]


def _logprobs(entries: Sequence[Sequence[Any]]) -> Mapping[int, Logprob]:
    return {token: Logprob.of(logprob, rank, piece) for token, logprob, rank, piece in entries}
