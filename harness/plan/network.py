"""Network: the language model that a plan describes; torch and the contract suffice to build it."""

import functools
from collections.abc import Callable

from harness.model import LanguageModel, Layers
from harness.plan.settings import ModelSettings
from variants.contract import WAYS, LayerContext, Position, Sublayer

CONTEXT = ("d_model", "heads", "span", "attend_self", "cache", "dropout")
"""Keys of ``model`` that a sublayer is told."""
WHOLE = ("norm", "norm_after", "tied", "head_bias", "head_zero_init")
WHOLE += ("embedding_std", "embedding_scale", "embedding_dropout")
"""Keys of ``model`` that are the network's own."""


def make_network(
    layers: Layers,
    scheme: Callable[..., Position],
    sizes: ModelSettings,
    *,
    vocabulary: int,
    backend: str,
    checkpoint: str = "none",
) -> LanguageModel:
    """The model, initialised by torch's generator.

    Args:
        layers, scheme: as ``plan_layers`` and ``resolve`` give them.
        vocabulary, backend, checkpoint: as ``LanguageModel`` and ``LayerContext`` have them.

    Raises:
        ValueError: sizes that do not fit together, or a choice that a mechanism does not follow, by name.
    """
    pool: dict = {}
    common = {name: getattr(sizes, name) for name in CONTEXT} | {"n_layers": sizes.layers, "pool": pool}
    common |= {"backend": backend, "scheme": scheme}
    model = LanguageModel(
        [{name: _checked(make, key=f"variant.{name}") for name, make in layer.items()} for layer in layers],
        lambda layer: LayerContext(layer=layer, **common),
        vocabulary=vocabulary,
        checkpoint=checkpoint,
        **{name: getattr(sizes, name) for name in WHOLE},
    )
    pool.clear()  # sharing ends with the build
    return model


def _checked(make: functools.partial, *, key: str) -> Callable[[LayerContext], Sublayer]:
    """The same, but a constructor's complaint about a keyword of its own names that keyword's key, and what of the run's
    choices the mechanism does not follow is refused."""

    def named(context: LayerContext) -> Sublayer:
        try:
            sublayer = make(context)
        except ValueError as error:
            if str(error).partition("=")[0].partition(".")[0] in make.keywords:
                raise ValueError(f"{key}.{error}") from error
            raise
        _refuse_unfollowed(sublayer, context, key=key)
        return sublayer

    return named


def _refuse_unfollowed(sublayer: Sublayer, context: LayerContext, *, key: str) -> None:
    """ValueError where the mechanism does not follow a choice of the run, rather than a run in which it means nothing."""
    honours = sublayer.honours
    if honours is None:
        return
    who = f"{key} ({type(sublayer).__name__})"
    for name in ("cache", "attend_self"):
        value, allowed = getattr(context, name), getattr(honours, name)
        if value not in allowed:
            raise ValueError(
                f"model.{name}={_word(value)}: {who} follows only {', '.join(sorted(map(_word, allowed)))}"
            )
    scheme = getattr(context.scheme, "func", context.scheme)
    if unfollowed := scheme.ways() - set(honours.position):
        does = " and ".join(what for way, what in WAYS.items() if way in unfollowed)
        allowed = ["none", "schemes of the embedded bytes (sinusoidal)"]
        allowed += [f"one that {what}" for way, what in WAYS.items() if way in honours.position]
        raise ValueError(
            f"position={scheme.__name__.lower()}: {does}, which {who} cannot follow; allowed are {', '.join(allowed)}"
        )


def _word(value: object) -> str:
    """A value as it is typed."""
    return str(value).lower()
