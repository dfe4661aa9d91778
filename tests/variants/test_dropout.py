"""Dropout from a counter-based generator: pinned numbers, statistics, and its effect in plain
attention."""

import torch
from torch import Tensor

from variants.kernels import dropout, window
from variants.kernels.window import Persistent, Window

PINNED = [
    4062030576,
    2427499623,
    1513036796,
    93295047,
    2092645796,
    1060211399,
    2759667482,
    2839109181,
]


def keep_mask(seed: int, *, streams=2, heads=3, size=128, rate=0.3) -> Tensor:
    """Return a mask ``[streams, heads, size, size]`` of the weights that dropout keeps."""
    rows = dropout.row_numbers(torch.tensor(seed), streams, heads, size)
    return dropout.keep_mask(rows, torch.arange(size), rate)


def test_numbers_are_pinned_for_implementations_in_other_languages():
    rows = dropout.row_numbers(torch.tensor(0x0123456789ABCDEF), 8, 4, 512)[[0, 7]][:, [0, 3]][
        ..., [0, 511]
    ]
    assert dropout.mix(torch.tensor([0, 1, dropout.MASK_32])).tolist() == [
        0,
        1753845952,
        1734902346,
    ]
    assert rows.flatten().tolist() == PINNED


def test_masks_have_the_rate_along_every_axis_are_uncorrelated_and_depend_only_on_the_seed():
    mask = keep_mask(5, rate=0.4, streams=4, heads=4, size=256).double()
    for dims in ((0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)):
        share = mask.mean(dims)
        assert (share - 0.6).abs().max() < 5 * (0.4 * 0.6 * share.numel() / mask.numel()) ** 0.5
    mask = keep_mask(9, rate=0.5, heads=2, size=512).double() - 0.5
    for dim in range(4):
        n = mask.shape[dim] - 1
        product = (mask.narrow(dim, 0, n) * mask.narrow(dim, 1, n)).mean() * 4
        assert product.abs() < 5 / (mask.numel() / 2) ** 0.5
    assert torch.equal(keep_mask(1), keep_mask(1))
    assert not torch.equal(keep_mask(1), keep_mask(2)) and not torch.equal(
        keep_mask(1), keep_mask(1 + 2**32)
    )
    for h in range(3):  # head h with seed s has the mask of head 0 with seed s + h
        assert torch.equal(keep_mask(11 + h, heads=1), keep_mask(11)[:, h : h + 1])


def test_plain_attention_applies_the_mask_and_divides_by_one_minus_the_rate():
    """With one-hot values the output is the attention weights."""
    torch.manual_seed(0)
    rows, keys, n, rate, shift = 5, 9, 3, 0.4, 1
    q, k = torch.randn(2, 2, rows, 4).double(), torch.randn(2, 2, keys, 4).double()
    persistent = Persistent(
        q, torch.randn(2, n, 4).double(), torch.eye(keys + n)[keys:].double().expand(2, -1, -1)
    )
    inputs = (q, k, torch.eye(keys, keys + n).double().expand(2, 2, -1, -1), Window((4, 6), shift))
    without_dropout, seed = window.attend(*inputs, persistent=persistent), torch.tensor(77)
    y = window.attend(*inputs, persistent=persistent, dropout=rate, seed=seed)
    drawn_rows = dropout.row_numbers(seed, 2, 2, rows)
    for t in range(rows):
        columns = [keys - rows + t - shift - j for j in range(keys)] + [
            dropout.PERSISTENT + i for i in range(n)
        ]
        mask = dropout.keep_mask(drawn_rows[:, :, t : t + 1], torch.tensor(columns), rate)[:, :, 0]
        assert torch.allclose(y[:, :, t], without_dropout[:, :, t] * mask / (1 - rate))
