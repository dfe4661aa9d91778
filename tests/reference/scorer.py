"""A scorer in float64 numpy: bits per byte of trained weights over a stream that is read as a
single segment.

The model has pre-norm residual layers with RMSNorm, rotary positions, and windows that include the
query. ``weights`` are the arrays of a checkpoint by name. The names of a sublayer's weights
determine its type."""

import numpy as np


def rms_norm(x, gain):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.finfo(np.float32).eps) * gain


def layer_norm(x, gain, bias):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * gain + bias


def rotary(x):  # [T, H, K]: plane i is (i, i + K/2)
    angle = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(0, x.shape[2], 2) / x.shape[2])
    cos, sin, (a, b) = np.cos(angle)[:, None], np.sin(angle)[:, None], np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def attention(x, w, *, heads, span, ramp):
    q, k, v = (
        np.reshape(x @ w[f"{name}.weight"].T, (len(x), heads, -1))
        for name in ("query", "key", "value")
    )
    width = q.shape[2]
    distance = np.arange(len(x))[:, None] - np.arange(len(x))
    visible, y = (distance >= 0) & (distance < span), np.zeros_like(q)
    for h in range(heads):
        weight = np.exp(rotary(q)[:, h] @ rotary(k)[:, h].T / np.sqrt(width)) * visible
        if "span.fraction" in w:
            weight = weight * np.clip((ramp + span * w["span.fraction"][h] - distance) / ramp, 0, 1)
        numerator, denominator = weight @ v[:, h], weight.sum(1, keepdims=True)
        # sqrt(K) of the key and of the score cancel; the query is not rotated
        if "persistent.key" in w:
            extra, n_vectors = (
                np.exp(q[:, h] @ w["persistent.key"][h].T),
                w["persistent.key"].shape[1],
            )
            numerator = numerator + extra @ w["persistent.value"][h] * np.sqrt(n_vectors)
            denominator = denominator + extra.sum(1, keepdims=True)
        y[:, h] = numerator / denominator
    return y.reshape(len(x), -1) @ w["output.weight"].T


def memory(x, w, *, top_k):
    heads, y = len(w["keys"]), np.zeros_like(x)  # keys [H, 2, C, d/2]
    q = (x @ w["query.weight"].T + w["query.bias"]).reshape(len(x), heads, -1)
    q = layer_norm(q, w["norm.weight"], w["norm.bias"])
    for h in range(heads):
        first, second = (
            half @ keys.T for half, keys in zip(np.split(q[:, h], 2, -1), w["keys"][h], strict=True)
        )
        scores = (first[:, :, None] + second[:, None]).reshape(len(x), -1)  # of all C^2 slots
        for t, slots in enumerate(np.argsort(-scores, 1)[:, :top_k]):
            weight = np.exp(scores[t, slots] - scores[t, slots].max())
            y[t] += weight / weight.sum() @ w["values"][slots]
    return y


def sublayer(x, w, *, heads, span, ramp, top_k):
    if "values" in w:
        return memory(x, w, top_k=top_k)
    if "enter.weight" in w:
        return (
            np.maximum(x @ w["enter.weight"].T + w["enter.bias"], 0) @ w["leave.weight"].T
            + w["leave.bias"]
        )
    return attention(x, w, heads=heads, span=span, ramp=ramp)


def bits_per_byte(weights, data, **sizes):
    """Return the mean bits over the pairs of ``data``, bytes ``[n]``. ``sizes`` are heads, span,
    ramp and top_k."""
    x = weights["embedding.weight"][data[:-1]]
    # in order
    for name in [
        name for name in weights if name.endswith(".norm.weight") and ".sublayer." not in name
    ]:
        prefix = name.removesuffix("norm.weight") + "sublayer."
        w = {
            key.removeprefix(prefix): array
            for key, array in weights.items()
            if key.startswith(prefix)
        }
        x = x + sublayer(rms_norm(x, weights[name]), w, **sizes)
    logits = rms_norm(x, weights["norm.weight"]) @ weights["head.weight"].T
    logits -= logits.max(1, keepdims=True)
    log_likelihood = logits[np.arange(len(logits)), data[1:]] - np.log(np.exp(logits).sum(1))
    return -log_likelihood.mean() / np.log(2)
