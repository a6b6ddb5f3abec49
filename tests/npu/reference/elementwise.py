"""Norms, rotary embeddings, activations, the sampling filter, format casts and prefetch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.npu.reference import contract
from tests.npu.reference.contract import FLOAT_TYPES, Checker

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
MROPE_SECTIONS = ([16, 24, 24], [24, 20, 20], [8, 12, 12], [16, 16, 16, 16])
FORMATS = {2: "ND", 29: "FRACTAL_NZ"}
OTHER_FORMATS = (0, 1, 3, 4, 30, 32, 33)


def _normalise(x: Tensor, gamma: Tensor, epsilon: float) -> Pair:
    """x / sqrt(mean(x^2) + eps) * gamma over gamma's axes, in float32; and the reciprocal root.

    rstd keeps x's rank with ones on the normalised axes (the meta kernel and npu_add_rms_norm).
    """
    axes = list(range(x.dim() - gamma.dim(), x.dim()))
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(dim=axes, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


def _check_norm(check: Checker, name: str, x: Tensor, gamma: Tensor) -> None:
    """1-8 dims; gamma_shape = x_shape[n:]."""
    check.dtype(name, x, FLOAT_TYPES)
    check.rank(name, x, *range(1, 9))
    check.require(
        1 <= gamma.dim() <= x.dim() and gamma.shape == x.shape[x.dim() - gamma.dim() :],
        "gamma",
        tuple(gamma.shape),
        f"the last axes of {name}'s shape {tuple(x.shape)}",
    )


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Pair:
    """RmsNorm(x) and 1/Rms(x); gamma of x's dtype, or float32 with a 16-bit x."""
    check = Checker("npu_rms_norm")
    _check_norm(check, "input", input, gamma)
    check.dtype("gamma", gamma, {input.dtype, torch.float32})
    return _normalise(input, gamma, epsilon)


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Triple:
    """(RmsNorm(x), 1/Rms(x), x) of x = x1 + x2; one dtype throughout, x1 and x2 of one shape."""
    check = Checker("npu_add_rms_norm")
    _check_norm(check, "x1", x1, gamma)
    check.shape("x2", x2, x1.shape, "x1's")
    check.same_dtype("x2", x2, "x1", x1)
    check.same_dtype("gamma", gamma, "x1", x1)
    total = x1 + x2
    output, rstd = _normalise(total, gamma, epsilon)
    return output, rstd, total


def _rotate_half(x: Tensor) -> Tensor:
    """cat((-x2, x1)) of the two halves."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotate_interleave(x: Tensor) -> Tensor:
    """(-x2, x1) of every neighbouring pair."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _rotary_layouts(sizes: tuple[int, ...], table: tuple[int, ...], half: bool) -> list[str]:
    """The layouts under which r1's shape is one of the documented ones and B, N are in range."""
    a, b, c, d = sizes
    patterns = {
        "BNSD": ((1, 1, c, d), (a, 1, c, d), (a, b, c, d)),
        "BSND": ((1, b, 1, d), (a, b, 1, d), (a, b, c, d)),
        "SBND": ((a, 1, 1, d), (a, b, 1, d), (a, b, c, d)),
    }
    heads = {"BNSD": (a, b), "BSND": (a, c), "SBND": (b, c)}
    fitting = []
    for layout, shapes in patterns.items():
        batch, count = heads[layout]
        small = max(batch, count) < 1000 if half else batch * count < 1000
        if table in (shapes if half else shapes[:1]) and small:
            fitting.append(layout)
    return fitting


def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """r1 * x + r2 * x_new, x_new being the rotated x, or x @ rotate where rotate is given.

    Checked: 4-D, D even and < 896, r1 and r2 of one documented broadcast shape with values in
    [-1, 1], B and N < 1000 (half) or B*N < 1000 (interleave).
    """
    check = Checker("npu_rotary_mul")
    check.choice("rotary_mode", rotary_mode, ("half", "interleave"))
    for name, tensor in (("input", input), ("r1", r1), ("r2", r2)):
        check.dtype(name, tensor, FLOAT_TYPES)
        check.rank(name, tensor, 4)
    dim = input.size(3)
    check.require(dim < 896 and dim % 2 == 0, "input", f"D={dim}", "an even D below 896")
    check.shape("r2", r2, r1.shape, "r1's")
    half = rotary_mode == "half"
    check.require(
        bool(_rotary_layouts(tuple(input.shape), tuple(r1.shape), half)),
        "r1",
        f"shape {tuple(r1.shape)} beside input {tuple(input.shape)}",
        "11SD/B1SD/BNSD, 1S1D/BS1D/BSND or S11D/SB1D/SBND (interleave: the first of each) "
        "with B, N < 1000 (interleave: B*N < 1000)",
    )
    for name, tensor in (("r1", r1), ("r2", r2)):
        peak = float(tensor.detach().abs().max()) if tensor.numel() else 0.0
        ranged = not contract.ENFORCE_ROTATION_RANGE or peak <= 1.01
        check.require(ranged, name, f"a value of magnitude {peak}", "values in [-1, 1]")
    if rotate is not None:
        check.dtype("rotate", rotate, FLOAT_TYPES)
        check.shape("rotate", rotate, (dim, dim), "(D, D)")
        turned = input.float() @ rotate.float()
    else:
        turned = (_rotate_half if half else _rotate_interleave)(input.float())
    return (r1.float() * input.float() + r2.float() * turned).to(input.dtype)


def _check_rotary_pair(
    check: Checker, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str
) -> None:
    """The A2/A3 rules: shapes (b, s, n, d) or (t, n, d), one head in cos and sin, D 64 or 128."""
    rank = 4 if layout == "BSND" else 3
    tensors = (("query", query), ("key", key), ("cos", cos), ("sin", sin))
    for name, tensor in tensors:
        check.dtype(name, tensor, FLOAT_TYPES)
        check.same_dtype(name, tensor, "query", query)
        check.rank(name, tensor, rank)
        check.require(tensor.numel() > 0, name, "empty", "a tensor that is not empty")
        check.require(
            not contract.ENFORCE_ENUMERATED_SIZES or tensor.size(-1) in (64, 128),
            name,
            f"D={tensor.size(-1)}",
            "D of 64 or 128",
        )
    lead = query.shape[: rank - 2]
    check.shape("key", key, (*lead, key.size(-2), query.size(-1)), "query's but for N")
    check.shape("cos", cos, (*lead, 1, cos.size(-1)), "query's leading axes and N = 1")
    check.shape("sin", sin, cos.shape, "cos's")
    if cos.size(-1) != query.size(-1):
        raise check.unimplemented("cos", tuple(cos.shape), "a rotary width other than D")


def npu_apply_rotary_pos_emb(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> Pair:
    """x * cos + rotate_half(x) * sin, written into query and key, which are also returned.

    "计算结果执行原地更新"; "query_out: 原地更新后的query张量". The schema hides both.
    """
    check = Checker("npu_apply_rotary_pos_emb")
    check.choice("layout", layout, ("BSND", "TND"), ("SBND", "BNSD"))
    check.choice("rotary_mode", rotary_mode, ("half",), ("quarter", "interleave"))
    _check_rotary_pair(check, query, key, cos, sin, layout)
    for tensor in (query, key):
        wide = tensor.float()
        tensor.copy_(wide * cos.float() + _rotate_half(wide) * sin.float())
    return (query, key) if contract.RESULTS_ALIAS else (query.clone(), key.clone())


def _check_mrope(
    check: Checker,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    table: Tensor,
    head_size: int,
    sections: list[int],
) -> None:
    """Ranks, dtypes, the multiples of 16 or 32, the rows of positions and their range."""
    check.dtype("positions", positions, (torch.int32, torch.int64))
    for name, tensor in (("query", query), ("key", key), ("cos_sin_cache", table)):
        check.dtype(name, tensor, FLOAT_TYPES)
        check.same_dtype(name, tensor, "query", query)
        check.rank(name, tensor, 2)
    tokens = query.size(0)
    expected = (len(sections), tokens) if sections else (tokens,)
    check.shape("positions", positions, expected, "(tokens,) for rope, (sections, tokens) else")
    check.require(key.size(0) == tokens, "key", tuple(key.shape), f"{tokens} tokens")
    width = table.size(1)
    step = 16 if query.dtype == torch.float32 else 32
    if contract.ENFORCE_ENUMERATED_SIZES:
        check.require(width % step == 0, "cos_sin_cache", f"rotary_dim {width}", f"by {step}")
        check.require(head_size % step == 0, "head_size", head_size, f"a multiple of {step}")
        check.require(
            not sections or sections in MROPE_SECTIONS,
            "mrope_section",
            sections,
            f"one of {MROPE_SECTIONS}",
        )
    check.require(0 < width <= head_size, "cos_sin_cache", f"rotary_dim {width}", "<= head_size")
    for name, tensor in (("query", query), ("key", key)):
        check.require(
            tensor.size(1) % head_size == 0, name, tuple(tensor.shape), "heads * head_size columns"
        )
    check.require(
        not sections or 2 * sum(sections) == width,
        "mrope_section",
        sections,
        f"a sum of rotary_dim/2 = {width // 2}",
    )
    if positions.numel():
        low, high = int(positions.min()), int(positions.max())
        check.require(
            low >= 0 and high < table.size(0),
            "positions",
            f"{low}..{high}",
            f"indices in [0, {table.size(0)})",
        )


def _merge_sections(table: Tensor, sections: list[int], interleave: bool) -> Tensor:
    """One (tokens, rotary/2) table out of one per position row, in blocks or interleaved by 3."""
    if not interleave:
        starts = [sum(sections[:row]) for row in range(len(sections))]
        rows = enumerate(zip(starts, sections, strict=True))
        return torch.cat([table[row, :, at : at + size] for row, (at, size) in rows], dim=-1)
    merged = table[0].clone()
    for row in (1, 2):
        where = slice(row, sections[1] * 3, 3)
        merged[:, where] = table[row][:, where]
    return merged


def _turn(x: Tensor, head_size: int, cos: Tensor, sin: Tensor, half: bool) -> Tensor:
    """Rotate the first rotary_dim of every head; the rest passes through."""
    heads = x.float().reshape(x.size(0), x.size(1) // head_size, head_size)
    width = 2 * cos.size(-1)
    turned, passed = heads[..., :width], heads[..., width:]
    first, second = turned.chunk(2, -1) if half else (turned[..., ::2], turned[..., 1::2])
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    one, two = first * cos - second * sin, second * cos + first * sin
    joined = torch.cat((one, two), -1) if half else torch.stack((one, two), -1).flatten(-2)
    return torch.cat((joined, passed), dim=-1).flatten(1).to(x.dtype)


def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> Pair:
    """Rotary embedding out of a (positions, cos | sin) cache; new tensors, inputs untouched.

    mrope_section None or all zeros: rope, positions (tokens,). Else one row of positions and one
    section each. rotary_mode: "half", or "interleave" (newer page: "interleaved").
    """
    check = Checker("npu_mrope")
    check.choice("rotary_mode", rotary_mode, ("half", "interleave", "interleaved"))
    check.choice("cache_mode", cache_mode, ("default", "interleave"))
    sections = list(mrope_section or [])
    check.require(len(sections) in (0, 3, 4), "mrope_section", sections, "3 or 4 sections")
    if not any(sections):
        sections = []
    interleave = cache_mode == "interleave"
    check.require(
        not interleave or len(sections) == 3,
        "cache_mode",
        cache_mode,
        "'default' for rope and for four sections",
    )
    _check_mrope(check, positions, query, key, cos_sin_cache, head_size, sections)
    if interleave and sections[1] != sections[2]:
        raise check.unimplemented("mrope_section", sections, "the page's slices assume [1] == [2]")
    cos, sin = cos_sin_cache.float()[positions.long()].chunk(2, dim=-1)
    if sections:
        cos, sin = (_merge_sections(table, sections, interleave) for table in (cos, sin))
    half = rotary_mode == "half"
    return _turn(query, head_size, cos, sin, half), _turn(key, head_size, cos, sin, half)


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """A * sigmoid(A) * B, A and B being the two halves of the input along dim (even there)."""
    check = Checker("npu_swiglu")
    check.dtype("input", input, FLOAT_TYPES)
    check.rank("input", input, *range(1, 9))
    check.require(-input.dim() <= dim < input.dim(), "dim", dim, f"an axis of {input.dim()}")
    check.require(
        input.size(dim) % 2 == 0, "input", tuple(input.shape), f"an even size along dim {dim}"
    )
    gate, up = input.float().chunk(2, dim=dim)
    return (gate * torch.sigmoid(gate) * up).to(input.dtype)


def _check_thresholds(check: Checker, logits: Tensor, p: Tensor | None, k: Tensor | None) -> None:
    """One value a row; p in [0, 1] of the logits' dtype, k int32 in [1, min(1024, V)]."""
    rows, width = logits.shape
    check.require(p is not None or k is not None, "p", "None beside k None", "p or k")
    if p is not None:
        check.same_dtype("p", p, "logits", logits)
        check.shape("p", p, (rows,), "one a row")
        check.require(bool(((p >= 0) & (p <= 1)).all()), "p", p.tolist(), "values in [0, 1]")
    if k is not None:
        check.dtype("k", k, (torch.int32,))
        check.shape("k", k, (rows,), "one a row")
        most = min(1024, width)
        check.require(
            bool(((k >= 1) & (k <= most)).all()), "k", k.tolist(), f"values in [1, {most}]"
        )


def npu_top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """First top-k, then top-p over what is left; what falls out becomes -inf.

    Stable ascending sort; values below the k-th largest go (so its ties all stay); softmax and
    cumsum from the smallest up; a cumulative probability <= 1 - p goes, but never the last
    element. The kept logits keep their value and place.
    """
    check = Checker("npu_top_k_top_p")
    check.dtype("logits", logits, FLOAT_TYPES)
    check.rank("logits", logits, 2)
    _check_thresholds(check, logits, p, k)
    ordered, places = logits.float().sort(dim=-1, stable=True)
    if k is not None:
        least = ordered.gather(1, (logits.size(1) - k.long()).unsqueeze(1))
        ordered = ordered.masked_fill(ordered < least, -torch.inf)
    if p is not None:
        summed = ordered.softmax(dim=-1).cumsum(dim=-1)
        dropped = summed <= 1 - p.float().unsqueeze(1)
        dropped[:, -1:] = False
        ordered = ordered.masked_fill(dropped, -torch.inf)
    return torch.empty_like(ordered).scatter_(1, places, ordered).to(logits.dtype)


def npu_format_cast(
    input: Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    """A copy with the same values: on a CPU, ND (2) and FRACTAL_NZ (29) are one."""
    check = Checker("npu_format_cast")
    check.choice("acl_format", acl_format, FORMATS, OTHER_FORMATS)
    given = {"customize_dtype": customize_dtype, "input_dtype": input_dtype}
    check.refuse(given, dict.fromkeys(given))
    return input.clone()


def npu_format_cast_(
    input: Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    """In place: the same tensor, unchanged."""
    check = Checker("npu_format_cast_")
    check.choice("acl_format", acl_format, FORMATS, OTHER_FORMATS)
    given = {"customize_dtype": customize_dtype, "input_dtype": input_dtype}
    check.refuse(given, dict.fromkeys(given))
    return input


def npu_prefetch(input: Tensor, dependency: Tensor | None, max_size: int, offset: int = 0) -> None:
    """No effect; max_size > 0, offset >= 0 and inside the weight."""
    check = Checker("npu_prefetch")
    check.require(max_size > 0, "max_size", max_size, "a size above 0")
    size = input.numel() * input.element_size()
    check.require(0 <= offset < max(size, 1), "offset", offset, f"an address within {size} bytes")
