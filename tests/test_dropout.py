"""Dropout from counters: the same weights for any tile, as many as the rate says, and plain attention takes them."""

import pytest
import torch

from variants.kernels import dropout
from variants.kernels.window import Persistent, Window, attend

RATES = (0.1, 0.4)
PINNED = [4062030576, 2427499623, 1513036796, 93295047, 2092645796, 1060211399, 2759667482, 2839109181]


def drawn(seed, *, streams=2, heads=3, queries=64, keys=128, rate=0.3):
    row = dropout.rows(
        torch.tensor(seed), streams=torch.arange(streams), heads=torch.arange(heads), queries=torch.arange(queries)
    )
    return dropout.keep(row, torch.arange(keys), rate)


def test_numbers_are_pinned_for_other_languages():
    row = dropout.rows(
        torch.tensor(0x0123456789ABCDEF),
        streams=torch.tensor([0, 7]),
        heads=torch.tensor([0, 3]),
        queries=torch.tensor([0, 511]),
    )
    assert dropout.mix(torch.tensor([0, 1, dropout.WORD])).tolist() == [0, 1753845952, 1734902346]
    assert row.flatten().tolist() == PINNED


@pytest.mark.parametrize("rate", RATES)
def test_the_rate_holds_over_streams_heads_queries_and_keys(rate):
    stays = drawn(5, rate=rate, streams=4, heads=4, queries=256, keys=256).double()
    for dims in ((0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)):
        share = stays.mean(dims)
        count = stays.numel() / share.numel()
        assert (share - (1 - rate)).abs().max() < 5 * (rate * (1 - rate) / count) ** 0.5


def test_neighbours_are_uncorrelated():
    stays = drawn(9, rate=0.5, streams=2, heads=2, queries=512, keys=512).double() - 0.5
    for dim in range(4):
        n = stays.shape[dim] - 1
        together = (stays.narrow(dim, 0, n) * stays.narrow(dim, 1, n)).mean() * 4
        assert together.abs() < 5 / (stays.numel() / 2) ** 0.5


def test_seeds_differ_and_a_seed_says_all():
    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert not torch.equal(drawn(1), drawn(1 + 2**32))


def test_plain_attention_drops_what_was_drawn():
    """Values that are one-hot give back the weights: those that stay are the whole ones over 1 - rate."""
    torch.manual_seed(0)
    rows, keys, n, rate, shift = 5, 9, 3, 0.4, 1
    q, k = torch.randn(2, 2, rows, 4).double(), torch.randn(2, 2, keys, 4).double()
    persistent = Persistent(q, torch.randn(2, n, 4).double(), torch.eye(keys + n)[keys:].double().expand(2, -1, -1))
    v = torch.eye(keys, keys + n).double().expand(2, 2, -1, -1)
    window, seed = Window((4, 6), shift), torch.tensor(77)
    whole = attend(q, k, v, window, persistent=persistent)
    found = attend(q, k, v, window, persistent=persistent, dropout=rate, seed=seed)
    row = dropout.rows(seed, streams=torch.arange(2), heads=torch.arange(2), queries=torch.arange(rows))
    for t in range(rows):
        numbers = [keys - rows + t - shift - j for j in range(keys)] + [dropout.PERSISTENT + i for i in range(n)]
        stays = dropout.keep(row[:, :, t : t + 1], torch.tensor(numbers), rate)[:, :, 0]
        assert torch.allclose(found[:, :, t], whole[:, :, t] * stays / (1 - rate))


def test_heads_apart_drop_what_they_drop_together():
    whole = drawn(11, heads=3)
    for h in range(3):
        assert torch.equal(drawn(11 + h, heads=1), whole[:, h : h + 1])
