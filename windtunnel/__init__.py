"""The Python door: a trained run as an object.

import windtunnel

model = windtunnel.load("outputs/latest")
model.score(b"The quick brown fox")                 # bits per byte
model.generate(b"The ", n_bytes=200, seed=1)          # bytes
model.attention(b"The quick brown fox")             # {"layers.0.attention": [H, T, T], ...}
"""

from windtunnel.model import Model, load

__all__ = ["Model", "load"]
