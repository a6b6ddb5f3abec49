"""Bit masks against NumPy's own unpacking, for whole vocabularies and for ranks' parts of one."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nanoactor.models.sampling.token_masks import TokenMasks


@st.composite
def parts(draw):
    """Words of some rows, and which ids of them a rank has: (words, first id, ids)."""
    rows, words = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    first = draw(st.integers(0, 32 * words - 1))
    ids = draw(st.integers(1, 32 * words - first))
    return draw(arrays(np.int32, (rows, words))), first, ids


@given(parts())
def test_what_has_no_bit_is_minus_infinity(part):
    words, first, ids = part
    logits = torch.randn(len(words), ids, dtype=torch.bfloat16)
    masks = TokenMasks(torch.device("cpu"))
    found = masks.apply(logits, torch.from_numpy(words), first)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, first : first + ids]
    expected = np.where(bits == 1, logits.float().numpy(), -np.inf)
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), expected)
