"""Any process may die: streams go on, and say what an undisturbed run says."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import shutil
import signal

import pytest
import torch

from nanoactor import AsyncLLM, BeamSearchParams, RequestOutputKind, SamplingParams
from nanoactor.errors import ComputationFailed, EngineDead, EngineOverloaded
from nanoactor.requests.structured_outputs import StructuredOutputsParams
from tests.conftest import children, descriptors
from tests.engine.conftest import DEMO
from tests.engine.harness import settled
from tests.engine.test_vision import conversation, drawn

pytestmark = pytest.mark.deadly

TEXT = "ROMEO:\nBut soft, what light through yonder window breaks? "
CHAT = [{"role": "user", "content": "Speak the speech, I pray you"}]
LONG = pytest.mark.long
WAYS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV)


def asks():
    """(prompt, parameters) of every kind of request; long enough to be met by a death."""
    long = dict(max_tokens=120, ignore_eos=True)
    return [
        (TEXT, SamplingParams.for_model(temperature=0, seed=0, **long)),
        (
            TEXT + "It is the east",
            SamplingParams.for_model(temperature=0.9, seed=1, top_p=0.9, **long),
        ),
        (CHAT, SamplingParams.for_model(temperature=0.7, seed=2, max_tokens=90, min_tokens=30)),
        ({"prompt_token_ids": list(range(40, 240))}, SamplingParams.for_model(seed=3, **long)),
        (TEXT, SamplingParams.for_model(seed=4, stop=["the ", "\n\n"], max_tokens=120)),
        (
            TEXT,
            SamplingParams.for_model(
                seed=5, stop=["zzzzzz"], include_stop_str_in_output=True, **long
            ),
        ),
        (TEXT, SamplingParams.for_model(seed=6, logprobs=2, **long)),
        (TEXT, SamplingParams.for_model(seed=7, logprobs=0, prompt_logprobs=1, max_tokens=60)),
        (TEXT, SamplingParams.for_model(seed=8, n=3, max_tokens=80, ignore_eos=True)),
        (TEXT, SamplingParams.for_model(seed=9, n=2, logprobs=1, stop=["and"], max_tokens=80)),
        (
            TEXT,
            SamplingParams.for_model(seed=10, presence_penalty=1.2, frequency_penalty=0.4, **long),
        ),
        (
            TEXT,
            SamplingParams.for_model(
                seed=11, bad_words=["the", "And"], logit_bias={40: 2.0}, **long
            ),
        ),
        (TEXT, constrained(12, regex=r"([a-z]{2,8} ){6,12}\d{3}")),
        (TEXT, constrained(13, json={"type": "array", "items": {"enum": ["king", "fool"]}})),
        (TEXT, SamplingParams.for_model(seed=14, detokenize=False, **long)),
        (TEXT, SamplingParams.for_model(seed=15, output_kind=RequestOutputKind.FINAL_ONLY, **long)),
    ]


def constrained(seed, **what):
    return SamplingParams.for_model(
        seed=seed, max_tokens=90, structured_outputs=StructuredOutputsParams(**what)
    )


@dataclasses.dataclass
class Told:
    """All that a stream of deltas has said of one answer."""

    text: str = ""
    ids: list = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    reason: object = None
    ends: int = 0


async def read(llm, prompt, params):
    """What a stream says, delta by delta: (answers, log-probabilities of the prompt)."""
    if params.output_kind is not RequestOutputKind.FINAL_ONLY:
        params = dataclasses.replace(params, output_kind=RequestOutputKind.DELTA)
    found, of_prompt = [Told() for _ in range(params.n)], None
    async for output in llm.generate(prompt, params):
        of_prompt = output.prompt_logprobs or of_prompt
        for delta in output.outputs:
            told = found[delta.index]
            assert not told.ends or not (delta.text or delta.token_ids)
            told.text += delta.text
            told.ids += delta.token_ids
            told.logprobs += delta.logprobs or []
            if delta.finish_reason is not None and not told.ends:
                told.ends, told.reason = 1, (delta.finish_reason, delta.stop_reason)
    assert all(told.ends == 1 for told in found)
    return found, of_prompt


def compare(found, wanted):
    """The same texts and tokens; log-probabilities that round differently at most."""
    for told, right in zip(found[0], wanted[0], strict=True):
        assert told.text == right.text
        assert told.ids == right.ids
        assert told.reason == right.reason
        compare_logprobs(told.logprobs, right.logprobs)
    compare_logprobs((found[1] or [None])[1:], (wanted[1] or [None])[1:])


def compare_logprobs(found, wanted):
    assert len(found) == len(wanted)
    for mine, other in zip(found, wanted, strict=True):
        assert list(mine) == list(other)
        for token, one in mine.items():
            assert one.logprob == pytest.approx(other[token].logprob, abs=2e-5)
            assert one.rank == other[token].rank


class Tortured:
    """An engine whose processes are killed while it serves."""

    def __init__(self, llm, seed):
        self.llm, self.draw, self.kills, self.busy = llm, random.Random(seed), 0, 0

    async def kill(self, *names):
        for name in names:
            pid = self.llm.pids.get(name)  # none while another is being started in its place
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.kill(pid, self.draw.choice(WAYS))
                    self.kills += 1
        figures = await self.llm.statistics()
        if "frontend" not in figures or figures["frontend"]["actor"]["entries"]:
            self.busy += len(names)

    async def whole(self):
        """Wait until all processes run."""
        await asyncio.sleep(0.05)
        while self.llm.recovering is not None:
            await asyncio.sleep(0.01)


async def torture(llm, names, turns, seed, pauses):
    tortured, requests = Tortured(llm, seed), asks()
    wanted = await asyncio.gather(*(read(llm, *request) for request in requests))
    for turn in range(turns):
        streams = [asyncio.ensure_future(read(llm, *request)) for request in requests]
        doomed = [asyncio.ensure_future(aborted(llm, tortured.draw)) for _ in range(4)]
        victims = [names[turn % len(names)], *tortured.draw.sample(names, turn % 2)]
        await asyncio.sleep(tortured.draw.choice(pauses))
        await tortured.kill(*victims)
        if turn % 3:  # during another recovery
            await asyncio.sleep(tortured.draw.uniform(0.05, 0.4))
            await tortured.kill(tortured.draw.choice(names))
        # A process that is killed by what it is to go on with is replaced again and again.
        for found, right in zip(await within_reason(*streams), wanted, strict=True):
            compare(found, right)
        await within_reason(*doomed)
        await tortured.whole()
    await settled(llm)
    return tortured


async def within_reason(*tasks):
    """What is said in the end, if it comes to one."""
    async with asyncio.timeout(120):
        return await asyncio.gather(*tasks)


async def aborted(llm, draw):
    """A request that is aborted at some moment, perhaps while nobody hears it."""
    params = SamplingParams.for_model(seed=draw.randrange(99), max_tokens=150, ignore_eos=True)
    stream = llm.generate(TEXT, params, request_id=f"doomed {draw.random()}")
    wait, last = draw.uniform(0, 0.6), None
    task = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(wait)
    with contextlib.suppress(StopAsyncIteration):
        last = await task
    await stream.aclose()
    return last


def options(**changes):
    values = dict(max_num_seqs=12, max_num_batched_tokens=256, seed=3, debug=True)
    return values | dict(max_restarts=10_000, restart_window=0.01, start_timeout=60) | changes


def run(names, turns, seed, pauses, **changes):
    async def main():
        async with AsyncLLM("demo", **options(**changes)) as llm:
            return await torture(llm, names, turns, seed, pauses)

    before = descriptors()
    tortured = asyncio.run(main())
    assert not children()
    assert descriptors() <= before
    return tortured


NAMES = "tokenizer.0", "control", "detokenizer", "grammar", "runner.0"


@pytest.mark.timeout(300)
@pytest.mark.drawn(2)
@pytest.mark.parametrize("turns", [5, pytest.param(20, marks=pytest.mark.long)])
def test_a_torturer_on_a_simulated_device(turns):
    tortured = run(NAMES, turns, 1, (0.0, 0.01, 0.03, 0.1), device="simulated:1")
    assert tortured.kills >= 2 * turns
    assert tortured.busy > 0.5 * tortured.kills


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "names",
    [
        ("runner.0", "control"),
        *(pytest.param(names, marks=pytest.mark.long) for names in (NAMES, *zip(NAMES))),
    ],
    ids=str,
)
def test_every_process_of_an_engine_that_computes(names):
    turns = len(names) if len(names) == 2 else 5
    tortured = run(names, turns, 2, (0.1, 0.3), dtype="float32", threads=1)
    assert tortured.busy >= turns // 2


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ranks_are_replaced_together_whoever_dies():
    names = (*NAMES, "runner.1")
    ranks = dict(dtype="float32", threads=1, tensor_parallel_size=2)
    tortured = run(names, 2 * len(names), 5, (0.1, 0.3), **ranks)
    assert tortured.busy >= len(names)


def seeing():
    """Conversations and prompts with images, which are sent and encoded again."""
    shown = [drawn(digits) for digits in ("472", "90", "1")]
    asked = [conversation("say: ", one) for one in shown]
    asked.append(conversation("and: ", *shown[:2]))
    params = [SamplingParams.for_model(seed=n, max_tokens=250, ignore_eos=True) for n in range(3)]
    return list(zip(asked, [*params, dataclasses.replace(params[0], n=2)], strict=True))


@pytest.mark.timeout(300)
@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("names", "pauses"),
    [
        (("runner.0",), (0.1,)),
        pytest.param(("vision.0", "runner.0", "control", "tokenizer.0"), (0.03, 0.1, 0.25),
                     marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_images_are_seen_again(names, pauses):
    async def main():
        changes = dict(dtype="float32", threads=1, num_kv_blocks=200)
        async with AsyncLLM("demo-vl", **options(**changes)) as llm:
            tortured = Tortured(llm, 5)
            wanted = await asyncio.gather(*(read(llm, *ask) for ask in seeing()))
            for name, pause in itertools.product(names, pauses):
                streams = [asyncio.ensure_future(read(llm, *ask)) for ask in seeing()]
                await asyncio.sleep(pause)
                await tortured.kill(name)
                for found, right in zip(await asyncio.gather(*streams), wanted, strict=True):
                    compare(found, right)
                await tortured.whole()
            await settled(llm)
            assert tortured.busy >= len(names)

    asyncio.run(main())


async def output_tokens(llm):
    figures = await llm.statistics()
    return figures.get("scheduler", {}).get("actor", {}).get("output_tokens", 0)


@pytest.mark.parametrize(
    "device",
    [dict(device="simulated:10"), pytest.param(dict(dtype="float32", threads=1), marks=LONG)],
    ids=str,
)
def test_what_a_runner_has_computed_survives_the_death_of_others(device):
    """Of each stream one token is computed again, or those of which its reader was not told. Steps
    are long, so that nobody has said everything before who is killed is dead."""
    asked = [({"prompt_token_ids": list(range(40 + n, 240 + n))}, n) for n in range(6)]

    async def main():
        async with AsyncLLM("demo", **options(**device)) as llm:
            tortured, computed, before = Tortured(llm, 1), {}, 0
            for name in ("detokenizer", "runner.0"):
                params = [
                    SamplingParams.for_model(seed=n, max_tokens=150, ignore_eos=True)
                    for _, n in asked
                ]
                streams = [
                    asyncio.ensure_future(read(llm, prompt, one))
                    for (prompt, _), one in zip(asked, params, strict=True)
                ]
                while await output_tokens(llm) < before + 120:
                    await asyncio.sleep(0.01)
                await tortured.kill(name)
                await asyncio.gather(*streams)
                await tortured.whole()
                figures = (await llm.statistics())["scheduler"]["actor"]
                computed[name], before = figures["prefill_tokens"], figures["output_tokens"]
            assert computed["detokenizer"] < 6 * 20
            assert computed["runner.0"] >= 6 * 200

    asyncio.run(main())


async def bits_of_a_lone_stream(names, **changes):
    """What a stream says undisturbed, and when each of these dies meanwhile: ids and the bits of
    all log-probabilities."""
    params = SamplingParams.for_model(seed=3, max_tokens=150, ignore_eos=True, logprobs=3)
    ids, found = list(range(40, 233)), []
    prompt, start = {"prompt_token_ids": ids}, {"prompt_token_ids": ids[:-1]}
    async with AsyncLLM("demo", **options(**changes)) as llm:
        tortured = Tortured(llm, 1)
        # From here on all find the prompt, but for its last token, in the cache. What stands behind
        # it there was computed as it is now: no bits are of a larger chunk.
        await read(llm, start, SamplingParams.for_model(max_tokens=1))
        before = await output_tokens(llm)
        for name in (None, *names):
            stream = asyncio.ensure_future(read(llm, prompt, params))
            while name and await output_tokens(llm) < before + 40:
                await asyncio.sleep(0.005)
            if name:
                await tortured.kill(name)
            (told,), _ = await stream
            await tortured.whole()
            before = await output_tokens(llm)
            bits = [{i: one.logprob for i, one in each.items()} for each in told.logprobs]
            found.append((name, told.ids, bits))
    return found


def check_bits(found):
    (_, ids, bits), *others = found
    for name, told, other in others:
        assert told == ids, name
        assert other == bits, name


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=LONG)])
def test_a_lone_stream_goes_on_bit_for_bit_where_its_cache_survives(dtype):
    """The token that is computed again is a decode row, as it was."""
    names = "tokenizer.0", "detokenizer"
    check_bits(asyncio.run(bits_of_a_lone_stream(names, dtype=dtype, threads=1)))


@pytest.mark.gpu
def test_a_lone_stream_on_a_gpu_goes_on_bit_for_bit():
    names = "tokenizer.0", "detokenizer", "grammar"
    check_bits(asyncio.run(bits_of_a_lone_stream(names, device="cuda", dtype="bfloat16")))


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_every_process_of_an_engine_on_a_gpu(name):
    run((name,), 3, 4, (0.05, 0.2), device="cuda", dtype="float32")


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_on_gpus_are_replaced_together():
    names = "runner.1", "detokenizer", "runner.0"
    run(names, 3, 6, (0.2,), device="cuda", dtype="float32", tensor_parallel_size=2)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "changes",
    [
        dict(device="simulated:1", num_tokenizers=2),
        dict(
            device="simulated:0.3",
            num_kv_blocks=40,
            max_model_len=640,
            max_num_batched_tokens=40,
        ),
        dict(device="simulated:2", transport="queue"),
        dict(device="simulated:1", placement="split"),
        dict(dtype="float32", threads=1, num_kv_blocks=60, max_model_len=960),
        dict(dtype="float32", threads=1, enable_prefix_caching=False, pipeline_depth=3),
    ],
    ids=str,
)
def test_a_torturer_for_hours(changes):
    names = [*NAMES, *(["tokenizer.1"] if "num_tokenizers" in changes else [])]
    if changes.get("placement") == "split":
        names = [*names, "scheduler", "blocks"]
        names.remove("control")
    pauses = (0.0, 0.003, 0.02, 0.1, 0.4)
    run(names, 150, 7, pauses, **changes)


def test_a_process_that_hangs_is_replaced_too():
    async def main():
        async with AsyncLLM("demo", **options(device="simulated:1", stall_timeout=1.0)) as llm:
            prompt, params = asks()[0]
            wanted = await read(llm, prompt, params)
            for name in ("control", "detokenizer"):
                stream = asyncio.ensure_future(read(llm, prompt, params))
                await asyncio.sleep(0.05)
                os.kill(llm.pids[name], signal.SIGSTOP)
                compare(await stream, wanted)
            assert set(llm.restarts[0]) == {"control", "detokenizer"}

    asyncio.run(main())
    assert not children()


def test_requests_and_aborts_that_come_meanwhile():
    async def main():
        async with AsyncLLM("demo", **options(device="simulated:1")) as llm:
            prompt, params = asks()[1]
            wanted = await read(llm, prompt, params)
            going = asyncio.ensure_future(anext(llm.generate(prompt, params, request_id="going")))
            await going
            os.kill(llm.pids["control"], signal.SIGKILL)
            while llm.recovering is None:
                await asyncio.sleep(0.001)
            names, since = llm.recovering
            assert names == "control"
            assert since > 0
            new = asyncio.ensure_future(read(llm, prompt, params))
            await asyncio.sleep(0)
            await asyncio.wait_for(llm.abort("going"), 5)  # nobody else has to agree
            compare(await new, wanted)
            assert llm.recovering is None
            await settled(llm)

    asyncio.run(main())


def test_a_queue_that_is_full_meanwhile_says_so():
    async def main():
        changes = dict(device="simulated:1", max_waiting_requests=2)
        async with AsyncLLM("demo", **options(**changes)) as llm:
            os.kill(llm.pids["control"], signal.SIGKILL)
            while llm.recovering is None:
                await asyncio.sleep(0.001)
            llm.submit([TEXT, TEXT], SamplingParams.for_model(max_tokens=3))
            with pytest.raises(EngineOverloaded):
                llm.submit([TEXT], SamplingParams.for_model(max_tokens=3))

    asyncio.run(main())


def test_answers_that_their_caller_leads_say_that_they_are_lost():
    async def main():
        async with AsyncLLM("demo", **options(device="simulated:2")) as llm:
            params = BeamSearchParams(beam_width=2, max_tokens=300, ignore_eos=True)
            search = asyncio.ensure_future(llm.beam_search(TEXT, params))
            await asyncio.sleep(0.1)
            assert not search.done()
            os.kill(llm.pids["control"], signal.SIGKILL)
            with pytest.raises(ComputationFailed, match="beam search"):
                await search
            await read(llm, *asks()[0])
            await settled(llm)

    asyncio.run(main())


async def digested(llm):
    """Wait until the engine knows its files' digests, which it takes in the background."""
    while llm._fingerprints._digests.keys() != llm.files.fingerprints.keys():
        await asyncio.sleep(0.01)


def copied(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(DEMO, model, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return model


@pytest.mark.parametrize("how", ["gone", "replaced", "changed"])
def test_files_that_are_not_the_same_end_the_engine(tmp_path, how):
    """Where the process that starts again reads them: the size tells nothing here. Steps are slow,
    so that the stream goes on however late this process is woken."""
    model = copied(tmp_path)
    path = model / "tokenizer.json"

    async def main():
        async with AsyncLLM(str(model), **options(device="simulated:50")) as llm:
            await digested(llm)
            stream = asyncio.ensure_future(read(llm, *asks()[0]))
            await asyncio.sleep(0.05)
            if how == "gone":
                path.unlink()
            elif how == "replaced":
                (model / "new").write_text(path.read_text().replace("\n", " ", 1))
                os.replace(model / "new", path)
            else:
                path.write_text(path.read_text().replace("\n", " ", 1))
            os.kill(llm.pids["control"], signal.SIGKILL)  # which reads none
            while not llm.restarts[0] or llm.recovering:
                await asyncio.sleep(0.01)
            os.kill(llm.pids["tokenizer.0"], signal.SIGKILL)
            said = "has disappeared" if how == "gone" else f".* {how}"
            with pytest.raises(EngineDead, match=f"tokenizer.json {said}"):
                await stream
        assert not children()

    asyncio.run(main())


def touch(model):
    for path in model.iterdir():
        os.utime(path)


def write_again(model):
    for path in model.glob("*.*"):
        path.write_bytes(path.read_bytes())


def replace(model):
    for path in model.glob("*.*"):
        shutil.copy(path, model / "new")
        os.replace(model / "new", path)


def rename(model):
    model.rename(model.parent / "elsewhere")


@pytest.mark.parametrize(
    "change", [touch, rename, *(pytest.param(way, marks=LONG) for way in (write_again, replace))]
)
def test_files_with_the_same_bytes_are_the_same(tmp_path, change):
    model = copied(tmp_path)

    async def main():
        async with AsyncLLM(str(model), **options(device="simulated:1")) as llm:
            wanted = await read(llm, *asks()[0])
            await digested(llm)
            change(model)
            for turn, name in enumerate(("tokenizer.0", "runner.0")):
                stream = asyncio.ensure_future(read(llm, *asks()[0]))
                await asyncio.sleep(0.05)
                os.kill(llm.pids[name], signal.SIGKILL)
                compare(await stream, wanted)
                assert sum(llm.restarts[0].values()) == turn + 1
                while llm.recovering:
                    await asyncio.sleep(0.01)

    asyncio.run(main())
    assert not children()


def at_once(awaitable):
    """What it returns without waiting for anything."""
    try:
        next(awaitable.__await__())
    except StopIteration as stop:
        return stop.value
    pytest.fail("it waits")


@pytest.mark.parametrize(
    "victim", ["control", "detokenizer", pytest.param("tokenizer.0", marks=LONG)]
)
def test_an_abort_is_acknowledged_whoever_hangs(victim):
    """It waits for nobody, so not for `stall_timeout`."""

    async def main():
        config = options(device="simulated:5", stall_timeout=5.0)
        async with AsyncLLM("demo", **config) as llm:
            for when in ("before", "during", "after"):
                request = llm.generate(
                    TEXT, SamplingParams.for_model(max_tokens=200), request_id="x"
                )
                first = await anext(request)
                assert not first.finished
                if when == "before":
                    os.kill(llm.pids[victim], signal.SIGSTOP)
                elif when == "during":
                    os.kill(llm.pids[victim], signal.SIGKILL)
                    while llm.recovering is None:
                        await asyncio.sleep(0.001)
                at_once(llm.abort("x"))
                last = at_once(anext(request))
                assert last.finished
                assert last.outputs[0].finish_reason == "abort"
                assert last.metrics.finished_time is not None
                assert last.outputs[0].token_ids[: len(first.outputs[0].token_ids)]
                if when == "before":
                    os.kill(llm.pids[victim], signal.SIGKILL)
                while when != "after" and (llm.recovering or len(llm.restarts[0]) < 1):
                    await asyncio.sleep(0.01)
                again = llm.generate(TEXT, SamplingParams.for_model(max_tokens=3), request_id="x")
                assert [output async for output in again][-1].finished, "the id is free"
            await settled(llm)

    asyncio.run(main())
    assert not children()


def test_one_death_too_many_ends_every_request():
    async def main():
        changes = dict(device="simulated:1", max_restarts=2, restart_window=60.0)
        async with AsyncLLM("demo", **options(**changes)) as llm:
            for _ in range(2):
                stream = asyncio.ensure_future(read(llm, *asks()[0]))
                await asyncio.sleep(0.05)
                os.kill(llm.pids["detokenizer"], signal.SIGKILL)
                await stream
            stream = asyncio.ensure_future(read(llm, *asks()[0]))
            await asyncio.sleep(0.05)
            os.kill(llm.pids["detokenizer"], signal.SIGKILL)
            with pytest.raises(EngineDead, match="detokenizer"):
                await stream

    asyncio.run(main())
