"""The contract's promises, one function each: it returns a line for each break, and what to say where there is none."""

import io

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from variants.contract import Position, State, Sublayer, cat_streams, map_state
from variants.subject import (
    FAR,
    LIMITS,
    Subject,
    Verdict,
    _NoDropout,
    change,
    changed,
    collect,
    difference,
    infinite,
    limits_of,
    modes,
    pick,
    run,
    snapshot,
    tensors,
)


def logits_shape(subject: Subject) -> Verdict:
    breaks, model = [], subject.build(dtype=torch.float32)
    for mode in ("eval", "train"):
        for length in (1, subject.span + 3):
            outputs, _ = run(model.train(mode == "train"), subject.bytes(length=length))
            logits, case = outputs["logits"], f"{mode}, {length} bytes"
            if logits.shape != (3, length, subject.vocabulary) or logits.dtype != torch.float32:
                breaks.append(f"{case}: logits are {logits.dtype} {tuple(logits.shape)}")
            breaks += [f"{case}: {line}" for line in infinite(outputs)]
    return breaks, f"[3, T, {subject.vocabulary}] for T = 1 and {subject.span + 3}"


def known_limits(subject: Subject) -> Verdict:
    declared = limits_of(subject.build())
    breaks = [f"{limit} is not one of {', '.join(sorted(LIMITS))}" for limit in sorted(declared - LIMITS)]
    return breaks, f"declared: {', '.join(sorted(declared)) or 'none'}"


def causality(subject: Subject, *, mode: str) -> Verdict:
    """The same random numbers before and after a byte is changed, so that dropout drops the same."""
    model, tokens, breaks = subject.build().train(mode == "train"), subject.bytes(), []
    before, _ = run(model, tokens)
    places = sorted({1, subject.span, subject.length // 2, subject.length - 1})
    for at in places:
        after, _ = run(model, change(subject, tokens, at))
        earlier = (slice(None), slice(at))
        breaks += collect((f"{mode}, byte {at} changed", difference(pick(before, earlier), pick(after, earlier))))
    return breaks, f"bytes {', '.join(map(str, places))} changed, nothing before them moved"


def influence(subject: Subject) -> Verdict:
    """A model that ignores its input keeps most promises, and one that ignores its past keeps many."""
    model, tokens, at = subject.build(), subject.bytes(), 2
    (before, state), (after, _) = run(model, tokens), run(model, change(subject, tokens, at))
    moved = (before["logits"] - after["logits"]).abs().amax((0, 2)) > 1e-6  # [T]
    breaks = [] if moved[at] else [f"byte {at} changed, its own logits did not"]
    if any(tensor.numel() for tensor in tensors(state[1])) and not moved[at + 1]:
        breaks.append(f"state is carried, yet byte {at} changed and the logits of byte {at + 1} did not")
    return breaks, f"byte {at} moved logits as far as byte {moved.nonzero().amax() if moved.any() else at}"


def segments(subject: Subject) -> Verdict:
    span, length = subject.span, subject.length
    tokens, breaks = subject.bytes(), []
    schemes = [(1,), (span + 2,), (length - 1,), (2, 3, span + 3), tuple(range(3, length, max(2, span // 3)))]
    for mode, model in modes(subject):
        with _NoDropout():
            whole, _ = run(model, tokens)
            for cuts in schemes:
                found = difference(whole, run(model, tokens, cuts=cuts)[0])
                breaks += collect((f"{mode}, cut at {', '.join(map(str, cuts[:4]))}{', ...' * (len(cuts) > 4)}", found))
    return breaks, f"{len(schemes)} ways to cut {length} bytes"


def single_bytes(subject: Subject) -> Verdict:
    """From nothing, and with a full window: the middle goes in at once, so that long spans take no minutes."""
    length, some = subject.length, min(6, subject.length // 2)
    tokens, breaks = subject.bytes(), []
    cuts = (*range(1, some + 1), *range(length - some, length))
    for mode, model in modes(subject):
        with _NoDropout():
            found = difference(run(model, tokens)[0], run(model, tokens, cuts=cuts)[0])
            breaks += collect((f"{mode}, first and last {some} bytes one at a time", found))
    return breaks, f"first and last {some} of {length} bytes"


def far_start(subject: Subject) -> Verdict:
    """A stream at 10**7 against one at 0, both cut, so that carried positions are compared too.

    float32 is judged by the median: a choice of the k best may fall otherwise for single bytes, drift moves them all.
    """
    tokens, breaks, start = subject.bytes(), [], FAR + torch.tensor([0, 1, 777])
    for dtype in (torch.float64, torch.float32):
        model = subject.build(dtype=dtype)
        absolute = sorted({type(m).__name__ for m in model.modules() if isinstance(m, Position) and not m.relative})
        cuts = (subject.span + 2,)
        near, state = run(model, tokens, cuts=cuts)
        far, _ = run(model, tokens, cuts=cuts, state=(start, (None,) * len(state[1])))
        breaks += [f"{dtype}: {line}" for line in infinite(far)]
        if not absolute and dtype == torch.float64:
            breaks += collect((f"{dtype}", difference(near, far, tolerance=1e-6)))
        elif not absolute:
            typical = {
                name: (far[name] - y).abs().amax(-1).median() / max(1, y.abs().max()) for name, y in near.items()
            }
            breaks += [
                f"{dtype}: {name} moved by {size:.2g}, the median" for name, size in typical.items() if size > 1e-4
            ]
    return breaks, f"absolute positions ({', '.join(absolute)}): not promised" if absolute else "float64 and float32"


def streams(subject: Subject) -> Verdict:
    tokens, half, breaks = subject.bytes(), subject.span + 2, []
    head, tail = tokens[:, :half], tokens[:, half:]
    order = [2, 0, 1]
    for mode, model in modes(subject):
        with _NoDropout():
            _, state = run(model, head)
            both, _ = run(model, tail, state=state)
            moved, _ = run(model, torch.cat([subject.other(tail[:1]), tail[1:]]), state=state)
            turned, _ = run(model, tail[order], state=map_state(lambda t: t[order], state))
            alone = [run(model, head[i : i + 1])[1] for i in range(3)]
            joined, _ = run(model, tail, state=cat_streams(alone))
            single, _ = run(model, tail[1:2], state=map_state(lambda t: t[1:2], state))
        breaks += collect(
            (f"{mode}, stream 0 changed", difference(pick(both, slice(1, 3)), pick(moved, slice(1, 3)))),
            (f"{mode}, streams and states in another order", difference(pick(both, order), turned)),
            (f"{mode}, states of single streams concatenated", difference(both, joined)),
            (f"{mode}, stream 1 alone, its state sliced", difference(pick(both, slice(1, 2)), single)),
        )
    return breaks, "changed, reordered, joined and alone"


def detached_state(subject: Subject) -> Verdict:
    breaks, tokens, length = [], subject.bytes(), 2 * subject.length
    for mode in ("eval", "train"):
        model = subject.build().train(mode == "train")
        state = model(tokens, model(tokens).state).state
        if state[0].tolist() != [length] * 3:
            breaks.append(f"{mode}: stream positions are {state[0].tolist()} after {length} bytes")
        for tensor in tensors(state):
            if tensor.requires_grad:
                breaks.append(f"{mode}: a tensor {tuple(tensor.shape)} of the state is not detached")
            if tensor.dim() == 0 or tensor.shape[0] != 3:
                breaks.append(
                    f"{mode}: dimension 0 of a tensor {tuple(tensor.shape)} of the state is not the 3 streams"
                )
    return breaks, f"{len(tensors(state))} tensors"


@torch.no_grad()
def push(model: nn.Module, sign: int) -> list[str]:
    """Move the parameters of all sublayers that have a ``project_`` far out, then project; the sublayers' names."""
    ranged = [(name, s) for name, s in model.sublayers() if type(s).project_ is not Sublayer.project_]
    generator = torch.Generator().manual_seed(0)
    for parameter in {p: None for _, sublayer in ranged for p in sublayer.parameters()}:
        parameter.add_(sign * 1e3 * torch.randn(parameter.shape, generator=generator))
    model.project_()
    return [name for name, _ in ranged]


def old_state(subject: Subject) -> Verdict:
    """Spans may have changed between two forwards: a state describes itself."""
    breaks, tokens = [], subject.bytes()
    lengths = (1, subject.span // 2 + 1, subject.length)
    for sign in (1, -1):
        model = subject.build()
        states = [run(model, tokens[:, :length])[1] for length in lengths]
        push(model, sign)
        for length, state in zip(lengths, states, strict=True):
            after, _ = run(model, tokens[:, :5], state=state)
            breaks += [f"parameters moved, state of {length} bytes: {line}" for line in infinite(after)]
    return breaks, f"made by {', '.join(map(str, lengths))} bytes, before parameters moved"


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


def gradients(subject: Subject) -> Verdict:
    model, breaks = subject.build().train(), []
    waiting = {name for name, p in model.named_parameters() if p.requires_grad}
    for batch in range(3):
        model.zero_grad()
        tokens, state, total = subject.bytes(seed=batch), None, 0
        for segment in tokens.split(subject.span + 2, dim=1):
            out = model(segment, state)
            targets, state = subject.other(segment), out.state
            total = total + F.cross_entropy(out.logits.flatten(0, 1), targets.flatten()) + out.loss
        total.backward()
        found = {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}
        breaks += [f"{name}: gradient is not finite" for name, grad in found.items() if not grad.isfinite().all()]
        waiting -= {name for name, grad in found.items() if grad.any()}
        if not waiting:
            break
    breaks += [f"{name} has no gradient" for name in sorted(waiting)]
    return breaks, f"{len(list(model.parameters()))} parameters"


def projection(subject: Subject) -> Verdict:
    breaks, tokens = [], subject.bytes()
    for sign in (1, -1):
        model = subject.build()
        ranged = push(model, sign)
        outputs, _ = run(model, tokens)
        before = snapshot(model)
        model.project_()
        lines = [*infinite(outputs), *(f"a second project_ changed {name}" for name in changed(model, before))]
        again, _ = run(model, tokens)
        lines += collect(("a second project_", difference(outputs, again)))
        breaks += [f"parameters moved by {sign} * 1000 * normal: {line}" for line in lines]
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
    again = subject.bytes(seed=1)
    found = difference(run(model, again, state=state)[0], run(fresh, again, state=loaded)[0])
    return collect(("a fresh model with loaded parameters and state", found)), "parameters and state through torch.save"


def writes(subject: Subject) -> Verdict:
    model, tokens = subject.build(), subject.bytes()
    _, state = run(model, tokens)
    before, kept = snapshot(model), map_state(torch.clone, state)
    first, _ = run(model, tokens, state=state)
    breaks = [f"eval: a forward changed {name}" for name in changed(model, before)]
    if not all(map(torch.equal, tensors(state), tensors(kept))):
        breaks.append("eval: a forward changed the state that it was given")
    run(model, subject.other(tokens))
    again, _ = run(model, tokens, state=kept)
    breaks += collect(("eval, the same forward again after another", difference(first, again)))
    run(model.train(), tokens)
    parameters = {name for name, _ in model.named_parameters()}
    breaks += [f"train: a forward changed {name}" for name in changed(model, before) if name in parameters]
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
    half, limits = subject.span + 2, limits_of(model)

    def look(tokens: Tensor, state: State = None) -> tuple[dict[str, Tensor], State]:
        with torch.no_grad():
            out = model(tokens, state, look=True)
        return {f"{name}.{key}": t.double() for name, own in out.seen.items() for key, t in own.items()}, out.state

    (first, state), (whole, _) = look(tokens[:, :half]), look(tokens)
    splits = {
        "segments": [first, look(tokens[:, half:], state)[0]],
        "streams_apart": [look(tokens[:1])[0], look(tokens[1:])[0]],
    }
    for limit, (a, b) in splits.items():
        for name, total in whole.items() if limit not in limits else ():
            if not torch.allclose(a[name] + b[name], total, rtol=1e-9, atol=1e-9):
                breaks.append(f"{name}: the parts of two {limit.removesuffix('_apart')} are not the whole")
    out = model(tokens, look=True)
    breaks += collect(("looking", difference({"logits": model(tokens).logits}, {"logits": out.logits})))
    breaks += [f"{name} has a gradient" for name, own in out.seen.items() for t in own.values() if t.requires_grad]
    model.metrics({})
    found = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in model.metrics(out.seen).items()}
    breaks += [f"metric {name} is {value.tolist()}" for name, value in found.items() if not value.isfinite().all()]
    return breaks, f"{len(whole)} statistics, {len(found)} metrics"


def autocast(subject: Subject) -> Verdict:
    model, tokens, breaks = subject.build(dtype=torch.float32).train(), subject.bytes(), []
    with torch.autocast("cpu", torch.bfloat16):
        first = model(tokens)
        out = model(tokens, first.state)
        (F.cross_entropy(out.logits.flatten(0, 1).float(), tokens.flatten()) + out.loss).backward()
    wide = model.eval()(tokens, out.state)  # a state may come from a forward of another precision
    for case, logits in (("train", out.logits), ("eval, float32 after bfloat16", wide.logits)):
        breaks += [] if logits.isfinite().all() else [f"{case}: logits are not finite"]
    grads = [(name, p.grad.to_dense()) for name, p in model.named_parameters() if p.grad is not None]
    breaks += [f"train: gradient of {name} is not finite" for name, grad in grads if not grad.isfinite().all()]
    return breaks, "forward, backward, and its state in float32"


def ideal_flops(subject: Subject) -> Verdict:
    flops = subject.build().ideal_flops()
    return [] if isinstance(flops, int) and flops > 0 else [f"{flops!r} is not a positive int"], f"{flops} a byte"
