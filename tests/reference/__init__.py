"""The equations of the papers as loops in float64, with which the product's faster code is
compared.

Each mechanism has one module. References and product do not import each other, so that they share
no mistake. The loops run over streams, heads, queries and keys, and autograd computes the
gradients.

There are B streams, T bytes in the segment, L bytes before it, S visible positions, H heads, N
persistent vectors, C half-keys in a set, and V byte values. D is the width of the model, K the
width of a head. Every matrix is applied as ``matrix @ vector``, the layout of
``torch.nn.Linear``. Head h has rows h K to (h + 1) K."""
