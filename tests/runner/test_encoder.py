"""No image takes more memory than what is reckoned with at the start."""

import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanoactor.runner.batch.inputs import EncodeTask
from nanoactor.runner.open import open_executor
from tests.engine.harness import rank_config
from tests.models.checkpoints import make_checkpoint


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made within it that still live, and the most there were."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs)):  # weights are nothing new
            if isinstance(leaf, torch.Tensor) and not leaf.is_mkldnn:
                self._known.add(leaf.untyped_storage().data_ptr())
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_mkldnn:
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage):
        at, size = storage.data_ptr(), storage.nbytes()
        if at not in self._known and size:
            self._known.add(at)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, at, size)

    def _forget(self, at, size):
        self._known.discard(at)
        self.now -= size


def peak_of(work):
    with LiveBytes() as live, torch.inference_mode():
        work()
    return live.peak


@pytest.fixture(scope="module", params=[16, 64], ids=["in parts", "at once"])
def encoder(request, tmp_path_factory):
    """Of which the largest images have 40 tokens."""
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, family="Qwen3VL", num_hidden_layers=3)
    config = rank_config(
        directory,
        device="cpu",
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=request.param,
        max_model_len=256,
        num_kv_blocks=40,
    )
    return open_executor(config)._model.encoder


def encode(encoder, frames, height, width):
    side = 8
    pixels = np.zeros((frames, height * side, width * side, 3), np.uint8)
    units = encoder.units(pixels)
    places = np.arange(units.total_rows, dtype=np.int64)
    step = max(1, encoder._budget // units.cost(encoder._budget))
    for first in range(0, units.count, step):
        count = min(step, units.count - first)
        encoder.run(EncodeTask(pixels, 7, first, count, places))


def test_no_image_takes_more_than_the_one_that_is_tried_at_the_start(encoder):
    largest = encoder.max_rows(256)
    assert largest in (40, 64)  # a step may encode 64 rows of a video
    reckoned = peak_of(lambda: encoder.warm_up(largest))
    assert reckoned > 50_000
    shapes = [
        (1, 1, 40),
        (1, 40, 1),
        (1, 5, 8),
        (1, 8, 5),
        (1, 4, 10),
        (2, 5, 6),
        (8, 1, 7),
        (9, 1, 7),
    ]
    for shape in shapes:
        taken = peak_of(lambda shape=shape: encode(encoder, *shape))
        assert taken <= reckoned, shape
    assert not encoder._partial


def test_a_larger_one_would_take_more(encoder):
    """So the test above would see it."""
    reckoned = peak_of(lambda: encoder.warm_up(encoder.max_rows(256)))
    assert peak_of(lambda: encode(encoder, 1, 9, 10)) > reckoned
