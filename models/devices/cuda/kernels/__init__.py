"""Triton kernels for NVIDIA GPUs. Only `devices/cuda/device.py` imports them, where Triton is.

All of them also run, slowly, in Triton's interpreter on a CPU (`TRITON_INTERPRET=1`), which is how
they are tested where there is no GPU.
"""
