"""`nanoactor serve --replicas`: answers, deaths, figures, the end."""

import asyncio
import os
import re
import signal
import threading
from pathlib import Path

import pytest

from tests.ray_serve.cluster import INGRESS, Cluster, ask_all, same
from tests.ray_serve.requests import kinds, make_model
from tests.server.harness import CPU, _descendants, here, url

# One cluster serves all of these tests, and takes both cores: they are of one worker.
pytestmark = [pytest.mark.deadly, pytest.mark.alone, pytest.mark.timeout(900)]
OPTIONS = (*CPU, "--max-num-seqs", "64", "--silence-timeout", "2")
TOKENS = 150


async def undisturbed(model, asked):
    """What one engine says, without Ray."""
    changes = dict(device="cpu", dtype="float32", threads=1, num_kv_blocks=512, max_num_seqs=64)
    changes["max_model_len"] = 1024
    async with here(model, {"served_model_name": "demo"}, **changes) as server:
        return [told for told, _ in await ask_all(url(server), asked)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "seeing")


@pytest.fixture(scope="module")
def cluster(model):
    server = Cluster(*OPTIONS, "--served-model-name", "demo", model=str(model))
    try:
        server.until(2)
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="module")
def asked():
    return [ask for seed in (1, 2) for ask in kinds(seed, TOKENS)]


@pytest.fixture(scope="module")
def wanted(model, asked):
    return asyncio.run(undisturbed(model, asked))


def check(cluster, asked, wanted):
    for (found, _), right in zip(asyncio.run(ask_all(cluster.url, asked)), wanted, strict=True):
        same(found, right)


def test_answers_are_those_of_one_engine(cluster, asked, wanted):
    check(cluster, asked, wanted)
    assert cluster.metric("nanoactor_fleet_deaths_total") == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_streams_go_on_when_a_replica(cluster, asked, wanted, number):
    cluster.until(2)
    deaths = cluster.metric("nanoactor_fleet_deaths_total")
    moved = cluster.metric("nanoactor_fleet_moved_total")
    moved += cluster.metric("nanoactor_fleet_requeued_total")
    victims = []

    def kill():
        victims.append(cluster.busy())
        cluster.kill(victims[0], number)

    killer = threading.Thread(target=kill)
    killer.start()
    check(cluster, asked, wanted)
    killer.join()
    assert cluster.metric("nanoactor_fleet_deaths_total") == deaths + 1
    changed = ("moved", "requeued")
    assert sum(cluster.metric(f"nanoactor_fleet_{name}_total") for name in changed) > moved
    assert cluster.metric("nanoactor_fleet_lost_total") == 0
    cluster.kill(victims[0], signal.SIGCONT)  # should it live yet, it adds nothing
    cluster.until(2)


def test_figures_of_the_fleet(cluster):
    cluster.until(2)
    health = cluster.get("/health")
    assert health.status_code == 200
    assert health.json()["status"] == "ok"
    assert len(health.json()["actors"]) == 2
    assert cluster.metric("nanoactor_replicas") == 2
    assert cluster.metric("nanoactor_replica_known_blocks") > 0
    assert cluster.metric("nanoactor_up") == 1
    assert cluster.get("/v1/models").json()["data"][0]["id"] == "demo"
    assert cluster.get("/activity?since=0").json()["bins"] == 10
    assert cluster.get("/trace").status_code == 404
    answer = cluster.post("/tokenize", {"model": "demo", "prompt": "To be"})
    assert answer.json()["count"] > 0


def test_errors_are_told_as_by_one_engine(cluster):
    body = {"model": "demo", "prompt": "x", "temperature": -1}
    assert cluster.post("/v1/completions", body).status_code == 400
    body = {"model": "demo", "prompt": [5] * 4000, "max_tokens": 2}
    answer = cluster.post("/v1/completions", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    body = {"model": "demo", "prompt": "x", "guided_regex": "("}
    assert cluster.post("/v1/completions", body).status_code == 400
    assert cluster.post("/v1/completions", {"model": "other", "prompt": "x"}).status_code == 404


def _listeners(pids):
    """Addresses, in hexadecimal, on which these processes listen."""
    inodes = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes[fields[9]] = fields[1].partition(":")[0]
    found = set()
    for pid in pids:
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if (inode := target.removeprefix("socket:[").rstrip("]")) in inodes:
                    found.add(inodes[inode])
        except OSError:
            continue
    return found


def test_nothing_listens_but_on_loopback_and_no_secret_is_shown(cluster):
    family = _descendants(cluster.process.pid) | {str(cluster.process.pid)}
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    addresses = _listeners(family)
    assert addresses
    assert addresses <= loopback
    for pid in family:
        try:
            shown = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        assert b"salt" not in shown.lower()


def test_the_end_waits_for_answers_and_leaves_nothing(cluster):
    cluster.until(2)
    family = {int(pid) for pid in _descendants(cluster.process.pid)}
    assert cluster.pids(INGRESS)
    asked = kinds(7, 200)[:2]

    async def end_meanwhile():
        streams = asyncio.ensure_future(ask_all(cluster.url, asked))
        await asyncio.sleep(0.5)
        cluster.process.send_signal(signal.SIGTERM)
        return await streams

    for found, _ in asyncio.run(end_meanwhile()):
        assert found["reasons"] == {0: "length"}
    cluster.family |= family
    assert cluster.stop() == 0, cluster.lines
    wrong = [line for line in cluster.lines if re.search("Traceback|raylet", line)]
    assert not wrong
