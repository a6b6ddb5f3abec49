"""A whole decode step of 1 to 16 rows in one CUDA kernel, for GPUs of compute capability 9.0.

Read `table.py` first: the phases of a layer, from which both sides of the kernel take their order.
The CUDA sources, in the order in which they build on each other: `machine.cuh` (instructions),
`arguments.cuh`, `handover.cuh`, `choice.cuh`, `ring.cuh`, `product.cuh`, `attention.cuh`,
`experts.cuh`, `step.cu`.
"""
