"""The formats of packed weights, by the `quant_method` in a `quantization_config`. Imports no
torch."""

from __future__ import annotations

FORMATS: dict[str, str] = {"fp8": "nanoactor.models.weights.fp8:Fp8Format"}
"""Class that reads each format, as "module:name". It follows the protocol
`nanoactor.models.weights.weights.Format`."""
