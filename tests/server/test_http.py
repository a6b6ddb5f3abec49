"""The door: what is wrong with a request is told to whoever sent it, and costs nobody else."""

import asyncio
import json
import re
import socket
import sys
import time
import uuid

import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoactor.server import observe
from tests.server.harness import SIMULATED, hang_up, here, posted, raw, served

COMPLETION = {"model": "demo", "prompt": "ROMEO:", "max_tokens": 2}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


def send(server, data, **options):
    return asyncio.run(raw(server.port, data, **options))


def status(answer):
    return int(answer[9:12]) if answer else 0


def error(answer):
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def still_serves(server):
    answer = server.post("/v1/completions", COMPLETION)
    assert answer.status_code == 200, answer.text


# -- bodies -------------------------------------------------------------------------------

DEEP = b'{"model": "demo", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
DEEP_OBJECT = b'{"x":' * 50_000 + b"1" + b"}" * 50_000
BROKEN = {
    "empty": b"",
    "no json": b"ROMEO:",
    "cut off": b'{"model": "demo", "pro',
    "no object": b"[]",
    "null": b"null",
    "invalid utf-8": b'{"model": "demo", "prompt": "\xff\xfe"}',
    "half of a surrogate": b'{"model": "demo", "prompt": "\\ud800"}',
    "not a number": b'{"model": "demo", "prompt": "a", "temperature": NaN}',
    "too large a number": b'{"model": "demo", "prompt": "a", "temperature": 1e999}',
    "a huge number": b'{"model": "demo", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "deep list": DEEP,
    "deep object": DEEP_OBJECT,
    "deep values": b'{"model":"demo","messages":[{"role":"user","content":"a"}],'
    b'"chat_template_kwargs":{"a":' + b"[" * 90_000 + b"]" * 90_000 + b"}}",
    "two values": b"{} {}",
    "a byte order mark": "\ufeff{}".encode(),
    "utf-16": json.dumps(COMPLETION).encode("utf-16"),
}


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_are_not_what_they_should_be(fast_server, path):
    for name, body in BROKEN.items():
        answer = send(fast_server, posted(path, body))
        assert status(answer) == 400, (name, answer[:300])
        assert error(answer)["type"] == "invalid_request_error"
        assert error(answer)["message"]
    still_serves(fast_server)


@pytest.mark.parametrize(
    ("headers", "kind", "expected"),
    [
        ((), "text/plain", 415),
        ((), "application/x-www-form-urlencoded", 415),
        ((), "multipart/form-data; boundary=x", 415),
        ((), "", 415),
        (("Content-Encoding: gzip",), "application/json", 415),
        ((), "application/json; charset=utf-8", 200),
        ((), "Application/JSON", 200),
        (("Expect: 100-continue",), "application/json", 100),
    ],
)
def test_kinds_of_bodies(fast_server, headers, kind, expected):
    body = json.dumps(COMPLETION).encode()
    answer = send(fast_server, posted("/v1/completions", body, *headers, kind=kind))
    assert status(answer) == expected, answer
    if expected == 100:
        assert b"HTTP/1.1 200" in answer


def test_a_body_that_is_too_long_is_refused_unread(fast_server):
    for path in POSTS:
        answer = send(fast_server, posted(path, b"{", length=100 << 20))
        assert status(answer) == 413
        assert b"Connection: close" in answer
    before = fast_server.resident()
    chunk = b"100000\r\n" + b"a" * (1 << 20) + b"\r\n"
    head = posted("/tokenize", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")

    async def pour():
        """100 MB in chunks, whether or not anybody reads them."""
        reader, writer = await asyncio.open_connection("127.0.0.1", fast_server.port)
        writer.write(head)
        try:
            for _ in range(100):
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            pass
        answer = b""
        try:
            answer = await asyncio.wait_for(reader.read(1 << 16), 30)
        except ConnectionError:
            pass
        await hang_up(writer)
        return answer

    async def main():
        return await asyncio.gather(*(pour() for _ in range(4)))

    # The answer is lost where the kernel resets the connection first, which is a matter of luck.
    for _ in range(20):
        answers = [status(answer) for answer in asyncio.run(main())]
        assert set(answers) <= {0, 413}
        if 413 in answers:
            break
    assert 413 in answers
    assert fast_server.resident() - before < 64 << 20
    still_serves(fast_server)


def test_a_million_stop_strings(fast_server):
    few = {**COMPLETION, "stop": ["ab"] * 100_000}
    answer = send(fast_server, posted("/v1/completions", json.dumps(few).encode()))
    assert status(answer) == 400
    assert error(answer)["param"] == "stop"
    many = {**COMPLETION, "stop": ["ab"] * 1_000_000}
    answer = send(fast_server, posted("/v1/completions", json.dumps(many).encode()))
    assert status(answer) == 413


def test_a_body_that_is_cut_off_or_slow(fast_server):
    whole = posted("/v1/completions", json.dumps(COMPLETION).encode())
    begin = time.monotonic()
    answer = send(fast_server, whole[:-5])
    assert status(answer) == 408
    assert time.monotonic() - begin > 1

    async def leave():
        _, writer = await asyncio.open_connection("127.0.0.1", fast_server.port)
        writer.write(whole[:-5])
        await writer.drain()
        await hang_up(writer)

    async def main():
        await asyncio.gather(*(leave() for _ in range(200)))

    asyncio.run(main())
    still_serves(fast_server)


def test_heads_that_never_end_are_hung_up_on(fast_server):
    async def trickle(data):
        reader, writer = await asyncio.open_connection("127.0.0.1", fast_server.port)
        sent = 0
        try:
            for byte in data:
                writer.write(bytes([byte]))
                sent += 1
                await asyncio.sleep(0.1)
                if reader.at_eof():
                    break
            await asyncio.wait_for(reader.read(), 30)
        except ConnectionError:
            pass
        await hang_up(writer)
        return sent

    async def main():
        head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 500
        return await asyncio.gather(*(trickle(data) for data in [head] * 5 + [b""] * 50))

    assert max(asyncio.run(main())) < 50, "of more than 500 bytes"
    still_serves(fast_server)


BEGIN = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
NO_HTTP = [
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400, "HTTPS traffic"),
    (b"GET\r\n\r\n", 400, "space after method"),
    (b"GET / HTTP/9.9\r\n\r\n", 400, "status line"),
    (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: x\r\n\r\n", 400, "'Host'"),
    (BEGIN + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "Content-Length"),
    (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", 414, "8190 bytes"),
    (
        b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % n for n in range(2000)) + b"\r\n",
        431,
        "at most 128",
    ),
    (b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", 431, "8190 bytes"),
    (b"GET / HTTP/1.1\r\nCookie: " + b"y" * 100_000 + b"\r\n\r\n", 431, "8190 bytes"),
    (BEGIN + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", 413, "64 bits"),
    (
        BEGIN + b"Transfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\nzz\r\n",
        400,
        "chunk size",
    ),
    (b"GET /live HTTP/2.0\r\nHost: localhost\r\n\r\n", 505, "HTTP/1.1"),
]


@pytest.mark.parametrize(("data", "code", "words"), NO_HTTP, ids=range(len(NO_HTTP)))
def test_what_is_no_http_is_told_what_is_wrong_and_gets_no_traceback(
    fast_server, data, code, words
):
    lines = written(fast_server)
    answer = send(fast_server, data)
    assert status(answer) == code, answer[:200]
    assert answer.startswith(b"HTTP/1.1 ")
    assert words in error(answer)["message"]
    assert b"x-request-id" in answer
    kind = "server_error" if code >= 500 else "invalid_request_error"
    assert error(answer)["type"] == kind
    assert written(fast_server) - lines <= 2, "one, and that of the next look"
    still_serves(fast_server)


def written(server):
    """How many lines the log has, once that of a request of our own is there."""
    mine = f"look-{uuid.uuid4()}"
    server.get("/v1/models", headers={"x-request-id": mine})
    wait_until(lambda: any(mine in line for line in server.lines))
    return 1 + max(number for number, line in enumerate(server.lines) if mine in line)


def wait_until(check, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_large_bodies_on_their_way_are_bounded_and_idle_ones_shut_nobody_out():
    head = posted("/tokenize", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    part = b"10000\r\n" + b" " * 65536 + b"\r\n"

    async def main():
        config = dict(max_body_bytes=200_000, body_timeout=6.0)
        async with here(config=config, max_model_len=1024) as server:
            body = json.dumps({"prompt": "a" * 150_000}).encode()
            for _ in range(80):  # each gives its room back
                assert status(await raw(server.port, posted("/tokenize", body))) == 400
            idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(150)]
            for _, writer in idle:
                writer.write(head)
            ok = json.dumps({"prompt": "a"}).encode()
            assert status(await raw(server.port, posted("/tokenize", ok))) == 200
            for _, writer in idle:
                writer.write(part * 2)
            await asyncio.sleep(0.3)
            answers = []
            for reader, writer in idle:
                try:
                    answers.append(await asyncio.wait_for(reader.read(1000), 30))
                except ConnectionError:
                    answers.append(b"")
                await hang_up(writer)
            assert {status(answer) for answer in answers} == {503, 408}
            assert status(await raw(server.port, posted("/tokenize", ok))) == 200
            assert status(await raw(server.port, posted("/tokenize", body))) == 400

    asyncio.run(main())


READS_DEEPLY = sys.version_info >= (3, 12)
"""Whether `json` reads and writes values that are nested more deeply than `sys.getrecursionlimit()`
allows."""


@pytest.mark.parametrize("depth", [200, 700, 900, 980, 3000, 100_000])
def test_values_of_any_depth(fast_server, depth):
    deep = b"[" * depth + b"]" * depth
    tool = b'{"type":"function","function":{"name":"f","parameters":{"a":' + deep + b"}}}"
    chat = b'{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":"a"}],'
    for path, body in (
        ("/tokenize", b'{"messages":[{"role":"user","content":"a"}],"tools":[' + tool + b"]}"),
        ("/v1/chat/completions", chat + b'"tools":[' + tool + b"]}"),
        ("/v1/messages", chat + b'"tools":[{"name":"f","input_schema":{"a":' + deep + b"}}]}"),
        (
            "/v1/responses",
            b'{"model":"demo","max_output_tokens":1,"input":"a","tools":['
            b'{"type":"function","name":"f","parameters":{"a":' + deep + b"}}]}",
        ),
    ):
        # A depth that a template can write is written, and may be too long for a prompt.
        assert status(send(fast_server, posted(path, body))) in (200, 400), path
        if depth > (3000 if READS_DEEPLY else 980):
            assert status(send(fast_server, posted(path, body))) == 400, path
    kwargs = chat + b'"chat_template_kwargs":{"a":' + deep + b"}}"
    assert status(send(fast_server, posted("/v1/chat/completions", kwargs))) == 400
    still_serves(fast_server)


@pytest.mark.parametrize("stream", [b"false", b"true"])
def test_what_can_just_be_read_can_be_written_again_or_is_refused(fast_server, stream):
    """A response repeats parts of its request, deeper than they stood there."""
    lines, found = written(fast_server), set()
    for depth in range(960, 1010):
        deep = b'{"a":' * depth + b"1" + b"}" * depth
        body = (
            b'{"model":"demo","input":"a","max_output_tokens":1,"stream":' + stream + b',"tools":['
            b'{"type":"function","name":"f"}],"tool_choice":{"type":"function","name":"f","x":'
            + deep
            + b"}}"
        )
        answer = send(fast_server, posted("/v1/responses", body))
        found.add(status(answer))
        if status(answer) == 200 and stream == b"true":
            assert answer.count(b"event: response.incomplete") == 1, depth
    assert found == ({200} if READS_DEEPLY else {200, 400})
    assert not any("Traceback" in line for line in fast_server.lines[lines:])


TRACE = b"GET /trace?seconds=0.1 HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_a_client_that_has_received_a_trace_and_leaves_is_logged_with_200(fast_server):
    lines = written(fast_server)
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", fast_server.port)) as connection:
            connection.sendall(TRACE)
            answer = b""
            while not answer.endswith(b"\r\n0\r\n\r\n"):
                answer += connection.recv(1 << 16)
        assert status(answer) == 200
    wait_until(lambda: sum("GET /trace" in line for line in fast_server.lines[lines:]) == 5)
    assert not any(" 499 " in line for line in fast_server.lines[lines:])


@pytest.mark.parametrize("text", ["", "{"])
def test_a_trace_whose_exporter_fails_is_no_complete_answer(monkeypatch, text):
    program = f"import sys; sys.stdin.buffer.read(); sys.stdout.write({text!r}); sys.exit(1)"
    monkeypatch.setattr(observe, "_EXPORTER", [sys.executable, "-c", program])

    async def main():
        async with here() as server:
            leaves = TRACE[:-2] + b"Connection: close\r\n\r\n"
            return await raw(server.port, leaves)

    answer = asyncio.run(main())
    assert status(answer) == (200 if text else 500)
    assert not answer.endswith(b"\r\n0\r\n\r\n")


def test_names_of_fields_do_not_write_the_log(fast_server):
    forged = "x\n2026-01-01 nanoactor.access INFO 10.0.0.1 GET /secret 200 \x1b[31m"
    for name in (forged, "y" * 500_000):
        lines = written(fast_server)
        answer = fast_server.post("/v1/completions", {**COMPLETION, name: 1})
        assert answer.status_code == 200
        end = written(fast_server) - 1
        assert "is ignored" in fast_server.lines[lines]
        assert end - lines == 2
        for line in fast_server.lines[lines:end]:
            assert len(line) < 500
            assert "\x1b" not in line


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
NAMES = [
    *("model", "prompt", "messages", "max_tokens", "min_tokens", "temperature", "top_p", "top_k"),
    *("min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "n", "stream", "stream_options"),
    *("tools", "tool_choice", "chat_template_kwargs", "echo", "user", "priority", "logprobs"),
    *("add_generation_prompt", "continue_final_message", "tokens", "skip_special_tokens", "x"),
    *("response_format", "structured_outputs", "guided_json", "guided_choice"),
]


@settings(max_examples=40)
@given(
    st.sampled_from(POSTS),
    st.lists(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3), min_size=10, max_size=10),
)
def test_wrong_types_everywhere(fast_server, path, changes):
    base = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}.get(path, {})

    async def main():
        bodies = [json.dumps({**base, **change}).encode() for change in changes]
        return await asyncio.gather(*(raw(fast_server.port, posted(path, b)) for b in bodies))

    for change, answer in zip(changes, asyncio.run(main()), strict=True):
        assert status(answer) in (200, 400, 404), (change, answer)
        if status(answer) != 200:
            assert error(answer)["message"]


# -- heads --------------------------------------------------------------------------------


def test_paths_and_methods(fast_server):
    for path, method, expected in (
        ("/nowhere", "GET", 404),
        ("/v1", "GET", 404),
        ("/v1/completions", "GET", 405),
        ("/v1/models", "POST", 405),
        ("/live", "DELETE", 405),
        ("/..%2f..%2fetc/passwd", "GET", 404),
        ("/v1/models/a%2fb", "GET", 404),
        ("/trace?second=1", "GET", 400),
        ("/activity?to=1", "GET", 400),
    ):
        answer = send(
            fast_server,
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode(),
        )
        assert status(answer) == expected, (path, answer)
        assert error(answer)["message"]
        assert (b"\r\nAllow: " in answer) == (expected == 405)
        assert b"x-request-id: req-" in answer
    answer = fast_server.get("/v1/models", headers={"Accept": "*/*"})
    close = b"Host: a.localhost\r\nConnection: close\r\n\r\n"
    head = send(fast_server, b"HEAD /v1/models HTTP/1.1\r\n" + close)
    assert f"Content-Length: {len(answer.content)}".encode() in head
    assert head.endswith(b"\r\n\r\n")


def test_the_document_lists_the_methods_of_every_route(fast_server):
    paths = fast_server.get("/openapi.json").json()["paths"]
    assert len(paths) > 20
    for path, operations in paths.items():
        request = f"DELETE {path.replace('{model}', 'demo')} HTTP/1.1\r\nHost: localhost\r\n"
        answer = send(fast_server, f"{request}Connection: close\r\n\r\n".encode())
        lines = answer.split(b"\r\n\r\n")[0].decode().splitlines()
        allowed = next(line for line in lines if line.startswith("Allow: "))
        methods = set(allowed.removeprefix("Allow: ").split(", "))
        assert methods - {"HEAD"} == {method.upper() for method in operations}, path


def test_request_ids_go_in_and_out_and_into_the_log(fast_server):
    assert fast_server.get("/v1/models").headers["x-request-id"].startswith("req-")
    given_id = {"x-request-id": "mine-7:a.b"}
    assert fast_server.get("/v1/models", headers=given_id).headers["x-request-id"] == "mine-7:a.b"
    answer = fast_server.post("/v1/completions", {**COMPLETION, "user": "a\nb"}, headers=given_id)
    assert answer.headers["x-request-id"] == "mine-7:a.b"
    bad = fast_server.get("/v1/models", headers={"x-request-id": "a b" * 100})
    assert bad.headers["x-request-id"].startswith("req-")
    lines = wait_until(lambda: [line for line in fast_server.lines if "user='a\\nb'" in line])
    assert "POST /v1/completions 200" in lines[0]
    assert "mine-7:a.b" in lines[0]
    assert "2+2 tokens" in lines[0]


def test_a_name_that_somebody_else_may_own_is_refused_on_the_loopback_interface(fast_server):
    for host, expected in (
        ("evil.example", 400),
        ("localhost.evil.example:80", 400),
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("my.localhost", 200),
        ("LOCALHOST", 200),
    ):
        answer = send(
            fast_server,
            f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode(),
        )
        assert status(answer) == expected, host


def test_other_origins_may_call_only_where_they_are_allowed(fast_server):
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}

    def preflight(server):
        lines = "".join(f"{name}: {value}\r\n" for name, value in ask.items())
        head = "OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        return send(server, f"{head}{lines}\r\n".encode())

    assert b"Access-Control" not in preflight(fast_server)
    assert "Access-Control-Allow-Origin" not in fast_server.get("/v1/models", headers=ask).headers
    with served(*SIMULATED, "--cors-origin", "https://a.example", "--api-key", "k") as server:
        answer = preflight(server)
        assert b"204" in answer[:20]
        assert b"Access-Control-Allow-Origin: https://a.example" in answer
        headers = {**ask, "Authorization": "Bearer k"}
        allowed = server.get("/v1/models", headers=headers).headers
        assert allowed["Access-Control-Allow-Origin"] == "https://a.example"
        for origin in ("https://b.example", "https://a.example.evil", "https://a.exampl", "null"):
            other = server.get("/v1/models", headers={**headers, "Origin": origin}).headers
            assert "Access-Control-Allow-Origin" not in other
            assert other["Vary"] == "Origin"
        ask["Access-Control-Request-Headers"] = "x-stainless-os,authorization"
        assert b"Access-Control-Allow-Headers: x-stainless-os,authorization" in preflight(server)


def test_connections_beyond_the_limit_are_told_so():
    with served(*SIMULATED, "--max-connections", "5") as server:
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(5)]
        answer = send(server, b"")
        assert status(answer) == 503
        assert error(answer)["message"] == "too many connections"
        for connection in held:
            connection.close()
        body = posted("/v1/completions", json.dumps(COMPLETION).encode())
        wait_until(lambda: status(send(server, body)) == 200)


# -- what is told -------------------------------------------------------------------------


def test_every_route_of_the_document_answers(fast_server):
    document = fast_server.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for path, methods in document["paths"].items():
        if "get" in methods:
            answer = fast_server.get(path.replace("{model}", "demo"))
            assert answer.status_code == 200, path
            kinds = methods["get"]["responses"]["200"]["content"]
            assert any(answer.headers["content-type"].startswith(kind) for kind in kinds)
        else:
            assert fast_server.post(path, {}).status_code == 400
    properties = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "temperature", "tools", "n"} <= set(properties)


def test_clients_of_the_text_service_may_go_away(fast_server):
    async def leave():
        _, writer = await asyncio.open_connection("127.0.0.1", fast_server.port)
        writer.write(posted("/tokenize", json.dumps({"prompt": "to be " * 5000}).encode()))
        await asyncio.sleep(0.002)
        await hang_up(writer)

    async def main():
        for _ in range(3):
            await asyncio.gather(*(leave() for _ in range(60)))

    asyncio.run(main())
    assert fast_server.post("/tokenize", {"prompt": "a"}).status_code == 200


def test_tokens_there_and_back(fast_server):
    text = "To be, or not to be: Größe 和 👍"
    ids = fast_server.post("/tokenize", {"prompt": text}).json()
    assert ids["count"] == len(ids["tokens"]) > 10
    assert ids["max_model_len"] == 1024
    assert fast_server.post("/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": text}
    chat = fast_server.post("/tokenize", {"messages": CHAT["messages"]}).json()["tokens"]
    told = fast_server.post("/detokenize", {"tokens": chat}).json()["prompt"]
    assert told == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    usage = fast_server.post("/v1/chat/completions", CHAT).json()["usage"]
    assert usage["prompt_tokens"] == len(chat)
    assert usage["queue_time"] > 0
    assert usage["prompt_time"] > 0
    assert usage["completion_time"] >= 0  # a busy loop may see all tokens at once
    for wrong in ({"tokens": [99_999]}, {"tokens": [-1]}, {"prompt": "a", "messages": []}, {}):
        for path in ("/tokenize", "/detokenize"):
            assert fast_server.post(path, wrong).status_code == 400
    assert fast_server.post("/tokenize", {"prompt": "a", "model": "x"}).status_code == 404
    messages = {"messages": CHAT["messages"]}
    for extra in (
        {"add_special_tokens": True},
        {"tools": [{"type": "custom", "name": "f"}]},
        {"chat_template_kwargs": {"x": 1}},
    ):
        assert fast_server.post("/tokenize", {**messages, **extra}).status_code == 400


def test_prompts_that_are_cut(fast_server):
    post, cut, long = fast_server.post, {"truncate_prompt_tokens": 5}, "to be " * 2000
    for prompts in ([long], [long, long], [[5] * 2000], [[5] * 2000, [6] * 3]):
        body = {**COMPLETION, "prompt": prompts}
        answer = post("/v1/completions", body)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        usage = post("/v1/completions", body | cut).json()["usage"]
        assert usage["prompt_tokens"] == (8 if [6] * 3 in prompts else 5 * len(prompts))
    body = {**CHAT, "messages": [{"role": "user", "content": long}]}
    assert post("/v1/chat/completions", body | cut).json()["usage"]["prompt_tokens"] == 5
    body |= {"truncate_prompt_tokens": -1, "truncation_side": "left"}
    assert post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"] == 1022
    for path, body, param, said in (
        (
            "/v1/completions",
            COMPLETION | cut | {"echo": True},
            None,
            "echo cannot be combined with truncate",
        ),
        ("/v1/completions", COMPLETION | {"truncate_prompt_tokens": 1024}, None, "at most 1023"),
        ("/v1/completions", COMPLETION | {"truncate_prompt_tokens": 0}, None, "got 0"),
        ("/v1/chat/completions", CHAT | {"truncation_side": "right"}, "truncation_side", "last"),
    ):
        answer = post(path, body)
        assert answer.status_code == 400
        problem = answer.json()["error"]
        assert problem["param"] == (param or "truncate_prompt_tokens")
        assert said in problem["message"]
    # An echo that generates nothing goes another way.
    body = COMPLETION | cut | {"echo": True, "max_tokens": 0}
    assert "cannot be combined" in post("/v1/completions", body).json()["error"]["message"]


TOOL = {"type": "function", "function": {"name": "f"}}


def test_what_the_models_template_would_ignore_is_refused(fast_server):
    ignored = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = fast_server.post("/v1/chat/completions", {**CHAT, **ignored})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"
    able = fast_server.get("/v1/models").json()["data"][0]["capabilities"]
    assert (able["chat"], able["tools"], able["reasoning"]) == (True, True, False)
    for extra in (
        {"tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
        {"tool_call_id": "a"},
    ):
        body = {**CHAT, "messages": [{**CHAT["messages"][0], **extra}]}
        assert fast_server.post("/v1/chat/completions", body).status_code == 400


def test_figures_for_prometheus(fast_server):
    def figures():
        lines = fast_server.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    looked_at_twice(fast_server)
    before = figures()
    params = {**COMPLETION, "max_tokens": 50, "ignore_eos": True}
    for stream in (False, True):
        fast_server.post("/v1/completions", {**params, "stream": stream})
    fast_server.post("/v1/completions", {**params, "n": 129})
    looked_at_twice(fast_server)
    after = figures()

    def grew(name):
        return after[name] - before.get(name, 0.0)

    path = 'path="/v1/completions"'
    assert grew(f'nanoactor_requests_total{{outcome="ok",{path}}}') == 2
    assert grew(f'nanoactor_requests_total{{outcome="4xx",{path}}}') == 1
    for name, count in (
        ("time_to_first_token_seconds_count", 2),
        ("request_queue_time_seconds_count", 2),
        ("time_per_output_token_seconds_count", 2),
        ("inter_token_latency_seconds_count", 98),
        ("request_seconds_count", 2),
        ("output_tokens_total", 100),
        ("request_output_tokens_sum", 100),
        ("prefix_cache_prompt_tokens_total", 4),
    ):
        assert grew(f"nanoactor_{name}") == count, name
    busy = grew("nanoactor_device_busy_seconds_total")
    assert busy == pytest.approx(0.002 * grew("nanoactor_steps_total"), rel=0.1)
    assert after["nanoactor_step_seconds"] == pytest.approx(0.002, rel=0.2)
    assert 0 <= after["nanoactor_device_idle_ratio"] < 1
    for name in ("queue_requests", "queue_tokens", "running_sequences", "kv_blocks_used"):
        assert after[f"nanoactor_{name}"] == 0
    device = after['nanoactor_actor_busy_ratio{actor="runner.0 device"}']
    assert 0 < device < 1
    for actor in ("frontend", "scheduler"):  # on a busy machine, busier than the device
        assert 0 <= after[f'nanoactor_actor_busy_ratio{{actor="{actor}"}}'] < 1
    assert grew("nanoactor_event_loop_lag_seconds_count") > 10
    seconds = {
        name: grew(f"nanoactor_{name}_sum")
        for name in (
            *("time_to_first_token_seconds", "time_per_output_token_seconds"),
            *("inter_token_latency_seconds", "request_seconds"),
        )
    }
    assert seconds["time_to_first_token_seconds"] >= 2 * 0.002
    assert seconds["inter_token_latency_seconds"] >= 98 * 0.0015
    assert seconds["time_per_output_token_seconds"] == pytest.approx(
        seconds["inter_token_latency_seconds"] / 49
    )
    assert seconds["request_seconds"] == pytest.approx(
        seconds["time_to_first_token_seconds"] + seconds["inter_token_latency_seconds"], rel=0.1
    )


def looked_at_twice(server):
    """Wait until the monitor has begun a look, and ended it, since now."""
    number = server.get("/activity").json()["number"]
    wait_until(lambda: server.get("/activity").json()["number"] >= number + 2)


def test_a_trace_shows_what_happens_meanwhile(fast_server):
    async def main():
        body = json.dumps({**COMPLETION, "max_tokens": 700, "ignore_eos": True}).encode()
        work = asyncio.ensure_future(raw(fast_server.port, posted("/v1/completions", body)))
        await asyncio.sleep(0.1)
        head = b"GET /trace?seconds=0.8 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        begin = time.monotonic()
        first = asyncio.ensure_future(raw(fast_server.port, head))
        await asyncio.sleep(0.1)
        second = await raw(fast_server.port, head)
        assert status(second) == 429
        trace = await first
        return trace, time.monotonic() - begin, await work

    trace, seconds, answer = asyncio.run(main())
    assert status(trace) == status(answer) == 200
    text = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", trace.partition(b"\r\n\r\n")[2])
    found = json.loads(text[text.index(b"{") : text.rindex(b"}") + 1])["traceEvents"]
    forwards = [e for e in found if e["name"] == "forward"]
    assert all(e["dur"] == pytest.approx(2000, rel=0.1) for e in forwards)
    steps = [e["args"]["step"] for e in forwards]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    span = max(e["ts"] for e in forwards) - min(e["ts"] for e in forwards)
    assert 0 < span < 1e6 * seconds, "no longer than it was asked for, and the machine was late"
    gone = socket.create_connection(("127.0.0.1", fast_server.port))
    gone.sendall(b"GET /trace?seconds=30 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    wait_until(lambda: fast_server.get("/trace?seconds=0.1").status_code == 429)
    gone.close()
    wait_until(lambda: fast_server.get("/trace?seconds=0.1").status_code == 200)
    for wrong in ("0", "-1", "61", "x", "nan", ""):
        assert fast_server.get(f"/trace?seconds={wrong}").status_code == 400


def test_activity_goes_on_from_where_the_page_was(fast_server):
    first = fast_server.get("/activity").json()
    assert first["number"] >= 1
    assert len(first["tracks"]) == len(first["tokens"]) >= 1
    assert set(first["tracks"][0]) >= {"scheduler", "runner.0 device"}
    assert all(len(bins) == first["bins"] for bins in first["tracks"][0].values())
    looked_at_twice(fast_server)
    second = fast_server.get(f"/activity?since={first['number']}").json()
    assert len(second["tracks"]) == second["number"] - first["number"] >= 2
    for wrong in ("-1", "x", "1e3", "9" * 30):
        assert fast_server.get(f"/activity?since={wrong}").status_code == 400


def test_an_engine_without_tokenizer_serves_ids():
    async def main():
        async with here(skip_tokenizer_init=True) as server:
            ok = json.dumps({**COMPLETION, "prompt": [5, 6]}).encode()
            answer = await raw(server.port, posted("/v1/completions", ok))
            assert status(answer) == 200
            for path, body in (
                ("/v1/completions", COMPLETION),
                ("/v1/completions", {**COMPLETION, "prompt": [5], "echo": True}),
                ("/v1/completions", {**COMPLETION, "prompt": [5], "stop": "a"}),
                ("/v1/chat/completions", CHAT),
            ):
                answer = await raw(server.port, posted(path, json.dumps(body).encode()))
                assert status(answer) == 400, answer
            answer = await raw(server.port, posted("/tokenize", b'{"prompt": "a"}'))
            assert status(answer) == 404

    asyncio.run(main())


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}], ids=str)
def test_no_model_is_the_one_that_is_served(demo_server, model):
    body = {name: value for name, value in CHAT.items() if name != "model"} | model
    answer = httpx.post(f"{demo_server.url}/v1/chat/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["model"]) == (200, "demo")
