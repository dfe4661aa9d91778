"""Numerical promises of a mechanism: gradients are those of its values, training without dropout equals evaluation, the
declared reach is used, the likelihood moves every parameter, and streams of a batch of any size are independent.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.conformance.fixture import Subject, Verdict, differs, gradients_of, open_, pick, run, seed_cpu
from variants.conformance.sizes import LONGEST
from variants.contract import Sublayer, cat_streams, map_state

STEP = 1e-7  # of a finite difference along a unit direction
DRAWS = 12  # of parameters and inputs; one of them must show that a sublayer sees as far as it declares


def derivatives(subject: Subject) -> Verdict:
    """Checks every parameter's gradient along a random direction, in training, after a past. That of the embedding
    tests those of sublayers' inputs. The loss is a random sum of logits plus auxiliary loss; draws repeat. With the
    limit ``likelihood`` the auxiliary loss counts only for parameters that no logit depends on."""
    model = open_(subject.build(mode="train"), 0.2, 0.8)
    head, tail = subject.bytes()[:2].tensor_split(2, dim=1)
    _, state = run(model, head)
    generator = torch.Generator().manual_seed(0)

    def direction(like: Tensor) -> Tensor:
        noise = torch.randn(like.shape, generator=generator, dtype=like.dtype)
        return noise / noise.norm()

    def values() -> tuple[Tensor, Tensor]:
        seed_cpu(0)
        out = model(tail, map_state(torch.clone, state))
        return out.logits, out.loss

    logits, loss = values()
    upstream = direction(logits)
    model.zero_grad()  # another promise is that models share no parameter
    total, likely = (logits * upstream).sum(), {}
    if "likelihood" in subject.limits:
        total.backward(retain_graph=True)
        likely = gradients_of(model)
        model.zero_grad()
    (total + loss).backward()
    gradients = gradients_of(model) | likely
    for name, parameter in model.named_parameters():
        along, before, slopes = direction(parameter), parameter.detach().clone(), []
        slope = (gradients[name] * along).sum().item() if name in gradients else 0.0
        for step in (STEP, -STEP):  # at a kink, one of the two is right
            with torch.no_grad():
                parameter.copy_(before + step * along)
                other, other_loss = values()
                parameter.copy_(before)
            # logits are subtracted before they are summed, which rounds less
            of_loss = 0 if name in likely else other_loss - loss
            slopes.append((((other - logits) * upstream).sum() + of_loss).item() / step)
            if abs(slopes[-1] - slope) <= max(1e-4 * abs(slopes[-1]), 1e-8):
                break
        else:
            change = f"the loss changes by {slopes[0]:.6g} or {slopes[1]:.6g}, its gradient says {slope:.6g}"
            yield f"train: along a direction of {name} {change}"


def modes_agree(subject: Subject) -> Verdict:
    models = list(subject.modes())  # all built before one runs: another promise is that they share no parameter
    outputs = []
    for _, model, still in models:
        with still():
            outputs.append(run(model, subject.bytes(), cuts=(subject.span + 2,))[0])
    if len(outputs) == 1:
        yield "train: draws random numbers that are not dropout's, with which nothing compares"
    else:
        yield from differs("train without dropout, against eval", *outputs)


def reach_used(subject: Subject) -> Verdict:
    """Some draw must show the reach: draws vary spans (all open, mixed, all closed) and the size of inputs (1 or 3)."""
    waiting = {name: sublayer.reach() for name, sublayer in subject.declared.items()}
    waiting = {name: n for name, n in waiting.items() if n is None or 0 < n < LONGEST}
    for draw in range(DRAWS if waiting else 0):
        model = open_(subject.build(seed=draw), *((1, 1), (0, 1), (0, 0))[draw % 3])
        width = next(iter(run(model, subject.bytes(length=1))[0].values())).shape[-1]
        for name, sublayer in model.sublayers():
            if name in waiting and _sees(sublayer, waiting[name], subject, width=width, size=(1, 3)[draw // 3 % 2]):
                del waiting[name]
        if not waiting:
            break
    for name, n in waiting.items():
        at, declared = ("0 and at the end", "all of the past") if n is None else (f"t - {n}", f"a reach of {n}")
        draws = f"with {DRAWS} draws of parameters"
        yield f"eval: {name} gives the same at byte {at} changed, {draws}: declared is {declared}"


@torch.no_grad()
def _sees(sublayer: Sublayer, reach: int | None, subject: Subject, *, width: int, size: float) -> bool:
    """Whether changing an early byte moves the output ``reach`` bytes later or, for None, byte 0 moves the end."""
    places = range(1) if reach is None else range(max(4, subject.period))
    length = subject.length if reach is None else reach + len(places)

    def output(x: Tensor) -> Tensor:
        seed_cpu(0)
        return sublayer(x, None, torch.zeros(1, dtype=torch.int64)).y[0]

    x = size * torch.randn(1, length, width, dtype=torch.float64)
    before = output(x)
    for at in places:
        changed = x.clone()
        changed[:, at] = 3 * torch.randn(width)
        seen = slice(length - subject.period, length) if reach is None else slice(at + reach, at + reach + 1)
        # equal shapes round equally, except where terms are added to sums and subtracted again
        if (output(changed) - before)[seen].abs().max() > 1e-14 * before.abs().max():
            return True
    return False


def likelihood(subject: Subject) -> Verdict:
    """The auxiliary loss is left out, because it may move a parameter that nothing else uses."""
    segment_bytes = max(subject.span, 3 * subject.period) + 2  # a state is detached: a segment must hold whole blocks
    waiting = {name for name, p in subject.build().named_parameters() if p.requires_grad}
    for draw in range(3):
        model = open_(subject.build(seed=draw, mode="train"), 0.2, 0.8)
        tokens, state, total = subject.bytes(seed=draw), None, 0
        for segment in tokens.split(segment_bytes, dim=1):
            logits, state, *_ = model(segment, state)
            total = total + F.cross_entropy(logits.flatten(0, 1), subject.other(segment).flatten())
        total.backward()
        waiting -= {name for name, gradient in gradients_of(model).items() if gradient.any()}
        if not waiting:
            break
    yield from (f"train: the likelihood gives {name} no gradient in 3 draws of parameters" for name in sorted(waiting))


def streams_separate(subject: Subject) -> Verdict:
    """Checks three streams after a past, and the first, middle and last stream of large batches against these alone."""
    head, tail = subject.bytes().tensor_split([subject.span + 2], dim=1)
    order, others, second = [2, 0, 1], slice(1, 3), slice(1, 2)
    for mode, model, still in subject.modes():
        with still():
            _, state = run(model, head)
            both, _ = run(model, tail, state=state)
            moved, _ = run(model, torch.cat([subject.other(tail[:1]), tail[1:]]), state=state)
            turned, _ = run(model, tail[order], state=map_state(lambda t: t[order], state))
            joined, _ = run(model, tail, state=cat_streams([run(model, row[None])[1] for row in head]))
            single, _ = run(model, tail[second], state=map_state(lambda t: t[second], state))
        yield from differs(f"{mode}, stream 0 changed", pick(both, others), pick(moved, others))
        yield from differs(f"{mode}, streams and states in another order", pick(both, order), turned)
        yield from differs(f"{mode}, states of single streams concatenated", both, joined)
        yield from differs(f"{mode}, stream 1 alone, its state sliced", pick(both, second), single)
        for number in subject.streams:
            tokens, three = subject.bytes(streams=number), [0, number // 2, number - 1]
            with still():
                whole, alone = (run(model, part, cuts=(subject.span + 2,))[0] for part in (tokens, tokens[three]))
            yield from differs(f"{mode}, {number} streams at once", alone, pick(whole, three))


CHECKS = (
    ("gradients are those of the values", None, derivatives),
    ("training without dropout is evaluation", "training_as_evaluation", modes_agree),
    ("the declared reach is used", None, reach_used),
    ("the likelihood moves every parameter", "likelihood", likelihood),
    ("streams do not mix", "streams_apart", streams_separate),
)
"""Promise, the limit that excuses it, and its check."""
