"""Numerical promises: gradients match finite differences, training without dropout equals
evaluation, lower precisions compute what float64 does, all of the reach is used, the likelihood
moves every parameter, and streams of a batch of any size are independent."""

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from variants.conformance.agreement import compare, errors, logits_and_gradients
from variants.conformance.fixture import (
    NoDropout,
    Rounded,
    Subject,
    Verdict,
    differences,
    gradients_of,
    run,
    seed_cpu,
    select_streams,
    spread_projected,
)
from variants.conformance.sizes import LONGEST_STREAM
from variants.contract import Sublayer, cat_streams, map_state

STEP = 1e-7  # length of a finite difference's step along a unit vector
SMOOTH = 0.01  # relative difference of the slopes on both sides where a loss is smooth
PRECISION_SEGMENTS = (512, 512)  # bytes
LOGITS = "logits"
GRADIENT = "the gradient"
PRECISIONS = {
    "float32": {LOGITS: 1e-4, GRADIENT: 1e-4},
    "bfloat16": {LOGITS: 0.3, GRADIENT: 0.5},
}
"""Allowed errors relative to float64, by precision; ``agreement.py`` defines them."""
NOISE_FACTOR = 8.0
"""By which an error may exceed the largest one that rounding the outputs of all operations makes. A
kernel also rounds the sums inside it."""
PRECISION_DRAWS = 5
"""In a network of four ReLU layers, one draw in four has a gradient that a kink changes by more
than 1e-4."""
# draws of parameters and inputs; in at least one of them a sublayer must use its whole reach
N_DRAWS = 12


def check_gradients(subject: Subject) -> Verdict:
    """Compare gradients with finite differences along random directions, in training, after a past:
    that of each parameter or, on segments of a run, of all parameters of a layer together. The
    gradient of the embedding depends on the gradients of all sublayers' inputs. The loss is a
    random weighted sum of logits plus the auxiliary loss. With the limit ``likelihood``, the
    auxiliary loss may detach parameters on which logits depend, so gradients of these parameters
    are compared without it."""
    model = spread_projected(subject.build(mode="train"), 0.2, 0.8)
    if subject.sizes:
        tokens, n_past = _training_bytes(subject)
        head, tail = tokens.tensor_split([n_past], dim=1)
    else:
        head, tail = subject.random_bytes()[:2].tensor_split(2, dim=1)
    state = None
    if head.numel():
        state = run(model, head)[1]
    generator = torch.Generator().manual_seed(0)

    def unit_vector(like: Tensor) -> Tensor:
        noise = torch.randn(like.shape, generator=generator, dtype=like.dtype)
        return noise / noise.norm()

    def forward() -> tuple[Tensor, Tensor]:
        seed_cpu(0)
        out = model(tail, map_state(torch.clone, state))
        return out.logits, out.loss

    logits, loss = forward()
    upstream = unit_vector(logits)
    # a model that shares parameters with an earlier one may have gradients; another check reports
    # it
    model.zero_grad()
    weighted_sum = (logits * upstream).sum()
    of_logits = {}
    if "likelihood" in subject.limits:
        weighted_sum.backward(retain_graph=True)
        of_logits = gradients_of(model)
        model.zero_grad()
    (weighted_sum + loss).backward()
    gradients = gradients_of(model) | of_logits
    groups: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        group = name if not subject.sizes else ".".join(name.split(".")[:2])
        if of_logits and subject.sizes:
            group += " (logits only)" * (name in of_logits)
        groups.setdefault(group, {})[name] = parameter
    for group, parameters in groups.items():
        directions = {name: unit_vector(parameter) for name, parameter in parameters.items()}
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        slope = sum(
            (gradients[name] * directions[name]).sum().item()
            for name in parameters
            if name in gradients
        )
        slopes = []
        for step in (STEP, -STEP):  # at a kink, one of the two sides is right
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(before[name] + step * directions[name])
                moved_logits, moved_loss = forward()
                for name, parameter in parameters.items():
                    parameter.copy_(before[name])
            # Logits are subtracted before they are summed, because that rounds less.
            change = ((moved_logits - logits) * upstream).sum()
            if not parameters.keys() <= of_logits.keys():
                change = change + moved_loss - loss
            slopes.append(change.item() / step)
            if abs(slopes[-1] - slope) <= max(1e-4 * abs(slopes[-1]), 1e-8):
                break
        else:
            # At many bytes, a selection such as top-k changes within any step, on both sides.
            if subject.sizes and not math.isclose(*slopes, rel_tol=SMOOTH):
                continue
            change = (
                f"the loss changes by {slopes[0]:.6g} or {slopes[1]:.6g}, its gradient says "
                f"{slope:.6g}"
            )
            yield f"train: along a direction of {group} {change}"


def _training_bytes(subject: Subject) -> tuple[Tensor, int]:
    """Return the bytes of a training segment of a run, and of a past if one is carried; and the
    length of the past."""
    size = next(size for size in subject.sizes if size.mode == "train")
    n_past = size.segment * size.carry
    return subject.mixed_bytes(
        length=n_past + size.segment, streams=min(2, size.streams), seed=0
    ), n_past


def check_modes(subject: Subject) -> Verdict:
    tokens = subject.random_bytes()
    cuts = (subject.span + 2,)
    if subject.sizes:
        tokens, n_past = _training_bytes(subject)
        cuts = ()
        if n_past:
            cuts = (n_past,)
    # built before any runs, in case two models share a parameter
    models = list(subject.deterministic_models())
    outputs = []
    for mode, model, context in models:
        with context():
            outputs.append(run(model, tokens, cuts=cuts, gradients=mode == "train")[0])
    if len(outputs) == 1:
        yield (
            "train: draws random numbers that are not dropout's, so it cannot be compared with eval"
        )
    else:
        yield from differences("train without dropout, against eval", *outputs)


def check_precision(subject: Subject) -> Verdict:
    """Compare logits and gradients in float32, and in bfloat16 autocast, with those in float64.
    Where rounding changes a selection such as top-k, or terms cancel, they differ by more than
    rounding. The same happens in float64 if the output of each operation is rounded; that is
    allowed, too. Rounding may also move one input of a ReLU past its kink, which changes a few
    gradients, but no output by much. So a difference of gradients alone counts if it is in all
    ``PRECISION_DRAWS``."""
    for precision in PRECISIONS:
        for draw in range(PRECISION_DRAWS):
            lines = dict(_precision_errors(subject, precision, draw))
            if {*lines} != {GRADIENT}:
                break
        yield from lines.values()


def _precision_errors(subject: Subject, precision: str, draw: int) -> Iterator[tuple[str, str]]:
    """Yield ``LOGITS`` or ``GRADIENT`` with a line if these differ too much in a draw of
    parameters and bytes."""
    mode = "eval"
    if "train" in subject.deterministic_contexts:
        mode = "train"
    tokens = subject.mixed_bytes(length=sum(PRECISION_SEGMENTS) + 1, streams=2, seed=draw)
    outputs_of = partial(logits_and_gradients, tokens=tokens, segments=PRECISION_SEGMENTS)
    model = subject.build(seed=draw, dtype=torch.float32, mode=mode)
    enabled = precision == "bfloat16"
    with NoDropout():
        autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=enabled)
        actual = outputs_of(model, autocast=autocast)
        expected = outputs_of(model.double())
        rounded = None
        for kind, tolerance in PRECISIONS[precision].items():
            keys = [name for name in expected if name.startswith(kind)]
            outputs = [{key: tensors[key] for key in keys} for tensors in (actual, expected)]
            equal, detail = compare(*outputs, tolerance=tolerance)
            if not equal:
                with Rounded(getattr(torch, precision)):
                    rounded = rounded or outputs_of(model)
                noise = errors({key: rounded[key] for key in keys}, outputs[1])
                tolerance = max(tolerance, NOISE_FACTOR * max(noise.values()))
                equal, detail = compare(*outputs, tolerance=tolerance)
            if not equal:
                yield kind, f"{mode}, {precision} against float64: an error of {detail}"


def check_reach_used(subject: Subject) -> Verdict:
    """Check that in some draw an output depends on the byte at the end of the declared reach. Draws
    differ in spans (all longest, mixed, all shortest) and in the size of inputs (1 or 3)."""
    remaining = {name: sublayer.reach() for name, sublayer in subject.sublayers.items()}
    remaining = {name: n for name, n in remaining.items() if n is None or 0 < n < LONGEST_STREAM}
    for draw in range(N_DRAWS if remaining else 0):
        model = spread_projected(subject.build(seed=draw), *((1, 1), (0, 1), (0, 0))[draw % 3])
        width = next(iter(run(model, subject.random_bytes(length=1))[0].values())).shape[-1]
        size = (1, 3)[draw // 3 % 2]
        for name, sublayer in model.sublayers():
            if name in remaining and _uses_reach(
                sublayer, remaining[name], subject, width=width, size=size
            ):
                del remaining[name]
        if not remaining:
            break
    for name, n in remaining.items():
        moved = "byte 0 never moved the end"
        if n is not None:
            moved = f"byte t - {n} never moved byte t"
        declared = "all of the past"
        if n is not None:
            declared = f"a reach of {n}"
        yield f"eval: {moved} of {name} in {N_DRAWS} draws of parameters: declared is {declared}"


@torch.no_grad()
def _uses_reach(
    sublayer: Sublayer, reach: int | None, subject: Subject, *, width: int, size: float
) -> bool:
    """Return whether changing an early byte moves the output ``reach`` bytes later; for None,
    whether byte 0 moves the end."""
    positions = range(1) if reach is None else range(max(4, subject.period))
    length = subject.length if reach is None else reach + len(positions)

    def forward(x: Tensor) -> Tensor:
        seed_cpu(0)
        return sublayer(x, None, torch.zeros(1, dtype=torch.int64)).y[0]

    x = size * torch.randn(1, length, width, dtype=torch.float64)
    before = forward(x)
    for position in positions:
        changed = x.clone()
        changed[:, position] = 3 * torch.randn(width)
        first = length - subject.period
        last = length
        if reach is not None:
            first = position + reach
            last = position + reach + 1
        # An output that the byte does not move is equal, except where sums add terms and subtract
        # them again.
        if (forward(changed) - before)[first:last].abs().max() > 1e-14 * before.abs().max():
            return True
    return False


def check_likelihood(subject: Subject) -> Verdict:
    """Check that every parameter gets a gradient from the likelihood alone, without the
    auxiliary loss."""
    # no gradient enters a state: a segment must hold whole blocks
    segment = max(subject.span, 3 * subject.period) + 2
    remaining = {name for name, p in subject.build().named_parameters() if p.requires_grad}
    for draw in range(3):
        model = spread_projected(subject.build(seed=draw, mode="train"), 0.2, 0.8)
        tokens = subject.random_bytes(seed=draw)
        state = None
        total = 0
        for inputs in tokens.split(segment, dim=1):
            logits, state, *_ = model(inputs, state)
            total = total + F.cross_entropy(
                logits.flatten(0, 1), subject.change_all(inputs).flatten()
            )
        total.backward()
        remaining -= {name for name, gradient in gradients_of(model).items() if gradient.any()}
        if not remaining:
            break
    for name in sorted(remaining):
        yield f"train: the likelihood gives {name} no gradient in 3 draws of parameters"


def check_streams(subject: Subject) -> Verdict:
    """Check three streams after a past; and the first, middle and last stream of large batches,
    each against itself in a batch of these three."""
    head, tail = subject.random_bytes().tensor_split([subject.span + 2], dim=1)
    order = [2, 0, 1]
    last_two = slice(1, 3)
    second = slice(1, 2)
    for mode, model, context in subject.deterministic_models():
        with context():
            _, state = run(model, head)
            expected, _ = run(model, tail, state=state)
            first_changed, _ = run(
                model, torch.cat([subject.change_all(tail[:1]), tail[1:]]), state=state
            )
            reordered, _ = run(model, tail[order], state=map_state(lambda t: t[order], state))
            joined, _ = run(
                model, tail, state=cat_streams([run(model, row[None])[1] for row in head])
            )
            single, _ = run(model, tail[second], state=map_state(lambda t: t[second], state))
        unchanged = (select_streams(outputs, last_two) for outputs in (expected, first_changed))
        yield from differences(f"{mode}, stream 0 changed", *unchanged)
        expected_order = select_streams(expected, order)
        yield from differences(
            f"{mode}, streams and states in another order", expected_order, reordered
        )
        yield from differences(f"{mode}, states of single streams concatenated", expected, joined)
        yield from differences(
            f"{mode}, stream 1 alone, its state sliced", select_streams(expected, second), single
        )
        for streams in subject.batch_sizes:
            tokens = subject.random_bytes(streams=streams)
            three = [0, streams // 2, streams - 1]
            with context():
                large, small = (
                    run(model, part, cuts=(subject.span + 2,))[0]
                    for part in (tokens, tokens[three])
                )
            yield from differences(
                f"{mode}, {streams} streams at once", small, select_streams(large, three)
            )


STREAMS = ("streams do not mix", "streams_apart", check_streams)
GRADIENTS = ("gradients match finite differences", None, check_gradients)
MODES_AGREE = ("training without dropout is evaluation", "training_as_evaluation", check_modes)
PRECISION = ("float32 and bfloat16 compute what float64 does", None, check_precision)
CHECKS = (
    GRADIENTS,
    MODES_AGREE,
    ("the declared reach is used", None, check_reach_used),
    ("the likelihood moves every parameter", "likelihood", check_likelihood),
)
"""Triples of a promise, the limit that excuses a model from it or None, and the check."""
