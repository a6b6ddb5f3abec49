"""Small random checkpoints of all families, and transformers' model of each to compare with."""

import copy

import torch

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


# Told apart by the model alone: every schedule would tell nothing more.
ALONE = {"llama": dict(family="Llama"), **CONFIGURATIONS}


def make_checkpoint(directory, seed=0, dtype=torch.float32, shard=None, family="Qwen3", **config):
    """Save random weights of `dtype`; returns transformers' model of them, in float32.

    `shard` is a `max_shard_size` such as "40KB"; `config` changes the family's configuration.
    """
    import transformers

    values = {"tie_word_embeddings": False, **SMALL, **copy.deepcopy(config)}
    if family != "Qwen3":
        del values["head_dim"]
    made = getattr(transformers, f"{family}Config")(**values)
    model = getattr(transformers, f"{family}ForCausalLM")(made).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator) * 0.3
        # Rounded now, so that what is stored and what is returned are the same numbers.
        parameter.copy_((noise + ("norm" in name)).to(dtype))
    size = {} if shard is None else {"max_shard_size": shard}
    copy.deepcopy(model).to(dtype).save_pretrained(directory, **size)
    return model
