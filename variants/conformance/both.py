"""Checks of a model that sees both sides: later bytes matter, bytes beyond the reach and padding do
not."""

from itertools import accumulate

import torch

from variants.conformance import numerics, promises
from variants.conformance.fixture import Subject, Verdict, differences, run_changed

LEAST_EFFECT = 1e-6  # of a later byte on logits


def check_later_bytes(subject: Subject) -> Verdict:
    """Change the last byte. The logits of the byte before it must move."""
    last = subject.length - 1
    (before, _), (after, _) = run_changed(subject, torch.arange(subject.length) == last)
    effects = (before["logits"] - after["logits"])[:, last - 1].abs()
    if not effects.max() > LEAST_EFFECT:
        yield f"eval, byte {last} changed: the logits of byte {last - 1} did not"


def check_reach(subject: Subject) -> Verdict:
    """Change the first bytes, and the last ones. No output farther from them than the reach may
    move."""
    reaches = [sublayer.reach() for sublayer in subject.sublayers.values()]
    if None in reaches:
        return "unbounded"
    totals = dict(zip(subject.sublayers, accumulate(reaches), strict=True))
    byte = torch.arange(subject.length)
    for side, distance in (("first", byte - 1), ("last", subject.length - 2 - byte)):
        (outputs, _), (moved, _) = run_changed(subject, distance <= 0)
        for name, reach in (totals | {"logits": sum(reaches)}).items():
            far = (distance > reach)[:, None]
            parts = ({name: each[name] * far} for each in (outputs, moved))
            for line in differences(f"eval, the {side} two bytes changed", *parts):
                yield f"{line}, beyond its reach of {reach}"
                return
    return None


def check_padding(subject: Subject) -> Verdict:
    """Change padding, and leave it away. The logits of the bytes before it must stay."""
    model = subject.build()
    tokens = subject.random_bytes()
    n = subject.length // 2
    valid = torch.tensor([subject.length, n, 1])
    is_padding = torch.arange(subject.length) >= valid[:, None]
    changed = torch.where(is_padding, subject.change_all(tokens), tokens)
    with torch.no_grad():
        logits, of_changed = (
            {"logits": model(each, valid=valid).logits.masked_fill(is_padding[..., None], 0)}
            for each in (tokens, changed)
        )
        alone = {"logits": model(tokens[1:2, :n]).logits}
    yield from differences("eval, padding changed", logits, of_changed)
    padded = {"logits": logits["logits"][1:2, :n]}
    yield from differences(f"eval, {n} bytes without their padding", padded, alone)


CHECKS = (
    *promises.FIRST,
    numerics.STREAMS,
    ("later bytes matter", None, check_later_bytes),
    ("no byte beyond the declared reach matters", None, check_reach),
    ("padding does not matter", None, check_padding),
    *(check for check in promises.TRUTH if check[2] is not promises.check_flops),
    numerics.GRADIENTS,
    numerics.MODES_AGREE,
)
"""Triples as those of ``suite.py``, for a model that sees both sides. Its ideal FLOPs are those of
a byte whose window is full on both sides, so that a segment needs less."""
