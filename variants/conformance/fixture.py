"""Fixture of the conformance suite: the model under test, its outputs sublayer by sublayer, and how they differ."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from variants.contract import State, Sublayer, SublayerOutput

Verdict = tuple[list[str], str]
"""One line for each break, and what to say where there is none."""
Outputs = dict[str, Tensor]
"""Each sublayer's y ``[B, T, D]`` by name, in order of execution, then the logits ``[B, T, V]``."""


@dataclass(frozen=True)
class Subject:
    """The model that is checked, and what it is fed.

    ``during`` is where a forward pass of any model built here stands: mode and bytes, or nothing when it has ended; ``kept``
    is what several promises look at. ``streams``: numbers of streams that large batches have.
    """

    make_model: Callable[[], nn.Module]
    span: int
    vocabulary: int
    streams: tuple[int, ...] = (17,)
    during: list[str] = field(default_factory=list)
    kept: dict = field(default_factory=dict)

    @cached_property
    def declared(self) -> dict[str, Sublayer]:
        """A model's sublayers by name, in order of execution, for what they say of themselves."""
        return dict(self.make_model().sublayers())

    @cached_property
    def period(self) -> int:
        """Bytes after which what the model does repeats."""
        return max(1, *(sublayer.period for sublayer in self.declared.values()))

    @property
    def length(self) -> int:
        """Bytes a stream: more than two windows, and than six periods."""
        return max(2 * self.span, 6 * self.period) + 5

    def limits(self) -> frozenset[str]:
        """What the model's sublayers say they cannot promise."""
        return frozenset().union(*(sublayer.limits for sublayer in self.declared.values()))

    def build(self, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
        """A model in evaluation mode, its parameters off their start."""
        torch.manual_seed(seed)
        model = move(self.make_model().to(dtype).eval())
        model.register_forward_pre_hook(self._enters)
        model.register_forward_hook(lambda *_: self.during.clear())
        return model

    def _enters(self, model: nn.Module, given: tuple) -> None:
        tokens, state = (*given, None)[:2]
        first = 0 if state is None else state[0].min().item()
        last, mode = first + tokens.shape[1] - 1, "train" if model.training else "eval"
        self.during[:] = [f"{mode}, byte {first}" + (f" to {last}" if last > first else "")]

    def bytes(self, *, length: int | None = None, seed: int = 0, streams: int = 3) -> Tensor:
        """Random bytes ``[streams, length]``."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.vocabulary, (streams, length or self.length), generator=generator)

    def other(self, tokens: Tensor) -> Tensor:
        """Another byte in place of each."""
        return (tokens + self.vocabulary // 2) % self.vocabulary

    def change(self, tokens: Tensor, at: int) -> Tensor:
        """Another byte at one place of all streams."""
        return torch.cat([tokens[:, :at], self.other(tokens[:, at : at + 1]), tokens[:, at + 1 :]], dim=1)

    def modes(self) -> Iterator[tuple[str, nn.Module, Callable[[], AbstractContextManager]]]:
        """The model in evaluation mode, and in training mode where that draws no random numbers but dropout's.

        The third is a context in which nothing is drawn: one that does nothing, which is quick, where none is needed.
        """
        yield "eval", self.build(), nullcontext
        if "still" not in self.kept:
            self.kept["still"] = self._still()
        if self.kept["still"] is not None:
            yield "train", self.build().train(), self.kept["still"]

    def _still(self) -> Callable[[], AbstractContextManager] | None:
        """In what training draws nothing; None if it does even without dropout."""
        model, tokens = self.build().train(), self.bytes()
        run(model, tokens, seed=1)
        if torch.equal(torch.get_rng_state(), torch.manual_seed(1).get_state()):
            return nullcontext
        with NoDropout():
            moved = differs("", *(run(model, tokens, seed=seed)[0] for seed in (1, 2)))
        return None if moved else NoDropout


@torch.no_grad()
def move(model: nn.Module) -> nn.Module:
    """The same model, its parameters off their start: what starts at zero would hide what is behind it."""
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape))  # float32: the same in any precision, and quick
    model.project_()
    return model


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that are there, dense, by the parameter's name."""
    return {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}


class NoDropout(TorchDispatchMode):
    """Every coin shows its expected value, so that dropout multiplies by 1 and training mode compares across cuts."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        return function(*args, **(kwargs or {}))


def run(
    model: nn.Module,
    tokens: Tensor,
    *,
    cuts: tuple[int, ...] = (),
    state: State = None,
    seed: int = 0,
    gradients: bool = False,
) -> tuple[Outputs, State]:
    """Outputs over ``tokens [B, T]``, fed in segments that end at ``cuts``, and the state after; ``seed`` is dropout's."""
    torch.manual_seed(seed)
    pieces: list[Outputs] = []

    def listen(name: str, module: Sublayer, inputs: tuple, out: SublayerOutput) -> None:
        if out.y.shape != inputs[0].shape:
            raise ValueError(f"{name} maps {tuple(inputs[0].shape)} to {tuple(out.y.shape)}")
        pieces[-1][name] = out.y

    hooks = [sublayer.register_forward_hook(partial(listen, name)) for name, sublayer in model.sublayers()]
    try:
        for begin, end in zip((0, *cuts), (*cuts, tokens.shape[1]), strict=True):
            pieces.append({})
            with torch.set_grad_enabled(gradients):
                out = model(tokens[:, begin:end], state)
            pieces[-1]["logits"], state = out.logits, out.state
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.cat([piece[name] for piece in pieces], dim=1) for name in pieces[0]}, state


def differs(case: str, expected: Outputs, found: Outputs, *, tolerance: float | None = None) -> list[str]:
    """A line for the first output that differs, with its name, size and place; none where none does.

    Args:
        case: what was done, which begins the line.
        tolerance: relative to the largest entry where that is above 1; None means rounding of the output's type.
    """
    for name, a in expected.items():
        b = found[name]
        if a.shape != b.shape:
            return [f"{case}: {name} is {tuple(b.shape)} instead of {tuple(a.shape)}"]
        allowed = tolerance or (1e-9 if a.dtype == torch.float64 else 1e-5)
        sizes = (a - b).abs().nan_to_num(math.inf).flatten(2).amax(-1)  # [B, T]
        if sizes.numel() and sizes.max() > allowed * a.abs().nan_to_num(0, 0, 0).max().clamp(min=1):
            size = sizes.max().item()
            hint = ", as rounding in float32 would" if size < 1e-5 else ""
            return [f"{case}: {name} moved by {size:.2g} at {place_of(sizes)}{hint}"]
    return []


def pick(outputs: Outputs, index: slice | list[int]) -> Outputs:
    """Some streams of every output."""
    return {name: y[index] for name, y in outputs.items()}


def infinite(case: str, outputs: Outputs) -> list[str]:
    """A line for each output with an entry that is not finite: how many bytes have one, and the first of them."""
    lines = []
    for name, y in outputs.items():
        bad = ~y.isfinite().flatten(2).all(-1)  # [B, T]
        if bad.any():
            lines.append(f"{case}: {name} is not finite at {place_of(bad.int())} ({bad.sum()} of {bad.numel()} bytes)")
    return lines


def place_of(sizes: Tensor) -> str:
    """Where the first of the largest of ``sizes [B, T]`` stands."""
    stream, byte = divmod(sizes.argmax().item(), sizes.shape[1])
    return f"byte {byte} of stream {stream}"


def leaves(state: State) -> list[Tensor]:
    """All tensors of a state."""
    if isinstance(state, tuple):
        return [tensor for part in state for tensor in leaves(part)]
    return [] if state is None else [state]


@torch.no_grad()
def push(model: nn.Module, size: float) -> list[str]:
    """Move the parameters of all sublayers that have a ``project_`` by ``size``, then project; the sublayers' names."""
    ranged = _ranged(model)
    generator = torch.Generator().manual_seed(0)
    for parameter in {p: None for _, sublayer in ranged for p in sublayer.parameters()}:
        parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    model.project_()
    return [name for name, _ in ranged]


@torch.no_grad()
def open_(model: nn.Module, low: float, high: float) -> nn.Module:
    """The same model; what ``project_`` keeps between two ends is drawn from that share of the way, and what it keeps on one
    side of an end stands off it."""
    before = {p: p.clone() for _, sublayer in _ranged(model) for p in sublayer.parameters()}
    ends = []
    for far in (-1e3, 1e3):
        for parameter, value in before.items():
            parameter.copy_(value + far)
        model.project_()
        ends.append([(p.clone(), p == value + far) for p, value in before.items()])
    for (parameter, value), (least, free_below), (most, free_above) in zip(before.items(), *ends, strict=True):
        share = low + (high - low) * torch.rand(value.shape)
        bounded = torch.where(free_above, value.maximum(least + 0.1), least + share * (most - least))
        parameter.copy_(torch.where(free_below, torch.where(free_above, value, value.minimum(most - 0.1)), bounded))
    model.project_()
    return model


def _ranged(model: nn.Module) -> list[tuple[str, Sublayer]]:
    """The sublayers that restrict their parameters, by name."""
    return [(name, s) for name, s in model.sublayers() if type(s).project_ is not Sublayer.project_]
