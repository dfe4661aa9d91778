"""Sanity checks of a peer before it is timed: its gradients are those of its outputs, and no output sees a later input.

Both are looked at in float64, where an error is told from rounding, with the parameters moved off their start, because a
matrix that starts at zero hides what is behind it. Where a package or a kernel cannot compute in float64, float32 has to do
for causality, and the finite difference is that of the same model in plain PyTorch, or left out; the result says so.

- gradients: every parameter has a finite gradient that is not zero everywhere, and along one direction v, with a part
  along the gradient of each parameter and a random part, (f(p + e v) - f(p - e v)) / 2e agrees with grad . v.
- causal: another input at place t moves no output before t, in evaluation and in training mode, and does move one at or
  after t.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.weights import shake_

OK = "ok"
STEPS = (1e-4, 1e-6, 1e-7, 1e-8)
"""Of the finite difference: large ones err by curvature and by jumps, where another slot or bucket is chosen, small ones
by what a package computes in float32 all the same. A wrong gradient agrees with none."""
AGREEMENT = 1e-3
MOVED = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Relative to the largest output: less is rounding."""
FAULTS: dict[str, Callable[[Tensor | None], bool]] = {
    "no gradient": lambda grad: grad is None,
    "a gradient that is not finite": lambda grad: not grad.isfinite().all(),
    "a gradient of zeros": lambda grad: not grad.any(),
}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What is checked. The model's parameters and mode are changed: build one for this alone."""

    model: nn.Module
    outputs: Callable[[Tensor], Tensor]  # the model's, [B, T, ...], from the inputs
    inputs: Tensor  # bytes, int64 [B, T], or vectors [B, T, D]
    loss: Callable[[Tensor], Tensor]  # a scalar from the outputs
    vocabulary: int = 256  # V, for bytes
    plain: "Callable[[], Probe] | None" = None  # makes the same in code that has float64, or None


def prove(probe: Probe) -> dict[str, str]:
    """``gradients`` and ``causal``: ``ok`` with a remark where one is due, or the reason of the failure."""
    found = {}
    for name, check in (("gradients", gradients), ("causal", causal)):
        try:
            found[name] = check(probe)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return found


def passed(checks: dict[str, str]) -> bool:
    """Whether all are ``ok``, with or without a remark."""
    return all(said.startswith(OK) for said in checks.values())


def gradients(probe: Probe) -> str:
    """``ok``, or which parameters have no gradient, or by how much the finite difference disagrees."""
    model, inputs, remark = _shaken(probe)
    model.train()
    model.zero_grad(set_to_none=True)
    probe.loss(_outputs(probe, inputs)).backward()
    named = _trained(model)
    for fault, holds in FAULTS.items():
        if names := [name for name, p in named.items() if holds(p.grad)]:
            return f"{fault}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if remark:
        if probe.plain is None:
            return f"{OK} ({remark}, so no finite difference)"
        said = gradients(probe.plain())
        return f"{OK} ({remark}; in plain PyTorch {said})" if said.startswith(OK) else f"in plain PyTorch: {said}"
    direction = _direction(named)
    exact = sum((p.grad * v).sum() for p, v in zip(named.values(), direction, strict=True)).item()
    slopes = [_slope(probe, inputs, direction, step=step) for step in STEPS]
    nearest = min(slopes, key=lambda slope: abs(slope - exact))
    if abs(nearest - exact) > AGREEMENT * abs(exact):
        return f"along one direction the loss changes by {nearest:.6g}, the gradient says {exact:.6g}"
    return OK


def causal(probe: Probe) -> str:
    """``ok``, or in which mode a change of which input moved which earlier output."""
    model, inputs, remark = _shaken(probe)
    length = inputs.shape[1]
    places = sorted({1, length // 2, length - 1})
    for mode in (False, True):
        model.train(mode)
        name = "training" if mode else "evaluation"
        with torch.no_grad():
            before = _outputs(probe, inputs)
            if not torch.equal(before, _outputs(probe, inputs)):
                return f"{name}: two passes with the same seed differ"
            for place in places:
                moved = (_outputs(probe, _changed(probe, inputs, place)) - before).abs().flatten(2).amax((0, 2))  # [T]
                moved = moved.nan_to_num(math.inf)
                allowed = MOVED[before.dtype] * before.abs().max().clamp(min=1)
                if moved[:place].max() > allowed:
                    first = (moved[:place] > allowed).nonzero()[0].item()
                    return f"{name}: another input at {place} moved the output at {first} by {moved[first].item():.2g}"
                if moved[place:].max() <= allowed:
                    return f"{name}: another input at {place} moved nothing"
    return f"{OK} ({remark})" if remark else OK


def _shaken(probe: Probe) -> tuple[nn.Module, Tensor, str]:
    """The model in float64 with its parameters moved, inputs to match, and a remark if it must stay in float32."""
    model, inputs, remark = probe.model, probe.inputs, ""
    try:
        model = model.double()
        double = inputs.double() if inputs.is_floating_point() else inputs
        with torch.no_grad():
            _outputs(probe, double)
    except (RuntimeError, ValueError, TypeError) as error:  # of a package, a kernel or a device without float64
        model, double = model.float(), inputs
        remark = f"float32 only, in float64 {str(error).strip().partition(chr(10))[0]}"
    shake_(model, spans=True)  # also off the kinks of whole keys, where a difference has no one slope
    return model, double, remark


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _outputs(probe: Probe, inputs: Tensor) -> Tensor:
    torch.manual_seed(0)  # hashing draws numbers
    return probe.outputs(inputs)


def _changed(probe: Probe, inputs: Tensor, place: int) -> Tensor:
    """Another input at one place of all streams."""
    other = inputs.clone()
    if inputs.is_floating_point():
        other[:, place] = -other[:, place] + 1
    else:
        other[:, place] = (other[:, place] + probe.vocabulary // 2) % probe.vocabulary
    return other


def _direction(named: dict[str, nn.Parameter]) -> list[Tensor]:
    """Unit steps in every parameter: a random one, which finds what a gradient leaves out, and one along the gradient,
    to which every parameter adds."""
    generator, found = torch.Generator().manual_seed(1), []
    for parameter in named.values():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
        found.append(noise / noise.norm() + parameter.grad / parameter.grad.norm())
    return found


@torch.no_grad()
def _slope(probe: Probe, inputs: Tensor, direction: list[Tensor], *, step: float) -> float:
    """The central difference of the loss; the parameters are put back."""
    parameters = list(_trained(probe.model).values())
    kept = [parameter.clone() for parameter in parameters]
    values = []
    for sign in (1, -1):
        for parameter, start, v in zip(parameters, kept, direction, strict=True):
            parameter.copy_(start + sign * step * v)
        values.append(probe.loss(_outputs(probe, inputs)).item())
    for parameter, start in zip(parameters, kept, strict=True):
        parameter.copy_(start)
    return (values[0] - values[1]) / (2 * step)
