"""Fixture of the conformance suite: the model under test, its outputs sublayer by sublayer, and
their differences."""

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from variants.contract import State, Sublayer, SublayerOutput

MODES = ("eval", "train")
EXACT = 1e-300  # a tolerance that equal bits pass
MOVED = "{case}: {name} moved by {size:.2g} at byte {byte} of stream {stream}"
MATRIX_FACTOR = 10  # by which checks of large weights multiply matrices
Verdict = Generator[str, None, str | None]
"""A running check: it yields a line for each broken promise, and may return a detail to print if
none is broken."""
Outputs = dict[str, Tensor]
"""Each sublayer's y ``[B, T, D]`` by name, in order of execution, then the logits ``[B, T, V]``."""


@dataclass(frozen=True)
class Subject:
    """The model under test, and its inputs."""

    make_model: Callable[[], nn.Module]
    span: int  # positions that a query may see
    vocabulary: int
    batch_sizes: tuple[int, ...] = (17,)  # numbers of streams in large batches
    sizes: tuple = ()  # the sizes of a run; empty to check at small sizes
    text: Tensor | None = None  # bytes of the run's corpus ``[n]``; None for the bytes of this file
    forward_pass: list[str] = field(default_factory=list)
    """Mode and bytes of the forward pass that a model of this subject is running; empty between
    passes."""

    @cached_property
    def sublayers(self) -> dict[str, Sublayer]:
        """Sublayers of one model by name, in order of execution. Checks read their declarations."""
        return dict(self.make_model().sublayers())

    @cached_property
    def limits(self) -> frozenset[str]:
        return frozenset().union(*(sublayer.limits for sublayer in self.sublayers.values()))

    @cached_property
    def period(self) -> int:
        return max(1, *(sublayer.period for sublayer in self.sublayers.values()))

    @property
    def length(self) -> int:
        """Bytes per stream: more than two windows and more than six periods."""
        return max(2 * self.span, 6 * self.period) + 5

    def build(
        self, *, seed: int = 0, dtype: torch.dtype = torch.float64, mode: str = "eval"
    ) -> nn.Module:
        """Build a model in ``mode``, with its parameters perturbed."""
        seed_cpu(seed)
        model = perturb(self.make_model().to(dtype)).train(mode == "train")
        model.register_forward_pre_hook(self._describe_forward)
        model.register_forward_hook(lambda *_: self.forward_pass.clear())
        return model

    def _describe_forward(self, model: nn.Module, arguments: tuple) -> None:
        tokens, state = (*arguments, None)[:2]
        first = 0
        if state is not None:
            first = state[0].min().item()
        last = first + tokens.shape[1] - 1
        mode = MODES[model.training]
        self.forward_pass[:] = [f"{mode}, byte {first}" + (f" to {last}" if last > first else "")]

    def random_bytes(self, *, length: int | None = None, seed: int = 0, streams: int = 3) -> Tensor:
        """Return random bytes ``[streams, length]``."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.vocabulary, (streams, length or self.length), generator=generator)

    def mixed_bytes(self, *, length: int, streams: int, seed: int) -> Tensor:
        """Return bytes ``[streams, length]``: uniform ones, and in every second stream those of
        ``text``, from a random place on. In text, unlike in uniform bytes, words and letters
        repeat."""
        tokens = self.random_bytes(length=length, streams=streams, seed=seed)
        text = self.text
        if text is None:
            text = torch.tensor(list(Path(__file__).read_bytes()))
        places = torch.randint(
            len(text), (streams, 1), generator=torch.Generator().manual_seed(seed)
        )
        excerpts = text[(places + torch.arange(length)) % len(text)].long() % self.vocabulary
        return torch.where(torch.arange(streams)[:, None] % 2 == 1, excerpts, tokens)

    def evaluated(self) -> tuple[nn.Module, Tensor, tuple[int, ...]]:
        """Return a model, random bytes of a segment of each length that the run evaluates, and
        where to cut them; or of two small segments. At the sizes of a run the model is in float32,
        which is faster."""
        lengths = {size.segment: None for size in self.sizes if size.mode == "eval"}
        lengths = [*lengths] or [self.span + 2] * 2
        model = self.build(dtype=torch.float32 if self.sizes else torch.float64)
        tokens = self.random_bytes(length=sum(lengths), streams=2)
        return model, tokens, tuple(accumulate(lengths[:-1]))

    def change_all(self, tokens: Tensor) -> Tensor:
        """Replace every byte by another one."""
        return (tokens + self.vocabulary // 2) % self.vocabulary

    def deterministic_models(
        self,
    ) -> Iterator[tuple[str, nn.Module, Callable[[], AbstractContextManager]]]:
        """Return each mode, a model in it, and a context in which the model draws no random
        number."""
        return (
            (mode, self.build(mode=mode), context)
            for mode, context in self.deterministic_contexts.items()
        )

    @cached_property
    def deterministic_contexts(self) -> dict[str, Callable[[], AbstractContextManager]]:
        """By mode, a context in which a forward pass draws no random number: ``nullcontext`` if the
        pass draws none. ``train`` is missing if training draws random numbers other than those
        of dropout."""
        model = self.build(mode="train")
        tokens = self.random_bytes()
        run(model, tokens, seed=1)
        if torch.equal(torch.get_rng_state(), seed_cpu(1).get_state()):
            return dict.fromkeys(MODES, nullcontext)
        with NoDropout():
            random = differences("", *(run(model, tokens, seed=seed)[0] for seed in (1, 2)))
        contexts = {"eval": nullcontext, "train": NoDropout}
        if random:
            return {"eval": nullcontext}
        return contexts


def seed_cpu(seed: int) -> torch.Generator:
    """Seed the CPU's generator and return it. ``torch.manual_seed`` formats a stack trace for each
    type of device, which takes longer than a forward pass."""
    return torch.default_generator.manual_seed(seed)


@torch.no_grad()
def perturb(model: nn.Module) -> nn.Module:
    """Add noise to all parameters and return the model: a matrix of zeros would hide the
    computation before it."""
    for parameter in model.parameters():
        # float32 noise is equal for any precision of the model
        parameter.add_(0.1 * torch.randn(parameter.shape))
    model.project_()
    return model


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return all gradients that exist, dense, by the name of the parameter."""
    return {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}


class NoDropout(TorchDispatchMode):
    """Replace Bernoulli draws by their mean. Dropout then multiplies by 1, so training is equal
    for any segments."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        return function(*args, **(kwargs or {}))


class CountElements(TorchDispatchMode):
    """Count the elements in the outputs of all operations, a measure of work that is equal on all
    machines."""

    elements = 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        self.elements += sum(
            leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)
        )
        return output


class Rounded(TorchDispatchMode):
    """Round the outputs of all operations to a precision, and keep their type."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if not getattr(function, "is_view", False):
            for leaf in tree_leaves(output):
                if (
                    isinstance(leaf, Tensor)
                    and leaf.is_floating_point()
                    and leaf.layout == torch.strided
                ):
                    leaf.copy_(leaf.to(self.dtype))
        return output


@torch.no_grad()
def enlarge_matrices(model: nn.Module) -> None:
    """Multiply all matrices of sublayers by ``MATRIX_FACTOR``."""
    for parameter in {p: None for _, sublayer in model.sublayers() for p in sublayer.parameters()}:
        parameter.mul_(MATRIX_FACTOR if parameter.dim() > 1 else 1)
    model.project_()


def run(
    model: nn.Module,
    tokens: Tensor,
    *,
    cuts: tuple[int, ...] = (),
    state: State = None,
    seed: int = 0,
    gradients: bool = False,
) -> tuple[Outputs, State]:
    """Return outputs over ``tokens [B, T]`` in segments that end at ``cuts``, and the last state;
    ``seed`` is for dropout. With ``gradients`` the passes record them, as those of a training
    step do."""
    seed_cpu(seed)
    pieces: list[Outputs] = []

    def record(name: str, module: Sublayer, inputs: tuple, out: SublayerOutput) -> None:
        if out.y.shape != inputs[0].shape:
            raise ValueError(f"{name} maps {tuple(inputs[0].shape)} to {tuple(out.y.shape)}")
        pieces[-1][name] = out.y.detach()

    hooks = [
        sublayer.register_forward_hook(partial(record, name))
        for name, sublayer in model.sublayers()
    ]
    try:
        with torch.set_grad_enabled(gradients):
            for begin, end in zip((0, *cuts), (*cuts, tokens.shape[1]), strict=True):
                pieces.append({})
                logits, state, *_ = model(tokens[:, begin:end], state)
                pieces[-1]["logits"] = logits.detach()
    finally:
        for hook in hooks:
            hook.remove()
    if len(pieces) == 1:
        return pieces[0], state
    return {name: torch.cat([piece[name] for piece in pieces], dim=1) for name in pieces[0]}, state


def run_changed(subject: Subject, places: Tensor) -> Iterator[tuple[Outputs, State]]:
    """Return outputs and last state of a model for random bytes, and for the same with other bytes
    at ``places [T]``."""
    model = subject.build()
    tokens = subject.random_bytes()
    changed = torch.where(places, subject.change_all(tokens), tokens)
    return (run(model, each) for each in (tokens, changed))


def differences(
    case: str,
    expected: Outputs,
    actual: Outputs,
    *,
    tolerance: float | None = None,
    line: str = MOVED,
) -> list[str]:
    """Return a list of one line about the first output that differs, with size and position of the
    difference; or empty.

    Args:
        case: describes the comparison; the line begins with it.
        tolerance: relative to the largest entry, or to 1 if that is larger; None for a default
            by dtype.
        line: the line, with places for the numbers of ``MOVED``."""
    for name, a in expected.items():
        b = actual[name]
        if a.shape != b.shape:
            return [f"{case}: {name} is {tuple(b.shape)} instead of {tuple(a.shape)}"]
        if torch.equal(a, b):
            continue
        allowed = tolerance or (1e-9 if a.dtype == torch.float64 else 1e-5)
        unchanged = (a == b) | (a.isnan() & b.isnan())
        # [B, T]
        sizes = (a - b).abs().nan_to_num(math.inf).masked_fill(unchanged, 0).flatten(2).amax(-1)
        if sizes.max() > allowed * a.abs().nan_to_num(0, 0, 0).max().clamp(min=1):
            hint = ""
            if sizes.max() < 1e-5:
                hint = ", as rounding in float32 would"
            stream, byte = divmod(sizes.argmax().item(), sizes.shape[1])
            size = sizes.max().item()
            text = line.format(case=case, name=name, size=size, byte=byte, stream=stream)
            return [text + hint]
    return []


def select_streams(outputs: Outputs, index: slice | list[int]) -> Outputs:
    return {name: y[index] for name, y in outputs.items()}


def non_finite(case: str, outputs: Outputs) -> list[str]:
    """Return a line for each output with an entry that is not finite: the first such byte, and
    their number."""
    masks = {name: ~y.isfinite().flatten(2).all(-1) for name, y in outputs.items()}  # [B, T]
    line = "{}: {} is not finite at {} ({} of {} bytes)"
    return [
        line.format(case, n, position_of_largest(m.int()), m.sum(), m.numel())
        for n, m in masks.items()
        if m.any()
    ]


def position_of_largest(sizes: Tensor) -> str:
    """Return byte and stream of the largest entry of ``sizes [B, T]``, or of the first one if there
    are several."""
    stream, byte = divmod(sizes.argmax().item(), sizes.shape[1])
    return f"byte {byte} of stream {stream}"


def state_tensors(state: State) -> list[Tensor]:
    return [x for x in tree_leaves(state) if isinstance(x, Tensor)]


def projected_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return all parameters of the sublayers that define ``project_``, each once."""
    sublayers = (s for _, s in model.sublayers() if type(s).project_ is not Sublayer.project_)
    return list(dict.fromkeys(p for sublayer in sublayers for p in sublayer.parameters()))


@torch.no_grad()
def spread_projected(model: nn.Module, low: float, high: float) -> nn.Module:
    """Spread the ``projected_parameters`` over their legal ranges, and return the model.

    A parameter that ``project_`` clamps at two ends gets values in random order from share ``low``
    to share ``high`` of its range, both included. A parameter that is clamped at one end moves
    away from that end."""
    parameters = projected_parameters(model)
    starts = [p.clone() for p in parameters]
    ends = []
    for shift in (-1e3, 1e3):
        for parameter, start in zip(parameters, starts, strict=True):
            parameter.copy_(start + shift)
        model.project_()
        ends.append(
            [(p.clone(), p == start + shift) for p, start in zip(parameters, starts, strict=True)]
        )
    for parameter, start, (least, free_below), (most, free_above) in zip(
        parameters, starts, *ends, strict=True
    ):
        share = torch.rand(start.numel())
        if len(share) > 1:
            share[0], share[-1] = 0, 1
        share = low + (high - low) * share[torch.randperm(len(share))]
        bounded = torch.lerp(least, most, share.view(start.shape).to(start))
        bounded = torch.where(free_above, start.maximum(least + 0.1), bounded)
        parameter.copy_(
            torch.where(
                free_below, torch.where(free_above, start, start.minimum(most - 0.1)), bounded
            )
        )
    model.project_()
    return model
