"""The NVIDIA GPU backend: the device and its kernels."""
