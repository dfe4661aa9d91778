"""The contract as runnable checks, for any variant: ours, another package's, or a single file's.

    for finding in check(make_model, span=13):
        print(finding)

A whole small model is checked, because that is what a configuration gives and what a user trusts. Differences are
looked for in every sublayer's output, in order of execution, and then in the logits: the first that differs is named.

- Everything runs in float64 on a CPU, so that a break is told from rounding. Work that a mechanism does in float32
  for safety must follow a float64 input (``torch.promote_types(x.dtype, torch.float32)``).
- Parameters are moved off their start before anything is checked: a matrix that starts at zero hides what is behind it.
- A declared limit (``Sublayer.limits``) must be real: then the check has to fail, and the finding says by how much.
- Whatever a model raises is a finding too.
"""

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from variants.contract import Out, Position, State, Sublayer, cat_streams, map_state

LIMITS = frozenset({"causal_in_training", "streams_apart", "segments"})
FAR = 10**7  # bytes into a stream: float32 angles of it are off by half a radian

Verdict = tuple[list[str], str]
"""One line for each break, and what to say where there is none."""
Outputs = dict[str, Tensor]
"""Each sublayer's y ``[B, T, D]`` by name, in order of execution, then the logits ``[B, T, V]``."""


@dataclass(frozen=True)
class Finding:
    """What became of one promise; ``detail`` names byte, mode and size of a break."""

    promise: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}  {self.promise}: {self.detail}"


@dataclass(frozen=True)
class Subject:
    """The model that is checked, and what it is fed."""

    make_model: Callable[[], nn.Module]
    span: int
    vocabulary: int
    seed: int

    @property
    def length(self) -> int:
        """Bytes a stream: more than two windows."""
        return 2 * self.span + 5

    @torch.no_grad()
    def build(self, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
        """A model in evaluation mode, its parameters off their start."""
        torch.manual_seed(self.seed + seed)
        model = self.make_model().to(dtype).eval()
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.project_()
        return model

    def bytes(self, *, length: int | None = None, seed: int = 0) -> Tensor:
        """Random bytes ``[3, length]``."""
        generator = torch.Generator().manual_seed(self.seed + seed)
        return torch.randint(self.vocabulary, (3, length or self.length), generator=generator)

    def other(self, tokens: Tensor) -> Tensor:
        """Another byte in place of each."""
        return (tokens + self.vocabulary // 2) % self.vocabulary


class _NoDropout(TorchDispatchMode):
    """Every coin shows its expected value, so that dropout multiplies by 1 and training mode compares across cuts."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def run(
    model: nn.Module, tokens: Tensor, *, cuts: tuple[int, ...] = (), state: State = None, seed: int = 0
) -> tuple[Outputs, State]:
    """Outputs over ``tokens [B, T]``, fed in segments that end at ``cuts``, and the state after.

    Args:
        seed: of dropout, once for all segments.
    """
    torch.manual_seed(seed)
    pieces: list[Outputs] = []

    def listen(name: str, module: Sublayer, inputs: tuple, out: Out) -> None:
        if out.y.shape != inputs[0].shape:
            raise ValueError(f"{name} maps {tuple(inputs[0].shape)} to {tuple(out.y.shape)}")
        pieces[-1][name] = out.y

    hooks = [sublayer.register_forward_hook(partial(listen, name)) for name, sublayer in model.sublayers()]
    try:
        for begin, end in zip((0, *cuts), (*cuts, tokens.shape[1]), strict=True):
            pieces.append({})
            out = model(tokens[:, begin:end], state)
            pieces[-1]["logits"], state = out.logits, out.state
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.cat([piece[name] for piece in pieces], dim=1) for name in pieces[0]}, state


def difference(expected: Outputs, found: Outputs, *, tolerance: float | None = None) -> str:
    """The first output that differs: name, size and place; empty where none does.

    Args:
        tolerance: relative to the largest entry where that is above 1; None means rounding of the output's type.
    """
    for name, a in expected.items():
        b = found[name]
        if a.shape != b.shape:
            return f"{name} is {tuple(b.shape)} instead of {tuple(a.shape)}"
        allowed = tolerance or (1e-9 if a.dtype == torch.float64 else 1e-5)
        sizes = (a - b).abs().nan_to_num(math.inf).flatten(2).amax(-1)  # [B, T]
        if sizes.numel() and sizes.max() > allowed * a.abs().nan_to_num(0, 0, 0).max().clamp(min=1):
            stream, byte = divmod(sizes.argmax().item(), sizes.shape[1])
            size = sizes.max().item()
            hint = ", as rounding in float32 would" if size < 1e-5 else ""
            return f"{name} moved by {size:.2g} at byte {byte} of stream {stream}{hint}"
    return ""


def pick(outputs: Outputs, index: slice | list[int] | tuple) -> Outputs:
    """Streams, or streams and bytes, of every output."""
    return {name: y[index] for name, y in outputs.items()}


def collect(*pairs: tuple[str, str]) -> list[str]:
    """Breaks as lines, from what was done and what it moved."""
    return [f"{done}: {moved}" for done, moved in pairs if moved]


def modes(subject: Subject) -> Iterator[tuple[str, nn.Module]]:
    """The model in evaluation mode, and in training mode where that draws no random numbers but dropout's."""
    yield "eval", subject.build()
    model = subject.build().train()
    tokens = subject.bytes()
    with _NoDropout():
        if not difference(run(model, tokens, seed=1)[0], run(model, tokens, seed=2)[0]):
            yield "train", model


def tensors(state: State) -> list[Tensor]:
    """All tensors of a state."""
    if isinstance(state, tuple):
        return [tensor for part in state for tensor in tensors(part)]
    return [] if state is None else [state]


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers."""
    return {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}


def changed(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """Names of what is no longer bit for bit as it was."""
    return [name for name, t in snapshot(model).items() if name in before and not torch.equal(t, before[name])]


def change(subject: Subject, tokens: Tensor, at: int) -> Tensor:
    """Another byte at one place of all streams."""
    return torch.cat([tokens[:, :at], subject.other(tokens[:, at : at + 1]), tokens[:, at + 1 :]], dim=1)


def infinite(outputs: Outputs) -> list[str]:
    """A line for each output with an entry that is not finite."""
    return [f"{name} is not finite" for name, y in outputs.items() if not y.isfinite().all()]


def limits_of(model: nn.Module) -> frozenset[str]:
    """What the model's sublayers say they cannot promise."""
    return frozenset().union(*(sublayer.limits for _, sublayer in model.sublayers()))


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
    if tensors(state[1]) and not moved[at + 1]:
        breaks.append(f"state is carried, yet byte {at} changed and the logits of byte {at + 1} did not")
    return breaks, f"byte {at} moved logits as far as byte {moved.nonzero().amax() if moved.any() else at}"


def segments(subject: Subject) -> Verdict:
    span, length = subject.span, subject.length
    tokens, breaks = subject.bytes(), []
    schemes = [(1,), (span + 2,), (length - 1,), (2, 3, span), tuple(range(3, length, max(2, span // 3)))]
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
    """A stream at 10**7, cut, against one at 0, whole, so that carried positions are compared too.

    float32 is judged by the median: a choice of the k best may fall otherwise for single bytes, drift moves them all.
    """
    tokens, breaks, start = subject.bytes(), [], FAR + torch.tensor([0, 1, 777])
    for dtype in (torch.float64, torch.float32):
        model = subject.build(dtype=dtype)
        absolute = sorted({type(m).__name__ for m in model.modules() if isinstance(m, Position) and not m.relative})
        cuts = () if "segments" in limits_of(model) else (subject.span + 2,)
        near, state = run(model, tokens)
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
        before, (outputs, _) = snapshot(model), run(model, tokens)
        model.project_()
        again, _ = run(model, tokens)
        lines = [*infinite(outputs), *(f"a second project_ changed {name}" for name in changed(model, before))]
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


CHECKS: list[tuple[str, str | None, Callable[[Subject], Verdict]]] = [
    ("logits are float32 [B, T, V] and finite", None, logits_shape),
    ("declared limits are known", None, known_limits),
    ("evaluation does not see the future", None, partial(causality, mode="eval")),
    ("training does not see the future", "causal_in_training", partial(causality, mode="train")),
    ("bytes have influence", None, influence),
    ("segments do not matter", "segments", segments),
    ("one byte at a time equals the whole", "segments", single_bytes),
    ("a stream may start at 10**7", None, far_start),
    ("streams do not mix", "streams_apart", streams),
    ("state is detached, and its dimension 0 is streams", None, detached_state),
    ("any earlier state is accepted", None, old_state),
    ("two models share nothing", None, apart),
    ("every parameter gets a gradient", None, gradients),
    ("project_ is legal and idempotent", None, projection),
    ("a saved model continues alike", None, saved),
    ("a forward pass writes nothing", None, writes),
    ("the auxiliary loss is for training only", None, auxiliary_loss),
    ("statistics add up", None, statistics),
    ("bfloat16 autocast is finite", None, autocast),
    ("ideal FLOPs are a positive int", None, ideal_flops),
]
"""Promise, the limit that excuses it, and its check."""


def check(make_model: Callable[[], nn.Module], *, span: int, vocabulary: int = 256, seed: int = 0) -> Iterator[Finding]:
    """Check all promises of the contract, one finding each, as they are found.

    Args:
        make_model: builds the model on the CPU, small, uncompiled, each time anew. The model is called as
            ``model(tokens int64 [B, T], state=None, look=False)`` and gives ``.logits [B, T, V]``, ``.state`` (stream
            positions int64 ``[B]``, then a tuple of one state a sublayer), ``.loss`` and ``.seen``; it has
            ``sublayers()``, ``project_()``, ``metrics(seen)`` and ``ideal_flops()``.
        span: positions that a query may see; streams are a little over twice as long.
        vocabulary: V, at least 2.
        seed: of parameters and bytes.
    """
    subject = Subject(make_model, span, vocabulary, seed)
    try:
        limits = limits_of(_apart_from_outside(subject.build))
    except Exception as error:
        yield Finding("the model can be built", False, _said(error))
        return
    for promise, limit, function in CHECKS:
        try:
            breaks, kept = _apart_from_outside(function, subject)
        except Exception as error:
            yield Finding(promise, False, _said(error))
            continue
        if limit not in limits:
            yield Finding(promise, not breaks, "; ".join(breaks[:3]) or kept)
        elif breaks:
            yield Finding(promise, True, f"limit {limit} is declared and real: {breaks[0]}")
        else:
            yield Finding(promise, False, f"limit {limit} is declared, but nothing broke: {kept}")


def learns(
    make_model: Callable[[], nn.Module],
    *,
    vocabulary: int = 256,
    steps: int = 150,
    seed: int = 0,
    below_bits: float = 0.1,
) -> Finding:
    """Train on a repeated string of seven different bytes, in float32 with AdamW, until ``below_bits`` a byte.

    Different bytes, so that a mechanism without a past can pass; scored in evaluation mode over two segments.
    """
    promise = "learns a repeated string"
    try:
        bits, taken = _apart_from_outside(_train, make_model, vocabulary, steps, seed, below_bits)
    except Exception as error:
        return Finding(promise, False, _said(error))
    return Finding(promise, bits < below_bits, f"{bits:.3f} bits per byte after {taken} steps")


def _train(make_model, vocabulary: int, steps: int, seed: int, below_bits: float) -> tuple[float, int]:
    torch.manual_seed(seed)
    string = torch.randperm(vocabulary)[:7]
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    bits = math.inf
    for step in range(1, steps + 1):
        places = torch.randint(len(string), (4, 1)) + torch.arange(33)
        window = string[places % len(string)]  # [4, 33]
        out = model.train()(window[:, :-1])
        (F.cross_entropy(out.logits.flatten(0, 1), window[:, 1:].flatten()) + out.loss).backward()
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()  # AdamW takes no other
        optimizer.step()
        optimizer.zero_grad()
        model.project_()
        if step % 25 == 0 or step == steps:
            logits = run(model.eval(), window[:, :-1], cuts=(16,))[0]["logits"]
            bits = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten()).item() / math.log(2)
            if bits < below_bits:
                break
    return bits, step


def _apart_from_outside(function: Callable, *arguments):
    """Leave the caller's random numbers as they were."""
    with torch.random.fork_rng(devices=[]):
        return function(*arguments)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
