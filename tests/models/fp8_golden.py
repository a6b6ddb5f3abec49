"""Writes `golden/fp8_blocks.safetensors`: a matrix in FP8 blocks, and what it stands for.

    pip install --no-deps compressed-tensors loguru psutil
    python -m tests.models.fp8_golden

compressed-tensors packs and unpacks it; the file was written with version 0.20.0. The package is no
dependency: tests read the file that is committed.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

FILE = Path(__file__).parent / "golden" / "fp8_blocks.safetensors"
NAME, BLOCK, LARGEST = "matrix", [128, 128], 448.0
SHAPE = 144, 150
"""Two blocks and two, of which three are not full."""


def main():
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

    how = QuantizationArgs(
        num_bits=8, type="float", strategy="block", block_structure=BLOCK, symmetric=True
    )
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(SHAPE, generator=generator) * 0.02
    matrix[5, 7], matrix[140, 3], matrix[9, :4] = 3.0, -2.5, 0.0
    rows, columns = (-(-size // each) for size, each in zip(SHAPE, BLOCK, strict=True))
    scales = torch.stack(
        [
            torch.stack([part.abs().max() / LARGEST for part in stripe.split(BLOCK[1], 1)])
            for stripe in matrix.split(BLOCK[0])
        ]
    )
    assert scales.shape == (rows, columns)
    zeros = torch.zeros_like(scales)
    packed = quantize(matrix, scales, zeros, how, dtype=torch.float8_e4m3fn)
    numbers = dequantize(packed, scales, zeros, how)
    tensors = {
        f"{NAME}.weight": packed.contiguous(),
        f"{NAME}.weight_scale_inv": scales,
        "numbers": numbers.float().contiguous(),
    }
    FILE.parent.mkdir(exist_ok=True)
    save_file(tensors, FILE)


if __name__ == "__main__":
    main()
