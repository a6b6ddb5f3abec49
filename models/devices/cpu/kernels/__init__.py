"""The CPU's own kernels, compiled by Numba for the processor that they run on."""
