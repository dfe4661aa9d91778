"""The papers' equations, written with loops in float64: what the product's own, faster code is compared with.

One module a mechanism. Nothing here is imported by the product, and nothing here imports the product, so that a
mistake cannot be on both sides. Loops run over streams, heads, queries and keys; autograd gives the gradients.

Letters: B streams, T bytes in this segment, S visible positions, D width, H heads, K head width, N persistent
vectors, C half-keys per set, V byte values. Every matrix is applied as ``matrix @ vector`` (the layout of
``torch.nn.Linear``), and head h owns rows h K to (h + 1) K of a projection.
"""
