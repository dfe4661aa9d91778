"""Any module of an installed package as a sublayer, by YAML alone, if it maps ``[B, T, D]`` to
``[B, T, D]``.

The module gets only the normalised input of one segment. It carries no state and gets no position
scheme. Its sizes are keywords in the YAML, such as ``${model.d_model}``. The YAML also declares
promises that the module does not fulfil, its reach, and the keywords that get choices of the run;
``python -m bench.check`` tests these (``docs/any_module.md``). ``ideal_flops`` counts only
products of ``nn.Linear``, a lower bound; ``needed_flops`` is None."""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from variants.contract import (
    LIMITS,
    Honours,
    LayerContext,
    State,
    Sublayer,
    SublayerOutput,
    check_numbers,
)

CHOICES = ("attend_self", "span")
"""Choices of a run that can be passed to a keyword of the module; position scheme and cache
cannot."""


class AnyModule(Sublayer):
    """A wrapper of a module that does not implement the contract.

    Args:
        context: the run's choices.
        module: factory of the module: ``_target_``, of a package that the command line trusts, and
            its keywords.
        honours: for each of ``CHOICES`` that the module supports, the name of its keyword, as in
            ``{span: window}``; the choice replaces the keyword's value in the YAML. ``{}`` if it
            supports neither and each byte sees itself and any past; None if each byte sees only
            itself.
        limits: promises of ``LIMITS`` that the module does not fulfil; ``segments`` is required if
            it sees a past.
        reach: largest distance in bytes at which an input moves an output; None for the whole
            segment.
        period: bytes after which the computation repeats, such as a block."""

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
            raise ValueError(
                f"reach={reach}: with honours=null it sees no byte but its own; allowed are 0 and "
                "null"
            )
        if unknown := [name for name in limits if name not in LIMITS]:
            allowed = ", ".join(sorted(LIMITS))
            raise ValueError(
                f"limits={list(limits)}: there is no limit {unknown[0]}; allowed are {allowed}"
            )
        _check_honours(honours or {}, getattr(module, "func", module))
        if honours is not None:
            self.honours = Honours(
                attend_self={True, False} if "attend_self" in honours else {True},
                span="span" in honours,
            )
        self.limits = frozenset(limits)
        self.period = period
        self.bytes_back = reach
        self.span = context.span
        choices = {keyword: getattr(context, name) for name, keyword in (honours or {}).items()}
        self.module = _build(functools.partial(module, **choices))

    def forward(
        self,
        x: Tensor,
        state: State = None,
        start: Tensor | None = None,
        *,
        collect_stats: bool = False,
    ) -> SublayerOutput:
        """Return the module's output, or the first of several outputs, without a state."""
        y = self.module(x)
        y = y[0] if isinstance(y, tuple | list) and y else y
        if not isinstance(y, Tensor) or y.shape != x.shape:
            output = tuple(y.shape) if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise ValueError(
                f"module={_name(type(self.module))}: maps {tuple(x.shape)} to {output}; allowed "
                "is a module that maps [B, T, D] to [B, T, D], or to a tuple that begins with it"
            )
        return SublayerOutput(y)

    def reach(self) -> int | None:
        if self.honours is None:
            return 0
        return self.bytes_back

    def set_span(self, span: int) -> None:
        if self.honours is not None and self.honours.span and span != self.span:
            name = _name(type(self.module))
            raise ValueError(
                f"eval.span={span}: {name} keeps the span that it was built with, {self.span}"
            )


def _check_honours(honours: dict[str, str], cls: Callable[..., nn.Module]) -> None:
    """Raise ValueError if a choice cannot be passed to a module, or if the module has no such
    keyword."""
    names, accepts_any = _keywords(cls)
    for choice, keyword in honours.items():
        if choice not in CHOICES:
            raise ValueError(
                f"honours.{choice}={keyword}: cannot be passed to a module; allowed are "
                f"{', '.join(CHOICES)}"
            )
        if not isinstance(keyword, str) or (keyword not in names and not accepts_any):
            raise ValueError(
                f"honours.{choice}={keyword}: must be the keyword of {_name(cls)} that gets "
                f"model.{choice}; allowed are {', '.join(names) or 'none'}"
            )


def _keywords(cls: Callable[..., nn.Module]) -> tuple[list[str], bool]:
    """Return the names of a constructor's parameters, and whether it has ``**kwargs``."""
    parameters = inspect.signature(cls).parameters.values()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD], any(
        p.kind is p.VAR_KEYWORD for p in parameters
    )


def _build(make: functools.partial) -> nn.Module:
    """Build the module. ValueError if its constructor fails, or if its forward needs other
    arguments than x."""
    name = _name(make.func)
    keywords = make.keywords
    unnamed = [keyword for keyword in keywords if keyword not in _keywords(make.func)[0]]
    if unnamed and _ignores_unknown_keywords(make):
        allowed = ", ".join(_keywords(make.func)[0]) or "none"
        raise ValueError(
            f"module.{unnamed[0]}={keywords[unnamed[0]]}: {name} accepts keywords of any name "
            f"without an error, so this keyword may have no effect; allowed are {allowed}"
        )
    try:
        module = make()
    # a mistake in the YAML; the new message includes the original one
    except (Exception, SystemExit) as error:
        words = (
            ", ".join(f"{keyword}={argument}" for keyword, argument in keywords.items())
            or "no keywords"
        )
        raise ValueError(
            f"module={name}: cannot be built with {words} ({type(error).__name__}: {error})"
        ) from error
    try:
        inspect.signature(module.forward).bind(None)
    except TypeError as error:
        maps = "[B, T, D] to [B, T, D]"
        raise ValueError(
            f"module={name}: its forward needs other arguments than x ({error}); allowed is a "
            f"module that maps {maps}"
        ) from error
    return module


def _ignores_unknown_keywords(make: functools.partial) -> bool:
    """Return whether a constructor accepts a keyword of any name without an error."""
    try:
        with torch.random.fork_rng(devices=[]):
            make(an_unknown_keyword=None)
    except (Exception, SystemExit):
        return False
    return True


def _name(cls: object) -> str:
    return f"{getattr(cls, '__module__', '')}.{getattr(cls, '__qualname__', cls)}"
