"""Mixtures of experts: operators against float64, routing, and how checkpoints hold them."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import Qwen2MoeConfig

from nanoactor.models.config import parse_config, read_config
from nanoactor.models.decoder import Decoder
from nanoactor.models.devices import open_device
from nanoactor.models.devices.cpu import compiled
from nanoactor.models.devices.cpu.compiled import CompiledCPUDevice
from nanoactor.models.devices.cpu.device import CPUDevice
from nanoactor.models.devices.cuda.kernels import routing
from nanoactor.models.devices.portable import PortableOperators
from nanoactor.models.errors import ModelError, UnsupportedModel, WeightsError
from nanoactor.models.families.qwen2_moe import QWEN2_MOE
from nanoactor.models.layers.experts import Experts, _read_fused, _read_separate
from nanoactor.models.layers.kinds import ExpertsSpec
from nanoactor.models.layers.mlp import MLP
from nanoactor.models.parallel import Span
from nanoactor.models.weights.checkpoint import CheckpointWeights
from nanoactor.models.weights.linear import Dense, ExpertWeights, Router
from nanoactor.models.weights.weights import format_of
from nanoactor.models.weights.whole_step import Mixture
from tests.models.checkpoints import CONFIGURATIONS, SMALL, make_checkpoint
from tests.models.interpreted import InterpretedDevice
from tests.models.test_decoder import Driver, Sequence
from tests.models.test_headers import split

MOE = CONFIGURATIONS["qwen3_moe"]
TOKENS = [3, 77, 5, 120, 8, 8, 201, 44, 1, 90, 13, 7]


# -- the operator -------------------------------------------------------------------------


def by_hand(x, gate_up, down, ids, shares):
    """float64, token by token."""
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    result = torch.zeros_like(x)
    for token, experts in enumerate(ids.tolist()):
        for expert, share in zip(experts, shares[token].double(), strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            result[token] += share * (down[expert] @ (F.silu(gate) * up))
    return result


@pytest.fixture(
    params=[
        "cpu",
        "compiled",
        "threads",
        "interpreted",
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request, monkeypatch):
    if request.param == "cuda":
        made = open_device("cuda")
    elif request.param == "interpreted":
        made = InterpretedDevice()
    else:
        monkeypatch.setattr(
            "nanoactor.models.devices.cpu.kernels.elements._MIN_PARALLEL_ELEMENTS", 0
        )
        monkeypatch.setattr(compiled, "_MAX_KERNEL_PAIRS", 1 << 20)
        made = CPUDevice() if request.param == "cpu" else CompiledCPUDevice()
    made.prepare_thread(2 if request.param == "threads" else 1)
    return made


def make(seed, dtype, *shape, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden", "inner"),
    [
        (0, 4, 2, 16, 8),
        (1, 4, 2, 16, 8),
        (3, 5, 3, 40, 24),
        (9, 3, 3, 64, 40),  # every token has every expert
        (33, 64, 2, 32, 24),  # most have one token or none
        pytest.param(70, 8, 1, 48, 16, id="one expert each"),
        pytest.param(150, 8, 2, 32, 24, id="more pairs than are looked at at once"),
        pytest.param(1100, 8, 1, 64, 40, id="the largest tile"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tokens_go_through_their_experts(device, dtype, tokens, experts, chosen, hidden, inner):
    if not device.supports(dtype) or (tokens > 1000 and device.traits.name != "cuda"):
        pytest.skip("not in this type, or the largest tile is that of GPUs alone")
    where = device.torch_device
    x = make(1, dtype, tokens, hidden)
    gate_up = make(2, dtype, experts, 2 * inner, hidden, scale=hidden**-0.5)
    down = make(3, dtype, experts, hidden, inner, scale=inner**-0.5)
    ids = make(4, torch.float32, tokens, experts).argsort(-1)[:, :chosen].int()
    # A part of more columns, as a router's choice of the best is.
    shares = make(5, torch.float32, tokens, experts).softmax(-1)[:, :chosen]
    there = ExpertWeights(Dense(gate_up.to(where)), Dense(down.to(where)))
    found = device.experts(there)(x.to(where), ids.to(where), shares.to(where)).cpu()
    assert found.dtype == dtype
    allowed = 1e-5 if dtype == torch.float32 else 2e-2
    expected = by_hand(x, gate_up, down, ids, shares)
    torch.testing.assert_close(found.double(), expected, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("kind", [CPUDevice, CompiledCPUDevice])
def test_a_tokens_result_does_not_depend_on_the_others(kind):
    """Whatever else a step has; products of other shapes may round differently."""
    device = kind()
    device.prepare_thread(1)
    x = make(1, torch.float32, 6, 32)
    pair, down = make(2, torch.float32, 4, 48, 32), make(3, torch.float32, 4, 32, 24)
    weights = ExpertWeights(Dense(pair), Dense(down))
    ids = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 1], [0, 2], [1, 2]], dtype=torch.int32)
    shares = make(5, torch.float32, 6, 2).softmax(-1)
    operator = device.experts(weights)
    together = operator(x, ids, shares)
    for token in range(6):
        at = slice(token, token + 1)
        alone = operator(x[at], ids[at], shares[at])
        torch.testing.assert_close(alone, together[at], rtol=1e-4, atol=1e-4)


# -- routing ------------------------------------------------------------------------------


def layers_of(directory):
    device = open_device("cpu")
    with CheckpointWeights(directory, torch.float32, device.torch_device) as weights:
        decoder = Decoder(read_config(directory), weights, device, 64)
    return [layer._feed_forward for layer in decoder._layers]


def test_ties_go_to_the_lower_expert(device, tmp_path):
    make_checkpoint(tmp_path, **MOE)
    router = layers_of(tmp_path)[0].router
    router.weight[5] = router.weight[2]
    router.weight[7] = router.weight[2]
    router = dataclasses.replace(router, weight=router.weight.to(device.torch_device))
    x = make(1, torch.float32, 200, SMALL["hidden_size"]).to(device.torch_device)
    ids, shares = device.route(x, router)
    assert (ids.dtype, shares.dtype) == (torch.int32, torch.float32)
    assert {2, 5, 7} <= set(ids.flatten().tolist())
    for row in ids.tolist():
        assert [n for n in row if n in (2, 5, 7)] == [2, 5, 7][: sum(n in (2, 5, 7) for n in row)]
    torch.testing.assert_close(shares.sum(-1).cpu(), torch.ones(200))
    plain = PortableOperators().route(x, router)
    assert torch.equal(plain[0], ids)
    torch.testing.assert_close(plain[1], shares)


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden"),
    [
        (34, 6, 2, 40),
        (33, 128, 8, 200),
        (70, 16, 3, 384),
        pytest.param(192, 128, 8, 2048, marks=pytest.mark.gpu),
        (200, 6, 2, 64),
        pytest.param(193, 256, 8, 2048, marks=pytest.mark.gpu),
        pytest.param(2049, 60, 4, 2048, marks=pytest.mark.gpu),
    ],
)
def test_routing_of_16_bit_tokens_uses_all_bits_of_the_weights(
    device, tokens, experts, chosen, hidden
):
    """Two experts whose weights would be equal in bfloat16 are told apart; of equal ones, the lower
    comes first."""
    if device.traits.name == "interpreted" and hidden > 1000:
        pytest.skip("too slow")
    x = make(1, torch.bfloat16, tokens, hidden)
    weight = make(2, torch.float32, experts, hidden, scale=hidden**-0.5)
    weight[1] *= 3  # chosen by many tokens
    weight[3], weight[5] = weight[1], weight[4] * (1 + 2**-12)
    exact = x.double() @ weight.double().T
    kept = Router(weight.to(device.torch_device), chosen, renormalize=True)
    ids, shares = (found.cpu() for found in device.route(x.to(device.torch_device), kept))
    best = exact.topk(chosen + 1).values
    clear = (best[:, :-1] - best[:, 1:]).amin(1) > 1e-5
    wanted = exact.topk(chosen)
    assert clear.any()
    assert torch.equal(ids.long()[clear], wanted.indices[clear])
    near = wanted.values.softmax(-1)
    torch.testing.assert_close(shares.double()[clear], near[clear], rtol=2**-7, atol=0)
    assert any(5 in row and 4 in row[row.index(5) :] for row in ids[clear].tolist())
    both = ((ids == 1).any(1) & (ids == 3).any(1)).nonzero().flatten()
    assert len(both)
    for row in ids[both].tolist():
        assert row.index(1) + 1 == row.index(3)


@pytest.mark.parametrize(
    ("dtype", "by_cublas"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)],
)
def test_every_bit_of_a_routers_weights_counts(device, monkeypatch, dtype, by_cublas):
    if device.traits.name not in ("cuda", "interpreted"):
        pytest.skip("PyTorch multiplies in float32")
    is_bfloat16 = dtype == torch.bfloat16  # float16 has a limit of its own
    monkeypatch.setattr(routing, "_MAX_SPLIT_TOKENS", 40 if is_bfloat16 and not by_cublas else 0)
    monkeypatch.setattr(routing, "_LOGITS_CONFIGS", ())
    weight = make(2, torch.float32, 16, 96)
    tokens = torch.eye(96)[:40].to(dtype)  # each has one input
    logits = routing._router_logits(*(x.to(device.torch_device) for x in (tokens, weight)))
    assert len(logits) > 1, "in parts, on tensor cores"
    torch.testing.assert_close(logits.sum(0).cpu(), weight.T[:40], rtol=2**-22, atol=0)


@pytest.mark.parametrize("chunks", [(16, 32), (2, 4)])
@pytest.mark.parametrize(("tokens", "top_k", "experts", "size"), [(7, 3, 5, 2), (1, 4, 8, 4)])
def test_pairs_are_grouped_into_blocks_of_one_expert(
    device, monkeypatch, chunks, tokens, top_k, experts, size
):
    """In the order of tokens, whether one program counts an expert's pairs, or several do."""
    if device.traits.name not in ("cuda", "interpreted"):
        pytest.skip("a kernel in Triton")
    monkeypatch.setattr(routing, "_PAIR_CHUNKS", chunks)
    monkeypatch.setattr(routing, "_SHARED_CHUNK", 8)
    likely = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1))
    likely[:, 1] = 0
    ids = likely.argsort(-1, descending=True)[:, :top_k].int()
    found = routing.align_blocks(ids.to(device.torch_device), experts, size)
    pairs, owners = [], []
    for expert in range(experts):
        own = (ids.flatten() == expert).nonzero().flatten().tolist()
        own += [ids.numel()] * (-len(own) % size)
        pairs += own
        owners += [expert] * (len(own) // size)
    assert int(found.num_used) == len(owners)
    assert found.pair_ids[: len(pairs)].tolist() == pairs
    owners += [-1] * (len(found.expert_ids) - len(owners))
    assert found.expert_ids.tolist() == owners


def test_shares_need_not_add_up(tmp_path):
    make_checkpoint(tmp_path, **{**MOE, "norm_topk_prob": False})
    router = layers_of(tmp_path)[0].router
    _, shares = PortableOperators().route(make(1, torch.float32, 5, SMALL["hidden_size"]), router)
    assert (shares.sum(-1) < 1).all()


@pytest.mark.parametrize(
    ("options", "sparse"),
    [
        (dict(), [0, 1, 2, 3]),
        (dict(mlp_only_layers=[0, 3]), [1, 2]),
        (dict(decoder_sparse_step=2), [1, 3]),
        (dict(decoder_sparse_step=2, mlp_only_layers=[1]), [3]),
    ],
)
def test_dense_layers_between_sparse_ones(tmp_path, options, sparse):
    """The logits are transformers'."""
    moe = {**MOE, "norm_topk_prob": False, "num_hidden_layers": 4}
    model = make_checkpoint(tmp_path, **moe, **options)
    kinds = [type(part) for part in layers_of(tmp_path)]
    assert kinds == [Experts if n in sparse else MLP for n in range(4)]
    torch.testing.assert_close(logits_of(tmp_path), expected_of(model), rtol=1e-4, atol=1e-4)


def logits_of(directory):
    driver, sequence = Driver(directory), Sequence(torch.tensor(TOKENS))
    driver.step([(sequence, 5)])
    driver.step([(sequence, len(TOKENS) - 6)])
    driver.step([], [sequence])
    return torch.cat(sequence.logits)


def expected_of(model):
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


# -- checkpoints --------------------------------------------------------------------------


def fuse(directory, transposed):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for number in range(SMALL["num_hidden_layers"]):
        at = f"model.layers.{number}.mlp.experts"

        def taken(kind, at=at):
            return torch.stack([tensors.pop(f"{at}.{n}.{kind}_proj.weight") for n in range(8)])

        fused = torch.cat((taken("gate"), taken("up")), 1), taken("down")
        for name, tensor in zip(("gate_up_proj", "down_proj"), fused, strict=True):
            tensors[f"{at}.{name}"] = (
                tensor.transpose(1, 2) if transposed else tensor
            ).contiguous()
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("inner", [40, 32, 64])
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_of_a_layer_may_be_one_tensor(tmp_path, transposed, inner):
    """With a hidden size of 64, one of the two tensors looks the same transposed, or none does."""
    model = make_checkpoint(tmp_path, **MOE | dict(moe_intermediate_size=inner))
    fuse(tmp_path, transposed)
    torch.testing.assert_close(logits_of(tmp_path), expected_of(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_vl_moe", "qwen3_moe_fp8", "fp8"])
def test_tensors_may_be_in_several_files(tmp_path, name):
    make_checkpoint(tmp_path, **CONFIGURATIONS[name])
    expected = logits_of(tmp_path)
    split(tmp_path)
    assert torch.equal(logits_of(tmp_path), expected)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_rank_reads_its_part_of_fused_experts(tmp_path, transposed, ranks):
    make_checkpoint(tmp_path, **MOE)
    config = read_config(tmp_path)
    spec, name = config.family_options.spec, "model.layers.1.mlp.experts"

    def read(function):
        with CheckpointWeights(tmp_path, torch.float32, torch.device("cpu")) as weights:
            spans = [Span(40 * rank // ranks, 40 * (rank + 1) // ranks) for rank in range(ranks)]
            return [function(spec, weights, name, config.hidden_size, span) for span in spans]

    separate = read(_read_separate)
    fuse(tmp_path, transposed)
    for one, other in zip(separate, read(_read_fused), strict=True):
        assert torch.equal(one.gate_up.weight, other.gate_up.weight)
        assert torch.equal(one.down.weight, other.down.weight)
        assert other.down.weight.is_contiguous()


def test_packed_experts_in_one_tensor_are_refused_by_name(tmp_path):
    """Also if the tensors are not packed, although the configuration says so."""
    make_checkpoint(tmp_path, **MOE)
    fuse(tmp_path, False)
    path = tmp_path / "config.json"
    packed = dict(quant_method="fp8", weight_block_size=[16, 32])
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(quantization_config=packed)))
    config = read_config(tmp_path)
    refused = pytest.raises(UnsupportedModel, match=r"experts\.gate_up_proj: packed experts in one")
    with (
        CheckpointWeights(
            tmp_path, torch.float32, torch.device("cpu"), packed=format_of(config.quantization)
        ) as weights,
        refused,
    ):
        _read_fused(
            config.family_options.spec, weights, "model.layers.0.mlp.experts", 64, Span(0, 40)
        )


def test_the_kernel_of_a_whole_step_gets_experts_and_their_router(tmp_path):
    make_checkpoint(tmp_path, **MOE)
    device = InterpretedDevice()
    with CheckpointWeights(tmp_path, torch.float32, device.torch_device) as weights:
        decoder = Decoder(read_config(tmp_path), weights, device, 64)
        given = decoder.weights().layers[0]
        sizes = (MOE[f"num_{name}"] for name in ("experts", "experts_per_tok"))
        inner, hidden = MOE["moe_intermediate_size"], SMALL["hidden_size"]
        assert given.mixture == Mixture(*sizes, inner, MOE["norm_topk_prob"])
        prefix = "model.layers.0.mlp"
        assert torch.equal(
            given.router.weight, weights.load(f"{prefix}.gate.weight", *given.router.weight.shape)
        )
        names = (f"{prefix}.experts.3.{kind}_proj.weight" for kind in ("gate", "up"))
        pair = torch.cat([weights.load(name, inner, hidden) for name in names])
        assert torch.equal(given.gate_up[3], pair)
        down = weights.load(f"{prefix}.experts.3.down_proj.weight", hidden, inner)
        assert torch.equal(given.down[3], down)


# -- an expert for all tokens -------------------------------------------------------------


SHARED = CONFIGURATIONS["qwen2_moe"]


def test_a_shared_expert_is_not_described_to_the_kernel_of_a_whole_step(tmp_path):
    """Its layers would otherwise be computed as if they had none."""
    make_checkpoint(tmp_path, **SHARED | dict(mlp_only_layers=[]))
    device = InterpretedDevice()
    with CheckpointWeights(tmp_path, torch.float32, device.torch_device) as weights:
        assert Decoder(read_config(tmp_path), weights, device, 64).weights() is None


def test_missing_options_of_qwen2_moe_are_transformers_own(tmp_path):
    make_checkpoint(tmp_path, **SHARED)
    raw = json.loads((tmp_path / "config.json").read_text())
    kept = {key: value for key, value in raw.items() if key not in QWEN2_MOE.option_keys}
    config = Qwen2MoeConfig()
    spec = parse_config(kept).family_options.spec
    assert spec.inner == config.shared_expert_intermediate_size
    assert spec.experts == ExpertsSpec(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.norm_topk_prob,
    )


def test_what_is_wrong_with_a_shared_expert_is_named(tmp_path):
    make_checkpoint(tmp_path, **SHARED)
    raw = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match="qkv_bias must be true"):
        parse_config(raw | dict(qkv_bias=False))
    with pytest.raises(ModelError, match="shared_expert_intermediate_size"):
        parse_config(raw | dict(shared_expert_intermediate_size=0))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.shared_expert_gate.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(WeightsError, match="layers.0.mlp.shared_expert_gate.weight"):
        layers_of(tmp_path)


def test_an_expert_that_is_missing_is_named(tmp_path):
    make_checkpoint(tmp_path, **MOE)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(WeightsError, match="layers.1.mlp.experts.5.up_proj.weight"):
        layers_of(tmp_path)


def edited(tmp_path, **changes):
    make_checkpoint(tmp_path, **MOE)
    path = tmp_path / "config.json"
    return json.loads(path.read_text()) | changes


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (dict(num_experts_per_tok=9), "num_experts_per_tok 9 exceeds the number of experts, 8"),
        (dict(num_experts_per_tok=0), "num_experts_per_tok"),
        (dict(moe_intermediate_size="x"), "moe_intermediate_size"),
        (dict(norm_topk_prob=1), "norm_topk_prob"),
        (dict(mlp_only_layers=3), "mlp_only_layers"),
        (dict(mlp_only_layers=["0"]), "mlp_only_layers"),
        (dict(decoder_sparse_step=0), "decoder_sparse_step"),
        (dict(num_experts=7), "num_experts and num_local_experts must be equal"),
        (dict(n_shared_experts=1), "n_shared_experts"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_named(tmp_path, changes, word):
    with pytest.raises(ModelError, match=word):
        parse_config(edited(tmp_path, **changes))
