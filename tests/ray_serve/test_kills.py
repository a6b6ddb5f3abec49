"""Replicas and nodes die again and again under many streams: each says what it says undisturbed."""

import asyncio
import contextlib
import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.ray_serve.cluster import INGRESS, Cluster, ask_all, same
from tests.ray_serve.requests import COMPLETIONS, kinds, make_model
from tests.ray_serve.test_serving import OPTIONS, undisturbed
from tests.server.harness import _descendants, here, url

pytestmark = [pytest.mark.deadly, pytest.mark.long, pytest.mark.timeout(3600)]
STREAMS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "seeing")


class Killer(threading.Thread):
    """Kills a replica that runs streams whenever all of them serve, by SIGKILL and by SIGSTOP in
    turn. A suspect's trial is left alone: a third death convicts it, wherever that comes from."""

    def __init__(self, cluster, replicas, kills):
        super().__init__(daemon=True)
        self.cluster, self.replicas, self.wanted = cluster, replicas, kills
        self.kills, self.draw, self.done = [], random.Random(1), threading.Event()

    def run(self):
        while len(self.kills) < self.wanted and not self.done.is_set():
            time.sleep(self.draw.uniform(0.2, 2.0))
            with contextlib.suppress(OSError, KeyError, ValueError):
                self._kill_one()

    def _kill_one(self):
        serving = self.cluster.replicas()
        busy = [one["pid"] for one in serving.values() if one["streams"] >= 2]
        if len(serving) < self.replicas or not busy:
            return
        if self.cluster.metric("nanoactor_replica_reserved"):
            return
        number = (signal.SIGKILL, signal.SIGSTOP)[len(self.kills) % 2]
        self.cluster.kill(busy[0], number)
        self.kills.append(number)


def test_50_kills_under_64_streams(model):
    asked = [ask for seed in range(6) for ask in kinds(seed, 120)][:STREAMS]
    wanted = asyncio.run(undisturbed(model, asked))
    cluster = Cluster(*OPTIONS, "--served-model-name", "demo", model=str(model))
    killer = Killer(cluster, replicas=2, kills=50)
    waves = 0
    try:
        cluster.until(2)
        killer.start()
        while killer.is_alive():
            found = asyncio.run(ask_all(cluster.url, asked))
            for (told, _), right in zip(found, wanted, strict=True):
                same(told, right)
            waves += 1
        print(
            f"{len(killer.kills)} kills, {waves} waves of {STREAMS} streams, "
            f"{cluster.metric('nanoactor_fleet_moved_total'):.0f} streams moved, "
            f"{cluster.metric('nanoactor_fleet_requeued_total'):.0f} requests requeued"
        )
        assert cluster.metric("nanoactor_fleet_lost_total") == 0
        assert cluster.metric("nanoactor_fleet_poisoned_total") == 0
        assert len(killer.kills) == 50
    finally:
        killer.done.set()
        killer.join()
        status = cluster.stop()
    assert status == 0


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_node_dies(model, tmp_path, monkeypatch):
    """Three nodes of one machine; one that runs an engine, and no ingress, is killed whole."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster as Nodes

    asked = [ask for seed in range(2) for ask in kinds(seed, 150)]
    wanted = asyncio.run(undisturbed(model, asked))
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        nodes.add_node(num_cpus=1)
    options = ("--ray-address", nodes.address, "--ingresses", "1", "--served-model-name", "demo")
    cluster = Cluster(*OPTIONS, *options, replicas=3, model=str(model))
    try:
        cluster.until(3)
        ours = {one["pid"] for one in cluster.replicas().values()}
        home = _parent(_pid_of(INGRESS))
        victims = {_parent(pid) for pid in ours} - {home}
        node = next(iter(victims))

        def kill():
            cluster.busy(streams=4)
            family = [int(pid) for pid in _descendants(node)]
            for pid in (node, *family):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        found = asyncio.run(ask_all(cluster.url, asked))
        killer.join()
        for (told, _), right in zip(found, wanted, strict=True):
            same(told, right)
        assert cluster.metric("nanoactor_fleet_lost_total") == 0
        assert cluster.metric("nanoactor_fleet_deaths_total") >= 1
    finally:
        status = cluster.stop()
        nodes.shutdown()
    assert status == 0


def _title(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _pid_of(title):
    (found,) = [int(p) for p in os.listdir("/proc") if p.isdigit() and _title(p).startswith(title)]
    return found


class Poison(threading.Thread):
    """Kills whichever replica runs a request, by what replicas write into their logs."""

    def __init__(self, cluster, name):
        super().__init__(daemon=True)
        self.cluster, self.name_, self.kills, self.done = cluster, name, 0, threading.Event()
        (logs,) = {found[1] for found in map(LOGS.search, _titles(cluster)) if found}
        self.logs = Path(logs)

    def run(self):
        self.cluster.kill(self.cluster.busy(streams=1))
        self.kills, seen = 1, 0
        while not self.done.is_set():
            time.sleep(0.02)
            lines = [
                (path, line)
                for path in self.logs.glob("worker-*.err")
                for line in path.read_text(errors="replace").splitlines()
                if f"request {self.name_}" in line and RUNS.search(line)
            ]
            if len(lines) > seen:
                seen = len(lines)
                path, _ = max(lines, key=lambda each: each[1])  # lines begin with their time
                self.cluster.kill(int(path.stem.rpartition("-")[2]))
                self.kills += 1


RUNS = re.compile("comes from another replica|runs alone")
LOGS = re.compile(r"gcs_server.*--log_dir=(\S+)")


def _titles(cluster):
    return [_title(pid).replace("\0", " ") for pid in _descendants(cluster.process.pid)]


def test_a_request_that_kills_replicas_costs_nobody_else_anything():
    simulated = ("--device", "simulated:5", "--silence-timeout", "2", "--max-num-seqs", "64")
    asked = [ask for seed in (1, 2) for ask in kinds(seed, 300)[:8]]
    asked = [(path, {**body, "temperature": 1.0}) for path, body in asked]

    async def wanted():
        async with here(device="simulated:5", max_num_seqs=64) as server:
            return [told for told, _ in await ask_all(url(server), asked)]

    right = asyncio.run(wanted())
    cluster = Cluster(*simulated, replicas=3)
    poison = None
    try:
        cluster.until(3)
        poison = Poison(cluster, "poison-1")
        body = {"model": "demo", "prompt": "Drink this", "max_tokens": 450, "ignore_eos": True}
        stream = {**body, "stream": True, "seed": 1}
        answers = []

        def drink():
            headers = {"x-request-id": "poison-1"}
            with httpx.Client(timeout=240) as client:
                answers.append(client.post(cluster.url + COMPLETIONS, json=stream, headers=headers))

        drinker = threading.Thread(target=drink)
        drinker.start()
        poison.start()
        while not poison.kills:
            time.sleep(0.01)
        found = asyncio.run(ask_all(cluster.url, asked))
        drinker.join()
        poison.done.set()
        poison.join()
        for (told, _), one in zip(found, right, strict=True):
            same(told, one)
        assert '"code":"poison_request"' in answers[0].text
        assert poison.kills == 3
        assert cluster.metric("nanoactor_fleet_poisoned_total") == 1
        assert cluster.metric("nanoactor_replica_reserved") == 0
    finally:
        if poison is not None:
            poison.done.set()
        status = cluster.stop()
    assert status == 0
