"""The contract's promises about parameters, losses, statistics and precision, one function each."""

import io
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from variants.conformance.fixture import Subject, Verdict, differs, gradients_of, infinite, leaves, push, run
from variants.contract import NeededFlops, State, map_state

LARGE = 10


def apart(subject: Subject) -> Verdict:
    """What two builds share, layers share unasked: a class attribute, an object nested in a partial."""
    models = [subject.build(seed=seed, dtype=torch.float32) for seed in (0, 1)]  # float64 would copy buffers
    places = [
        {t.untyped_storage().data_ptr(): name for name, t in (*m.named_parameters(), *m.named_buffers()) if t.numel()}
        for m in models
    ]
    breaks = [f"{places[0][place]} is shared by two models" for place in places[0].keys() & places[1].keys()]
    names: dict[Tensor, list[str]] = {}
    for name, parameter in models[0].named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    shared = [" = ".join(several) for several in names.values() if len(several) > 1]
    return sorted(breaks), "in one model: " + ("; ".join(shared) or "nothing shared")


def projection(subject: Subject) -> Verdict:
    breaks, tokens = [], subject.bytes()
    for sign in (1, -1):
        model, case = subject.build(), f"eval, parameters moved by {sign} * 1000 * normal"
        ranged = push(model, sign * 1e3)
        outputs, _ = run(model, tokens)
        before = _snapshot(model)
        model.project_()
        breaks += infinite(case, outputs)
        breaks += [f"{case}: a second project_ changed {name}" for name in _changed(model, before)]
        breaks += differs(f"{case}: a second project_", outputs, run(model, tokens)[0])
    return breaks, ", ".join(ranged) or "no sublayer restricts its parameters"


def saved(subject: Subject) -> Verdict:
    model, tokens = subject.build().train(), subject.bytes()
    run(model, tokens)  # so that buffers are not those of a new model
    _, state = run(model.eval(), tokens)
    file = io.BytesIO()
    torch.save((model.state_dict(), state), file)
    file.seek(0)
    weights, loaded = torch.load(file, weights_only=True)
    fresh = subject.build(seed=1)
    fresh.load_state_dict(weights)
    fresh.project_()
    again, case = subject.bytes(seed=1), "eval, a fresh model with loaded parameters and state"
    breaks = differs(case, run(model, again, state=state)[0], run(fresh, again, state=loaded)[0])
    return breaks, "parameters and state through torch.save"


def writes(subject: Subject) -> Verdict:
    model, tokens = subject.build(), subject.bytes()
    _, state = run(model, tokens)
    before, kept = _snapshot(model), map_state(torch.clone, state)
    first, _ = run(model, tokens, state=state)
    breaks = [f"eval: a forward changed {name}" for name in _changed(model, before)]
    if not all(map(torch.equal, leaves(state), leaves(kept))):
        breaks.append("eval: a forward changed the state that it was given")
    run(model, subject.other(tokens))
    breaks += differs("eval, the same forward again after another", first, run(model, tokens, state=kept)[0])
    run(model.train(), tokens)
    parameters = {name for name, _ in model.named_parameters()}
    breaks += [f"train: a forward changed {name}" for name in _changed(model, before) if name in parameters]
    return breaks, "parameters, buffers and the given state are as before"


def auxiliary_loss(subject: Subject) -> Verdict:
    model, tokens = subject.build(), subject.bytes()
    quiet, loss = model(tokens).loss, model.train()(tokens).loss
    breaks = [] if quiet == 0 else [f"eval: {quiet.item():.2g} nats"]
    if loss.dim() or not loss.isfinite() or loss < 0:
        breaks.append(f"train: {loss.tolist()} is not a finite scalar of at least 0")
    return breaks, f"{loss.mean().item():.2g} nats per byte in training"


def statistics(subject: Subject) -> Verdict:
    model, tokens, breaks = subject.build(), subject.bytes(), []
    half, limits = subject.span + 2, subject.limits()

    def collect_stats(tokens: Tensor, state: State = None) -> tuple[dict[str, Tensor], State]:
        with torch.no_grad():
            out = model(tokens, state, collect_stats=True)
        return {f"{name}.{key}": t.double() for name, own in out.stats.items() for key, t in own.items()}, out.state

    (first, state), (whole, _) = collect_stats(tokens[:, :half]), collect_stats(tokens)
    splits = [
        ("segments", f"bytes before and from {half}", first, collect_stats(tokens[:, half:], state)[0]),
        ("streams_apart", "stream 0 and the others", collect_stats(tokens[:1])[0], collect_stats(tokens[1:])[0]),
    ]
    for limit, parts, a, b in splits:
        for name, total in whole.items() if limit not in limits else ():
            if not torch.allclose(a[name] + b[name], total, rtol=1e-9, atol=1e-9):
                size = (a[name] + b[name] - total).abs().max()
                breaks.append(f"eval, {parts}: {name} is off by {size:.2g} from the whole")
    out = model(tokens, collect_stats=True)
    breaks += differs("eval, collect_stats", {"logits": model(tokens).logits}, {"logits": out.logits})
    attached = [name for name, own in out.stats.items() if any(t.requires_grad for t in own.values())]
    breaks += [f"eval: statistics of {name} have a gradient" for name in attached]
    model.metrics({})
    found = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in model.metrics(out.stats).items()}
    wrong = {name: value.tolist() for name, value in found.items() if not value.isfinite().all()}
    breaks += [f"eval: metric {name} is {value}" for name, value in wrong.items()]
    return breaks, f"{len(whole)} statistics, {len(found)} metrics"


def autocast(subject: Subject) -> Verdict:
    model, tokens = subject.build(dtype=torch.float32).train(), subject.bytes()
    with torch.autocast("cpu", torch.bfloat16):
        first = model(tokens)
        out = model(tokens, first.state)
        (F.cross_entropy(out.logits.flatten(0, 1).float(), tokens.flatten()) + out.loss).backward()
    wide = model.eval()(tokens, out.state)  # a state may come from a forward of another precision
    breaks = infinite("train", {"logits": out.logits})
    breaks += infinite("eval, float32 after bfloat16", {"logits": wide.logits})
    breaks += [f"train: {line}" for line in _infinite_gradients(gradients_of(model))]
    return breaks, "forward, backward, and its state in float32"


def large_weights(subject: Subject) -> Verdict:
    """In float32, where an exponential is infinite from 89 on: the scores of some first bytes lie that far below zero."""
    tokens, breaks = subject.bytes(), []
    for seed in (0, 1):
        model = subject.build(seed=seed, dtype=torch.float32).train()
        with torch.no_grad():
            for parameter in {p: None for _, sublayer in model.sublayers() for p in sublayer.parameters()}:
                parameter.mul_(LARGE if parameter.dim() > 1 else 1)
        model.project_()
        out, case = model(tokens), f"train, matrices {LARGE} times as large"
        outputs = {"logits": out.logits, "logits of a second segment": model(tokens, out.state).logits}
        (sum(map(torch.mean, outputs.values())) + out.loss).backward()
        breaks += infinite(case, outputs)
        breaks += [f"{case}: {line}" for line in _infinite_gradients(gradients_of(model))]
    return breaks, f"{LARGE} times as large: forward and backward in float32, two segments"


def ideal_flops(subject: Subject) -> Verdict:
    flops = subject.build().ideal_flops()
    return [] if isinstance(flops, int) and flops > 0 else [f"{flops!r} is not a positive int"], f"{flops} a byte"


def needed_flops(subject: Subject) -> Verdict:
    breaks, silent, span = [], [], subject.span
    for name, sublayer in subject.build().sublayers():
        steps = [(sublayer.period, 2 * span), (1, 0), (span + 2, 0), (span + 2, span)]
        said = [sublayer.needed_flops(segment, carried=carried) for segment, carried in steps]
        if said == [None] * len(steps):
            silent.append(name)
        elif not all(isinstance(needed, NeededFlops) and 0 <= min(needed) <= max(needed) < math.inf for needed in said):
            breaks.append(f"{name}: {said} are not NeededFlops of 0 or more")
        elif said[0].forward < sublayer.ideal_flops() - 1:  # which is rounded
            breaks.append(f"{name}: a warm byte needs {said[0].forward:,.0f}, ideal is {sublayer.ideal_flops():,}")
    return breaks, f"not said, so 3 x ideal is charged: {', '.join(silent)}" if silent else "said by every sublayer"


def _infinite_gradients(found: dict[str, Tensor]) -> list[str]:
    return [
        f"the gradient of {name} is not finite" for name, gradient in found.items() if not gradient.isfinite().all()
    ]


def _snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers."""
    return {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}


def _changed(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """Names of what is no longer bit for bit as it was."""
    return [name for name, t in _snapshot(model).items() if name in before and not torch.equal(t, before[name])]


CHECKS = (
    ("two models share nothing", None, apart),
    ("project_ is legal and idempotent", None, projection),
    ("a saved model continues alike", None, saved),
    ("a forward pass writes nothing", None, writes),
    ("the auxiliary loss is for training only", None, auxiliary_loss),
    ("statistics add up", None, statistics),
    ("bfloat16 autocast is finite", None, autocast),
    ("large weights give finite numbers", None, large_weights),
    ("ideal FLOPs are a positive int", None, ideal_flops),
    ("needed FLOPs are no fewer than the ideal ones", None, needed_flops),
)
"""Promise, the limit that excuses it, and its check."""
