"""Arithmetic coding of symbols. ``test_compress.py`` codes whole files."""

import math

import numpy as np
import pytest
import torch

from bench.arithmetic import BITS, ESCAPE, TOTAL, Decoder, Encoder, frequencies
from bench.compress import code_streams
from bench.progress import Progress
from harness.device.torch_settings import configure_torch
from tests.support.small_configs import TINY, plan


def test_symbols_are_decoded_and_the_code_has_the_length_of_their_information():
    draw = np.random.default_rng(0)
    weights = draw.dirichlet(np.full(257, 0.02), size=2000) * (TOTAL - 257)
    counts = 1 + weights.astype(np.int64)
    counts[:, -1] += TOTAL - counts.sum(axis=1)
    ends = counts.cumsum(axis=1)
    symbols = [int(draw.choice(257, p=row / TOTAL)) for row in counts]
    # the rarest symbols cost about 24 bits
    symbols[::50] = [int(row.argmin()) for row in counts[::50]]
    encoder = Encoder()
    for row, symbol in zip(ends, symbols, strict=True):
        encoder.code(row, symbol)
    code = encoder.finish()
    assert Encoder().finish() == b""
    decoder = Decoder(code)
    assert [decoder.code(row, 0) for row in ends] == symbols
    bits = sum(BITS - math.log2(row[symbol]) for row, symbol in zip(counts, symbols, strict=True))
    assert bits <= 8 * len(code) + 1e-6 and 8 * len(code) <= bits + 8 + 2000 * 2**-23


def test_a_carry_propagates_through_bytes_of_255():
    """Near the top of the interval all settled bytes are 255, until a symbol's carry turns them
    into zeros."""
    ends, last = np.array([1, TOTAL - 1, TOTAL]), 2
    for tail in ([1] * 40, [last] * 3, [0], [1, 0, last]):
        for lead in range(1, 12):
            symbols = [1, *[last] * lead, *tail]
            encoder = Encoder()
            for symbol in symbols:
                encoder.code(ends, symbol)
            decoder = Decoder(encoder.finish())
            assert [decoder.code(ends, 0) for _ in symbols] == symbols
    encoder = Encoder()
    encoder._settled, encoder._low, encoder._width = (
        bytearray(b"\x07\xff\xff"),
        (1 << 64) - 1,
        1 << 50,
    )
    encoder.code(np.array([1 << 23, TOTAL]), 1)
    assert encoder.finish().startswith(b"\x08\0\0")


@pytest.mark.parametrize("escape", [0, ESCAPE])
def test_frequencies_have_the_exact_sum_and_none_is_zero(escape):
    torch.manual_seed(0)
    for scale in (0.0, 0.1, 5.0, 100.0, 1e4):
        probabilities = (scale * torch.randn(64, 205, dtype=torch.float64)).softmax(dim=1)
        counts = frequencies(probabilities, escape=escape)
        assert counts.dtype == torch.int64 and (counts.sum(dim=1) == TOTAL).all()
        assert (counts[:, :-1] >= 1).all() and (counts[:, -1] == escape).all()
        likely = probabilities > 1e-4
        assert ((counts[:, :-1] / TOTAL / probabilities)[likely] - 1).abs().max() < 0.02


def test_weights_of_nan_are_refused():
    model = plan(*TINY).make_model()
    with torch.no_grad():
        model.head.weight.fill_(math.nan)
    coding = {"streams": 5, "symbols": bytes(range(256)), "progress": Progress()}
    with pytest.raises(ValueError, match="run: its weights give logits that are not finite"):
        code_streams(
            Encoder(),
            b"some text" * 9,
            model=model,
            runtime=configure_torch(plan(*TINY).runtime),
            **coding,
        )
