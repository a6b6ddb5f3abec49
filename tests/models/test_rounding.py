"""Kernels that round their results for the operator that reads them: the same numbers as those of
the kernels that only round, in Triton and in CUDA C++."""

import dataclasses

import pytest
import torch

from nanoactor.models.batch import KVCache
from nanoactor.models.devices import open_device
from nanoactor.models.devices.cuda.kernels import experts_fp8, fp8
from nanoactor.models.devices.cuda.kernels.fp8 import TritonFp8Linear, pack
from nanoactor.models.devices.cuda.kernels.fp8_products import launch
from nanoactor.models.devices.cuda.kernels.rounding import RoundingOperator, Rows, offer_rows
from nanoactor.models.weights.linear import ExpertWeights
from tests.models.batches import attention_batch
from tests.models.checkpoints import make_checkpoint
from tests.models.interpreted import InterpretedDevice
from tests.models.products_emulated import EmulatedKernels
from tests.models.test_decoder import Driver, Sequence
from tests.models.test_fp8 import moved, packed_matrix

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
LAYOUTS = pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    made = open_device("cuda") if request.param == "cuda" else InterpretedDevice()
    made.prepare_thread(1)
    return made


class RecordingOperator(RoundingOperator):
    """An operator that only keeps what it is given."""

    def __init__(self, block, swizzled, slots=None):
        self.block, self.swizzled, self.slots = block, swizzled, slots

    def memory_for(self, x):
        blocks, slots = x.shape[1] // self.block, self.slots or len(x)
        made = (
            Rows.empty_swizzled(blocks, slots, x.device)
            if self.swizzled
            else Rows.empty(blocks, self.block, slots, x.device)
        )
        made.values.view(torch.uint8).fill_(0x7F)  # NaN
        made.scales.fill_(-1.0)
        return made

    def numbers(self, x):
        """What was given for `x`: e4m3 (rows, inputs), and scales (blocks, rows)."""
        rows = self.take(x)
        assert rows is not None
        values, count = rows.values, len(x)
        assert (rows.scales[:, count:] == -1).all()
        if self.swizzled:
            assert (values.view(torch.uint8)[:, count:] == 0x7F).all()
            chunks = values.view(torch.uint8)[:, :count].unflatten(-1, (8, 16))
            slots = torch.arange(count, device=x.device)[:, None]
            order = torch.arange(8, device=x.device) ^ slots % 8
            placed = torch.take_along_dim(chunks, order[None, :, :, None], 2)
            values = placed.flatten(2).transpose(0, 1).flatten(1)
        return values[:count].view(torch.uint8).cpu(), rows.scales[:, :count].cpu()


def own(x, block):
    """What an operator's own rounding makes of `x`."""
    weights = packed_matrix(1, 16, x.shape[1], block=block)
    rows = fp8.quantize(x.contiguous(), pack(moved(weights, x.device)))
    return rows.values.view(torch.uint8).cpu(), rows.scales.cpu()


def check(consumer, x, block):
    for found, expected in zip(consumer.numbers(x), own(x, block), strict=True):
        assert torch.equal(found, expected)


def drawn(device, *shape, dtype, seed=1):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(device.torch_device, dtype)


@DTYPES
@pytest.mark.parametrize(
    ("size", "block", "swizzled", "slots"),
    [
        (320, 64, False, None),  # no power of two
        (96, 32, False, None),
        (128, 128, False, None),
        (384, 128, True, 64),
        (256, 128, True, 64),
    ],
)
def test_a_norm_rounds_for_its_consumer(device, dtype, size, block, swizzled, slots):
    x, residual = drawn(device, 2, 11, size, dtype=dtype)
    x[3] = residual[3] = 0
    weight = drawn(device, size, dtype=dtype)
    consumer = RecordingOperator(block, swizzled, slots)
    plain = device.rms_norm(x, weight, 1e-6)
    found = device.rms_norm(x, weight, 1e-6, consumer)
    assert torch.equal(found, plain)
    check(consumer, found, block)
    plain, total = device.add_rms_norm(x, residual, weight, 1e-6)
    found, total_again = device.add_rms_norm(x, residual, weight, 1e-6, consumer)
    assert torch.equal(found, plain)
    assert torch.equal(total, total_again)
    check(consumer, found, block)


@pytest.mark.drawn(3)
@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (5, 1)])
@pytest.mark.parametrize(("dim", "swizzled"), [(32, False), (128, True), (128, False)])
@pytest.mark.parametrize("places", [1, 1000], ids=["many rows", "few rows"])
def test_attention_rounds_for_its_consumer(device, dtype, heads, kv_heads, dim, swizzled, places):
    """Rows of one chunk and of several, twice: the chunks are counted anew each time. Chunks of few
    rows are added up by a kernel of its own."""
    contexts, size = [1, 64, 65, 200, 130, 400], 64
    blocks = [-(-context // size) for context in contexts]
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(2)).split(blocks)
    shape = sum(blocks), size, kv_heads, dim
    cache = KVCache(*drawn(device, 2, *shape, dtype=dtype))
    tables, sizes = [part.tolist() for part in order], (heads, kv_heads, dim)
    batch = attention_batch(device, tables, [], contexts, sizes, size)
    assert (batch.plan.first_items.diff() > 1).any()
    splits = dataclasses.replace(batch.plan, chunks_per_wave=places)
    batch = dataclasses.replace(batch, plan=splits)
    consumer = RecordingOperator(dim, swizzled, slots=64)
    for seed in range(2):
        queries = drawn(device, len(contexts), heads, dim, dtype=dtype, seed=seed)
        plain = device.attention(queries, cache, batch, dim**-0.5)
        found = device.attention(queries, cache, batch, dim**-0.5, consumer)
        assert torch.equal(found, plain)
        check(consumer, found.flatten(1), dim)
        assert not batch.plan.arrivals.any()


def test_attention_does_not_round_what_its_consumer_cannot_use(device):
    """Prompts, and blocks that are not heads."""
    shape = (3, 64, 2, 32)
    cache = KVCache(*drawn(device, 2, *shape, dtype=torch.float32))
    for prefills, decodes, block in (([(5, 5)], [70], 32), ([], [5, 70], 64)):
        batch = attention_batch(device, [[0], [1, 2]], prefills, decodes, (4, 2, 32), 64)
        queries = drawn(device, 5 * len(prefills) + len(decodes), 4, 32, dtype=torch.float32)
        consumer = RecordingOperator(block, swizzled=False)
        device.attention(queries, cache, batch, 0.2, consumer)
        assert consumer._given is None


@pytest.mark.parametrize("tokens", [3, 40, 70])
def test_operators_take_what_was_rounded_for_them(device, tokens, monkeypatch):
    """And round nothing themselves; but do if they are called with something else."""
    weights = packed_matrix(3, 48, 64, dtype=torch.bfloat16)
    linear = device.linear(moved(weights, device.torch_device))
    pair, down = (packed_matrix(seed, 4, *shape) for seed, shape in ((1, (64, 64)), (2, (64, 32))))
    experts = device.experts(
        ExpertWeights(moved(pair, device.torch_device), moved(down, device.torch_device))
    )
    ids = torch.arange(tokens * 2, device=device.torch_device, dtype=torch.int32).view(-1, 2) % 4
    shares = torch.full((tokens, 2), 0.5, device=device.torch_device)
    calls = [(linear, ())]
    if tokens > 16:
        calls.append((experts, (ids, shares)))
    for operator, rest in calls:
        x = drawn(device, tokens, 64, dtype=torch.bfloat16)
        expected, other = operator(x, *rest), operator(-x, *rest)
        count = counted(monkeypatch)
        normed = device.rms_norm(x, torch.ones_like(x[0]), 1e-6)
        wanted = operator(normed, *rest)
        before = len(count)
        normed = device.rms_norm(x, torch.ones_like(x[0]), 1e-6, operator)
        assert torch.equal(operator(normed, *rest), wanted)
        assert len(count) == before + (before - 1)  # one less than without
        assert torch.equal(operator(x, *rest), expected)
        device.rms_norm(x, torch.ones_like(x[0]), 1e-6, operator)
        assert torch.equal(operator(-x, *rest), other)
        monkeypatch.undo()


def counted(monkeypatch):
    """A list that grows whenever an operator rounds rows."""
    rounding, calls = fp8.quantize, []

    def counting(*args):
        calls.append(args)
        return rounding(*args)

    for module in (fp8, experts_fp8):
        monkeypatch.setattr(module, "quantize", counting)
    return calls


def test_a_matrix_with_padding_rounds_its_own_input(device):
    weights = packed_matrix(3, 48, 80, offset=16, dtype=torch.bfloat16)
    operator = device.linear(moved(weights, device.torch_device))
    assert isinstance(operator, TritonFp8Linear)
    x = drawn(device, 40, 80, dtype=torch.bfloat16)
    assert offer_rows(operator, x) is None
    assert offer_rows(None, x) is None


@pytest.mark.parametrize("place", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_norms_round_as_the_kernel_in_cuda_does(place):
    device, kernels = InterpretedDevice(), EmulatedKernels(1)
    if place == "cuda":
        device = open_device("cuda")
        device.prepare_thread(1)
        kernels = device._fp8_products.get()
        if kernels is None:
            pytest.skip("not a Hopper GPU")
    weights = moved(packed_matrix(1, 64, 512, block=128, group=64), device.torch_device)
    x, consumer = (
        drawn(device, 70, 512, dtype=torch.bfloat16),
        RecordingOperator(128, True, slots=128),
    )
    x[5] = 0
    x = device.rms_norm(x, torch.ones_like(x[0]), 1e-6, consumer)
    rows = launch.quantize(kernels, x, pack(weights), slots=128)
    other = RecordingOperator(128, True)
    other.give(x, Rows(rows.values[:, :70].contiguous(), rows.scales[:, :70].contiguous()))
    for found, expected in zip(consumer.numbers(x), other.numbers(x), strict=True):
        assert torch.equal(found, expected)


def test_a_layer_passes_the_consumers_of_norms_and_attention(tmp_path, monkeypatch):
    """Inputs of attention and of its output projection are rounded before; not those of the
    feed-forward part, whose operator is made of several where there are no kernels for it."""
    options = dict(hidden_size=64, head_dim=32, num_attention_heads=4, num_key_value_heads=2)
    make_checkpoint(tmp_path, fp8_blocks=(16, 32), **options, intermediate_size=96)
    monkeypatch.setattr("tests.models.test_decoder.open_device", lambda _: InterpretedDevice())
    driver, sequence = Driver(tmp_path), Sequence(torch.tensor([3, 77, 5]))
    driver.step([(sequence, 2)])
    calls = counted(monkeypatch)
    driver.step([], [sequence])
    assert len(calls) == 2 * len(driver.caches)
