"""Any module of an installed package as a sublayer, by YAML alone: what maps ``[B, T, D]`` to the same is a variant.

    y = module(x)                        x: normalised bytes of one segment; the harness adds y to the residual stream

The module is given nothing else. So it carries no state (each segment is all that it sees), has no positions but its own,
and its sizes (width, heads, dropout, a window) are its own keywords, which may be interpolated: ``${model.d_model}``. Which
promises it cannot keep, how far it sees, and which keyword takes a choice of the run, only a reader of its source knows: that is
said in the YAML, and ``python -m bench.check`` tests it. ``docs/any_module.md`` shows what it says of four packages.

No product but those of ``nn.Linear`` is known here, so ``ideal_flops`` is a floor, and ``needed_flops`` is not said.
"""

import functools
import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from variants.contract import LIMITS, Honours, LayerContext, State, Sublayer, SublayerOutput

FOLLOWED = ("attend_self", "span")
UNHEARD = {
    "position": "it is told no positions: those that it has are in its own keywords",
    "cache": "it carries nothing from segment to segment",
}
"""Choices of a run that a keyword can be given, and those that never reach a module."""


class AnyModule(Sublayer):
    """A module that knows nothing of the contract.

    Args:
        context: gives the choices that are honoured; widths and the rest are keywords of the module.
        module: makes the module: ``_target_``, of a package that the command line trusts, and keywords of its constructor.
        honours: which of the module's keywords is given a choice of the run, in place of what the YAML has there:
            ``{span: window}``, ``{attend_self: self}``, both, or ``{}``: it sees any past, and itself. None for a module that
            sees no byte but its own.
        limits: promises that it cannot keep, of ``LIMITS``; ``segments`` wherever it sees a past.
        reach: bytes back that its output can depend on its input, or None for all of the segment.
        period: bytes after which what it does repeats, such as a block.
        ideal_share: the least share of executed FLOPs that its matrices are, and, below a half, why.
    """

    def __init__(
        self,
        context: LayerContext,
        *,
        module: Callable[..., nn.Module],
        honours: dict[str, str] | None,
        limits: tuple[str, ...] = (),
        reach: int | None = None,
        period: int = 1,
        ideal_share: tuple[float, str] = Sublayer.ideal_share,
    ):
        super().__init__()
        given = _followed(honours or {}, getattr(module, "func", module))
        self.limits = _limits(limits)
        if honours is not None:
            self.honours = Honours(
                attend_self={True, False} if "attend_self" in given else {True}, span="span" in given
            )
        if honours is None and reach:
            raise ValueError(f"reach={reach}: with honours=null it sees no byte but its own; allowed are 0 and null")
        if reach is not None and reach < 0:
            raise ValueError(f"reach={reach}: allowed are integers from 0, or null for all of the segment")
        if period < 1:
            raise ValueError(f"period={period}: allowed are integers from 1")
        self.bytes_back, self.period, self.span, self.ideal_share = reach, period, context.span, ideal_share
        self.module = _built(functools.partial(module, **{own: getattr(context, name) for name, own in given.items()}))

    def forward(
        self, x: Tensor, state: State = None, start: Tensor | None = None, *, collect_stats: bool = False
    ) -> SublayerOutput:
        """``x [B, T, D]`` to the module's output, or the first where it gives several; keeps no state."""
        y = self.module(x)
        y = y[0] if isinstance(y, tuple | list) and y else y
        if not isinstance(y, Tensor) or y.shape != x.shape:
            what = tuple(y.shape) if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise ValueError(
                f"module={_name(type(self.module))}: maps {tuple(x.shape)} to {what}; allowed is a module that maps "
                "[B, T, D] to [B, T, D], or to a tuple that begins with it"
            )
        return SublayerOutput(y)

    def reach(self) -> int | None:
        return 0 if self.honours is None else self.bytes_back

    def set_span(self, span: int) -> None:
        if self.honours is not None and self.honours.span and span != self.span:
            raise ValueError(
                f"eval.span={span}: {_name(type(self.module))} keeps the span that it was built with, {self.span}"
            )


def _limits(names: tuple[str, ...]) -> frozenset[str]:
    if strange := [name for name in names if name not in LIMITS]:
        raise ValueError(
            f"limits={list(names)}: there is no limit {strange[0]}; allowed are {', '.join(sorted(LIMITS))}"
        )
    return frozenset(names)


def _followed(honours: Mapping[str, object], cls: Callable[..., nn.Module]) -> Mapping[str, str]:
    """The same, if each of its keywords is one of the module's."""
    named, others = _keywords(cls)
    for name, keyword in honours.items():
        if name not in FOLLOWED:
            why = f"a module cannot follow it, because {UNHEARD[name]}" if name in UNHEARD else "no such key"
            raise ValueError(f"honours.{name}={keyword}: {why}; allowed are {', '.join(FOLLOWED)}")
        if not isinstance(keyword, str) or (keyword not in named and not others):
            raise ValueError(
                f"honours.{name}={keyword}: must be the keyword of {_name(cls)} that is to be given model.{name}; "
                f"allowed are {', '.join(named) or 'none'}"
            )
    return honours


def _keywords(cls: Callable[..., nn.Module]) -> tuple[list[str], bool]:
    """The names of a constructor's parameters, and whether it takes keywords of others."""
    known = inspect.signature(cls).parameters.values()
    return [p.name for p in known if p.kind is not p.VAR_KEYWORD], any(p.kind is p.VAR_KEYWORD for p in known)


def _built(make: functools.partial) -> nn.Module:
    """The module; ValueError with what it says where it cannot be built with its keywords."""
    _refuse_unheard(make)
    try:
        made = make()
    except Exception as error:  # a mistake of the YAML's, in the words of whoever found it
        given = ", ".join(f"{name}={value}" for name, value in make.keywords.items()) or "no keywords"
        raise ValueError(
            f"module={_name(make.func)}: cannot be built with {given} ({type(error).__name__}: {error})"
        ) from error
    try:
        inspect.signature(made.forward).bind(None)
    except TypeError as error:
        raise ValueError(
            f"module={_name(type(made))}: its forward takes other things than one x ({error}); allowed is a module that maps "
            "[B, T, D] to [B, T, D]"
        ) from error
    return made


def _refuse_unheard(make: functools.partial) -> None:
    """ValueError for a keyword that the constructor does not name, where it would take one of any name in silence."""
    named, _ = _keywords(make.func)
    unnamed = [name for name in make.keywords if name not in named]
    if not unnamed:
        return
    try:
        with torch.random.fork_rng(devices=[]):
            make(a_keyword_that_nobody_knows=None)
    except Exception:  # it looks at their names, and says what it finds wrong
        return
    raise ValueError(
        f"module.{unnamed[0]}={make.keywords[unnamed[0]]}: {_name(make.func)} takes keywords of any name and says nothing, so "
        f"this one may mean nothing; allowed are {', '.join(named) or 'none'}"
    )


def _name(cls: object) -> str:
    return f"{getattr(cls, '__module__', '')}.{getattr(cls, '__qualname__', cls)}"
