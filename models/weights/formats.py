"""Formats of packed weights, by `quant_method` of a `quantization_config`; imports no torch."""

from __future__ import annotations

FORMATS: dict[str, str] = {"fp8": "nanoactor.models.weights.fp8:Fp8Format"}
"""The class that reads each format, as "module:name": a
`nanoactor.models.weights.checkpoint.Format`."""
