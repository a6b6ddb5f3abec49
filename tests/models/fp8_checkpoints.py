"""FP8 checkpoints in blocks, made from others by the format's definition, and by no code of
ours."""

import json

import torch
from safetensors.torch import load_file, save_file

LARGEST = 448.0
"""Of e4m3."""
BLOCK = [16, 32]
"""Not square, and no divisor of all sizes of the tests' models."""


def pack(matrix, block):
    """(e4m3, scales float32, the numbers that these stand for)."""
    rows, columns = (-(-size // each) for size, each in zip(matrix.shape, block, strict=True))
    packed = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    scales, whole = torch.empty(rows, columns), torch.empty_like(matrix)
    for i in range(rows):
        for j in range(columns):
            at = (
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            scales[i, j] = matrix[at].abs().max() / LARGEST
            packed[at] = (matrix[at] / scales[i, j]).to(torch.float8_e4m3fn)
            whole[at] = packed[at].float() * scales[i, j]
    return packed, scales, whole


def is_packed(name, spared=()):
    module = name.removesuffix(".weight")
    return module.endswith("_proj") and not any(module.startswith(one) for one in spared)


def pack_checkpoint(directory, model, block=BLOCK, spared=(), fused=False, **changes):
    """Rewrite a checkpoint; `model`, transformers' of the same weights, gets what the packed ones
    stand for."""
    path = directory / "model.safetensors"
    tensors, state = load_file(path), {}
    for name in list(tensors):
        if is_packed(name, spared):
            packed, scales, whole = pack(tensors[name].float(), block)
            tensors[name], state[name] = packed, whole
            tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, path, {"format": "pt"})
    config = directory / "config.json"
    text = json.loads(config.read_text())
    text["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": block,
        "modules_to_not_convert": list(spared),
    } | changes
    config.write_text(json.dumps(text))
    give(model, state)
    return model


def give(model, state):
    """Have a model compute with these matrices; experts are one tensor for each layer there."""
    own = dict(model.named_parameters())
    for name, whole in state.items():
        if name in own:
            own[name].copy_(whole)
            continue
        at, _, rest = name.partition(".experts.")
        number, kind, _ = rest.split(".")
        if kind == "down_proj":
            own[f"{at}.experts.down_proj"][int(number)].copy_(whole)
        else:
            pair = own[f"{at}.experts.gate_up_proj"][int(number)].chunk(2)
            pair[kind == "up_proj"].copy_(whole)
