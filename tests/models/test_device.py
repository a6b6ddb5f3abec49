"""What every device must do, against float64 references written here: a port passes this file.

Attention reads, of the cache, a prefill row's context and nothing else; for decode rows whole
blocks, those their table names and its padding, where whatever finite numbers lie beyond a
context must not matter. All other memory may hold anything, so it is NaN here.
"""

import math
import mmap
import random

import pytest
import torch

from nanoactor.models.batch import KVCache
from nanoactor.models.devices import SUPPORTED_DEVICES, open_device
from nanoactor.models.devices.cpu import device as cpu
from nanoactor.models.devices.npu.device import NPUDevice
from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.options import DeviceOptions
from tests.models.batches import attention_batch, sampling_batch
from tests.models.interpreted import InterpretedDevice
from tests.npu.emulation import HostRuntime, relaxed

INTERPRETED = "interpreted"
EMULATED = {"npu, packed": "tnd", "npu, padded": "bnsd"}
PORTABLE = "cpu, portable"
DEVICES = ["cpu", PORTABLE, INTERPRETED, *EMULATED, pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param in EMULATED:
        device = NPUDevice(
            HostRuntime(any_block=True), DeviceOptions(attention_layout=EMULATED[request.param])
        )
    elif request.param == INTERPRETED:
        device = InterpretedDevice()
    elif request.param == PORTABLE:
        device = cpu.CPUDevice()
    else:
        device = open_device(request.param)
    device.prepare_thread(1)
    with relaxed():  # these tests are about any size
        yield device


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request, device):
    if not device.supports(request.param) and device.traits.name == INTERPRETED:
        pytest.skip("Triton's interpreter has no products in bfloat16")
    return request.param


def emulated(device):
    return device.traits.name == "npu" and device.torch_device.type == "cpu"


class Maker:
    """Random tensors on a device."""

    def __init__(self, device, dtype, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype = device, dtype

    def __call__(self, *shape, scale=1.0):
        values = torch.randn(shape, generator=self.generator) * scale
        return values.to(self.device.torch_device, self.dtype)


@pytest.fixture
def make(device, dtype):
    return Maker(device, dtype)


def wide(tensor):
    return tensor.detach().to("cpu", torch.float64)


def assert_close(found, expected, dtype, roundings=2, each=False):
    """Within so many roundings to the type, of `each` value or else of the largest."""
    assert found.dtype == dtype
    assert found.shape == expected.shape
    if expected.numel():
        scale = expected.abs() if each else expected.abs().max()
        allowed = (roundings * torch.finfo(dtype).eps / 2 + 1e-6) * scale
        # What is twenty orders below the largest may be lost.
        allowed += 1e-30 + 1e-20 * expected.abs().max()
        assert ((wide(found) - expected).abs() <= allowed).all()


# -- elementwise operators ---------------------------------------------------------------------


def rms_norm_reference(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (7, 64), (5, 3, 24), (2, 1)], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_rms_norm(device, make, dtype, shape, scale, eps):
    x, weight = make(*shape, scale=scale), make(shape[-1])
    expected = rms_norm_reference(wide(x), wide(weight), eps)
    assert_close(device.rms_norm(x, weight, eps), expected, dtype, each=True)


def test_rms_norm_takes_views_of_a_fused_projection(device, make, dtype):
    x, weight = make(6, 5, 24)[:, 1:3], make(24)
    expected = rms_norm_reference(wide(x), wide(weight), 1e-6)
    assert_close(device.rms_norm(x, weight, 1e-6), expected, dtype, each=True)


def test_norms_with_float32_weights_round_the_product_once(device, make, dtype):
    """As in Gemma and Qwen3-Next."""
    x, residual = make(7, 64), make(7, 64)
    weight = Maker(device, torch.float32, seed=1)(64) + 1
    expected = rms_norm_reference(wide(x), wide(weight), 1e-6)
    assert_close(device.rms_norm(x, weight, 1e-6), expected, dtype, roundings=1.01, each=True)
    normed, added = device.add_rms_norm(x, residual, weight, 1e-6)
    assert_close(added, wide(x) + wide(residual), dtype, roundings=1, each=True)
    expected = rms_norm_reference(wide(added), wide(weight), 1e-6)
    assert_close(normed, expected, dtype, roundings=1.01, each=True)


@pytest.mark.parametrize("rotated", [2, 16, 24])
def test_the_rest_of_each_head_is_not_rotated(device, make, dtype, rotated):
    x = make(5, 3, 24)
    angles = torch.rand(5, rotated // 2, generator=make.generator) * 100
    cos, sin = (f(angles).to(x) for f in (torch.cos, torch.sin))
    head, half = wide(x), rotated // 2
    first, second = head[..., :half], head[..., half:rotated]
    cosine, sine = wide(cos)[:, None], wide(sin)[:, None]
    expected = (first * cosine - second * sine, second * cosine + first * sine)
    found = device.rotary(x, cos, sin)
    assert_close(found, torch.cat((*expected, head[..., rotated:]), -1), dtype)


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_add_rms_norm_returns_the_norm_of_the_sum_and_the_sum(device, make, dtype, tokens):
    x, residual, weight = make(tokens, 64), make(tokens, 64, scale=8.0), make(64)
    total = wide(x) + wide(residual)
    normed, added = device.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(added, total, dtype, roundings=1, each=True)
    # The sum is rounded before it is normed.
    normed_sum = rms_norm_reference(wide(added), wide(weight), 1e-5)
    assert_close(normed, normed_sum, dtype, each=True)


@pytest.mark.parametrize("shape", [(0, 2, 24), (1, 1, 2), (9, 4, 24), (3, 5, 128)], ids=str)
def test_rotary_turns_each_pair_by_its_angle(device, make, dtype, shape):
    x = make(*shape)
    angles = torch.rand(shape[0], shape[2] // 2, generator=make.generator) * 100
    cos, sin = (f(angles).to(x) for f in (torch.cos, torch.sin))
    first, second = wide(x).chunk(2, -1)
    turned = torch.complex(first, second) * torch.complex(wide(cos), wide(sin))[:, None]
    expected = torch.cat([turned.real, turned.imag], -1)
    assert_close(device.rotary(x, cos, sin), expected, dtype)


@pytest.mark.parametrize("heads", [1, 8, 11])
def test_rotary_takes_a_part_of_a_projection_and_wider_angles(device, make, dtype, heads):
    """As a vision tower has them: heads of 72, float32 angles, one rounding."""
    x = make(5, heads + 3, 72)[:, :heads]
    angles = torch.rand(5, 36, generator=make.generator).to(x.device) * 100
    first, second = wide(x).chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.complex(first, second) * torch.complex(wide(cos), wide(sin))[:, None]
    expected = torch.cat([turned.real, turned.imag], -1)
    found = device.rotary(x, cos, sin)
    assert found.dtype == x.dtype
    assert_close(found, expected, dtype, roundings=1)


@pytest.mark.parametrize("shape", [(0, 64), (1, 2), (7, 192)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_swiglu(device, make, dtype, shape, scale):
    gate_up = make(*shape, scale=scale)
    gate, up = wide(gate_up).chunk(2, -1)
    assert_close(device.swiglu(gate_up), gate * torch.sigmoid(gate) * up, dtype, each=True)


# -- the cache ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 11, 40])
def test_write_kv_stores_rows_at_their_slots_and_touches_nothing_else(device, make, dtype, tokens):
    blocks, size, heads, dim = 10, 4, 3, 24
    cache = KVCache(make(blocks, size, heads, dim), make(blocks, size, heads, dim))
    # Views of a fused projection, as the model gives them.
    _, keys, values = make(tokens, 4 + 2 * heads, dim).split([4, heads, heads], dim=1)
    slots = torch.randperm(blocks * size, generator=make.generator)[:tokens]
    expected = [cache.keys.clone(), cache.values.clone()]
    for token, slot in enumerate(slots.tolist()):
        for whole, rows in zip(expected, (keys, values), strict=True):
            whole[slot // size, slot % size] = rows[token]
    device.write_kv(keys, values, cache, slots.to(device.torch_device))
    assert torch.equal(cache.keys, expected[0])
    assert torch.equal(cache.values, expected[1])


# -- attention ---------------------------------------------------------------------------------


def attention_reference(queries, keys, values, scale):
    """The last len(queries) positions attend to all up to themselves; float64, head by head."""
    tokens, heads, _ = queries.shape
    context, group = len(keys), heads // keys.shape[1]
    output = torch.empty_like(queries)
    for token in range(tokens):
        seen = context - tokens + token + 1
        for head in range(heads):
            scores = keys[:seen, head // group] @ queries[token, head] * scale
            output[token, head] = scores.softmax(0) @ values[:seen, head // group]
    return output


class Case:
    """A ragged batch over a cache that is NaN wherever nothing may be read.

    `prefills` are (context, tokens), `decodes` contexts; `shared` rows begin with the same
    prefix blocks.
    """

    size = 4

    def __init__(self, make, heads, kv_heads, prefills=(), decodes=(), shared=0, dim=24):
        rng = random.Random(len(prefills) * 100 + len(decodes))
        contexts = [context for context, _ in prefills] + list(decodes)
        counts = [tokens for _, tokens in prefills] + [1] * len(decodes)
        needed = [-(-context // self.size) for context in contexts]
        blocks = sum(needed) + 3
        order = rng.sample(range(blocks), blocks)
        prefix = [order.pop() for _ in range(shared)]
        own = [[order.pop() for _ in range(n - shared)] for n in needed]
        self.tables = [(prefix + mine)[:n] for mine, n in zip(own, needed, strict=True)]
        shape = (blocks, self.size, kv_heads, dim)
        content = make(*shape), make(*shape)
        self.cache = KVCache(*(torch.full_like(c, math.nan) for c in content))
        whole = [] if not decodes else {0, *(b for t in self.tables[len(prefills) :] for b in t)}
        for name, values in zip(("keys", "values"), content, strict=True):
            target = getattr(self.cache, name)
            for block in whole:
                target[block] = 100 * values[block]
            for table, context in zip(self.tables, contexts, strict=True):
                for at in range(context):
                    target[table[at // self.size], at % self.size] = values[
                        table[at // self.size], at % self.size
                    ]
        self.queries = make(sum(counts), heads, dim)
        self.scale = 0.31
        self.contexts, self.counts = contexts, counts
        self.prefills = len(prefills)
        self.on = make.device.torch_device

    def batch(self, device, padding=0, rows=slice(None)):
        """All rows, or a part of them."""
        numbers = range(len(self.counts))[rows]
        prefills = [(self.counts[r], self.contexts[r]) for r in numbers if r < self.prefills]
        decodes = [self.contexts[r] for r in numbers if r >= self.prefills]
        tables = [self.tables[r] for r in numbers]
        heads = self.queries.shape[1], *self.cache.keys.shape[2:]
        return attention_batch(device, tables, prefills, decodes, heads, self.size, padding=padding)

    def run(self, device, padding=0):
        batch = self.batch(device, padding)
        return device.attention(self.queries, self.cache, batch, self.scale)

    def expected(self):
        outputs = []
        for queries, table, context in zip(
            wide(self.queries).split(self.counts), self.tables, self.contexts, strict=True
        ):
            keys, values = (
                wide(c)[table].flatten(0, 1)[:context] for c in (self.cache.keys, self.cache.values)
            )
            outputs.append(attention_reference(queries, keys, values, self.scale))
        return torch.cat(outputs)


HEADS = [(3, 3), (4, 2), (5, 1), (16, 2)]
RAGGED = {
    "one_whole_prompt": dict(prefills=[(13, 13)]),
    "one_token": dict(prefills=[(1, 1)]),
    "one_decode_row": dict(decodes=[9]),
    "first_decode": dict(decodes=[1]),
    "chunks": dict(prefills=[(13, 5), (13, 1), (8, 4), (9, 9), (30, 2), (5, 4)]),
    "decodes": dict(decodes=[1, 4, 5, 8, 17, 33, 2]),
    "mixed": dict(prefills=[(13, 13), (21, 6), (1, 1)], decodes=[1, 12, 30]),
    "prefix_hits": dict(prefills=[(13, 5), (12, 4), (30, 22)], decodes=[9, 12, 25], shared=2),
}


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("name", RAGGED)
def test_attention_over_ragged_rows_and_scattered_blocks(
    device, make, dtype, heads, kv_heads, name
):
    case = Case(make, heads, kv_heads, **RAGGED[name])
    assert_close(case.run(device), case.expected(), dtype, roundings=4)


@pytest.mark.parametrize("dim", [2, 64, 128])
def test_attention_with_heads_of_other_sizes(device, make, dtype, dim):
    case = Case(make, 4, 2, prefills=[(11, 3)], decodes=[6, 2], dim=dim)
    assert_close(case.run(device), case.expected(), dtype, roundings=4)


def test_attention_without_rows_gives_an_empty_output(device, make, dtype):
    assert Case(make, 4, 2).run(device).shape == (0, 4, 24)


@pytest.mark.parametrize("name", ["decodes", "mixed", "prefix_hits"])
def test_what_lies_beyond_a_context_changes_no_bit(device, make, name):
    case = Case(make, 4, 2, **RAGGED[name])
    expected = case.run(device)
    for cache in (case.cache.keys, case.cache.values):
        seen = torch.zeros(cache.shape[:2], dtype=torch.bool)
        for table, context in zip(case.tables, case.contexts, strict=True):
            for at in range(context):
                seen[table[at // case.size], at % case.size] = True
        cache[~seen] = -1000.0
    for padding in (0, 1, len(case.cache.keys) - 1):
        assert torch.equal(case.run(device, padding), expected)


def test_rows_give_alone_what_they_give_together(device, make, dtype):
    case = Case(make, 4, 2, **RAGGED["mixed"])
    together = case.run(device)
    counts = case.counts
    parts, queries = together.split(counts), case.queries.split(counts)
    for row in range(len(counts)):
        only = case.batch(device, rows=slice(row, row + 1))
        found = device.attention(queries[row], case.cache, only, case.scale)
        assert_close(found, wide(parts[row]), dtype)


def test_attention_survives_scores_of_hundreds(device, make, dtype):
    case = Case(make, 4, 2, prefills=[(13, 13), (21, 6)], decodes=[12, 30])
    case.queries *= 64
    # A float32 score of some hundreds is itself known to no better than this.
    roundings = {torch.float32: 200, torch.bfloat16: 8}[dtype]
    assert_close(case.run(device), case.expected(), dtype, roundings)


# -- sampling ----------------------------------------------------------------------------------


def of_kinds(device, kinds):
    """The first greedy row may not choose id 3."""
    rows = [dict(top_k=1, seed=row) for row in range(len(kinds))]
    masked = [(row, 3) for row, kind in enumerate(kinds) if kind == "greedy"][:1]
    where = device.torch_device
    return sampling_batch(rows, [5] * len(rows), masked, kinds, where)


@pytest.mark.parametrize(
    "kinds", [[], ["greedy"], ["plain", "limited", "unlimited", "nucleus", "greedy"] * 4], ids=len
)
def test_sample_chooses_one_id_for_each_row(device, make, kinds):
    logits = make(len(kinds), 211)
    logits[:, 3] = 50
    chosen = device.sample(logits, of_kinds(device, kinds))
    assert chosen.dtype == torch.int64
    assert chosen.device.type == device.torch_device.type
    # One row is masked; all others have hardly a choice.
    assert (chosen != 3).nonzero().flatten().tolist() == [
        row for row, kind in enumerate(kinds) if kind == "greedy"
    ][:1]


def test_devices_sample_the_same_tokens_from_the_same_logits(device):
    logits = Maker(open_device("cpu"), torch.float32)(300, 211, scale=2.0)
    kinds = ["plain"] * 300
    expected = open_device("cpu").sample(logits.clone(), of_kinds(open_device("cpu"), kinds))
    found = device.sample(logits.to(device.torch_device), of_kinds(device, kinds))
    # Logarithms may differ in the last bit, and hardly ever the choice with them.
    assert (found.cpu() == expected).float().mean() > 0.99


# -- memory, events, types ---------------------------------------------------------------------


def test_the_device_describes_itself(device):
    if device.traits.name == INTERPRETED:
        pytest.skip("it is no device of the project")
    assert device.traits.name in SUPPORTED_DEVICES
    assert device.torch_device.type == device.traits.name or emulated(device)
    assert device.traits.collective_backend in ("gloo", "nccl", "hccl")
    assert device.traits.default_block_size > 0
    assert 0 < device.traits.default_memory_utilization <= 1


def test_the_default_type_is_a_supported_one(device):
    assert device.supports(device.traits.default_dtype)
    assert not device.supports(torch.int8)
    assert not device.supports(torch.float64)


def test_memory_says_what_there_is_and_what_is_free(device):
    memory = device.memory()
    assert 2**28 < memory.free <= memory.total


def test_peak_counts_what_is_allocated_after_its_reset(device):
    if device.traits.name == INTERPRETED or emulated(device):
        pytest.skip("it has no memory of its own")
    mebibyte = 2**20

    def ones(size):
        """On a CPU in new pages: a heap that earlier tests have grown need not grow again."""
        if device.torch_device.type != "cpu":
            return torch.ones(size, dtype=torch.int8, device=device.torch_device)
        return torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.int8).fill_(1)

    def peak(earlier):
        ones(earlier)  # and freed again
        device.reset_peak_memory()
        kept = ones(150 * mebibyte)
        ones(50 * mebibyte)
        del kept
        return device.peak_memory()

    for earlier in (0, 300 * mebibyte):
        # 200 in truth; a host that takes back idle pages by itself may count fewer, or none.
        found = [peak(earlier) // mebibyte for _ in range(5)]
        assert any(120 < each < 230 for each in found), found


def test_zeros_are_zero_contiguous_and_writable(device):
    for shape, dtype in (
        ((3, 4, 2, 8), torch.bfloat16),
        ((5, 1), torch.float32),
        ((0, 4), torch.int8),
    ):
        zeros = device.zeros(*shape, dtype=dtype)
        assert (zeros.shape, zeros.dtype, zeros.is_contiguous()) == (shape, dtype, True)
        assert not zeros.any()
        zeros += 1
        assert zeros.float().sum() == zeros.numel()


def test_pinned_tensors_are_host_memory_of_the_shape_and_type_asked_for(device):
    for shape, dtype in (((3, 4), torch.int32), ((0,), torch.float32), ((5,), torch.int64)):
        pinned = device.empty_pinned(*shape, dtype=dtype)
        assert pinned.device.type == "cpu"
        assert (tuple(pinned.shape), pinned.dtype) == (shape, dtype)
        there = pinned.zero_().to(device.torch_device, non_blocking=True)
        device.synchronize()
        assert torch.equal(there.cpu(), pinned)


def test_events_say_how_long_work_took(device):
    begin, end = device.timed_event(), device.timed_event()
    x = torch.ones(64, 64, device=device.torch_device)
    for _ in range(2):  # an event may be used again
        begin.record()
        x = x @ x
        end.record()
        end.wait()
        assert 0 <= begin.milliseconds_until(end) < 60_000


def test_preparing_a_thread_sets_its_number_of_threads(device):
    for threads in (2, 1):
        device.prepare_thread(threads)
        assert torch.get_num_threads() == threads


def test_unknown_devices_are_refused_with_the_known_ones():
    with pytest.raises(
        UnsupportedModel, match=r"'tpu' is not supported; the supported devices are .*cpu"
    ):
        open_device("tpu")


# -- the CPU's view of its host ----------------------------------------------------------------


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Writes the files that describe a host, and lets the CPU device see those alone."""

    def write(**files):
        for name, text in files.items():
            (tmp_path / name.replace("__", ".")).write_text(text)

    monkeypatch.setattr(cpu, "Path", lambda *parts: tmp_path / "/".join(parts).rpartition("/")[2])
    return write


MEMINFO = "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    600 kB\n"


@pytest.mark.parametrize(
    ("limit", "used", "total", "free"),
    [
        (None, None, 1000, 600),
        ("max", "500", 1000, 600),
        (str(400 * 1024), str(100 * 1024), 400, 300),
        (str(900 * 1024), str(100 * 1024), 900, 600),
        (str(400 * 1024), str(500 * 1024), 400, 0),
        (str(4000 * 1024), str(100 * 1024), 1000, 600),
    ],
)
def test_cpu_memory_is_the_hosts_or_the_containers_if_it_has_less(host, limit, used, total, free):
    host(meminfo=MEMINFO)
    if limit is not None:
        host(memory__max=limit + "\n", memory__current=used + "\n")
    memory = open_device("cpu").memory()
    assert (memory.total, memory.free) == (total * 1024, free * 1024)


@pytest.mark.parametrize(
    ("cpuinfo", "native"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512_bf16 sse\n", True),
        ("processor : 0\nflags\t\t: fpu amx_bf16\n", True),
        ("processor : 0\nFeatures\t: fp asimd bf16 sve\n", True),
        ("processor : 0\nflags\t\t: fpu avx2 avx512f\n", False),
        ("processor : 0\nFeatures\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_the_cpu_prefers_bfloat16_where_the_processor_has_it(host, cpuinfo, native):
    host(cpuinfo=cpuinfo)
    found = open_device("cpu")
    assert found.supports(torch.float32)
    assert found.supports(torch.bfloat16) == native
    assert found.traits.default_dtype == (torch.bfloat16 if native else torch.float32)
