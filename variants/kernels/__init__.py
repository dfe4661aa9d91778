"""Kernels over a window of the past, sums of the past, or a table. They take tensors and depend on
no mechanism.

``window`` defines attention over a window; its plain backend is the reference for the others.
``chunked`` (a few queries at a time), ``fused`` (torch's flash attention), ``window_cpu`` (C++) and
``triton_window`` (CUDA) compute the same in less memory. ``chunk_keys`` adds keys that differ for
each chunk of queries to a window's softmax. ``carried_sums`` and ``decayed_sums`` replace the
window by sums over all of the past. ``table`` and ``product_search`` read a product-key memory.
``native`` compiles C++ sources at their first use."""
