"""NVIDIA GPUs, and their kernels."""
