"""Where a server is found: several names, a proxy's path, TLS, a Unix socket; and its log."""

import asyncio
import json
import logging
import socket
import ssl
import stat
import subprocess
import sys

import httpx2 as httpx
import pytest
import trustme

from nanoactor.api.engine import AsyncLLM
from nanoactor.errors import InvalidConfig
from nanoactor.server.app import Server
from nanoactor.server.config import ServerConfig
from tests.server.harness import IN_ONE, here, served, url
from tests.server.scripted import scripted

FAST = dict(device="simulated:1", placement="single")
COUNTED = "/v1/chat/completions", "ok"
ASKED = {"messages": [{"role": "user", "content": "Speak."}], "max_tokens": 2}


def test_a_model_has_several_names_and_answers_have_the_first():
    async def main():
        async with (
            here(config={"served_model_name": ["a", "b"]}, **FAST) as server,
            httpx.AsyncClient(base_url=url(server)) as client,
        ):
            listed = (await client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in listed] == ["a", "b"]
            assert (await client.get("/v1/models/b")).json()["id"] == "b"
            for given in ({"model": "a"}, {"model": "b"}, {}):
                answer = await client.post("/v1/chat/completions", json={**ASKED, **given})
                assert answer.json()["model"] == "a"
            answer = await client.post("/v1/chat/completions", json={**ASKED, "model": "demo"})
            assert answer.status_code == 404
            assert "this server serves 'a' or 'b'" in answer.json()["error"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize("below", ["", "/llm"])
def test_a_proxy_may_leave_its_path_in_or_out(below, caplog):
    async def main():
        async with (
            here(config={"root_path": "/llm/"}, **FAST) as server,
            httpx.AsyncClient(base_url=url(server)) as client,
        ):
            for path in ("/v1/chat/completions", "/chat/completions", "/v1/chat/completions/"):
                answer = await client.post(below + path, json=ASKED)
                assert answer.status_code == 200, answer.text
            answer = await client.post(f"{below}/v1/messages", json={})
            assert answer.json()["type"] == "error", "in this API's shape"
            assert (await client.get(f"{below}/live")).status_code == 200
            assert (await client.get(f"{below}/")).headers["Content-Type"].startswith("text/html")
            assert (await client.get(f"{below}/nowhere")).status_code == 404
            assert (await client.get("/llmother/live")).status_code == 404
            document = (await client.get(f"{below}/openapi.json")).json()
            assert document["servers"] == [{"url": "/llm"}]
            assert server.metrics.requests.labels(*COUNTED)._value.get() == 3

    asyncio.run(main())


def test_keys_are_asked_for_below_a_path_too():
    async def main():
        config = {"root_path": "/llm", "api_keys": ("k",)}
        async with (
            here(config=config, **FAST) as server,
            httpx.AsyncClient(base_url=url(server)) as client,
        ):
            assert (await client.get("/llm/v1/models")).status_code == 401
            assert (await client.get("/llm/live")).status_code == 200
            known = {"Authorization": "Bearer k"}
            assert (await client.get("/llm/v1/models", headers=known)).status_code == 200

    asyncio.run(main())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(of the authority, of the server, the server's key), as files."""
    path = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(str(path / "ca.pem"))
    issued.private_key_pem.write_to_path(str(path / "key.pem"))
    for number, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(str(path / "cert.pem"), append=number > 0)
    return path / "ca.pem", path / "cert.pem", path / "key.pem"


def test_tls_is_spoken_where_there_is_a_certificate(certificate):
    authority, chain, key = certificate

    async def main():
        config = {"ssl_certfile": str(chain), "ssl_keyfile": str(key)}
        trusted = ssl.create_default_context(cafile=str(authority))
        async with here(config=config, **FAST) as server:
            base = f"https://localhost:{server.port}"
            async with httpx.AsyncClient(base_url=base, verify=trusted) as client:
                answer = await client.post("/v1/chat/completions", json={**ASKED, "stream": True})
                assert answer.text.rstrip().endswith("data: [DONE]")
            async with httpx.AsyncClient(base_url=base) as client:
                with pytest.raises(httpx.ConnectError):
                    await client.get("/live")
            async with httpx.AsyncClient(base_url=url(server)) as client:
                with pytest.raises(httpx.HTTPError):
                    await client.get("/live")
            async with httpx.AsyncClient(base_url=base, verify=trusted) as client:
                assert (await client.get("/live")).status_code == 200

    asyncio.run(main())


def test_a_certificate_that_is_none_is_told_before_the_model_is_loaded(tmp_path, certificate):
    _, chain, key = certificate
    for files in ((chain, chain), (tmp_path / "none", key)):
        config = ServerConfig(port=0, ssl_certfile=str(files[0]), ssl_keyfile=str(files[1]))
        server = Server(AsyncLLM("demo", **FAST), config)
        with pytest.raises(InvalidConfig, match="cannot be used"):
            asyncio.run(server.start())


def test_a_unix_socket_is_its_owners_alone_and_leaves_no_file(tmp_path):
    path = tmp_path / "nano.sock"

    async def ask():
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://anything") as client:
            answer = await client.post("/v1/chat/completions", json={**ASKED, "stream": True})
            assert answer.text.rstrip().endswith("data: [DONE]")

    async def main():
        async with here(config={"uds": str(path)}, **FAST) as server:
            assert server.port == 0
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            await ask()
            other = Server(AsyncLLM("demo", **FAST), ServerConfig(uds=str(path)))
            with pytest.raises(OSError, match="in use"):
                await other.start()
            await ask()  # it has taken nothing away
        assert not path.exists()
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
        async with here(config={"uds": str(path)}, **FAST):
            await ask()  # in place of what a killed server has left
        path.write_text("precious")
        with pytest.raises(OSError, match="in use"):
            await Server(AsyncLLM("demo", **FAST), ServerConfig(uds=str(path))).start()
        assert path.read_text() == "precious"

    asyncio.run(main())


def test_the_command_serves_on_a_unix_socket(tmp_path):
    path = tmp_path / "nano.sock"
    command = [sys.executable, "-m", "nanoactor", "serve", "demo", *IN_ONE, "--uds", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert any(f"listening on unix:{path}" in line for line in process.stderr)
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://localhost") as client:
                assert client.get("/live").status_code == 200
        finally:
            process.terminate()
            process.stderr.read()
    assert process.returncode == 0
    assert not path.exists()


def test_variables_of_the_template_have_defaults(tmp_path, monkeypatch):
    async def prompts(config, *bodies):
        async with (
            scripted(tmp_path, monkeypatch, config) as (server, _),
            httpx.AsyncClient(base_url=url(server)) as client,
        ):
            found = []
            for body in bodies:
                asked = {"model": "m", "messages": ASKED["messages"], **body}
                found.append((await client.post("/tokenize", json=asked)).json()["count"])
            return found

    on, off, empty = (
        {"chat_template_kwargs": {"enable_thinking": value}} for value in (True, False, None)
    )
    plain = asyncio.run(prompts({}, {}, off))
    config = {"default_chat_template_kwargs": {"enable_thinking": False}}
    found = asyncio.run(prompts(config, {}, on, empty))
    assert plain[0] != plain[1]
    assert found == [plain[1], plain[0], plain[1]]
    effort = {"reasoning_effort": "high"}
    assert asyncio.run(prompts(config, effort)) == asyncio.run(prompts({}, effort))


def test_a_default_that_the_template_does_not_read_is_refused_at_the_start(tmp_path, monkeypatch):
    async def main():
        config = {"default_chat_template_kwargs": {"mood": 1}}
        async with scripted(tmp_path, monkeypatch, config):
            pass

    with pytest.raises(InvalidConfig, match="default_chat_template_kwargs: .*'mood'"):
        asyncio.run(main())


def test_paths_may_be_left_out_of_the_access_log(caplog):
    async def main():
        config = {"disable_access_log_for_endpoints": "/v1/models, /health", "access_log": True}
        server = Server(AsyncLLM("demo", **FAST), ServerConfig(port=0, **config))
        await server.start()
        try:
            async with httpx.AsyncClient(base_url=url(server)) as client:
                for path in ("/v1/models", "/v1/models/demo"):
                    await client.get(path)
        finally:
            await server.stop()

    with caplog.at_level(logging.INFO, "nanoactor.access"):
        asyncio.run(main())
    lines = [r.getMessage() for r in caplog.records if r.name == "nanoactor.access"]
    assert len(lines) == 1
    assert "/v1/models/demo" in lines[0]


def test_the_command_reads_a_file_of_options(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("served-model-name: [x, y]\nmax-logprobs: 1k\nenable-chunked-prefill: true\n")
    with served(*IN_ONE, "--config", str(path)) as server:
        card = json.loads(server.get("/v1/models").text)["data"][1]
        assert (card["id"], card["limits"]["max_logprobs"]) == ("y", 1000)
        notes = [line for line in server.lines if "has no effect" in line]
        assert len(notes) == 1
