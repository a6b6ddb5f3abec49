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
_MOST = 1 << 24
"""Bytes of thoughts that are read from such a field."""


def seal(thoughts: str) -> str:
    """Return thoughts as printable ASCII."""
    packed = zlib.compress(thoughts.encode("utf-8", "replace"))
    return _MARK + base64.urlsafe_b64encode(packed).decode()


def unseal(text: str) -> str | None:
    """Return what `seal` was given; None for anything that it has not made."""
    if not text.startswith(_MARK):
        return None
    try:
        packed = base64.b64decode(text.removeprefix(_MARK), b"-_", validate=True)
        reader = zlib.decompressobj()
        thoughts = reader.decompress(packed, _MOST)
        return thoughts.decode() if reader.eof else None
    except (binascii.Error, zlib.error, ValueError):
        return None
