"""Images: the tower's attention, and the demo that reads digits."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from nanoactor import SamplingParams
from tests.engine.harness import collect, engine
from tests.npu.reference.registry import KERNELS
from tests.npu.smoke_checks.frame import Check, Failed, Rig, noise, off, short, told

HEADS = 16
SIZES = {"2B": 64, "8B": 72}
"""Of the heads in Qwen3-VL's towers."""
SEGMENTS = [3072, 1, 130, 130]
"""Patches that see each other; the first are an image of 1024 x 768 pixels."""
NUMBERS = ["7", "42", "905", "318", "60", "1", "99", "250"]


def segments(dtype: torch.dtype, rig: Rig) -> str:
    """Against the reference kernel in float32."""
    rig.need(dtype)
    lengths = SEGMENTS[1:] if rig.quick else SEGMENTS
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    errors = {}
    for name, size in SIZES.items():
        given = [noise(sum(lengths), HEADS, size, dtype=dtype, seed=n) for n in (1, 2, 3)]
        found = rig.device.segment_attention(*map(rig.to, given), lengths)
        expected = KERNELS["npu_fusion_attention"](
            *(each.float() for each in given),
            HEADS,
            "TND",
            scale=size**-0.5,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
        )[0]
        errors[name] = off(name, found, expected, dtype)
    return told(errors)


def drawn(text: str) -> Image.Image:
    """An image of a number."""
    image = Image.new("RGB", (32 * len(text), 64), (20, 30, 90))
    font = ImageFont.load_default(30)
    ImageDraw.Draw(image).text((6, 12), text, font=font, fill=(250, 220, 90))
    return image


async def _read(rig: Rig) -> list[str]:
    options: dict[str, Any] = dict(device=rig.name, dtype=short(rig.dtype), placement="single")
    options |= dict(attention_layout="bnsd", graph_mode=rig.graph_mode, start_timeout=1500.0)
    options |= dict(max_num_seqs=4, num_kv_blocks=24, skip_tokenizer_init=False)
    params = SamplingParams.for_model(temperature=0.0, max_tokens=8)
    async with engine("demo-vl", **options) as llm:
        found = []
        for number in NUMBERS:
            parts = [{"type": "image", "image": drawn(number)}, {"type": "text", "text": "read: "}]
            chat = [{"role": "user", "content": parts}]
            output = await collect(llm, chat, params)
            found.append(output.outputs[0].text)
    return found


def digits(rig: Rig) -> str:
    """All but one at most: bfloat16 may turn a close choice."""
    found = asyncio.run(_read(rig))
    wrong = [pair for pair in zip(NUMBERS, found, strict=True) if pair[0] != pair[1]]
    if len(wrong) > 1:
        raise Failed(f"shown and read: {wrong}")
    return f"{len(NUMBERS) - len(wrong)} of {len(NUMBERS)} numbers are read"


def checks(rig: Rig) -> list[Check]:
    """In their order."""
    found = [
        Check(f"npu_fusion_attention, {short(dtype)}", functools.partial(segments, dtype))
        for dtype in rig.dtypes
    ]
    found.append(Check("engine: demo-vl reads digits", digits, alone=True, seconds=900))
    return found
