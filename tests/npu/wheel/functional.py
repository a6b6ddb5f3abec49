"""Kernels of operators that torchair's passes put in place of those that the engine calls."""

import importlib

import torch

from tests.npu.reference import KERNELS


def write_functional(key, value, key_cache, value_cache, slot_mapping, **rest):
    """Copies of the caches, written."""
    caches = key_cache.clone(), value_cache.clone()
    KERNELS["npu_scatter_pa_kv_cache"](key, value, *caches, slot_mapping, **rest)
    return caches


def attend_by_tensors(*args, actual_seq_lengths=None, actual_seq_lengths_kv=None, **rest):
    """torchair's attention, whose lengths are tensors."""
    for name, lengths in (
        ("actual_seq_lengths", actual_seq_lengths),
        ("actual_seq_lengths_kv", actual_seq_lengths_kv),
    ):
        rest[name] = None if lengths is None else lengths.tolist()
    return KERNELS["npu_fused_infer_attention_score"](*args, **rest)


def implement():
    """For the CPU; keep what is returned."""
    importlib.import_module("torchair.ops._npu_fused_infer_attention_score")
    npu, air = torch.library.Library("npu", "IMPL"), torch.library.Library("air", "IMPL")
    npu.impl("npu_scatter_pa_kv_cache_functional", write_functional, "CPU")
    air.impl("npu_fused_infer_attention_score", attend_by_tensors, "CPU", allow_override=True)
    return [npu, air]
