"""Main program of the child process that runs a chat template, and any tokenizer that may need
unbounded time or memory.

It reads requests from standard input and writes replies to standard output. Each message is an
8-byte length followed by JSON. The process ends when its input ends.
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
_MAX_MEMORY = 1 << 30
"""Maximum address space in bytes. The limit is needed because a template can double a text
repeatedly."""

_MAX_TOKENIZER_MEMORY = 4 << 30
"""Maximum address space in bytes with a loaded tokenizer, whose vocabulary needs memory too."""


def main(directory: str, characters: int) -> None:
    """Serve requests until the input ends. `characters` is the maximum length of a rendered prompt.
    The first request contains the template's source, or null for the model's own template."""
    ignore_group_signals()
    _limit_memory(_MAX_MEMORY)
    (source,) = _read_request()
    try:
        template = ChatTemplate(Path(directory), characters, source)
    except ModelError as error:
        _write_reply({"model_error": str(error)})
        return
    except Exception as error:  # an invalid template may raise any exception
        _write_reply({"model_error": f"the model's chat template is malformed: {error!r}"})
        return
    _write_reply({"value": None})
    while request := _read_request():
        _write_reply(_handle(template, Path(directory), request))


def _read_request() -> list[Any]:
    """Read the next request. Return an empty list if the input has ended."""
    header = os.read(0, LENGTH.size)
    if not header:
        return []
    (length,) = LENGTH.unpack(header)
    found: list[Any] = json.loads(_read(length))
    return found


def _limit_memory(size: int) -> None:
    """Limit the address space to `size` bytes, or to the user's hard limit if that is lower."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    max_size = (
        _MAX_TOKENIZER_MEMORY
        if hard == resource.RLIM_INFINITY
        else min(hard, _MAX_TOKENIZER_MEMORY)
    )
    resource.setrlimit(resource.RLIMIT_AS, (min(size, max_size), max_size))


def _handle(template: ChatTemplate, directory: Path, request: list[Any]) -> dict[str, Any]:
    try:
        if request[0] == "encode":
            return {"value": _encode(directory, request[1])}
        if request[0] == "spans":
            return {"value": _spans(directory, request[1])}
        return {"value": _run_template(template, request)}
    except InvalidRequest as error:
        # After reaching the memory limit once, the process may stay close to it.
        return {"error": str(error), "must_restart": isinstance(error.__cause__, MemoryError)}
    except OutOfResources:
        gib = _MAX_TOKENIZER_MEMORY >> 30
        return {
            "error": f"the tokenizer needs more than {gib} GiB of memory for the text",
            "must_restart": True,
        }
    except Exception as error:  # the request is not a valid conversation
        return {"error": f"the prompt cannot be tokenized: {error!r}", "must_restart": True}


def _run_template(template: ChatTemplate, request: list[Any]) -> Any:
    match request:
        case ["facts"]:
            return dataclasses.asdict(template.facts())
        case ["probe"]:
            return template.probe()
        case _:
            _, messages, options = request
            return template.render(json.loads(messages), json.loads(options))


def _encode(directory: Path, pieces: list[Any]) -> list[list[int]]:
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

    _limit_memory(_MAX_TOKENIZER_MEMORY)
    return load_tokenizer(directory)


def _read(length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = os.read(0, length - len(data))
        if not part:
            raise SystemExit(0)
        data += part
    return bytes(data)


def _write_reply(value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    data = memoryview(LENGTH.pack(len(body)) + body)
    while data:
        data = data[os.write(1, data) :]
