"""Dropout from counters: the same weights for any tile, as many as the rate says, and plain attention takes them."""

import torch
from torch import Tensor

from variants.kernels import dropout, window
from variants.kernels.window import Persistent, Window

PINNED = [4062030576, 2427499623, 1513036796, 93295047, 2092645796, 1060211399, 2759667482, 2839109181]


def rows_of(seed: int | Tensor, *, streams, heads, queries) -> Tensor:
    at = {"streams": streams, "heads": heads, "queries": queries}
    return dropout.row_numbers(
        torch.as_tensor(seed), **{name: torch.tensor(list(places)) for name, places in at.items()}
    )


def stays(seed: int, *, streams=2, heads=3, size=128, rate=0.3) -> Tensor:
    rows = rows_of(seed, streams=range(streams), heads=range(heads), queries=range(size))
    return dropout.keep_mask(rows, torch.arange(size), rate)


def test_numbers_are_pinned_for_other_languages():
    rows = rows_of(0x0123456789ABCDEF, streams=[0, 7], heads=[0, 3], queries=[0, 511])
    assert dropout.mix(torch.tensor([0, 1, dropout.MASK_32])).tolist() == [0, 1753845952, 1734902346]
    assert rows.flatten().tolist() == PINNED


def test_the_rate_holds_everywhere_neighbours_are_uncorrelated_and_a_seed_says_all():
    stay = stays(5, rate=0.4, streams=4, heads=4, size=256).double()
    for dims in ((0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)):
        share = stay.mean(dims)
        assert (share - 0.6).abs().max() < 5 * (0.4 * 0.6 * share.numel() / stay.numel()) ** 0.5
    stay = stays(9, rate=0.5, heads=2, size=512).double() - 0.5
    for dim in range(4):
        n = stay.shape[dim] - 1
        product = (stay.narrow(dim, 0, n) * stay.narrow(dim, 1, n)).mean() * 4
        assert product.abs() < 5 / (stay.numel() / 2) ** 0.5
    assert torch.equal(stays(1), stays(1))
    assert not torch.equal(stays(1), stays(2)) and not torch.equal(stays(1), stays(1 + 2**32))
    for h in range(3):  # alone as together
        assert torch.equal(stays(11 + h, heads=1), stays(11)[:, h : h + 1])


def test_plain_attention_drops_what_was_drawn():
    """Values that are one-hot give back the weights: those that stay are the whole ones over 1 - rate."""
    torch.manual_seed(0)
    rows, keys, n, rate, shift = 5, 9, 3, 0.4, 1
    q, k = torch.randn(2, 2, rows, 4).double(), torch.randn(2, 2, keys, 4).double()
    persistent = Persistent(q, torch.randn(2, n, 4).double(), torch.eye(keys + n)[keys:].double().expand(2, -1, -1))
    inputs = (q, k, torch.eye(keys, keys + n).double().expand(2, 2, -1, -1), Window((4, 6), shift))
    whole, seed = window.attend(*inputs, persistent=persistent), torch.tensor(77)
    y = window.attend(*inputs, persistent=persistent, dropout=rate, seed=seed)
    drawn_rows = rows_of(seed, streams=range(2), heads=range(2), queries=range(rows))
    for t in range(rows):
        numbers = [keys - rows + t - shift - j for j in range(keys)] + [dropout.PERSISTENT + i for i in range(n)]
        stay = dropout.keep_mask(drawn_rows[:, :, t : t + 1], torch.tensor(numbers), rate)[:, :, 0]
        assert torch.allclose(y[:, :, t], whole[:, :, t] * stay / (1 - rate))
