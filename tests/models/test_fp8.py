"""FP8 in blocks: what is read is what the format says, on every rank; products of packed weights;
and everything that may be wrong with a checkpoint is named."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoactor.models.config import parse_config, read_config
from nanoactor.models.decoder import Decoder
from nanoactor.models.devices import open_device
from nanoactor.models.devices.cpu import compiled
from nanoactor.models.devices.cpu.compiled import CompiledCPUDevice
from nanoactor.models.devices.cpu.device import CPUDevice
from nanoactor.models.devices.cuda.kernels.fp8 import TritonFp8Linear
from nanoactor.models.errors import ModelError, UnsupportedModel, WeightsError
from nanoactor.models.model_config import Quantization
from nanoactor.models.parallel import Span, shard_of
from nanoactor.models.weights import linear as weight_formats
from nanoactor.models.weights.checkpoint import CheckpointWeights
from nanoactor.models.weights.fp8 import E4M3, Fp8Blocks, Fp8Format
from nanoactor.models.weights.linear import ExpertWeights, Part, Projection
from nanoactor.models.weights.weights import format_of
from tests.models import fp8_golden
from tests.models.checkpoints import CONFIGURATIONS, make_checkpoint
from tests.models.fp8_checkpoints import BLOCK, is_packed, pack, pack_checkpoint
from tests.models.interpreted import InterpretedDevice
from tests.models.test_decoder import Driver, Sequence
from tests.models.test_experts import TOKENS, by_hand, expected_of

CPU = torch.device("cpu")
QUANTIZED = {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"}


def made(raw=QUANTIZED):
    return Fp8Format(Quantization("fp8", raw))


def opened(directory):
    packed = format_of(read_config(directory).quantization)
    return CheckpointWeights(directory, torch.float32, CPU, packed=packed)


def logits_of(directory, device=None):
    """float32 (tokens, vocabulary): two chunks, then one token."""
    driver, sequence = Driver(directory), Sequence(torch.tensor(TOKENS))
    driver.step([(sequence, 5)])
    driver.step([(sequence, len(TOKENS) - 6)])
    driver.step([], [sequence])
    return torch.cat(sequence.logits)


# -- whole models -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["untied", "llama3", "gqa_5", "qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize("plain", [False, True], ids=["packed", "unpacked"])
def test_logits_are_those_of_what_the_numbers_stand_for(tmp_path, monkeypatch, name, plain):
    """Against transformers with the unpacked matrices, float32. Activations are not rounded on a
    CPU, so that nothing but the order of sums differs."""
    model = make_checkpoint(tmp_path, **CONFIGURATIONS[name])
    pack_checkpoint(tmp_path, model)
    if plain:
        monkeypatch.setattr("tests.models.test_decoder.open_device", lambda _: CPUDevice())
    torch.testing.assert_close(logits_of(tmp_path), expected_of(model), rtol=2e-4, atol=2e-4)


def test_modules_that_are_not_converted_stay_as_they_are(tmp_path):
    spared = ["lm_head", "model.layers.0.self_attn", "model.layers.1.mlp"]
    model = make_checkpoint(tmp_path)
    pack_checkpoint(tmp_path, model, spared=spared)
    kinds = {str(tensor.dtype) for tensor in load_file(tmp_path / "model.safetensors").values()}
    assert kinds == {"torch.float32", "torch.float8_e4m3fn"}
    torch.testing.assert_close(logits_of(tmp_path), expected_of(model), rtol=2e-4, atol=2e-4)


# -- what is read -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """(directory, the dense matrices by name)."""
    directory = tmp_path_factory.mktemp("packed")
    model = make_checkpoint(directory)
    pack_checkpoint(directory, model)
    return directory, dict(model.named_parameters())


@pytest.mark.parametrize(
    "rows", [None, (Span(0, 96),), (Span(7, 40),), (Span(50, 90), Span(3, 20))]
)
@pytest.mark.parametrize("columns", [None, Span(0, 64), Span(32, 64), Span(5, 50), Span(33, 34)])
def test_a_part_has_the_scales_of_its_blocks(packed, rows, columns):
    """Wherever a rank's part begins within a block."""
    directory, dense = packed
    name = "model.layers.0.mlp.gate_proj"
    if rows is not None and columns is not None:
        return  # no rank has a part of both
    with opened(directory) as weights:
        found = weights.linear(Projection((Part(name, 96, rows),), 64, columns=columns))
    assert isinstance(found, Fp8Blocks)
    assert found.weight.dtype == E4M3
    whole = dense[f"{name}.weight"]
    if rows is not None:
        whole = torch.cat([whole[span.start : span.stop] for span in rows])
    if columns is not None:
        whole = whole[:, columns.start : columns.stop]
    torch.testing.assert_close(found.dequantize(), whole, rtol=1e-6, atol=0)


def test_it_takes_no_more_than_its_bytes(packed):
    directory, _ = packed
    part = Part("model.layers.0.mlp.gate_proj", 96)
    with opened(directory) as weights:
        found = weights.linear(Projection((part,), 64))
    assert found.weight.nbytes == 96 * 64
    assert found.scales.nbytes == 96 // 16 * 2 * 4  # of published blocks: 0.0002 of the weights


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_parts_of_the_whole(packed, ranks):
    """The products of all ranks, put together or added up, are those of one."""
    directory, dense = packed
    config = read_config(directory)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(3, 64)
    for rank in range(ranks):
        mine = shard_of(config, rank, ranks).part(96)
        with opened(directory) as weights:
            part = Part("model.layers.0.mlp.down_proj", 64)
            found = weights.linear(Projection((part,), 96, columns=mine))
        total += x[:, mine.start : mine.stop] @ found.dequantize().T
    expected = x @ dense["model.layers.0.mlp.down_proj.weight"].T
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_numbers_are_those_of_another_package():
    """compressed-tensors has packed and unpacked them, see `fp8_golden.py`."""
    rows, columns = fp8_golden.SHAPE
    packed = made(QUANTIZED | {"weight_block_size": fp8_golden.BLOCK})
    with CheckpointWeights(fp8_golden.FILE.parent, torch.float32, CPU, packed=packed) as weights:
        found = weights.linear(Projection((Part(fp8_golden.NAME, rows),), columns))
        expected = weights.load("numbers", rows, columns)
    assert torch.equal(found.dequantize(), expected)
    assert not expected[9, :4].any()
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1))
    device = CompiledCPUDevice()
    device.prepare_thread(1)
    torch.testing.assert_close(device.linear(found)(x), x @ expected.T, rtol=1e-4, atol=1e-4)


# -- products -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 40])
@pytest.mark.parametrize(
    ("outputs", "inputs", "offset", "group"),
    [(5, 37, 0, 1), (600, 128, 0, 128), (600, 64, 0, 96), (48, 70, 11, 16)],
)
def test_products_of_packed_weights(
    monkeypatch, dtype, threads, rows, outputs, inputs, offset, group
):
    monkeypatch.setattr("nanoactor.models.devices.cpu.kernels.elements._MIN_PARALLEL_ELEMENTS", 0)
    device = CompiledCPUDevice()
    device.prepare_thread(threads)
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.randn(outputs, inputs, generator=generator)
    numbers[0, :3] = torch.tensor([0.0, 2.0**-9, -(2.0**-7)])  # zero and denormal numbers
    blocks = -(-(inputs + offset) // 32)
    scales = torch.rand(-(-outputs // group), blocks, generator=generator) + 0.5
    bias = torch.randn(outputs, generator=generator).to(dtype)
    weights = Fp8Blocks(numbers.to(E4M3), scales, 32, offset, dtype, group, bias)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    each = scales.repeat_interleave(32, 1)[:, offset : offset + inputs].double()
    each = each.repeat_interleave(group, 0)[:outputs]
    expected = x.double() @ (numbers.to(E4M3).double() * each).T + bias.double()
    allowed = 1e-5 if dtype == torch.float32 else 2e-2
    found = device.linear(weights)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), expected, rtol=allowed, atol=allowed * float(expected.abs().max())
    )


def test_every_number_is_unpacked_as_the_format_says():
    device = CompiledCPUDevice()
    device.prepare_thread(1)
    bits = torch.tensor([n for n in range(256) if n & 0x7F != 0x7F], dtype=torch.uint8)
    weights = Fp8Blocks(
        bits.view(E4M3)[:, None].contiguous(), torch.ones(len(bits), 1), 1, 0, torch.float32
    )
    found = device.linear(weights)(torch.ones(1, 1))[0]
    assert torch.equal(found, bits.view(E4M3).float())


def test_a_cpu_keeps_weights_packed(monkeypatch):
    """Neither a second layout nor an unpacked copy stays."""
    device = CompiledCPUDevice()
    device.prepare_thread(1)
    spare = device._repack_budget
    weights = Fp8Blocks(torch.zeros(64, 64).to(E4M3), torch.ones(64, 2), 32, 0, torch.bfloat16)
    operator = device.linear(weights)
    assert device._repack_budget == spare
    monkeypatch.setattr(compiled, "_UNPACK_CHUNK", 16)
    held = [cell.cell_contents for cell in operator.__closure__]
    assert {id(weights), id(device)} == {id(one) for one in held}


# -- errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (dict(activation_scheme="static"), "activation_scheme 'static'.*'dynamic'"),
        (dict(fmt="e5m2"), "fmt 'e5m2'"),
        (dict(weight_block_size=None), "weight_block_size.*without blocks"),
        (dict(weight_block_size=[128]), "weight_block_size"),
        (dict(weight_block_size=[128, 0]), "weight_block_size"),
        (dict(weight_block_size=[128, True]), "weight_block_size"),
        (dict(scale_fmt="ue8m0"), "scale_fmt"),
        (dict(dequantize=True), "dequantize"),
        (dict(act_bits=4), "act_bits 4 is not supported"),
        (dict(modules_to_not_convert="lm_head"), "modules_to_not_convert"),
    ],
)
def test_options_that_are_not_honoured_are_refused_by_name(changes, word):
    with pytest.raises(ModelError, match=word):
        made(QUANTIZED | changes)


def test_other_methods_are_refused_before_anything_is_read(packed):
    text = json.loads((packed[0] / "config.json").read_text())
    text["quantization_config"]["quant_method"] = "awq"
    with pytest.raises(
        UnsupportedModel, match=r"'awq', which is not supported; supported methods: fp8"
    ):
        parse_config(text)
    text["quantization_config"] = "fp8"
    with pytest.raises(ModelError, match="quantization_config must be an object"):
        parse_config(text)


def resaved(tmp_path, change, **options):
    model = make_checkpoint(tmp_path)
    pack_checkpoint(tmp_path, model, **options)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.pop(f"{GATE}_scale_inv"), "gate_proj.weight_scale_inv"),
        (lambda t: t.update({f"{GATE}_scale_inv": torch.ones(3, 2)}), r"\(3, 2\).*\(6, 2\)"),
        (lambda t: t.update({GATE: t[GATE].float()}), "dtype F32.*F8_E4M3"),
        (lambda t: t.update({GATE: torch.zeros(96, 64, dtype=torch.int8)}), "dtype I8"),
        (lambda t: t[f"{GATE}_scale_inv"].fill_(float("nan")), "scale_inv contains.*not finite"),
        *(
            (
                lambda t, code=code: t[GATE].view(torch.uint8)[3, 3].fill_(code),
                "gate_proj.weight contains.*not fin",
            )
            for code in (0x7F, 0xFF)
        ),
    ],
    ids=["no scales", "other scales", "not packed", "of another type", "NaN scale", "NaN", "-NaN"],
)
def test_what_is_wrong_with_a_tensor_is_named(tmp_path, change, word):
    resaved(tmp_path, change)
    with pytest.raises(WeightsError, match=word) as caught, opened(tmp_path) as weights:
        Decoder(read_config(tmp_path), weights, open_device("cpu"), 64)
    assert "model.safetensors" in str(caught.value)


def test_a_projection_that_is_packed_in_part_is_refused(tmp_path):
    model = make_checkpoint(tmp_path)
    pack_checkpoint(tmp_path, model, spared=["model.layers.0.self_attn.k_proj"])
    error = pytest.raises(ModelError, match=r"lists .*k_proj but not all")
    with error, opened(tmp_path) as weights:
        Decoder(read_config(tmp_path), weights, open_device("cpu"), 64)


def test_packed_weights_that_no_configuration_announces_are_refused(tmp_path):
    resaved(tmp_path, lambda tensors: None)
    path = tmp_path / "config.json"
    text = json.loads(path.read_text())
    del text["quantization_config"]
    path.write_text(json.dumps(text))
    with pytest.raises(WeightsError, match="dtype F8_E4M3"), opened(tmp_path) as weights:
        Decoder(read_config(tmp_path), weights, open_device("cpu"), 64)


def test_blocks_of_the_tests_do_not_divide_all_sizes():
    assert 24 * 4 % BLOCK[0] == 0
    assert 40 % BLOCK[1]
    packed, scales, whole = pack(torch.randn(33, 40), BLOCK)
    assert (packed.shape, scales.shape, whole.shape) == ((33, 40), (3, 2), (33, 40))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden", "inner", "block", "offset", "group"),
    [
        (1, 16, 2, 64, 32, 32, 0, 16),
        (3, 5, 3, 70, 45, 32, 8, 7),
        (9, 2, 1, 33, 20, 16, 0, 16),  # several tokens of one expert
        (40, 4, 2, 64, 48, 32, 16, 16),  # more than the kernel takes
    ],
)
def test_experts_stay_packed_on_the_cpu(
    monkeypatch, threads, dtype, tokens, experts, chosen, hidden, inner, block, offset, group
):
    """Activations are not rounded there."""
    monkeypatch.setattr("nanoactor.models.devices.cpu.kernels.elements._MIN_PARALLEL_ELEMENTS", 0)
    device = CompiledCPUDevice()
    device.prepare_thread(threads)
    pair = packed_matrix(1, experts, 2 * inner, hidden, block=block, group=group, dtype=dtype)
    down = packed_matrix(
        2, experts, hidden, inner, block=block, offset=offset, group=group, dtype=dtype
    )
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :chosen].int()
    shares = torch.rand(tokens, experts, generator=generator).softmax(-1)[:, :chosen]
    monkeypatch.setattr(Fp8Blocks, "dequantize", None)
    found = device.experts(ExpertWeights(pair, down))(x, ids, shares)
    monkeypatch.undo()
    both, back = (dataclasses.replace(w, dtype=torch.float32).dequantize() for w in (pair, down))
    expected = by_hand(x, both, back, ids, shares)
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, rtol=near, atol=near)


# -- FP8 tensor cores ---------------------------------------------------------------------


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    made = open_device("cuda") if request.param == "cuda" else InterpretedDevice()
    made.prepare_thread(1)
    return made


def rounded(x, block, offset, rounds=E4M3):
    """Activations as the format rounds them, float64: the largest of each token's block of inputs
    becomes 448. Blocks begin `offset` inputs before the first."""
    wide = torch.nn.functional.pad(x.float(), (offset, -(x.shape[-1] + offset) % block))
    each = wide.unflatten(-1, (-1, block))
    scale = each.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    kept = (each / scale).to(rounds).double() * scale.double()
    return kept.flatten(-2)[..., offset : offset + x.shape[-1]]


def packed_matrix(seed, *shape, block=32, offset=0, group=16, dtype=torch.float32):
    """Random numbers, and scales that differ from group to group and block to block."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator).to(E4M3)
    blocks = -(-(shape[-1] + offset) // block)
    scales = torch.rand(*shape[:-2], -(-shape[-2] // group), blocks, generator=generator) + 0.5
    return Fp8Blocks(numbers, scales / shape[-1] ** 0.5, block, offset, dtype, group)


def moved(weights, where):
    return dataclasses.replace(
        weights, weight=weights.weight.to(where), scales=weights.scales.to(where)
    )


def assert_near(found, expected, weights, x):
    """What may differ: sums of a block are kept to 13 bits by the tensor cores of a Hopper GPU
    (DeepSeek-V3, section 3.5.2), so 2^-12 of what is added up, without signs; and a division that
    is rounded otherwise moves a number to its neighbour, 2^-3 of one product, where it lies between
    two. Numbers of 8 bits often do."""
    whole = dataclasses.replace(weights, dtype=torch.float32).dequantize().double().abs()
    sizes = x.abs().double() @ whole.T
    one = x.abs().amax(-1, keepdim=True).double() * whole.amax()
    own = 2**-8 if found.dtype == torch.bfloat16 else 0.0
    far = (found.double() - expected).abs() > sizes * 2**-12 + expected.abs() * own
    assert far.double().mean() < (0.01 if found.dtype == torch.float32 else 0.1)
    assert bool(((found.double() - expected).abs() <= sizes * 2**-8 + one * 2**-3).all())


LARGE = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "block", "offset", "group"),
    [
        (1, 48, 96, 32, 0, 16),
        (3, 160, 70, 32, 11, 32),  # a rank's part of two blocks
        (17, 80, 320, 64, 0, 16),
        (40, 144, 130, 128, 0, 128),
        (70, 64, 64, 64, 0, 64),
        pytest.param(300, 272, 512, 128, 64, 16, marks=LARGE),
        pytest.param(1, 4096, 12288, 128, 0, 128, marks=LARGE),
        pytest.param(12, 4096, 12288, 128, 0, 128, marks=LARGE),
        pytest.param(700, 1024, 4096, 128, 0, 128, marks=LARGE),
    ],
)
def test_products_on_fp8_tensor_cores(device, dtype, tokens, outputs, inputs, block, offset, group):
    """Against float64 with activations rounded as the format says."""
    if not device.supports(dtype) or (device.traits.name == "interpreted" and outputs > 200):
        pytest.skip("not in this type, or too slow")
    weights = packed_matrix(
        7, outputs, inputs, block=block, offset=offset, group=group, dtype=dtype
    )
    weights = dataclasses.replace(weights, bias=torch.randn(outputs).to(dtype))
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, : inputs // 2] = 0  # a block of zeros
    x[-1] *= 1000
    there = moved(weights, device.torch_device)
    there = dataclasses.replace(there, bias=weights.bias.to(device.torch_device))
    operator = device.linear(there)
    assert isinstance(operator, TritonFp8Linear)
    found = operator(x.to(device.torch_device)[None])[0].cpu()
    assert found.dtype == dtype
    whole = dataclasses.replace(weights, dtype=torch.float32).dequantize().double()
    expected = rounded(x, block, offset) @ whole.T + weights.bias.double()
    assert_near(found, expected, weights, x)
    # ... and what is not rounded is elsewhere: the test would see it.
    if tokens > 1:
        plain = x.double() @ whole.T + weights.bias.double()
        assert (found - plain).abs().sum() > 3 * (found - expected).abs().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden", "inner", "offset"),
    [
        (1, 16, 2, 64, 32, 0),
        (4, 16, 3, 70, 48, 8),  # each pair by itself
        (30, 4, 2, 64, 48, 0),  # in blocks
        (9, 3, 3, 64, 48, 16),
        pytest.param(300, 8, 2, 512, 384, 0, marks=LARGE),
        pytest.param(700, 4, 1, 256, 192, 64, marks=LARGE),
        pytest.param(8, 128, 8, 2048, 768, 0, marks=LARGE),
        pytest.param(64, 128, 8, 2048, 768, 0, marks=LARGE),
    ],
)
def test_experts_on_fp8_tensor_cores(device, dtype, tokens, experts, chosen, hidden, inner, offset):
    """Against float64 with activations rounded before both products."""
    if not device.supports(dtype) or (device.traits.name == "interpreted" and hidden > 200):
        pytest.skip("not in this type, or too slow")
    where, block = device.torch_device, 128 if hidden > 200 else 32
    pair = packed_matrix(1, experts, 2 * inner, hidden, block=block, dtype=dtype)
    down = packed_matrix(2, experts, hidden - hidden % 16, inner, block=block, offset=offset)
    down = dataclasses.replace(down, dtype=dtype)
    if hidden % 16:
        pair = packed_matrix(1, experts, 2 * inner, hidden - hidden % 16, block=block, dtype=dtype)
        hidden -= hidden % 16
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :chosen].int()
    shares = torch.rand(tokens, experts, generator=generator).softmax(-1)[:, :chosen]
    operator = device.experts(ExpertWeights(moved(pair, where), moved(down, where)))
    found = operator(x.to(where), ids.to(where), shares.to(where)).cpu()
    assert operator._max_pairs == min(16, experts), "packed"
    assert found.dtype == dtype
    both, back = (
        dataclasses.replace(one, dtype=torch.float32).dequantize().double() for one in (pair, down)
    )
    sums, plain = torch.zeros(2, tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for expert, share in zip(ids[token].tolist(), shares[token].double(), strict=True):
            for total, how in ((sums, rounded), (plain, lambda numbers, *_: numbers.double())):
                gate, up = (both[expert] @ how(x[token], block, 0)).chunk(2)
                middle = (torch.nn.functional.silu(gate) * up).to(dtype)
                total[token] += share * (back[expert] @ how(middle, block, offset))
    # Numbers of the middle that go to their neighbours move all outputs a little: 2^-9, to which
    # bfloat16 rounds it, makes 2^-4 of one in 16.
    assert (found - sums).norm() < (0.01 if dtype == torch.float32 else 0.02) * sums.norm()
    assert (found - sums).norm() < (0.3 if dtype == torch.float32 else 0.6) * (found - plain).norm()


@pytest.mark.parametrize("name", ["untied", "llama3", "gqa_5"])
def test_logits_are_those_of_rounded_activations(tmp_path, monkeypatch, name):
    """Against transformers in float32 with what the packed matrices stand for, and inputs of each
    rounded as the format says. A last bit of a float32 moves one number in 10^5 to its neighbour,
    so most logits are equal but for the order of sums, and some differ by one of 2^-3."""
    model = make_checkpoint(tmp_path, **CONFIGURATIONS[name])
    pack_checkpoint(tmp_path, model)
    plain = expected_of(model)
    for module, linear in model.named_modules():
        if isinstance(linear, torch.nn.Linear) and is_packed(f"{module}.weight"):
            linear.register_forward_pre_hook(
                lambda _, inputs: (rounded(inputs[0], BLOCK[1], 0).float(),)
            )
    expected = expected_of(model)
    monkeypatch.setattr("tests.models.test_decoder.open_device", lambda _: InterpretedDevice())
    found = logits_of(tmp_path)
    apart = (found - expected).norm() / expected.norm()
    assert apart < 0.01
    assert apart < 0.2 * (found - plain).norm() / plain.norm()


def test_what_the_tensor_cores_do_not_take_is_unpacked_with_a_warning(caplog):
    weight_formats._log_once.cache_clear()
    device = InterpretedDevice()
    for block, group, word in ((48, 16, "the block size 48"), (32, 8, "groups of 16 outputs")):
        weights = packed_matrix(1, 32, 96, block=block, group=group)
        operator = device.linear(weights)
        device.linear(weights)
        assert torch.equal(operator.weight, weights.dequantize())
        assert caplog.text.count(word) == 1, "once, with its cost"
        assert "as much memory and time" in caplog.text
        device.experts(ExpertWeights(*[packed_matrix(1, 2, 32, 96, block=block, group=group)] * 2))
        assert caplog.text.count(word) == 1


@pytest.mark.parametrize(("offset", "given"), [(0, True), (16, False)])
def test_the_kernel_of_a_whole_step_gets_packed_experts(offset, given):
    """Where each block of 128 inputs is whole."""
    pair = packed_matrix(1, 3, 2 * (128 - offset), 256, block=128, group=16)
    down = packed_matrix(2, 3, 256, 128 - offset, block=128, group=128, offset=offset)
    found = InterpretedDevice().experts(ExpertWeights(pair, down)).matrices()
    assert (found is not None) == given
    for matrix, weights in zip(found or (), (pair, down), strict=False):
        factors = matrix.scales.repeat_interleave(8, 1).repeat_interleave(128, 2)
        assert torch.equal(matrix.weight.float() * factors, weights.dequantize().float())


def test_gates_and_ups_of_one_group_are_unpacked(caplog):
    """No checkpoint has such: scales of gates and of ups are two tensors."""
    weight_formats._log_once.cache_clear()
    pair, down = packed_matrix(1, 2, 2 * 24, 32), packed_matrix(2, 2, 32, 24)
    InterpretedDevice().experts(ExpertWeights(pair, down))
    assert "a group of 16 outputs spans the gate and up" in caplog.text


def test_experts_in_several_formats_are_refused(tmp_path):
    spared = ["model.layers.0.mlp.experts.1"]
    model = make_checkpoint(tmp_path, **CONFIGURATIONS["qwen3_moe"])
    pack_checkpoint(tmp_path, model, spared=spared)
    with pytest.raises(
        WeightsError, match=r"experts\.1\.gate_proj has the format Dense.*the same format"
    ):
        Driver(tmp_path)
