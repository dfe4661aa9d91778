"""Agreement of models with equal weights: logits and the gradient of every parameter over segments with carried state.

    error = |actual - expected| / |expected|,   allowed: ``least``, or twice plain PyTorch's error in the same mode

No single number may be off by more than four times this share of the largest number. If an expected gradient vanishes,
as that of a key's bias, its error is relative to a hundredth of the median size of all.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from variants.conformance.fixture import MODES, Subject, Verdict, gradients_of, open_, seed_cpu

SLACK = 2.0
LARGEST = 4.0
FEW = 64
"""In a gradient with fewer numbers, plain's error may be small by luck; plain's worst error is used instead."""
VANISHING = 1e-2
ROUNDING = 1e-9  # of float64


def outcome(
    model: nn.Module, tokens: Tensor, segments: Sequence[int], *, forward: Callable | None = None, autocast=nullcontext
) -> dict[str, Tensor]:
    """Logits of every segment and every gradient, in float64 on the CPU.

    Args:
        tokens: int64 ``[B, T + 1]`` on the model's device, T = sum of ``segments``; the last byte is only predicted.
        forward: what to call in place of ``model``.
        autocast: makes the context of a forward pass.
    """
    model.zero_grad(set_to_none=True)
    seed_cpu(0)
    state, outputs = None, {}
    targets = tokens[:, 1:].split(list(segments), dim=1)
    for number, (inputs, following) in enumerate(
        zip(tokens[:, :-1].split(list(segments), dim=1), targets, strict=True)
    ):
        with autocast():
            out = (forward or model)(inputs, state)
        outputs[f"logits of segment {number}"], state = out.logits, out.state
        (F.cross_entropy(out.logits.flatten(0, 1), following.flatten()) + out.loss).backward()
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    outputs |= {f"the gradient of {name}": gradient for name, gradient in (zeros | gradients_of(model)).items()}
    return {name: x.detach().cpu().double() for name, x in outputs.items()}


def compare(
    actual: dict[str, Tensor], expected: dict[str, Tensor], *, least: float, plain: dict[str, Tensor] | None = None
) -> tuple[bool, str]:
    """Whether all errors are within their limits, and the error that is largest relative to its limit.

    Args:
        least: an error that is always allowed.
        plain: the outcome of plain PyTorch in the mode of ``actual``.
    """
    errors, allowed = _errors(actual, expected), dict.fromkeys(expected, least)
    if plain is not None:
        of_plain = _errors(plain, expected)
        most = max(of_plain.values())
        rounding = {name: of_plain[name] if x.numel() >= FEW else most for name, x in expected.items()}
        allowed = {name: max(least, SLACK * error) for name, error in rounding.items()}
    worst = max(errors, key=lambda name: errors[name] / allowed[name] if allowed[name] < math.inf else errors[name])
    detail = f"{errors[worst]:.1e} of {worst}, at most {allowed[worst]:.2g}"
    return math.isfinite(errors[worst]) and errors[worst] <= allowed[worst], detail


def equal_backends(fast: Subject, plain: Subject) -> Verdict:
    """Compare two backends of a model in float64: uneven spans, segments shorter and longer than the window."""
    segments = (1, fast.span + 2, 1, fast.span + 1)
    tokens = fast.bytes(length=sum(segments) + 1, streams=2)
    for mode in MODES:
        actual, expected = (outcome(open_(one.build(mode=mode), 0.0, 1.0), tokens, segments) for one in (fast, plain))
        if actual.keys() != expected.keys():
            yield f"{mode}: {', '.join(sorted(actual.keys() ^ expected.keys()))}: in one only"
            continue
        equal, detail = compare(actual, expected, least=ROUNDING)
        if not equal:
            yield f"{mode}: {detail}"
    return f"logits and {len(expected) - len(segments)} gradients"


def _errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The error of each output by name; infinity if a number is not finite."""
    typical = VANISHING * median(x.square().mean().sqrt().item() for x in expected.values())
    errors = {}
    for name, x in expected.items():
        off, scale, largest = actual[name] - x, x.square().mean().sqrt(), x.abs().max()
        error = off.square().mean().sqrt() / scale.clamp(min=max(typical, 1e-300))
        peak = off.abs().max() / largest.clamp(min=max(typical, 1e-300)) / LARGEST
        errors[name] = torch.maximum(error, peak).nan_to_num(math.inf, math.inf).item()
    return errors
