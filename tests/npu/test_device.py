"""What of the NPU device needs no engine: graphs in flight, what is missing and what to do."""

import builtins
import logging
import subprocess
import sys

import pytest
import torch

import nanoactor.models.devices as devices
from nanoactor.models.devices import npu_graphs
from nanoactor.models.devices.npu_graphs import NativeCapture
from nanoactor.models.devices.npu_runtime import RecordedGraph, load_torch_npu
from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.lengths import HostLengths

LENGTHS = HostLengths([], [], [7, 1])


class Event:
    """One that the test lets pass."""

    def __init__(self, log, name):
        self.log, self.name, self.passed = log, name, True

    def record(self):
        self.passed = False
        self.log.append(f"{self.name} runs")

    def done(self):
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
    npu_graphs._log_once.cache_clear()
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
    a.done.passed = True
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
            r"pip install 'nanoactor\[npu\]', which takes the release that belongs to this PyTorch",
        ),
        (
            ImportError("libhccl.so: cannot open shared object file: No such file or directory"),
            "libhccl.so of CANN cannot be loaded: run `source .*/set_env.sh` .* `nanoactor doctor`",
        ),
        (
            ModuleNotFoundError("No module named 'yaml'", name="yaml"),
            r"it misses yaml: pip install 'nanoactor\[npu\]'",
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
        raise UnsupportedModel("libhccl.so of CANN cannot be loaded")

    monkeypatch.setattr("nanoactor.models.devices.npu_runtime.load_torch_npu", refuse)
    assert devices.open_device("auto").name == "cpu"
    assert "many times slower: libhccl.so of CANN" in caplog.text


def test_other_devices_never_import_torch_npu():
    code = (
        "import sys; sys.modules['torch_npu'] = None\n"
        "import nanoactor\n"
        "from nanoactor.models.devices import open_device\n"
        "import nanoactor.models.devices.cuda\n"
        "assert open_device('cpu').name == 'cpu'\n"
        "assert 'nanoactor.models.devices.npu' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_command_line_says_what_to_install():
    command = [sys.executable, "-m", "nanoactor", "generate", "demo", "To be", "--device", "npu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "pip install 'nanoactor[npu]'" in done.stderr
    assert "Traceback" not in done.stderr
