"""``bench.check``: every combination, and the gate before anything is measured."""

import itertools
import re

import pytest

from bench.check import UNSEEN
from bench.conformance import NEEDED, backends_agree, findings, ideal_beside_executed, needed_at_most_executed
from harness.count.ideal import excuses
from harness.loop.admission import admission
from harness.plan.build import Plan, plan_run
from harness.plan.small import shrunk
from tests.command import Ended, call, empty_folder  # noqa: F401 - a fixture
from tests.composing import compose_config
from tests.promises import Gate
from tests.test_outside import MIXER, forgotten_imports, write  # noqa: F401 - a fixture
from variants.conformance import Finding, collect_breaks
from variants.conformance.fixture import Subject
from variants.contract import NeededFlops
from variants.kernels import fused, operation, window_cpu

ONE = ("position=none", "model.cache=kv", "model.attend_self=true")


class Boasts(Gate):
    def ideal_flops(self):
        return 10**9

    def needed_flops(self, segment, *, carried):
        return NeededFlops(1e9, 2e9)


class SaysOne(Gate):
    def ideal_flops(self):
        return 1


class SaysSo(SaysOne):
    limits = frozenset({"ideal_flops"})


def plan(*words: str) -> Plan:
    return plan_run(compose_config("data=recall", *words))


def toy(cls: type, *words: str) -> Plan:
    """A plan of two layers of a class from here or from ``toys``."""
    node = f"+variant.toy={{_target_: {cls.__module__}.{cls.__name__}, _partial_: true}}"
    cfg = compose_config("data=recall", node, "variant.name=mine", "variant.layers=[toy]", *words)
    return plan_run(cfg, trusted=("tests",))


def test_more_flops_than_are_executed_are_caught():
    """Ideal and needed ones."""
    small = shrunk(toy(Boasts))
    ideal, needed = (finding for finding in findings(small) if not finding.passed)
    assert ideal == ideal_beside_executed(small) and needed.promise == NEEDED
    executed = r"[\d,]+ executed per byte"
    assert re.match(rf"eval, segments of 26 warm bytes: 2,000,\d+,\d+ ideal, {executed}", ideal.detail)
    line = rf"train, {{}} bytes carried: 6,000,\d+,\d+ needed, {executed}"
    assert re.fullmatch(f"{line.format(0)}; {line.format(26)}", needed.detail)
    assert collect_breaks(needed_at_most_executed(shrunk(toy(Gate)))) == ([], "not said by layers.0.toy, layers.1.toy")


def test_ideal_flops_of_next_to_nothing_are_caught_or_excused():
    """A feed-forward beside it is most of the layer."""
    with_feed_forward = ("+variant.feed_forward={_target_: variants.feed_forward.FeedForward, _partial_: true}",)

    def of(cls: type) -> Plan:
        return shrunk(toy(cls, *with_feed_forward, "variant.layers=[toy,feed_forward]"))

    broken, excused = ideal_beside_executed(of(SaysOne)), ideal_beside_executed(of(SaysSo))
    detail = r"layers\.0\.toy: ideal is 0\.0002\d of 4,096 executed per byte; allowed is 0\.5 or more, or less with"
    assert not broken.passed and re.match(detail, broken.detail), broken
    assert excused.passed and "0.0002" in excused.detail
    line = "layers.0.toy: ideal FLOPs may be less than half of the executed ones"
    assert excuses(of(SaysSo).make_model())[0] == line and excuses(of(Gate).make_model()) == []


def check(*words: str) -> Ended:
    return call("bench/check.py", *words)


@pytest.fixture
def quick(monkeypatch) -> list[Plan]:
    """Plans that were to be checked; each keeps its one promise."""
    asked = []

    def passes(plan: Plan) -> list[Finding]:
        asked.append(plan)
        return [Finding("a promise", True, "kept")]

    monkeypatch.setattr("bench.conformance.findings", passes)
    monkeypatch.setattr("harness.loop.admission.findings_at_sizes", lambda plan: [])
    return asked


def combination(plan: Plan) -> tuple:
    return plan.scheme.func.__name__, plan.model.cache, plan.model.attend_self, plan.runtime.backend


def test_every_combination_is_checked(here, quick):
    ended = check("variant=mhsa")
    checked = [combination(plan) for plan in quick]
    factors = (("Alibi", "NoPosition", "Relative", "Rotary", "Sinusoidal"), ("kv", "hidden"), (True, False))
    assert len(set(checked)) == len(checked)
    assert {c[:3] for c in checked if c[3] == "auto"} == set(itertools.product(*factors))
    plain = [c[:3] for c in checked if c[3] == "plain"]
    assert len(plain) == 10
    for i, j in itertools.combinations(range(3), 2):
        assert {(c[i], c[j]) for c in plain} == set(itertools.product(factors[i], factors[j]))
    lines = ended.out.splitlines()
    assert ended.code == 0 and lines[-2:] == ["mhsa: keeps the contract in 30 combinations", UNSEEN]
    assert lines[0] == "pass  alibi, kv, attend_self=true, kernel: 1 promises" and not list(here.iterdir())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("position.base=100.0", *ONE[1:], "runtime.backend=plain"), {("Rotary", "kv", True, "plain")}),
        (("recipe=adaptive_span_12",), {("Relative", "hidden", False, p) for p in ("auto", "plain")}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_given_is_not_varied(here, quick, words, expected):
    assert check(*words).code == 0
    assert {combination(plan) for plan in quick} == expected


def test_what_is_refused_is_said_and_is_no_pass(here, quick):
    words = ("variant=dynamic_span", "position=rotary", *ONE[1:], "runtime.backend=fused")
    ended = check(*words)
    assert ended.code == 2 and "runtime.backend=fused cannot run with spans that depend on the input" in ended.err
    assert not quick and not ended.out
    ended = check("variant=mhsa", *ONE[1:], "variant.attention.d_head=5")
    refused = [line for line in ended.out.splitlines() if line.startswith("refused")]
    assert len(refused) == 1 and refused[0].startswith(
        "refused  rotary, kv, attend_self=true: position=rotary: head width"
    )
    assert ended.code == 0 and "\nmhsa: keeps the contract in 7 combinations, 1 refused\n" in ended.out


POSITION = "from variants.position import Alibi\n\nclass Steep(Alibi):\n    pass\n"
STEEP = "_target_: my_mixer.Steep\n_partial_: true\n"


def test_schemes_of_outsiders_are_checked(here, quick, imports):
    write(here, module="my_mixer", conf="my_conf")
    (here / "my_mixer.py").write_text(f"{MIXER}\n{POSITION}", encoding="utf-8")
    (here / "my_conf" / "position").mkdir()
    (here / "my_conf" / "position" / "steep.yaml").write_text(STEEP, encoding="utf-8")
    ended = check("-cd", "my_conf", "trust=[my_mixer]", "variant=mine", *ONE[1:])
    assert ended.code == 0 and "mine: keeps the contract in 6 combinations\n" in ended.out, ended
    assert [combination(plan)[0] for plan in quick].count("Steep") == 1


LEAK = ("self.into(x)", "self.into(x if self.training else x.roll(-1, 1))")


def test_a_break_is_shown_with_byte_and_mode(here, imports, monkeypatch):
    """And the other job of the sweep still runs."""
    monkeypatch.setattr("harness.loop.admission.findings_at_sizes", lambda plan: [])
    write(here, module="my_mixer", conf="my_conf")
    (here / "my_mixer.py").write_text(MIXER.replace(*LEAK), encoding="utf-8")
    words = ("-cd", "my_conf", "-m", "trust=[my_mixer]", *ONE, "runtime.backend=plain", "variant=mine", "seed=0,1")
    ended = check(*words)
    lines = ended.out.splitlines()
    assert ended.code == 1 and not ended.err and not list(here.glob("multirun*")), ended
    assert re.match(r"FAIL  none, kv, attend_self=true, plain: \d of 27 promises broken", lines[0])
    broken = [line for line in lines if line.startswith("  FAIL  evaluation does not see the future: ")]
    detail = r"all from byte 1 on changed: layers\.0\.mixer moved by [\d.e-]+ at byte 0 of stream \d"
    assert len(broken) == 2 and re.search(detail, broken[0])
    assert re.match(r"mine: \d promises broken; it keeps the contract in 0 of 1 combination$", lines[-2])


# The gate.

FAST = {"fused": operation, "kernel": window_cpu}


@pytest.mark.parametrize("backend", ["fused", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])
def test_a_broken_fast_backend_is_found(monkeypatch, backend):
    right = FAST[backend].attend
    monkeypatch.setattr(FAST[backend], "attend", lambda *a, **b: right(*a, **b) * (1 + 1e-6))
    finding = backends_agree(shrunk(plan("variant=adaptive_span", f"runtime.backend={backend}")), backend)
    assert not finding.passed and finding.promise == f"the {backend} backend equals the plain one"
    assert re.match(r"span 78, eval: \S+ of .*, at most 1e-09", finding.detail)


def test_heads_of_different_widths_are_compared(monkeypatch):
    """A break that only runs of equal heads have: the first are forgotten."""
    right = fused.group_heads
    monkeypatch.setattr(fused, "group_heads", lambda max_keys: list(right(max_keys))[-1:])
    small = shrunk(plan("variant=adaptive_span", "runtime.backend=fused"))
    finding = backends_agree(small, "fused")
    assert not finding.passed and finding.detail.startswith("span 78, ")


class Phased(Gate):
    """Repeats after blocks of a width."""

    def __init__(self, place, *, block: int = 64):
        super().__init__(place)
        self.period = block


SMALL = "+variant.small={toy:{block:4},model:{span:12}}"


def test_what_a_variant_says_of_small_sizes_is_taken(here, quick):
    small = shrunk(toy(Phased, SMALL))
    assert small.model.span == 12 and [s.period for _, s in small.make_model().sublayers()] == [4, 4]
    assert Subject(small.make_model, small.model.span, 256).length == 29
    assert Subject(toy(Phased).make_model, 13, 256).length == 6 * 64 + 5
    (here / "my_conf" / "variant").mkdir(parents=True)
    text = "toy: {_target_: tests.test_check.Phased, _partial_: true}\nname: mine\nlayers: [toy]\nat: {}\ngroups: {}\n"
    text += "small: {toy: {block: 4}, model: {span: 12}}\n"
    (here / "my_conf" / "variant" / "mine.yaml").write_text(text, encoding="utf-8")
    words = ("-cd", "my_conf", "trust=[tests.test_check]", "variant=mine", *ONE, "runtime.backend=plain")
    assert check(*words).code == 0 and check(*words, "+variant.toy.block=8", "model.span=20").code == 0
    assert [(p.model.span, p.config["variant"]["toy"]["block"]) for p in quick] == [(12, 4), (20, 8)]


@pytest.mark.parametrize(
    ("small", "line"),
    [
        ("{toy:{blok:4}}", r"variant\.small: variant\.toy\.blok=4: no such key; allowed are block$"),
        ("{other:{block:4}}", r"variant\.small\.other=.*: no such key; allowed are .*toy, model"),
        ("[4]", r"variant\.small=\[4\]: must be a mapping or null"),
    ],
)
def test_small_sizes_that_mean_nothing_are_refused(small, line):
    with pytest.raises(ValueError, match=line):
        shrunk(toy(Phased, f"+variant.small={small}"))


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        (("variant=product_key_memory", "model=base"), [["attention", "feed_forward"], ["attention", "memory"]]),
        (
            ("variant=product_key_memory", "model.layers=3", "+variant.at.0=[memory]"),
            [["memory"], ["attention", "memory"], ["attention", "feed_forward"]],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else None,
)
def test_a_small_plan_has_every_kind_of_layer(words, layers):
    small = shrunk(plan(*words))
    assert [list(layer) for layer in small.layers] == layers
    assert (small.model.d_model, small.model.heads, small.model.span) == (32, 2, 13)


class Grouped(Gate):
    """Its number of groups must divide the heads."""

    def __init__(self, place, *, groups: int = 4):
        super().__init__(place)
        if place.heads % groups:
            raise ValueError(f"groups={groups}: must divide model.heads={place.heads}")


class Blocked(Gate):
    def __init__(self, place, *, block: int = 4):
        super().__init__(place)
        if place.span % block:
            raise ValueError(f"model.span={place.span}: must be a multiple of {block}")


@pytest.mark.parametrize(("cls", "sizes"), [(Grouped, (4, 64, 13)), (Blocked, (2, 32, 64))])
def test_a_variant_that_takes_no_small_sizes_is_checked_at_larger_ones(cls, sizes):
    small = shrunk(toy(cls))
    assert (small.model.heads, small.model.d_model, small.model.span) == sizes
    assert shrunk(toy(Blocked, "+variant.toy.block=256")).model.span == 512


def test_a_variant_that_never_fits_is_refused():
    with pytest.raises(ValueError, match="variant=mine: .*ValueError: variant.toy.groups=3"):
        admission(toy(Grouped, "+variant.toy.groups=3"))
