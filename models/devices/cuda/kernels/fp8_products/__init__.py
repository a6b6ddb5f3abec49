"""Matrix products with FP8 weights in CUDA C++, for GPUs of compute capability 9.0.

`variants.py` lists the kernels and chooses one for each product. `product.cu` is their source; it
uses the tiles in `../tiles.cuh` and the instruction wrappers in `../machine.cuh`. `launch.py` loads
and launches them. `linear.py` and `experts.py` contain the operators.
"""
