"""Thousands of connections, clients that go away or do not read, signals, and deaths."""

import asyncio
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from nanoactor.server.health import assess
from tests.engine.harness import settled
from tests.models.checkpoints import make_checkpoint
from tests.server.harness import IN_ONE, SIMULATED, Served, events, here, posted, raw, served
from tests.server.scripted import directory
from tests.text.test_chat import DEMO

pytestmark = pytest.mark.drawn(2)
PATH = "/v1/completions"
SMALL = dict(hidden_size=32, num_hidden_layers=1, head_dim=8, intermediate_size=48, vocab_size=2048)


@pytest.fixture(autouse=True)
def many_descriptors():
    """The client's side needs one for each connection too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def request(**values):
    body = {"model": "demo", "prompt": "ROMEO:", "ignore_eos": True, "max_tokens": 20, **values}
    return posted(PATH, json.dumps(body).encode())


def body_of(answer):
    """The body of an answer, its chunks put together."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return rest.decode()
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return b"".join(parts).decode()


def told(answer):
    """(text, finish reason) of a stream or of a whole answer; the reason None if it broke off."""
    assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
    if b"text/event-stream" not in answer[:1000]:
        choice = json.loads(body_of(answer))["choices"][0]
        return choice["text"], choice["finish_reason"]
    values = events(body_of(answer))
    done = values[-1] == "[DONE]"
    choices = [value["choices"][0] for value in values if value != "[DONE]"]
    text = "".join(choice["text"] for choice in choices)
    return text, choices[-1]["finish_reason"] if done else None


# -- many ---------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [400, pytest.param(1000, marks=pytest.mark.long)])
def test_hundreds_of_streams_at_once_end_well_and_leave_no_memory(streams):
    few = ("bash", "-c", 'ulimit -S -n 256; exec "$@"', "-")
    with served("--device", "simulated:5", "--no-access-log", limits=few) as server:

        async def one(number):
            return told(await raw(server.port, request(seed=number, stream=True), seconds=60))

        async def wave():
            return await asyncio.gather(*(one(number) for number in range(streams)))

        first = asyncio.run(wave())
        assert all(reason == "length" for _, reason in first)
        assert len({text for text, _ in first}) > 0.9 * streams
        until(lambda: idle(server))

        def grows():
            """What another wave leaves behind."""
            before = server.resident()
            assert asyncio.run(wave()) == first
            until(lambda: idle(server))
            return server.resident() - before

        # The heap keeps room for the most streams that were ever served at once, and how many those
        # are depends on the machine. What is lost is lost by each wave.
        assert any(grows() < 8 << 20 for _ in range(4))


def idle(server):
    """Whether the server has seen that nothing is held."""
    figures = server.get("/metrics").text
    names = ("queue_requests", "running_sequences", "kv_blocks_used")
    return all(f"nanoactor_{name} 0.0" in figures for name in names)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model that computes, with the demo's tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(path, **SMALL)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, path / name)
    return path


class Client:
    """One request that reads to its end, or hangs up at some moment."""

    def __init__(self, port, rng, values, expected):
        self.port = port
        self.rng = rng
        self.values = values
        self.expected = expected
        self.leaves = rng.choice([None, None, None, "body", "sent", "reading"])

    async def run(self):
        data = request(**self.values)
        if self.leaves is None:
            text, reason = told(await raw(self.port, data, seconds=60))
            assert reason == "length"
            assert text == self.expected
            return
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.suppress(ConnectionError):
            cut = self.rng.randrange(len(data)) if self.leaves == "body" else len(data)
            writer.write(data[:cut])
            await writer.drain()
            await asyncio.sleep(self.rng.random() ** 3 * 0.2)
            if self.leaves == "reading":
                await reader.read(self.rng.randrange(1, 2000))
        if self.rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_half_of_the_clients_hang_up_and_the_others_notice_nothing(checkpoint, count):
    rng = random.Random(count)
    kinds = [
        dict(
            prompt=[rng.randrange(3, 2048) for _ in range(rng.randrange(1, 40))],
            max_tokens=rng.randrange(1, 24),
            temperature=rng.choice([0, 0.9]),
            seed=seed,
        )
        for seed in range(40)
    ]

    async def main():
        options = dict(device="cpu", dtype="float32", threads=1, num_kv_blocks=400, debug=True)
        names = {"served_model_name": "demo"}
        async with here(checkpoint, config=names, max_num_seqs=32, **options) as server:
            alone = [told(await raw(server.port, request(**kind)))[0] for kind in kinds]
            room = asyncio.Semaphore(120)

            async def one():
                kind = rng.randrange(len(kinds))
                values = {**kinds[kind], "stream": rng.random() < 0.7}
                async with room:
                    await Client(server.port, rng, values, alone[kind]).run()

            await asyncio.gather(*(one() for _ in range(count)))
            figures = await settled(server.llm)
            assert figures["frontend"]["actor"]["untokenized"] == 0
            assert figures["scheduler"]["actor"]["aborted"] > count / 20
            assert server._answers.num_live == 0
            async with asyncio.timeout(20):
                while len(asyncio.all_tasks()) >= 30:
                    await asyncio.sleep(0.02)

    asyncio.run(main())


@pytest.mark.parametrize(
    "depth", [2, *(pytest.param(depth, marks=pytest.mark.long) for depth in (1, 3))]
)
def test_a_client_that_goes_away_frees_its_blocks_within_depth_and_one_steps(depth):
    """Counted from the abort: when the loop hears of the client is the machine's affair."""

    async def main():
        options = dict(device="simulated:30", pipeline_depth=depth, placement="single")
        async with here(**options) as server:
            llm = server.llm
            statistics = llm._system.actor("scheduler")._scheduler.statistics
            send, aborts = llm._frontend.abort, []

            def abort(uid):
                aborts.append(statistics.steps)
                send(uid)

            llm._frontend.abort = abort
            for stream in (True, False):
                before = statistics.steps
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(request(max_tokens=500, stream=stream))
                while statistics.steps < before + 5:
                    await asyncio.sleep(0.001)
                writer.close()
                await settled(llm)
                assert aborts
                assert 0 <= statistics.steps - aborts[0] <= depth + 1
                assert statistics.steps - before < 500
                aborts.clear()

    asyncio.run(main())


def test_the_start_says_what_is_served_keys_stay_here_and_the_server_is_light():
    with served(*SIMULATED, NANOACTOR_API_KEY="secret-1") as server:
        said = next(line for line in server.lines if "KV cache of" in line)
        for part in ("demo (none) on a simulated device", "context 1024", "loaded in"):
            assert part in said
        headers = {"x-api-key": "secret-1"}
        assert server.get("/v1/models", headers=headers).status_code == 200
        assert server.get("/v1/models", headers={"x-api-key": "other"}).status_code == 401
        assert len(server.family) >= 5
        for pid in server.family:
            with open(f"/proc/{pid}/environ", "rb") as file:
                assert b"secret-1" not in file.read(), comm(pid)
        for pid in (server.process.pid, *server.family):
            with open(f"/proc/{pid}/maps") as file:
                maps = file.read()
            assert "libtorch" not in maps, comm(pid)
            if comm(pid) != "na:grammar":  # it reads the vocabulary when it has nothing else to do
                assert ("tokenizers" in maps) == (comm(pid) in READ_TEXT), comm(pid)


READ_TEXT = ("na:tokenizer.0", "na:detokenizer", "na:text_service")


# -- slow readers -------------------------------------------------------------------------


def unread(port, data):
    """A connection with little room for what it does not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.sendall(data)
    return connection


def test_a_slow_reader_holds_up_nobody_and_its_chunks_merge(tmp_path):
    model = str(directory(tmp_path))
    arguments = ("--device", "simulated:0.5", "--served-model-name", "demo", "--no-access-log")
    with served(*arguments, model=model) as server:
        slow = dict(prompt=["a"] * 20, max_tokens=1500, stream=True, seed=1)
        before = server.resident()
        connection = unread(server.port, request(**slow))

        async def others():
            data = [request(seed=n, stream=True) for n in range(20)]
            return await asyncio.gather(*(raw(server.port, d, seconds=60) for d in data))

        for _ in range(2):
            answers = asyncio.run(others())
            assert all(told(answer)[1] == "length" for answer in answers)
        assert server.resident() - before < 48 << 20
        until(lambda: idle(server), 60)  # generation does not wait for its reader
        answer = b""
        connection.settimeout(60)
        while part := connection.recv(1 << 16):
            answer += part
        connection.close()
        values = events(body_of(answer))
        assert values[-1] == "[DONE]"
        texts = [""] * 20
        chunks = 0
        for value in values[:-1]:
            chunks += 1
            texts[value["choices"][0]["index"]] += value["choices"][0]["text"]
        assert len(set(texts)) == 1
        assert len(texts[0]) > 1500
        assert chunks < 0.9 * 20 * 1500, "chunks merge while nobody reads"


def test_who_never_reads_is_hung_up_on(tmp_path):
    model = str(directory(tmp_path))
    arguments = (*IN_ONE[2:], "--device", "simulated:0.5", "--served-model-name", "demo")
    with served(*arguments, "--send-timeout", "1", model=model) as server:
        # More than sockets hold, however much of it has been merged on its way.
        endless = dict(prompt=["a"] * 96, max_tokens=3900, stream=True, seed=1)
        with contextlib.closing(unread(server.port, request(**endless))):
            until(lambda: any("reads nothing" in line for line in server.lines), 300)
            until(lambda: idle(server), 300)


# -- the end ------------------------------------------------------------------------------


class Stream:
    """A request that is under way while other things happen."""

    def __init__(self, server, **values):
        self._socket = socket.create_connection(("127.0.0.1", server.port))
        self._socket.sendall(request(stream=True, **values))
        self._socket.settimeout(60)
        self._got = b""
        while b"data: " not in self._got:
            self._got += self._socket.recv(1 << 16)

    def rest(self):
        """All events, once it has ended."""
        while part := self._socket.recv(1 << 16):
            self._got += part
        self._socket.close()
        return events(body_of(self._got))


def test_after_a_signal_running_streams_end_and_new_ones_are_refused():
    server = Served("--device", "simulated:5", "--placement", "single")
    stream = Stream(server, max_tokens=400)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: any("shutting down" in line for line in server.lines))
    for stream_ in (True, False):
        answer = server.post(PATH, {"model": "demo", "prompt": "a", "stream": stream_})
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]
        assert answer.headers["Retry-After"]
    assert server.get("/ready").status_code == 503
    assert server.get("/live").status_code == server.get("/health").status_code == 200
    assert server.get("/health").json()["draining"] is True
    values = stream.rest()
    assert values[-1] == "[DONE]"
    assert values[-2]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(30) == 0
    assert server.stop() == 0


def test_what_is_not_done_in_time_ends_with_an_error_that_clients_can_read():
    server = Served("--device", "simulated:50", "--drain-timeout", "0.5")
    stream = Stream(server, max_tokens=1000)

    async def whole():
        return await raw(server.port, request(max_tokens=1000), seconds=60)

    def both_run():
        return "nanoactor_running_sequences 2.0" in server.get("/metrics").text

    async def main():
        waiting = asyncio.ensure_future(whole())
        await asyncio.to_thread(until, both_run)
        server.process.send_signal(signal.SIGINT)
        return await waiting

    answer = asyncio.run(main())
    assert answer.startswith(b"HTTP/1.1 503")
    assert "incomplete" in json.loads(body_of(answer))["error"]["message"]
    values = stream.rest()
    assert "incomplete" in values[-1]["error"]["message"]
    assert values[-1]["error"]["type"] == "server_error"
    assert len(values) < 1000
    assert server.process.wait(30) == 0
    assert server.stop() == 0


def test_a_second_signal_ends_at_once():
    server = Served(*IN_ONE, "--drain-timeout", "100")
    stream = Stream(server, max_tokens=1000)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: any("shutting down" in line for line in server.lines))
    time.sleep(0.7)  # what comes at once is the same signal
    assert server.stop() == -signal.SIGTERM
    with contextlib.suppress(ConnectionError):
        assert stream.rest()[-1] != "[DONE]"


def test_a_signal_while_the_engine_starts_ends_it():
    command = [sys.executable, "-m", "nanoactor", "serve", "demo", "--port", "0", *SIMULATED]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert "starting" in process.stderr.readline()  # what comes before that, the kernel answers
    process.send_signal(signal.SIGTERM)
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(30) == 0, errors
    assert "Traceback" not in errors


def test_an_address_that_is_taken_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "nanoactor", "serve", "demo", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if " INFO starting " not in line] == [
        f"nanoactor: cannot listen on 127.0.0.1 port {port}: Address already in use"
    ]


# -- health -------------------------------------------------------------------------------


@contextlib.contextmanager
def stopped(server, title):
    """One of the server's processes, by its title, hangs meanwhile."""
    (pid,) = [p for p in server.family if comm(p) == title]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


def comm(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
        return file.read().strip()


def until(check, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def patient():
    """A server that waits for actors that hang."""
    with served(*SIMULATED, "--stall-timeout", "8") as server:
        yield server


@pytest.mark.parametrize(
    ("title", "culprit"),
    [
        ("na:control", "scheduler"),
        pytest.param("na:detokenizer", "detokenizer", marks=pytest.mark.long),
    ],
)
def test_an_actor_that_hangs_is_named_while_work_is_pending(patient, title, culprit):
    server, told = patient, len(patient.lines)
    assert server.get("/health").json()["work_pending"] is False
    with stopped(server, title):
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(request())
        answer = until(lambda: (a := server.get("/health")).status_code == 503 and a)
        health = answer.json()
        assert health["status"] == "stalled"
        assert health["culprit"] in (culprit, "blocks" if culprit == "scheduler" else culprit)
        assert health["work_pending"] is True
        assert health["actors"][culprit]["silence"] > 0.5
        assert server.get("/ready").status_code == 503
        assert server.get("/live").status_code == 200
        until(lambda: any("stalled" in line for line in server.lines[told:]))
    until(lambda: server.get("/health").status_code == 200)
    connection.settimeout(60)
    assert connection.recv(20).startswith(b"HTTP/1.1 200")
    connection.close()
    assert len([line for line in server.lines[told:] if "stalled" in line]) == 1


MORTAL = ("--max-restarts", "0")


def dies(server):
    """It says that its engine is dead, and then ends by itself, as one that has failed."""
    assert server.process.wait(30) == 1, server.lines
    assert server.stop() == 1
    assert "the engine has died" in server.lines[-1]


def test_a_death_that_is_not_made_good_ends_streams_and_the_server_says_so():
    server = Served(*SIMULATED, *MORTAL)
    stream = Stream(server, max_tokens=1000)
    (pid,) = [p for p in server.family if comm(p) == "na:runner.0"]
    os.kill(pid, signal.SIGKILL)
    values = stream.rest()
    assert "the engine has died" in values[-1]["error"]["message"]
    answer = server.post(PATH, {"model": "demo", "prompt": "a"})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_dead"
    health = until(lambda: (a := server.get("/health")).status_code == 503 and a.json())
    assert health["status"] == "dead"
    assert "runner.0" in health["culprit"]
    assert server.get("/ready").status_code == 503
    assert server.get("/live").status_code == 200
    figures = server.get("/metrics").text
    assert "nanoactor_up 0.0" in figures
    assert "nanoactor_running_sequences" not in figures, "nothing is known of the dead"
    assert 'outcome="broken_off",path="/v1/completions"} 1.0' in figures
    dies(server)


LATER = "control", "detokenizer", "tokenizer.0"


@pytest.mark.parametrize(
    "name",
    [
        "runner.0",
        *(pytest.param(name, marks=pytest.mark.long) for name in LATER),
    ],
)
def test_a_death_is_made_good_while_streams_and_requests_wait(name):
    with served(*SIMULATED) as server:
        asked = {"model": "demo", "prompt": "a", "seed": 5, "max_tokens": 300, "ignore_eos": True}
        whole = server.post(PATH, asked).json()["choices"][0]["text"]
        stream = Stream(server, max_tokens=300, seed=5, prompt="a", ignore_eos=True)
        (pid,) = [p for p in server.family if comm(p) == f"na:{name}"]
        os.kill(pid, signal.SIGKILL)
        health = until(lambda: (a := server.get("/health")).status_code == 503 and a.json())
        assert health["status"] == "recovering"
        assert health["culprit"] == name
        assert server.get("/ready").status_code == 503
        assert server.get("/live").status_code == 200
        assert server.post(PATH, asked).json()["choices"][0]["text"] == whole
        values = stream.rest()
        assert values[-1] == "[DONE]"
        told = "".join(v["choices"][0]["text"] for v in values[:-1])
        assert whole.endswith(told)
        until(lambda: server.get("/health").status_code == 200)
        figures = server.get("/metrics").text
        counts = [line for line in figures.splitlines() if "restarts_total{" in line]
        assert f'nanoactor_process_restarts_total{{node="{name}"}} 1.0' in counts, counts
        assert len([line for line in server.lines if "has died and is being replaced" in line]) == 1
        actors = ["scheduler", "blocks"] if name == "control" else [name]
        gone = [look for look in server.get("/activity").json()["gone"] if look]
        assert gone, "the page shows it"
        assert all(sorted(look) == sorted(actors) for look in gone)


def test_an_actor_that_hangs_for_good_ends_the_engine():
    server = Served(*SIMULATED, *MORTAL, "--stall-timeout", "2")
    stream = Stream(server, max_tokens=1000)
    (pid,) = [p for p in server.family if comm(p) == "na:control"]
    os.kill(pid, signal.SIGSTOP)
    values = stream.rest()
    assert "node control (pid" in values[-1]["error"]["message"]
    dies(server)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)]
)
def test_a_signal_to_the_whole_group_lets_running_streams_end(number):
    """As supervisors send it, and `timeout`, which sends it to the server twice."""
    server = Served(*SIMULATED, process_group=0)
    stream = Stream(server, max_tokens=300)
    server.process.send_signal(number)
    os.killpg(server.process.pid, number)
    values = stream.rest()
    assert values[-1] == "[DONE]"
    assert values[-2]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(30) == 0
    assert server.stop() == 0


@pytest.mark.parametrize("seconds", [0.1, pytest.param(0.4, marks=pytest.mark.long)])
def test_a_signal_while_a_tokenizer_is_replaced_leaves_no_template_child(seconds):
    """One is on its way then, which has hardly begun."""
    server = Served(*SIMULATED, process_group=0)
    (pid,) = [p for p in server.family if comm(p) == "na:tokenizer.0"]
    os.kill(pid, signal.SIGKILL)
    time.sleep(seconds)
    numbers = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    server.family |= {number for number in numbers if group(number) == server.process.pid}
    assert server.stop() == 0


def group(pid):
    """A process's group; 0 where it is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def test_an_engine_that_dies_while_streams_end_makes_the_exit_status():
    server = Served(*SIMULATED, *MORTAL)
    stream = Stream(server, max_tokens=1000)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: any("shutting down" in line for line in server.lines))
    (pid,) = [p for p in server.family if comm(p) == "na:runner.0"]
    os.kill(pid, signal.SIGKILL)
    assert "the engine has died" in stream.rest()[-1]["error"]["message"]
    dies(server)


CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


def test_the_text_service_may_die_and_comes_back_while_generation_goes_on():
    with served(*IN_ONE) as server:
        (pid,) = [p for p in server.family if comm(p) == "na:text_service"]
        os.kill(pid, signal.SIGKILL)
        answer = until(
            lambda: (a := server.post("/tokenize", {"prompt": "a"})).status_code == 503 and a
        )
        assert "text service" in answer.json()["error"]["message"]
        assert server.get("/health").json()["text_service"] == "dead"
        assert server.post(PATH, {"model": "demo", "prompt": "a"}).status_code == 200
        assert server.post("/v1/chat/completions", CHAT).status_code == 200
        until(lambda: server.post("/tokenize", {"prompt": "a"}).status_code == 200)
        assert server.get("/health").json()["text_service"] == "ok"


def test_a_text_service_that_hangs_holds_up_no_conversation(tmp_path):
    model = str(directory(tmp_path))
    with served(*IN_ONE, "--served-model-name", "demo", model=model) as server:
        with stopped(server, "na:text_service"):
            assert server.post("/v1/chat/completions", CHAT).status_code == 200
            assert not [line for line in server.lines if "may not be separated" in line]
            other = {**CHAT, "chat_template_kwargs": {"enable_thinking": False}}
            assert server.post("/v1/chat/completions", other).status_code == 200
            assert server.get("/health").json()["text_service"] == "silent"
            until(lambda: any("may not be separated" in line for line in server.lines))
            assert len([line for line in server.lines if "may not be separated" in line]) == 1
        assert server.post("/tokenize", {"prompt": "a"}).status_code == 200
        assert server.get("/health").json()["text_service"] == "ok"


def test_a_body_that_arrives_after_the_signal_is_refused():
    server = Served(*IN_ONE)
    body = json.dumps({"model": "demo", "prompt": "ROMEO:", "max_tokens": 3}).encode()
    data = posted(PATH, body, "Expect: 100-continue")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(30)
        connection.sendall(data[:-10])
        assert connection.recv(100).startswith(b"HTTP/1.1 100"), "it waits for the rest"
        server.process.send_signal(signal.SIGTERM)
        until(lambda: any("shutting down" in line for line in server.lines))
        assert server.process.poll() is None
        connection.sendall(data[-10:])
        assert connection.recv(100).startswith(b"HTTP/1.1 503")
    assert server.process.wait(30) == 0
    assert server.stop() == 0


def test_answers_of_any_kind_that_nobody_reads_are_given_up():
    with served(*IN_ONE, "--send-timeout", "1", "--no-access-log") as server:
        ask = posted("/tokenize", json.dumps({"prompt": "ab" * 15000}).encode())
        ask = ask.replace(b"Connection: close", b"Connection: keep-alive")
        connection = unread(server.port, b"")
        connection.settimeout(0.2)
        deadline = time.monotonic() + 60
        try:
            while time.monotonic() < deadline:
                with contextlib.suppress(TimeoutError):
                    connection.sendall(ask)
            raise AssertionError("the server goes on")
        except ConnectionError:
            pass
        connection.close()


# -- judging ------------------------------------------------------------------------------

SECOND = 10**9


def judged(now=100.0, since=90.0, told=99.9, silent=None, late=None):
    """The health of an engine in which one actor is silent, and one late with its steps, since."""
    figures = {
        name: {"step_at": int((now - 0.1) * SECOND)}
        for name in ("scheduler", "blocks", "runner.0", "detokenizer")
    }
    figures["scheduler"] |= {"live_since": int(since * SECOND), "tokens_at": int(told * SECOND)}
    figures["frontend"] = {"entries": int(bool(since))}
    figures["tokenizer.0"] = {}
    heard = dict.fromkeys(figures, int((now - 0.2) * SECOND))
    if silent:
        heard[silent[0]] = int(silent[1] * SECOND)
    if late:
        figures[late[0]]["step_at"] = int(late[1] * SECOND)
    return assess(figures, heard, int(now * SECOND), 5.0)


@pytest.mark.parametrize(
    ("values", "culprit"),
    [
        ({}, ""),
        (dict(late=("runner.0", 92.0)), "runner.0"),
        (dict(late=("runner.0", 95.5)), ""),
        (dict(late=("runner.0", 10.0), since=96.0), ""),
        (dict(late=("detokenizer", 90.0)), "detokenizer"),
        (dict(late=("detokenizer", 90.1), told=90.0), ""),  # a long prefill brings no tokens
        (dict(late=("runner.0", 90.1), told=90.0), "runner.0"),
        (dict(silent=("tokenizer.0", 92.0)), "tokenizer.0"),
        (dict(silent=("runner.0", 94.0), late=("scheduler", 91.0)), "runner.0"),
        (dict(late=("runner.0", 10.0), since=0.0), ""),
        (dict(silent=("runner.0", 10.0), since=0.0), ""),
    ],
)
def test_who_is_to_blame(values, culprit):
    health = judged(**values)
    assert health.culprit == culprit
    assert health.is_ok == (not culprit)
    assert health.status == ("stalled" if culprit else "ok")
