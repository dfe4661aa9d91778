"""Kernels that read a window of the past or a table, fast: they know tensors and no mechanism.

``window`` has what is computed, and the plain backend, which the others are compared with. The same in fewer bytes and
operations: ``fused`` (torch's flash attention), ``window_cpu`` (C++), ``triton_window`` (CUDA).
``beside`` adds to a window keys that are other for every chunk of queries.
``table`` and ``product_search`` read a product-key memory. ``native`` compiles C++ at its first use.
"""
