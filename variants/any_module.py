"""Any module of an installed package as a sublayer, by YAML alone, if it maps ``[B, T, D]`` to ``[B, T, D]``.

The module gets only the normalised input of one segment: it carries no state and has only its own positions. Sizes are
its own keywords, which may be interpolated: ``${model.d_model}``. The YAML says which promises it cannot keep, how far
it sees, and which keywords get choices of the run; ``python -m bench.check`` tests this (``docs/any_module.md``).
``ideal_flops`` counts only products of ``nn.Linear``, a lower bound; ``needed_flops`` is None.
"""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from variants.contract import LIMITS, Honours, LayerContext, State, Sublayer, SublayerOutput, check_numbers

FOLLOWED = ("attend_self", "span")
"""Choices of a run that a keyword of the module can get; positions and a cache never reach a module."""


class AnyModule(Sublayer):
    """A wrapped module, which need not know the contract.

    Args:
        context: the run's choices; widths and the rest are keywords of the module.
        module: factory: ``_target_``, of a package that the command line trusts, and constructor keywords.
        honours: choices of the run, and the module's keyword that gets each of them, overriding the YAML's value:
            ``{span: window}``, ``{attend_self: self}``, both, or ``{}`` for a module that sees itself and any past.
            None for a module in which each byte sees only itself.
        limits: promises of ``LIMITS`` that the module cannot keep; always ``segments`` if it sees a past.
        reach: how many bytes back the output depends on the input; None for the whole segment.
        period: bytes after which the computation repeats, such as a block.
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
    ):
        super().__init__()
        check_numbers(1, period=period)
        check_numbers(0, reach=reach, null="null for all of the segment")
        if honours is None and reach:
            raise ValueError(f"reach={reach}: with honours=null it sees no byte but its own; allowed are 0 and null")
        if strange := [name for name in limits if name not in LIMITS]:
            allowed = ", ".join(sorted(LIMITS))
            raise ValueError(f"limits={list(limits)}: there is no limit {strange[0]}; allowed are {allowed}")
        _check_followed(honours or {}, getattr(module, "func", module))
        if honours is not None:
            self.honours = Honours(
                attend_self={True, False} if "attend_self" in honours else {True}, span="span" in honours
            )
        self.limits, self.period = frozenset(limits), period
        self.bytes_back, self.span = reach, context.span
        followed = {keyword: getattr(context, name) for name, keyword in (honours or {}).items()}
        self.module = _built(functools.partial(module, **followed))

    def forward(
        self, x: Tensor, state: State = None, start: Tensor | None = None, *, collect_stats: bool = False
    ) -> SublayerOutput:
        """Return the module's output, or the first of several outputs; no state is kept."""
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
            name = _name(type(self.module))
            raise ValueError(f"eval.span={span}: {name} keeps the span that it was built with, {self.span}")


def _check_followed(honours: dict[str, str], cls: Callable[..., nn.Module]) -> None:
    """Raise ValueError if a module cannot get a choice, or if it has no such keyword."""
    named, takes_others = _keywords(cls)
    for name, keyword in honours.items():
        if name not in FOLLOWED:
            raise ValueError(f"honours.{name}={keyword}: no module is told; allowed are {', '.join(FOLLOWED)}")
        if not isinstance(keyword, str) or (keyword not in named and not takes_others):
            raise ValueError(
                f"honours.{name}={keyword}: must be the keyword of {_name(cls)} that is to be given model.{name}; "
                f"allowed are {', '.join(named) or 'none'}"
            )


def _keywords(cls: Callable[..., nn.Module]) -> tuple[list[str], bool]:
    """Return the names of a constructor's parameters, and whether it takes any other keywords."""
    parameters = inspect.signature(cls).parameters.values()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD], any(p.kind is p.VAR_KEYWORD for p in parameters)


def _built(make: functools.partial) -> nn.Module:
    """Build the module; ValueError if its keywords do not build it, or if its forward needs more than x."""
    name, keywords = _name(make.func), make.keywords
    unnamed = [keyword for keyword in keywords if keyword not in _keywords(make.func)[0]]
    if unnamed and _takes_any_keyword(make):
        allowed = ", ".join(_keywords(make.func)[0]) or "none"
        raise ValueError(
            f"module.{unnamed[0]}={keywords[unnamed[0]]}: {name} takes keywords of any name and says nothing, so this "
            f"one may mean nothing; allowed are {allowed}"
        )
    try:
        module = make()
    except Exception as error:  # a mistake in the YAML; the original message is kept
        words = ", ".join(f"{keyword}={value}" for keyword, value in keywords.items()) or "no keywords"
        raise ValueError(f"module={name}: cannot be built with {words} ({type(error).__name__}: {error})") from error
    try:
        inspect.signature(module.forward).bind(None)
    except TypeError as error:
        maps = "[B, T, D] to [B, T, D]"
        raise ValueError(
            f"module={name}: its forward takes other things than one x ({error}); allowed is a module that maps {maps}"
        ) from error
    return module


def _takes_any_keyword(make: functools.partial) -> bool:
    """Whether a constructor silently takes a keyword of any name."""
    try:
        with torch.random.fork_rng(devices=[]):
            make(a_keyword_that_nobody_knows=None)
    except Exception:
        return False
    return True


def _name(cls: object) -> str:
    return f"{getattr(cls, '__module__', '')}.{getattr(cls, '__qualname__', cls)}"
