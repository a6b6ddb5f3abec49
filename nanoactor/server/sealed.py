"""Reasoning in a field that clients keep and send back without reading it.

Both APIs have one: `encrypted_content` of a reasoning item, and `signature` of a thinking block
whose text is omitted. Nothing is encrypted: the operator of the server can read everything anyway,
and reasoning that is sent back lets the next prompt match the last, token by token.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_MARK = "nanoactor1."
_RATIO = 4
"""Bytes that a packed byte may unpack to, so that a request unpacks to a few times its own size."""


def seal(thoughts: str) -> str:
    """Return reasoning as printable ASCII, compressed unless the ratio exceeds `unseal`'s limit."""
    text = thoughts.encode("utf-8", "replace")
    packed = zlib.compress(text)
    if len(text) > _RATIO * len(packed):
        packed = zlib.compress(text, level=0)
    return _MARK + base64.urlsafe_b64encode(packed).decode()


def unseal(text: str) -> str | None:
    """Return the text given to `seal`, or None for any other text."""
    if not text.startswith(_MARK):
        return None
    try:
        packed = base64.b64decode(text.removeprefix(_MARK), b"-_", validate=True)
        reader = zlib.decompressobj()
        thoughts = reader.decompress(packed, _RATIO * len(packed) + 1)
        return thoughts.decode() if reader.eof else None
    except (binascii.Error, zlib.error, ValueError):
        return None
