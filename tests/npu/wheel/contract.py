"""What documents demand of the operators that the device calls and the wheel's shape functions do
not check: a mode that looks at each call, whether its tensors have values or not.

Written by the device's own authors from the documents; the reference kernels have checks of their
own, written by someone else.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

HALF = (torch.float16, torch.bfloat16)
MASK = 2048
HEADS_PACKED = (64, 128, 192)
HEADS_ROTATED = (64, 128)
LARGEST_BLOCK = 512


class ContractBroken(AssertionError):
    """A call that a document forbids."""


def demand(held, what):
    if not held:
        raise ContractBroken(what)


def values(tensor):
    """As a list, where there are any."""
    fake = isinstance(tensor, FakeTensor) or tensor.device.type == "meta"
    return None if fake else tensor.flatten().tolist()


def dense(**tensors):
    for name, tensor in tensors.items():
        demand(tensor.is_contiguous(), f"{name} is not contiguous")


def same_type(**tensors):
    kinds = {tensor.dtype for tensor in tensors.values()}
    demand(len(kinds) == 1, f"{', '.join(tensors)} have different types")
    demand(kinds <= set(HALF), f"{kinds.pop()} is no 16-bit type")


def rms_norm(input, gamma, epsilon):
    dense(input=input, gamma=gamma)
    same_type(input=input, gamma=gamma)
    demand(gamma.shape == input.shape[-1:], "gamma has another size than the last dimension")


def add_rms_norm(x1, x2, gamma, epsilon):
    dense(x1=x1, x2=x2)
    demand(x1.shape == x2.shape, "x1 and x2 have different shapes")
    same_type(x1=x1, x2=x2)
    rms_norm(x1, gamma, epsilon)


def swiglu(input, dim):
    dense(input=input)
    demand(input.shape[dim] % 2 == 0, "the dimension cannot be halved")


def rotary_pair(query, key, cos, sin, layout, rotary_mode):
    dense(query=query, key=key, cos=cos, sin=sin)
    same_type(query=query, key=key, cos=cos, sin=sin)
    demand(layout == "BSND" and rotary_mode == "half", "another layout or mode")
    demand(query.shape[-1] in HEADS_ROTATED, f"head_dim {query.shape[-1]}")
    wanted = (query.shape[0], query.shape[1], 1, query.shape[3])
    demand(tuple(cos.shape) == tuple(sin.shape) == wanted, f"cos or sin is not {wanted}")


def rotary_one(input, r1, r2, rotary_mode, rotate):
    dense(input=input, r1=r1, r2=r2)
    demand(input.dtype == r1.dtype == r2.dtype, "different types")  # float32 may be: a tower's
    demand(input.shape[-1] % 2 == 0 and input.shape[-1] < 896, f"head_dim {input.shape[-1]}")
    wanted = (1, input.shape[1], 1, input.shape[3])
    demand(tuple(r1.shape) == tuple(r2.shape) == wanted, f"cos or sin is not {wanted}")


def write(key, value, key_cache, value_cache, slot_mapping, cache_mode, **rest):
    demand(cache_mode == "Norm", f"cache_mode {cache_mode} is not the plain layout")
    dense(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    same_type(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    demand(key_cache.dim() == 4 and key.dim() == 3, "wrong ranks")
    demand(key.shape[1:] == key_cache.shape[2:], "heads differ from the cache's")
    demand(slot_mapping.dtype in (torch.int32, torch.int64), "slots are no whole numbers")
    demand(tuple(slot_mapping.shape) == (len(key),), "not one slot for each token")
    slots = values(slot_mapping)
    if slots is not None:
        demand(len(set(slots)) == len(slots), "a slot twice")
        most = key_cache.shape[0] * key_cache.shape[1]
        demand(all(0 <= slot < most for slot in slots), "a slot outside of the cache")


def attention(given):
    query, key, value = given["query"], given["key"], given["value"]
    dense(query=query, key=key, value=value)
    same_type(query=query, key=key, value=value)
    packed = given["input_layout"] == "TND"
    demand(packed or given["input_layout"] == "BNSD", f"layout {given['input_layout']}")
    heads, kv_heads = given["num_heads"], given["num_key_value_heads"]
    demand(heads == query.shape[1], f"num_heads {heads}, query has {query.shape[1]}")
    demand(kv_heads > 0 and heads % kv_heads == 0, "heads are no multiple of key-value heads")
    size = query.shape[-1]
    demand(not packed or size in HEADS_PACKED, f"head_dim {size} in TND")
    demand(size % 16 == 0 and size <= 512, f"head_dim {size}")
    demand(key.dim() == 3 and key.shape == value.shape, "the cache is not paged")
    demand(key.shape[2] == kv_heads * size <= 65535, "key-value heads do not fill the cache's rows")
    lengths = given["actual_seq_lengths"]
    one = not packed and query.shape[2] == 1
    batch = len(lengths) if packed else len(query)
    pages(given, batch, one)
    new = queries(given, packed, one, batch)
    contexts(given, batch, new)
    masked(given, one)


def pages(given, batch, one):
    table, size = given["block_table"], given["block_size"]
    demand(table is not None, "no block table")
    demand(table.dtype == torch.int32, f"block table in {table.dtype}")
    demand(table.dim() == 2 and len(table) == batch, f"{len(table)} rows of blocks, batch {batch}")
    dense(block_table=table)
    demand(size == given["key"].shape[1], "block_size is not the cache's")
    step = 16 if one else 128
    demand(size % step == 0 and 0 < size <= LARGEST_BLOCK, f"block_size {size}")


def queries(given, packed, one, batch):
    """How many tokens each row has."""
    ends = given["actual_seq_lengths"]
    if packed:
        demand(ends is not None and list(ends) == sorted(ends), "lengths of queries do not add up")
        demand(ends[-1] == len(given["query"]), "the last query's end is not the number of tokens")
        return [end - before for before, end in zip([0, *ends], ends, strict=False)]
    if one:
        return [1] * batch
    demand(ends is not None and len(ends) == batch, "not one length for each row")
    demand(all(0 < n <= given["query"].shape[2] for n in ends), "a length beyond the padding")
    return list(ends)


def contexts(given, batch, new):
    """Each row's own, not cumulative: a block table has no axis to add up along."""
    found = given["actual_seq_lengths_kv"]
    demand(found is not None and len(found) == batch, "not one context for each row")
    most = given["block_table"].shape[1] * given["block_size"]
    demand(all(n <= most for n in found), "a context beyond its blocks (or cumulative)")
    demand(all(n >= own for n, own in zip(found, new, strict=True)), "fewer keys than queries")


def masked(given, one):
    mask, mode = given["atten_mask"], given["sparse_mode"]
    if one and mode == 0:
        demand(mask is None, "a mask where every position is seen")
        return
    demand(mode == 3, f"sparse_mode {mode} is not causal from the right")
    demand(mask is not None and tuple(mask.shape) == (MASK, MASK), "no mask of 2048 x 2048")
    demand(mask.dtype in (torch.int8, torch.uint8, torch.bool), f"a mask in {mask.dtype}")
    dense(atten_mask=mask)


def segments(given):
    query, key, value = given["query"], given["key"], given["value"]
    dense(query=query, key=key, value=value)
    same_type(query=query, key=key, value=value)
    demand(given["input_layout"] == "TND", f"layout {given['input_layout']}")
    demand(query.dim() == 3 and query.shape == key.shape == value.shape, "not one shape")
    demand(given["head_num"] == query.shape[1] <= 256, f"head_num {given['head_num']}")
    demand(query.shape[2] <= 768, f"head_dim {query.shape[2]}")
    ends = given["actual_seq_qlen"]
    demand(ends is not None and ends == given["actual_seq_kvlen"], "keys are not the queries'")
    demand(0 < len(ends) <= 1024 and list(ends) == sorted(ends), "lengths do not add up")
    demand(ends[-1] == len(query) <= 1 << 20, "the last end is not the number of tokens")
    demand(given["atten_mask"] is None, "a mask where every position is seen")


def cut(logits, p, k):
    demand(p is not None or k is not None, "neither p nor k")
    if p is not None:
        demand(p.dtype == logits.dtype and p.shape == logits.shape[:1], "p is not like the logits")
    if k is not None:
        demand(k.dtype == torch.int32 and k.shape == logits.shape[:1], "k is not int32 (rows,)")
        most = min(1024, logits.shape[1])
        demand(all(1 <= each <= most for each in values(k) or ()), "k beyond 1024, or none")


def route(given):
    x, ids = given["x"], given["expert_idx"]
    dense(x=x, expert_idx=ids)
    demand(
        x.dim() == ids.dim() == 2 and len(x) == len(ids), "not one row of experts for each token"
    )
    demand(x.dtype in HALF and ids.dtype == torch.int32, f"{x.dtype} and {ids.dtype}")
    demand(given["active_num"] == ids.numel(), f"active_num {given['active_num']}")
    demand(given["drop_pad_mode"] == 0 and given["quant_mode"] == -1, "tokens dropped or packed")
    demand(given["expert_tokens_num_flag"] and given["expert_tokens_num_type"] == 1, "no counts")
    first, last = given["active_expert_range"]
    demand(0 <= first < last <= given["expert_num"] <= 10240, f"experts {first} to {last}")
    demand(given["row_idx_type"] in (0, 1), f"row_idx_type {given['row_idx_type']}")
    found = values(ids)
    demand(all(0 <= n < given["expert_num"] for n in found or ()), "an expert that there is not")


def groups(given):
    (x,), (weight,), counts = given["x"], given["weight"], given["group_list"]
    dense(x=x)
    same_type(x=x, weight=weight)
    demand(x.dim() == 2 and weight.dim() == 3, "x is no matrix, or weight no stack of them")
    demand(x.shape[1] == weight.shape[1], "inputs differ")
    turned = weight.transpose(1, 2).is_contiguous()
    demand(turned or weight.is_contiguous(), "weights are neither as they are nor transposed")
    last = weight.shape[1] if turned else weight.shape[2]
    demand(max(x.shape[1], last) < 65536, "rows of 65,536 numbers or more")
    demand(given["split_item"] in (2, 3) and given["group_type"] == 0, "not groups of rows")
    demand(counts.dtype == torch.int64 and tuple(counts.shape) == weight.shape[:1], "groups")
    demand(given["group_list_type"] == 1 and 1 < len(counts) <= 1024, "not sizes of groups")
    found = values(counts)
    demand(found is None or sum(found) == len(x), "sizes do not add up to the rows")


RULES = {
    "npu_rms_norm": rms_norm,
    "npu_add_rms_norm": add_rms_norm,
    "npu_swiglu": swiglu,
    "npu_apply_rotary_pos_emb": rotary_pair,
    "npu_rotary_mul": rotary_one,
    "npu_scatter_pa_kv_cache": write,
    "npu_fused_infer_attention_score": lambda **given: attention(given),
    "npu_fusion_attention": lambda **given: segments(given),
    "npu_top_k_top_p": cut,
    "npu_moe_init_routing_v2": lambda **given: route(given),
    "npu_grouped_matmul": lambda **given: groups(given),
}


def check(function, args, kwargs):
    """Raise `ContractBroken` for a call that a document forbids; returns the operator's name."""
    name = function._schema.name.partition("::")[2]
    names = [argument.name for argument in function._schema.arguments]
    defaults = {a.name: a.default_value for a in function._schema.arguments}
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    given = {key: value for key, value in given.items() if key not in ("out", "workspace")}
    try:
        RULES[name](**given)
    except ContractBroken as broken:
        raise ContractBroken(f"{name}: {broken}") from None
    return name


class ContractChecker(TorchDispatchMode):
    """Looks at every call, and counts them."""

    def __init__(self):
        super().__init__()
        self.checked = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func.namespace == "npu" and func._schema.name.partition("::")[2] in RULES:
            self.checked.append(check(func, args, kwargs))
        return func(*args, **kwargs)
