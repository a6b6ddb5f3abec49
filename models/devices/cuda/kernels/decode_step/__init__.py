"""A whole decode step of 1 to 16 rows in one CUDA kernel, for GPUs of compute capability 9.0.

Read `table.py` first: it has the phases of a layer in the order that both sides of the kernel use.
The CUDA sources, in order of dependency: `../machine.cuh` (instructions),
`arguments.cuh`, `handover.cuh`, `choice.cuh`, `ring.cuh`, `product.cuh`, `attention.cuh`,
`experts.cuh`, `step.cu`.
"""
