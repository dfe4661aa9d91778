"""Fixture of the conformance suite: the model under test, its outputs sublayer by sublayer, and how they differ."""

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from variants.contract import State, Sublayer, SublayerOutput

MODES = ("eval", "train")
Verdict = Generator[str, None, str | None]
"""Yields a line for each broken promise; may return what to say if there is none."""
Outputs = dict[str, Tensor]
"""Each sublayer's y ``[B, T, D]`` by name, in order of execution, then the logits ``[B, T, V]``."""


@dataclass(frozen=True)
class Subject:
    """The model that is checked, and its inputs.

    ``during``: mode and bytes of the forward pass that now runs in any model built here; empty when it has ended.
    ``streams``: numbers of streams in large batches. ``sizes``: those of a run, or none for small ones.
    """

    make_model: Callable[[], nn.Module]
    span: int
    vocabulary: int
    streams: tuple[int, ...] = (17,)
    sizes: tuple = ()
    during: list[str] = field(default_factory=list)

    @cached_property
    def declared(self) -> dict[str, Sublayer]:
        """Sublayers of one model by name, in order of execution, whose declarations are read."""
        return dict(self.make_model().sublayers())

    @cached_property
    def limits(self) -> frozenset[str]:
        return frozenset().union(*(sublayer.limits for sublayer in self.declared.values()))

    @cached_property
    def period(self) -> int:
        return max(1, *(sublayer.period for sublayer in self.declared.values()))

    @property
    def length(self) -> int:
        """Bytes per stream: more than two windows and more than six periods."""
        return max(2 * self.span, 6 * self.period) + 5

    def build(self, *, seed: int = 0, dtype: torch.dtype = torch.float64, mode: str = "eval") -> nn.Module:
        """A model in a mode, its parameters moved off their initial values."""
        seed_cpu(seed)
        model = move(self.make_model().to(dtype)).train(mode == "train")
        model.register_forward_pre_hook(self._enters)
        model.register_forward_hook(lambda *_: self.during.clear())
        return model

    def _enters(self, model: nn.Module, arguments: tuple) -> None:
        tokens, state = (*arguments, None)[:2]
        first = 0 if state is None else state[0].min().item()
        last, mode = first + tokens.shape[1] - 1, MODES[model.training]
        self.during[:] = [f"{mode}, byte {first}" + (f" to {last}" if last > first else "")]

    def bytes(self, *, length: int | None = None, seed: int = 0, streams: int = 3) -> Tensor:
        """Random bytes ``[streams, length]``."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.vocabulary, (streams, length or self.length), generator=generator)

    def other(self, tokens: Tensor) -> Tensor:
        return (tokens + self.vocabulary // 2) % self.vocabulary

    def change(self, tokens: Tensor, at: int) -> Tensor:
        return torch.where(torch.arange(tokens.shape[1]) == at, self.other(tokens), tokens)

    def modes(self) -> Iterator[tuple[str, nn.Module, Callable[[], AbstractContextManager]]]:
        """Each mode, a model in it, and a context in which no random number is drawn."""
        return ((mode, self.build(mode=mode), still) for mode, still in self.still.items())

    @cached_property
    def still(self) -> dict[str, Callable[[], AbstractContextManager]]:
        """For each mode, a context in which a forward pass draws no random number: ``nullcontext`` (quick) if possible.
        ``train`` is left out if training draws random numbers other than dropout's."""
        model, tokens = self.build(mode="train"), self.bytes()
        run(model, tokens, seed=1)
        if torch.equal(torch.get_rng_state(), seed_cpu(1).get_state()):
            return dict.fromkeys(MODES, nullcontext)
        with NoDropout():
            moved = differs("", *(run(model, tokens, seed=seed)[0] for seed in (1, 2)))
        return {"eval": nullcontext} | ({} if moved else {"train": NoDropout})


def seed_cpu(seed: int) -> torch.Generator:
    """The CPU's seeded generator. ``torch.manual_seed`` formats a stack per device kind: slower than a forward pass."""
    return torch.default_generator.manual_seed(seed)


@torch.no_grad()
def move(model: nn.Module) -> nn.Module:
    """The same model, its parameters moved off their initial values: a matrix of zeros would hide what is behind it."""
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape))  # float32: the same in any precision, and quick
    model.project_()
    return model


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """All gradients that exist, dense, by the name of the parameter."""
    return {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}


class NoDropout(TorchDispatchMode):
    """Replaces Bernoulli draws by their expected value: dropout multiplies by 1, so training compares across cuts."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def run(
    model: nn.Module, tokens: Tensor, *, cuts: tuple[int, ...] = (), state: State = None, seed: int = 0
) -> tuple[Outputs, State]:
    """Outputs over ``tokens [B, T]`` in segments ending at ``cuts``, and the last state; ``seed`` is dropout's."""
    seed_cpu(seed)
    pieces: list[Outputs] = []

    def listen(name: str, module: Sublayer, inputs: tuple, out: SublayerOutput) -> None:
        if out.y.shape != inputs[0].shape:
            raise ValueError(f"{name} maps {tuple(inputs[0].shape)} to {tuple(out.y.shape)}")
        pieces[-1][name] = out.y

    hooks = [sublayer.register_forward_hook(partial(listen, name)) for name, sublayer in model.sublayers()]
    try:
        for begin, end in zip((0, *cuts), (*cuts, tokens.shape[1]), strict=True):
            pieces.append({})
            pieces[-1]["logits"], state, *_ = model(tokens[:, begin:end], state)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.cat([piece[name] for piece in pieces], dim=1) for name in pieces[0]}, state


def differs(case: str, expected: Outputs, actual: Outputs, *, tolerance: float | None = None) -> list[str]:
    """A line for the first output that differs, with its name and the size and place of the difference; else none.

    Args:
        case: what was done, which begins the line.
        tolerance: relative to the largest entry where that is above 1; None means rounding of the output's type.
    """
    for name, a in expected.items():
        b = actual[name]
        if a.shape != b.shape:
            return [f"{case}: {name} is {tuple(b.shape)} instead of {tuple(a.shape)}"]
        if torch.equal(a, b):
            continue
        allowed = tolerance or (1e-9 if a.dtype == torch.float64 else 1e-5)
        sizes = (a - b).abs().nan_to_num(math.inf).flatten(2).amax(-1)  # [B, T]
        if sizes.max() > allowed * a.abs().nan_to_num(0, 0, 0).max().clamp(min=1):
            hint = ", as rounding in float32 would" if sizes.max() < 1e-5 else ""
            return [f"{case}: {name} moved by {sizes.max().item():.2g} at {place_of(sizes)}{hint}"]
    return []


def pick(outputs: Outputs, index: slice | list[int]) -> Outputs:
    return {name: y[index] for name, y in outputs.items()}


def infinite(case: str, outputs: Outputs) -> list[str]:
    """A line for each output with an entry that is not finite: how many bytes have one, and the first of them."""
    bad = {name: ~y.isfinite().flatten(2).all(-1) for name, y in outputs.items()}  # [B, T]
    line = "{}: {} is not finite at {} ({} of {} bytes)"
    return [line.format(case, n, place_of(b.int()), b.sum(), b.numel()) for n, b in bad.items() if b.any()]


def place_of(sizes: Tensor) -> str:
    """Byte and stream of the largest of ``sizes [B, T]``, of the first one if there are several."""
    stream, byte = divmod(sizes.argmax().item(), sizes.shape[1])
    return f"byte {byte} of stream {stream}"


def leaves(state: State) -> list[Tensor]:
    return [x for x in tree_leaves(state) if isinstance(x, Tensor)]


def restricted(model: nn.Module) -> list[nn.Parameter]:
    """All parameters of the sublayers that define ``project_``, each once."""
    sublayers = (s for _, s in model.sublayers() if type(s).project_ is not Sublayer.project_)
    return list(dict.fromkeys(p for sublayer in sublayers for p in sublayer.parameters()))


@torch.no_grad()
def push(model: nn.Module, size: float) -> nn.Module:
    """The same model; parameters that are ``restricted`` get ``size`` times normal noise and are projected."""
    generator = torch.Generator().manual_seed(0)
    for parameter in restricted(model):
        parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    model.project_()
    return model


@torch.no_grad()
def open_(model: nn.Module, low: float, high: float) -> nn.Module:
    """The same model. Parameters that ``project_`` keeps between two ends are spread over the share ``low`` to ``high``
    of the way, both included, in random order. Those it keeps on one side of an end are moved away from it."""
    parameters = restricted(model)
    before, ends = [p.clone() for p in parameters], []
    for far in (-1e3, 1e3):
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value + far)
        model.project_()
        ends.append([(p.clone(), p == value + far) for p, value in zip(parameters, before, strict=True)])
    for parameter, value, (least, free_below), (most, free_above) in zip(parameters, before, *ends, strict=True):
        share = torch.rand(value.numel())
        if len(share) > 1:
            share[0], share[-1] = 0, 1
        share = low + (high - low) * share[torch.randperm(len(share))]
        bounded = torch.lerp(least, most, share.view(value.shape).to(value))
        bounded = torch.where(free_above, value.maximum(least + 0.1), bounded)
        parameter.copy_(torch.where(free_below, torch.where(free_above, value, value.minimum(most - 0.1)), bounded))
    model.project_()
    return model
