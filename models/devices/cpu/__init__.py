"""The CPU backend: the device, in an interpreted and a compiled variant, and its kernels."""
