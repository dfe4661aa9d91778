"""Fast kernels that read a window of the past or a table. They take tensors and know no mechanism.

``window`` defines the computation and has the plain backend, the reference for the others. ``fused`` (torch's flash
attention), ``window_cpu`` (C++) and ``triton_window`` (CUDA) compute the same with less memory and fewer operations.
``beside`` adds keys that differ per chunk of queries to a window's softmax.
``table`` and ``product_search`` read a product-key memory. ``native`` compiles C++ sources at their first use.
"""
