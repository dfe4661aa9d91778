"""Coding a file by a model's probabilities: what comes back, and what it costs beside what the score claims."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bench.arithmetic import BITS, ESCAPE, TOTAL, Decoder, Encoder, frequencies
from bench.compress import code_streams, stream_lengths
from bench.weights import shake_
from harness.device import runtime
from harness.model import LanguageModel
from tests.composing import TINY, plan, recall
from tests.composing import small as fitting
from tests.runs import MEMORY, restored  # noqa: F401 - a fixture

ALL = bytes(range(256))
TEXT = b"Attention is a weighted mean of values; the weights are a softmax. " * 12


def small(variant: str, *overrides: str) -> LanguageModel:
    """A model whose weights are shaken, so that no two of its probabilities are alike."""
    more = MEMORY if variant == "product_key_memory" else ()
    model = plan(*TINY, f"variant={variant}", *fitting(variant), *more, *overrides).make_model()
    shake_(model)
    return model


def there_and_back(model: LanguageModel, content: bytes, *, streams: int, symbols: bytes = ALL, words=()) -> dict:
    """The code and its counts, once it has come back as it was."""
    how = {"streams": streams, "model": model, "symbols": symbols, "advance": lambda n_bytes: None}
    how["device"], encoder = runtime.start(plan(*TINY, *words).runtime), Encoder()
    _, counts = code_streams(encoder, content, **how)
    code = encoder.finish()
    assert code_streams(Decoder(code), bytes(len(content)), **how) == (content, counts)
    return counts | {"code": code}


def test_a_coder_gives_back_what_it_was_given_at_the_cost_of_its_frequencies():
    draw = np.random.default_rng(0)
    weights = draw.dirichlet(np.full(257, 0.02), size=2000) * (TOTAL - 257)
    counts = 1 + weights.astype(np.int64)
    counts[:, -1] += TOTAL - counts.sum(axis=1)
    ends = counts.cumsum(axis=1)
    symbols = [int(draw.choice(257, p=own / TOTAL)) for own in counts]
    symbols[::50] = [int(own.argmin()) for own in counts[::50]]  # what costs 24 bits
    encoder = Encoder()
    for own, symbol in zip(ends, symbols, strict=True):
        encoder.code(own, symbol)
    code = encoder.finish()
    assert Encoder().finish() == b""
    decoder = Decoder(code)
    assert [decoder.code(own, 0) for own in ends] == symbols
    bits = sum(BITS - math.log2(own[symbol]) for own, symbol in zip(counts, symbols, strict=True))
    assert bits <= 8 * len(code) + 1e-6 and 8 * len(code) <= bits + 8 + 2000 * 2**-23


def test_a_carry_runs_through_settled_bytes():
    """Near the top of the interval all settled bytes are 255, until one symbol more makes them zeros."""
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
    encoder._settled, encoder._low, encoder._width = bytearray(b"\x07\xff\xff"), (1 << 64) - 1, 1 << 50
    encoder.code(np.array([1 << 23, TOTAL]), 1)
    assert encoder.finish().startswith(b"\x08\0\0")


@pytest.mark.parametrize("escape", [0, ESCAPE])
def test_frequencies_are_exact_in_sum_and_nothing_is_impossible(escape):
    torch.manual_seed(0)
    for scale in (0.0, 0.1, 5.0, 100.0, 1e4):
        probabilities = (scale * torch.randn(64, 205, dtype=torch.float64)).softmax(dim=1)
        counts = frequencies(probabilities, escape=escape)
        assert counts.dtype == torch.int64 and (counts.sum(dim=1) == TOTAL).all()
        assert (counts[:, :-1] >= 1).all() and (counts[:, -1] == escape).all()
        likely = probabilities > 1e-4
        assert ((counts[:, :-1] / TOTAL / probabilities)[likely] - 1).abs().max() < 0.02


@pytest.mark.parametrize("content", [b"abcdef", ALL[::-1] + b"\0" * 400 + TEXT, ALL[128:] * 3])
def test_what_the_vocabulary_lacks_comes_back(content):
    """As bytes of 20 bits; there is a byte more than streams, some that are lacking, and nothing else."""
    symbols, streams = bytes(sorted(set(TEXT))), 5 if len(content) < 20 else 77
    model = small("mhsa", f"data.vocabulary={len(symbols) + 3}")  # a few numbers have no byte
    coded = there_and_back(model, content, streams=streams, symbols=symbols)
    lengths = stream_lengths(len(content), streams)
    firsts = [sum(lengths[:i]) for i in range(len(lengths))]
    lacking = [at for at, byte in enumerate(content) if byte not in symbols and at not in firsts]
    assert coded["escaped"] == len(lacking) and coded["predicted"] == max(0, len(content) - streams)
    if coded["escaped"] == coded["predicted"] > 0:
        assert coded["bits"] == pytest.approx(20 * len(lacking))
        assert 8 * len(coded["code"]) == pytest.approx(20 * len(lacking) + 8 * len(lengths), abs=16)


@pytest.mark.parametrize("variant", ["compressed", "product_key_memory"])  # summaries, nothing kept
def test_the_code_is_as_long_as_the_score_claims(variant):
    content = recall().splits["train"].numpy().tobytes()[:1500] + TEXT + ALL
    streams, model = 85, small(variant)
    coded = there_and_back(model, content, streams=streams)
    nats, at = 0.0, 0
    for length in stream_lengths(len(content), streams):  # a whole stream at once, as scoring has it
        tokens = torch.tensor(list(content[at : at + length]))[None]
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits
        nats += F.cross_entropy(logits[0], tokens[0, 1:], reduction="sum").double().item()
        at += length
    assert coded["bits"] == pytest.approx(nats / math.log(2), rel=1e-4) and coded["predicted"] == len(content) - streams
    assert 8 * len(coded["code"]) == pytest.approx(nats / math.log(2) + 8 * streams, rel=0.005)


def test_bfloat16_comes_back_and_weights_that_are_no_numbers_are_refused():
    broken = small("mhsa")
    there_and_back(broken, TEXT[:300], streams=50, words=["runtime.precision=bfloat16"])
    with torch.no_grad():
        broken.head.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="run: its weights give no probabilities"):
        there_and_back(broken, TEXT, streams=5)
