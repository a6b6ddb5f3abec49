"""The process that runs a chat template, and a tokenizer that is not known to be bounded: requests
on standard input, replies on standard output.

Each is a length of 8 bytes and JSON. The process ends when its input does.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import resource
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoactor.errors import InvalidRequest, OutOfResources
from nanoactor.models.errors import ModelError
from nanoactor.runtime.process import ignore_group_signals
from nanoactor.text.template import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LENGTH = struct.Struct("<Q")
_MOST_MEMORY = 1 << 30
"""Bytes of address space: a template can double a text in a few steps."""


_MOST_FOR_TOKENS = 4 << 30
"""Address space for a tokenizer, as its vocabulary takes some."""


def main(directory: str, characters: int) -> None:
    """Serve until the input ends; a prompt may have `characters` characters. The first request has
    the source of the template, or null for the model's own."""
    ignore_group_signals()
    _limit_memory(_MOST_MEMORY)
    (source,) = _request()
    try:
        template = ChatTemplate(Path(directory), characters, source)
    except ModelError as error:
        _say({"model_error": str(error)})
        return
    except Exception as error:  # a template can be wrong in any way
        _say({"model_error": f"the model's chat template is malformed: {error!r}"})
        return
    _say({"value": None})
    while request := _request():
        _say(_answer(template, Path(directory), request))


def _request() -> list[Any]:
    """Return the next request; an empty one if the input ends."""
    head = os.read(0, LENGTH.size)
    if not head:
        return []
    (length,) = LENGTH.unpack(head)
    found: list[Any] = json.loads(_read(length))
    return found


def _limit_memory(size: int) -> None:
    """Limit the address space to `size`, or to the user's lower limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _MOST_FOR_TOKENS if hard == resource.RLIM_INFINITY else min(hard, _MOST_FOR_TOKENS)
    resource.setrlimit(resource.RLIMIT_AS, (min(size, most), most))


def _answer(template: ChatTemplate, directory: Path, request: list[Any]) -> dict[str, Any]:
    try:
        if request[0] == "encode":
            return {"value": _encoded(directory, request[1])}
        if request[0] == "spans":
            return {"value": _spans(directory, request[1])}
        return {"value": _value(template, request)}
    except InvalidRequest as error:
        # Once at the limit, the process may stay near it.
        return {"error": str(error), "spent": isinstance(error.__cause__, MemoryError)}
    except OutOfResources:
        gib = _MOST_FOR_TOKENS >> 30
        return {"error": f"the tokenizer needs more than {gib} GiB for the text", "spent": True}
    except Exception as error:  # what came is no conversation
        return {"error": f"the prompt cannot be tokenized: {error!r}", "spent": True}


def _value(template: ChatTemplate, request: list[Any]) -> Any:
    match request:
        case ["facts"]:
            return dataclasses.asdict(template.facts())
        case ["probe"]:
            return template.probe()
        case _:
            _, messages, options = request
            return template.render(json.loads(messages), json.loads(options))


def _encoded(directory: Path, pieces: list[Any]) -> list[list[int]]:
    from nanoactor.text.tokenizer import encode_all

    return encode_all(_tokenizer(directory), pieces)


def _spans(directory: Path, prompts: list[Any]) -> list[tuple[list[int], list[int]]]:
    from nanoactor.text.spans import SpanFinder

    finder = SpanFinder(_tokenizer(directory))
    found = [finder.of_text(p) if isinstance(p, str) else finder.of_ids(p) for p in prompts]
    return [(list(first), starts) for first, starts in found]


@functools.cache
def _tokenizer(directory: Path) -> Tokenizer:
    from nanoactor.text.tokenizer import load_tokenizer

    _limit_memory(_MOST_FOR_TOKENS)
    return load_tokenizer(directory)


def _read(length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = os.read(0, length - len(data))
        if not part:
            raise SystemExit(0)
        data += part
    return bytes(data)


def _say(value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    data = memoryview(LENGTH.pack(len(body)) + body)
    while data:
        data = data[os.write(1, data) :]
