"""Products of FP8 matrices in CUDA C++, for GPUs of compute capability 9.0.

`variants.py` lists the kernels and chooses one for each product. `product.cu` is their source,
built on the instruction wrappers in `../machine.cuh`. `launch.py` loads and runs them. `linear.py`
and `experts.py` are the operators.
"""
