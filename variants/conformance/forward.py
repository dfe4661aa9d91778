"""The contract's promises about what a forward pass gives: each returns a line for each break, or what to say else."""

from collections.abc import Iterator

import torch
from torch import Tensor

from variants.conformance.fixture import (
    Subject,
    Verdict,
    differs,
    gradients_of,
    infinite,
    leaves,
    pick,
    place_of,
    push,
    run,
)
from variants.conformance.sizes import ROWS
from variants.contract import LIMITS, Inspection, Position, cat_streams, map_state

FAR = 10**7  # bytes into a stream: float32 angles of it are off by half a radian
SMALL = 1e-4
"""Of a map: how far a row's sum may be from 1, float32 being allowed there, and a weight that may move nothing."""


def logits_shape(subject: Subject) -> Verdict:
    breaks, model = [], subject.build(dtype=torch.float32)
    for mode in ("eval", "train"):
        for length in (1, subject.span + 3):
            outputs, _ = run(model.train(mode == "train"), subject.bytes(length=length))
            logits, case = outputs["logits"], f"{mode}, a segment of {length}"
            if logits.shape != (3, length, subject.vocabulary) or logits.dtype != torch.float32:
                breaks.append(f"{case}: logits are {logits.dtype} {tuple(logits.shape)}")
            breaks += infinite(case, outputs)
    return breaks, f"[3, T, {subject.vocabulary}] for T = 1 and {subject.span + 3}"


def known_limits(subject: Subject) -> Verdict:
    declared = subject.limits()
    breaks = [f"{limit} is not one of {', '.join(sorted(LIMITS))}" for limit in sorted(declared - LIMITS)]
    return breaks, f"declared: {', '.join(sorted(declared)) or 'none'}"


def influence(subject: Subject) -> Verdict:
    """A model that ignores its input keeps most promises, and one that ignores its past keeps many."""
    model, tokens, at = subject.build(), subject.bytes(), 2
    (before, state), (after, _) = run(model, tokens), run(model, subject.change(tokens, at))
    moved = (before["logits"] - after["logits"]).abs().amax((0, 2)) > 1e-6  # [T]
    breaks = [] if moved[at] else [f"eval, byte {at} changed: its own logits did not"]
    within = 1 if subject.period == 1 else 3 * subject.period  # a block is seen when it is finished
    if any(tensor.numel() for tensor in leaves(state[1])) and not moved[at + 1 : at + 1 + within].any():
        to = f"s {at + 1} to {at + within}" if within > 1 else f" {at + 1}"
        breaks.append(f"eval, byte {at} changed: state is carried, yet the logits of byte{to} did not")
    return breaks, f"byte {at} moved logits as far as byte {moved.nonzero().amax() if moved.any() else at}"


def maps(subject: Subject) -> Verdict:
    """A row is shares of what its byte sees, with those of learned vectors: 1 in all, or 0 of a byte that sees nothing; and no
    weight is of a byte that moves nothing."""
    model, tokens, still = subject.build(), subject.bytes()[:1], {}
    with torch.no_grad():
        given = {name: own for name, own in model.inspect(tokens)[1].items() if own.weights is not None}
    if given:
        copies = torch.cat([subject.change(tokens, at) for at in range(subject.length)])
        parts = [run(model, torch.cat([tokens, part]))[0] for part in copies.split(ROWS)]
        still = {name: torch.cat([(p[name][1:] == p[name][:1]).all(-1) for p in parts]).T for name in given}  # [T, n]
    breaks = [line for name, own in given.items() for line in _of_a_map(name, own, still[name])][:1]
    return breaks, ", ".join(given) or "no sublayer gives one"


def _of_a_map(name: str, own: Inspection, still: Tensor) -> Iterator[str]:
    weights, shares = own.weights, own.weights[..., :0] if own.shares is None else own.shares
    heads, length = weights.shape[1] if weights.dim() == 4 else None, len(still)
    if weights.shape != (1, heads, length, length) or shares.shape[:-1] != weights.shape[:-1]:
        yield f"{name}: a map of {tuple(weights.shape)} and shares of {tuple(shares.shape)} are not [B, H, T, T] and [B, H, T, n]"
        return
    taken = torch.cat([weights, shares], dim=-1)[0]  # [H, T, T + n]
    rows = taken.sum(-1)
    wrong = ~((rows - 1).abs() < SMALL) & (rows != 0) | (taken < -SMALL).any(-1)
    for head, at in wrong.nonzero()[:1].tolist():
        yield f"{name}: what byte {at} takes in head {head} is no shares of 1: in all {rows[head, at]:.3g}"
    largest = weights[0].amax(0)  # [T, T]
    for at, key in (still & (largest > SMALL)).nonzero()[:1].tolist():
        yield f"{name}: byte {at} takes {largest[at, key]:.2g} of byte {key}, which moves nothing that it gives"


def far_start(subject: Subject) -> Verdict:
    """A stream at 10**7 against one at 0, both cut, so that carried positions are compared too.

    float32 is judged by the median: a choice of the k best may fall otherwise for single bytes, drift moves them all.
    """
    tokens, breaks, start = subject.bytes(), [], FAR + torch.tensor([0, 1, 777])
    for dtype in (torch.float64, torch.float32):
        model = subject.build(dtype=dtype)
        case = f"eval, {str(dtype).removeprefix('torch.')}"
        absolute = sorted({type(m).__name__ for m in model.modules() if isinstance(m, Position) and not m.relative})
        cuts = (subject.span + 2,)
        near, state = run(model, tokens, cuts=cuts)
        far, _ = run(model, tokens, cuts=cuts, state=(start, (None,) * len(state[1])))
        breaks += infinite(case, far)
        if not absolute and dtype == torch.float64:
            breaks += differs(case, near, far, tolerance=1e-6)
        elif not absolute:
            for name, y in near.items():
                sizes = (far[name] - y).abs().amax(-1)  # [B, T]
                if (size := sizes.median()) > 1e-4 * max(1, y.abs().max()):
                    breaks.append(f"{case}: {name} moved by {size:.2g}, the median, most at {place_of(sizes)}")
    return breaks, f"absolute positions ({', '.join(absolute)}): not promised" if absolute else "float64 and float32"


def streams(subject: Subject) -> Verdict:
    tokens, half, breaks = subject.bytes(), subject.span + 2, []
    head, tail = tokens[:, :half], tokens[:, half:]
    order, others, one = [2, 0, 1], slice(1, 3), slice(1, 2)
    for mode, model, still in subject.modes():
        with still():
            _, state = run(model, head)
            both, _ = run(model, tail, state=state)
            moved, _ = run(model, torch.cat([subject.other(tail[:1]), tail[1:]]), state=state)
            turned, _ = run(model, tail[order], state=map_state(lambda t: t[order], state))
            alone = [run(model, head[i : i + 1])[1] for i in range(3)]
            joined, _ = run(model, tail, state=cat_streams(alone))
            single, _ = run(model, tail[one], state=map_state(lambda t: t[one], state))
        breaks += differs(f"{mode}, stream 0 changed", pick(both, others), pick(moved, others))
        breaks += differs(f"{mode}, streams and states in another order", pick(both, order), turned)
        breaks += differs(f"{mode}, states of single streams concatenated", both, joined)
        breaks += differs(f"{mode}, stream 1 alone, its state sliced", pick(both, one), single)
    return breaks, "changed, reordered, joined and alone"


def detached_state(subject: Subject) -> Verdict:
    breaks, tokens, length = [], subject.bytes(), 2 * subject.length
    for mode in ("eval", "train"):
        model = subject.build().train(mode == "train")
        state = model(tokens, model(tokens).state).state
        if state[0].tolist() != [length] * 3:
            breaks.append(f"{mode}: stream positions are {state[0].tolist()} after {length} bytes")
        for tensor in leaves(state):
            name = f"a tensor {tuple(tensor.shape)} of the state"
            if tensor.requires_grad:
                breaks.append(f"{mode}: {name} is not detached")
            if tensor.dim() == 0 or tensor.shape[0] != 3:
                breaks.append(f"{mode}: dimension 0 of {name} is not the 3 streams")
    return breaks, f"{len(leaves(state))} tensors"


def old_state(subject: Subject) -> Verdict:
    """Spans may have changed between two forwards: a state describes itself."""
    breaks, tokens = [], subject.bytes()
    lengths = (1, subject.span // 2 + 1, subject.length)
    for sign in (1, -1):
        model = subject.build()
        states = [run(model, tokens[:, :length])[1] for length in lengths]
        push(model, sign * 1e3)
        for length, state in zip(lengths, states, strict=True):
            after, _ = run(model, tokens[:, :5], state=state)
            breaks += infinite(f"eval, parameters moved, state of {length} bytes", after)
    return breaks, f"made by {', '.join(map(str, lengths))} bytes, before parameters moved"


def equal_backends(fast: Subject, plain: Subject) -> Verdict:
    """Two backends of one model, in value and in every gradient, where learned spans are uneven and segments ugly.

    Segments of 1, S + 2, 1 and at least S + 1 bytes of two streams: cold and warm, shorter and longer than the window.
    """
    tokens, breaks, cuts = fast.bytes()[:2], [], (1, fast.span + 3, fast.span + 4)
    for mode in ("eval", "train"):
        found = []
        for subject in (fast, plain):
            model = subject.build().train(mode == "train")
            push(model, 0.3)
            outputs, _ = run(model, tokens, cuts=cuts, gradients=True)
            generator = torch.Generator().manual_seed(0)
            upstream = torch.randn(outputs["logits"].shape, generator=generator, dtype=torch.float64)
            (outputs["logits"] * upstream).sum().backward()
            found.append((outputs, gradients_of(model, flat=True)))
        (outputs, gradients), (expected, wanted) = found
        breaks += [f"{mode}: {name} is in one only" for name in sorted(gradients.keys() ^ wanted.keys())]
        breaks += differs(mode, expected, outputs)
        breaks += differs(mode, {name: g for name, g in wanted.items() if name in gradients}, gradients)
    return breaks, f"values and {len(wanted)} gradients, {fast.length} bytes cut at {', '.join(map(str, cuts))}"


CHECKS = (
    ("logits are float32 [B, T, V] and finite", None, logits_shape),
    ("declared limits are known", None, known_limits),
    ("bytes have influence", None, influence),
    ("a map is shares of what is seen", None, maps),
    ("a stream may start at 10**7", None, far_start),
    ("streams do not mix", "streams_apart", streams),
    ("state is detached, and its dimension 0 is streams", None, detached_state),
    ("any earlier state is accepted", None, old_state),
)
"""Promise, the limit that excuses it, and its check."""
