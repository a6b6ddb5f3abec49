"""The CPU, and its kernels."""
