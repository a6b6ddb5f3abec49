"""Each operator, called as the device calls it, against its reference kernel in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional as F

from nanoactor.models.batch import HeadTransform, KVCache
from nanoactor.models.weights.linear import Dense, ExpertWeights
from tests.npu.reference.registry import KERNELS
from tests.npu.smoke_checks.frame import (
    BLOCK,
    Check,
    Failed,
    Rig,
    Shape,
    Skipped,
    noise,
    off,
    same,
    shapes,
    short,
    told,
    told_of,
)

EPS = 1e-6
TOKENS = 37
Operator = Callable[[Rig, torch.dtype, Shape], float]


def rms_norm(rig: Rig, dtype: torch.dtype, shape: Shape) -> float:
    """Of hidden states, and of heads within a fused projection."""
    x, weight = noise(TOKENS, shape.hidden, dtype=dtype), noise(shape.hidden, dtype=dtype, seed=1)
    found = rig.device.rms_norm(rig.to(x), rig.to(weight), EPS)
    expected = KERNELS["npu_rms_norm"](x.float(), weight.float(), EPS)[0]
    error = off("hidden states", found, expected, dtype)
    qkv = noise(TOKENS, shape.heads + 2 * shape.kv_heads, shape.size, dtype=dtype, seed=2)
    weight = noise(shape.size, dtype=dtype, seed=3)
    found = rig.device.rms_norm(rig.to(qkv)[:, : shape.heads], rig.to(weight), EPS)
    queries = qkv[:, : shape.heads].float().contiguous()
    expected = KERNELS["npu_rms_norm"](queries, weight.float(), EPS)[0]
    return max(error, off("heads", found, expected, dtype))


def add_rms_norm(rig: Rig, dtype: torch.dtype, shape: Shape) -> float:
    """Both results; the sum is rounded before it is normed, or not: both pass."""
    x, residual = (noise(TOKENS, shape.hidden, dtype=dtype, seed=n) for n in (1, 2))
    weight = noise(shape.hidden, dtype=dtype, seed=3)
    normed, added = rig.device.add_rms_norm(rig.to(x), rig.to(residual), rig.to(weight), EPS)
    first, _, total = KERNELS["npu_add_rms_norm"](x.float(), residual.float(), weight.float(), EPS)
    return max(off("norm", normed, first, dtype), off("sum", added, total, dtype))


def swiglu(rig: Rig, dtype: torch.dtype, shape: Shape) -> float:
    """The first half is the gate."""
    x = noise(TOKENS, 2 * shape.intermediate, dtype=dtype)
    expected = KERNELS["npu_swiglu"](x.float(), -1)
    return off("product", rig.device.swiglu(rig.to(x)), expected, dtype)


def angles(dtype: torch.dtype, tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions, (tokens, size / 2)."""
    steps = torch.arange(size // 2) / (size // 2)
    turned = torch.arange(tokens)[:, None] * 31 * 1e6**-steps
    return turned.cos().to(dtype), turned.sin().to(dtype)


def rotation(dtype: torch.dtype, tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As operators take them: (1, tokens, 1, size)."""
    cos, sin = (torch.cat((half, half), -1)[None, :, None] for half in angles(dtype, tokens, size))
    return cos, sin


def rotary_mul(rig: Rig, dtype: torch.dtype, shape: Shape) -> float:
    """One tensor at a time."""
    x = noise(TOKENS, shape.heads, shape.size, dtype=dtype)
    cos, sin = angles(dtype, TOKENS, shape.size)
    found = rig.device.rotary(rig.to(x), rig.to(cos), rig.to(sin))
    wide = (table.float() for table in rotation(dtype, TOKENS, shape.size))
    return off("rotated", found, KERNELS["npu_rotary_mul"](x.float()[None], *wide)[0], dtype)


def apply_rotary(rig: Rig, dtype: torch.dtype, shape: Shape) -> float:
    """Queries and keys together."""
    given = [noise(1, TOKENS, n, shape.size, dtype=dtype) for n in (shape.heads, shape.kv_heads)]
    given += rotation(dtype, TOKENS, shape.size)
    moved = [rig.to(tensor) for tensor in given]
    found = torch.ops.npu.npu_apply_rotary_pos_emb(*moved, "BSND")
    expected = KERNELS["npu_apply_rotary_pos_emb"](*(t.float().clone() for t in given), "BSND")
    pairs = zip(("queries", "keys"), found, expected, strict=True)
    return max(off(name, one, other, dtype) for name, one, other in pairs)


def caches(dtype: torch.dtype, shape: Shape, blocks: int) -> list[torch.Tensor]:
    """Keys and values on the host."""
    sizes = (blocks, BLOCK, shape.kv_heads, shape.size)
    return [noise(*sizes, dtype=dtype, seed=n) for n in (11, 12)]


def slots_of(tokens: int, blocks: int) -> torch.Tensor:
    """Places all over the cache, none twice."""
    generator = torch.Generator().manual_seed(5)
    return torch.randperm(blocks * BLOCK, generator=generator)[:tokens]


def scatter(rig: Rig, dtype: torch.dtype, shape: Shape) -> float:
    """Exactly; what is not finite becomes 0, and nothing else is touched."""
    qkv = noise(TOKENS, shape.heads + 2 * shape.kv_heads, shape.size, dtype=dtype)
    qkv[3, -1, 5], qkv[4, shape.heads, 0], qkv[5, -1, 1] = float("nan"), float("inf"), -float("inf")
    pools, slots = caches(dtype, shape, 6), slots_of(TOKENS, 6)
    _, keys, values = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    cache = KVCache(*map(rig.to, pools))
    split = rig.to(qkv).split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    rig.device.write_kv(*split[1:], cache, rig.to(slots))
    clean = [torch.nan_to_num(t.contiguous(), 0.0, 0.0, 0.0) for t in (keys, values)]
    KERNELS["npu_scatter_pa_kv_cache"](*clean, *pools, slots, cache_mode="Norm")
    same("keys", cache.keys, pools[0])
    same("values", cache.values, pools[1])
    return 0.0


def norm_rotate_store(rig: Rig, dtype: torch.dtype, shape: Shape) -> float:
    """What lies between two matrix products, in one."""
    qkv = noise(TOKENS, shape.heads + 2 * shape.kv_heads, shape.size, dtype=dtype)
    weights = [noise(shape.size, dtype=dtype, seed=n) for n in (1, 2)]
    pools, slots = caches(dtype, shape, 4), slots_of(TOKENS, 4)
    cache = KVCache(*map(rig.to, pools))
    turned = rig.device.rotation(*map(rig.to, angles(dtype, TOKENS, shape.size)))
    moved = tuple(map(rig.to, weights))
    how = HeadTransform((moved[0], moved[1]), EPS, turned)
    found = rig.device.norm_rotate_store(rig.to(qkv), how, cache, rig.to(slots))
    wide = qkv.float().split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    tables = [table.float() for table in rotation(dtype, TOKENS, shape.size)]
    q, k = (
        KERNELS["npu_rms_norm"](part.contiguous(), weight.float(), EPS)[0].to(dtype).float()[None]
        for part, weight in zip(wide[:2], weights, strict=True)
    )
    q, k = KERNELS["npu_apply_rotary_pos_emb"](q, k, *tables, "BSND")
    stored = cache.keys.view(-1, shape.kv_heads, shape.size).cpu()[slots]
    return max(off("queries", found, q[0], dtype), off("keys", stored, k[0], dtype))


def product(rig: Rig, dtype: torch.dtype, shape: Shape, fractal: bool = False) -> float:
    """x times a projection, for a few tokens and for many."""
    worst = 0.0
    outputs = (shape.heads + 2 * shape.kv_heads) * shape.size
    weight = noise(outputs, shape.hidden, dtype=dtype, scale=0.02)
    there = rig.to(weight)
    there = rig.device.runtime.to_fractal(there) if fractal else there
    _check_format(rig, there, fractal)
    for tokens in (1, TOKENS, 256):
        x = noise(tokens, shape.hidden, dtype=dtype, seed=tokens)
        found, expected = F.linear(rig.to(x), there), F.linear(x.float(), weight.float())
        worst = max(worst, off(f"{tokens} tokens", found, expected, dtype))
    return worst


def _check_format(rig: Rig, weight: torch.Tensor, fractal: bool) -> None:
    """That the layout is what was asked for."""
    torch_npu = getattr(rig.device.runtime, "torch_npu", None)
    if torch_npu is not None and fractal:
        number = int(torch_npu.get_npu_format(weight))
        if number != 29:
            raise Failed(f"the weight's format is {number}, not 29 (NZ)")


def experts(rig: Rig, dtype: torch.dtype, shape: Shape) -> float:
    """A mixture of eight experts, one of which no token chooses, for a few tokens and for many."""
    if not rig.device.runtime.is_a2_or_a3:
        raise Skipped("the device calls these operators only on Atlas A2 and A3")
    count, top_k, inner, worst = 8, 2, 256, 0.0
    gate_up = noise(count, 2 * inner, shape.hidden, dtype=dtype, scale=0.02)
    down = noise(count, shape.hidden, inner, dtype=dtype, seed=1, scale=0.02)
    operator = rig.device.experts(ExpertWeights(Dense(rig.to(gate_up)), Dense(rig.to(down))))
    for tokens in (1, TOKENS, 256):
        x = noise(tokens, shape.hidden, dtype=dtype, seed=tokens)
        generator = torch.Generator().manual_seed(tokens)
        scores = torch.rand(tokens, count - 1, generator=generator)
        weights, ids = scores.softmax(-1).topk(top_k)
        found = operator(rig.to(x), rig.to(ids.int()), rig.to(weights))
        expected = torch.zeros(tokens, shape.hidden)
        for expert in range(count):
            inputs = F.linear(x.float(), gate_up[expert].float()).to(dtype).float()
            inputs = KERNELS["npu_swiglu"](inputs, -1).to(dtype).float()
            outputs = F.linear(inputs, down[expert].float()).to(dtype).float()
            expected += outputs * (weights * (ids == expert)).sum(-1, keepdim=True)
        worst = max(worst, off(f"{tokens} tokens", found, expected, dtype))
    return worst


OPERATORS: dict[str, Operator] = {
    "npu_rms_norm": rms_norm,
    "npu_add_rms_norm": add_rms_norm,
    "npu_swiglu": swiglu,
    "npu_rotary_mul": rotary_mul,
    "npu_apply_rotary_pos_emb": apply_rotary,
    "npu_scatter_pa_kv_cache": scatter,
    "norm, rotate, store": norm_rotate_store,
    "npu_moe_init_routing_v2 and npu_grouped_matmul": experts,
    "linear": product,
    "npu_format_cast to NZ and linear": functools.partial(product, fractal=True),
}


def over_models(rig: Rig, operator: Operator, dtype: torch.dtype) -> str:
    """One after the other; what goes wrong says with which."""
    rig.need(dtype)
    errors = {}
    for name, shape in shapes(rig).items():
        try:
            errors[name] = operator(rig, dtype, shape)
        except Failed as failed:
            raise Failed(f"{name}, {failed}") from None
    return told(errors) if any(errors.values()) else "exact"


def in_place(rig: Rig) -> str:
    """What npu_apply_rotary_pos_emb does to its inputs: the device takes either."""
    dtype, (name, shape) = rig.dtype, next(iter(shapes(rig).items()))
    given = [noise(1, TOKENS, n, shape.size, dtype=dtype) for n in (shape.heads, shape.kv_heads)]
    q, k = map(rig.to, given)
    tables = map(rig.to, rotation(dtype, TOKENS, shape.size))
    found = torch.ops.npu.npu_apply_rotary_pos_emb(q, k, *tables, "BSND")
    kept = [torch.equal(t.cpu(), old) for t, old in zip((q, k), given, strict=True)]
    aliases = [new.data_ptr() == t.data_ptr() for new, t in zip(found, (q, k), strict=True)]
    if kept[0] != kept[1] or aliases[0] != aliases[1]:
        raise Failed(f"queries and keys differ: inputs kept {kept}, results are inputs {aliases}")
    how = "leaves its inputs as they were" if kept[0] else "overwrites its inputs"
    return f"it {how}; it returns {'them' if aliases[0] else 'new tensors'} ({name})"


def _of_view(name: str, rig: Rig, x: torch.Tensor) -> torch.Tensor:
    """An operator's result for a slice of heads (tokens, heads, size), or for a copy of it."""
    npu, dtype, size = torch.ops.npu, rig.dtype, x.shape[-1]
    ones = rig.to(torch.ones(size, dtype=dtype))
    tables = [*map(rig.to, rotation(dtype, TOKENS, size))]
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "npu_rms_norm": lambda: npu.npu_rms_norm(x, ones, EPS)[0],
        "npu_add_rms_norm": lambda: npu.npu_add_rms_norm(x, x, ones, EPS)[0],
        "npu_swiglu": lambda: npu.npu_swiglu(x, -1),
        "npu_rotary_mul": lambda: npu.npu_rotary_mul(x[None], *tables),
    }
    return calls[name]().cpu()


VIEWED = ("npu_rms_norm", "npu_add_rms_norm", "npu_swiglu", "npu_rotary_mul")


def not_contiguous(name: str, rig: Rig) -> str:
    """The device always hands over copies: this is for whoever wants to save them."""
    shape = next(iter(shapes(rig).values()))
    view = rig.to(noise(TOKENS, 2 * shape.heads, shape.size, dtype=rig.dtype))[:, ::2]
    expected = _of_view(name, rig, view.contiguous())
    try:
        found = _of_view(name, rig, view)
    except Exception as error:
        raise Skipped(f"refused, and the device makes copies: {told_of(error)}") from error
    if not torch.equal(found, expected):
        raise Failed("taken, but the result is another one than for a copy")
    return "taken"


def checks(rig: Rig) -> list[Check]:
    """In their order."""
    found = [
        Check(f"{name}, {short(dtype)}", functools.partial(_run, operator, dtype))
        for name, operator in OPERATORS.items()
        for dtype in rig.dtypes
    ]
    found.append(Check("npu_apply_rotary_pos_emb: in place or not", in_place))
    for name in VIEWED:
        title = f"{name}: inputs that are not contiguous"
        found.append(Check(title, functools.partial(not_contiguous, name)))
    return found


def _run(operator: Operator, dtype: torch.dtype, rig: Rig) -> str:
    return over_models(rig, operator, dtype)
