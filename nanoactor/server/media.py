"""Loading of images by URL: from a `data:` URL, or from a host that the operator allows.

The sender of a URL chooses where this server connects. Therefore, a host must be allowed by name,
and the server connects only to addresses verified as public. Every redirect is checked again.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import dataclasses
import functools
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from nanoactor.errors import EngineClosed, InvalidConfig, InvalidRequest
from nanoactor.server.addresses import is_public

LookUp = Callable[[str, int], Awaitable[Sequence[str]]]
"""Function that resolves a host name and a port to the host's IP addresses."""

_ADVICE = "send the image itself as data:image/png;base64,..."
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}):")
_WEB_SCHEMES = ("http", "https")
_WEB_PORTS = (80, 443)
_REDIRECT_STATUSES = (301, 302, 303, 307, 308)
_MAX_URL_CHARACTERS = 8192
_MAX_CONNECTIONS = 64
"""Maximum number of concurrent connections in total. Each may load `max_bytes` into memory."""
_MAX_LOOKUPS = 4
"""Maximum number of concurrent name lookups."""

_NAME = re.compile(r"(?=.{1,253}\Z)(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_ENTRY = re.compile(r"(\*?\.)?(\[[0-9a-f]*:[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::([0-9]{1,5}))?")
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")


_IMAGE_TYPE = re.compile(r"image/[a-z0-9][a-z0-9!#$&^_.+-]*")
_UNTYPED_TYPES = ("", "application/octet-stream", "binary/octet-stream")
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "nanoactor"}

_MAX_HEAD_CHARACTERS = 1024
"""Maximum length of the part of a `data:` URL up to and including the comma, in characters."""
_SMALL_DATA = 1 << 20
_PIECE_CHARACTERS = 1 << 16
"""Number of base64 characters decoded per call, a multiple of four."""
_SPACES = b" \t\n\f\r"


@dataclasses.dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits for fetching images. The constructor raises `InvalidConfig`, naming the invalid
    option."""

    allowed_domains: tuple[str, ...]
    """Allowed host names, in lower case. ".example.org" or "*.example.org" allows all subdomains of
    example.org, but not example.org itself. An entry allows ports 80 and 443, or only the port that
    it contains, as in "example.org:8080". If empty, nothing is fetched."""
    max_bytes: int = 20 << 20
    """Maximum size of an encoded image, in bytes."""
    timeout: float = 10.0
    """Maximum time from the first name lookup to the last byte of the image, in seconds."""
    max_redirects: int = 3
    """Maximum number of redirects per URL."""

    def __post_init__(self) -> None:
        """Check each option individually."""
        for entry in self.allowed_domains:
            _Rule.parse(entry)
        for name, minimum in (("max_bytes", 1), ("max_redirects", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < minimum:
                raise InvalidConfig(
                    f"{name} must be an integer of at least {minimum}, got {value!r}"
                )
        if not 0 < self.timeout < 1e9:
            raise InvalidConfig(f"timeout must be a positive number, got {self.timeout!r}")


class MediaLoader:
    """Loads images by URL. Must be closed after use. After `close`, nothing more is fetched."""

    def __init__(
        self,
        limits: MediaLimits,
        *,
        _resolve: LookUp | None = None,
        _is_public: Callable[[str], bool] | None = None,
    ) -> None:
        self._limits = limits
        self._rules = tuple(map(_Rule.parse, limits.allowed_domains))
        self._is_public = _is_public or is_public
        self._resolver = _Resolver(_resolve, self._is_public)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._running: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def load(self, url: str) -> bytes:
        """Return the bytes of the image that a URL contains or refers to, still encoded (JPEG, PNG,
        ...).

        The content is not checked, only its size. Raises `InvalidRequest` if the URL is not allowed
        or does not refer to an image, and `EngineClosed` for a fetch after `close`.
        """
        match = _SCHEME.match(url)
        if match is None:
            raise InvalidRequest("the image URL must begin with data:, https: or http:")
        scheme = match[1].lower()
        if scheme == "data":
            return await _load_data(url, self._limits.max_bytes)
        if scheme not in _WEB_SCHEMES:
            raise _wrong_scheme("the image URL", scheme)
        if not self._rules:
            raise InvalidRequest(f"this server does not fetch images from URLs; {_ADVICE}")
        return await self._fetch(url)

    async def close(self) -> None:
        """Abort running fetches, and close all connections."""
        self._closed = True
        for limit in self._running:
            if not limit.expired():
                limit.reschedule(0)
        await self._idle.wait()
        if self._session is not None:
            await self._session.close()
        await self._resolver.close()

    async def _fetch(self, url: str) -> bytes:
        """Fetch a URL. Raises `InvalidRequest` if this fails or exceeds the time limit."""
        seconds = self._limits.timeout
        try:
            async with asyncio.timeout(seconds) as limit:
                with self._register(limit):
                    return await self._follow(_parse_url(url, "the image URL"))
        except TimeoutError:
            if self._closed:
                raise _closed_error() from None
            raise InvalidRequest(
                f"the image did not arrive within {seconds:g} s; try again, or {_ADVICE}"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            # The error's text contains addresses, which must not be exposed.
            raise InvalidRequest(f"{_reason(error)}; try again, or {_ADVICE}") from error

    @contextlib.contextmanager
    def _register(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Register a running fetch until the context ends. To abort the fetch, `close` lets its
        time limit, `limit`, expire, and then waits for the end of the context."""
        self._running.add(limit)
        self._idle.clear()
        try:
            yield
        finally:
            self._running.discard(limit)
            if not self._running:
                self._idle.set()

    async def _follow(self, url: URL) -> bytes:
        """Fetch a URL, following redirects. Each URL is checked before it is fetched."""
        subject = "the image URL"
        for _ in range(self._limits.max_redirects + 1):
            self._check(url, subject)
            async with self._open().get(url, allow_redirects=False) as response:
                if response.status not in _REDIRECT_STATUSES:
                    return await self._read(response)
                url = _redirect_target(url, response)
            subject = "the address that the image URL redirects to"
        raise InvalidRequest(
            f"the image URL redirects more than {self._limits.max_redirects} times; send the "
            "URL of the image itself"
        )

    def _check(self, url: URL, subject: str) -> None:
        """Raise `InvalidRequest` unless the scheme, host and port of a URL are allowed. `subject`
        names the URL in the error."""
        if url.scheme not in _WEB_SCHEMES:
            raise _wrong_scheme(subject, url.scheme)
        if "@" in url.raw_authority:
            raise InvalidRequest(f"{subject} must not contain a user name or password")
        try:
            host, port = _canonical(url.raw_host or ""), url.port
        except ValueError:
            raise InvalidRequest(
                f"{subject} has no valid host or port; a host must be a name, an IPv4 address of "
                "four decimal numbers, or an IPv6 address in brackets"
            ) from None
        rules = [rule for rule in self._rules if rule.matches(host)]
        if not rules:
            raise InvalidRequest(f"{subject} has a host that this server does not allow; {_ADVICE}")
        if not any(rule.allows(port) for rule in rules):
            raise InvalidRequest(
                f"{subject} has the port {port}, which this server does not allow; {_ADVICE}"
            )
        # Check IP addresses here, because only host names reach the resolver.
        if _is_address(host) and not self._is_public(host):
            raise _not_public()

    def _open(self) -> aiohttp.ClientSession:
        """Return the shared HTTP session, creating it on first use."""
        if self._closed:
            raise _closed_error()
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    resolver=self._resolver, use_dns_cache=False, limit=_MAX_CONNECTIONS
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=_HEADERS,
                timeout=aiohttp.ClientTimeout(),  # none: `_fetch` limits the time
                auto_decompress=False,
                trust_env=False,
            )
        return self._session

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body of a response with an image. The limit on the size is enforced even if
        the response states a smaller length."""
        _check_head(response)
        limit = self._limits.max_bytes
        if (response.content_length or 0) > limit:
            raise _too_large(limit)
        body = bytearray()
        while part := await response.content.readany():
            body += part
            if len(body) > limit:
                raise _too_large(limit)
        if not body:
            raise InvalidRequest(
                "the image URL leads to an empty file, because its host sent 0 bytes"
            )
        return bytes(body)


# -- hosts --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Rule:
    """An entry of `MediaLimits.allowed_domains`."""

    host: str
    """Host name or IP address. With a leading dot, the rule matches all subdomains."""
    port: int | None

    @classmethod
    def parse(cls, entry: str) -> _Rule:
        """Parse an entry of `allowed_domains`. Raises `InvalidConfig` if it is malformed."""
        match = _ENTRY.fullmatch(entry)
        try:
            if match is None:
                raise ValueError
            host = _canonical(match[2].strip("[]"))
            port = int(match[3]) if match[3] else None
            if port is not None and not 0 < port < 1 << 16:
                raise ValueError
            if match[1] and _is_address(host):
                raise ValueError
        except ValueError:
            raise InvalidConfig(
                "allowed_media_domains must contain host names in lower case, such as "
                f"'example.org', '*.example.org' or 'example.org:8080', got {entry!r}"
            ) from None
        return cls(f".{host}" if match[1] else host, port)

    def matches(self, host: str) -> bool:
        """Return True if the rule applies to this host, which must be in canonical form."""
        return host.endswith(self.host) if self.host.startswith(".") else host == self.host

    def allows(self, port: int | None) -> bool:
        """Return True if the rule allows this port."""
        return port in _WEB_PORTS if self.port is None else port == self.port


class _Resolver(AbstractResolver):
    """Name resolver for aiohttp that returns only public addresses.

    aiohttp connects to exactly the addresses that were checked, because it does not look up the
    name again.
    """

    def __init__(self, look_up: LookUp | None, is_public: Callable[[str], bool]) -> None:
        self._look_up = look_up or self._system_lookup
        self._is_public = is_public
        # Slow name servers must not block the default threads of the event loop.
        self._threads = ThreadPoolExecutor(_MAX_LOOKUPS, "nanoactor-names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return all addresses of a host. Raises `InvalidRequest` if there are none, or if any of
        them is not public."""
        try:
            addresses = await self._look_up(host, port)
        except (socket.gaierror, UnicodeError):
            addresses = ()
        # Clients must not be able to distinguish unknown names from internal ones.
        if not addresses or not all(map(self._is_public, addresses)):
            raise _not_public()
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """Cancel pending lookups. Running lookups end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _system_lookup(self, host: str, port: int) -> list[str]:
        look_up = functools.partial(
            socket.getaddrinfo, host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
        address_infos = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        return [str(address[0]) for *_, address in address_infos]


def _canonical(host: str) -> str:
    """Return a host name or IP address in the form used for comparisons. Raises `ValueError` for
    anything else, including addresses in unusual notation."""
    if ":" in host:
        if "%" in host:
            raise ValueError
        return str(ipaddress.IPv6Address(host))
    host = host.lower()
    if not _NAME.fullmatch(host):
        raise ValueError
    # The system and browsers would read 0x7f.1 and 2130706433 as addresses.
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        return str(ipaddress.IPv4Address(host))
    return host


def _is_address(host: str) -> bool:
    """Return True if a host in canonical form is an IP address."""
    return ":" in host or not host.strip("0123456789.")


# -- URLs and responses -------------------------------------------------------------------


def _parse_url(text: str, subject: str) -> URL:
    """Parse a URL without changing its path and query, which may be signed. Raises `InvalidRequest`
    if the URL is invalid; `subject` names it in the error."""
    if len(text) > _MAX_URL_CHARACTERS:
        raise InvalidRequest(f"{subject} must not be longer than {_MAX_URL_CHARACTERS} characters")
    if _UNSAFE.search(text):
        raise InvalidRequest(
            f"{subject} contains a space, a backslash or a control character; write it "
            "percent-encoded, such as %20 for a space"
        )
    try:
        text.encode()  # yarl would drop lone surrogates
        return URL(text, encoded=text.isascii())
    except (ValueError, IndexError):  # `IndexError` for http://[]@
        raise InvalidRequest(f"{subject} is not a valid URL") from None


def _redirect_target(url: URL, response: aiohttp.ClientResponse) -> URL:
    """Return the URL to which a response redirects. The caller must check it."""
    subject = "the address that the image URL redirects to"
    location = response.headers.get("Location")
    if not location:
        raise InvalidRequest("the image URL redirects without a Location header; send another URL")
    target = _parse_url(location, subject)
    try:
        return url.join(target)
    except ValueError:
        raise InvalidRequest(f"{subject} is not a valid URL") from None


def _check_head(response: aiohttp.ClientResponse) -> None:
    """Raise `InvalidRequest` if the status or the headers show that a response is not an image, or
    that it is compressed."""
    if response.status != 200:
        raise InvalidRequest(
            "the image URL does not lead to an image, because its host answered with the "
            f"status {response.status} instead of 200"
        )
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind not in _UNTYPED_TYPES and not _IMAGE_TYPE.fullmatch(kind):
        raise InvalidRequest(
            "the image URL does not lead to an image, because its Content-Type is "
            f"{kind[:100]!r} instead of image/*"
        )
    encoding = ",".join(response.headers.getall("Content-Encoding", ())).strip().lower()
    if encoding not in ("", "identity"):
        raise InvalidRequest(
            "the image URL's host sent the image with the Content-Encoding "
            f"{encoding[:100]!r}, which is not supported"
        )


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "the image URL's host has no valid certificate for its name"
    if isinstance(error, aiohttp.ClientSSLError):
        return "the TLS connection to the image URL's host failed"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "the image URL's host cannot be reached"
    return "the image URL's host sent an invalid HTTP response or closed the connection"


def _wrong_scheme(subject: str, scheme: str) -> InvalidRequest:
    return InvalidRequest(
        f"{subject} has the scheme {scheme[:31]!r}, but images are only read from data:, https: "
        "and http: URLs, and redirects must lead to https: or http: URLs"
    )


def _not_public() -> InvalidRequest:
    return InvalidRequest(
        "the image URL's host must have a DNS entry with only public addresses; otherwise, "
        f"{_ADVICE}"
    )


def _too_large(limit: int) -> InvalidRequest:
    return InvalidRequest(
        f"the image is larger than the {limit} bytes allowed; send a smaller image"
    )


def _closed_error() -> EngineClosed:
    return EngineClosed("the server is shutting down and fetches no more images")


# -- data: URLs ---------------------------------------------------------------------------


async def _load_data(url: str, max_bytes: int) -> bytes:
    """Return the data of a `data:` URL. Spaces and line breaks within base64 are skipped, as in
    browsers, because mail encoders insert them. Any other deviation, such as missing padding,
    raises `InvalidRequest`."""
    comma = url.find(",", 0, _MAX_HEAD_CHARACTERS)
    if comma < 0:
        raise InvalidRequest(
            "the data: URL has no comma; it must have the form data:image/png;base64,..."
        )
    kind, *parameters = (part.strip().lower() for part in url[len("data:") : comma].split(";"))
    if not _IMAGE_TYPE.fullmatch(kind):
        raise InvalidRequest(
            f"the data: URL has the media type {kind[:100]!r}, but it must have the form "
            "data:image/png;base64,..."
        )
    if parameters[-1:] != ["base64"]:
        raise InvalidRequest(
            "the data: URL is not in base64; it must have the form data:image/png;base64,..."
        )
    if len(url) - comma <= _SMALL_DATA:
        return _decode_base64(url, comma + 1, max_bytes)
    return await asyncio.to_thread(_decode_base64, url, comma + 1, max_bytes)


def _decode_base64(url: str, start: int, max_bytes: int) -> bytes:
    """Decode the base64 text that starts at index `start` of a `data:` URL. Raises `InvalidRequest`
    if it is empty, invalid or too long."""
    text = _strip_whitespace(url, start, max_bytes)
    if not text:
        raise InvalidRequest("the data: URL has no data after the comma")
    padding = 2 if text.endswith(b"==") else int(text.endswith(b"="))
    if len(text) // 4 * 3 - padding > max_bytes:
        raise _too_large(max_bytes)
    pieces = (text[at : at + _PIECE_CHARACTERS] for at in range(0, len(text), _PIECE_CHARACTERS))
    try:
        # Versions of Python treat padding in strict_mode differently.
        if len(text) % 4 or text.find(b"=", 0, len(text) - padding) >= 0:
            raise ValueError
        return b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in pieces)
    except ValueError:
        raise InvalidRequest(
            "the data: URL is not valid base64, which contains only A-Z, a-z, 0-9, + and /, "
            "and is padded with = to a multiple of four characters"
        ) from None


def _strip_whitespace(url: str, start: int, max_bytes: int) -> bytes:
    """Return the base64 text that starts at index `start` of a `data:` URL, without whitespace.
    Raises `InvalidRequest` if the text would decode to more than `max_bytes` bytes.

    The text is processed in pieces, because a thread holds the GIL for the duration of one call.
    """
    limit = (max_bytes + 2) // 3 * 4
    pieces: list[bytes] = []
    size = 0
    for at in range(start, len(url), _PIECE_CHARACTERS):
        piece = url[at : at + _PIECE_CHARACTERS].encode("ascii", "replace").translate(None, _SPACES)
        size += len(piece)
        if size > limit:
            raise _too_large(max_bytes)
        pieces.append(piece)
    return b"".join(pieces)
