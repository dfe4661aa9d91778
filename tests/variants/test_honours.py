"""``honours``: choices that a mechanism does not declare are refused, and those that it declares
change its output."""

import pytest

from harness.check.conformance import check_choices
from harness.check.small import shrink
from harness.plan.build import plan_run
from tests.bench.test_check import toy
from tests.support import broken_sublayers as broken
from tests.support.promises import Sums
from tests.support.small_configs import compose_config
from variants.conformance import collect_breaks
from variants.contract import Honours, Position
from variants.position import Alibi, Relative, Rotary

UNCHANGED = "the output of SUBLAYERS is the same with {}, which its honours declare"
IGNORED = (
    "position=alibi,none",
    "model.cache=hidden,kv",
    "model.attend_self=false,true",
    "model.span=13,26,6",
)


class Slopes(Alibi):
    """A subclass that overrides no method."""


class TurnsAndAdds(Rotary):
    def bias(self, q, max_keys):
        return q.new_zeros(q.shape[1], max_keys)


class Embeds(Position):
    def embed(self, x, start):
        return x + 1


class Decays(Sums):
    honours = Honours(position={"decay"}, attend_self={True, False})


def test_the_ways_of_a_position_scheme_follow_from_the_methods_that_it_overrides():
    schemes = {Embeds: set(), Rotary: {"rotate"}, Relative: {"vectors"}, Slopes: {"decay"}}
    schemes |= {TurnsAndAdds: {"rotate", "bias"}}
    assert {scheme: scheme.ways() for scheme in schemes} == schemes


def position_words(scheme: type) -> tuple[str, ...]:
    return (f"position._target_={scheme.__module__}.{scheme.__name__}", "~position.base")


@pytest.mark.parametrize(
    "cls, words, line",
    [
        (
            Sums,
            ("position=none", "model.cache=hidden"),
            r"model\.cache=hidden: variant\.toy \(Sums\) supports only kv",
        ),
        (
            Sums,
            (),
            r"position=rotary: rotates queries and keys, which variant\.toy \(Sums\) does not "
            r"support; allowed are none, "
            r"schemes that change only embedded bytes \(sinusoidal\)$",
        ),
        (
            Decays,
            position_words(TurnsAndAdds),
            r"position=turnsandadds: rotates queries and keys and adds to scores, which "
            r"variant\.toy \(Decays\) does not support;"
            r" .*, one that lowers scores by a slope times the distance$",
        ),
    ],
)
def test_a_choice_that_a_mechanism_does_not_declare_is_refused(cls, words, line):
    with pytest.raises(ValueError, match=line):
        toy(cls, *words).make_model()
    for declared in (
        ("position=alibi", "model.attend_self=false"),
        position_words(Slopes),
        position_words(Embeds),
    ):
        assert toy(Decays, *declared).make_model()


@pytest.mark.parametrize(
    "cls, words, lines",
    [
        (broken.IgnoresPosition, (), [UNCHANGED.format("position=none,rotary")]),
        (broken.IgnoresCache, (), [UNCHANGED.format("model.cache=hidden,kv")]),
        (broken.IgnoresSpan, (), [UNCHANGED.format("model.span=13,26,6")]),
        (
            broken.DeniesSpan,
            (),
            ["the output of SUBLAYERS differs with model.span=13,26,6, which its honours exclude"],
        ),
        (broken.OverclaimsChoices, ("position=alibi",), [UNCHANGED.format(key) for key in IGNORED]),
        (Sums, ("position=none",), []),
    ],
)
def test_a_declared_choice_that_is_ignored_and_a_denied_one_that_is_followed_are_caught(
    cls, words, lines
):
    sublayers = "layers.0.toy, layers.1.toy"
    breaks = list(check_choices(shrink(toy(cls, *words, "runtime.backend=plain"))))
    assert breaks == [line.replace("SUBLAYERS", sublayers) for line in lines]


@pytest.mark.parametrize(
    "words",
    [
        ("variant=replayed_spans", "variant.attention.span.spans=[[4.0,8.5],[3.0,13.0]]"),
        ("variant=longformer", "variant.attention.windows=[4,9]"),
    ],
)
def test_spans_set_by_keywords_need_not_follow_the_span_of_the_model(words):
    sizes = (
        "model.layers=2",
        "model.d_model=32",
        "model.heads=2",
        "model.span=13",
        "runtime.backend=plain",
    )
    breaks, compared = collect_breaks(
        check_choices(plan_run(compose_config("data=recall", *words, *sizes)))
    )
    assert not breaks and "model.span (13, 26" in compared
