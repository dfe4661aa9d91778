"""Promises about what a mechanism computes, by numbers: its gradients are those of its values, training is evaluation without
dropout, what it declares to see moves it, the likelihood moves its parameters, and a batch of any size is streams apart.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.conformance.fixture import Subject, Verdict, differs, gradients_of, open_, run
from variants.conformance.sizes import LONGEST
from variants.contract import Sublayer, map_state

STEP = 1e-7
"""Of a difference, along a direction of length 1."""
DRAWS = 12
"""Parameters and inputs with which a sublayer may show that it sees as far as it says."""


def derivatives(subject: Subject) -> Verdict:
    """The gradient of every parameter along a random direction, in training, behind a past; the embedding's tells of the
    sublayers' inputs. The loss is a random sum of logits, and the auxiliary one; random numbers are the same each time."""
    model, (head, tail) = open_(subject.build().train(), 0.2, 0.8), subject.bytes()[:2].tensor_split(2, dim=1)
    _, state = run(model, head)
    generator, breaks = torch.Generator().manual_seed(0), []

    def values() -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        out = model(tail, map_state(torch.clone, state))
        return out.logits, out.loss

    logits, loss = values()
    upstream = torch.randn(logits.shape, generator=generator, dtype=logits.dtype)
    upstream /= upstream.norm()
    model.zero_grad()
    ((logits * upstream).sum() + loss).backward()
    found = gradients_of(model)
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        direction /= direction.norm()
        said = (found[name] * direction).sum().item() if name in found else 0.0
        before, slopes = parameter.detach().clone(), []
        for step in (STEP, -STEP):  # at a kink, one of the two is right
            with torch.no_grad():
                parameter.copy_(before + step * direction)
                other, other_loss = values()
                parameter.copy_(before)
            # numbers that differ little are subtracted before they are summed, which rounds less
            slopes.append((((other - logits) * upstream).sum() + other_loss - loss).item() / step)
            if abs(slopes[-1] - said) <= max(1e-4 * abs(slopes[-1]), 1e-8):
                break
        else:
            change = f"the loss changes by {slopes[0]:.6g} or {slopes[1]:.6g}, its gradient says {said:.6g}"
            breaks.append(f"train: along a direction of {name} {change}")
    return breaks, f"{len(found)} gradients, behind {head.shape[1]} bytes"


def modes_agree(subject: Subject) -> Verdict:
    outputs = []
    for _, model, still in list(
        subject.modes()
    ):  # all built before one runs: two that share a parameter are another promise
        with still():
            outputs.append(run(model, subject.bytes(), cuts=(subject.span + 2,))[0])
    if len(outputs) == 1:
        return ["train: draws random numbers that are not dropout's, with which nothing compares"], ""
    breaks = differs("train without dropout, against eval", *outputs)
    return breaks, f"{subject.length} bytes, with a past and without"


def reach_used(subject: Subject) -> Verdict:
    """Some parameters and inputs must show it: spans fully open, closed or anything between, other weights small and large."""
    waiting = {name: n for name, sublayer in subject.declared.items() if (n := sublayer.reach()) != 0}
    told = ", ".join(f"{name} {'all' if n is None else n}" for name, n in waiting.items()) or "no sublayer sees a past"
    waiting = {name: n for name, n in waiting.items() if n is None or n < LONGEST}
    for draw in range(DRAWS):
        if not waiting:
            break
        model = open_(subject.build(seed=draw), *((1, 1), (0, 1), (0, 0))[draw % 3])
        width = next(iter(run(model, subject.bytes(length=1))[0].values())).shape[-1]
        for name, sublayer in model.sublayers():
            if name in waiting and _sees(sublayer, waiting[name], subject, width=width, size=(1, 3)[draw // 3 % 2]):
                del waiting[name]
    breaks = [
        f"eval: {name} gives the same at byte {'0 and at the end' if n is None else f't - {n}'} changed, with {DRAWS} draws "
        f"of parameters: declared is {'all of the past' if n is None else f'a reach of {n}'}"
        for name, n in waiting.items()
    ]
    return breaks, f"bytes back, looked at below {LONGEST}: {told}"


@torch.no_grad()
def _sees(sublayer: Sublayer, reach: int | None, subject: Subject, *, width: int, size: float) -> bool:
    """Whether another input moves the output ``reach`` bytes on, from one byte of a period; or from the first to the end."""
    period = subject.period
    places = range(1) if reach is None else range(max(4, period))
    length = subject.length if reach is None else reach + len(places)
    start = torch.zeros(1, dtype=torch.int64)

    def output(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return sublayer(x, None, start).y[0]

    x = size * torch.randn(1, length, width, dtype=torch.float64)
    before = output(x)
    for at in places:
        changed = x.clone()
        changed[:, at] = 3 * torch.randn(width)
        seen = slice(length - period, length) if reach is None else slice(at + reach, at + reach + 1)
        # alike shapes round alike, but for sums that were added and subtracted again
        if (output(changed) - before)[seen].abs().max() > 1e-14 * before.abs().max():
            return True
    return False


def likelihood(subject: Subject) -> Verdict:
    """Without the auxiliary loss, which may move what nothing else looks at."""
    segment_bytes = max(subject.span, 3 * subject.period) + 2  # a state is detached: what a block does must be within
    waiting = {name for name, p in subject.build().named_parameters() if p.requires_grad}
    for draw in range(3):
        model = open_(subject.build(seed=draw).train(), 0.2, 0.8)
        tokens, state, total = subject.bytes(seed=draw), None, 0
        for segment in tokens.split(segment_bytes, dim=1):
            logits, state, *_ = model(segment, state)
            total = total + F.cross_entropy(logits.flatten(0, 1), subject.other(segment).flatten())
        total.backward()
        waiting -= {name for name, gradient in gradients_of(model).items() if gradient.any()}
        if not waiting:
            break
    breaks = [f"train: the likelihood gives {name} no gradient in 3 draws of parameters" for name in sorted(waiting)]
    return breaks, f"{len(list(model.parameters()))} parameters"


def many_streams(subject: Subject) -> Verdict:
    """The outputs of large batches against those of three streams at a time."""
    breaks, cuts = [], (subject.span + 2,)
    for number in subject.streams:
        tokens = subject.bytes(streams=number)
        for mode, model, still in subject.modes():
            with still():
                together, _ = run(model, tokens, cuts=cuts)
                parts = [run(model, part, cuts=cuts)[0] for part in tokens.split(3)]
            apart = {name: torch.cat([part[name] for part in parts]) for name in together}
            breaks += differs(f"{mode}, {number} streams at once", apart, together)
    return breaks, f"{', '.join(map(str, subject.streams))} at once equal three at a time"


CHECKS = (
    ("gradients are those of the values", None, derivatives),
    ("training without dropout is evaluation", "training_as_evaluation", modes_agree),
    ("the declared reach is used", None, reach_used),
    ("the likelihood moves every parameter", None, likelihood),
    ("streams do not mix in large batches", "streams_apart", many_streams),
)
"""Promise, the limit that excuses it, and its check."""
