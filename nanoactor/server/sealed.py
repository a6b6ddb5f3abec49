"""Thoughts in a field that clients keep and send back without reading it.

Both APIs have one: `encrypted_content` of a reasoning item, and `signature` of a thinking block
whose text is omitted. Nothing is encrypted here: whoever runs the server may read all of it anyway,
and thoughts that come back let the next prompt be the same as the last, token by token.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_MARK = "nanoactor1."
_MOST, _LEAST, _RATIO = 1 << 20, 1 << 12, 10
"""Bytes of thoughts that are read from such a field: no more than this many, and than so many times
its own, beyond the first few. A request could hold many fields that unpack to a thousandfold."""


def seal(thoughts: str) -> str:
    """Return thoughts as printable ASCII; those that repeat themselves so much that `unseal` would
    not read them are not packed."""
    text = thoughts.encode("utf-8", "replace")
    packed = zlib.compress(text)
    if len(text) > _LEAST + _RATIO * len(packed):
        packed = zlib.compress(text, level=0)
    return _MARK + base64.urlsafe_b64encode(packed).decode()


def unseal(text: str) -> str | None:
    """Return what `seal` was given; None for anything that it has not made."""
    if not text.startswith(_MARK):
        return None
    try:
        packed = base64.b64decode(text.removeprefix(_MARK), b"-_", validate=True)
        reader = zlib.decompressobj()
        thoughts = reader.decompress(packed, min(_MOST, _LEAST + _RATIO * len(packed)))
        return thoughts.decode() if reader.eof else None
    except (binascii.Error, zlib.error, ValueError):
        return None
