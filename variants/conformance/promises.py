"""The contract's promises about a small model's forward passes, state, parameters and losses, one function each."""

import io
import math
from collections.abc import Generator, Iterator
from itertools import islice, product

import torch
from torch import Tensor, nn

from variants.conformance.fixture import (
    MODES,
    Outputs,
    Subject,
    Verdict,
    differs,
    gradients_of,
    infinite,
    leaves,
    place_of,
    push,
    run,
)
from variants.contract import LIMITS, Inspection, NeededFlops, Position, State, map_state

FAR = 10**7  # bytes into a stream, where float32 angles are off by half a radian
SMALL = 1e-4  # tolerance of a map, which may be in float32: of row sums from 1, and of weights on unseen bytes from 0
LARGE = 10  # factor of matrices in the check of large weights
FAINT = 1e-3  # share of a byte's effect at its own place: nothing is learned from a past with less effect


def logits_shape(subject: Subject) -> Verdict:
    model = subject.build(dtype=torch.float32)
    for mode, length in product(MODES, (1, subject.span + 3)):
        outputs, _ = run(model.train(mode == "train"), subject.bytes(length=length))
        logits, case = outputs["logits"], f"{mode}, a segment of {length}"
        if logits.shape != (3, length, subject.vocabulary) or logits.dtype != torch.float32:
            yield f"{case}: logits are {logits.dtype} {tuple(logits.shape)}"
        yield from infinite(case, outputs)


def limits_known(subject: Subject) -> Verdict:
    yield from (f"{limit} is not one of {', '.join(sorted(LIMITS))}" for limit in sorted(subject.limits - LIMITS))


def influence(subject: Subject) -> Verdict:
    """A byte must move its own logits and later ones: a model without this would still keep most other promises."""
    model, tokens, at = subject.build(), subject.bytes(), 2
    (before, state), (after, _) = run(model, tokens), run(model, subject.change(tokens, at))
    moves = (before["logits"] - after["logits"]).abs().amax((0, 2))  # [T]
    if not moves[at] > 1e-6:
        yield f"eval, byte {at} changed: its own logits did not"
    within = 1 if subject.period == 1 else 3 * subject.period  # a block is seen only when it is complete
    followed = moves[at + 1 : at + 1 + within].max() > FAINT * moves[at]
    if any(tensor.numel() for tensor in leaves(state[1])) and not followed:
        to = f"s {at + 1} to {at + within}" if within > 1 else f" {at + 1}"
        yield f"eval, byte {at} changed: state is carried, yet the logits of byte{to} did not"


def maps(subject: Subject) -> Verdict:
    """A map's row, with shares of learned vectors, sums to 1 or 0; bytes later or beyond the reach have no weight."""
    with torch.no_grad():
        inspections = subject.build().inspect(subject.bytes()[:1])[1]
    for name, inspection in inspections.items():
        if inspection.weights is not None:
            yield from (f"{name}: {line}" for line in islice(_of_a_map(inspection, subject.declared[name].reach()), 1))


def _of_a_map(inspection: Inspection, reach: int | None) -> Iterator[str]:
    weights, length = inspection.weights, inspection.weights.shape[-1]
    shares = weights[..., :0] if inspection.shares is None else inspection.shares
    heads = weights.shape[1] if weights.dim() == 4 else None
    if weights.shape != (1, heads, length, length) or shares.shape[:-1] != weights.shape[:-1]:
        shapes = f"{tuple(weights.shape)} and shares of {tuple(shares.shape)}"
        yield f"a map of {shapes} are not [B, H, T, T] and [B, H, T, n]"
        return
    taken = torch.cat([weights, shares], dim=-1)[0]  # [H, T, T + n]
    rows, largest = taken.sum(-1), weights[0].amax(0)  # [H, T] and [T, T]
    wrong = ~((rows - 1).abs() < SMALL) & (rows != 0) | (taken < -SMALL).any(-1)
    for head, at in wrong.nonzero().tolist():
        yield f"what byte {at} takes in head {head} is no shares of 1: in all {rows[head, at]:.3g}"
    back = torch.arange(length)[:, None] - torch.arange(length)
    unseen = (back < 0) | (back > (length if reach is None else reach))
    for at, key in (unseen & (largest > SMALL)).nonzero().tolist():
        yield f"byte {at} takes {largest[at, key]:.2g} of byte {key}, which it cannot see"


def far_start(subject: Subject) -> Verdict:
    """Compares a stream at 10**7 with one at 0. Both are cut, so that carried positions are compared too.

    float32 is judged by the median: a choice of the k best may change for single bytes, but drift moves all bytes.
    """
    tokens, start, cuts = subject.bytes(), FAR + torch.tensor([0, 1, 777]), (subject.span + 2,)
    for dtype in (torch.float64, torch.float32):
        model, case = subject.build(dtype=dtype), f"eval, {str(dtype).removeprefix('torch.')}"
        near, state = run(model, tokens, cuts=cuts)
        far, _ = run(model, tokens, cuts=cuts, state=(start, (None,) * len(state[1])))
        yield from infinite(case, far)
        if any(isinstance(module, Position) and not module.relative for module in model.modules()):
            continue  # for absolute positions no more is promised
        if dtype == torch.float64:
            yield from differs(case, near, far, tolerance=1e-6)
            continue
        for name, y in near.items():
            sizes = (far[name] - y).abs().amax(-1)  # [B, T]
            if (size := sizes.median()) > 1e-4 * max(1, y.abs().max()):
                yield f"{case}: {name} moved by {size:.2g}, the median, most at {place_of(sizes)}"


def state_detached(subject: Subject) -> Verdict:
    tokens, length = subject.bytes(), 2 * subject.length
    for mode in MODES:
        model = subject.build(mode=mode)
        state = model(tokens, model(tokens).state).state
        if state[0].tolist() != [length] * 3:
            yield f"{mode}: stream positions are {state[0].tolist()} after {length} bytes"
        for tensor in leaves(state):
            name = f"a tensor {tuple(tensor.shape)} of the state"
            if tensor.requires_grad:
                yield f"{mode}: {name} is not detached"
            if tensor.dim() == 0 or tensor.shape[0] != 3:
                yield f"{mode}: dimension 0 of {name} is not the 3 streams"


def nothing_shared(subject: Subject) -> Verdict:
    """Two models must share no tensor. A shared one, as in a class attribute, would also be shared by layers."""
    models = [subject.build(seed=seed, dtype=torch.float32) for seed in (0, 1)]  # float64 would copy buffers
    first, second = ({t.untyped_storage().data_ptr(): n for n, t in _tensors(m).items() if t.numel()} for m in models)
    yield from sorted(f"{first[place]} is shared by two models" for place in first.keys() & second.keys())


def projection(subject: Subject) -> Verdict:
    """Outputs are finite wherever parameters move, also from a state made before the move: a state describes itself."""
    tokens, lengths = subject.bytes(), (1, subject.span // 2 + 1, subject.length)
    for sign in (1, -1):
        model, case = subject.build(), f"eval, parameters moved by {sign} * 1000 * normal"
        states = [run(model, tokens[:, :length])[1] for length in lengths]
        push(model, sign * 1e3)
        outputs, before = run(model, tokens)[0], _snapshot(model)
        model.project_()
        yield from infinite(case, outputs)
        yield from (f"{case}: a second project_ changed {name}" for name in _changed(model, before))
        yield from differs(f"{case}: a second project_", outputs, run(model, tokens)[0])
        for length, state in zip(lengths, states, strict=True):
            yield from infinite(f"{case}, state of {length} bytes", run(model, tokens[:, :5], state=state)[0])


def saved(subject: Subject) -> Verdict:
    model, fresh, tokens, file = subject.build(mode="train"), subject.build(seed=1), subject.bytes(), io.BytesIO()
    run(model, tokens)  # so that buffers differ from a new model's
    _, state = run(model.eval(), tokens)
    torch.save((model.state_dict(), state), file)
    file.seek(0)
    weights, loaded = torch.load(file, weights_only=True)
    fresh.load_state_dict(weights)
    fresh.project_()
    following, case = subject.bytes(seed=1), "eval, a fresh model with loaded parameters and state"
    yield from differs(case, run(model, following, state=state)[0], run(fresh, following, state=loaded)[0])


def writes(subject: Subject) -> Verdict:
    model, tokens = subject.build(), subject.bytes()
    _, state = run(model, tokens)
    before, copy = _snapshot(model), map_state(torch.clone, state)
    first, _ = run(model, tokens, state=state)
    yield from (f"eval: a forward changed {name}" for name in _changed(model, before))
    if not all(map(torch.equal, leaves(state), leaves(copy))):
        yield "eval: a forward changed the state that it was given"
    run(model, subject.other(tokens))
    yield from differs("eval, the same forward again after another", first, run(model, tokens, state=copy)[0])
    run(model.train(), tokens)
    parameters = {name for name, _ in model.named_parameters()}
    yield from (f"train: a forward changed {name}" for name in _changed(model, before) if name in parameters)


def auxiliary_loss(subject: Subject) -> Verdict:
    model, tokens = subject.build(), subject.bytes()
    quiet, loss = model(tokens).loss, model.train()(tokens).loss
    if quiet != 0:
        yield f"eval: {quiet.item():.2g} nats"
    if loss.dim() or not loss.isfinite() or loss < 0:
        yield f"train: {loss.tolist()} is not a finite scalar of at least 0"


def statistics(subject: Subject) -> Verdict:
    model, tokens, half = subject.build(), subject.bytes(), subject.span + 2
    out = model(tokens, collect_stats=True)
    yield from differs("eval, collect_stats", {"logits": model(tokens).logits}, {"logits": out.logits})
    attached = [name for name, stats in out.stats.items() if any(t.requires_grad for t in stats.values())]
    yield from (f"eval: statistics of {name} have a gradient" for name in attached)

    def sums(out) -> Outputs:
        return {f"{name}.{key}": t.double() for name, stats in out.stats.items() for key, t in stats.items()}

    first = model(tokens[:, :half], collect_stats=True)
    rest = model(tokens[:, half:], first.state, collect_stats=True)
    streams = [model(some, collect_stats=True) for some in (tokens[:1], tokens[1:])]
    splits = {
        "segments": (f"bytes before and from {half}", (first, rest)),
        "streams_apart": ("stream 0 and the others", streams),
    }
    for case, parts in (split for limit, split in splits.items() if limit not in subject.limits):
        a, b = map(sums, parts)
        for name, total in sums(out).items():
            if not torch.allclose(a[name] + b[name], total, rtol=1e-9, atol=1e-9):
                yield f"eval, {case}: {name} is off by {(a[name] + b[name] - total).abs().max():.2g} from the whole"
    model.metrics({})
    metrics = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in model.metrics(out.stats).items()}
    yield from (f"eval: metric {name} is {x.tolist()}" for name, x in metrics.items() if not x.isfinite().all())


def autocast(subject: Subject) -> Verdict:
    model, tokens = subject.build(dtype=torch.float32, mode="train"), subject.bytes()
    with torch.autocast("cpu", torch.bfloat16):
        state = yield from _step(model, tokens, case="train")
    wide = model.eval()(tokens, state)  # a state may come from a forward of another precision
    yield from infinite("eval, float32 after bfloat16", {"logits": wide.logits})


def large_weights(subject: Subject) -> Verdict:
    """Checks float32, in which exp is infinite from 89 on: scores of some first bytes lie that far below zero."""
    for seed in (0, 1):
        model = subject.build(seed=seed, dtype=torch.float32, mode="train")
        with torch.no_grad():
            for parameter in {p: None for _, sublayer in model.sublayers() for p in sublayer.parameters()}:
                parameter.mul_(LARGE if parameter.dim() > 1 else 1)
        model.project_()
        yield from _step(model, subject.bytes(), case=f"train, matrices {LARGE} times as large")


def _step(model: nn.Module, tokens: Tensor, *, case: str) -> Generator[str, None, State]:
    """Yields a line for each output or gradient of two segments that is not finite; returns the state after them."""
    first = model(tokens)
    second = model(tokens, first.state)
    outputs = {"logits": first.logits, "logits of a second segment": second.logits}
    (sum(logits.float().mean() for logits in outputs.values()) + first.loss + second.loss).backward()
    yield from infinite(case, outputs)
    for name, gradient in gradients_of(model).items():
        if not gradient.isfinite().all():
            yield f"{case}: the gradient of {name} is not finite"
    return second.state


def flops(subject: Subject) -> Verdict:
    model, span = subject.build(), subject.span
    if not isinstance(ideal := model.ideal_flops(), int) or ideal <= 0:
        yield f"ideal FLOPs, {ideal!r}, are not a positive int"
    for name, sublayer in model.sublayers():
        steps = [(sublayer.period, 2 * span), (1, 0), (span + 2, 0), (span + 2, span)]
        needs = [sublayer.needed_flops(segment, carried=carried) for segment, carried in steps]
        if needs == [None] * len(steps):
            continue  # not stated, so three times the ideal is counted
        if not all(isinstance(need, NeededFlops) and 0 <= min(need) <= max(need) < math.inf for need in needs):
            yield f"{name}: {needs} are not NeededFlops of 0 or more"
        elif needs[0].forward < sublayer.ideal_flops() - 1:  # the ideal is rounded
            yield f"{name}: a warm byte needs {needs[0].forward:,.0f}, ideal is {sublayer.ideal_flops():,}"


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in _tensors(model).items()}


def _changed(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are no longer equal bit for bit."""
    return [name for name, t in _tensors(model).items() if name in before and not torch.equal(t, before[name])]


CHECKS = (
    ("logits are float32 [B, T, V] and finite", None, logits_shape),
    ("declared limits are known", None, limits_known),
    ("bytes have influence", None, influence),
    ("a map is shares of what is seen", None, maps),
    ("a stream may start at 10**7", None, far_start),
    ("state is detached, and its dimension 0 is streams", None, state_detached),
    ("two models share nothing", None, nothing_shared),
    ("project_ is legal and idempotent, and earlier states are accepted", None, projection),
    ("a saved model continues alike", None, saved),
    ("a forward pass writes nothing", None, writes),
    ("the auxiliary loss is for training only", None, auxiliary_loss),
    ("statistics add up", None, statistics),
    ("bfloat16 autocast is finite", None, autocast),
    ("large weights give finite numbers", None, large_weights),
    ("ideal FLOPs are a positive int, and needed ones are no fewer", None, flops),
)
"""Promise, the limit that excuses it, and its check."""
