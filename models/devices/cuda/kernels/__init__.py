"""Triton kernels for NVIDIA GPUs. Only `devices/cuda/device.py` imports them, and only if Triton is
installed.

All of them also run, slowly, in Triton's interpreter on a CPU (`TRITON_INTERPRET=1`), for tests
without a GPU.
"""
