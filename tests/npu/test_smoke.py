"""The program that is for people who have an NPU: here it runs emulated, or finds none."""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from nanoactor.models.config import read_config
from nanoactor.models.devices.npu.device import NPUDevice
from nanoactor.models.options import DeviceOptions
from tests.npu import smoke
from tests.npu.emulation import HostRuntime
from tests.npu.reference import registry
from tests.npu.smoke_checks import attention, engines, figures, frame, judge, numbers, worker
from tests.npu.smoke_checks.frame import BLOCK, Check, Failed, Rig

# It is what runs on hardware; here it shows that its own code runs.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ONE = ["--only", "npu_swiglu, bfloat16", "npu_rms_norm, bfloat16"]


def run(tmp_path, *words, runtime=None, **environment):
    """Exit status, lines of the table as (result, check, seconds, said), all that was printed."""
    command = [sys.executable, "-m", "tests.npu.smoke", "--log", str(tmp_path / "log"), *words]
    variables = {**os.environ, **environment}
    if runtime:
        variables[smoke.RUNTIME] = f"{__name__}:{runtime}"
    found = subprocess.run(
        command, cwd=smoke.ROOT, env=variables, capture_output=True, text=True, timeout=600
    )
    lines = [line for line in found.stdout.splitlines() if line.startswith("| ")][1:]
    rows = [tuple(cell.strip() for cell in line.split(" | ")) for line in lines]
    return found.returncode, [(r[0].removeprefix("| "), *r[1:]) for r in rows], found


class Wrong(HostRuntime):
    """Its npu_swiglu takes the other half for the gate."""

    broken = "npu_swiglu"

    def _install(self):
        right = registry.KERNELS[self.broken]
        registry.KERNELS[self.broken] = self.instead
        super()._install()
        registry.KERNELS[self.broken] = right

    @staticmethod
    def instead(input, dim=-1):
        gate, up = input.float().chunk(2, dim)
        return (torch.nn.functional.silu(up) * gate).to(input.dtype)


class Refusing(Wrong):
    """As torch_npu says it."""

    @staticmethod
    def instead(input, dim=-1):
        raise RuntimeError("call aclnnSwiGlu failed, error code is 561002\nEZ9999: Inner Error!")


class Dying(Wrong):
    @staticmethod
    def instead(input, dim=-1):
        print("the driver has had enough", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)


class Hanging(Wrong):
    @staticmethod
    def instead(input, dim=-1):
        time.sleep(1000)


def test_all_of_it_runs_emulated_and_every_line_says_so(tmp_path):
    path = tmp_path / "found.json"
    status, rows, found = run(tmp_path, "--emulated", "--quick", "--output", str(path))
    assert status == 0, found.stdout + (tmp_path / "log").read_text()
    assert found.stdout.startswith(f"**{smoke.EMULATED}**\n\n| result |")
    assert {row[0] for row in rows} == {"PASS", "SKIP"}
    assert all(row[3].startswith(smoke.EMULATED) for row in rows)
    counts = [sum(row[0] == result for row in rows) for result in ("PASS", "SKIP")]
    assert counts[0] > 40
    assert f"\n{counts[0]} passed, 0 failed, {counts[1]} skipped\n" in found.stdout
    said = json.loads(path.read_text())
    assert said["emulated"] is True
    assert [row["check"] for row in said["rows"]] == [row[1] for row in rows]
    assert said["versions"]["chip"] == "an emulated NPU"
    skipped = {row[1].partition(":")[0] for row in rows if row[0] == "SKIP"}
    assert skipped == {"environment", "engine", "two devices", "figure"}


@pytest.mark.parametrize(
    ("runtime", "said"),
    [
        ("Wrong", "0.6B, product: off by"),
        ("Refusing", "call aclnnSwiGlu failed, error code is 561002 [561002, EZ9999]"),
        ("Dying", "the process ended with signal 11: the driver has had enough"),
        ("Hanging", "timed out after 10 s"),
    ],
)
def test_a_broken_kernel_fails_alone(tmp_path, runtime, said):
    status, rows, found = run(
        tmp_path, "--emulated", "--quick", "--timeout", "10", *ONE, runtime=runtime
    )
    assert status == 1
    assert [row[:2] for row in rows] == [
        ("PASS", "npu_rms_norm, bfloat16"),
        ("FAIL", "npu_swiglu, bfloat16"),
    ]
    assert said in rows[1][3]
    assert "1 passed, 1 failed, 0 skipped" in found.stdout


def test_what_follows_a_process_that_died_runs_in_a_new_one(tmp_path):
    only = ["--only", "npu_swiglu, bfloat16", "npu_rotary_mul, bfloat16"]
    status, rows, _ = run(tmp_path, "--emulated", "--quick", *only, runtime="Dying")
    assert status == 1
    assert [row[0] for row in rows] == ["FAIL", "PASS"]


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="it is there")
def test_without_torch_npu_one_sentence_says_what_to_install(tmp_path):
    status, rows, found = run(tmp_path)
    assert status == 2
    assert (rows, found.stdout) == ([], "")
    assert found.stderr.startswith(
        "device npu requires torch_npu, which is not installed; run `pip install"
    )
    assert found.stderr.count("\n") == 1


def test_a_process_that_cannot_even_open_the_device_is_said_so(tmp_path):
    status, rows, found = run(tmp_path, "--emulated", runtime="NoSuchRuntime")
    assert (status, rows) == (2, [])
    assert "npu:0 cannot be opened: AttributeError: " in found.stderr


def test_a_device_that_does_not_come_back_is_not_waited_for_each_time(tmp_path, monkeypatch):
    class Gone:
        started = 0

        def __init__(self, *args):
            Gone.started += 1

        def hello(self):
            raise smoke.Died("timed out after 300 s")

        def end(self):
            pass

    monkeypatch.setattr(smoke, "Worker", Gone)
    with (tmp_path / "log").open("wb") as log:
        run = smoke.Smoke(smoke.parse([]), tmp_path, log)
        run.checks = [dict(name=str(n), alone=n % 2, seconds=1, skip="") for n in range(6)]
        rows = [*run.rows()]
    assert [row["result"] for row in rows] == ["FAIL"] * smoke.STARTS + ["SKIP"] * 4
    assert Gone.started == smoke.STARTS


def test_other_devices_are_refused():
    with pytest.raises(SystemExit):
        smoke.parse(["--device", "cuda"])


# -- in this process ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    device = NPUDevice(HostRuntime(), DeviceOptions(graph_mode="eager"))
    return Rig(device, "npu:0", 1, False, True, tmp_path_factory.mktemp("smoke"), "npugraph")


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("EZ9999: Inner Error", "EZ9999"),
        ("NPU function error: error code is 507015, and 123456 more", "507015"),
        ("[Error]: 207008 no resource", "207008"),
        ("ERR00100 PTA call acl api failed, error code 561002", "561002, ERR00100"),
        ("the shape is (128, 4096)", ""),
        ("910930 is a chip", ""),
    ],
)
def test_codes_of_ascend_are_found(said, code):
    assert frame.code_of(said) == code


def test_results_and_errors_become_lines(rig):
    def failed(rig):
        raise Failed("wrong")

    def raised(rig):
        raise ValueError("one\ntwo")

    def spoiled(rig):
        try:
            raised(rig)
        except ValueError as error:
            raise Failed("refused") from error

    outcomes = [
        worker.carry_out(Check("x", f), rig) for f in (lambda rig: "", failed, raised, spoiled)
    ]
    assert [o["result"] for o in outcomes] == ["PASS", "FAIL", "FAIL", "FAIL"]
    assert [o["spoiled"] for o in outcomes] == [False, False, True, True]
    assert outcomes[2]["said"] == "ValueError: one"
    row = {"result": "FAIL", "check": "x", "seconds": 0.04, "said": "a|b\nc " + "d" * 300}
    assert smoke.line(row, False).startswith("| FAIL | x | 0.0 | a\\|b c ddd")
    assert smoke.line(row, False).endswith("d… |")


def test_comparisons_see_what_is_wrong():
    ones = torch.ones(3, 4)
    assert frame.off("x", ones * (1 + 2**-8), ones, torch.bfloat16) == pytest.approx(1.0)
    wrong = ones.clone()
    wrong[1, 2] += 5 * 2**-8
    nan = torch.full((3, 4), float("nan"))
    for found in (wrong, ones[:2], nan):
        with pytest.raises(Failed):
            frame.off("x", found, ones, torch.bfloat16)
    frame.same("x", ones, ones.clone())
    for found in (wrong, ones[:2], ones.half()):
        with pytest.raises(Failed):
            frame.same("x", found, ones)


def test_cases_share_what_they_say():
    for name, case in [*attention.CASES.items(), ("shared", attention.SHARED)]:
        tables, blocks = attention.tables_of(case)
        needed = [-(-context // BLOCK) for context in case.contexts]
        rows = [tables[row, :count].tolist() for row, count in enumerate(needed)]
        assert all(len(set(row)) == len(row) for row in rows), name
        used = {block for row in rows for block in row}
        assert len(used) == sum(needed) - case.shared * (len(rows) - 1), name
        assert max(used) < blocks
        assert (blocks < sum(needed)) == (not case.spare), name


@pytest.mark.parametrize("layout", ["tnd", "bnsd"])
@pytest.mark.parametrize("change", ["lengths", "tables", "mask"])
def test_attention_that_is_a_little_wrong_fails(rig, monkeypatch, layout, change):
    """A position less, another block, a mask that shows one position more."""
    kernel = registry.KERNELS["npu_fused_infer_attention_score"]

    def wrong(*args, **given):
        if change == "lengths":
            given["actual_seq_lengths_kv"] = [max(1, n - 1) for n in given["actual_seq_lengths_kv"]]
        elif change == "tables":
            given["block_table"] = given["block_table"].flip(0)
        elif given["sparse_mode"] == 3:
            given["sparse_mode"], given["atten_mask"] = 0, None
        return kernel(*args, **given)

    names = dict.fromkeys(("decode", "fresh prefill", "chunked prefill", "mixed"))
    if change == "mask":
        del names["decode"]
    monkeypatch.setattr(torch.ops.npu, "npu_fused_infer_attention_score", wrong)
    for name in names:
        with pytest.raises((Failed, ValueError)):
            attention.run(layout, attention.CASES[name], torch.bfloat16, rig)


def test_what_is_cut_wrongly_is_seen(rig, monkeypatch):
    kernel = registry.KERNELS["npu_top_k_top_p"]
    for wrong in (
        lambda logits, p, k: kernel(logits, p, None if k is None else (k - 1).clamp(min=1)),
        lambda logits, p, k: kernel(logits, (p * 0.99), k),
        lambda logits, p, k: kernel(logits, p, k) * 1.01,
    ):
        monkeypatch.setattr(torch.ops.npu, "npu_top_k_top_p", wrong)
        with pytest.raises(Failed):
            numbers.filtered(rig)


def test_whole_numbers_of_32_bits_are_seen(rig, monkeypatch):
    monkeypatch.setattr(Rig, "to", lambda self, t: t.int() if t.dtype == torch.int64 else t)
    for check in (numbers.overflow, numbers.random_bits):
        with pytest.raises(Failed):
            check(rig)


def test_the_judge_tells_ties_from_errors(rig):
    right = judge.Judge(judge.on_cpu(judge.checkpoint(rig)), [[1, 2, 3], [4, 5]])
    found = likeliest(right)
    right.right(found)
    assert right.equal(found, found, "x's") == "identical to x's"
    wrong = [found[0], [*found[1][:2], (found[1][2] + 1) % 512, *found[1][3:]]]
    with pytest.raises(Failed, match=r"prompt 1 \(2 tokens\), token 2"):
        right.right(wrong)
    with pytest.raises(Failed, match=r"prompt 1 \(2 tokens\), token 2"):
        right.equal(wrong, found, "x's")


def likeliest(right):
    """Token by token."""
    outputs = []
    for prompt in right.prompts:
        output = []
        for _ in range(5):
            output.append(int(right.model.logits([*prompt, *output])[-1].argmax()))
        outputs.append(output)
    return outputs


def test_steps_without_a_graph_are_said_so():
    found = engines.Run([], {"steps_uncaptured": 3}, ["it cannot be captured: 207008"], 1.0)
    with pytest.raises(Failed, match="3 decode steps ran without a graph: it cannot be captured"):
        engines.all_captured(found)


def test_figures_are_measured(tmp_path, monkeypatch):
    """On the CPU, with a model of no size."""
    small = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=10001)
    model = {**figures.MODELS["0.6b"], **small, "num_attention_heads": 2, "head_dim": 16}
    directory = figures.written(tmp_path, {**model, "num_key_value_heads": 1, "eos_token_id": 0})
    assert read_config(directory).num_layers == 1
    monkeypatch.setattr(figures, "PROMPT", 16)
    monkeypatch.setattr(figures, "OUTPUTS", (2, 6))
    options = dict(device="cpu", max_model_len=2048, num_kv_blocks=400, placement="single")

    async def both(bench):
        lengths, outputs = ([16, 20], [4, 5])
        monkeypatch.setattr(figures, "workload_lengths", lambda: (lengths, outputs))
        return await figures.step(3, 2, bench), await figures.workload(1, bench)

    step, rate = asyncio.run(figures.measure(directory, both, **options))
    assert "ms per step" in step
    assert "9 tokens of 2 prompts" in rate


def test_the_rig_is_opened_as_the_parent_says(tmp_path, monkeypatch):
    def open_device(name, rank, options):
        assert (name, rank, options.graph_mode) == ("npu:3", 3, "eager")
        return NPUDevice(HostRuntime(), options)

    monkeypatch.setattr(worker, "open_device", open_device)
    given = dict(device="npu:3", devices=2, quick=True, emulated=True, scratch=str(tmp_path))
    found = worker.open_rig({**given, "graph_mode": "npugraph"})
    assert found.dtypes == [torch.bfloat16]
    assert set(frame.shapes(found)) == {"0.6B"}
    assert found.devices == 2
