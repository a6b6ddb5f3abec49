"""The kernels of experts in bfloat16 in CUDA C++: their own source on the CPU, against float64;
when they are chosen; their machine code."""

import itertools
import math

import pytest
import torch

from nanoactor.models.devices import open_device
from nanoactor.models.devices.cuda.kernels import experts_dense, nvrtc
from nanoactor.models.devices.cuda.kernels.expert_products import experts as expert_products
from nanoactor.models.devices.cuda.kernels.expert_products.experts import (
    VARIANTS,
    choose_variants,
    source,
)
from nanoactor.models.devices.cuda.kernels.experts import HopperKernels, TritonExperts
from nanoactor.models.devices.cuda.kernels.tiles import SHARED_LIMIT, Variant
from nanoactor.models.weights.linear import Dense, ExpertWeights
from tests.models.decode_step.hazards import early_reads_in
from tests.models.products_emulated import EmulatedExpertKernels, Hang, mapped

pytestmark = pytest.mark.drawn(2)


def later(*values):
    """A case for `make test-long`: each emulates a kernel for seconds."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(expert_products, "tensor_map", mapped)
    return EmulatedExpertKernels


def variants_of(rows):
    return Variant("GATHERED", rows, 2), Variant("WEIGHTED", rows, 2)


def ran(kernels, tokens, experts, chosen, hidden, inner, where="cpu", dtype=torch.bfloat16):
    """What the operator and float64 make of random numbers. One expert has no tokens."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    pair, down = drawn(experts, 2 * inner, hidden), drawn(experts, hidden, inner)
    pair, down = pair * hidden**-0.5, down * inner**-0.5
    x = drawn(tokens, hidden)
    likely = torch.rand(tokens, experts, generator=generator)
    likely[:, 1] = 0
    ids = likely.argsort(-1, descending=True)[:, :chosen].int()
    shares = likely.softmax(-1)[:, :chosen].contiguous()
    weights = ExpertWeights(Dense(pair.to(where)), Dense(down.to(where)))
    operator = TritonExperts(weights, False, HopperKernels(None, kernels))
    operator._max_pairs = 0
    found = operator(x.to(where), ids.to(where), shares.to(where)).cpu()
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token, (of, by) in enumerate(zip(ids.tolist(), shares.double(), strict=True)):
        for expert, share in zip(of, by, strict=True):
            gate, up = (pair[expert].double() @ x[token].double()).chunk(2)
            middle = (torch.nn.functional.silu(gate) * up).to(dtype)
            expected[token] += share * (down[expert].double() @ middle.double())
    return found, expected


def are_near(found, expected):
    """A row whose neighbor's numbers are stored is apart by its own size."""
    apart = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return bool((apart < 0.01).all())


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden", "inner", "rows"),
    [
        (60, 4, 2, 320, 192, 64),  # the last tiles of both products are not whole
        (150, 4, 3, 192, 128, 128),
        later(300, 3, 2, 256, 320, 128),
    ],
)
def test_experts(emulated, monkeypatch, tokens, experts, chosen, hidden, inner, rows):
    monkeypatch.setattr(expert_products, "choose_variants", lambda *_: variants_of(rows))
    kernels = emulated(2)
    assert are_near(*ran(kernels, tokens, experts, chosen, hidden, inner))
    assert tuple(kernels.ran) == variants_of(rows)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(chunk ^ row % 8) * 16", "chunk * 16"),
        later("output % 64 / 8 ^ slot % 8", "output % 64 / 8"),
        ("        ring.wait_empty();\n        if (thread", "        if (thread"),
        later("pair / a.chosen : 0", "pair : 0"),
        later("ring.wait_empty();\n        barrier_expect(bar", "barrier_expect(bar"),
        later("if (output < a.outputs / 2) put8", "put8"),
        later("ARRIVALS = THREADS + 1", "ARRIVALS = 1"),
        later("  await_products<0>();\n  previous.release();\n", ""),
        later("tile.expert * a.outputs + half_of", "half_of"),
        later("row_tile = first + at % rows", "row_tile = first"),
        ("size = a.band * a.output_tiles", "size = a.band * a.output_tiles + 1"),
        later("share = places.shares[h]", "share = places.shares[0]"),
    ],
)
def test_planted_bugs_are_found(emulated, monkeypatch, old, new):
    """With bands of two tiles of rows. Memory is NaN before it is written, and after its end."""
    monkeypatch.setattr(expert_products, "choose_variants", lambda *_: variants_of(64))
    monkeypatch.setattr(expert_products, "BAND", 2)
    whole, guards = torch.Tensor.new_empty, []

    def guarded(tensor, *shape, **options):
        if tensor.dtype != torch.bfloat16:
            return whole(tensor, *shape, **options)
        size = math.prod(shape)
        memory = torch.full((size + 40_000,), torch.nan, dtype=tensor.dtype)
        guards.append(memory[size:])
        return memory[:size].view(shape)

    for edits in ((), ((old, new),)):
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "new_empty", guarded)
            try:
                good = are_near(*ran(emulated(5, edits), 70, 4, 2, 320, 192))
            except Hang:
                good = False
        good = good and all(bool(guard.isnan().all()) for guard in guards)
        assert good == (not edits)


@pytest.mark.parametrize(
    ("experts", "inner", "small", "large"),
    [
        (128, 768, 32, 64),
        (128, 384, 32, 64),  # of two ranks
        (128, 192, 34, 68),
        (8, 768, None, 640),
    ],
)
def test_more_pairs_take_larger_tiles(experts, inner, small, large):
    """Numbers of pairs per expert from which tiles have 64 and 128 rows. Triton's tiles are
    smaller, so more multiprocessors have one."""
    rows = [
        chosen and chosen[0].tokens
        for pairs in range(2000)
        for chosen in [choose_variants(pairs * experts, experts, inner, 132)]
    ]
    sizes = [size for size, _ in itertools.groupby(rows)]
    assert sizes == ([None, 64, 128] if small else [None, 128])
    assert rows.index(128) == large
    if small:
        assert rows.index(64) == small


def test_other_experts_are_left_to_triton(emulated, monkeypatch, caplog):
    """Few tokens, other dtypes, and inputs that are not whole blocks."""
    calls = []

    def triton(x, weights, ids, topk_weights):
        calls.append(weights)
        return torch.zeros(*ids.shape, x.shape[1])

    monkeypatch.setattr(experts_dense, "grouped_gemms", triton)
    expert_products.log_fallback.cache_clear()
    kernels = emulated(2)
    cases = [
        (60, 128, torch.bfloat16), (200, 128, torch.float16), (200, 128, torch.float32),
        (200, 96, torch.bfloat16),
    ]  # fmt: skip
    for count, (tokens, inner, dtype) in enumerate(cases):
        ran(kernels, tokens, 4, 2, 128, inner, dtype=dtype)
        assert len(calls) == count + 1
    assert not kernels.ran
    assert [record.getMessage().partition("as long: ")[2] for record in caplog.records] == [
        "the dtype is torch.float16",
        "the inputs of a projection (128 or 96) are not a multiple of 64",
    ]


def test_other_gpus_have_none_of_these_kernels(monkeypatch, caplog):
    """And no warning, whatever the experts."""
    monkeypatch.setattr(experts_dense, "grouped_gemms", lambda x, *_: torch.zeros(len(x), 2, 128))
    ran(expert_products.optional_kernels((8, 0)), 60, 4, 2, 128, 96)
    assert not caplog.records


def test_kernels_fit_into_a_multiprocessor():
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    for variant in VARIANTS:
        assert variant.stages >= 4
        assert variant.shared_bytes <= SHARED_LIMIT


def test_kernels_compile_without_spills(compiler, tmp_path):
    made = nvrtc.compile_source(source(), "expert_products")
    assert made.registers == 168
    assert made.bytes_of("spill stores") == 0
    assert "serialized" not in made.report, "products wait for each other"
    assert not early_reads_in(made, tmp_path)


def test_rows_that_threads_have_written_are_fenced_before_they_are_multiplied():
    """Which the emulation cannot show."""
    for package, start in (
        ("expert_products", "begin_products("),
        ("fp8_products", "start_product("),
    ):
        file = nvrtc.MACHINE_SOURCE.parent / package / "product.cu"
        body = file.read_text().partition("DEVICE void add_up")[2]
        before, fence, after = body.partition("if (EPILOGUE == GATHERED) fence_copies();")
        assert fence
        assert "ring.wait_full();" in before[-100:]
        assert start in after[:300]


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "rows"), [(300, 64), (1100, 128)])
def test_experts_on_a_gpu(monkeypatch, tokens, rows):
    """Twice the same bits, near float64."""
    monkeypatch.setattr(expert_products, "choose_variants", lambda *_: variants_of(rows))
    device = open_device("cuda")
    device.prepare_thread(1)
    kernels = device._expert_kernels.bf16
    if kernels.get() is None:
        pytest.skip("not for this GPU")
    whole, launched = expert_products.Kernels.multiply, []

    def multiply(self, variant, *args):
        launched.append(variant)
        whole(self, variant, *args)

    monkeypatch.setattr(expert_products.Kernels, "multiply", multiply)
    found, expected = ran(kernels, tokens, 16, 4, 512, 320, device.torch_device)
    again, _ = ran(kernels, tokens, 16, 4, 512, 320, device.torch_device)
    assert tuple(launched) == 2 * variants_of(rows)
    assert are_near(found, expected)
    assert torch.equal(found, again)
