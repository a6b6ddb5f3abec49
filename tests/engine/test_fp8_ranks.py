"""FP8 on two GPUs: log-probabilities are as near to float32 as those of one GPU."""

import pytest
import torch

from tests.engine.test_decode_kernel import answers, error
from tests.models.checkpoints import make_checkpoint

MODELS = {
    "dense": dict(family="Qwen3", intermediate_size=3072),
    "experts": dict(
        family="Qwen3Moe",
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=512,
        norm_topk_prob=True,
    ),
}
SIZES = dict(hidden_size=1024, num_hidden_layers=3, vocab_size=6000, head_dim=128)
HEADS = dict(num_attention_heads=16, num_key_value_heads=4)


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("model", MODELS)
def test_two_gpus_are_no_further_from_float32_than_one(model, tmp_path):
    """The activations' rounding is part of both distances: float32 has none."""
    options = dict(SIZES, **HEADS, **MODELS[model], max_position_embeddings=4096)
    make_checkpoint(tmp_path, dtype=torch.bfloat16, scale=1 / 32, fp8_blocks=(128, 128), **options)
    one, two = (
        error(tmp_path, answers(tmp_path, 16, tensor_parallel_size=ranks, decode_kernel=False))
        for ranks in (1, 2)
    )
    assert 0 < two < 1.1 * one, (two, one)
