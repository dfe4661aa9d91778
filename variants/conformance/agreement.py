"""Agreement of models with equal weights: logits and the gradient of every parameter over segments
with carried state.

    error = |actual - expected| / |expected|,    |x| the root mean square of x

The error of a tensor must be at most ``tolerance`` or, if that is larger, twice the error of plain
PyTorch in the same precision. No entry may be off by more than four times this bound, relative to
the largest entry. If an expected gradient vanishes, as for a key projection's bias, its error is
relative to a hundredth of all tensors' median |x|."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from variants.conformance.fixture import (
    MODES,
    Subject,
    Verdict,
    gradients_of,
    seed_cpu,
    spread_projected,
)

PLAIN_FACTOR = 2.0
PEAK_FACTOR = 4.0
SMALL_TENSOR = 64
"""With fewer entries, plain PyTorch's error may be small by luck; its largest error of all
tensors is used instead."""
VANISHING_SHARE = 1e-2
FLOAT64_TOLERANCE = 1e-9


def logits_and_gradients(
    model: nn.Module,
    tokens: Tensor,
    segments: Sequence[int],
    *,
    forward: Callable | None = None,
    autocast=nullcontext,
) -> dict[str, Tensor]:
    """Return logits of every segment and every gradient, in float64 on the CPU.

    Args:
        tokens: int64 ``[B, T + 1]`` on the model's device, T = sum of ``segments``; the last byte
            is only predicted.
        forward: function to call in place of ``model``.
        autocast: returns the context of a forward pass."""
    model.zero_grad(set_to_none=True)
    seed_cpu(0)
    state = None
    outputs = {}
    inputs = tokens[:, :-1].split(list(segments), dim=1)
    targets = tokens[:, 1:].split(list(segments), dim=1)
    for index, (segment, target) in enumerate(zip(inputs, targets, strict=True)):
        with autocast():
            out = (forward or model)(segment, state)
        outputs[f"logits of segment {index}"], state = out.logits, out.state
        (F.cross_entropy(out.logits.flatten(0, 1), target.flatten()) + out.loss).backward()
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    outputs |= {
        f"the gradient of {name}": gradient
        for name, gradient in (zeros | gradients_of(model)).items()
    }
    return {name: x.detach().cpu().double() for name, x in outputs.items()}


def compare(
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    *,
    tolerance: float,
    plain: dict[str, Tensor] | None = None,
) -> tuple[bool, str]:
    """Return whether all errors are within their tolerances, and the error that is largest relative
    to its tolerance.

    Args:
        tolerance: an error that is always allowed.
        plain: logits and gradients of plain PyTorch in the precision of ``actual``."""
    error_of = errors(actual, expected)
    allowed = dict.fromkeys(expected, tolerance)
    if plain is not None:
        plain_errors = errors(plain, expected)
        largest = max(plain_errors.values())
        for name, x in expected.items():
            rounding = plain_errors[name] if x.numel() >= SMALL_TENSOR else largest
            allowed[name] = max(tolerance, PLAIN_FACTOR * rounding)
    finite = {name: bound if bound < math.inf else 1.0 for name, bound in allowed.items()}
    worst = max(error_of, key=lambda name: error_of[name] / finite[name])
    detail = f"{error_of[worst]:.1e} of {worst}, at most {allowed[worst]:.2g}"
    return math.isfinite(error_of[worst]) and error_of[worst] <= allowed[worst], detail


def equal_backends(fast: Subject, plain: Subject) -> Verdict:
    """Compare two backends of a model in float64, with uneven spans, in segments shorter and
    longer than the window."""
    segments = (1, fast.span + 2, 1, fast.span + 1)
    tokens = fast.random_bytes(length=sum(segments) + 1, streams=2)
    for mode in MODES:
        models = (spread_projected(subject.build(mode=mode), 0.0, 1.0) for subject in (fast, plain))
        actual, expected = (logits_and_gradients(model, tokens, segments) for model in models)
        if actual.keys() != expected.keys():
            yield (
                f"{mode}: only one backend has {', '.join(sorted(actual.keys() ^ expected.keys()))}"
            )
            continue
        equal, detail = compare(actual, expected, tolerance=FLOAT64_TOLERANCE)
        if not equal:
            yield f"{mode}: {detail}"
    return f"logits and {len(expected) - len(segments)} gradients"


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the error of each output by name; infinity if an entry is not finite."""
    smallest_scale = VANISHING_SHARE * median(
        x.square().mean().sqrt().item() for x in expected.values()
    )
    smallest_scale = max(smallest_scale, 1e-300)
    error_of = {}
    for name, x in expected.items():
        difference = actual[name] - x
        error = difference.square().mean().sqrt() / x.square().mean().sqrt().clamp(
            min=smallest_scale
        )
        peak = difference.abs().max() / x.abs().max().clamp(min=smallest_scale) / PEAK_FACTOR
        error_of[name] = torch.maximum(error, peak).nan_to_num(math.inf, math.inf).item()
    return error_of
