"""The contract's promises about what a forward pass gives: each returns a line for each break, or what to say else."""

from functools import partial

import torch

from variants.conformance.changed import causality, maps, reach
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
from variants.contract import LIMITS, Position, cat_streams, map_state

FAR = 10**7  # bytes into a stream: float32 angles of it are off by half a radian


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


def segments(subject: Subject) -> Verdict:
    span, length = subject.span, subject.length
    tokens, breaks = subject.bytes(), []
    schemes = [(1,), (span + 2,), (length - 1,), (2, 3, span + 3), tuple(range(3, length, max(2, span // 3)))]
    if (period := subject.period) > 1:  # three periods are finished before, and three after, one of them across the cut
        schemes += [(3 * period,), (3 * period + period // 2,)]
    for mode, model, still in subject.modes():
        with still():
            whole, _ = run(model, tokens)
            for cuts in schemes:
                case = f"{mode}, cut at {', '.join(map(str, cuts[:4]))}{', ...' * (len(cuts) > 4)}"
                breaks += differs(case, whole, run(model, tokens, cuts=cuts)[0])
    return breaks, f"{len(schemes)} ways to cut {length} bytes"


def single_bytes(subject: Subject) -> Verdict:
    """From nothing, and with a full window: the middle goes in at once, so that long spans take no minutes."""
    length = subject.length
    some = min(max(6, subject.period + 2), length // 2)
    tokens, breaks = subject.bytes(), []
    cuts = (*range(1, some + 1), *range(length - some, length))
    for mode, model, still in subject.modes():
        case = f"{mode}, first and last {some} bytes one at a time"
        with still():
            breaks += differs(case, run(model, tokens)[0], run(model, tokens, cuts=cuts)[0])
    return breaks, f"first and last {some} of {length} bytes"


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
            found.append((outputs, gradients_of(model)))
        (outputs, gradients), (expected, wanted) = found
        breaks += differs(mode, expected, outputs)
        breaks += [f"{mode}: {name} has a gradient in one only" for name in sorted(gradients.keys() ^ wanted.keys())]
        for name in [name for name in wanted if name in gradients]:
            size = (gradients[name] - wanted[name]).abs().nan_to_num(torch.inf).max()
            if size > 1e-9 * wanted[name].abs().max().clamp(min=1):
                breaks.append(f"{mode}: the gradient of {name} differs by {size:.2g} over {fast.length} bytes")
    return breaks, f"values and {len(wanted)} gradients, {fast.length} bytes cut at {', '.join(map(str, cuts))}"


CHECKS = (
    ("logits are float32 [B, T, V] and finite", None, logits_shape),
    ("declared limits are known", None, known_limits),
    ("evaluation does not see the future", None, partial(causality, mode="eval")),
    ("training does not see the future", "causal_in_training", partial(causality, mode="train")),
    ("no byte beyond the declared reach matters", None, reach),
    ("bytes have influence", None, influence),
    ("a map is shares of what is seen", None, maps),
    ("segments do not matter", "segments", segments),
    ("one byte at a time equals the whole", "segments", single_bytes),
    ("a stream may start at 10**7", None, far_start),
    ("streams do not mix", "streams_apart", streams),
    ("state is detached, and its dimension 0 is streams", None, detached_state),
    ("any earlier state is accepted", None, old_state),
)
"""Promise, the limit that excuses it, and its check."""
