"""The smoke test's list of checks is complete. Running all of them takes long (test_smoke.py)."""

import pytest
import torch

from nanoactor.models.devices.npu.device import NPUDevice
from nanoactor.models.options import DeviceOptions
from tests.npu import calls
from tests.npu.emulation import HostRuntime
from tests.npu.smoke_checks import operators, worker
from tests.npu.smoke_checks.frame import Failed, Rig, shapes


@pytest.fixture
def rig(tmp_path):
    device = NPUDevice(HostRuntime(), DeviceOptions(graph_mode="eager"))
    return Rig(device, "npu:0", 1, True, True, tmp_path, "npugraph")


def test_every_operator_that_the_device_calls_is_checked(rig):
    names = [check.name for check in worker.all_checks(rig)]
    assert len(set(names)) == len(names)
    for operator in calls.operators():
        assert any(operator in name for name in names), operator


def test_a_mixture_of_experts_is_checked(rig, monkeypatch):
    shape = next(iter(shapes(rig).values()))
    assert operators.experts(rig, torch.bfloat16, shape) > 0
    experts = rig.device.experts

    def wrong(weights):
        operator = experts(weights)
        return lambda x, ids, topk_weights: operator(x, ids.flip(-1), topk_weights)

    monkeypatch.setattr(rig.device, "experts", wrong)
    with pytest.raises(Failed, match="1 tokens"):
        operators.experts(rig, torch.bfloat16, shape)
