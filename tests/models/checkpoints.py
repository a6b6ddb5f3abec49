"""Small random checkpoints of all families, and transformers' model of each to compare with."""

import copy
import json
from pathlib import Path

import torch

from tests.models.fp8_checkpoints import pack_checkpoint

SMALL = dict(
    vocab_size=211,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    intermediate_size=96,
    max_position_embeddings=512,
)

CONFIGURATIONS = {
    "untied": dict(tie_word_embeddings=False),
    "tied": dict(tie_word_embeddings=True),
    "gqa_1": dict(num_attention_heads=3, num_key_value_heads=3),
    "gqa_2": dict(num_attention_heads=6, num_key_value_heads=3),
    "gqa_5": dict(num_attention_heads=10, num_key_value_heads=2),
    "gqa_8": dict(num_attention_heads=8, num_key_value_heads=1),
    "narrow_heads": dict(head_dim=8),
    "wide_heads": dict(head_dim=40),
    "attention_bias": dict(attention_bias=True),
    "theta_and_eps": dict(
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rms_norm_eps=1e-3
    ),
    "rope_yarn": dict(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    ),
    "rope_linear": dict(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
    ),
    "qwen2": dict(family="Qwen2"),
    "qwen3_vl": dict(family="Qwen3VL", seed=1),
    "fp8": dict(fp8_blocks=(16, 32), seed=1),
    "qwen3_vl_moe": dict(
        family="Qwen3VLMoe",
        seed=1,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
    ),
    "mistral": dict(family="Mistral", head_dim=24, sliding_window=None),
    "qwen3_moe": dict(
        family="Qwen3Moe",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        norm_topk_prob=True,
    ),
    "qwen3_moe_fp8": dict(
        family="Qwen3Moe",
        seed=1,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        fp8_blocks=(16, 32),
    ),
    "qwen2_moe": dict(
        family="Qwen2Moe",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=72,
        mlp_only_layers=[1],
    ),
    "granite": dict(
        family="Granite",
        attention_bias=True,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        attention_multiplier=0.35,
        logits_scaling=1.7,
    ),
    "llama3": dict(
        family="Llama",
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


# Towers of which each has something odd; sizes are of the smallest kind that has everything.
TOWER = dict(
    depth=3,
    hidden_size=32,
    intermediate_size=40,
    num_heads=2,
    patch_size=4,
    out_hidden_size=64,
    num_position_embeddings=25,
    deepstack_visual_indexes=[0, 2],
)
TOWERS = {
    "two_levels": dict(),
    "one_level": dict(deepstack_visual_indexes=[1]),
    "four_levels": dict(depth=5, deepstack_visual_indexes=[3, 0, 2, 4]),
    "no_level": dict(deepstack_visual_indexes=[]),
    "three_heads": dict(num_heads=3, hidden_size=60, num_position_embeddings=49),
    "other_patches": dict(patch_size=3, temporal_patch_size=1, spatial_merge_size=3),
}
# Ids of images and videos, and what stands around them: behind the 211 of other models, so that
# prompts drawn from those have none.
VISION_IDS = dict(
    image_token_id=211, video_token_id=212, vision_start_token_id=213, vision_end_token_id=214
)

# Told apart by the model alone: every schedule would tell nothing more.
ALONE = {"llama": dict(family="Llama"), **CONFIGURATIONS}


def make_checkpoint(
    directory,
    seed=0,
    dtype=torch.float32,
    shard=None,
    family="Qwen3",
    scale=0.3,
    fp8_blocks=None,
    **config,
):
    """Save random weights of `dtype`; returns transformers' model of them, in float32.

    `scale` is their standard deviation, `shard` a `max_shard_size` such as "40KB"; `config` changes
    the family's configuration. With `fp8_blocks`, (rows, columns), projections are packed.
    """
    model = _make_model(family, copy.deepcopy(config)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator) * scale
        # Rounded now, so that what is stored and what is returned are the same numbers.
        parameter.copy_((noise + ("norm" in name)).to(dtype))
        if name == "lm_head.weight" and family.startswith("Qwen3VL"):
            # What is generated here is a prompt there, and must not have placeholders.
            parameter[model.config.image_token_id :] = 0
    size = {} if shard is None else {"max_shard_size": shard}
    copy.deepcopy(model).to(dtype).save_pretrained(directory, **size)
    if family.startswith("Qwen3VL"):
        _save_image_config(Path(directory), model.config.vision_config)
    if fp8_blocks is not None:
        pack_checkpoint(Path(directory), model, list(fp8_blocks))
    return model


def _save_image_config(directory, tower):
    """Images of one token to a few dozen."""
    side = tower.patch_size * tower.spatial_merge_size
    config = dict(
        size=dict(shortest_edge=side**2, longest_edge=40 * side**2),
        patch_size=tower.patch_size,
        temporal_patch_size=tower.temporal_patch_size,
        merge_size=tower.spatial_merge_size,
        image_mean=[0.5, 0.4, 0.5],
        image_std=[0.5, 0.5, 0.3],
        image_processor_type="Qwen2VLImageProcessor",
    )
    (directory / "preprocessor_config.json").write_text(json.dumps(config))
    # The area of all frames together.
    video = config | dict(size=dict(shortest_edge=6 * side**2, longest_edge=60 * side**2))
    del video["image_processor_type"]
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))


def _make_model(family, config):
    import transformers

    values = {"tie_word_embeddings": False, **SMALL}
    if family.startswith("Qwen3VL"):
        return _make_vision_model(transformers, family, values, config)
    if family not in ("Qwen3", "Qwen3Moe"):
        del values["head_dim"]
    made = getattr(transformers, f"{family}Config")(**{**values, **config})
    return getattr(transformers, f"{family}ForCausalLM")(made)


def _make_vision_model(transformers, family, values, config):
    """The file has a part for the text and one for the tower; `tower` changes the latter."""
    tower = {**TOWER, **config.pop("tower", {})}
    tied = config.pop("tie_word_embeddings", values.pop("tie_word_embeddings"))
    ids = config.pop("vision_ids", VISION_IDS)
    rope = dict(rope_type="default", rope_theta=5e4, mrope_section=[6, 3, 3])
    text = {"rope_parameters": rope, **values, "vocab_size": 215, **config}
    made = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config=tower, tie_word_embeddings=tied, **ids
    )
    return getattr(transformers, f"{family}ForConditionalGeneration")(made)
