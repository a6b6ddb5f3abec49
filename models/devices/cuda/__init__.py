"""The NVIDIA GPU device and its kernels."""
