"""A computation that fails ends its own request, with a typed error, and leaves no trace."""

import asyncio

import pytest

from nanoactor.errors import ComputationFailed, WeightsError
from tests.engine.harness import Reference, collect, engine, greedy, ids
from tests.models.checkpoints import make_checkpoint

BROKEN = 7
"""The token whose embedding is not a number."""
COMMON = [40 + n for n in range(24)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(directory, the same weights in transformers before they were damaged)."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("broken")
    model = make_checkpoint(directory, tie_word_embeddings=False)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][BROKEN] = float("nan")
    save_file(tensors, path)
    return directory, Reference(model)


@pytest.mark.parametrize(
    "device",
    [
        dict(device="cpu"),
        pytest.param(dict(device="cuda"), marks=pytest.mark.gpu),
        pytest.param(dict(device="cuda", enforce_eager=True), marks=pytest.mark.gpu),
    ],
    ids=["cpu", "cuda", "cuda-eager"],
)
def test_nan_logits_end_their_request_and_no_other(checkpoint, device):
    directory, reference = checkpoint
    options = dict(check_weights=False, block_size=16, max_num_seqs=8, **device)

    async def main():
        async with engine(directory, **options) as llm:
            good = [[11 + n, *COMMON, 90 + n] for n in range(3)]
            bad = [[*COMMON, BROKEN], [BROKEN], [*COMMON[:9], BROKEN]]
            for _ in range(3):
                outputs = await asyncio.gather(
                    *(collect(llm, ids(prompt), greedy(12)) for prompt in (*good, *bad)),
                    return_exceptions=True,
                )
                for prompt, output in zip(good, outputs, strict=False):
                    reference.check(prompt, output.outputs[0].token_ids)
                for error in outputs[len(good) :]:
                    assert type(error) is ComputationFailed
                    assert "logits are not finite" in str(error)
            figures = (await llm.statistics())["scheduler"]["actor"]
            assert figures["failed"] == 9

    asyncio.run(main())
    reference.conclude()


def test_what_a_failing_request_computed_is_computed_again_for_the_next(checkpoint):
    """Its prompt's blocks were in the prefix index from the moment in which they were planned."""
    directory, reference = checkpoint
    options = dict(check_weights=False, block_size=4, max_num_seqs=8)

    async def main():
        async with engine(directory, **options) as llm:
            with pytest.raises(ComputationFailed):
                await collect(llm, ids([*COMMON, BROKEN]), greedy(4))
            output = await collect(llm, ids([*COMMON, 9]), greedy(8))
            assert output.num_cached_tokens == 0
            reference.check([*COMMON, 9], output.outputs[0].token_ids)
            output = await collect(llm, ids([*COMMON, 9]), greedy(8))
            assert output.num_cached_tokens == len(COMMON)
            reference.check([*COMMON, 9], output.outputs[0].token_ids)

    asyncio.run(main())


def sound(reference, common):
    """Prompts whose exact answers do not come to the broken token themselves."""
    import torch

    prompts = tokens = torch.tensor([[*common, 9 + n] for n in range(12)])
    with torch.inference_mode():
        for _ in range(6):
            best = reference.model(tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, best), 1)
    kept = (tokens[:, prompts.shape[1] :] != BROKEN).all(1)
    return prompts[kept][:4].tolist()


def test_who_hits_it_meanwhile_fails_or_is_exact(checkpoint):
    directory, reference = checkpoint
    options = dict(check_weights=False, block_size=4, max_num_seqs=8, pipeline_depth=3)

    async def main():
        async with engine(directory, **options) as llm:
            failed = 0
            for round_ in range(6):
                common = [100 + round_, *COMMON]
                prompts = [[*common, BROKEN], *sound(reference, common)]
                outputs = await asyncio.gather(
                    *(collect(llm, ids(prompt), greedy(6)) for prompt in prompts),
                    return_exceptions=True,
                )
                assert isinstance(outputs[0], ComputationFailed)
                for prompt, output in zip(prompts[1:], outputs[1:], strict=True):
                    if isinstance(output, Exception):
                        assert isinstance(output, ComputationFailed)
                        assert "send this request again" in str(output)
                        failed += 1
                    else:
                        reference.check(prompt, output.outputs[0].token_ids)
            assert failed, "nobody hit it: the test shows nothing"

    asyncio.run(main())


def test_such_weights_are_refused_unless_that_is_switched_off(checkpoint):
    async def main():
        async with engine(checkpoint[0]):
            pass

    with pytest.raises(
        WeightsError, match="embed_tokens.weight contains values that are not finite"
    ):
        asyncio.run(main())
