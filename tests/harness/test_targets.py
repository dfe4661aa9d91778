"""``_target_`` in a configuration: the classes that it may name, and their keywords and values."""

import functools
import re
import sys
import types
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from harness.plan.targets import constructor_schema, resolve
from variants.adaptive_span import AdaptiveSpan
from variants.attention import Attention
from variants.attention_span import AttentionSpan
from variants.contract import Part, Position, Sublayer, SublayerOutput

MINE = ("tests.harness.test_targets",)


class Mine(Sublayer):
    """A sublayer with a keyword of each type of annotation."""

    def __init__(
        self,
        context,
        *,
        needed: int,
        rate: float = 1.0,
        name: str | None = None,
        pair: tuple[float, float] = (0.0, 1.0),
        many: tuple[int, ...] = (),
        choice: Literal["a", "b"] = "a",
        anything: Any = None,
        bare=None,
        part: Callable[..., Part] | None = None,
        span: Callable[..., AttentionSpan] | None = None,
    ):
        super().__init__()

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return SublayerOutput(x)


class NoContext(Sublayer):
    """A sublayer without a constructor of its own."""


class BadAnnotation(Sublayer):
    def __init__(self, context, *, size: "NoSuchType" = 1):  # noqa: F821
        super().__init__()


def node(target=Attention, **words):
    path = target if isinstance(target, str) else f"{target.__module__}.{target.__name__}"
    return {"_target_": path, "_partial_": True, **words}


def resolve_node(words, base=Sublayer, trust=MINE):
    return resolve(words, key="variant.attention", base=base, trust=trust)


def test_a_node_and_the_nodes_inside_it_become_partials():
    part = resolve_node(node(d_head=4, bias=True, span=node(AdaptiveSpan, ramp=8)))
    assert isinstance(part, functools.partial) and part.func is Attention
    assert part.keywords["d_head"] == 4 and part.keywords["bias"] is True
    spans = part.keywords["span"]
    assert isinstance(spans, functools.partial) and (spans.func, spans.keywords) == (
        AdaptiveSpan,
        {"ramp": 8},
    )
    for name in ("part", "bare"):
        assert (
            resolve_node(node(Mine, needed=1, **{name: node(AdaptiveSpan)})).keywords[name].func
            is AdaptiveSpan
        )


@pytest.mark.parametrize(
    "target, base, message",
    [
        (
            "os.system",
            Sublayer,
            "allowed are classes of variants, harness, torch.optim, tests.harness.test_targets",
        ),
        ("harness.source.subprocess", Sublayer, "class derived from variants.contract.Sublayer"),
        ("variants." + "a." * 4000 + "Nothing", Sublayer, "cannot be imported"),
        ("variants.attention.Attention", Position, "class derived from variants.contract.Position"),
        (None, Sublayer, "_target_=None: allowed are classes of"),
    ],
)
def test_targets_must_be_classes_of_the_contract_from_trusted_modules(target, base, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        resolve_node({"_target_": target, "_partial_": True}, base=base)
    assert f"variant.attention._target_={target}" in str(caught.value)


def test_a_class_must_be_defined_and_not_only_imported_in_a_trusted_module(monkeypatch):
    assert (
        resolve_node({**node(), "_target_": "tests.harness.test_targets.Attention"}).func
        is Attention
    )
    with pytest.raises(ValueError, match=r"test_targets\.Mine: allowed are.*trust=\["):
        resolve_node(node(Mine, needed=1), trust=())
    borrower = types.ModuleType("harness.borrower")
    borrower.Mine = Mine
    monkeypatch.setitem(sys.modules, borrower.__name__, borrower)
    with pytest.raises(ValueError, match=r"is defined in tests\.harness\.test_targets"):
        resolve_node(node("harness.borrower.Mine", needed=1), trust=())


@pytest.mark.parametrize(
    "name, value, expected",
    [("rate", 2, 2.0), ("needed", 1e3, 1000), ("pair", [0.9, 0.95], (0.9, 0.95))],
)
def test_values_are_converted_to_their_annotations(name, value, expected):
    converted = resolve_node(node(Mine, **{"needed": 1, name: value})).keywords[name]
    assert converted == expected and type(converted) is type(expected)


VECTORS = node("variants.all_attention.PersistentKV", number=3)


@pytest.mark.parametrize(
    "words, message",
    [
        ({"needed": 2.5}, "needed=2.5: must be an integer"),
        ({"pair": [0.9]}, "pair=[0.9]: must be a list"),
        ({"choice": "c"}, "choice=c: allowed are a, b"),
        ({"rate": VECTORS}, "rate={'_target_': "),
        ({"part": {"ramp": 3}}, "part={'ramp': 3}: must be a part with _target_"),
        ({"span": 3}, "span=3: must be a part with _target_ and _partial_: true or null"),
        (
            {"span": VECTORS},
            "PersistentKV: must be a class derived from variants.attention_span.AttentionSpan",
        ),
        (
            {"span": {**node(AdaptiveSpan), "_partial_": False}},
            "span._partial_=False: must be true",
        ),
    ],
)
def test_values_that_do_not_match_their_annotation_are_refused_by_key(words, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        resolve_node(node(Mine, **{"needed": 1} | words))
    assert str(caught.value).startswith("variant.attention.")


def test_the_keywords_of_a_constructor_are_the_allowed_keys():
    assert list(constructor_schema(AdaptiveSpan, key="k")) == ["ramp", "loss_weight", "initial"]
    assert [
        name for name, (_, required) in constructor_schema(Mine, key="k").items() if required
    ] == ["needed"]
    adamw = constructor_schema(torch.optim.AdamW, key="k")
    assert "betas" in adamw and "lr" not in adamw
    for target, message in {
        Mine: r"variant\.attention\.needed: is required, but",
        NoContext: r"tests\.harness\.test_targets\.NoContext must take a LayerContext first",
        BadAnnotation: r"test_targets\.BadAnnotation: name 'NoSuchType' is not defined",
    }.items():
        with pytest.raises(ValueError, match=message):
            resolve_node(node(target))
