"""Rung 1: the wheel has what the device asks of it, in the form in which it asks."""

import importlib
import inspect

import pytest
import torch
import torch_npu
import torchair

from nanoactor.runner.open import open_executor
from tests.engine.harness import rank_config
from tests.models.checkpoints import make_checkpoint
from tests.npu import calls
from tests.npu.constrained import LIMITS, Driver
from tests.npu.reference import SCHEMAS
from tests.npu.wheel.support import OperatorsCalled, emulate, runs_on_the_host

ATTENTION = "npu_fused_infer_attention_score"


def live(name):
    packet, _, overload = name.partition(".")
    return str(getattr(getattr(torch.ops.npu, packet), overload or "default")._schema)


def test_the_scan_finds_the_calls():
    """Should the sources be written otherwise, the rest of this file would assert nothing."""
    assert calls.operators() >= {ATTENTION, "npu_rms_norm", "npu_scatter_pa_kv_cache"}
    assert calls.operators("air") == {ATTENTION}
    assert len(list(calls.call_sites())) >= 8
    assert {"block_table", "input_layout", "sparse_mode", "scale"} <= calls.attention_arguments()
    assert {"Stream", "NPUGraph", "mem_get_info"} <= calls.chains("self._npu.")


@pytest.mark.parametrize("name", sorted(calls.operators() | calls.BEHIND))
def test_schemas_are_those_of_the_reference_kernels(name):
    assert torch._C.parse_schema(live(name)) == torch._C.parse_schema(SCHEMAS[name])


@pytest.mark.parametrize("site", list(calls.call_sites()), ids=str)
def test_calls_bind_to_the_wheels_schemas(site):
    name, positional, names = site
    assert not calls.binds(live(name), positional, names)


def test_attention_binds_in_both_of_its_forms():
    importlib.import_module("torchair.ops._npu_fused_infer_attention_score")
    names = sorted(calls.attention_arguments())
    assert not calls.binds(live(ATTENTION), 3, names)
    air = str(getattr(torch.ops.air, ATTENTION).default._schema)
    assert not calls.binds(air, 3, names)


def test_a_call_that_does_not_bind_is_seen():
    schema = "npu::f(Tensor a, Tensor b, *, int c, int d=1) -> Tensor"
    assert not calls.binds(schema, 2, ["c"])
    assert not calls.binds(schema, None, ["c"])
    assert calls.binds(schema, 2, ["c", "e"]) == ["e is unknown"]
    assert calls.binds(schema, 2, ["d"]) == ["c is missing"]
    assert calls.binds(schema, 1, ["a", "c"]) == ["a is given twice", "b is missing"]
    assert calls.binds(schema, 3, ["c"]) == ["3 positional arguments, 2 possible"]


@pytest.mark.parametrize("name", sorted(calls.chains("self._npu.")))
def test_names_of_torch_npu_exist(name):
    found = torch_npu.npu
    for part in name.split("."):
        if part == "allow_internal_format":  # it can be set, not asked for
            break
        found = getattr(found, part)


@pytest.mark.parametrize("name", sorted(calls.chains("torchair.")))
def test_names_of_torchair_exist(name):
    found = torchair
    for part in name.split("."):
        found = getattr(found, part)


def test_options_of_torchair_exist():
    config = torchair.CompilerConfig()
    for mode in ("max-autotune", "reduce-overhead"):
        config.mode = mode
    config.experimental_config.keep_inference_input_mutations = True


METHODS = {
    torch_npu.npu.Event: ("record", "query", "synchronize", "elapsed_time"),
    torch_npu.npu.NPUGraph: ("update", "replay", "pool"),
}


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_methods_exist(kind):
    for name in METHODS[kind]:
        assert callable(getattr(kind, name))


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (torch_npu.npu.graph.__init__, "pool stream auto_dispatch_capture capture_error_mode"),
        (torch_npu.npu.NPUGraph.update, "cpu_update_input"),
        (torch_npu.npu.set_compile_mode, "jit_compile"),
        (torchair.get_npu_backend, "compiler_config"),
        (torchair.inference.cache_compile, "config cache_dir dynamic ge_cache"),
    ],
)
def test_parameters_exist(function, names):
    signature = inspect.signature(function)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    for name in names.split():
        assert name in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds


def test_lengths_are_updated_by_the_name_that_is_given():
    from torch_npu.npu._npugraph_handlers.npugraph_handler import _NPU_GRAPH_OP_HANDLERS

    handler = _NPU_GRAPH_OP_HANDLERS[f"{ATTENTION}.out"]
    keys = {key for *_, key in handler.UPDATE_SPECS[f"{ATTENTION}.out"]}
    assert "actual_seq_lengths_kv" in keys


def test_hccl_is_a_backend():
    assert torch.distributed.is_backend_available("hccl")


def test_the_wheel_has_a_kernel_for_all_that_constrained_rows_call(monkeypatch, tmp_path):
    """What has none would run on the host, and the step would wait for it."""
    emulate(monkeypatch)
    changes = dict(head_dim=128, num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    make_checkpoint(tmp_path, **changes)
    values = dict(LIMITS, device="npu", dtype="float32", num_kv_blocks=8, graph_mode="eager")
    driver = Driver(open_executor(rank_config(tmp_path, **values)))
    with OperatorsCalled() as called:
        driver.run(2)
    for name in ("bitwise_and.Tensor", "masked_fill.Scalar", "index_copy_.default"):
        assert f"aten.{name}" in map(str, called.found)
    assert [str(each) for each in called.found if runs_on_the_host(each)] == []


def test_an_operator_without_a_kernel_is_seen():
    assert runs_on_the_host(torch.ops.aten.igamma.default)
    assert runs_on_the_host(torch.ops.aten.cholesky.default)
    assert not runs_on_the_host(torch.ops.aten.bitwise_and.Tensor)
