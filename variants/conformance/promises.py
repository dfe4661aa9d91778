"""Checks of a small model's forward passes, state, parameters and losses, one function for each
promise."""

import io
import math
from collections.abc import Generator, Iterator
from itertools import islice, product

import torch
from torch import Tensor, nn

from variants.conformance.fixture import (
    EXACT,
    MATRIX_FACTOR,
    MODES,
    Outputs,
    Subject,
    Verdict,
    differences,
    enlarge_matrices,
    gradients_of,
    non_finite,
    position_of_largest,
    projected_parameters,
    run,
    run_changed,
    seed_cpu,
    state_tensors,
)
from variants.contract import LIMITS, Inspection, NeededFlops, Position, State, map_state

FAR_POSITION = 10**7  # position in a stream, where float32 angles are off by half a radian
# for row sums, and weights on hidden bytes, of an attention map, which may be in float32
MAP_TOLERANCE = 1e-4
LEAST_EFFECT = 1e-3  # effect of a byte on later logits, relative to its effect on its own logits


def check_logits(subject: Subject) -> Verdict:
    model = subject.build(dtype=torch.float32)
    for mode, length in product(MODES, (1, subject.span + 3)):
        outputs, _ = run(model.train(mode == "train"), subject.random_bytes(length=length))
        logits = outputs["logits"]
        case = f"{mode}, a segment of {length}"
        if logits.shape != (3, length, subject.vocabulary) or logits.dtype != torch.float32:
            yield f"{case}: logits are {logits.dtype} {tuple(logits.shape)}"
        yield from non_finite(case, outputs)


def check_limits(subject: Subject) -> Verdict:
    yield from (
        f"{limit} is not one of {', '.join(sorted(LIMITS))}"
        for limit in sorted(subject.limits - LIMITS)
    )


def check_influence(subject: Subject) -> Verdict:
    """Check that a byte moves its own logits, and later ones if state is carried. A model that
    ignores its input would fulfil most of the other promises."""
    position = 2
    (before, state), (after, _) = run_changed(subject, torch.arange(subject.length) == position)
    effects = (before["logits"] - after["logits"]).abs().amax((0, 2))  # [T]
    if not effects[position] > 1e-6:
        yield f"eval, byte {position} changed: its own logits did not"
    # a block may be visible only when it is complete
    distance = 1
    if subject.period != 1:
        distance = 3 * subject.period
    later = effects[position + 1 : position + 1 + distance].max()
    if (
        any(tensor.numel() for tensor in state_tensors(state[1]))
        and not later > LEAST_EFFECT * effects[position]
    ):
        last = f"s {position + 1} to {position + distance}" if distance > 1 else f" {position + 1}"
        yield (
            f"eval, byte {position} changed: state is carried, yet the logits of byte{last} did not"
        )


def check_maps(subject: Subject) -> Verdict:
    """Check attention maps: a row and its shares of learned vectors sum to 1 or 0, and later bytes
    or bytes beyond the reach have weight 0."""
    with torch.no_grad():
        inspections = subject.build().inspect(subject.random_bytes()[:1])[1]
    for name, inspection in inspections.items():
        if inspection.weights is not None:
            lines = _check_map(inspection, subject.sublayers[name].reach())
            yield from (f"{name}: {line}" for line in islice(lines, 1))


def _check_map(inspection: Inspection, reach: int | None) -> Iterator[str]:
    weights = inspection.weights
    length = inspection.weights.shape[-1]
    shares = weights[..., :0] if inspection.shares is None else inspection.shares
    heads = None
    if weights.dim() == 4:
        heads = weights.shape[1]
    if weights.shape != (1, heads, length, length) or shares.shape[:-1] != weights.shape[:-1]:
        shapes = f"{tuple(weights.shape)} and shares of {tuple(shares.shape)}"
        yield f"a map of {shapes} must be [B, H, T, T] and [B, H, T, n]"
        return
    row_weights = torch.cat([weights, shares], dim=-1)[0]  # [H, T, T + n]
    # [H, T] and [T, T]
    sums = row_weights.sum(-1)
    largest = weights[0].amax(0)
    wrong_sums = ~((sums - 1).abs() < MAP_TOLERANCE) & (sums != 0)
    for head, query in (wrong_sums | (row_weights < -MAP_TOLERANCE).any(-1)).nonzero().tolist():
        yield (
            f"the weights of byte {query} in head {head} must be from 0 and sum to 1 or 0: "
            f"{sums[head, query]:.3g}"
        )
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance > (length if reach is None else reach))
    for query, key in (hidden & (largest > MAP_TOLERANCE)).nonzero().tolist():
        yield (
            f"byte {query} has weight {largest[query, key]:.2g} on byte {key}, which it cannot see"
        )


def check_far_start(subject: Subject) -> Verdict:
    """Compare a stream that starts at position 10**7 with one that starts at 0, in two segments. In
    float32 the median over bytes is compared: a top-k selection may change at single bytes, but
    imprecise positions change all bytes."""
    tokens = subject.random_bytes()
    start = FAR_POSITION + torch.tensor([0, 1, 777])
    cuts = (subject.span + 2,)
    for dtype in (torch.float64, torch.float32):
        model = subject.build(dtype=dtype)
        case = f"eval, {str(dtype).removeprefix('torch.')}"
        near, state = run(model, tokens, cuts=cuts)
        far, _ = run(model, tokens, cuts=cuts, state=(start, (None,) * len(state[1])))
        yield from non_finite(case, far)
        if any(isinstance(module, Position) and not module.relative for module in model.modules()):
            continue  # with absolute positions, outputs must be finite but may differ
        if dtype == torch.float64:
            yield from differences(case, near, far, tolerance=1e-6)
            continue
        for name, y in near.items():
            sizes = (far[name] - y).abs().amax(-1)  # [B, T]
            if (size := sizes.median()) > 1e-4 * max(1, y.abs().max()):
                yield (
                    f"{case}: {name} moved by {size:.2g}, the median, most at "
                    f"{position_of_largest(sizes)}"
                )


def check_state(subject: Subject) -> Verdict:
    tokens = subject.random_bytes()
    length = 2 * subject.length
    for mode in MODES:
        model = subject.build(mode=mode)
        state = model(tokens, model(tokens).state).state
        if state[0].tolist() != [length] * 3:
            yield f"{mode}: stream positions are {state[0].tolist()} after {length} bytes"
        for tensor in state_tensors(state):
            name = f"a tensor {tuple(tensor.shape)} of the state"
            if tensor.requires_grad:
                yield f"{mode}: {name} is not detached"
            if tensor.dim() == 0 or tensor.shape[0] != 3:
                yield f"{mode}: dimension 0 of {name} is not the 3 streams"


def check_sharing(subject: Subject) -> Verdict:
    """Check that two models share no tensor. A tensor in a class attribute, for example, is
    shared by all models."""
    # float64 would copy buffers
    models = [subject.build(seed=seed, dtype=torch.float32) for seed in (0, 1)]
    first, second = (
        {t.untyped_storage().data_ptr(): n for n, t in _tensors(m).items() if t.numel()}
        for m in models
    )
    yield from sorted(
        f"{first[pointer]} is shared by two models" for pointer in first.keys() & second.keys()
    )


def check_projection(subject: Subject) -> Verdict:
    """Check that outputs are finite after parameters moved far, also from states that were
    computed before."""
    tokens = subject.random_bytes()
    lengths = (1, subject.span // 2 + 1, subject.length)
    for sign in (1, -1):
        model = subject.build()
        case = f"eval, parameters moved by {sign} * 1000 * normal"
        states = [run(model, tokens[:, :length])[1] for length in lengths]
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in projected_parameters(model):
                parameter.add_(sign * 1e3 * torch.randn(parameter.shape, generator=generator))
        model.project_()
        outputs = run(model, tokens)[0]
        before = _snapshot(model)
        model.project_()
        yield from non_finite(case, outputs)
        yield from (f"{case}: a second project_ changed {name}" for name in _changed(model, before))
        yield from differences(f"{case}: a second project_", outputs, run(model, tokens)[0])
        for length, state in zip(lengths, states, strict=True):
            yield from non_finite(
                f"{case}, state of {length} bytes", run(model, tokens[:, :5], state=state)[0]
            )


def check_saving(subject: Subject) -> Verdict:
    """Check that a new model with saved parameters and state continues with equal outputs."""
    model = subject.build(mode="train")
    fresh = subject.build(seed=1)
    tokens = subject.random_bytes()
    run(model, tokens)  # so that buffers differ from those of a new model
    _, state = run(model.eval(), tokens)
    file = io.BytesIO()
    torch.save((model.state_dict(), state), file)
    file.seek(0)
    weights, loaded = torch.load(file, weights_only=True)
    fresh.load_state_dict(weights)
    fresh.project_()
    following = subject.random_bytes(seed=1)
    case = "eval, a fresh model with loaded parameters and state"
    yield from differences(
        case, run(model, following, state=state)[0], run(fresh, following, state=loaded)[0]
    )


def check_side_effects(subject: Subject) -> Verdict:
    """Check that a forward pass changes neither the model nor its state; in training, buffers
    may change."""
    model, tokens, cuts = subject.evaluated()
    _, state = run(model, tokens, cuts=cuts)
    before = _snapshot(model)
    copy = map_state(torch.clone, state)
    first, _ = run(model, tokens, cuts=cuts, state=state)
    yield from (f"eval: a forward changed {name}" for name in _changed(model, before))
    if not all(map(torch.equal, state_tensors(state), state_tensors(copy))):
        yield "eval: a forward changed its input state"
    run(model, subject.change_all(tokens), cuts=cuts)
    repeated, _ = run(model, tokens, cuts=cuts, state=copy)
    yield from differences("eval, a forward repeated after one of other bytes", first, repeated)
    run(model.train(), tokens, cuts=cuts)
    parameters = {name for name, _ in model.named_parameters()}
    yield from (
        f"train: a forward changed {name}" for name in _changed(model, before) if name in parameters
    )


def check_random_numbers(subject: Subject) -> Verdict:
    """Check that evaluation gives equal bits for any seed, and leaves torch's generator as it
    was."""
    model, tokens, cuts = subject.evaluated()
    first, second = (run(model, tokens, cuts=cuts, seed=seed)[0] for seed in (1, 2))
    drawn = not torch.equal(torch.get_rng_state(), seed_cpu(2).get_state())
    lines = differences("eval, with another seed", first, second, tolerance=EXACT)
    yield from lines
    if drawn and not lines:
        yield "eval: a forward draws numbers from torch's generator"


def check_tables(subject: Subject) -> Verdict:
    """Check that one byte gives no more rows of a table a gradient than ``tables`` declares."""
    model = subject.build()
    owners = [(name, sublayer) for name, sublayer in model.sublayers() if sublayer.tables]
    for draw in range(3 if owners else 0):
        model.zero_grad()
        logits = model(subject.random_bytes(length=1, seed=draw)[:1]).logits
        (logits * torch.randn(logits.shape, dtype=logits.dtype)).sum().backward()
        for name, sublayer in owners:
            for table, n_rows in sublayer.tables.items():
                parameter = getattr(sublayer, table)
                users = sum(any(p is parameter for p in other.parameters()) for _, other in owners)
                if parameter.grad is None:
                    gradient = parameter.new_zeros(1, 1)
                else:
                    gradient = parameter.grad.to_dense()
                if (read := gradient.any(1).sum().item()) > n_rows * users:
                    yield (
                        f"{name}: one byte reads {read} rows of {table}, but tables declares "
                        f"{n_rows}"
                    )
                    return


def check_auxiliary_loss(subject: Subject) -> Verdict:
    model = subject.build()
    tokens = subject.random_bytes()
    eval_loss = model(tokens).loss
    train_loss = model.train()(tokens).loss
    if eval_loss != 0:
        yield f"eval: {eval_loss.item():.2g} nats"
    if train_loss.dim() or not train_loss.isfinite() or train_loss < 0:
        yield f"train: {train_loss.tolist()} is not a finite scalar of at least 0"


def check_statistics(subject: Subject) -> Verdict:
    """Check that statistics change no output, add over segments and streams, and give finite
    metrics."""
    model = subject.build()
    tokens = subject.random_bytes()
    cut = subject.span + 2
    out = model(tokens, collect_stats=True)
    yield from differences(
        "eval, collect_stats", {"logits": model(tokens).logits}, {"logits": out.logits}
    )
    attached = [
        name for name, stats in out.stats.items() if any(t.requires_grad for t in stats.values())
    ]
    yield from (f"eval: statistics of {name} have a gradient" for name in attached)

    def sums(out) -> Outputs:
        return {
            f"{name}.{key}": t.double()
            for name, stats in out.stats.items()
            for key, t in stats.items()
        }

    first = model(tokens[:, :cut], collect_stats=True)
    rest = model(tokens[:, cut:], first.state, collect_stats=True)
    streams = [model(part, collect_stats=True) for part in (tokens[:1], tokens[1:])]
    splits = {
        "segments": (f"bytes before and from {cut}", (first, rest)),
        "streams_apart": ("stream 0 and the others", streams),
    }
    for limit, (case, parts) in splits.items():
        if limit in subject.limits:
            continue
        a, b = map(sums, parts)
        for name, total in sums(out).items():
            if not torch.allclose(a[name] + b[name], total, rtol=1e-9, atol=1e-9):
                yield (
                    f"eval, {case}: {name} is off by "
                    f"{(a[name] + b[name] - total).abs().max():.2g} from the whole"
                )
    model.metrics({})
    metrics = {
        name: torch.as_tensor(value, dtype=torch.float64)
        for name, value in model.metrics(out.stats).items()
    }
    yield from (
        f"eval: metric {name} is {x.tolist()}"
        for name, x in metrics.items()
        if not x.isfinite().all()
    )


def check_autocast(subject: Subject) -> Verdict:
    """Check that outputs and gradients in bfloat16 are finite, and outputs in float32 from the
    resulting state."""
    model = subject.build(dtype=torch.float32, mode="train")
    tokens = subject.random_bytes()
    with torch.autocast("cpu", torch.bfloat16):
        state = yield from _training_step(model, tokens, case="train")
    out = model.eval()(tokens, state)
    yield from non_finite("eval, float32 after bfloat16", {"logits": out.logits})


def check_large_weights(subject: Subject) -> Verdict:
    """Check float32 with large matrices, with which the exp of some scores is 0 or infinite."""
    for seed in (0, 1):
        model = subject.build(seed=seed, dtype=torch.float32, mode="train")
        enlarge_matrices(model)
        yield from _training_step(
            model, subject.random_bytes(), case=f"train, matrices {MATRIX_FACTOR} times as large"
        )


def _training_step(model: nn.Module, tokens: Tensor, *, case: str) -> Generator[str, None, State]:
    """Yield a line for each output or gradient of two segments that is not finite; return the
    state after them."""
    first = model(tokens)
    second = model(tokens, first.state)
    outputs = {"logits": first.logits, "logits of a second segment": second.logits}
    (
        sum(logits.float().mean() for logits in outputs.values()) + first.loss + second.loss
    ).backward()
    yield from non_finite(case, outputs)
    for name, gradient in gradients_of(model).items():
        if not gradient.isfinite().all():
            yield f"{case}: the gradient of {name} is not finite"
    return second.state


def check_flops(subject: Subject) -> Verdict:
    model = subject.build()
    span = subject.span
    if not isinstance(ideal := model.ideal_flops(), int) or ideal <= 0:
        yield f"ideal FLOPs must be a positive int: {ideal!r}"
    for name, sublayer in model.sublayers():
        steps = [(sublayer.period, 2 * span), (1, 0), (span + 2, 0), (span + 2, span)]
        needed = [sublayer.needed_flops(segment, carried=carried) for segment, carried in steps]
        if needed == [None] * len(steps):
            continue  # the harness estimates three times the ideal FLOPs
        if not all(isinstance(n, NeededFlops) and 0 <= min(n) <= max(n) < math.inf for n in needed):
            yield f"{name}: needed_flops must return NeededFlops of 0 or more: {needed}"
        elif needed[0].forward < sublayer.ideal_flops() - 1:  # ideal FLOPs are rounded
            yield (
                f"{name}: {needed[0].forward:,.0f} needed after a full past, below "
                f"{sublayer.ideal_flops():,} ideal"
            )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in _tensors(model).items()}


def _changed(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that have changed in any bit."""
    return [
        name
        for name, t in _tensors(model).items()
        if name in before and not torch.equal(t, before[name])
    ]


FIRST = (
    ("a forward pass changes no buffer", None, check_side_effects),
    ("evaluation draws no random numbers", None, check_random_numbers),
    ("a saved and loaded model is the same model", None, check_saving),
)
"""Promises that all other checks rely on; with ``numerics.STREAMS``."""
TRUTH = (
    ("logits are float32 [B, T, V] and finite", None, check_logits),
    ("declared limits are known", None, check_limits),
    ("state is detached, and its dimension 0 is streams", None, check_state),
    ("two models share no tensor", None, check_sharing),
    ("project_ is idempotent; outputs stay finite, also from old states", None, check_projection),
    ("the auxiliary loss is for training only", None, check_auxiliary_loss),
    ("statistics add up", None, check_statistics),
    ("ideal_flops() is a positive int, and needed_flops().forward is no less", None, check_flops),
    ("tables declare the rows that a byte reads", None, check_tables),
)
"""Promises on which a row's numbers depend."""
CHECKS = (
    *TRUTH,
    ("bytes influence logits", None, check_influence),
    ("attention maps are weights of visible bytes", None, check_maps),
    ("a stream may start at 10**7", None, check_far_start),
    ("bfloat16 autocast is finite", None, check_autocast),
    ("large weights give finite numbers", None, check_large_weights),
)
"""Triples of a promise, the limit that excuses a model from it or None, and the check."""
