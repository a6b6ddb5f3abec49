"""The switches, the error and the small checks that every reference kernel shares.

The documents these kernels follow are the docstrings of torch_npu 2.13.0 and the pages under
`docs/zh/custom_APIs/torch_npu` of Ascend/op-plugin; where they disagree, `disagreements.md` says
which one was taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

ALLOW_FLOAT32 = True
"""Accept float32 where the documents allow only float16 and bfloat16 (tests run on the CPU)."""

ENFORCE_ENUMERATED_SIZES = True
"""Enforce the sizes a toy model cannot have: the head dims listed for TND attention (64, 128, 192)
and npu_apply_rotary_pos_emb (64, 128), multiples of 16 elsewhere in attention, npu_mrope's
multiples of 16 or 32 and its listed sections. Tests on toy models may switch this off."""

ENFORCE_BLOCK_SIZES = True
"""Enforce the sizes of cache blocks; tests that are about small blocks may switch this off."""

ENFORCE_ROTATION_RANGE = True
"""Enforce that cosines and sines lie in [-1, 1]; YaRN scales them."""

RESULTS_ALIAS = True
"""npu_apply_rotary_pos_emb and the `.out` overloads return what they were given. Off, they return
copies, as their schemas say: compilers refuse an operator that breaks its schema."""

UNDEFINED_VALUE = 0.0
"""What fills an output element whose value no document defines (set it to NaN to find readers)."""

HALF_TYPES = (torch.float16, torch.bfloat16)
FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)


class ContractViolation(ValueError):
    """A call that breaks a documented constraint of an operator."""

    def __init__(self, operator: str, argument: str, given: object, demanded: str) -> None:
        """Name the operator, the argument, what was given and what the documentation demands."""
        super().__init__(f"{operator}: {argument} is {given}; the documentation demands {demanded}")
        self.operator = operator
        self.argument = argument
        self.given = given
        self.demanded = demanded


class Checker:
    """Raises ContractViolation in the name of one operator."""

    def __init__(self, operator: str, names: Mapping[str, str] | None = None) -> None:
        """Remember the operator and how it spells the arguments (own name -> documented name)."""
        self.operator = operator
        self._names = dict(names or {})

    def name(self, argument: str) -> str:
        """The operator's own spelling of an argument."""
        return self._names.get(argument, argument)

    def require(self, condition: bool, argument: str, given: object, demanded: str) -> None:
        """Raise unless the condition holds."""
        if not condition:
            raise ContractViolation(self.operator, self.name(argument), given, demanded)

    def unimplemented(self, argument: str, given: object, why: str = "") -> NotImplementedError:
        """The error for a documented argument or value that this reference does not implement."""
        note = f" ({why})" if why else ""
        return NotImplementedError(
            f"{self.operator}: {self.name(argument)}={given!r} is documented but not implemented "
            f"by this reference{note}"
        )

    def refuse(self, given: Mapping[str, object], defaults: Mapping[str, object]) -> None:
        """Raise NotImplementedError for the first argument that differs from its default."""
        for argument, default in defaults.items():
            value = given[argument]
            if value is default or (not isinstance(value, Tensor) and value == default):
                continue
            shown = f"Tensor{tuple(value.shape)}" if isinstance(value, Tensor) else value
            raise self.unimplemented(argument, shown)

    def half(self, argument: str, tensor: Tensor) -> None:
        """float16 or bfloat16; float32 as well while ALLOW_FLOAT32 is set."""
        allowed = FLOAT_TYPES if ALLOW_FLOAT32 else HALF_TYPES
        self.dtype(argument, tensor, allowed)

    def dtype(self, argument: str, tensor: Tensor, allowed: Iterable[torch.dtype]) -> None:
        """One of the allowed dtypes."""
        kinds = tuple(allowed)
        listed = ", ".join(str(kind) for kind in kinds)
        self.require(tensor.dtype in kinds, argument, tensor.dtype, f"one of {listed}")

    def same_dtype(self, argument: str, tensor: Tensor, other: str, reference: Tensor) -> None:
        """The dtype of another argument."""
        self.require(
            tensor.dtype == reference.dtype,
            argument,
            tensor.dtype,
            f"the dtype of {self.name(other)} ({reference.dtype})",
        )

    def rank(self, argument: str, tensor: Tensor, *ranks: int) -> None:
        """One of the allowed numbers of dimensions."""
        self.require(
            tensor.dim() in ranks,
            argument,
            f"{tensor.dim()}-D {tuple(tensor.shape)}",
            f"{' or '.join(str(rank) for rank in ranks)} dimensions",
        )

    def contiguous(self, argument: str, tensor: Tensor) -> None:
        """A contiguous tensor ("不支持非连续的Tensor")."""
        self.require(
            tensor.is_contiguous(),
            argument,
            f"non-contiguous, shape {tuple(tensor.shape)} strides {tensor.stride()}",
            "a contiguous tensor",
        )

    def shape(self, argument: str, tensor: Tensor, expected: Iterable[int], why: str = "") -> None:
        """Exactly this shape."""
        wanted = tuple(expected)
        self.require(
            tuple(tensor.shape) == wanted,
            argument,
            f"shape {tuple(tensor.shape)}",
            f"shape {wanted}{' (' + why + ')' if why else ''}",
        )

    def choice(
        self,
        argument: str,
        value: object,
        implemented: Iterable[object],
        documented: Iterable[object] = (),
    ) -> None:
        """An implemented value; a merely documented one raises NotImplementedError."""
        known = list(implemented)
        if value in known:
            return
        others = list(documented)
        if value in others:
            raise self.unimplemented(argument, value)
        self.require(False, argument, repr(value), f"one of {known + others}")
