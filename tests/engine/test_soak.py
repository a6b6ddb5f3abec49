"""After many rounds of mixed load an engine is what it was: memory, descriptors, blocks, CPU time.

A few rounds show levels; CPU time takes many, and is a matter of `make test-long`.

What a token costs in CPU time doubles on a busy machine, for minutes at a time, so the beginning
cannot be compared with the end by the clock. Two engines are started together, each with a user
process of its own. One serves round after round; the other rests. In the end both serve the same
rounds at the same time, under the same conditions, and the aged one may not cost 5 % more.
"""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanoactor import RequestOutputKind, SamplingParams
from tests.engine.harness import engine, ids, ragged_prompts, settled

ROOT = Path(__file__).parents[2]
LONG_MINUTES = float(os.environ.get("NANOACTOR_SOAK_MINUTES", "30"))
VOCABULARY = 2048
REQUESTS, FEWER, AT_ONCE = 150, 75, 64
WARM_UP, WINDOW = 3, 8
"""Rounds that are not measured, and rounds whose median counts as the beginning or the end."""
LOOK, MOST_LOOKS = 12, 5
"""Rounds until the costs of both engines are compared, and how often these are repeated."""
COMPARING = 45
"""Seconds that are left for it; a busy machine takes longer."""
DRIFT = 0.05

# -- the load: the same in every round ----------------------------------------------------

TEXTS = ("ROMEO:", "To be, or not to be", "KING RICHARD:\nMy crown is in my heart", "Hark! " * 30)


@dataclasses.dataclass(frozen=True)
class Job:
    """A request, and whether it is ended after some of its tokens."""

    prompt: str | dict
    params: SamplingParams
    priority: int
    way: str | None
    after: int


def jobs(count):
    """Long and short, greedy and sampled, with stops, priorities, shared prefixes and aborts."""
    rng = random.Random(0)
    stems = ragged_prompts(VOCABULARY, [200, 120, 40], seed=1)
    for seed in range(count):
        body = [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 5, 20, 20, 150]))]
        tokens = rng.choice(stems)[: rng.choice([0, 16, 40, 120, 200])] + body
        sampling = dict(temperature=0.0)
        if rng.random() < 0.5:
            sampling = dict(temperature=0.9, seed=seed, top_k=rng.choice([0, 40]), top_p=0.95)
        if rng.random() < 0.2:
            sampling["stop"] = [" t", "e "]
        if rng.random() < 0.2:
            sampling["stop_token_ids"] = rng.sample(range(VOCABULARY), 30)
        way = rng.choice([None, None, None, "abort", "aclose"])
        kinds = list(RequestOutputKind)[: 2 if way else 3]
        params = SamplingParams.for_model(
            max_tokens=rng.choice([2, 10, 40, 80]),
            ignore_eos=True,
            output_kind=rng.choice(kinds),
            **sampling,
        )
        prompt = rng.choice(TEXTS) if rng.random() < 0.2 else ids(tokens)
        yield Job(prompt, params, rng.choice([0, 0, 1]), way, rng.randrange(1, 20))


async def serve(llm, job, name):
    """The tokens that a job was given."""
    tokens = []
    stream = llm.generate(job.prompt, job.params, request_id=name, priority=job.priority)
    async with contextlib.aclosing(stream):
        async for output in stream:
            new = output.outputs[0].token_ids
            tokens = tokens + new if job.params.output_kind is RequestOutputKind.DELTA else new
            if job.way and len(tokens) >= job.after and not output.finished:
                if job.way == "aclose":
                    break
                await llm.abort(name)
    return tokens


async def serve_all(llm, load):
    """All jobs, so many at once; the answers in their order."""
    door = asyncio.Semaphore(AT_ONCE)

    async def one(number, job):
        async with door:
            return await serve(llm, job, f"soak-{number}")

    return await asyncio.gather(*(one(number, job) for number, job in enumerate(load)))


def differing(answers, first):
    """How many answers are not what they were in the first round, as far as both go."""
    pairs = zip(answers, first, strict=True)
    return sum(one[: len(other)] != other[: len(one)] for one, other in pairs)


# -- a user process: serves a round for each line it reads, and tells what it cost --------


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def anonymous_kib(pid):
    """Memory of its own: neither files nor the rings, which have their size from the start."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Anonymous:")).split()[1])


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


COUNTS = ("prefill_tokens", "decode_tokens", "preemptions", "overruns", "aborted", "finished")


def counts(figures):
    scheduler, blocks = figures["scheduler"]["actor"], figures["blocks"]["actor"]
    return {
        **{name: scheduler[name] for name in COUNTS},
        **{name: blocks[name] for name in ("hit_tokens", "evictions")},
    }


async def user(directory, requests):
    changes = dict(
        placement="default",
        skip_tokenizer_init=False,
        debug=False,
        max_num_seqs=16,
        max_num_batched_tokens=96,
        num_kv_blocks=48,
        max_model_len=512,
    )
    load = list(jobs(requests))
    async with engine(directory, **changes) as llm:
        pids = {"user": os.getpid(), **llm.pids}
        first = None
        while await asyncio.to_thread(sys.stdin.readline):
            before, began = counts(await settled(llm)), measure(pids, cpu_seconds)
            answers = await serve_all(llm, load)
            ended, figures = measure(pids, cpu_seconds), await settled(llm)
            first = first or answers
            report = dict(
                cpu={name: ended[name] - began[name] for name in pids},
                memory=measure(pids, anonymous_kib),
                descriptors=measure(pids, descriptors),
                counts={name: n - before[name] for name, n in counts(figures).items()},
                blocks=[
                    figures["scheduler"]["actor"]["credits"],
                    figures["blocks"]["actor"]["available"],
                ],
                differing=differing(answers, first),
            )
            sys.stdout.write(json.dumps(report) + "\n")
            sys.stdout.flush()


def measure(pids, figure):
    return {name: figure(pid) for name, pid in pids.items()}


# -- the soak -----------------------------------------------------------------------------


class User:
    """A user process with its engine, as the test sees it."""

    def __init__(self, directory, requests):
        self.reports = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.test_soak", str(directory), str(requests)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self):
        """Let it serve a round."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self):
        """Wait until the round is served."""
        line = self.process.stdout.readline()
        assert line, "the user process has ended"
        self.reports.append(json.loads(line))

    def serve(self):
        self.begin()
        self.end()

    def close(self):
        """It must end well, idle and balanced."""
        self.process.stdin.close()
        assert self.process.wait(60) == 0

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start_users(tmp_path):
    """Starts so many, on the same small model with the demo's tokenizer."""
    from tests.engine.conftest import DEMO
    from tests.models.checkpoints import make_checkpoint

    small = dict(hidden_size=32, num_hidden_layers=1, head_dim=8, intermediate_size=48)
    make_checkpoint(tmp_path, vocab_size=VOCABULARY, **small)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    with contextlib.ExitStack() as stack:

        def start(count, requests):
            users = [User(tmp_path, requests) for _ in range(count)]
            for user in users:
                stack.callback(user.kill)
            return users

        yield start


def serve_together(users, rounds):
    """Each serves so many rounds, one after the other, while the others do."""
    for user in users:
        for _ in range(rounds):
            user.begin()
    for user in users:
        for _ in range(rounds):
            user.end()
    return [user.reports[-rounds:] for user in users]


def cost(report, left_out=""):
    """CPU seconds for each token computed, of all processes but one."""
    tokens = report["counts"]["prefill_tokens"] + report["counts"]["decode_tokens"]
    return sum(cpu for name, cpu in report["cpu"].items() if name != left_out) / tokens


def check_cost(old, young):
    """A token's cost in the aged engine is within the limit, by two standard errors.

    They go on until it is certain on which side of the limit the ratio lies: on a quiet machine
    at once, on a busy one in minutes. What stays undecided has not been shown to be within it.
    """
    ratios = {"": [], "runner.0": []}
    for _ in range(MOST_LOOKS):
        # In the last round one may be alone already.
        aged, fresh = (reports[:-1] for reports in serve_together((old, young), LOOK + 1))
        for left_out, logarithms in ratios.items():
            pairs = zip(aged, fresh, strict=True)
            logarithms += [math.log(cost(a, left_out) / cost(b, left_out)) for a, b in pairs]
        centres = [statistics.mean(values) for values in ratios.values()]
        errors = [2 * statistics.stdev(v) / math.sqrt(len(v)) for v in ratios.values()]
        bounds = list(zip(centres, errors, strict=True))
        if all(centre + error <= math.log(1 + DRIFT) for centre, error in bounds):
            return
        if any(centre - error > math.log(1 + DRIFT) for centre, error in bounds):
            break
    told = [f"{centre:+.1%} ± {error:.1%}" for centre, error in bounds]
    raise AssertionError(f"CPU time for a token: {told[0]}, without the device's: {told[1]}")


def check_levels(reports, window=WINDOW, drift=DRIFT):
    """Descriptors and blocks at the end are those of the beginning, memory about so."""
    first, last = reports[:window], reports[-window:]
    assert len(reports) >= 2 * window
    for name in first[0]["memory"]:
        begin, end = (statistics.median(r["memory"][name] for r in part) for part in (first, last))
        assert end <= begin * (1 + drift), f"{name}: {begin} KiB became {end} KiB"
    for figure in ("descriptors", "blocks"):
        assert first[0][figure] == last[-1][figure]


def check_load(reports, requests):
    """The last rounds computed about what the first did, and all reached what they are about. One
    round may compute a fifth more: on a busy machine more is preempted, and computed again."""
    tokens = [r["counts"]["prefill_tokens"] + r["counts"]["decode_tokens"] for r in reports]
    window = max(1, len(tokens) // 3)
    first, last = (statistics.median(part) for part in (tokens[:window], tokens[-window:]))
    assert 0.95 * first <= last <= 1.05 * first, tokens
    assert min(tokens) >= 0.8 * first, tokens
    assert min(r["counts"]["finished"] for r in reports) == requests
    for name in (*COUNTS, "hit_tokens", "evictions"):
        assert sum(r["counts"][name] for r in reports) > 0, name
    # Sums of floats depend on the batch: a token may turn where two are equally likely.
    assert sum(r["differing"] for r in reports) <= 0.001 * requests * len(reports)


@pytest.mark.long
def test_a_few_rounds_leave_an_engine_as_it_was(start_users):
    (user,) = start_users(1, FEWER)
    for _ in range(WARM_UP + 3):
        user.serve()
    check_levels(user.reports[WARM_UP - 1 :], window=2, drift=0.10)
    check_load(user.reports[WARM_UP:], FEWER)
    user.close()


@pytest.mark.long
@pytest.mark.timeout(60 * LONG_MINUTES + 600)
def test_an_engine_does_not_age(start_users):
    users = old, young = start_users(2, REQUESTS)
    begin = time.monotonic()
    serve_together(users, WARM_UP)
    aged = WARM_UP + WINDOW  # at the very least; comparing brings the other window
    while time.monotonic() < begin + 60 * LONG_MINUTES - COMPARING or len(old.reports) < aged:
        old.serve()
    check_cost(old, young)
    check_levels(old.reports[WARM_UP:])
    check_load(old.reports[WARM_UP:], REQUESTS)
    for user in users:
        user.close()


if __name__ == "__main__":
    asyncio.run(user(sys.argv[1], int(sys.argv[2])))
