"""What a mechanism follows of a run's choices: the rest is refused by name, and what it accepts must change what it gives."""

import pytest

from bench.conformance import follows
from harness.plan.build import plan_run
from harness.plan.small import shrunk
from tests import toys
from tests.composing import compose_config
from tests.promises import Sums
from tests.test_check import toy
from variants.conformance import collect_breaks
from variants.contract import Honours, Position
from variants.position import Alibi, Relative, Rotary

SAME = "the same comes out of BOTH with {}, which honours say it follows"
IGNORED = ("position=alibi,none", "model.cache=hidden,kv", "model.attend_self=false,true", "model.span=13,26,6")


class Slopes(Alibi):
    """From outside: nothing overridden, everything inherited."""


class TurnsAndAdds(Rotary):
    def bias(self, q, max_keys):
        return q.new_zeros(q.shape[1], max_keys)


class Embeds(Position):
    def embed(self, x, start):
        return x + 1


class Decays(Sums):
    honours = Honours(position={"decay"}, attend_self={True, False})


def test_what_a_scheme_does_is_in_the_methods_that_it_has():
    schemes = {Embeds: set(), Rotary: {"rotate"}, Relative: {"vectors"}, Slopes: {"decay"}}
    schemes |= {TurnsAndAdds: {"rotate", "bias"}}
    assert {scheme: scheme.ways() for scheme in schemes} == schemes


def positioned(scheme: type) -> tuple[str, ...]:
    return (f"position._target_={scheme.__module__}.{scheme.__name__}", "~position.base")


@pytest.mark.parametrize(
    ("cls", "words", "line"),
    [
        (Sums, ("position=none", "model.cache=hidden"), r"model\.cache=hidden: variant\.toy \(Sums\) follows only kv"),
        (
            Sums,
            (),
            r"position=rotary: rotates queries and keys, which variant\.toy \(Sums\) cannot follow; allowed are none, "
            r"schemes of the embedded bytes \(sinusoidal\)$",
        ),
        (
            Decays,
            positioned(TurnsAndAdds),
            r"position=turnsandadds: rotates queries and keys and adds to scores, which variant\.toy \(Decays\) cannot follow;"
            r" .*, one that lowers scores by a slope for every key between$",
        ),
    ],
)
def test_what_a_mechanism_does_not_follow_is_refused(cls, words, line):
    with pytest.raises(ValueError, match=line):
        toy(cls, *words).make_model()
    for followed in (("position=alibi", "model.attend_self=false"), positioned(Slopes), positioned(Embeds)):
        assert toy(Decays, *followed).make_model()


@pytest.mark.parametrize(
    ("cls", "words", "lines"),
    [
        (toys.IgnoresPosition, (), [SAME.format("position=none,rotary")]),
        (toys.IgnoresCache, (), [SAME.format("model.cache=hidden,kv")]),
        (toys.IgnoresSpan, (), [SAME.format("model.span=13,26,6")]),
        (toys.DeniesSpan, (), ["not the same comes out of BOTH with model.span=13,26,6, which honours deny"]),
        (toys.WrappedBoasting, ("position=alibi",), [SAME.format(key) for key in IGNORED]),
        (Sums, ("position=none",), []),
    ],
)
def test_what_is_accepted_and_ignored_is_caught(cls, words, lines):
    both = "layers.0.toy, layers.1.toy"
    breaks = list(follows(shrunk(toy(cls, *words, "runtime.backend=plain"))))
    assert breaks == [line.replace("BOTH", both) for line in lines]


@pytest.mark.parametrize(
    "words",
    [
        ("variant=replayed_spans", "variant.attention.span.spans=[[4.0,8.5],[3.0,13.0]]"),
        ("variant=longformer", "variant.attention.windows=[4,9]"),
    ],
)
def test_spans_that_keywords_give_are_held_to_neither(words):
    sizes = ("model.layers=2", "model.d_model=32", "model.heads=2", "model.span=13", "runtime.backend=plain")
    breaks, compared = collect_breaks(follows(plan_run(compose_config("data=recall", *words, *sizes))))
    assert not breaks and "model.span (13, 26" in compared
