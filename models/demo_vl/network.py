"""The forward pass for training, on batches of pictures of equal size."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.nn import functional as F

from nanoactor.models.demo_vl.layout import IGNORED, PATCH, VISION_THETA, Model
from nanoactor.models.demo_vl.prompts import Batch
from nanoactor.models.demo_vl.render import merge_order


@functools.cache
def patch_coordinates(rows: int, columns: int, device: str) -> torch.Tensor:
    """Return the row and column of each patch, float32 (patches, 2), in the order of
    `merge_order`."""
    coordinates = torch.cartesian_prod(torch.arange(float(rows)), torch.arange(float(columns)))
    return merge_order(coordinates.view(1, rows, columns, 2))[0].to(device)


@functools.cache
def table_weights(size: int, side: int, device: str) -> torch.Tensor:
    """Return a matrix that interpolates a table of `side` entries linearly to `size` entries, with
    aligned corners, float32 (size, side)."""
    source = torch.linspace(0, side - 1, size)
    return (1 - (source[:, None] - torch.arange(side)).abs()).clamp(min=0).to(device)


@functools.cache
def tower_rotation(
    rows: int, columns: int, head_size: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the tower's rotary positions, float32 (patches, head_size) each.
    Half of each head is rotated by row, the other half by column."""
    rates = VISION_THETA ** -(torch.arange(0, head_size // 2, 2, device=device) / (head_size // 2))
    angles = (patch_coordinates(rows, columns, device)[..., None] * rates).flatten(1).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply a rotary embedding to the last dimension of `x`, in which the first half is paired with
    the second."""
    first, second = x.chunk(2, dim=-1)
    return x * rotation[0] + torch.cat((-second, first), dim=-1) * rotation[1]


def embed_patches(visual: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Return the sum of patch and position embeddings, (pictures, patches, hidden), of `pixels`,
    (pictures, height, width, 3).

    Both frames of a patch are the same picture, so the weights are summed over time.
    """
    count, height, width, _ = pixels.shape
    rows, columns = height // PATCH, width // PATCH
    blocks = (pixels / 127.5 - 1).view(count, rows, PATCH, columns, PATCH, 3)
    patches = merge_order(blocks.permute(0, 1, 3, 5, 2, 4).reshape(count, rows, columns, -1))
    weight = visual.patch_embed.proj.weight.sum(2).flatten(1)
    side = math.isqrt(visual.pos_embed.num_embeddings)
    table = visual.pos_embed.weight.view(side, side, -1)
    axis_weights = [table_weights(size, side, str(pixels.device)) for size in (rows, columns)]
    positions = merge_order(torch.einsum("ri,cj,ijh->rch", *axis_weights, table)[None])
    return F.linear(patches, weight, visual.patch_embed.proj.bias) + positions


def run_tower(visual: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the vision tower on pictures of equal size. Each block makes one attention call for all
    pictures.

    Returns the output of the last block, (pictures, patches, hidden), and the features of the main
    merger and of each deepstack level, (pictures, tokens, hidden) each.
    """
    count, height, width, _ = pixels.shape
    config, x = visual.config, embed_patches(visual, pixels)
    shape = count, x.shape[1], 3, config.num_heads, -1
    head_size = config.hidden_size // config.num_heads
    rotation = tower_rotation(height // PATCH, width // PATCH, head_size, str(pixels.device))

    def merge(merger: Any) -> torch.Tensor:
        features: torch.Tensor = merger(x.reshape(-1, config.hidden_size))
        return features.view(count, -1, features.shape[-1])

    levels = []
    for index, block in enumerate(visual.blocks):
        q, k, v = block.attn.qkv(block.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v)
        x = x + block.attn.proj(y.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
        if index in config.deepstack_visual_indexes:
            level = list(config.deepstack_visual_indexes).index(index)
            levels.append(merge(visual.deepstack_merger_list[level]))
    return x, [merge(visual.merger), *levels]


def run_model(model: Model, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits, (prompts, length, vocabulary), and for each placeholder the output of the
    tower's last block, (prompts, patches, hidden)."""
    text: Any = model.model.language_model
    towers = [run_tower(model.model.visual, pictures.pixels) for pictures in batch.pictures]
    x = text.embed_tokens(batch.ids)
    levels = len(towers[0][1]) - 1
    extra = [torch.zeros_like(x) for _ in range(levels)]
    x = x.clone()
    for span, (_, features) in zip(batch.spans, towers, strict=True):
        x[:, span] = features[0]
        for level in range(levels):
            extra[level][:, span] = features[1 + level]
    rotation = text.rotary_emb(x, batch.positions[:, None])
    for index, layer in enumerate(text.layers):
        x = layer(x, position_embeddings=rotation, attention_mask=None)
        if index < levels:
            x = x + extra[index]
    return model.lm_head(text.norm(x)), [rows for rows, _ in towers]


def losses(model: Model, head: torch.nn.Linear, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean cross-entropy of the answers' tokens, and that of the patches' classes as
    predicted by the auxiliary `head`."""
    logits, rows = run_model(model, batch)
    answer_loss = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch.targets[:, 1:].flatten(), ignore_index=IGNORED
    )
    classes = torch.cat([pictures.classes.flatten() for pictures in batch.pictures])
    patch_logits = torch.cat([head(r).flatten(0, 1) for r in rows])
    return answer_loss, F.cross_entropy(patch_logits, classes)
