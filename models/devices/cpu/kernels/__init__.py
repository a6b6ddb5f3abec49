"""The CPU backend's own kernels, which Numba compiles for the processor on which they run."""
