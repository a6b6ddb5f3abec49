"""The server's API keys, and the check that a request contains one."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable


class Keys:
    """The configured API keys, which are compared in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def client(self, authorization: str | None, api_key: str | None, address: str) -> str:
        """Return an identifier of a client: a digest of the key in its `Authorization` or
        `x-api-key` header, or its `address` if no keys are configured."""
        if not self._digests:
            return address
        return _digest(_key_in(authorization or "") or (api_key or "").strip()).hex()

    def is_authorized(self, authorization: str | None, api_key: str | None = None) -> bool:
        """Return True if the request's `Authorization` or `x-api-key` header contains a valid key,
        or if no keys are configured.

        With HTTP Basic authentication, which browsers use, the password is the key.
        """
        if not self._digests:
            return True
        digests = [_digest(_key_in(authorization or "")), _digest((api_key or "").strip())]
        # Compare with all keys, even after a match, so that the duration reveals nothing.
        matches = [hmac.compare_digest(one, known) for one in digests for known in self._digests]
        return any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _key_in(authorization: str) -> str:
    scheme, _, rest = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            pair = base64.b64decode(rest.strip(), validate=True).decode()
        except (binascii.Error, ValueError):
            return ""
        return pair.partition(":")[2]
    return ""
