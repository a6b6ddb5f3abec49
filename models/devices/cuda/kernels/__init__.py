"""Kernels for NVIDIA GPUs, in Triton and CUDA. Only `devices/cuda/device.py` imports the Triton
kernels, and only if Triton is installed.

For tests without a GPU, all Triton kernels also run, slowly, in Triton's interpreter on a CPU
(`TRITON_INTERPRET=1`).
"""
