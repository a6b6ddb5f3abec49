"""Examples that serve, or that talk to a server."""

import asyncio
import importlib.util
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.clients.scripted_model import SAID
from tests.clients.scripted_process import scripted_server
from tests.examples.running import descendants, run, started
from tests.product_files import ROOT
from tests.server.harness import events

GPUS = ROOT / "examples" / "several_gpus"


def test_calls_of_a_model_are_run(tmp_path):
    """The model is scripted: it calls the first tool that it knows, and then says a sentence."""
    with scripted_server(tmp_path / "model") as url:
        said = run("chat_with_tools.py", "--url", f"{url}/v1", said="What is here?\nAnd now?\n")
    results = re.findall(r"^(?:> )?  \[list_files\((.*)\) -> (.*)\]$", said, re.M)
    assert [json.loads(arguments) for arguments, _ in results] == [{"path": "."}] * 2
    assert all({"README.md", "examples"} <= set(json.loads(result)) for _, result in results)
    assert said.count(SAID) == 2, "once the model has the result, it answers"


def test_a_call_does_no_harm_whatever_its_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = runpy.run_path(str(ROOT / "examples" / "chat_with_tools.py"))["call"]
    assert call("calculate", '{"a": 17, "op": "*", "b": 23}') == "391.0"
    assert call("list_files", '{"path": "."}') == "[]"
    (tmp_path / "link").symlink_to("/")
    for name, arguments, says in (
        ("list_files", '{"path": ".."}', "outside of the working folder"),
        ("list_files", '{"path": "link"}', "outside of the working folder"),
        ("list_files", '{"path": "none"}', "FileNotFoundError"),
        ("calculate", '{"a": 1, "op": "/", "b": 0}', "ZeroDivisionError"),
        ("calculate", '{"a": 1}', "TypeError"),
        ("calculate", "{", "JSONDecodeError"),
        ("remove", "{}", "there is no function remove"),
    ):
        assert says in json.loads(call(name, arguments))["error"]


needs_fastapi = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn")),
    reason="FastAPI is not installed: pip install 'nanoactor[examples]'",
)


async def use_application(url):
    """Two streams at once, what is refused, and a client that hangs up."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def stream(prompt):
            body = {"prompt": prompt, "max_tokens": 20, "temperature": 0}
            answer = await client.post("/generate", json=body)
            assert answer.headers["content-type"].startswith("text/event-stream")
            found = events(answer.text)
            assert [one["finish_reason"] for one in found[:-1]] == [None] * (len(found) - 1)
            assert found[-1]["finish_reason"] in ("length", "stop")
            return "".join(one["text"] for one in found)

        texts = await asyncio.gather(*map(stream, ("ROMEO:", "JULIET:", "KING:")))
        assert len(set(texts)) == 3
        assert all(texts)
        for body, status, says in (
            ({"prompt": ""}, 400, "the prompt is empty"),
            ({"prompt": "a", "temperature": -1}, 400, "temperature"),
            ({"prompt": "a", "max_tokens": 0}, 422, "greater than or equal to 1"),
            ({"prompt": "a" * 500_000}, 400, "tokens"),
        ):
            answer = await client.post("/generate", json=body)
            assert answer.status_code == status, answer.text
            assert says in answer.text
        long = {"prompt": "LEAR:", "max_tokens": 30_000, "min_tokens": 30_000}
        async with client.stream("POST", "/generate", json=long) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            health = (await client.get("/health")).json()
            assert health == {"status": "ok", "live": 1, "aborted": 0}
            await lines.aclose()
        while health["live"]:
            health = (await client.get("/health")).json()
        assert health == {"status": "ok", "live": 0, "aborted": 1}


@needs_fastapi
def test_an_application_has_an_engine_inside():
    command = (sys.executable, "examples/fastapi_app.py", "--port", 0)
    # uvicorn ends by the signal that it was sent.
    with started(*command, status=-signal.SIGTERM) as example:
        url = example.until(r"running on (http://\S+)")[1]
        asyncio.run(use_application(url))
    assert any("Application shutdown complete" in line for line in example.lines if line)


needs_nginx = pytest.mark.skipif(
    not all(map(shutil.which, ("nginx", "curl"))),
    reason="nginx or curl is not installed (Debian's packages nginx-light, curl)",
)


@needs_nginx
def test_the_configuration_of_nginx_is_valid(tmp_path):
    shutil.copy(GPUS / "nginx.conf", tmp_path)
    (tmp_path / "listen.conf").write_text(f"listen unix:{tmp_path}/front.sock;\n")
    (tmp_path / "engines.conf").write_text(f"server unix:{tmp_path}/engine-0.sock max_fails=0;\n")
    command = ["nginx", "-t", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "test is successful" in done.stderr


@pytest.fixture
def command_of_this_tree(tmp_path):
    """A PATH with a `nanoactor` that is this tree's, whatever is installed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "nanoactor"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -m nanoactor "$@"\n')
    path.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def environment_of(pid, name):
    for entry in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0"):
        if entry.startswith(f"{name}="):
            return entry.partition("=")[2]
    return None


def servers_of(pid):
    """By the name of its socket, the process of each engine's server."""
    found = {}
    for child in descendants(pid):
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if words[1:4] == ["-m", "nanoactor", "serve"]:
            found[Path(words[words.index("--uds") + 1]).name] = child
    return found


@needs_nginx
@pytest.mark.deadly
@pytest.mark.parametrize("device", ["simulated:2", pytest.param("cpu", marks=pytest.mark.long)])
def test_several_engines_behind_nginx(tmp_path, command_of_this_tree, device):
    front = tmp_path / "front.sock"
    options = ("--device", device, "--placement", "single", "--max-model-len", 1024)
    settings = dict(GPUS="0 2", LISTEN=f"unix:{front}", TMPDIR=str(tmp_path))
    command = (GPUS / "start.sh", "demo", *options)
    with started(*command, PATH=command_of_this_tree, **settings) as example:
        example.until("2 engines behind")
        servers = servers_of(example.process.pid)
        assert {n: environment_of(p, "CUDA_VISIBLE_DEVICES") for n, p in servers.items()} == {
            "engine-0.sock": "0",
            "engine-1.sock": "2",
        }
        transport = httpx.HTTPTransport(uds=str(front))
        with httpx.Client(transport=transport, base_url="http://example.org", timeout=120) as user:
            use_both(user, servers, example)
    assert not list(tmp_path.glob("nanoactor.*")), "its folder is gone"
    assert not front.exists()


def ask(user):
    """(The answer of one engine, which ones were asked)."""
    body = {"model": "demo", "prompt": "ROMEO:", "max_tokens": 8, "seed": 1}
    answer = user.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    asked = [Path(one).name for one in answer.headers["X-Engine"].split(", ")]
    return answer.json()["choices"][0]["text"], asked


def use_both(user, servers, example):
    answers = [ask(user) for _ in range(4)]
    assert len({text for text, _ in answers}) == 1
    assert {name for _, names in answers for name in names} == set(servers)
    # Each piece of a stream is passed on by itself: others are answered before its end.
    body = {"model": "demo", "prompt": "LEAR:", "max_tokens": 800, "stream": True}
    with user.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as stream:
        pieces = stream.iter_lines()
        assert next(pieces).startswith("data: ")
        busy = Path(stream.headers["X-Engine"]).name
        assert ask(user)[1] == [next(name for name in servers if name != busy)]
        assert [line for line in pieces if line][-1] == "data: [DONE]"
    # While an engine is down the other one answers, and it is started again.
    os.kill(servers["engine-0.sock"], signal.SIGKILL)
    assert {ask(user)[1][-1] for _ in range(4)} == {"engine-1.sock"}
    example.until("engine 0 has ended and is started again")
    example.until("listening on unix:.*engine-0.sock", count=2)
    assert {ask(user)[1][-1] for _ in range(4)} == set(servers)


@needs_nginx
def test_an_engine_that_cannot_start_ends_the_script(tmp_path, command_of_this_tree):
    command = [str(GPUS / "start.sh"), str(tmp_path / "no model")]
    settings = dict(ENGINES="1", LISTEN=f"unix:{tmp_path}/front.sock", TMPDIR=str(tmp_path))
    done = subprocess.run(
        command,
        env={**os.environ, **settings, "PATH": command_of_this_tree},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "no model" in done.stderr
    assert not list(tmp_path.glob("nanoactor.*"))
