"""A server with replicas on Ray, in processes of its own, and what kills some of these."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path

import aiohttp

from tests.server.harness import Served, _descendants

ENGINES = "ray::ServeReplica:nanoactor:engines"
INGRESS = "ray::ServeReplica:nanoactor:ingress"


class Cluster(Served):
    """`nanoactor serve --replicas`."""

    def __init__(self, *arguments, replicas=2, model="demo", **environment):
        super().__init__("--replicas", str(replicas), *arguments, model=model, **environment)

    def pids(self, title=ENGINES):
        """The processes of replicas that live, by what Ray calls them."""
        found = []
        for pid in _descendants(self.process.pid):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().decode().startswith(title):
                    found.append(int(pid))
        return sorted(found)

    def kill(self, pid, number=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def replicas(self):
        return self.get("/health").json()["actors"]

    def until(self, count, seconds=120):
        """Wait until so many replicas serve."""
        deadline = time.monotonic() + seconds
        while len(self.replicas()) != count:
            assert time.monotonic() < deadline, self.replicas()
            time.sleep(0.2)

    def busy(self, streams=4, seconds=60):
        """The process of a replica, once it runs some streams."""
        deadline = time.monotonic() + seconds
        while True:
            for replica in self.replicas().values():
                if replica["streams"] >= streams:
                    return replica["pid"]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def metric(self, name):
        """A figure of the ingress, summed over its labels."""
        found = 0.0
        for line in self.get("/metrics").text.splitlines():
            if line.startswith((name + " ", name + "{")):
                found += float(line.rpartition(" ")[2])
        return found


async def ask(session, url, path, body):
    """All that a stream says: (texts, ids of its answers, reasons, usage, calls, log-probabilities,
    times of its events)."""
    told = {"text": {}, "reasons": {}, "logprobs": {}, "calls": {}, "ids": set(), "usage": None}
    times = [time.monotonic()]
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with session.post(url + path, json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: ") or line == b"data: [DONE]\n":
                continue
            times.append(time.monotonic())
            value = json.loads(line[6:])
            assert "error" not in value, value
            told["ids"].add(value["id"])
            told["usage"] = value.get("usage") or told["usage"]
            for choice in value["choices"]:
                _take(told, choice)
    return told, times


def _take(told, choice):
    index = choice["index"]
    delta = choice.get("delta") or choice
    text = delta.get("content") or delta.get("text") or ""
    told["text"][index] = told["text"].get(index, "") + text
    for call in delta.get("tool_calls") or ():
        place = told["calls"].setdefault((index, call["index"]), ["", ""])
        place[0] += call["function"].get("name") or ""
        place[1] += call["function"].get("arguments") or ""
    if choice.get("finish_reason"):
        assert index not in told["reasons"], "two ends"
        told["reasons"][index] = choice["finish_reason"]
    told["logprobs"].setdefault(index, []).extend(_logprobs(choice.get("logprobs")))


def _logprobs(given):
    if not given:
        return []
    if "content" in given:
        return [(one["token"], one["logprob"]) for one in given["content"] or ()]
    return list(zip(given["tokens"], given["token_logprobs"], strict=True))


def same(found, wanted):
    """The same answer under one id; log-probabilities may round differently."""
    assert len(found["ids"]) == 1
    for name in ("text", "reasons", "calls"):
        assert found[name] == wanted[name]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [found["usage"][n] for n in counts] == [wanted["usage"][n] for n in counts]
    assert found["logprobs"].keys() == wanted["logprobs"].keys()
    for index, pairs in wanted["logprobs"].items():
        mine = found["logprobs"][index]
        assert [token for token, _ in mine] == [token for token, _ in pairs]
        for (_, one), (_, other) in zip(mine, pairs, strict=True):
            assert one is other is None or abs(one - other) < 1e-4


async def ask_all(url, asked):
    timeout = aiohttp.ClientTimeout(total=None, sock_read=240)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        return await asyncio.gather(*(ask(session, url, *one) for one in asked))
