"""The equations of the papers as loops in float64, with which the product's faster code is compared.

Each mechanism has one module. References and product do not import each other, so that they share no mistake. The
loops run over streams, heads, queries and keys, and autograd computes the gradients.

B is the number of streams, T of bytes in the segment, L of bytes before it, S of visible positions, D the width, H the
number of heads, K the width of a head, N the number of persistent vectors, C of half-keys in a set, V of byte values.
Every matrix is applied as ``matrix @ vector``, the layout of ``torch.nn.Linear``. Head h has rows h K to (h + 1) K."""
