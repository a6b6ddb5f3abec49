"""The kernels of FP8 products in CUDA C++: their own source on the CPU, against float64; which one
a product takes; their machine code."""

import dataclasses
import itertools
import types

import pytest
import torch

from nanoactor.models.devices import open_device
from nanoactor.models.devices.cuda.kernels import nvrtc, tiles
from nanoactor.models.devices.cuda.kernels.expert_products import experts as expert_products
from nanoactor.models.devices.cuda.kernels.experts import HopperKernels, TritonExperts
from nanoactor.models.devices.cuda.kernels.fp8 import TritonFp8Linear, pack
from nanoactor.models.devices.cuda.kernels.fp8_products import experts as grouped_experts
from nanoactor.models.devices.cuda.kernels.fp8_products import launch, linear, mlp
from nanoactor.models.devices.cuda.kernels.fp8_products.linear import HopperFp8Linear
from nanoactor.models.devices.cuda.kernels.fp8_products.mlp import HopperMLP, mlp_of
from nanoactor.models.devices.cuda.kernels.fp8_products.variants import (
    TRITON_MAX_MLP_ROWS,
    TRITON_MAX_ROWS,
    VARIANTS,
    Division,
    choose_division,
    choose_swiglu_variant,
    choose_variants,
    source,
)
from nanoactor.models.devices.cuda.kernels.tiles import SHARED_LIMIT, Args, Variant
from nanoactor.models.weights.linear import ExpertWeights
from tests.models.decode_step.hazards import early_reads_in
from tests.models.products_emulated import EmulatedKernels, Hang, mapped
from tests.models.test_fp8 import assert_near, moved, packed_matrix, rounded

pytestmark = pytest.mark.drawn(2)


def later(*values):
    """A case for `make test-long`: each emulates a kernel for seconds."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.fixture(autouse=True)
def no_fallback_is_logged():
    """Each test sees all warnings."""
    launch.log_fallback.cache_clear()
    mlp._log_fallback.cache_clear()


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(launch, "tensor_map", mapped)
    return EmulatedKernels


def multiplied(kernels, tokens, outputs, inputs, offset, group, bias=True):
    """What the operator and float64 make of random numbers."""
    weights = packed_matrix(
        7, outputs, inputs, block=128, offset=offset, group=group, dtype=torch.bfloat16
    )
    generator = torch.Generator().manual_seed(1)
    if bias:
        added = torch.randn(outputs, generator=generator).bfloat16()
        weights = dataclasses.replace(weights, bias=added)
    x = torch.randn(tokens, inputs, generator=generator).bfloat16()
    x[0, : inputs // 2] = 0
    x[-1] *= 1000
    found = HopperFp8Linear(weights, kernels)(x)
    plain = dataclasses.replace(weights, dtype=torch.float32, bias=None).dequantize().double()
    expected = rounded(x, 128, offset) @ plain.T
    if bias:
        expected += weights.bias.double()
    return found, expected, weights, x


def divided(variant, tokens, outputs, cluster, processors=99):
    row_tiles = -(-tokens // variant.tokens)
    output_tiles = -(-outputs // variant.outputs)
    tiles = row_tiles * output_tiles
    blocks = cluster * tiles if cluster > 1 else min(processors, tiles)
    return Division(variant, row_tiles, output_tiles, cluster, blocks)


@pytest.mark.parametrize(
    ("variant", "tokens", "outputs", "inputs", "offset", "group", "cluster", "processors"),
    [
        (Variant("LINEAR", 64, 1), 30, 48, 200, 0, 64, 1, 2),
        (Variant("LINEAR", 64, 1), 70, 144, 384, 64, 128, 2, 8),
        (Variant("LINEAR", 64, 1), 67, 128, 9216, 0, 128, 2, 4),  # more than 32 blocks of inputs
        (Variant("LINEAR", 64, 1), 9, 300 - 12, 640, 0, 64, 3, 9),  # unequal parts
        (Variant("LINEAR", 64, 1), 33, 136, 1024, 0, 64, 8, 16),
        (Variant("LINEAR", 128, 1), 130, 128, 256, 0, 128, 1, 1),
        (Variant("LINEAR", 128, 1), 20, 144, 384, 0, 64, 3, 6),
        (Variant("LINEAR", 128, 2), 140, 272, 256, 0, 64, 2, 8),
        (Variant("LINEAR", 192, 1), 200, 160, 256, 0, 64, 2, 8),
    ],
)
def test_products(
    emulated, monkeypatch, variant, tokens, outputs, inputs, offset, group, cluster, processors
):
    division = divided(variant, tokens, outputs, cluster, processors)
    monkeypatch.setattr(linear, "choose_division", lambda *_: division)
    monkeypatch.setattr(linear, "TRITON_MAX_ROWS", 0)
    kernels = emulated(processors)
    found, expected, weights, x = multiplied(kernels, tokens, outputs, inputs, offset, group)
    assert kernels.ran == [variant]
    assert_near(found, expected, weights, x)


def ran_experts(kernels, tokens, experts, chosen, hidden, inner, where="cpu"):
    """What the operator, float64 with rounded activations, and float64 make of random numbers. One
    expert has no tokens."""
    dtype = torch.bfloat16
    pair = packed_matrix(1, experts, 2 * inner, hidden, block=128, group=64, dtype=dtype)
    down = packed_matrix(2, experts, hidden, inner, block=128, group=128, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    likely = torch.rand(tokens, experts, generator=generator)
    likely[:, 1] = 0
    ids = likely.argsort(-1, descending=True)[:, :chosen].int()
    shares = likely.softmax(-1)[:, :chosen].contiguous()
    weights = ExpertWeights(moved(pair, where), moved(down, where))
    operator = TritonExperts(weights, True, HopperKernels(kernels, None))
    operator._max_pairs = 0
    found = operator(x.to(where), ids.to(where), shares.to(where)).cpu()
    both, back = (
        dataclasses.replace(one, dtype=torch.float32).dequantize().double() for one in (pair, down)
    )
    sums, plain = torch.zeros(2, tokens, hidden, dtype=torch.float64)
    for token, (of, by) in enumerate(zip(ids.tolist(), shares.double(), strict=True)):
        for expert, share in zip(of, by, strict=True):
            for total, how in ((sums, rounded), (plain, lambda numbers, *_: numbers.double())):
                gate, up = (both[expert] @ how(x[token], 128, 0)).chunk(2)
                middle = (torch.nn.functional.silu(gate) * up).to(dtype)
                total[token] += share * (back[expert] @ how(middle, 128, 0))
    return found, sums, plain


def are_near(found, sums, plain):
    apart = (found - sums).norm()
    return bool(apart < 0.02 * sums.norm() and apart < 0.6 * (found - plain).norm())


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden", "inner", "rows"),
    [(60, 4, 2, 144, 256, 64), (150, 4, 3, 256, 128, 128)],
)
def test_experts(emulated, monkeypatch, tokens, experts, chosen, hidden, inner, rows):
    wanted = Variant("GATHERED", rows, 2), Variant("WEIGHTED", rows, 2)
    monkeypatch.setattr(grouped_experts, "choose_variants", lambda *_: wanted)
    monkeypatch.setattr(grouped_experts, "BAND", 2)
    kernels = emulated(2)
    assert are_near(*ran_experts(kernels, tokens, experts, chosen, hidden, inner))
    assert tuple(kernels.ran) == wanted


@pytest.mark.parametrize(
    ("old", "new", "cluster"),
    [
        later("ring.wait_empty();", "", 2),
        ("barrier_passed(full + 8 * at, parity)", "true", 2),
        later("shuffle(held[m][p], turn)", "shuffle(held[m][p], 0)", 2),
        ("  sync_cluster<THREADS>(a.cluster);\n#pragma", "#pragma", 2),
        later("  sync_cluster<THREADS>(a.cluster);  // other", "  // other", 2),
        later("a.blocks * (rank + 1) / a.cluster", "a.blocks * rank / a.cluster + 7", 2),
        later("get_cluster16(mine + n * THREADS * 16, block)", "get_cluster16(mine + n, rank)", 2),
        later("(lane / 2 ^ slot % 8)", "(lane / 2)", 2),
        later("output + 1 < outputs && ((long)y & 3) == 0", "true", 2),
        later("output + 3 < outputs && ((long)y & 7) == 0", "true", 1),
    ],
)
def test_planted_bugs_of_products_are_found(emulated, monkeypatch, old, new, cluster):
    """Two divided products of a matrix that ends inside a tile."""
    variant = Variant("LINEAR", 64, 1)
    division = divided(variant, 70, 144, cluster)
    monkeypatch.setattr(linear, "choose_division", lambda *_: division)
    kernels = emulated(8, ((old, new),))
    weights = packed_matrix(7, 144, 5120, block=128, group=64, dtype=torch.bfloat16)
    x = torch.randn(70, 5120, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = dataclasses.replace(weights, dtype=torch.float32).dequantize().double()
    operator = HopperFp8Linear(weights, kernels)
    with pytest.raises((Hang, AssertionError)):
        for values in (x.flip(0), x):
            guarded = torch.full((72, 144), 7.0, dtype=torch.bfloat16)
            monkeypatch.setattr(torch.Tensor, "new_empty", lambda *_, y=guarded: y[:70])
            assert_near(operator(values), rounded(values, 128, 0) @ whole.T, weights, values)
            assert bool((guarded[70:] == 7).all())


def ran_mlp(kernels, tokens, hidden, inner, where="cpu"):
    """What the operator, float64 with rounded activations, and float64 make of random numbers."""
    dtype = torch.bfloat16
    pair = packed_matrix(1, 2 * inner, hidden, block=128, group=64, dtype=dtype)
    down = packed_matrix(2, hidden, inner, block=128, group=128, dtype=dtype)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(3)).to(dtype)

    def fail(_):
        raise AssertionError

    operators = (linear.linear_of(moved(one, where), kernels) for one in (pair, down))
    found = mlp_of(*operators, fail)(x.to(where)).cpu()
    both, back = (
        dataclasses.replace(one, dtype=torch.float32).dequantize().double() for one in (pair, down)
    )
    results = []
    for how in (rounded, lambda numbers, *_: numbers.double()):
        gate, up = (how(x, 128, 0) @ both.T).chunk(2, -1)
        middle = (torch.nn.functional.silu(gate) * up).to(dtype)
        results.append(how(middle, 128, 0) @ back.T)
    return found, *results


@pytest.mark.parametrize(("tokens", "rows"), [(60, 64), (150, 128)])
def test_mlp(emulated, monkeypatch, tokens, rows):
    """The tiles of the second product may have a different number of rows."""
    first, second = Variant("SWIGLU", rows, 2), Variant("LINEAR", 192, 1)
    monkeypatch.setattr(mlp, "choose_swiglu_variant", lambda *_: first)
    division = divided(second, tokens, 144, 2)
    monkeypatch.setattr(linear, "choose_division", lambda *_: division)
    kernels = emulated(4)
    assert are_near(*ran_mlp(kernels, tokens, 144, 256))
    assert kernels.ran == [first, second]


def test_some_mlps_use_separate_operators(emulated, monkeypatch, caplog):
    def of(inner, dtype=torch.bfloat16, offset=0, bias=None, block=128):
        pair = packed_matrix(1, 2 * inner, 128, block=block, group=64, dtype=dtype)
        pair = dataclasses.replace(pair, bias=bias)
        down = packed_matrix(2, 64, inner, block=128, offset=offset, group=64, dtype=dtype)
        return mlp_of(*(linear.linear_of(one, emulated(2)) for one in (pair, down)), separate)

    def separate(x):
        return x

    assert isinstance(of(128), HopperMLP)
    assert of(192) is of(128, offset=64) is of(128, bias=torch.zeros(256)) is separate
    assert [record.getMessage().partition("as long: ")[2] for record in caplog.records] == [
        "the inputs of the down projection are not whole blocks of 128",
        "the gate and up projections have biases",
    ]
    assert of(128, block=32) is separate
    for few in (torch.zeros(TRITON_MAX_MLP_ROWS, 128).bfloat16(), torch.zeros(200, 128)):
        assert of(128)(few) is few
    monkeypatch.setattr(mlp, "choose_swiglu_variant", lambda *_: None)
    many = torch.zeros(200, 128).bfloat16()
    assert of(128)(many) is many


@pytest.mark.parametrize("kind", ["linear", "fused", "separate"])
def test_operators_take_the_rows_of_earlier_kernels(emulated, monkeypatch, kind):
    """And round nothing themselves; the feed-forward operator passes them on to its first part."""
    variant = Variant("SWIGLU", 64, 2) if kind == "fused" else None
    monkeypatch.setattr(mlp, "choose_swiglu_variant", lambda *_: variant)
    kernels = emulated(2)
    pair = packed_matrix(1, 256, 256, block=128, group=64, dtype=torch.bfloat16)
    down = packed_matrix(2, 64, 128, block=128, group=64, dtype=torch.bfloat16)
    gate_up, last = (linear.linear_of(one, kernels) for one in (pair, down))
    operator = mlp_of(gate_up, last, lambda x: last(gate_up(x)[:, :128].contiguous()))
    operator = gate_up if kind == "linear" else operator
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = operator(x)
    rows = operator.memory_for(x)
    made = launch.quantize(kernels, x, pack(pair), rows.scales.shape[1])
    rows.values.view(torch.uint8).copy_(made.values.view(torch.uint8))
    rows.scales.copy_(made.scales)
    operator.give(x, rows)
    calls = []
    for module in (linear, mlp):
        whole = module.quantize
        monkeypatch.setattr(
            module, "quantize", lambda *args, whole=whole: calls.append(args) or whole(*args)
        )
    assert torch.equal(operator(x), expected)
    assert len(calls) == (kind == "separate")  # for the last part
    assert torch.equal(operator(x), expected)
    assert len(calls) == 1 + 2 * (kind == "separate")


@pytest.mark.parametrize("edit", [(), ("first_row()] >= a.count", "first_row()] < a.count")])
def test_groups_without_pairs_are_skipped(emulated, monkeypatch, edit):
    """And only these. Each expert has one to three groups of 64 pairs."""
    wanted = Variant("GATHERED", 128, 2), Variant("WEIGHTED", 128, 2)
    monkeypatch.setattr(grouped_experts, "choose_variants", lambda *_: wanted)
    whole = torch.Tensor.new_empty

    def empty(tensor, *shape, **options):
        return whole(tensor, *shape, **options).fill_(
            torch.nan if tensor.is_floating_point() else 0
        )

    monkeypatch.setattr(torch.Tensor, "new_empty", empty)
    kernels = emulated(2, (edit,) if edit else ())
    assert are_near(*ran_experts(kernels, 130, 4, 2, 128, 128)) == (not edit)


def test_a_group_may_read_the_sizes_of_a_tile_late(emulated, monkeypatch):
    """Tiles of two stages, which the ring does not hold back."""
    first, second = Variant("SWIGLU", 64, 2), Variant("LINEAR", 64, 1)
    monkeypatch.setattr(mlp, "choose_swiglu_variant", lambda *_: first)
    monkeypatch.setattr(linear, "choose_division", lambda *_: divided(second, 20, 256, 1, 1))
    read = "  return float2{get_shared_float(address_of(shared + row))"
    late = "  if (thread_index() >= 256) for (int i = 0; i < 300; ++i) sync_warp();\n"
    barrier = "  sync_consumers<THREADS>();  // the other group"
    for edits, good in (((), True), (((barrier, "  //"),), False)):
        kernels = emulated(1, ((read, late + read), *edits))
        assert are_near(*ran_mlp(kernels, 20, 256, 512)) == good


def test_a_group_may_read_the_last_stage_late(emulated, monkeypatch):
    """When the other group already stores sums for the cluster."""
    division = divided(Variant("LINEAR", 64, 1), 40, 128, cluster=2)
    monkeypatch.setattr(linear, "choose_division", lambda *_: division)
    read = "  begin_products();\n"
    late = "  if (thread_index() >= 256) for (int i = 0; i < 300; ++i) sync_warp();\n"
    barrier = "  sync_consumers<THREADS>();  // other groups"
    for edits, good in (((), True), (((barrier, "  //"),), False)):
        kernels = emulated(2, ((read, late + read), *edits))
        found, expected, weights, x = multiplied(kernels, 40, 128, 512, 0, 128)
        try:
            assert_near(found, expected, weights, x)
            is_near = True
        except AssertionError:
            is_near = False
        assert is_near == good


@pytest.mark.parametrize(
    ("old", "new"),
    [
        later("(output / 16 ^ slot % 8)", "(output / 16)"),
        later("bytes_of<0x7632>", "bytes_of<0x5410>"),
        later("* places.shares[h]", "* places.shares[0]"),
        later("? uint2{other, second} :", "? uint2{second, other} :"),
        ("m * (a.outputs / 2) + tile.outputs", "m * 128 + tile.outputs"),
        later("block = tile.outputs / BLOCK", "block = 0"),
        later("tile.expert * a.outputs + half_of", "half_of"),
        later("((long)tile.expert * groups + output / a.group)", "(output / a.group)"),
        later("if (TOKENS == 64) size = larger_of_groups<TOKENS>(size, sizes);", ""),
        ("(long)b * (a.count / a.chosen) + token", "token"),
        later("ring.scales_at() + 4 * thread_index()", "ring.scales_at()"),
        later("copy_word(ring", "if (b > tile.begin) copy_word(ring"),
    ],
)
def test_planted_bugs_of_experts_are_found(emulated, monkeypatch, old, new):
    wanted = Variant("GATHERED", 64, 2), Variant("WEIGHTED", 64, 2)
    monkeypatch.setattr(grouped_experts, "choose_variants", lambda *_: wanted)
    try:
        good = are_near(*ran_experts(emulated(2, ((old, new),)), 60, 4, 2, 144, 256))
    except Hang:
        good = False
    assert not good


# -- choices --------------------------------------------------------------------------------------


def test_kernels_fit_into_a_multiprocessor():
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    for variant in VARIANTS:
        assert variant.stages >= 4
        assert variant.shared_bytes <= SHARED_LIMIT


H200 = 132, 66, 39, 30, 22, 17, 15, 15
"""Clusters of each size for which one of these GPUs has room at the same time."""


@pytest.mark.parametrize("clusters", [(1, 0, 0, 0, 0, 0, 0, 0), (114, 57, 36, 26, 0), H200])
def test_every_division_covers_its_product(clusters):
    chosen = set()
    for rows, outputs, inputs in itertools.product(
        (1, 64, 65, 128, 129, 256, 700, 4096), (16, 128, 144, 4096, 24576), (1, 3, 16, 96)
    ):
        division = choose_division(rows, outputs, inputs, clusters)
        variant, tiles = division.variant, division.row_tiles * division.output_tiles
        assert variant in VARIANTS
        assert (
            (division.row_tiles - 1) * variant.tokens < rows <= division.row_tiles * variant.tokens
        )
        assert division.output_tiles == -(-outputs // variant.outputs)
        assert 1 <= division.blocks <= clusters[0]
        chosen.add(division.cluster)
        if division.cluster > 1:
            # All clusters run at once, and no block is without a stage.
            assert division.blocks == tiles * division.cluster
            assert tiles <= clusters[division.cluster - 1]
            assert division.cluster <= inputs
    assert len(chosen) >= 3 or clusters[1] == 0


@pytest.mark.parametrize(
    ("rows", "inner", "tokens"),
    [
        (17, 12288, 64),
        (64, 12288, 64),
        (65, 12288, 128),
        (4096, 12288, 128),
        (256, 12288, 128),
        (64, 6144, 64),
        # Ranks of 8B that share the gates: too few tiles.
        (128, 6144, None),
        (128, 1536, None),
        (4096, 1536, 128),
    ],
)
def test_swiglu_is_part_of_products_that_have_enough_tiles(rows, inner, tokens):
    variant = choose_swiglu_variant(rows, inner, 32, H200)
    assert variant == (tokens and Variant("SWIGLU", tokens, 2))


def test_few_pairs_are_left_to_triton():
    assert choose_variants(31 * 128, 128) is None
    for pairs, tokens in ((32, 64), (96, 128)):
        wanted = Variant("GATHERED", tokens, 2), Variant("WEIGHTED", tokens, 2)
        assert choose_variants(pairs * 128, 128) == wanted


def test_few_rows_and_other_types_are_left_to_triton(emulated, caplog):
    kernels = emulated(2)
    weights = packed_matrix(7, 32, 128, block=128, group=128, dtype=torch.float32)
    operator = linear.linear_of(weights, kernels)
    assert isinstance(operator, HopperFp8Linear)
    operator(torch.randn(TRITON_MAX_ROWS + 1, 128))
    operator(torch.randn(2, 128))
    assert not kernels.ran
    for block, group in ((32, 64), (128, 96)):
        other = packed_matrix(7, 96, 128, block=block, group=group, dtype=torch.bfloat16)
        assert type(linear.linear_of(other, kernels)) is TritonFp8Linear
        assert type(linear.linear_of(other, kernels)) is TritonFp8Linear
    assert [record.getMessage().partition("as long: ")[2] for record in caplog.records] == [
        "blocks have 32 inputs instead of 128",
        "the scales differ within a group of 64 outputs",
    ]
    assert type(linear.linear_of(weights, None)) is TritonFp8Linear


def test_experts_whose_middle_is_no_whole_block_are_left_to_triton(emulated):
    def reason(inner, offset=0, group=128):
        pair, down = (
            packed_matrix(1, 2, *shape, block=128, offset=at, group=group, dtype=torch.bfloat16)
            for *shape, at in ((2 * inner, 128, 0), (128, inner, offset))
        )
        return grouped_experts.experts_unsupported_reason(pack(pair), pack(down))

    assert reason(256) is None
    assert "not whole blocks" in reason(192)
    assert "not whole blocks" in reason(128, offset=64)
    assert "scales differ" in reason(128, group=32)


@pytest.mark.parametrize("package", [launch, expert_products], ids=["fp8", "bf16"])
def test_kernels_are_loaded_and_launched_in_their_clusters(monkeypatch, package):
    """With the CUDA driver replaced."""
    launched = []

    class Kernel:
        def __init__(self, name, *sizes):
            self.name, self.sizes = name, sizes

        def launch(self, args, blocks, overlaps=False, cluster=1):
            launched.append((self.name, self.sizes, blocks, overlaps, cluster))

        def max_clusters(self, size):
            return 132 // size

    class Module:
        def __init__(self, cubin):
            assert cubin == b"code"

        def kernel(self, *args):
            return Kernel(*args)

    monkeypatch.setattr(tiles, "Module", Module)
    code = nvrtc.CompiledCode(b"code", "")
    monkeypatch.setattr(nvrtc, "load_or_compile", lambda source, name: code)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    kernels = package.Kernels()
    variant = Variant("WEIGHTED", 64, 2)
    for cluster in (1, 2):
        kernels.multiply(variant, Args(cluster=cluster), 20)
    sizes = 132, variant.threads, variant.shared_bytes
    assert launched == [("weighted_64_2", sizes, 20, True, cluster) for cluster in (1, 2)]
    if package is launch:
        assert kernels.clusters == (132, 66, 44, 33, 26, 22, 18, 16)


def test_other_gpus_have_none_of_these_kernels(monkeypatch, caplog):
    def refuse():
        raise nvrtc.CompileError("no NVRTC")

    monkeypatch.setattr(launch, "Kernels", refuse)
    assert launch.optional_kernels((8, 9)).get() is None
    assert not caplog.records
    found = launch.optional_kernels((9, 0))
    assert found.get() is None
    assert found.get() is None
    (record,) = caplog.records
    assert "use the Triton kernels" in record.getMessage()
    assert "no NVRTC" in record.getMessage()


# -- machine code ---------------------------------------------------------------------------------


def test_kernels_compile_almost_without_spills(compiler, tmp_path):
    made = nvrtc.compile_source(source(), "fp8_products")
    assert made.registers == 168
    assert made.bytes_of("spill stores") <= 32
    assert "serialized" not in made.report, "products wait for each other"
    assert not early_reads_in(made, tmp_path)


# -- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def hopper():
    """A GPU's device, and its kernels."""
    device = open_device("cuda")
    device.prepare_thread(1)
    kernels = device._fp8_products
    if kernels.get() is None:
        pytest.skip("not for this GPU")
    return device, kernels


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65, 128, 200, 1000])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (5120, 2048), (272, 640)])
def test_products_on_a_gpu(hopper, rows, outputs, inputs):
    """Twice the same bits, near float64."""
    device, _ = hopper
    weights = packed_matrix(7, outputs, inputs, block=128, group=64, dtype=torch.bfloat16)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    operator = device.linear(moved(weights, device.torch_device))
    first, second = (operator(x.to(device.torch_device)).cpu() for _ in range(2))
    assert torch.equal(first, second)
    whole = dataclasses.replace(weights, dtype=torch.float32).dequantize().double()
    assert_near(first, rounded(x, 128, 0) @ whole.T, weights, x)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [70, 1000])
def test_mlp_on_a_gpu(hopper, tokens):
    device, kernels = hopper
    assert are_near(*ran_mlp(kernels.get(), tokens, 1024, 3072, device.torch_device))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [300, 1100])
def test_experts_on_a_gpu(hopper, tokens):
    device, kernels = hopper
    assert are_near(*ran_experts(kernels, tokens, 16, 4, 512, 384, device.torch_device))
