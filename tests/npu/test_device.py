"""What of the NPU device needs no engine: graphs in flight, what is missing and what to do."""

import builtins
import logging
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import nanoactor.models.devices as devices
from nanoactor.models.batch import KVCache
from nanoactor.models.devices.npu import graphs
from nanoactor.models.devices.npu.attention import Plan
from nanoactor.models.devices.npu.device import NPUDevice
from nanoactor.models.devices.npu.graphs import NativeCapture
from nanoactor.models.devices.npu.runtime import RecordedGraph, load_torch_npu
from nanoactor.models.devices.portable import PortableOperators
from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.options import DeviceOptions
from nanoactor.models.seq_lens import NO_SEQ_LENS, HostSeqLens
from nanoactor.models.weights.linear import Dense, ExpertWeights, Router
from nanoactor.runner.steps.warmup import longest_lengths
from tests.npu.emulation import HostRuntime

LENGTHS = HostSeqLens([], [], [7, 1])


class Event:
    """One that the test lets pass."""

    def __init__(self, log, name):
        self.log, self.name, self.passed = log, name, True

    def record(self):
        self.passed = False
        self.log.append(f"{self.name} runs")

    def is_done(self):
        return self.passed

    def wait(self):
        self.log.append(f"wait for {self.name}")
        self.passed = True


class Graph:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def update(self, cpu_update_input):
        self.log.append((self.name, cpu_update_input))

    def replay(self):
        self.log.append(f"replay {self.name}")


class Runtime:
    def __init__(self):
        self.log, self.made = [], []

    def record(self, function):
        name = "ABC"[len(self.made)]
        result = function()
        self.made.append(RecordedGraph(Graph(self.log, name), result, Event(self.log, name)))
        return self.made[-1]


def test_a_graph_that_runs_is_not_given_other_lengths(caplog):
    graphs._log_once.cache_clear()
    runtime, told = Runtime(), []

    def function(lengths):
        told.append(lengths)
        return torch.zeros(2)

    capture = NativeCapture(runtime, function, LENGTHS, 2)
    assert told == [LENGTHS] * 2
    a, b = runtime.made
    assert capture.replay(LENGTHS) is a.result
    assert capture.replay(LENGTHS) is b.result
    update = [{"actual_seq_lengths_kv": [7, 1]}]
    both = [("A", update), "replay A", "A runs", ("B", update), "replay B", "B runs"]
    assert runtime.log == both
    a.end_event.passed = True
    del runtime.log[:]
    assert capture.replay(LENGTHS) is a.result
    assert runtime.log == [("A", update), "replay A", "A runs"]
    assert not caplog.records
    # More under way than there are graphs: it waits, and says so once.
    for _ in range(2):
        del runtime.log[:]
        name = "BA"[_]
        capture.replay(LENGTHS)
        assert runtime.log[:2] == [f"wait for {name}", (name, update)]
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            ModuleNotFoundError("No module named 'torch_npu'", name="torch_npu"),
            r"not installed; run `pip install '\.\[npu\]'` .* matching releases of PyTorch",
        ),
        (
            ImportError("libhccl.so: cannot open shared object file: No such file or directory"),
            "CANN's libhccl.so cannot be loaded: run `source .*/set_env.sh` .* `nanoactor doctor`",
        ),
        (
            ModuleNotFoundError("No module named 'yaml'", name="yaml"),
            r"because yaml is not installed; run .pip install '\.\[npu\]'",
        ),
    ],
)
def test_what_is_missing_is_said_with_what_mends_it(monkeypatch, error, told):
    original = builtins.__import__

    def absent(name, *rest):
        if name == "torch_npu":
            raise error
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UnsupportedModel, match=told):
        load_torch_npu()


def test_auto_takes_the_cpu_and_says_why_where_cann_is_missing(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())

    def refuse():
        raise UnsupportedModel("CANN's libhccl.so cannot be loaded")

    monkeypatch.setattr("nanoactor.models.devices.npu.runtime.load_torch_npu", refuse)
    assert devices.open_device("auto").traits.name == "cpu"
    assert "many times slower: CANN's libhccl.so" in caplog.text


def test_other_devices_never_import_torch_npu():
    code = (
        "import sys; sys.modules['torch_npu'] = None\n"
        "import nanoactor\n"
        "from nanoactor.models.devices import open_device\n"
        "import nanoactor.models.devices.cuda.device\n"
        "assert open_device('cpu').traits.name == 'cpu'\n"
        "assert 'nanoactor.models.devices.npu.device' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_command_line_says_what_to_install():
    command = [sys.executable, "-m", "nanoactor", "generate", "demo", "To be", "--device", "npu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "pip install '.[npu]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("rows", "blocks", "most", "expected"),
    [
        (1, 8, 512, [512]),
        (1, 3, 512, [384]),
        (3, 8, 512, [512, 384, 128]),
        (3, 20, 500, [500, 500, 500]),
        (4, 2, 512, [128, 128, 128, 128]),
    ],
)
def test_captures_are_for_the_longest_that_fits(rows, blocks, most, expected):
    assert longest_lengths(rows, blocks, 128, most).decode_contexts == expected


def test_padded_rows_have_one_position():
    lengths = HostSeqLens([5], [9], [7, 300])
    assert lengths.padded_to(4) == HostSeqLens([5], [9], [7, 300, 1, 1])
    assert lengths.padded_to(2) is lengths
    assert NO_SEQ_LENS.padded_to(64) is NO_SEQ_LENS


class Network:
    """What a compiled graph is told apart by."""

    def __init__(self, config="a", shard=0, max_positions=512):
        self.config, self.shard, self.max_positions = config, shard, max_positions

    def forward(self, *arguments):
        raise AssertionError


def key(rows=2, blocks=8, width=4, layout="tnd", weights="nd", versions=("1",), **network):
    runtime = types.SimpleNamespace(versions=lambda: versions)
    options = DeviceOptions("max-autotune", layout, weights)
    step = graphs.CompiledStep("max-autotune", runtime, options, Path())
    plan = Plan(torch.zeros(rows, width), torch.zeros(1), [1], [], [1])
    cache = KVCache(torch.zeros(blocks, 2, 2, 2), torch.zeros(blocks, 2, 2, 2))
    module = graphs.DecodePass(Network(**network).forward, [cache], plan)
    return step._key(module, rows, plan)


def test_a_compiled_graph_is_found_by_all_that_it_depends_on(monkeypatch):
    changes = [dict(), dict(rows=3), dict(blocks=9), dict(width=5), dict(layout="bnsd")]
    changes += [dict(weights="nz"), dict(versions=("2",)), dict(config="b"), dict(shard=1)]
    changes += [dict(max_positions=500)]
    keys = [key(**change) for change in changes]
    assert key() == keys[0]
    monkeypatch.setattr(graphs, "_source_digest", lambda: "other")
    keys.append(key())
    assert len(set(keys)) == len(keys)


# -- experts ------------------------------------------------------------------------------------


def made(a2_or_a3=True):
    runtime = HostRuntime()
    runtime.is_a2_or_a3 = a2_or_a3
    return NPUDevice(runtime, DeviceOptions())


@pytest.mark.parametrize("normalizes", [False, True])
def test_routing_is_the_portable_devices(normalizes):
    """Ties to the lower expert; a token that is not a number is taken by experts that exist."""
    torch.manual_seed(1)
    weight, x = torch.randn(9, 16), torch.randn(200, 16)
    weight[[5, 7]] = weight[2].clone()
    router = Router(weight, 3, normalizes)
    ids, shares = made().route(x, router)
    expected = PortableOperators().route(x, router)
    assert torch.equal(ids, expected[0])
    assert ids.dtype == torch.int32
    torch.testing.assert_close(shares, expected[1])
    ids, shares = made().route(torch.full((2, 16), torch.nan), router)
    assert 0 <= int(ids.min()) <= int(ids.max()) < 9
    assert shares.isnan().all()


@pytest.mark.parametrize("a2_or_a3", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_experts_are_the_portable_devices(caplog, a2_or_a3, tokens):
    """In groups where the chip has the operators, each for every token elsewhere."""
    torch.manual_seed(2)
    pair, down = torch.randn(5, 2 * 24, 32) / 6, torch.randn(5, 32, 24) / 5
    x, shares = torch.randn(tokens, 32), torch.rand(tokens, 2)
    ids = torch.rand(tokens, 5).argsort(-1)[:, :2].int().contiguous()
    weights = ExpertWeights(Dense(pair), Dense(down))
    expected = PortableOperators().experts(weights)(x, ids, shares)
    torch.testing.assert_close(made(a2_or_a3).experts(weights)(x, ids, shares), expected)
    assert ("every expert is computed" in caplog.text) <= (not a2_or_a3)
