"""Images by URL: what is fetched from where, and above all what is not."""

import asyncio
import base64
import contextlib
import gzip
import ipaddress
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time

import aiohttp.connector
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.errors import EngineClosed, InvalidConfig, InvalidRequest
from nanoactor.server import media as module
from nanoactor.server.addresses import is_public
from nanoactor.server.media import MediaLimits, MediaLoader
from tests.conftest import descriptors

IMAGE = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
INNER = "10.11.12.13"


def of(image, kind="image/png", head="HTTP/1.1 200 OK", extra="", length=True):
    """An answer as it goes over the wire."""
    lines = [head, "Connection: close", extra]
    lines += [f"Content-Type: {kind}"] if kind is not None else []
    lines += [f"Content-Length: {len(image)}"] if length else []
    return "\r\n".join([line for line in lines if line] + ["", ""]).encode() + image


def to(location, status=302):
    return of(b"", None, f"HTTP/1.1 {status} Found", f"Location: {location}")


class Site:
    """A server on 127.0.0.1 that answers by path: bytes, or a coroutine function of a writer."""

    def __init__(self, answers, greeting=b""):
        self.answers = answers
        self.greeting = greeting
        self.heads = []
        self.connections = 0
        self.tasks = []

    def _accept(self, reader, writer):
        self.connections += 1
        self.tasks.append(asyncio.ensure_future(self._serve(reader, writer)))

    async def _serve(self, reader, writer):
        try:
            await self._talk(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _talk(self, reader, writer):
        writer.write(self.greeting)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while not self.greeting:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                answer = self.answers[head.split()[1]]
                await self._answer(answer, writer)
                if b"Connection: close" in (answer if isinstance(answer, bytes) else b""):
                    break

    @staticmethod
    async def _answer(answer, writer):
        if isinstance(answer, bytes):
            writer.write(answer)
            await writer.drain()
        else:
            await answer(writer)

    @contextlib.asynccontextmanager
    async def up(self, context=None):
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            await server.wait_closed()


class Names:
    """Takes the place of name servers; counts what it is asked."""

    def __init__(self, **addresses):
        self.addresses = {f"{name}.test": found for name, found in addresses.items()}
        self.asked = []

    async def __call__(self, host, port):
        self.asked.append(host)
        found = self.addresses.get(host, [])
        return found.pop(0) if found and isinstance(found[0], list) else found


def fetched(answers, url="http://images.test:{port}/", allowed=(), names=None, **options):
    """What a loader makes of a URL at a site of these answers; also the site."""

    async def main():
        async with Site(answers).up() as site:
            entries = [entry.format(port=site.port) for entry in ("images.test:{port}", *allowed)]
            loader = MediaLoader(
                MediaLimits(tuple(entries), **options),
                _resolve=names or Names(images=["127.0.0.1"]),
                _is_public="127.0.0.1".__eq__,
            )
            for answer, value in answers.items():
                if isinstance(value, bytes):
                    answers[answer] = value.replace(b"{port}", str(site.port).encode())
            try:
                return await loader.load(url.format(port=site.port)), site
            except InvalidRequest as error:
                error.site = site
                raise
            finally:
                await loader.close()
                assert asyncio.all_tasks() <= {asyncio.current_task(), *site.tasks}

    before = descriptors()
    try:
        return asyncio.run(main())
    except InvalidRequest as error:
        if INNER in str(error) or "127.0.0.1" in str(error):
            pytest.fail(f"the message tells addresses: {error}")
        raise
    finally:
        assert descriptors() == before


def loaded(url, *allowed, **options):
    """What a loader makes of a URL as things are, with no name server and nothing injected."""

    async def main():
        loader = MediaLoader(MediaLimits(allowed, **options))
        try:
            return await loader.load(url)
        finally:
            await loader.close()

    return asyncio.run(main())


@pytest.fixture
def no_network(monkeypatch):
    """Whoever looks a name up or connects fails the test."""

    def never(*args, **options):
        raise AssertionError(f"asked the network: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    monkeypatch.setattr(aiohttp.connector.aiohappyeyeballs, "start_connection", never)


def test_torch_is_not_imported():
    code = "import sys, nanoactor.server.media; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- limits -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        "", ".", "*", "*.", "Example.org", "http://example.org", "example.org/", "example.org.",
        "exa mple.org", "a..b", "*example.org", "*.*.org", "a.*.org", "example.org:",
        "example.org:0", "example.org:65536", "example.org:*", "u@example.org", "0x7f.1",
        "2130706433", "127.1", "0177.0.0.1", "*.127.0.0.1", "::1", "[::1", "[::1]x",
        "[fe80::1%eth0]", "[127.0.0.1]:x", "[127.0.0.1]", "[ab.cd]", "é.org", "x" * 64 + ".org",
    ],
)  # fmt: skip
def test_entries_that_no_host_could_match_are_refused(entry):
    with pytest.raises(InvalidConfig, match="allowed_media_domains must contain"):
        MediaLimits((entry,))


@pytest.mark.parametrize(
    "options", [{"max_bytes": 0}, {"max_bytes": 1.5}, {"max_redirects": -1}, {"timeout": 0}]
)
def test_limits_are_checked(options):
    with pytest.raises(InvalidConfig, match=next(iter(options))):
        MediaLimits((), **options)


# -- data: URLs ---------------------------------------------------------------------------


def data(image=IMAGE, head="data:image/png;base64,"):
    return head + base64.b64encode(image).decode()


@pytest.mark.parametrize(
    "head",
    [
        "data:image/png;base64,", "DATA:Image/JPEG;BASE64,", "data:image/svg+xml;base64,",
        "data:image/png;charset=utf-8;base64,", "data:image/png;name=a.png;x=y;base64,",
        "data:image/vnd.microsoft.icon; base64,",
    ],
)  # fmt: skip
def test_a_data_url_holds_an_image(head, no_network):
    assert loaded(data(head=head)) == IMAGE


def test_line_breaks_in_base64_are_skipped():
    wrapped = base64.encodebytes(IMAGE * 10).decode()
    for text in (wrapped, wrapped.replace("\n", "\r\n"), wrapped.replace("\n", " \t\f")):
        assert loaded("data:image/png;base64," + text) == IMAGE * 10


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:", "no comma"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;" + "x" * 2000 + ";base64,AAAA", "no comma"),
        ("data:,AAAA", "media type ''"),
        ("data:;base64,AAAA", "media type ''"),
        ("data:text/html;base64,AAAA", "media type 'text/html'"),
        ("data:image/;base64,AAAA", "media type 'image/'"),
        ("data:xximage/png;base64,AAAA", "media type"),
        ("data://image/png;base64,AAAA", "media type"),
        ("data:image/png,AAAA", "not in base64"),
        ("data:image/png;base64;x=y,AAAA", "not in base64"),
        ("data:image/png;base64=1,AAAA", "not in base64"),
        ("data:image/png;base64,", "no data after"),
        ("data:image/png;base64, \n", "no data after"),
    ],
)
def test_a_data_url_of_another_form_is_refused(url, message):
    with pytest.raises(InvalidRequest, match=message):
        loaded(url)


@pytest.mark.parametrize(
    "text",
    [
        "A", "AA", "AAA", "AA=", "AAA==", "AAAA=", "AAAA====", "====", "=", "AA==AAAA", "AA==AA==",
        "A=AA", "AA=A", "__--", "AA%3D%3D", "AA!A", "AAAAé", "AAA\ud800", "AA\0A", "AA\u00a0==",
        "AAAA,AAAA", "AA==" * (1 << 14) + "AAAA", "A" * (1 << 16) + "A", "A" * (1 << 16) + "====",
        "A" * (1 << 16) + "AA==" + "AAAA", "A" * ((1 << 16) - 4) + "AA==" + "AAAA",
    ],
)  # fmt: skip
def test_invalid_base64_is_refused(text):
    with pytest.raises(InvalidRequest, match="not valid base64"):
        loaded("data:image/png;base64," + text)


@given(st.binary(min_size=1, max_size=100), st.integers(1, 9))
def test_base64_is_decoded_in_pieces_as_in_one(image, piece):
    usual, module._PIECE_CHARACTERS = module._PIECE_CHARACTERS, 4 * piece
    try:
        url = data(image)
        assert module._decode_base64(url, url.index(",") + 1, 100) == image
    finally:
        module._PIECE_CHARACTERS = usual


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 98, 99, 100, 101])
def test_the_size_of_a_data_url_is_known_before_it_is_decoded(limit, monkeypatch):
    assert loaded(data(bytes(limit)), max_bytes=limit) == bytes(limit)
    monkeypatch.delattr(module.binascii, "a2b_base64")
    for size in (limit + 1, limit + 2, limit + 3, 10 * limit, 100_000):
        with pytest.raises(InvalidRequest, match=f"larger than the {limit} bytes"):
            loaded(data(bytes(size)), max_bytes=limit)
    with pytest.raises(InvalidRequest, match=f"larger than the {limit} bytes"):
        loaded("data:image/png;base64," + "!" * 100_000, max_bytes=limit)


def test_large_data_is_decoded_in_a_thread_and_small_data_is_not(monkeypatch):
    def decoded(*args):
        threads.append(threading.current_thread())
        return usual(*args)

    usual, threads = module._decode_base64, []
    monkeypatch.setattr(module, "_decode_base64", decoded)
    assert loaded(data(bytes(1 << 20))) == bytes(1 << 20)
    assert loaded(data()) == IMAGE
    assert [thread is threading.main_thread() for thread in threads] == [False, True]


# -- schemes, hosts and ports -------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["file", "ftp", "blob", "FILE", "gopher", "ws", "tcp", "c"])
def test_other_schemes_are_refused_by_name(scheme, no_network):
    with pytest.raises(InvalidRequest, match=f"the scheme '{scheme.lower()}'"):
        loaded(f"{scheme}://example.org/etc/passwd", "example.org")


@pytest.mark.parametrize("url", ["", "a.png", "/a.png", "//example.org/", " http://example.org/"])
def test_what_has_no_scheme_is_refused(url, no_network):
    with pytest.raises(InvalidRequest, match="must begin with"):
        loaded(url, "example.org")


def test_where_no_host_is_allowed_nothing_is_fetched(no_network):
    with pytest.raises(InvalidRequest, match=r"does not fetch images from URLs; send .* data:"):
        loaded("https://example.org/a.png")


@pytest.mark.parametrize(
    "host",
    [
        "example.com", "evilexample.org", "example.org.evil.com", "example.org.", "sub.example.org",
        "below.org", ".below.org", "xbelow.org", "stars.org", "xn--example.org", "org", "1.2.3.4",
        "example.org。evil.com", "evil.com#@example.org", "evil.com?@example.org",
        "evil.com/@example.org",
    ],
)  # fmt: skip
def test_other_hosts_are_refused(host, no_network):
    with pytest.raises(InvalidRequest, match=r"host that this server does not allow|no valid host"):
        loaded(f"http://{host}/a.png", "example.org", ".below.org", "*.stars.org")


@pytest.mark.parametrize(
    "host", ["images.test", "Images.TEST", "a.below.test", "b.a.below.test", "a.stars.test"]
)
def test_allowed_hosts_and_names_below_them(host):
    names = Names()
    names.addresses = {host: ["127.0.0.1"]}
    allowed = (".below.test:{port}", "*.stars.test:{port}")
    got, site = fetched({"/": of(IMAGE)}, "http://" + host + ":{port}", allowed, names)
    assert got == IMAGE
    assert names.asked == [host]
    assert site.heads[0].split("\r\n")[1] == f"Host: {host}:{site.port}"


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("http://example.org:22/", 22),
        ("https://example.org:8080/", 8080),
        ("http://example.org:0/", 0),
        ("http://other.org/", 80),
        ("https://other.org/", 443),
        ("https://other.org:8081/", 8081),
    ],
)
def test_other_ports_are_refused(url, port, no_network):
    with pytest.raises(InvalidRequest, match=f"the port {port}, which this server does not allow"):
        loaded(url, "example.org", "other.org:8080")


@pytest.mark.parametrize(
    "user", ["user:secret@", "user@", ":secret@", "@", ":@", "example.com@", "example.org:80@"]
)
def test_user_info_is_refused(user, no_network):
    with pytest.raises(InvalidRequest, match="must not contain a user name"):
        loaded(f"http://{user}example.org/", "example.org", "example.com")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://", "no valid host"),
        ("http:example.org", "no valid host"),
        ("http:///example.org", "no valid host"),
        ("http://a..example.org/", "no valid host"),
        ("http://%65xample.org/", "no valid host"),
        ("http://a%00.example.org/", "no valid host"),
        ("http://" + "a" * 64 + ".example.org/", "no valid host"),
        ("http://" + "a." * 130 + "example.org/", "no valid host"),
        ("http://example.org:port/", "no valid host or port"),
        ("http://example.org:99999/", "no valid host or port"),
        ("http://[]@/", "not a valid URL"),
        ("http://[::1/", "not a valid URL"),
        ("http://h\ud800.example.org/", "not a valid URL"),
        ("http://example.org/a b", "space"),
        ("http://example.org/\r\nHost: x", "control character"),
        ("http://example.com\\@example.org/", "backslash"),
        ("http://example.org/" + "x" * 9000, "longer than 8192"),
    ],
)
def test_broken_urls_are_refused(url, message, no_network):
    with pytest.raises(InvalidRequest, match=message):
        loaded(url, "example.org", ".example.org")


def test_a_url_is_sent_as_it_is_written():
    path = "/a%2Fb/../c?sig=%2b%2F+%3D&x=[~]"
    got, site = fetched({path: of(IMAGE)}, "http://images.test:{port}" + path + "#part")
    assert got == IMAGE
    assert site.heads[0].startswith(f"GET {path} HTTP/1.1\r\n")
    assert fetched({"/%C3%A9": of(IMAGE)}, "http://images.test:{port}/é")[0] == IMAGE


# -- addresses ----------------------------------------------------------------------------

PRIVATE = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.0.1",
    "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.192", "192.0.2.1",
    "192.88.99.1", "192.168.0.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1",
    "239.255.255.250", "240.0.0.1", "255.255.255.255", "168.63.129.16",
    "::", "::1", "::2", "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:8.8.8.8",
    "::ffff:0:127.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::a00:1", "64:ff9b::169.254.169.254",
    "64:ff9b:1::1", "64:ff9b:1::8.8.8.8", "100::1", "2001::1", "2001:0:7f00:1::", "2001:2::1",
    "2001:10::1", "2001:20::1", "2001:db8::1", "2002:7f00:1::", "2002:a00:1::1", "2002:808:808::",
    "3fff::1", "4000::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%lo",
    "2606:4700::1%lo", "fec0::1", "ff02::1", "ff0e::1",
]  # fmt: skip
PUBLIC = ["1.1.1.1", "8.8.8.8", "172.32.0.1", "192.0.1.1", "2606:4700::1111", "64:ff9b::8.8.8.8"]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize("text", ["", "localhost", "127.1", "0x7f.1", "2130706433", "8.8.8.8/8"])
def test_what_is_no_address_is_not_public(text):
    assert not is_public(text)


@given(st.ip_addresses(v=4, network="0.0.0.0/0"))
def test_no_ipv4_address_is_public_within_ipv6_but_by_nat64(address):
    number = int(address)
    assert not is_public(str(ipaddress.IPv6Address(number)))
    assert not is_public(str(ipaddress.IPv6Address(0xFFFF << 32 | number)))
    assert not is_public(str(ipaddress.IPv6Address(0x2002 << 112 | number << 80 | 1)))
    assert not is_public(str(ipaddress.IPv6Address(0x2001 << 112 | number ^ 0xFFFF_FFFF)))
    nat64 = str(ipaddress.IPv6Address(0x64_FF9B << 96 | number))
    assert is_public(nat64) == is_public(str(address))
    if is_public(str(address)):
        assert address.is_global
        assert not address.is_multicast


@pytest.mark.parametrize("address", [a for a in PRIVATE if "%" not in a])
def test_private_addresses_are_refused_even_where_they_are_allowed(address, no_network):
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(InvalidRequest, match="only public addresses") as caught:
        loaded(f"http://{host}/", host)
    assert address not in str(caught.value)
    names = Names(images=[address])
    with pytest.raises(InvalidRequest, match="only public addresses") as caught:
        named("http://images.test/", names)
    assert names.asked == ["images.test"]
    assert address not in str(caught.value)


def named(url, names, **options):
    """What a loader makes of a URL that knows addresses as public or not by itself."""

    async def main():
        loader = MediaLoader(MediaLimits(("images.test",), **options), _resolve=names)
        try:
            return await loader.load(url)
        finally:
            await loader.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    "host",
    [
        "2130706433", "0x7f.1", "0x7f000001", "0X7F.0.0.1", "0177.0.0.1", "017700000001", "127.1",
        "127.0.1", "0", "0x", "127.0.0.1.", "127.0.0.01", "1.2.3.4.5", "256.1.1.1", "example.1",
        "example.0x7f", "①②⑦.①", "[fe80::1%25lo]", "[::ffff:127.1]", "[127.0.0.1]",
        "[::1%00]",
    ],
)  # fmt: skip
def test_hosts_that_are_addresses_in_disguise_are_refused(host, no_network):
    loader_entries = ("127.0.0.1", "[::1]", ".example", "example.org")
    with pytest.raises(InvalidRequest, match=r"no valid host|not a valid URL|public addresses"):
        loaded(f"http://{host}/", *loader_entries)


def test_other_digits_are_an_address_too(no_network):
    with pytest.raises(InvalidRequest, match="only public addresses"):
        loaded("http://①②⑦.⓪.⓪.①/", "127.0.0.1")


def test_localhost_is_refused_even_where_it_is_allowed():
    with pytest.raises(InvalidRequest, match="only public addresses"):
        loaded("http://localhost/", "localhost")


def test_a_public_address_may_be_named_in_a_url():
    url, host = "http://127.0.0.1:{port}/", "127.0.0.1:{port}"
    assert fetched({"/": of(IMAGE)}, url, (host,))[0] == IMAGE
    with pytest.raises(InvalidRequest, match="host that this server does not allow"):
        fetched({"/": of(IMAGE)}, "http://127.0.0.1:{port}/")


@pytest.mark.parametrize(
    "found", [[], [INNER], ["127.0.0.1", INNER], [INNER, "127.0.0.1"], ["images.test"], ["::1"]]
)
def test_names_with_any_other_than_public_addresses_are_refused(found):
    with pytest.raises(InvalidRequest, match="have a DNS entry with only public") as caught:
        fetched({"/": of(IMAGE)}, names=Names(images=found))
    assert not caught.value.site.connections


@pytest.mark.parametrize("error", [socket.gaierror(-2, "x"), UnicodeError("label too long")])
def test_unknown_names_are_told_from_inner_ones_to_nobody(error):
    async def fail(host, port):
        raise error

    with pytest.raises(InvalidRequest) as unknown:
        named("http://images.test/", fail)
    with pytest.raises(InvalidRequest) as inner:
        named("http://images.test/", Names(images=[INNER]))
    assert str(unknown.value) == str(inner.value)


def test_a_name_is_looked_up_once_and_not_again_to_connect(monkeypatch):
    connected = []
    usual = aiohttp.connector.aiohappyeyeballs.start_connection

    async def note(addr_infos, **options):
        connected.extend(info[4][0] for info in addr_infos)
        return await usual(addr_infos, **options)

    monkeypatch.setattr(aiohttp.connector.aiohappyeyeballs, "start_connection", note)
    names = Names(images=[["127.0.0.1"], [INNER]])
    assert fetched({"/": of(IMAGE)}, names=names)[0] == IMAGE
    assert names.asked == ["images.test"]
    assert connected == ["127.0.0.1"]


def test_a_name_that_has_become_private_is_refused_at_the_next_connection():
    names = Names(images=[["127.0.0.1"], [INNER]])
    with pytest.raises(InvalidRequest, match="only public addresses") as caught:
        fetched({"/": to("/again"), "/again": of(IMAGE)}, names=names)
    assert names.asked == ["images.test"] * 2
    assert caught.value.site.connections == 1


def test_the_system_is_asked_for_addresses(monkeypatch):
    def ask(host, port, **options):
        asked.append((host, port, threading.current_thread().name.startswith("nanoactor-names")))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (INNER, port))]

    async def main():
        try:
            with pytest.raises(InvalidRequest, match="only public addresses"):
                await loader.load("https://example.org/")
        finally:
            await loader.close()

    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", ask)
    loader = MediaLoader(MediaLimits(("example.org",)))
    asyncio.run(main())
    assert asked == [("example.org", 443, True)]
    deadline = time.monotonic() + 20
    while any(thread.name.startswith("nanoactor-names") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the threads that look up names do not end"
        time.sleep(0.01)


# -- redirects ----------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "location",
    ["/b?x=%2F", "b?x=%2F", "//images.test:{port}/b?x=%2F", "http://more.test:{port}/b?x=%2F"],
)
def test_redirects_are_followed(status, location):
    names = Names(images=["127.0.0.1"], more=["127.0.0.1"])
    answers = {"/": to(location, status), "/b?x=%2F": of(IMAGE)}
    got, site = fetched(answers, allowed=("more.test:{port}",), names=names)
    assert got == IMAGE
    assert len(site.heads) == 2
    assert "referer" not in site.heads[1].lower()


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("http://inner.test:{port}/", "only public addresses"),
        (f"http://{INNER}:{{port}}/", "only public addresses"),
        ("http://[::1]:{port}/", "only public addresses"),
        ("http://127.0.0.1:{port}/", "redirects to has a host that this server does not allow"),
        ("http://other.test:{port}/", "redirects to has a host that this server does not allow"),
        ("//other.test/", "redirects to has a host that this server does not allow"),
        ("http://images.test/", "redirects to has the port 80, which"),
        ("http://2130706433/", "redirects to has no valid host"),
        ("http://u:p@images.test:{port}/", "redirects to must not contain a user"),
        ("file:///etc/passwd", "redirects to has the scheme 'file'"),
        ("ftp://images.test/", "redirects to has the scheme 'ftp'"),
        ("data:image/png;base64,AAAA", "redirects to has the scheme 'data'"),
        ("javascript:alert(1)", "redirects to has the scheme 'javascript'"),
        ("https:///", "redirects to has no valid host"),
        ("http://[]@", "redirects to is not a valid URL"),
        ("http://[", "redirects to is not a valid URL"),
        ("/a b", "redirects to contains a space"),
        ("\\\\other.test\\", "redirects to contains a space, a backslash"),
        ("/" + "x" * 8190, "sent an invalid HTTP response"),
        ("/\udcff", "redirects to is not a valid URL"),
        ("", "redirects without a Location"),
    ],
)
def test_redirects_elsewhere_are_refused(location, message):
    answer = "\r\n".join(
        ("HTTP/1.1 302 Found", f"Location: {location}", "Connection: close", "", "")
    ).encode(errors="surrogateescape")
    names = Names(images=["127.0.0.1"], inner=[INNER], other=["127.0.0.1"])
    allowed = ("inner.test:{port}", f"{INNER}:{{port}}", "[::1]:{port}")
    with pytest.raises(InvalidRequest, match=message) as caught:
        fetched({"/": answer}, allowed=allowed, names=names)
    assert len(caught.value.site.heads) == 1
    assert "inner" not in str(caught.value)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_loop_of_redirects_ends(most):
    with pytest.raises(InvalidRequest, match=f"redirects more than {most} times") as caught:
        fetched({"/": to("/b"), "/b": to("/")}, max_redirects=most)
    assert len(caught.value.site.heads) == 1 + most
    answers = {f"/{i}": to(f"/{i + 1}") for i in range(most)} | {f"/{most}": of(IMAGE)}
    url = "http://images.test:{port}/0"
    assert fetched(answers, url, max_redirects=most)[0] == IMAGE


def test_the_body_of_a_redirect_is_not_waited_for():
    head = b"HTTP/1.1 302 Found\r\nLocation: /b\r\nContent-Length: 1000000000\r\n\r\nabc"
    assert fetched({"/": head, "/b": of(IMAGE)})[0] == IMAGE


# -- answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [100, 201, 204, 206, 300, 304, 305, 400, 401, 404, 500])
def test_other_answers_than_200_are_refused(status):
    image = b"" if status in (100, 204, 304) else IMAGE
    extra = 'WWW-Authenticate: Basic realm="x"'
    message = f"with the status {status}" if status > 100 else "closed the connection"
    with pytest.raises(InvalidRequest, match=message):
        fetched({"/": of(image, head=f"HTTP/1.1 {status} x", extra=extra)})


@pytest.mark.parametrize(
    "kind",
    [
        None, "", "image/png", "IMAGE/PNG", "image/jpeg; charset=binary", "image/x-icon",
        "application/octet-stream", "binary/octet-stream",
    ],
)  # fmt: skip
def test_types_that_may_be_images(kind):
    assert fetched({"/": of(IMAGE, kind)})[0] == IMAGE


@pytest.mark.parametrize(
    "kind", ["text/html; charset=utf-8", "application/json", "image", "image/", "ximage/png", ";"]
)
def test_other_types_are_refused(kind):
    shown = kind.partition(";")[0]
    if not shown:
        assert fetched({"/": of(IMAGE, kind)})[0] == IMAGE
        return
    with pytest.raises(InvalidRequest, match=f"Content-Type is '{shown}' instead of image"):
        fetched({"/": of(IMAGE, kind)})


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "identity, gzip", "x"])
def test_compressed_answers_are_refused_unread(encoding):
    bomb = gzip.compress(bytes(1 << 20))
    with pytest.raises(InvalidRequest, match="the Content-Encoding .* is not supported") as caught:
        fetched({"/": of(bomb, extra=f"Content-Encoding: {encoding}")})
    assert "Accept-Encoding: identity\r\n" in caught.value.site.heads[0]


def test_a_second_header_cannot_hide_that_an_answer_is_compressed():
    extra = "Content-Encoding: identity\r\nContent-Encoding: gzip"
    with pytest.raises(InvalidRequest, match="the Content-Encoding .* is not supported"):
        fetched({"/": of(gzip.compress(IMAGE), extra=extra)})
    assert fetched({"/": of(IMAGE, extra="Content-Encoding: identity")})[0] == IMAGE


def chunked(image):
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    return head + b"%x\r\n" % len(image) + image + b"\r\n0\r\n\r\n"


def endless(head):
    async def pour(writer):
        writer.write(head)
        while not writer.is_closing():
            writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)

    return pour


def test_an_image_may_be_as_large_as_is_allowed():
    size = len(IMAGE)
    for answer in (of(IMAGE), of(IMAGE, length=False), chunked(IMAGE)):
        assert fetched({"/": answer}, max_bytes=size)[0] == IMAGE
        with pytest.raises(InvalidRequest, match=f"larger than the {size - 1} bytes"):
            fetched({"/": answer}, max_bytes=size - 1)


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 999999999999\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n",
        b"Connection: close\r\n\r\n",
    ],
)
def test_an_endless_image_is_cut_off(head):
    with pytest.raises(InvalidRequest, match="larger than the 100000 bytes"):
        fetched({"/": endless(b"HTTP/1.1 200 OK\r\n" + head)}, max_bytes=100_000)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"ssh-2.0 x\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nConnection: close\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\nConnection: close\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\nConnection: close\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\nConnection: close\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 10_000 + b"Connection: close\r\n\r\n",
        b"HTTP/1.1 99999 OK\r\nConnection: close\r\n\r\n",
    ],
)
def test_answers_that_are_not_http_are_refused(answer):
    async def write(writer):
        writer.write(answer)
        await writer.drain()
        writer.close()

    with pytest.raises(
        InvalidRequest, match=r"invalid HTTP response or closed the connection; .*data:image"
    ):
        fetched({"/": write})


def test_an_image_that_says_it_is_too_large_is_not_waited_for():
    async def promise(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n")
        await nothing(writer)

    with pytest.raises(InvalidRequest, match="larger than the 100 bytes"):
        fetched({"/": promise}, max_bytes=100, timeout=60)


def test_an_empty_answer_is_refused():
    with pytest.raises(InvalidRequest, match="0 bytes"):
        fetched({"/": of(b"")})


def test_a_host_that_nobody_answers_at_is_refused():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://images.test:{held.getsockname()[1]}/"
        with pytest.raises(InvalidRequest, match="cannot be reached"):
            fetched({}, url, (url[len("http://") : -1],))


async def nothing(writer):
    await asyncio.sleep(60)


async def drop_by_drop(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"x")
        await asyncio.sleep(0.01)


async def on_and_on(writer):
    while not writer.is_closing():
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("answer", [nothing, drop_by_drop, on_and_on])
def test_a_slow_host_is_not_waited_for(answer):
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"did not arrive within 0\.3 s"):
        fetched({"/": answer}, timeout=0.3)
    assert 0.3 <= time.monotonic() - began < 30


def test_all_hops_and_names_share_one_time():
    async def slow(writer):
        await asyncio.sleep(0.25)
        writer.write(to("/"))

    async def never(host, port):
        await asyncio.sleep(60)

    with pytest.raises(InvalidRequest, match=r"within 0\.6 s"):
        fetched({"/": slow}, timeout=0.6, max_redirects=100)
    with pytest.raises(InvalidRequest, match=r"within 0\.1 s"):
        fetched({}, names=never, timeout=0.1)


# -- what is sent, and what is left behind ------------------------------------------------


def test_nothing_is_sent_but_the_request(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine images.test login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    first = to("/b").replace(b"\r\n", b"\r\nSet-Cookie: a=b; Path=/\r\n", 1)
    got, site = fetched({"/": first, "/b": of(IMAGE)})
    assert got == IMAGE
    for head, path in zip(site.heads, ("/", "/b"), strict=True):
        lines = head.rstrip().split("\r\n")
        assert lines[0] == f"GET {path} HTTP/1.1"
        assert sorted(lines[1:]) == [
            "Accept-Encoding: identity",
            "Accept: image/*",
            f"Host: images.test:{site.port}",
            "User-Agent: nanoactor",
        ]


def with_loader(answers, use, **options):
    """Runs `use` with a loader and a site; afterwards nothing may be open."""

    async def main():
        async with Site(answers).up() as site:
            limits = MediaLimits((f"images.test:{site.port}",), **options)
            names = Names(images=["127.0.0.1"])
            loader = MediaLoader(limits, _resolve=names, _is_public="127.0.0.1".__eq__)
            try:
                return await use(loader, site, f"http://images.test:{site.port}")
            finally:
                await loader.close()
                await loader.close()

    before = descriptors()
    try:
        return asyncio.run(main())
    finally:
        assert descriptors() == before


def test_one_connection_serves_one_image_after_another():
    async def use(loader, site, base):
        assert loader._session is None
        for _ in range(3):
            assert await loader.load(base + "/") == IMAGE
        assert site.connections == 1
        with pytest.raises(InvalidRequest, match="404"):
            await loader.load(base + "/lost")
        assert await loader.load(base + "/") == IMAGE

    lost = b"HTTP/1.1 404 x\r\nContent-Length: 100000\r\n\r\n"
    with_loader({"/": of(IMAGE).replace(b"Connection: close\r\n", b""), "/lost": lost}, use)


def test_images_are_fetched_side_by_side():
    async def use(loader, site, base):
        async with asyncio.timeout(60):
            got = await asyncio.gather(*(loader.load(base + "/") for _ in range(8)))
        assert got == [IMAGE] * 8

    async def together(writer):
        nonlocal waiting
        waiting += 1
        while waiting < 8:
            await asyncio.sleep(0.01)
        writer.write(of(IMAGE))
        writer.close()

    waiting = 0
    with_loader({"/": together}, use, timeout=60)


def test_closing_breaks_off_what_is_being_fetched(monkeypatch):
    async def use(loader, site, base):
        tasks = [asyncio.ensure_future(loader.load(base + "/")) for _ in range(6)]
        async with asyncio.timeout(20):
            while len(site.heads) < 4:
                await asyncio.sleep(0.01)
            await loader.close()
            assert not loader._running
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineClosed), repr(result)
        with pytest.raises(EngineClosed, match="shutting down"):
            await loader.load(base + "/")
        assert await loader.load(data()) == IMAGE

    monkeypatch.setattr(module, "_MAX_CONNECTIONS", 4)
    with_loader({"/": nothing}, use, timeout=1000)


def test_whoever_gives_up_waiting_leaves_nothing():
    async def use(loader, site, base):
        task = asyncio.ensure_future(loader.load(base + "/"))
        async with asyncio.timeout(20):
            while not site.heads:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not loader._running
        assert not loader._session.connector._acquired

    with_loader({"/": nothing}, use, timeout=1000)


# -- TLS ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of images.test that signs itself, and its key."""
    if not shutil.which("openssl"):
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    name = "-subj /CN=images.test -addext subjectAltName=DNS:images.test"
    files = "-keyout key.pem -out cert.pem"
    subprocess.run(
        ["openssl", *f"{command} {name} {files}".split()], cwd=folder, check=True,
        capture_output=True, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    return folder / "cert.pem", folder / "key.pem"


def over_tls(host, certificate=None, greeting=b""):
    async def main():
        context = None
        if certificate:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*certificate)
        async with Site({"/": of(IMAGE)}, greeting).up(context) as site:
            limits = MediaLimits((f"{host}:{site.port}",))
            names = Names(images=["127.0.0.1"], other=["127.0.0.1"])
            loader = MediaLoader(limits, _resolve=names, _is_public="127.0.0.1".__eq__)
            try:
                return await loader.load(f"https://{host}:{site.port}/")
            finally:
                await loader.close()

    before = descriptors()
    try:
        return asyncio.run(main())
    finally:
        assert descriptors() == before


def test_tls_holds_hosts_to_their_names(certificate, monkeypatch):
    with pytest.raises(InvalidRequest, match="no valid certificate"):
        over_tls("images.test", certificate)
    trusting = ssl.create_default_context(cafile=certificate[0])
    monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", trusting)
    assert over_tls("images.test", certificate) == IMAGE
    with pytest.raises(InvalidRequest, match="no valid certificate"):
        over_tls("other.test", certificate)


def test_a_host_that_does_not_speak_tls_is_refused():
    with pytest.raises(InvalidRequest, match="TLS connection to .* failed"):
        over_tls("images.test", greeting=b"HTTP/1.1 400 Bad Request\r\n\r\n")
