"""The sdpa backend: torch's own choice of kernel, where the window is the whole triangle and nothing is added to scores.

    y_t = sum over j <= t of dropout(softmax_j(q_t . k_j)) v_j

That is a segment which nothing precedes and which is no longer than the window: training on independent segments
(``batch.carry=false``). Scoring carries keys from segment to segment, and so does training on streams; both need another
backend. Nothing is replaced here without a word: what does not fit is refused.
"""

import torch.nn.functional as F
from torch import Tensor

from variants.kernels.window import Persistent, Window


def obstacle(
    window: Window,
    *,
    rows: int,
    keys: int,
    bias: Tensor | None = None,
    vectors: Tensor | None = None,
    persistent: Persistent | None = None,
) -> str | None:
    """Why a segment of ``rows`` queries and as many own keys among ``keys`` cannot be computed so, or None.

    Args:
        window: spans are soft where it has a ramp or z, whatever they are.
    """
    found = {
        f"{keys - rows} keys carried from before the segment": keys > rows,
        "queries that do not see themselves (model.attend_self=false)": window.shift > 0,
        f"a window of {min(window.max_keys)} keys on a segment of {rows}": min(window.max_keys) < rows,
        "learned spans": window.z is not None or window.ramp > 0,
        "a position scheme that adds to scores": bias is not None or vectors is not None,
        "persistent vectors": persistent is not None,
    }
    return next((reason for reason, stands in found.items() if stands), None)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    bias: Tensor | None = None,
    vectors: Tensor | None = None,
    persistent: Persistent | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """The same function as ``window.attend``, of a whole triangle; ValueError where it is none.

    Args:
        dropout: drawn by torch's generator in the kernel.
        seed: not read, so that another backend drops other weights.
    """
    added = {"bias": bias, "vectors": vectors, "persistent": persistent}
    if reason := obstacle(window, rows=q.shape[2], keys=k.shape[2], **added):
        raise ValueError(f"runtime.backend=sdpa cannot run with {reason}")
    return F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), dropout_p=dropout, is_causal=True, scale=1.0)
