"""Baselines for labelled texts: the most frequent class, and logistic regression on the frequencies
of bytes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.data.texts import Texts

PENALTY = 1e-2
"""Of the sum of squared weights, in nats per text."""
ITERATIONS = 100


def baseline_accuracy(train: Texts, scored: Texts, *, classes: int) -> dict[str, float]:
    """Return the share of texts whose class each baseline predicts."""
    most_frequent = torch.bincount(train.labels).argmax()
    regression = _regression(frequencies(train), train.labels, frequencies(scored), classes)
    predictions = {"most frequent": most_frequent, "bag of bytes": regression.argmax(1)}
    return {
        name: (prediction == scored.labels).double().mean().item()
        for name, prediction in predictions.items()
    }


def frequencies(texts: Texts) -> Tensor:
    """Return the share of each byte in each text: float32 ``[N, 256]``."""
    ends = texts.starts + texts.lengths
    parts = (texts.content[start:end] for start, end in zip(texts.starts, ends, strict=True))
    counts = torch.stack([torch.bincount(part, minlength=256) for part in parts])
    return counts / texts.lengths[:, None]


def _regression(features: Tensor, labels: Tensor, others: Tensor, classes: int) -> Tensor:
    """Return logits ``[M, C]`` of ``others [M, 256]`` by a fit to ``features [N, 256]``, which are
    divided by their standard deviations."""
    scale = features.std(0)
    scale = scale.masked_fill(scale == 0, torch.inf)  # a byte that train lacks has no weight
    weight = torch.zeros(features.shape[1], classes, requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=ITERATIONS, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = features / scale @ weight + bias
        penalised = F.cross_entropy(logits, labels) + PENALTY * weight.square().sum()
        penalised.backward()
        return penalised

    optimizer.step(loss)
    return (others / scale @ weight + bias).detach()
