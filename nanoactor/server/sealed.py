"""Reasoning in an opaque field that clients store and send back without reading it.

The Responses API and the Messages API each have such a field: `encrypted_content` of a reasoning
item, and `signature` of a thinking block whose text is omitted. Nothing is encrypted, as the
operator of the server can read everything anyway. Reasoning that is sent back lets the next prompt
match the previous one, token by token.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_MARK = "nanoactor1."
_RATIO = 4
"""Maximum number of bytes to which one compressed byte may expand, so that a request expands to at
most a few times its own size."""


def seal(thoughts: str) -> str:
    """Return reasoning as printable ASCII; it is compressed unless the compression ratio exceeds
    the limit of `unseal`."""
    text = thoughts.encode("utf-8", "replace")
    packed = zlib.compress(text)
    if len(text) > _RATIO * len(packed):
        packed = zlib.compress(text, level=0)
    return _MARK + base64.urlsafe_b64encode(packed).decode()


def unseal(text: str) -> str | None:
    """Return the reasoning that `seal` has encoded as this text, or None for any other text."""
    if not text.startswith(_MARK):
        return None
    try:
        packed = base64.b64decode(text.removeprefix(_MARK), b"-_", validate=True)
        reader = zlib.decompressobj()
        thoughts = reader.decompress(packed, _RATIO * len(packed) + 1)
        return thoughts.decode() if reader.eof else None
    except (binascii.Error, zlib.error, ValueError):
        return None
