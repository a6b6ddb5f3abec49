"""CPU reference implementations of Ascend torch_npu operators, from their documentation alone."""

from tests.npu.reference.contract import ContractViolation
from tests.npu.reference.registry import KERNELS, SCHEMAS, implement, install

__all__ = ["KERNELS", "SCHEMAS", "ContractViolation", "implement", "install"]
