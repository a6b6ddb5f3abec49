"""Encoding of reasoning in an opaque field that clients store and send back unread.

The Responses API and the Messages API each have such a field: `encrypted_content` of a reasoning
item, and `signature` of a thinking block whose text is omitted. Nothing is encrypted, because the
server's operator can read everything anyway. With the reasoning sent back, the next prompt repeats
the previous one token by token, and the prefix cache applies.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_PREFIX = "nanoactor1."
_MAX_EXPANSION = 4
"""Maximum number of bytes to which a compressed byte may expand, so that a request expands to a few
times its own size at most."""


def seal(thoughts: str) -> str:
    """Encode reasoning as printable ASCII. It is compressed, unless `unseal` would reject the
    compression ratio."""
    text = thoughts.encode("utf-8", "replace")
    packed = zlib.compress(text)
    if len(text) > _MAX_EXPANSION * len(packed):
        packed = zlib.compress(text, level=0)
    return _PREFIX + base64.urlsafe_b64encode(packed).decode()


def unseal(text: str) -> str | None:
    """Return the reasoning that `seal` encoded, or None for any other text."""
    if not text.startswith(_PREFIX):
        return None
    try:
        packed = base64.b64decode(text.removeprefix(_PREFIX), b"-_", validate=True)
        decompressor = zlib.decompressobj()
        thoughts = decompressor.decompress(packed, _MAX_EXPANSION * len(packed) + 1)
        return thoughts.decode() if decompressor.eof else None
    except (binascii.Error, zlib.error, ValueError):
        return None
