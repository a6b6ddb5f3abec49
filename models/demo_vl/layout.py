"""Constants of the demo vision model: sizes, token ids, properties of its pictures, and the
contents of its JSON files."""

from __future__ import annotations

from typing import Any, TypeAlias

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
END_OF_TEXT, _, TURN_END, VISION_START, VISION_END, IMAGE, VIDEO = range(256, 263)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] in ('image', 'image_url') %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'video' %}"
    "{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT_CONFIG = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": TURN_END,
}
VISION_CONFIG = {
    "depth": 4,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 4,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 256,
    "out_hidden_size": 128,
    "deepstack_visual_indexes": [0, 1, 2],
}
PREPROCESSOR_CONFIG = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "do_convert_rgb": True,
    "do_resize": True,
    "resample": 3,
    "size": {"shortest_edge": 1024, "longest_edge": 65536},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
VIDEO_PREPROCESSOR_CONFIG = {
    **PREPROCESSOR_CONFIG,
    "video_processor_type": "Qwen3VLVideoProcessor",
    "max_frames": 32,
    "size": {"shortest_edge": 2048, "longest_edge": 262144},
}
"""Settings of the video processor. `size` limits the total area of all frames, in pixels."""
del VIDEO_PREPROCESSOR_CONFIG["image_processor_type"]
PATCH, CELL = 16, 32
VISION_THETA = 10000.0
NO_DIGIT = 10
MAX_DIGITS = 3
FONT_SIZES = range(20, 45)
PLAIN_FONT_SIZE = 30
WIDTHS, WIDTH_SHARES, HEIGHTS = (32, 64, 96, 128), (1.0, 2.0, 3.0, 3.0), (32, 64)
MIN_CONTRAST = 64.0
IGNORED = -100
READ, PAIR = ("read: ",), ("first: ", "second: ")
HELD_OUT_SEED = 2**31
Model: TypeAlias = Any
"""A `Qwen3VLForConditionalGeneration`. It is typed as Any because its modules are called one by
one."""
