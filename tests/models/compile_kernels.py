"""Compiles every kernel for compute capability 9.0; no GPU is needed.

What the interpreter lets pass and the compiler does not (a type that changes in a loop or in one
branch) shows here. `python -m tests.models.compile_kernels prompts` compiles only the attention of
prompts by TMA, and asserts what it takes of a multiprocessor.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from nanoactor.models.devices.cuda.kernels import (
    batch,
    decode_attention,
    elementwise,
    experts,
    experts_dense,
    experts_few,
    experts_fp8,
    fp8,
    nucleus_sampling,
    prefill_attention,
    prefill_attention_tma,
    routing,
    sampling,
    truncated_sampling,
)
from nanoactor.models.limits import MAX_FREEZE_IDS

# Types of arguments by name: K stands for the model's own, what is not named is an int32.
POINTERS = {
    "K": "queries keys values output qkv q_weight k_weight cosines sines x residual weight total "
    "gate_up logits all_logits",
    "fp32": "temperatures top_ps min_ps highest scores group_maxima all_maxima outputs lse "
    "part_sums part_totals",
    "i64": "slot_mapping all_scratch",
    "i32": "tables slots contexts item_rows item_chunks first_items plan rows tiles blocks lengths "
    "splits_done arrivals last_tokens token_ids positions rope_deltas seeds highest_ids score_ids "
    "sampled_ids top_ks given_positions given_token_ids ids frozen frozen_slots "
    "freeze_ids",
}
SCALARS = {"scale": "fp32", "eps": "fp32"}
TARGET = GPUTarget("cuda", 90, 32)
ATTENTION = {"heads": 16, "kv_heads": 8, "size": 128, "padded": 128}
ROUNDING = [
    {"rounds": rounds, "rounded_block": block, "swizzled": swizzled}
    for rounds, block, swizzled in ((False, 1, False), (True, 128, False), (True, 128, True))
]
LOADS_WEIGHTS_EARLY = {
    "_rms_norm", "_norm_rotate_store", "_compute_logit_parts", "_split_weights",
}  # fmt: skip
"""Kernels that load weights before they wait for the previous kernel."""
ROUNDED = {"rounded": "*fp8e4nv", "rounded_scales": "*fp32"}


def signature(kernel, kind, constants, **changes):
    pointers = {name: "*" + t for t, names in POINTERS.items() for name in names.split()}
    found = {}
    for parameter in kernel.params:
        name = parameter.name
        found[name] = changes.get(name) or pointers.get(name) or SCALARS.get(name) or "i32"
        found[name] = "constexpr" if name in constants else found[name].replace("K", kind)
    return found


def build(kernel, kind, constants, changes=None, **options):
    if overlaps := "overlaps" in kernel.arg_names:
        constants = {**constants, "overlaps": True}
        options["launch_pdl"] = True
    types = signature(kernel, kind, constants, **(changes or {}))
    values = {(at,): constants[name] for at, name in enumerate(types) if name in constants}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, (name, kind_) in enumerate(types.items())
        if kind_.startswith("*") or name.endswith("stride")
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=aligned)
    compiled = triton.compile(source, target=TARGET, options=options)
    before, *rest = compiled.asm["ptx"].split("griddepcontrol.wait")
    assert len(rest) == overlaps, f"{kernel.__name__} waits {len(rest)} times for what runs before"
    if overlaps:
        assert not re.search(r"\b(st|red|atom)\.global|cp\.async", before), kernel.__name__
        loads = bool(re.search(r"\bld\.global", before))
        expected = kernel.__name__ in LOADS_WEIGHTS_EARLY and constants.get("has_norms", True)
        assert loads == expected, kernel.__name__
    return compiled


def build_by_tma(kind, variant, heads=16, size=128, block_size=64):
    group = triton.next_power_of_2(heads // 8)
    tokens = variant.rows // group
    constants = {"heads": heads, "kv_heads": 8, "size": size, "group": group, "tokens": tokens}
    constants |= {
        "programs_per_tile": 128 // variant.rows,
        "block_size": block_size,
        "tile": variant.tile,
    }
    constants["min_tiles"] = 16
    if variant == prefill_attention_tma.WIDE:
        constants |= {"splits": 1, "part_sums": None, "part_totals": None, "splits_done": None}
    else:
        constants["splits"] = 4
    box = f"tensordesc<{kind}[{variant.tile},{size}]>"
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    if variant.registers:
        options["maxnreg"] = variant.registers
    boxes = {"keys": box, "values": box}
    return build(prefill_attention_tma._prefill_tma, kind, constants, boxes, **options)


def registers(compiled):
    """(registers of a thread, bytes that it spills), by the assembler."""
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory) / "kernel.ptx", Path(directory) / "kernel.cubin"
        source.write_text(compiled.asm["ptx"])
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", source, "-o", target]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", told)
    spilled = re.search(r"(\d+) bytes spill stores", told)
    return int(used[1]), int(spilled[1])


def check_prompts():
    """Two programs fit into a multiprocessor of 65,536 registers and 227 KiB of memory."""
    for heads in (16, 32):
        for variant in (prefill_attention_tma.WIDE, prefill_attention_tma.NARROW):
            compiled = build_by_tma("bf16", variant, heads)
            used, spilled = registers(compiled)
            shared = compiled.metadata.shared
            print(f"{heads} heads, {variant}: {used} registers, {spilled} spilled, {shared} shared")
            assert used * 32 * variant.warps * 2 <= 65_536
            assert (shared + 1024) * 2 <= 227 << 10
            assert spilled <= (64 if variant.registers else 0), spilled
            ptx = compiled.asm["ptx"]
            assert "cp.async.bulk.tensor" in ptx, "keys and values do not come by TMA"
            assert "wgmma.mma_async" in ptx
            assert f".maxnreg {variant.registers}" in ptx or not variant.registers


def build_all(kind):
    exact = kind == "fp32"
    precision, tile = ("ieee", 32) if exact else ("tf32", 64)
    for block_size in (16, 64):
        shape = {**ATTENTION, "block_size": block_size, "precision": precision}
        for adds_up, rounding in itertools.product((False, True), ROUNDING):
            chunks = {**shape, "group": 16, "tile": 64, "adds_up": adds_up, **rounding}
            options = {"num_warps": 4, "num_stages": 2}
            build(decode_attention._decode_chunks, kind, chunks, ROUNDED, **options)
        prompts = {**shape, "group": 2, "tokens": 64, "tile": tile}
        build(prefill_attention._prefill, kind, prompts, num_warps=8, num_stages=1)
    for rounding in ROUNDING:
        combine = {"heads": 16, "size": 128, "padded": 128, **rounding}
        build(decode_attention._combine_chunks, kind, combine, ROUNDED, num_warps=1)
    heads = {"heads": 16, "kv_heads": 8, "half": 64, "padded": 64, "tokens_per_program": 8}
    for has_norms in (True, False):
        store = {**heads, "has_norms": has_norms}
        build(elementwise._norm_rotate_store, kind, store)
    for has_residual, rounding in itertools.product((False, True), ROUNDING):
        norm = {"size": 1024, "padded": 1024, "has_residual": has_residual, **rounding}
        build(elementwise._rms_norm, kind, norm, ROUNDED)
    build(elementwise._swiglu, kind, {"block": 1024})
    angles = {"cosines": "*fp32", "sines": "*fp32"}
    build(elementwise._rotary, kind, {"half": 36, "padded": 64}, angles, num_warps=2)
    build(sampling._row_maxima, kind, {"part": 4096, "group": 256})
    build(sampling._perturbed_maxima, kind, {"padded": 64, "part": 4096})
    cut = {"padded": 1024, "group": 256, "groups_per_iteration": 16, "max_sorted_keys": 512}
    cut["max_top_k"] = 256
    build(truncated_sampling._sample_truncated, kind, cut, num_warps=8)
    nucleus = {"padded": 64, "part": 4096}
    build(nucleus_sampling._sample_nucleus, kind, nucleus, num_warps=16)


def tiles_of(module):
    return [*(tile for _, tile in module._TILES), module._LARGEST]


PAIRS = {"ids": "*i32", "pair_ids": "*i32", "expert_ids": "*i32", "topk_weights": "*fp32"}
BLOCKS = {"blocks": 16, "block": 128, "group": 128}


def build_experts(kind):
    """Those of a model of 30 billion numbers."""
    sizes = {"hidden": 2048, "inner": 768}
    types = PAIRS | {"intermediate": "*K", "pair_outputs": "*K", "down": "*K"}
    for tile in tiles_of(experts_dense) if kind != "fp32" else [experts_dense._LARGEST_FLOAT32]:
        cut = {"rows": tile.rows, "outputs": tile.outputs, "inputs": tile.inputs, **sizes}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        build(experts_dense._activate, kind, {**cut, "top_k": 8}, types, **options)
        build(experts_dense._project_down, kind, cut, types, **options)
    types = PAIRS | {"intermediate": "*K", "y": "*K", "pair_outputs": "*K"}
    build(experts._combine_pairs, kind, {"top_k": 8, "block": 1024}, types)
    for packed in (False, True):
        types |= {"weight": "*fp8e4nv", "scales": "*fp32"} if packed else {}
        for inputs, kernel in ((2048, experts_few._activate), (768, experts_few._project_down)):
            shape = {"inputs": inputs, "offset": 0, "padded": inputs, "group": 128, "top_k": 8}
            shape |= {"block": 128, "tile": triton.next_power_of_2(inputs), "outputs": 8}
            build(kernel, kind, shape | ({} if packed else {"scales": None}), types)
    types = {"weight": "*fp32", "logits": "*fp32"}
    for _, (rows, inputs, warps) in routing._LOGITS_CONFIGS:
        weigh = {"hidden": 2048, "experts": 128, "rows": rows, "outputs": 4, "inputs": inputs}
        build(routing._compute_router_logits, kind, weigh, types, num_warps=warps)
    weigh = {"hidden": 2048, "experts": 128, "rows": 32, "padded": 128, "inputs": 64, "tile": 64}
    for warps in (4, 8):
        made = build(routing._compute_logit_parts, "bf16", weigh, types, num_warps=warps)
        assert "mma" in made.asm["ptx"]
    choose = {"top_k": 8, "renormalize": True, "padded": 128, "padded_k": 8, "dtype": tl.bfloat16}
    for splits, padded, interleaved in ((1, 1, False), (32, 32, False), (3, 4, True)):
        parts = {**choose, "splits": splits, "padded_splits": padded}
        parts["are_interleaved"] = interleaved
        build(routing._select_experts, kind, parts, PAIRS | {"logits": "*fp32"}, num_warps=1)
    counts = {"counts": "*i32", "places": "*i32", "source": "*i32", "blocks": "i32"}
    shape = {"experts": 128, "padded": 256, "chunk": 4096}
    align = {**shape, "size": 128, "at_once": 8}
    build(routing._align_blocks, kind, align, PAIRS | counts)
    build(routing._align_blocks, kind, {**align, "places": None}, PAIRS | counts)
    build(routing._count_pairs, kind, shape, PAIRS | counts)
    build(routing._place_pairs, kind, {"chunk": 4096}, PAIRS | counts)
    split = {"weight": "*fp32", "split": "*bf16"}
    build(routing._split_weights, kind, {"count": 1000, "parts": 3, "block": 1024}, split)


def build_fp8(kind):
    """Products on FP8 tensor cores, by the instructions of Hopper GPUs."""
    packed = {"x": "*fp8e4nv", "weight": "*fp8e4nv", "scales": "*fp32", "x_scales": "*fp32"}
    rounding = {"offset": 0, "blocks": 32, "block": 128, "blocks_per_program": 8}
    types = {"rounded": "*fp8e4nv", "scales": "*fp32"}
    build(fp8._quantize, kind, rounding, types)
    for tile in tiles_of(fp8):
        cut = {"outputs": 4096, **BLOCKS, "blocks_per_split": 8, "bias": None}
        cut |= {"tile_outputs": tile.outputs, "tile_tokens": tile.tokens}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        made = build(fp8._multiply, kind, cut, packed | {"sums": "*fp32"}, **options)
        assert "wgmma.mma_async.sync.aligned.m64" in made.asm["ptx"]
        assert ".e4m3.e4m3" in made.asm["ptx"]
    add = {"splits": 4, "tile": 1024, "bias": None}
    build(fp8._add_splits, kind, add, {"sums": "*fp32", "y": "*K", "outputs": "i32"})
    for tile in tiles_of(experts_fp8):
        cut = {**BLOCKS, "rows": tile.rows, "outputs": tile.outputs}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        types = {**packed, **PAIRS, "intermediate": "*K"}
        build(experts_fp8._activate, kind, {**cut, "top_k": 8, "inner": 768}, types, **options)
        types |= {"intermediate": "*fp8e4nv", "row_scales": "*fp32", "pair_outputs": "*K"}
        build(experts_fp8._project_down, kind, {**cut, "hidden": 2048}, types, **options)


def main():
    if sys.argv[1:] == ["experts"]:
        build_experts("bf16")
        build_fp8("bf16")
        return
    if sys.argv[1:] == ["prompts"]:
        check_prompts()
        return
    check_prompts()
    for kind in ("bf16", "fp16"):
        for variant in (prefill_attention_tma.WIDE, prefill_attention_tma.NARROW):
            for heads, size, block_size in ((16, 64, 64), (40, 128, 256)):
                build_by_tma(kind, variant, heads, size, block_size)
    for kind in ("bf16", "fp16", "fp32"):
        build_all(kind)
    for kind in ("bf16", "fp32"):  # float16 has the tiles of bfloat16
        build_experts(kind)
    build_fp8("bf16")
    build(sampling._pick_winners, "bf16", {"padded": 64})
    build(
        decode_attention._plan_splits,
        "bf16",
        {"tile": 64, "block": 256, "waves": 2, "skewed_tiles": 11},
        {"rows": "i32", "chunks_per_wave": "i32"},
    )
    constants = {
        "block_size": 64,
        "has_rope_deltas": True,
        "num_freeze_ids": MAX_FREEZE_IDS,
        "width": 128,
    }
    build(batch._advance, "bf16", constants)
    build(batch._fill_slot_mapping, "bf16", {"block_size": 64, "width": 256})


if __name__ == "__main__":
    main()
