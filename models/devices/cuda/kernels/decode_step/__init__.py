"""A whole decode step of 1 to 16 rows in one CUDA kernel, for GPUs of compute capability 9.0.

Read `table.py` first. It defines the phases of a layer, in the order that both the producer warps
(which load weights) and the consumer warps of the kernel follow. The CUDA sources, in order of
dependency: `../machine.cuh` (instruction wrappers), `arguments.cuh`, `handover.cuh`, `choice.cuh`,
`ring.cuh`, `product.cuh`, `attention.cuh`, `experts.cuh`, `step.cu`.
"""
