"""What a real run's actors were told leads to the same decisions again, message for message."""

import asyncio

import pytest

from nanoactor import RequestOutputKind, SamplingParams
from nanoactor.runtime.errors import ReplayDiverged
from nanoactor.runtime.recording import SENT, read_recording, replay
from tests.engine.conftest import DEMO
from tests.engine.harness import engine, ragged_prompts
from tests.simulation.mutations import MUTATIONS, planted

CAST = ("scheduler", "blocks", "detokenizer", "tokenizer.0")


@pytest.fixture(scope="module", params=["default", "split", "single"])
def recorded(request, tmp_path_factory):
    """The recordings of a run with preemptions, prefix hits, aborts and stop strings."""
    directory = tmp_path_factory.mktemp(request.param)
    prompts = ragged_prompts(2048, [5, 40, 33, 40, 9, 24], seed=4)

    async def one(llm, number):
        prompt = prompts[number % 6][: 3 + number]
        leaves = number % 4 == 0
        params = SamplingParams.for_model(
            # What is aborted has far more to say than a busy loop may take at once.
            max_tokens=80 if leaves else 20 + number,
            stop=["e", "he "][: number % 3],
            seed=number,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        stream = llm.generate({"prompt_token_ids": prompt}, params)
        async for _ in stream:
            if leaves:
                break
        await stream.aclose()

    async def main():
        changes = dict(
            placement=request.param,
            device="simulated:3",
            dtype="auto",
            skip_tokenizer_init=False,
            max_model_len=128,
            num_kv_blocks=34,
            block_size=4,
            max_num_seqs=6,
            max_num_batched_tokens=16,
            debug_record_dir=str(directory),
        )
        async with engine(DEMO, **changes) as llm:
            await asyncio.gather(*(one(llm, number) for number in range(36)))
            figures = await llm.statistics()
        assert figures["scheduler"]["actor"]["preemptions"] > 0
        assert figures["scheduler"]["actor"]["aborted"] > 0
        assert figures["blocks"]["actor"]["hit_tokens"] > 0

    asyncio.run(main())
    return directory


@pytest.mark.parametrize("name", CAST)
def test_an_actor_that_is_told_the_same_does_the_same(recorded, name):
    path = recorded / f"{name}.recording"
    _, _, entries = read_recording(path)
    said = sum(1 for kind, _, _ in entries if kind == SENT)
    assert said > 30
    assert replay(path) > 30


def test_a_scheduler_that_decides_otherwise_is_told_apart(recorded):
    (bug,) = [m for m in MUTATIONS if m.what == "more is planned than the token budget"]
    with planted(bug), pytest.raises(ReplayDiverged, match="scheduler sends blocks"):
        replay(recorded / "scheduler.recording")


def test_a_recording_that_was_cut_off_is_played_to_its_end(recorded, tmp_path):
    whole = (recorded / "scheduler.recording").read_bytes()
    path = tmp_path / "scheduler.recording"
    path.write_bytes(whole[: len(whole) // 2])
    assert 10 < replay(path) < replay(recorded / "scheduler.recording")
