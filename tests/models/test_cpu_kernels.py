"""The CPU's kernels where they differ from what `test_device.py` sees of every device: numbers at
the edges, products of a few rows, threads, and how they are compiled."""

import json
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

numba = pytest.importorskip("numba")

from nanoactor.models.devices import open_device
from nanoactor.models.devices.cpu import compiled
from nanoactor.models.devices.cpu.compiled import CompiledCPUDevice
from nanoactor.models.devices.cpu.device import CPUDevice
from nanoactor.models.devices.cpu.kernels import elements
from nanoactor.models.devices.cpu.kernels.elements import (
    BFLOAT16,
    FLOAT32,
    exp,
    finite_or_zero,
    narrow,
    widen,
)
from nanoactor.models.devices.portable import PortableOperators
from nanoactor.models.weights.fp8 import E4M3, Fp8Blocks
from nanoactor.models.weights.linear import Dense, ExpertWeights


@numba.njit
def each_exp(values):
    return np.array([exp(value) for value in values])


@numba.njit
def each_narrow(values):
    return np.array([narrow(value, np.uint16(0)) for value in values])


@numba.njit
def each_wide(bits):
    return np.array([widen(value) for value in bits])


@numba.njit
def each_finite(values):
    return np.array([finite_or_zero(value) for value in values])


def edges():
    """Random bits as floats, and what lies at the edges of both types."""
    random = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    ties = (np.arange(1 << 12, dtype=np.uint32) << 20) | 0x8000
    special = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7F7FFFFF, 1, 0x80000000])
    return np.concatenate([random, ties, special.astype(np.uint32)]).view(np.float32)


def test_a_float_becomes_the_nearest_bfloat16_and_nan_stays_nan():
    values = edges()
    expected = torch.from_numpy(values.copy()).bfloat16()
    found = torch.from_numpy(each_narrow(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


def test_every_bfloat16_is_read_as_what_it_is():
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()
    torch.testing.assert_close(
        torch.from_numpy(each_wide(bits)), expected, rtol=0, atol=0, equal_nan=True
    )


def test_what_is_not_finite_becomes_zero():
    values = edges()
    assert np.array_equal(each_finite(values), np.where(np.isfinite(values), values, 0))


def test_exp_is_within_two_roundings():
    values = np.linspace(-87, 88, 1_000_001, dtype=np.float32)
    exact = np.exp(values.astype(np.float64))
    assert (np.abs(each_exp(values) - exact) / exact).max() < 2 * np.finfo(np.float32).eps
    assert each_exp(np.float32([-np.inf, -1e30]))[0] < 1e-37


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (17, 3), (256, 1025), (640, 1)])
def test_products_of_any_number_of_rows(inputs, outputs, dtype, threads, monkeypatch):
    """Fewer outputs than threads, fours of rows and what is left over, with a bias and without."""
    monkeypatch.setattr(elements, "_MIN_PARALLEL_ELEMENTS", 0)
    monkeypatch.setattr(compiled, "_MAX_KERNEL_ROWS", 11)
    device = CompiledCPUDevice()
    device.prepare_thread(threads)
    generator = torch.Generator().manual_seed(inputs)

    def make(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    weight, bias = make(outputs, inputs), make(outputs)
    for added in (bias, None):
        product = device.linear(Dense(weight, added))
        for rows in (0, 1, 3, 4, 5, 8, 11):
            x = make(rows, 2 * inputs)[:, :inputs]  # with gaps
            expected = x.double() @ weight.double().T + (0 if added is None else added.double())
            allowed = 1e-5 if dtype == torch.float32 else 8e-3
            torch.testing.assert_close(
                product(x).double(), expected, rtol=allowed, atol=allowed * inputs**0.5
            )


def test_second_layouts_take_a_bounded_share_of_memory(monkeypatch):
    device = CompiledCPUDevice()
    device._repack_budget = 4 * 64 * 8 + 1
    kept = []
    monkeypatch.setattr(
        compiled, "few_row_linear", lambda x, weight, *_: kept.append(weight) or x @ weight.T
    )
    weights = [torch.randn(8, 64) for _ in range(3)]
    for product in [device.linear(Dense(weight)) for weight in weights]:
        product(torch.randn(1, 64))
    assert len(kept) == 1
    assert torch.equal(kept[0], weights[0])
    assert kept[0].data_ptr() != weights[0].data_ptr(), "the caller lets go of the weight"


@pytest.mark.parametrize(("amx", "kept"), [(False, [1024, 1 << 21]), (True, [1024])])
def test_products_of_large_weights_are_onednns_where_there_is_amx(amx, kept, monkeypatch):
    monkeypatch.setattr(compiled, "has_instructions", lambda *names: amx)
    found = []
    monkeypatch.setattr(
        compiled, "few_row_linear", lambda x, weight, *_: found.append(weight.numel()) or x
    )
    device = CompiledCPUDevice()
    for size in (1024, 1 << 21):
        device.linear(Dense(torch.randn(size // 64, 64)))(torch.randn(1, 64))
    assert found == kept


def test_large_inputs_go_to_the_operators_that_use_all_threads(monkeypatch):
    device = CompiledCPUDevice()
    used = []
    for name in ("rms_norm", "swiglu"):
        operator = getattr(PortableOperators, name)
        monkeypatch.setattr(
            PortableOperators, name, lambda *a, of=operator: used.append(of.__name__) or of(*a)
        )
    x, weight = torch.randn(1 << 9, 1 << 9), torch.ones(1 << 9)
    for threads, expected in ((2, []), (4, ["rms_norm", "swiglu"])):
        device._threads = threads
        device.rms_norm(x, weight, 1e-6)
        device.swiglu(x)
        device.swiglu(x[:8])
        assert used == expected


def test_every_kernel_is_compiled_before_the_first_step():
    device = CompiledCPUDevice()
    device.prepare_thread(2)
    device.check(torch.bfloat16, 16, 64)
    device.check(torch.float32, 16, 64)
    for kernel in elements._kernels:
        if kernel.purpose in (elements.STEPS, elements.LOGITS):
            assert len(kernel.function.signatures) == 2
    device.check(torch.float16, 16, 64)  # PyTorch's alone


@pytest.mark.parametrize("purpose", [elements.EXPERTS, elements.FP8])
def test_what_some_models_call_is_compiled_when_these_are_loaded(monkeypatch, purpose):
    """A first start of a dense model does not wait for it, nor a first step of such a model."""
    asked = []
    monkeypatch.setattr(
        compiled, "compile_kernels", lambda *_, purposes, **__: asked.append(purposes)
    )
    device = CompiledCPUDevice()
    device.check(torch.float32, 16, 64)
    assert not any(purpose in purposes for purposes in asked)
    matrix = torch.zeros(2, 4, 4)
    if purpose == elements.EXPERTS:
        device.experts(ExpertWeights(Dense(matrix), Dense(matrix[:, :, :2])))
    else:
        device.linear(Fp8Blocks(matrix[0].to(E4M3), torch.ones(4, 1), 4, 0, torch.float32))
    assert asked[-1] == (purpose,)


COMPILE = """
import json, logging, torch
from nanoactor.models.devices.cpu.kernels import elements
from nanoactor.models.devices.cpu.kernels.elementwise import _rms_norm
elements._kernels[:] = elements._kernels[:1]
logging.basicConfig(format="%(message)s")
elements.compile_kernels(torch.float32, parallel=False)
elements.compile_kernels(torch.float32, parallel=False)
print(json.dumps(sum(_rms_norm.stats.cache_hits.values())))
"""


@pytest.mark.long  # two processes compile
def test_compiled_code_is_kept_and_compiling_it_is_said_once(tmp_path):
    def run():
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", COMPILE]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    assert run() == (
        0,
        "compiling kernels for torch.float32; this happens once and takes about 15 s\n",
    )
    assert run() == (1, "")


def test_without_a_place_to_keep_code_it_is_compiled_and_said_once(monkeypatch, caplog):
    def refuse(*_, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(elements.numba, "njit", refuse)
    monkeypatch.setattr(elements, "_kernels", [])
    elements._log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert elements.kernel("n")(abs) is abs
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "each start compiles them again" in caplog.text


def test_without_numba_the_cpu_is_opened_with_a_warning(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "nanoactor.models.devices.cpu.compiled", None)
    assert type(open_device("cpu")) is CPUDevice
    assert "pip install numba" in caplog.text
    monkeypatch.undo()
    assert type(open_device("cpu")) is CompiledCPUDevice


def test_elements_are_told_apart_by_type():
    assert numba.typeof(FLOAT32) == numba.float32
    assert numba.typeof(BFLOAT16) == numba.uint16


FIRST_USE = """
import asyncio
from nanoactor import AsyncLLM, SamplingParams
from nanoactor.models.devices.cpu.kernels import elements

def compiled():
    functions = (kernel.function for kernel in elements._kernels)
    return {function.__name__: len(function.signatures) for function in functions}

async def one(llm, **values):
    params = SamplingParams(max_tokens=4, seed=1, **values)
    async for _ in llm.generate("ROMEO:", params):
        pass

async def main():
    options = dict(dtype="bfloat16", placement="single", max_num_seqs=4, num_kv_blocks=64)
    options["max_model_len"] = 1024
    async with AsyncLLM("demo", device="cpu", **options) as llm:
        before = compiled()
        await one(llm)
        await one(llm, temperature=0)
        await one(llm, structured_outputs={"regex": "[a-z]+"})
        await one(llm, structured_outputs={"json": {"type": "object"}}, temperature=0)
        await one(llm, logit_bias={5: 1.0}, presence_penalty=1.0, n=2, logprobs=3)
        await one(llm, bad_words=["the"], prompt_logprobs=2)
        assert compiled() == before, (before, compiled())

asyncio.run(main())
"""


def test_no_request_is_the_first_to_need_a_kernel():
    """What an engine in bfloat16 can need is compiled before it is ready: masks make logits
    float32, and a compilation on the device's thread would hold up every stream."""
    command = [sys.executable, "-c", FIRST_USE]
    subprocess.run(command, check=True, timeout=280)
