"""Rung 2: steps of Qwen3 on `npu:0` without values, through the wheel's own registrations and under
our contract checker; and each of its rules, broken."""

import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from nanoactor.models.batch import (
    AttentionBatch,
    DecodeRows,
    ForwardInputs,
    KVCache,
    RowBuffers,
    SamplingBatch,
    SlotTables,
)
from nanoactor.models.config import parse_config
from nanoactor.models.decoder import Decoder
from nanoactor.models.devices.npu import sampling
from nanoactor.models.devices.npu.device import NPUDevice
from nanoactor.models.limits import MAX_FREEZE_IDS
from nanoactor.models.options import DeviceOptions
from nanoactor.models.sampling.columns import WORDS, column_views
from nanoactor.models.sampling.logit_rules import TokenIds
from nanoactor.models.sampling.rows import SamplingGroups
from nanoactor.models.seq_lens import HostSeqLens
from nanoactor.models.vision.config import parse_vision
from nanoactor.models.vision.tower import Grid, VisionTower
from nanoactor.models.weights.random_weights import RandomWeights
from nanoactor.runner.batch.inputs import KeptRows, SampledRows
from nanoactor.runner.steps.choosing import TokenChooser
from nanoactor.runner.steps.step_choices import StepChoices
from tests.npu.wheel.contract import RULES, ContractBroken, ContractChecker, check
from tests.npu.wheel.soft_device import AscendRuntime

HALF = torch.bfloat16
SIZE, BLOCKS, WIDEST = 128, 40, 8
LAYERS = 2


class NoWeights(RandomWeights):
    """Of the right shapes and nothing else."""

    def __init__(self, device):
        super().__init__(HALF, device)

    def load(self, name, *shape, dtype=HALF, **part):
        return torch.empty(shape, dtype=dtype, device=self.device)


class Traced:
    """A Qwen3 of the 0.6B's widths on a device without values."""

    def __init__(self, layout, **changes):
        values = dict(head_dim=128, num_heads=16, num_kv_heads=8) | changes
        self.device = NPUDevice(AscendRuntime(0), DeviceOptions("npugraph", layout))
        where = self.device.torch_device
        self.config = config_of(**values)
        self.network = Decoder(self.config, NoWeights(where), self.device, 1024)
        shape = (BLOCKS, SIZE, values["num_kv_heads"], values["head_dim"])
        self.caches = [
            KVCache(*(torch.empty(shape, dtype=HALF, device=where) for _ in range(2)))
            for _ in range(LAYERS)
        ]

    def whole(self, *shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device=self.device.torch_device)

    def tables(self, slots):
        return SlotTables(
            self.whole(slots, WIDEST),
            self.whole(slots),
            self.whole(slots),
            None,
            self.whole(WORDS, slots),
            SIZE,
            self.whole(slots),
            self.whole(MAX_FREEZE_IDS, slots),
        )

    def step(self, prompts, decodes):
        """`prompts`: (tokens, context) of each; `decodes`: contexts."""
        first, rows = sum(tokens for tokens, _ in prompts), len(decodes)
        total = first + rows
        buffers = RowBuffers(
            self.whole(total),
            self.whole(total),
            self.whole(total, dtype=torch.int64),
            self.whole(rows),
        )
        tables, slots = self.tables(9), self.whole(rows)
        if rows:
            into = RowBuffers(*(b[first:] for b in vars_of(buffers)[:3]), buffers.contexts)
            asked = DecodeRows(slots, self.whole(rows), self.whole(rows))
            self.device.advance(tables, asked, into, self.whole(BLOCKS * SIZE))
        if first:
            of_tokens = self.whole(first)
            self.device.fill_slot_mapping(
                tables, of_tokens, of_tokens, buffers.slot_mapping[:first]
            )
        lengths = HostSeqLens([n for n, _ in prompts], [c for _, c in prompts], decodes)
        batch = AttentionBatch(
            buffers.slot_mapping,
            tables.blocks,
            SIZE,
            prefill_tokens=first,
            prefill_rows=self.whole(4, len(prompts)),
            prefill_tiles=self.whole(2, len(prompts)),
            decode_slots=slots,
            decode_contexts=buffers.contexts,
            lengths=lengths,
            frozen=tables.frozen,
        )
        batch = self.device.plan(None, batch)
        inputs = ForwardInputs(buffers.token_ids, buffers.positions, self.caches, batch)
        hidden = self.device.run(self.network.forward, inputs)
        assert hidden.shape == (total, self.config.hidden_size)
        assert hidden.dtype == HALF
        return hidden


def vars_of(value):
    return [getattr(value, name) for name in value.__dataclass_fields__]


def config_of(
    head_dim,
    num_heads,
    num_kv_heads,
    architecture="Qwen3ForCausalLM",
    vocab_size=1000,
    **more,
):
    values = dict(
        architectures=[architecture],
        vocab_size=vocab_size,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=LAYERS,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        eos_token_id=0,
        **more,
    )
    return parse_config(values, Path("config.json"))


STEPS = {
    "decode": ([], [1, 128, 129, 700]),
    "prefill": ([(300, 300)], []),
    "prefills": ([(5, 5), (130, 130), (1, 1)], []),
    "prefix hit": ([(44, 300)], []),
    "chunk": ([(128, 512)], []),
    "mixed": ([(7, 263), (130, 130)], [5, 900]),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("layout", ["tnd", "bnsd"])
def test_every_kind_of_step_keeps_the_contract(layout, name):
    prompts, decodes = STEPS[name]
    with FakeTensorMode(), torch.inference_mode():
        traced = Traced(layout)
        with ContractChecker() as checker:
            hidden = traced.step(prompts, decodes)
            assert traced.network.logits(hidden).shape[-1] == traced.config.vocab_size
    counts = Counter(checker.checked)
    parts = 1 if layout == "tnd" else bool(prompts) + bool(decodes)
    assert counts["npu_fused_infer_attention_score"] == LAYERS * parts
    for each in ("npu_scatter_pa_kv_cache", "npu_apply_rotary_pos_emb", "npu_swiglu"):
        assert counts[each] == LAYERS


@pytest.mark.parametrize("layout", ["tnd", "bnsd"])
@pytest.mark.parametrize(
    "family",
    [
        dict(architecture="Qwen2ForCausalLM"),
        dict(architecture="LlamaForCausalLM", attention_bias=True, mlp_bias=True),
        dict(architecture="MistralForCausalLM", sliding_window=None),
        dict(
            architecture="GraniteForCausalLM",
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.0078125,
            logits_scaling=16.0,
        ),
    ],
    ids=["qwen2", "llama", "mistral", "granite"],
)
def test_heads_that_are_not_normed_keep_the_contract(layout, family):
    with FakeTensorMode(), torch.inference_mode():
        traced = Traced(layout, **family)
        with ContractChecker() as checker:
            traced.step(*STEPS["mixed"])
    counts = Counter(checker.checked)
    assert counts["npu_apply_rotary_pos_emb"] == LAYERS
    assert counts["npu_rms_norm"] + counts["npu_add_rms_norm"] == 2 * LAYERS + 1


EXPERTS = dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256)
EXPERTS |= dict(architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", norm_topk_prob=True)


@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_experts_keep_the_contract(name):
    with FakeTensorMode(), torch.inference_mode():
        traced = Traced("tnd", **EXPERTS)
        with ContractChecker() as checker:
            traced.step(*STEPS[name])
    counts = Counter(checker.checked)
    assert counts["npu_moe_init_routing_v2"] == counts["npu_swiglu"] == LAYERS
    assert counts["npu_grouped_matmul"] == 2 * LAYERS


@pytest.mark.parametrize("head_dim", [80, 96, 256])
def test_other_heads_rotate_one_by_one_and_attend_padded(head_dim):
    with FakeTensorMode(), torch.inference_mode():
        traced = Traced("bnsd", head_dim=head_dim, num_heads=4, num_kv_heads=2)
        with ContractChecker() as checker:
            traced.step(*STEPS["mixed"])
    assert checker.checked.count("npu_rotary_mul") == 2 * LAYERS


def test_heads_that_packed_attention_does_not_take_are_seen():
    with FakeTensorMode(), torch.inference_mode():
        traced = Traced("tnd", head_dim=80, num_heads=4, num_kv_heads=2)
        with ContractChecker(), pytest.raises(ContractBroken, match="head_dim 80 in TND"):
            traced.step(*STEPS["decode"])


def sampled(limited, nucleus):
    """Ids of six rows without values."""

    def whole(*shape, dtype=torch.int64):
        return torch.empty(shape, dtype=dtype, device="npu:0")

    index = [whole(n) for n in (1, 1, limited, 0, nucleus, 1, 1)]
    columns = column_views(whole(WORDS, 6, dtype=torch.int32), torch.float32)
    batch = SamplingBatch(columns, whole(6), SamplingGroups(*index))
    return sampling.sample(whole(6, 1000, dtype=HALF), batch)


def test_sampling_keeps_the_contract():
    with FakeTensorMode(), torch.inference_mode(), ContractChecker() as checker:
        assert sampled(limited=4, nucleus=0).shape == (6,)
        # k may be left out, says the document; the wheel's shape function knows nothing of that.
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'k'"):
            sampled(limited=0, nucleus=2)
    assert checker.checked == ["npu_top_k_top_p"] * 2


def loaded(traced):
    """What a chooser asks of a model that runs alone."""
    return types.SimpleNamespace(
        device=traced.device,
        config=traced.config,
        network=traced.network,
        dtype=HALF,
        pooling=None,
        group=types.SimpleNamespace(size=1),
        sample=sampling.sample,
        max_logits=lambda logits: logits.amax(-1),
        gather_logits=traced.network.logits,
    )


@pytest.mark.parametrize("fused", [False, True], ids=["cut", "greedy"])
def test_states_are_kept_and_choices_made_under_masks_without_values(fused):
    """Of 151,936 ids; slots are int64."""
    with FakeTensorMode(), torch.inference_mode():
        traced = Traced("tnd", vocab_size=151936)
        tables, whole = traced.tables(9), traced.whole
        model = loaded(traced)
        tokens = TokenIds(whole(BLOCKS * SIZE), whole(9), tables)
        chooser = TokenChooser(
            model, traced.device.traits.fused_sampling, tokens, max_num_seqs=8, debug=True
        )
        choices = StepChoices(model, chooser, 9)

        def slots(count):
            return whole(count, dtype=torch.int64)

        groups = SamplingGroups(*map(slots, (1, 1, 2, 0, 0, 0, 0)))
        rows = SampledRows(slots(4), slots(4), groups, None, whole(4, 151936 // 32), fused)
        hidden = traced.step(*STEPS["mixed"])
        with ContractChecker() as checker:
            choices._keep(KeptRows(slots(2), slots(2)), hidden, 0, 139)
            chosen = chooser.choose_from(choices.kept, rows)
    assert choices.kept.states.shape == (9, 1024)
    assert choices.kept.states.dtype == HALF
    assert chosen.shape == (4,)
    assert chosen.dtype == torch.int32
    assert chosen.device == traced.device.torch_device
    assert checker.checked == ([] if fused else ["npu_top_k_top_p"])


# The towers of Qwen3-VL-2B and -8B, two blocks of each; heads of 64 and 72.
TOWERS = {
    "2B": dict(hidden_size=1024, intermediate_size=4096, out_hidden_size=2048),
    "8B": dict(hidden_size=1152, intermediate_size=4304, out_hidden_size=4096),
}


@pytest.mark.parametrize("size", TOWERS)
@pytest.mark.parametrize(
    "grids", [[Grid(1, 48, 64)], [Grid(3, 4, 6), Grid(1, 2, 2)]], ids=["image", "video"]
)
def test_a_tower_keeps_the_contract(size, grids):
    section = dict(depth=2, deepstack_visual_indexes=[1], **TOWERS[size])
    config = parse_vision({"vision_config": section}, size)
    with FakeTensorMode(), torch.inference_mode():
        device = NPUDevice(AscendRuntime(0), DeviceOptions())
        tower = VisionTower(config, NoWeights(device.torch_device), device, "model.visual")
        patches = sum(grid.patches for grid in grids)
        rows = torch.empty(patches, config.patch_values, dtype=HALF, device=device.torch_device)
        with ContractChecker() as checker:
            features = tower(rows, grids)
    assert features.shape == (patches // 4, 2 * config.out_hidden_size)
    assert features.dtype == HALF
    counts = Counter(checker.checked)
    assert counts == {"npu_fusion_attention": 2, "npu_rotary_mul": 2}


# -- each rule, broken -------------------------------------------------------------------------


def zeros(*shape, dtype=HALF):
    return torch.zeros(shape, dtype=dtype)


def causal(size=2048, dtype=torch.int8):
    return torch.ones(size, size, dtype=dtype).triu(1)


def slanted(*shape, dtype=HALF):
    """Of this shape, and not contiguous."""
    return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., : shape[-1]]


def packed(**changes):
    """Three rows of 1, 4 and 2 tokens."""
    values = dict(
        query=zeros(7, 4, 128),
        key=zeros(10, 128, 256),
        value=zeros(10, 128, 256),
        block_table=torch.zeros(3, 4, dtype=torch.int32),
        block_size=128,
        actual_seq_lengths=[1, 5, 7],
        actual_seq_lengths_kv=[130, 4, 300],
        num_heads=4,
        num_key_value_heads=2,
        scale=0.1,
        input_layout="TND",
        atten_mask=causal(),
        sparse_mode=3,
    )
    return values | changes


def padded(**changes):
    query = zeros(3, 4, 4, 128)
    return packed(query=query, actual_seq_lengths=[1, 4, 2], input_layout="BNSD") | changes


def decode(**changes):
    values = packed(query=zeros(3, 4, 1, 128), input_layout="BNSD", sparse_mode=0)
    return values | dict(atten_mask=None, actual_seq_lengths=None) | changes


def writing(**changes):
    values = dict(key=zeros(3, 2, 128), value=zeros(3, 2, 128), cache_mode="Norm")
    values |= dict(key_cache=zeros(4, 128, 2, 128), value_cache=zeros(4, 128, 2, 128))
    return values | dict(slot_mapping=torch.tensor([5, 0, 511])) | changes


def pair(**changes):
    values = dict(query=zeros(1, 5, 4, 128), key=zeros(1, 5, 2, 128), layout="BSND")
    return values | dict(cos=zeros(1, 5, 1, 128), sin=zeros(1, 5, 1, 128)) | changes


def single(**changes):
    values = dict(input=zeros(1, 5, 4, 80), r1=zeros(1, 5, 1, 80), r2=zeros(1, 5, 1, 80))
    return values | changes


def whole(**changes):
    """Three segments of 2, 4 and 1 tokens."""
    values = dict.fromkeys(("query", "key", "value"), zeros(7, 16, 72))
    values |= dict(head_num=16, input_layout="TND", scale=0.1)
    return values | dict(actual_seq_qlen=[2, 6, 7], actual_seq_kvlen=[2, 6, 7]) | changes


def cutting(**changes):
    p, k = torch.ones(3), torch.tensor([1, 20, 100], dtype=torch.int32)
    return dict(logits=torch.zeros(3, 2000), p=p, k=k) | changes


NORM = dict(input=zeros(3, 64), gamma=zeros(64))
SUM = dict(x1=zeros(3, 64), x2=zeros(3, 64), gamma=zeros(64))
FIA, WRITE = "npu_fused_infer_attention_score", "npu_scatter_pa_kv_cache"
FUSION = "npu_fusion_attention"
ROUTE, GROUPS = "npu_moe_init_routing_v2", "npu_grouped_matmul"


def routing(**changes):
    """Three tokens, two of four experts each."""
    ids = torch.tensor([[1, 0], [3, 1], [1, 3]], dtype=torch.int32)
    given = dict(x=zeros(3, 64), expert_idx=ids, active_num=6, expert_num=4, quant_mode=-1)
    given |= dict(expert_tokens_num_type=1, expert_tokens_num_flag=True, row_idx_type=0)
    return given | dict(active_expert_range=[0, 4]) | changes


def grouping(**changes):
    """Six rows for four experts, one of which has none."""
    given = dict(x=[zeros(6, 64)], weight=[zeros(4, 64, 32)], group_type=0, split_item=3)
    return given | dict(group_list=torch.tensor([1, 3, 0, 2]), group_list_type=1) | changes


KEPT = [
    (FIA, packed()),
    (FIA, padded()),
    (FIA, decode()),
    (
        FIA,
        decode(
            block_size=16,
            key=zeros(10, 16, 256),
            value=zeros(10, 16, 256),
            actual_seq_lengths_kv=[64, 1, 17],
        ),
    ),
    (WRITE, writing()),
    (WRITE, writing(slot_mapping=torch.tensor([5, 0, 1], dtype=torch.int32))),
    (FUSION, whole()),
    ("npu_apply_rotary_pos_emb", pair()),
    ("npu_rotary_mul", single()),
    ("npu_rms_norm", NORM),
    ("npu_add_rms_norm", SUM),
    ("npu_swiglu", dict(input=zeros(3, 64))),
    ("npu_top_k_top_p", cutting()),
    ("npu_top_k_top_p", cutting(k=None)),
    (ROUTE, routing()),
    (GROUPS, grouping()),
    (GROUPS, grouping(weight=[zeros(4, 32, 64).transpose(1, 2)])),
]
BROKEN = [
    (FIA, packed(query=slanted(7, 4, 128)), "query is not contiguous"),
    (FIA, packed(key=slanted(10, 128, 256)), "key is not contiguous"),
    (FIA, packed(query=zeros(7, 4, 128, dtype=torch.float16)), "different types"),
    (FIA, packed(query=zeros(7, 4, 128, dtype=torch.float32),
                 key=zeros(10, 128, 256, dtype=torch.float32),
                 value=zeros(10, 128, 256, dtype=torch.float32)), "no 16-bit type"),
    (FIA, packed(input_layout="BSH"), "layout BSH"),
    (FIA, packed(num_heads=8), "num_heads 8, query has 4"),
    (FIA, packed(num_key_value_heads=3), "no multiple"),
    (FIA, packed(num_key_value_heads=4), "do not fill"),
    (FIA, packed(query=zeros(7, 4, 80)), "head_dim 80 in TND"),
    (FIA, padded(query=zeros(3, 4, 4, 72)), "head_dim 72"),
    (FIA, packed(key=zeros(10, 128, 2, 128)), "the cache is not paged"),
    (FIA, packed(block_table=None), "no block table"),
    (FIA, packed(block_table=torch.zeros(3, 4, dtype=torch.int64)), "table in torch.int64"),
    (FIA, packed(block_table=torch.zeros(4, 4, dtype=torch.int32)), "4 rows of blocks, batch 3"),
    (FIA, packed(block_table=slanted(3, 4, dtype=torch.int32)), "block_table is not contiguous"),
    (FIA, packed(block_size=256), "not the cache's"),
    (FIA, packed(block_size=64, key=zeros(10, 64, 256), value=zeros(10, 64, 256)), "block_size 64"),
    (FIA, decode(block_size=40, key=zeros(10, 40, 256), value=zeros(10, 40, 256)), "block_size 40"),
    (FIA, packed(actual_seq_lengths=[1, 4, 2]), "do not add up"),
    (FIA, packed(actual_seq_lengths=[1, 5, 6]), "is not the number of tokens"),
    (FIA, padded(actual_seq_lengths=[1, 4]), "not one length for each row"),
    (FIA, padded(actual_seq_lengths=[1, 5, 2]), "beyond the padding"),
    (FIA, packed(actual_seq_lengths_kv=[130, 4]), "not one context"),
    (FIA, packed(actual_seq_lengths_kv=[300, 430, 730]), "or cumulative"),
    (FIA, packed(actual_seq_lengths_kv=[130, 3, 300]), "fewer keys than queries"),
    (FIA, packed(sparse_mode=0), "not causal"),
    (FIA, packed(atten_mask=None), "no mask of 2048"),
    (FIA, packed(atten_mask=causal(128)), "no mask of 2048"),
    (FIA, packed(atten_mask=causal(dtype=torch.float32)), "a mask in torch.float32"),
    (FIA, packed(atten_mask=causal().t()), "atten_mask is not contiguous"),
    (FIA, decode(atten_mask=causal()), "where every position is seen"),
    (WRITE, writing(cache_mode="PA_NZ"), "not the plain layout"),
    (WRITE, writing(value=slanted(3, 2, 128)), "value is not contiguous"),
    (WRITE, writing(key=zeros(3, 2, 128, dtype=torch.float16)), "different types"),
    (WRITE, writing(key=zeros(3, 256)), "wrong ranks"),
    (WRITE, writing(key=zeros(3, 4, 128)), "heads differ"),
    (WRITE, writing(slot_mapping=torch.tensor([5.0, 0, 1])), "no whole numbers"),
    (WRITE, writing(slot_mapping=torch.tensor([5, 0])), "not one slot"),
    (WRITE, writing(slot_mapping=torch.tensor([5, 0, 5])), "a slot twice"),
    (WRITE, writing(slot_mapping=torch.tensor([5, -1, 0])), "outside of the cache"),
    (WRITE, writing(slot_mapping=torch.tensor([5, 512, 0])), "outside of the cache"),
    (FUSION, whole(query=slanted(7, 16, 72)), "query is not contiguous"),
    (FUSION, whole(key=zeros(7, 16, 72, dtype=torch.float16)), "different types"),
    (FUSION, whole(input_layout="BSND"), "layout BSND"),
    (FUSION, whole(value=zeros(6, 16, 72)), "not one shape"),
    (FUSION, whole(head_num=8), "head_num 8"),
    (FUSION, whole(actual_seq_qlen=[2, 4, 1]), "keys are not the queries'"),
    (FUSION, whole(actual_seq_qlen=[2, 6], actual_seq_kvlen=[2, 6]), "is not the number of tokens"),
    (FUSION, whole(actual_seq_qlen=[4, 2, 7], actual_seq_kvlen=[4, 2, 7]), "do not add up"),
    (FUSION, whole(atten_mask=causal(dtype=torch.bool)), "where every position is seen"),
    ("npu_apply_rotary_pos_emb", pair(layout="BNSD"), "another layout"),
    ("npu_apply_rotary_pos_emb", pair(query=zeros(1, 5, 4, 80)), "head_dim 80"),
    ("npu_apply_rotary_pos_emb", pair(cos=zeros(1, 5, 1, 64)), "cos or sin"),
    ("npu_apply_rotary_pos_emb", pair(key=slanted(1, 5, 2, 128)), "key is not contiguous"),
    ("npu_rotary_mul", single(r1=zeros(1, 1, 5, 80)), "cos or sin"),
    ("npu_rotary_mul", single(input=zeros(1, 5, 4, 900)), "head_dim 900"),
    ("npu_rms_norm", NORM | dict(gamma=zeros(32)), "gamma has another size"),
    ("npu_rms_norm", NORM | dict(input=slanted(3, 64)), "input is not contiguous"),
    ("npu_add_rms_norm", SUM | dict(x2=zeros(4, 64)), "different shapes"),
    ("npu_add_rms_norm", SUM | dict(x2=zeros(3, 64, dtype=torch.float16)), "different types"),
    ("npu_swiglu", dict(input=zeros(3, 63)), "cannot be halved"),
    ("npu_swiglu", dict(input=slanted(3, 64)), "input is not contiguous"),
    ("npu_top_k_top_p", cutting(p=None, k=None), "neither"),
    ("npu_top_k_top_p", cutting(p=torch.ones(3, dtype=HALF)), "p is not like"),
    ("npu_top_k_top_p", cutting(k=torch.tensor([1, 2, 3])), "k is not int32"),
    ("npu_top_k_top_p", cutting(k=torch.tensor([1, 2, 0], dtype=torch.int32)), "k beyond"),
    ("npu_top_k_top_p", cutting(k=torch.tensor([1, 2, 1025], dtype=torch.int32)), "k beyond"),
    (ROUTE, routing(x=slanted(3, 64)), "x is not contiguous"),
    (ROUTE, routing(x=zeros(2, 64)), "not one row of experts"),
    (ROUTE, routing(expert_idx=torch.zeros(3, 2, dtype=torch.int64)), "torch.int64"),
    (ROUTE, routing(x=zeros(3, 64, dtype=torch.float32)), "torch.float32 and"),
    (ROUTE, routing(active_num=3), "active_num 3"),
    (ROUTE, routing(quant_mode=1), "dropped or packed"),
    (ROUTE, routing(expert_tokens_num_flag=False), "no counts"),
    (ROUTE, routing(active_expert_range=[0, 5]), "experts 0 to 5"),
    (ROUTE, routing(row_idx_type=-1), "row_idx_type -1"),
    (ROUTE, routing(expert_idx=torch.full((3, 2), 4, dtype=torch.int32)), "there is not"),
    (GROUPS, grouping(x=[slanted(6, 64)]), "x is not contiguous"),
    (GROUPS, grouping(x=[zeros(6, 64, dtype=torch.float16)]), "different types"),
    (GROUPS, grouping(weight=[zeros(64, 32)]), "no stack"),
    (GROUPS, grouping(weight=[zeros(4, 60, 32)]), "inputs differ"),
    (GROUPS, grouping(weight=[zeros(4, 64, 64)[:, :, ::2]]), "neither as they are"),
    (GROUPS, grouping(x=[zeros(6, 65536)], weight=[zeros(4, 65536, 1)]), "65,536"),
    (GROUPS, grouping(split_item=0), "not groups of rows"),
    (GROUPS, grouping(group_list=torch.tensor([1, 5])), "groups"),
    (GROUPS, grouping(group_list_type=0), "not sizes"),
    (GROUPS, grouping(group_list=torch.tensor([1, 2, 0, 2])), "do not add up"),
]  # fmt: skip


def operator(name):
    return getattr(torch.ops.npu, name).default


@pytest.mark.parametrize(("name", "given"), KEPT)
def test_calls_that_keep_the_rules_pass(name, given):
    check(operator(name), (), given)


@pytest.mark.parametrize(("name", "given", "what"), BROKEN)
def test_a_broken_rule_is_caught(name, given, what):
    with pytest.raises(ContractBroken, match=what):
        check(operator(name), (), given)


def test_every_rule_is_broken_once():
    assert {name for name, *_ in BROKEN} == {name for name, _ in KEPT} == RULES.keys()
