"""Compiles every kernel for compute capability 9.0; no GPU is needed.

What the interpreter lets pass and the compiler does not (a type that changes in a loop or in one
branch) shows here.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanoactor.models.kernels import (
    batch,
    decode_attention,
    elementwise,
    nucleus_sampling,
    prefill_attention,
    sampling,
    truncated_sampling,
)

# Types of arguments by name: K stands for the model's own, what is not named is an int32.
POINTERS = {
    "K": "queries keys values output qkv q_weight k_weight cosines sines x residual weight total "
    "gate_up logits all_logits",
    "fp32": "temperatures top_ps min_ps highest scores group_maxima all_maxima outputs weights",
    "i64": "slot_mapping all_scratch",
    "i32": "tables slots contexts item_rows item_numbers firsts plan rows tiles blocks lengths "
    "last_tokens token_ids positions rope_deltas seeds highest_ids score_ids chosen top_ks",
}
SCALARS = {"scale": "fp32", "eps": "fp32"}
TARGET = GPUTarget("cuda", 90, 32)
ATTENTION = {"heads": 16, "kv_heads": 8, "size": 128, "padded": 128}


def signature(kernel, kind, constants, **changes):
    pointers = {name: "*" + t for t, names in POINTERS.items() for name in names.split()}
    found = {}
    for parameter in kernel.params:
        name = parameter.name
        found[name] = changes.get(name) or pointers.get(name) or SCALARS.get(name) or "i32"
        found[name] = "constexpr" if name in constants else found[name].replace("K", kind)
    return found


def build(kernel, kind, constants, changes=None, **options):
    types = signature(kernel, kind, constants, **(changes or {}))
    values = {(at,): constants[name] for at, name in enumerate(types) if name in constants}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, (name, kind_) in enumerate(types.items())
        if kind_.startswith("*") or name.endswith("stride")
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=aligned)
    return triton.compile(source, target=TARGET, options=options)


def build_all(kind):
    exact = kind == "fp32"
    precision, tile = ("ieee", 32) if exact else ("tf32", 64)
    for block_size in (16, 64):
        shape = {**ATTENTION, "block_size": block_size, "precision": precision}
        chunks = {**shape, "group": 16, "tile": 64}
        build(decode_attention._decode_chunks, kind, chunks, num_warps=4, num_stages=2)
        prompts = {**shape, "group": 2, "tokens": 64, "tile": tile}
        build(prefill_attention._prefill, kind, prompts, num_warps=8, num_stages=1)
    build(decode_attention._combine_chunks, kind, {"heads": 16, "size": 128, "padded": 128})
    heads = {"heads": 16, "kv_heads": 8, "half": 64, "padded": 64, "each": 8}
    for normed in (True, False):
        store = {**heads, "normed": normed}
        build(elementwise._norm_rotate_store, kind, store, {"slots": "*i64"})
    for added in (False, True):
        norm = {"size": 1024, "padded": 1024, "added": added}
        build(elementwise._rms_norm, kind, norm)
    build(elementwise._swiglu, kind, {"block": 1024})
    angles = {"cosines": "*fp32", "sines": "*fp32"}
    build(elementwise._rotary, kind, {"half": 36, "padded": 64}, angles, num_warps=2)
    build(sampling._row_maxima, kind, {"part": 4096, "group": 256})
    build(sampling._perturbed_maxima, kind, {"padded": 64, "part": 4096})
    cut = {"padded": 1024, "group": 256, "at_once": 16, "space": 512, "most": 256}
    build(truncated_sampling._sample_truncated, kind, cut, num_warps=8)
    nucleus = {"padded": 64, "part": 4096}
    build(nucleus_sampling._sample_nucleus, kind, nucleus, num_warps=16)


def main():
    for kind in ("bf16", "fp16", "fp32"):
        build_all(kind)
    build(sampling._winners, "bf16", {"padded": 64})
    build(decode_attention._plan_splits, "bf16", {"tile": 64, "block": 256}, {"rows": "i32"})
    build(batch._advance, "bf16", {"block_size": 64, "turns": True, "width": 128})
    build(batch._locate, "bf16", {"block_size": 64, "width": 256})


if __name__ == "__main__":
    main()
