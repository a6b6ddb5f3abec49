"""Messages between ingress and replica: the structs below, encoded as msgpack, never pickled.

One long-lived *link* connects an ingress and a replica. The replica sends *reports*, each with the
new output of all streams on the link; the ingress sends *orders*, one batch at a time.
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
"""Version of this format. It is part of the fingerprint, so that a stream does not resume on a
replica with another version."""


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of messages that are encoded as positional arrays."""


# -- ingress to replica --------------------------------------------------------------------------


class Begin(_Wire, frozen=True, tag="begin"):
    """Run a request, or the rest of one of its sequences."""

    stream: int
    """Number that the ingress has given to the stream."""
    request_id: str
    token_ids: bytes
    """The prompt's token ids, int32; each picture is one placeholder."""
    params: bytes
    priority: int
    media: tuple[bytes, ...]
    emitted_ids: bytes
    """Token ids, int32, that a resumed sequence has already emitted."""
    emitted_characters: int
    """Number of characters that the sequence has already emitted; -1 if the stream is new."""
    is_alone: bool
    """True if the stream must run alone because it may crash the replica."""
    is_pooling: bool
    """True if the request returns a vector; `params` is then unused."""


class Abort(_Wire, frozen=True, tag="abort"):
    """End a stream that is no longer read."""

    stream: int


class Reserve(_Wire, frozen=True, tag="reserve"):
    """Reserve the replica, which then accepts only a stream that is to run alone, or release it."""

    is_wanted: bool


class Close(_Wire, frozen=True, tag="close"):
    """End the link, and all of its streams."""


Order = Begin | Abort | Reserve | Close


class Orders(_Wire, frozen=True):
    """A batch of orders. The next batch is sent once the replica has processed this one."""

    link: str
    last_report: int
    """Number of the last report that the ingress has read; bounds how many more may be sent."""
    orders: list[Order]


# -- replica to ingress --------------------------------------------------------------------------


class Hello(_Wire, frozen=True):
    """Description of a replica, sent in its first report on a link."""

    fingerprint: str
    """Replicas with the same fingerprint can resume each other's sequences."""
    facts: dict[str, Any]
    """`AsyncLLM.facts`, plus the pid and the host of the replica's process."""
    max_num_seqs: int
    max_waiting_requests: int


class Load(_Wire, frozen=True):
    """The load of a replica, over all ingresses."""

    running: int
    """Number of streams with a first output."""
    waiting: int
    """Number of streams without a first output."""
    waiting_tokens: int
    """Number of prompt tokens of the waiting streams."""
    free_blocks: int
    """Number of free KV cache blocks."""
    streams: int
    """Number of streams that have not ended."""
    token_seconds: float
    """Prefill seconds per token; 0 if not known yet."""
    is_reserved: bool
    figures: dict[str, float] = {}
    """Figures for /metrics, by name; empty if there is no new sample."""


class Delta(_Wire, frozen=True):
    """New output of a sequence."""

    stream: int
    index: int
    text: str
    token_ids: bytes
    """New token ids, int32."""
    logprobs: list[Any] | None
    offsets: list[int] | None
    finish_reason: str | None
    stop_reason: int | str | None
    vector: bytes
    """The result of a pooling request, float32, sent when it ends; otherwise empty."""


class Progress(_Wire, frozen=True):
    """New facts about a stream as a whole; the output of its sequences is sent as `Delta`s."""

    stream: int
    prompt_token_ids: bytes | None
    """If the request was just accepted: its prompt's token ids, int32, with one token for each row
    of its pictures."""
    prompt_logprobs: list[Any] | None
    is_finished: bool
    cached_tokens: int
    preemptions: int
    queue_seconds: float
    """Seconds between the request's arrival and its first step; negative if not known."""


class Failure(_Wire, frozen=True):
    """The error that ended a stream."""

    stream: int
    kind: str
    """Name of the error's class."""
    text: str


class IndexUpdate(_Wire, frozen=True):
    """Changes of the prefix index; hashes are 16 bytes each, concatenated."""

    cleared: bool
    forgotten: bytes
    remembered: bytes


class Report(_Wire, frozen=True):
    """Everything new on a link: the output of its streams, and the state of the replica."""

    number: int
    """Number of the report on its link, from 1 without gaps."""
    orders_processed: int
    """Number of the link's orders that the replica has processed."""
    hello: Hello | None = None
    load: Load | None = None
    deltas: list[Delta] = []
    progress: list[Progress] = []
    failures: list[Failure] = []
    declined: list[int] = []
    """Streams that the replica refused because it is reserved; they have to run elsewhere."""
    is_vacant: bool = False
    """True if the replica is reserved for this link and runs no streams."""
    index: list[IndexUpdate] = []


_ENCODER = msgspec.msgpack.Encoder()
_ORDERS = msgspec.msgpack.Decoder(Orders)
_REPORT = msgspec.msgpack.Decoder(Report)


def encode(message: Orders | Report) -> bytes:
    """Encode a message between ingress and replica."""
    return _ENCODER.encode(message)


def decode_orders(data: bytes) -> Orders:
    """Decode a batch of orders. Raises `msgspec.DecodeError`, or its subclass `ValidationError`."""
    return _ORDERS.decode(data)


def decode_report(data: bytes) -> Report:
    """Decode a report. Raises the same errors as `decode_orders`."""
    return _REPORT.decode(data)


# -- values --------------------------------------------------------------------------------------


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """Encode token ids as int32."""
    return np.asarray(ids, np.int32).tobytes()


def bytes_to_ids(data: bytes) -> list[int]:
    """Decode token ids from int32."""
    ids: list[int] = np.frombuffer(data, np.int32).tolist()
    return ids


_CAP = "max_tokens_cap"


def params_to_bytes(params: SamplingParams) -> bytes:
    """Encode sampling parameters, without default values and without `output_kind`."""
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
    """Decode sampling parameters, for delta outputs. Raises `InvalidRequest` if one is invalid."""
    values = msgspec.msgpack.decode(data)
    if _CAP in values:
        values["max_tokens"] = TokenCap(values.pop(_CAP))
    if constraint := values.get("structured_outputs"):
        if constraint.get("tools") is not None:
            constraint["tools"] = msgspec.convert(constraint["tools"], ToolGrammar)
        values["structured_outputs"] = StructuredOutputsParams.of(constraint)
    return SamplingParams(**values, output_kind=RequestOutputKind.DELTA)


def media_to_bytes(media: Media) -> bytes:
    """Serialize a picture or a video without decoding it."""
    return msgspec.msgpack.encode(media)


def bytes_to_media(data: bytes) -> Media:
    """Deserialize a picture or a video from `media_to_bytes`."""
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
    """Return the output that a stream has already emitted, or None if the stream is new."""
    if order.emitted_characters < 0:
        return None
    return OutputSoFar(bytes_to_ids(order.emitted_ids), order.emitted_characters)


def pack_logprobs(logprobs: Sequence[Logprobs | None] | None) -> list[Any] | None:
    """Return log-probabilities as plain lists."""
    if logprobs is None:
        return None
    return [
        None
        if entries is None
        else [(token, entry.logprob, entry.rank, entry.bytes) for token, entry in entries.items()]
        for entries in logprobs
    ]


def unpack_logprobs(packed: list[Any] | None) -> list[Any] | None:
    """Return log-probabilities from the lists that `pack_logprobs` made."""
    if packed is None:
        return None
    return [None if entries is None else _logprobs(entries) for entries in packed]


def _logprobs(entries: Sequence[Sequence[Any]]) -> Mapping[int, Logprob]:
    return {token: Logprob.of(logprob, rank, piece) for token, logprob, rank, piece in entries}
