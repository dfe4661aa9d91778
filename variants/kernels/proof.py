"""Proof that a way of attending computes what ``window.attend`` does in float64, on the device where it is to run.

Cases have the sizes at which kernels work in blocks, and ugly ones: lengths that divide nothing, one query, spans at 0, on a
kink, between keys and full, heads whose spans do not ascend, queries that see nothing. Values and every gradient are looked at.

    error = |found - expected| / |expected|,   allowed: 1e-4, or twice what plain PyTorch errs in that very mode if that is more

so IEEE float32 is held to 1e-4, and TF32 and bfloat16 to what they are: plain runs in the mode that is set, on the same inputs.
Where dropout is drawn from counters (``dropout.py``), the reference drops the very same weights. What draws by other means is
held to statistics: the mean over draws of a value or gradient is that without dropout, as y and its gradients are linear in
the mask, and sum v dy/dv = y, which holds only if forward and backward have drawn alike.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from variants.kernels import window
from variants.kernels.window import Persistent, Window

FEATURES = ("spans", "dynamic", "bias", "vectors", "persistent", "dropout")
"""What attention may have beside a hard window: spans a head, spans a query, a constant bias, a vector a distance, ..."""
LENGTHS = (512, 300, 1)
STREAMS, PERSISTENT, RATE, DRAWS = 2, 100, 0.2, 48
EXACT = 1e-4
LARGEST = 4.0
"""Times the allowed relative error that the largest single error may be, relative to the largest number."""
MEAN = 1.5
"""Times plain's own distance from the mean that the mean of as many other draws may be away."""
ROUNDED = 1e-2
"""Of sums of y and v dy/dv, which rounding alone moves apart."""


class Proof(NamedTuple):
    """What was found in one case.

    Attributes:
        case: the case and, after a colon, the value or gradient that is nearest to its limit or farthest beyond.
        error: its error, relative; infinite where a number is not finite.
        allowed: the most that it may be.
    """

    case: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed

    @property
    def ratio(self) -> float:
        """How near its limit: above 1 is beyond, and so is what is not a number."""
        ratio = self.error / self.allowed if self.allowed else math.inf if self.error else 0.0
        return math.inf if math.isnan(ratio) else ratio


class _Case(NamedTuple):
    rows: int
    keys: int
    shift: int
    rate: float

    def __str__(self) -> str:
        dropped = f", dropout {self.rate}" if self.rate else ""
        return f"{self.rows} queries, {self.keys} keys, shift {self.shift}{dropped}"


class _Given(NamedTuple):
    """What is attended to: leaves by name, constants, and the gradient from above."""

    leaves: dict[str, Tensor]
    window: Window
    bias: Tensor | None
    past: tuple[Tensor, Tensor] | None
    seed: Tensor
    g: Tensor


def prove(
    attend: Callable[..., Tensor],
    *,
    features: frozenset[str] = frozenset(),
    heads: int = 4,
    width: int = 64,
    ramp: int = 32,
    cache: str = "kv",
    whole: bool = False,
    own_draws: bool = False,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = True,
    lengths: tuple[int, ...] = LENGTHS,
) -> Iterator[Proof]:
    """One proof a case.

    Args:
        attend: as ``window.attend``, with ``vectors`` beside; it is given those keywords only that ``features`` ask for.
        features: of ``FEATURES``.
        heads, width, ramp: H, K and R.
        cache: ``kv``, whose past is constant, or ``hidden``, whose past keys and values have gradients.
        whole: whether the window is always the whole triangle, all that ``attend`` can.
        own_draws: whether ``attend`` draws its dropout by torch's generator, and not from counters.
        device, dtype: of queries, keys and values; other dtypes than float32 run under autocast.
        deterministic: whether two runs must agree in every bit.
        lengths: T of the cases, each without a past and with one that is longer.
    """
    unknown = features - set(FEATURES)
    assert not unknown and lengths == tuple(sorted(lengths, reverse=True)), (unknown, lengths)
    own: dict[str, float] = {}  # plain's errors; small cases may be exact by luck, so the large ones come first
    for number, case in enumerate(_cases(features, whole=whole, lengths=lengths)):
        given = _made(case, number, features, heads=heads, width=width, ramp=ramp, cache=cache, whole=whole)
        host = torch.device("cpu") if device.type == "mps" else device  # which has no float64
        drawn = bool(case.rate) and own_draws
        exact = case._replace(rate=0.0) if drawn else case
        expected = _on_cpu(_run(_plain, _moved(given, host, torch.float64), exact))
        here = _moved(given, device, dtype)
        times = DRAWS if drawn else 1
        plain, found = (_mean(way, here, case, times) for way in (_plain, attend))
        worst = _nearest(case, found, expected, plain, own, dtype=dtype, slack=MEAN if drawn else 2.0)
        proofs = [worst, *(_of_draws(attend, here, case, expected) if drawn else [])]
        if deterministic and not drawn:
            proofs.append(_twice(attend, here, case, found))
        yield max(proofs, key=lambda proof: proof.ratio)


def _cases(features: frozenset[str], *, whole: bool, lengths: tuple[int, ...]) -> Iterator[_Case]:
    for rows in lengths:
        for keys in (rows,) if whole else (2 * rows + 37, rows):
            for shift in (0,) if whole else (0, 1):
                for rate in (0.0, RATE) if "dropout" in features else (0.0,):
                    yield _Case(rows, keys, shift, rate)


def _made(
    case: _Case, number: int, features: frozenset[str], *, heads: int, width: int, ramp: int, cache: str, whole: bool
) -> _Given:
    """Inputs of one case, float32 on the CPU, the same on every machine."""
    generator = torch.Generator().manual_seed(number)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    longest = case.keys + 7 if whole or number % 2 else max(1, 3 * case.keys // 4)
    per_head = (STREAMS, heads)
    leaves = {"q": normal(*per_head, case.rows, width) * 2 * width**-0.5}
    leaves |= {name: normal(*per_head, case.rows, width) for name in "kv"}
    before = case.keys - case.rows
    past = (normal(*per_head, before, width), normal(*per_head, before, width)) if before else None
    if past and cache == "hidden":
        leaves |= {"past k": past[0], "past v": past[1]}
        past = None
    max_keys = (longest,) * heads
    if features & {"spans", "dynamic"}:
        # Between keys, nothing but the ramp, everything, on a kink; eighths are exact, so the side of a kink is no chance.
        kinds = (longest // 2 + 0.375, 0.0, float(longest), float(longest // 3))
        spans = [kinds[(h + number) % len(kinds)] for h in range(heads)]
        max_keys = tuple(min(longest, -(-(math.ceil(z) + ramp + 1) // 64) * 64) for z in spans)
        leaves["z"] = torch.tensor(spans)
        if "dynamic" in features:
            leaves["z"] = (leaves["z"][:, None] - torch.arange(case.rows) % 5 / 8).clamp(min=0).repeat(STREAMS, 1, 1)
    if "persistent" in features:
        leaves |= {"persistent q": normal(*per_head, case.rows, width) * 2 * width**-0.5}
        leaves |= {f"persistent {name}": normal(heads, PERSISTENT, width) for name in "kv"}
    if "vectors" in features:
        leaves["vectors"] = normal(max(max_keys), width)
    bias = None
    if "bias" in features:
        bias = -torch.arange(max(max_keys)) * 2.0 ** -torch.arange(3, heads + 3)[:, None] + normal(heads, max(max_keys))
    seed = torch.randint(2**62, (), generator=generator)
    visible = Window(max_keys, case.shift, None, ramp)
    return _Given(leaves, visible, bias, past, seed, normal(*per_head, case.rows, width))


def _moved(given: _Given, device: torch.device, dtype: torch.dtype) -> _Given:
    """On a device; what a projection gives in ``dtype``, of which the float64 reference is given the rounded values."""

    def of(x: Tensor, *, projected: bool = True) -> Tensor:
        return x.to(device, dtype if projected or dtype == torch.float64 else torch.float32)

    leaves = {
        name: of(x, projected=name in ("q", "k", "v", "past k", "past v", "persistent q"))
        for name, x in given.leaves.items()
    }
    bias = None if given.bias is None else of(given.bias, projected=False)
    past = None if given.past is None else (of(given.past[0]), of(given.past[1]))
    return _Given(leaves, given.window, bias, past, given.seed.to(device), of(given.g))


def _plain(q, k, v, visible: Window, *, bias=None, vectors=None, **same) -> Tensor:
    """The yardstick, which takes vectors as the bias that they make."""
    return window.attend(q, k, v, visible, bias=bias if vectors is None else q @ vectors.mT, **same)


def _run(attend: Callable[..., Tensor], given: _Given, case: _Case) -> dict[str, Tensor]:
    """The value and every gradient by name."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.leaves.items()}
    q, k, v = (leaves[name] for name in "qkv")
    past = given.past or ((leaves["past k"], leaves["past v"]) if "past k" in leaves else None)
    if past:
        k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
    asked = {"bias": given.bias, "vectors": leaves.get("vectors")}
    asked["persistent"] = Persistent(*(leaves[f"persistent {x}"] for x in "qkv")) if "persistent q" in leaves else None
    asked = {name: x for name, x in asked.items() if x is not None}
    if case.rate:
        asked |= {"dropout": case.rate, "seed": given.seed}
    lower = q.dtype in (torch.bfloat16, torch.float16)
    with torch.autocast(q.device.type, q.dtype if lower else torch.bfloat16, enabled=lower):
        y = attend(q, k, v, given.window._replace(z=leaves.get("z")), **asked)
    gradients = torch.autograd.grad(y, list(leaves.values()), given.g.to(y.dtype), materialize_grads=True)
    named = {f"the gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {"the value": y.detach()} | named


def _mean(attend: Callable[..., Tensor], given: _Given, case: _Case, times: int) -> dict[str, Tensor]:
    """The mean of so many runs with other seeds, in float64 on the CPU."""
    total: dict[str, Tensor] = {}
    for draw in range(times):
        found = _on_cpu(_run(attend, given._replace(seed=given.seed + draw), case))
        total = {name: x + total.get(name, 0.0) for name, x in found.items()}
    return {name: x / times for name, x in total.items()}


def _on_cpu(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.cpu().double() for name, x in found.items()}


def _errors(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """The norm of the error by that of what is expected, and the largest error by the largest number.

    Where nothing is expected, as of the gradient of a query that sees one key, by the norm of what has cancelled.
    """
    if not found.isfinite().all():
        return math.inf, math.inf
    off, width = found - expected, expected.shape[-1]
    vanishes = expected.norm() < 1e-6 * math.sqrt(expected.numel())
    norm = math.sqrt(expected.numel() * width) if vanishes else expected.norm().item()
    largest = math.sqrt(width) if vanishes else expected.abs().max().item()
    return off.norm().item() / norm, off.abs().max().item() / largest


def _nearest(
    case: _Case,
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    plain: dict[str, Tensor],
    own: dict[str, float],
    *,
    dtype: torch.dtype,
    slack: float,
) -> Proof:
    """The value or gradient nearest to its limit; ``own`` takes in plain's errors.

    The gradient of spans is few numbers, on which plain may err little by luck: they may err as the value does.
    """
    floor, proofs = EXACT if dtype == torch.float32 else torch.finfo(dtype).eps, []
    mode = ", drawn" if slack == MEAN else ""
    for name, x in expected.items():
        key = name + mode
        own[key] = max(own.get(key, 0.0), _errors(plain[name], x)[0])
        of_value = own["the value" + mode] if name == "the gradient of z" else 0.0
        allowed = max(floor, slack * own[key], slack * of_value)
        norm, largest = _errors(found[name], x)
        proofs += [Proof(f"{case}: {name}", norm, allowed)]
        proofs += [Proof(f"{case}: the largest error of {name}", largest, _largest(allowed, plain[name], x))]
    return max(proofs, key=lambda proof: proof.ratio)


def _largest(allowed: float, plain: Tensor, expected: Tensor) -> float:
    return max(LARGEST * allowed, LARGEST * _errors(plain, expected)[1])


def _twice(attend: Callable[..., Tensor], given: _Given, case: _Case, first: dict[str, Tensor]) -> Proof:
    """Whether the same again gives the same bits."""
    second = _on_cpu(_run(attend, given, case))
    off = {name: (second[name] - x).abs().max().item() for name, x in first.items()}
    name = max(off, key=lambda name: math.inf if math.isnan(off[name]) else off[name])
    return Proof(f"{case}: two runs differ in {name}", off[name], 0.0)


def _of_draws(
    attend: Callable[..., Tensor], given: _Given, case: _Case, expected: dict[str, Tensor]
) -> Iterator[Proof]:
    """Whether something is dropped, as much as it should be, and the same forward and backward."""
    one, plain = (_on_cpu(_run(way, given, case)) for way in (attend, _plain))
    spread, usual = ((x["the value"] - expected["the value"]).norm().item() for x in (one, plain))
    if usual:
        yield Proof(f"{case}: how far dropout moves the value", abs(spread / usual - 1), 0.25)
    constant = given.past is not None  # whose part of y has no gradient
    if not constant:
        values = [name for name in given.leaves if name in ("v", "past v", "persistent v")]
        given_v = {name: given.leaves[name].cpu().double() for name in values}
        through = sum((one[f"the gradient of {name}"] * x).sum().item() for name, x in given_v.items())
        total = (one["the value"] * given.g.cpu().double()).sum().item()
        size = (one["the value"] * given.g.cpu().double()).norm().item()
        yield Proof(f"{case}: forward and backward drop alike", abs(through - total) / (size or 1.0), ROUNDED)
