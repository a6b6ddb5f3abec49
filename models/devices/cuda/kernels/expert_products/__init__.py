"""Grouped GEMMs of experts in bfloat16 in CUDA C++, for GPUs of compute capability 9.0.

`product.cu` is the kernels' source; it uses the tiles in `../tiles.cuh` and the instruction
wrappers in `../machine.cuh`. `experts.py` loads and launches them.
"""
