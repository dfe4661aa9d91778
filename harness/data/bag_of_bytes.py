"""Baselines for labelled texts: the most frequent class, and logistic regression on the frequencies
of bytes."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.data.texts import Texts

PENALTY = 1e-2
"""Of the sum of squared weights, in nats per text."""
ITERATIONS = 100
MAX_TEXTS = 50_000  # of train, the first ones, that the regression reads
CHUNK = 1024  # texts whose bytes are counted together


def baselines(train: Texts, scored: Texts, *, classes: int) -> dict[str, tuple[float, float]]:
    """Return for each baseline, its bits per label and the share of likeliest classes that are
    right, of ``scored``."""
    counts = torch.bincount(train.labels, minlength=classes) + 1.0
    prior = (counts / counts.sum()).log().expand(scored.number, classes)
    first = train.select(slice(MAX_TEXTS))
    regression = _regression(frequencies(first), first.labels, classes=classes)
    predictions = {"most frequent": prior, "bag of bytes": regression(frequencies(scored))}
    return {
        name: (
            F.cross_entropy(logits, scored.labels).item() / math.log(2),
            (logits.argmax(1) == scored.labels).double().mean().item(),
        )
        for name, logits in predictions.items()
    }


def frequencies(texts: Texts) -> Tensor:
    """Return the share of each byte in each text: float32 ``[N, 256]``."""
    shares = []
    for rows in torch.arange(texts.number).split(CHUNK):
        inputs, _, lengths = texts.padded(rows, longest=int(texts.lengths.max()))
        is_byte = (torch.arange(inputs.shape[1]) < lengths[:, None]).float()
        counts = torch.zeros(len(rows), 256).scatter_add_(1, inputs.long(), is_byte)
        shares.append(counts / lengths[:, None])
    return torch.cat(shares)


def _regression(features: Tensor, labels: Tensor, *, classes: int):
    """Return the function from features to logits of a fit by L-BFGS. Features are divided by their
    standard deviations."""
    scale = features.std(0).clamp(min=1e-6)
    mean = features.mean(0)
    weight = torch.zeros(features.shape[1], classes, requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    scaled = (features - mean) / scale
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=ITERATIONS, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(scaled @ weight + bias, labels) + PENALTY * (weight**2).sum()
        value.backward()
        return value

    optimizer.step(loss)
    weight, bias = weight.detach(), bias.detach()
    # a byte that train lacks has no weight
    return lambda others: (others - mean) / scale @ weight + bias
