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

_PREFIX = "nanoactor1."
_MAX_EXPANSION = 4
"""Maximum number of bytes to which one compressed byte may expand, so that a request expands to at
most a few times its own size."""


def seal(thoughts: str) -> str:
    """Return reasoning as printable ASCII; it is compressed unless the compression ratio exceeds
    the limit of `unseal`."""
    text = thoughts.encode("utf-8", "replace")
    packed = zlib.compress(text)
    if len(text) > _MAX_EXPANSION * len(packed):
        packed = zlib.compress(text, level=0)
    return _PREFIX + base64.urlsafe_b64encode(packed).decode()


def unseal(text: str) -> str | None:
    """Return the reasoning that `seal` has encoded as this text, or None for any other text."""
    if not text.startswith(_PREFIX):
        return None
    try:
        packed = base64.b64decode(text.removeprefix(_PREFIX), b"-_", validate=True)
        decompressor = zlib.decompressobj()
        thoughts = decompressor.decompress(packed, _MAX_EXPANSION * len(packed) + 1)
        return thoughts.decode() if decompressor.eof else None
    except (binascii.Error, zlib.error, ValueError):
        return None
