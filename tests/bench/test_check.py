"""``bench.check``: the combinations that it checks, FLOPs, backends, and the small sizes at
which it checks."""

import itertools
import re

import pytest

from bench.check import LIMITATION
from harness.check.admission import admission
from harness.check.conformance import (
    NEEDED_FLOPS,
    backends_agree,
    compare_flops,
    findings,
    needed_at_most_executed,
)
from harness.check.small import shrink
from harness.count.ideal import ideal_excuses
from harness.plan.build import Plan, plan_run
from tests.harness.test_outside_variant import (
    MIXER,
    forget_imports,  # noqa: F401 - a fixture
    write,
)
from tests.support.command_line import CommandOutcome, call, empty_folder  # noqa: F401 - a fixture
from tests.support.promises import Gate
from tests.support.small_configs import compose_config
from variants.conformance import Finding, collect_breaks
from variants.conformance.fixture import Subject
from variants.contract import NeededFlops
from variants.kernels import fused, operation, window_cpu

SINGLE = ("position=none", "model.cache=kv", "model.attend_self=true")


class OverstatesFlops(Gate):
    def ideal_flops(self):
        return 10**9

    def needed_flops(self, segment, *, carried):
        return NeededFlops(1e9, 2e9)


class NeedsNothing(Gate):
    def needed_flops(self, segment, *, carried):
        return NeededFlops(0.0, 0.0)


class UnderstatesFlops(Gate):
    def ideal_flops(self):
        return 1


class DeclaresUnderstatement(UnderstatesFlops):
    limits = frozenset({"ideal_flops"})


def plan(*words: str) -> Plan:
    return plan_run(compose_config("data=recall", *words))


def toy(cls: type, *words: str) -> Plan:
    """Return a plan of two layers with a sublayer class of a test module."""
    node = f"+variant.toy={{_target_: {cls.__module__}.{cls.__name__}, _partial_: true}}"
    cfg = compose_config("data=recall", node, "variant.name=mine", "variant.layers=[toy]", *words)
    return plan_run(cfg, trusted=("tests",))


def test_ideal_and_needed_flops_above_the_executed_ones_are_caught():
    small = shrink(toy(OverstatesFlops))
    ideal, needed = (finding for finding in findings(small) if not finding.passed)
    assert ideal == compare_flops(small) and needed.promise == NEEDED_FLOPS
    executed = r"[\d,]+ executed per byte"
    assert re.match(
        rf"eval, 26 bytes after a full past: 2,000,\d+,\d+ ideal, {executed}", ideal.detail
    )
    line = rf"train, {{}} bytes carried: 6,000,\d+,\d+ needed, {executed}"
    assert re.fullmatch(f"{line.format(0)}; {line.format(26)}", needed.detail)
    breaks, compared = collect_breaks(needed_at_most_executed(shrink(toy(Gate))))
    assert (breaks, compared) == ([], "not declared by layers.0.toy, layers.1.toy")


def test_needed_flops_below_the_ideal_ones_are_caught_before_training():
    assert (
        "layers.0.toy: NeededFlops(forward=0.0" in compare_flops(shrink(toy(NeedsNothing))).detail
    )


def test_ideal_flops_far_below_the_executed_ones_are_caught_or_excused_by_a_limit():
    """The layers also have a feed-forward sublayer, whose FLOPs must not hide the fault."""
    with_feed_forward = (
        "+variant.feed_forward={_target_: variants.feed_forward.FeedForward, _partial_: true}",
    )

    def small(cls: type) -> Plan:
        return shrink(toy(cls, *with_feed_forward, "variant.layers=[toy,feed_forward]"))

    broken, excused = (
        compare_flops(small(UnderstatesFlops)),
        compare_flops(small(DeclaresUnderstatement)),
    )
    detail = (
        r"layers\.0\.toy: ideal is 0\.0002\d of 4,096 executed per byte; must be at least "
        r"0\.5, or the"
    )
    assert not broken.passed and re.match(detail, broken.detail), broken
    assert excused.passed and "0.0002" in excused.detail
    line = "layers.0.toy: ideal FLOPs may be less than half of the executed ones"
    assert [
        ideal_excuses(small(cls).make_model())[:1] for cls in (DeclaresUnderstatement, Gate)
    ] == [[line], []]


@pytest.mark.cpu_kernel
def test_the_padding_of_a_kernels_vectors_is_no_undeclared_computation():
    """At blocks of 4 bytes the kernel executes twice the ideal FLOPs."""
    words = ("position=relative", "model.cache=hidden", "model.attend_self=false")
    assert compare_flops(shrink(plan("variant=local", *words))).passed


def check(*words: str) -> CommandOutcome:
    return call("bench/check.py", *words)


@pytest.fixture
def checked_plans(monkeypatch) -> list[Plan]:
    """The plans that were checked. In place of the check, each passes without any computation."""
    plans = []

    def pass_all(plan: Plan) -> list[Finding]:
        plans.append(plan)
        return [Finding("a promise", True, "kept")]

    monkeypatch.setattr("harness.check.conformance.findings", pass_all)
    monkeypatch.setattr("harness.check.admission.findings_at_sizes", lambda plan: [])
    return plans


def combination(plan: Plan) -> tuple:
    return plan.scheme.func.__name__, plan.model.cache, plan.model.attend_self, plan.runtime.backend


def test_every_combination_of_choices_is_checked(cwd, checked_plans):
    outcome = check("variant=mhsa")
    checked = [combination(plan) for plan in checked_plans]
    factors = (
        ("Alibi", "NoPosition", "Relative", "Rotary", "Sinusoidal"),
        ("kv", "hidden"),
        (True, False),
    )
    assert len(set(checked)) == len(checked)
    assert {c[:3] for c in checked if c[3] == "auto"} == set(itertools.product(*factors))
    plain = [c[:3] for c in checked if c[3] == "plain"]
    assert len(plain) == 10
    for i, j in itertools.combinations(range(3), 2):
        assert {(c[i], c[j]) for c in plain} == set(itertools.product(factors[i], factors[j]))
    lines = outcome.out.splitlines()
    assert lines[0] == "mhsa: about 1 min 40 s for 30 combinations and the sizes of a run"
    verdict = "mhsa: PASSED: keeps the contract in 30 combinations"
    begin = lines.index(verdict)
    assert lines[begin + 1] == "pass  alibi, kv, attend_self=true, kernel: 1 promise"
    assert outcome.code == 0 and lines[-2:] == [verdict, LIMITATION]
    assert not list(cwd.iterdir())


@pytest.mark.parametrize(
    "words, expected",
    [
        (
            ("position.base=100.0", *SINGLE[1:], "runtime.backend=plain"),
            {("Rotary", "kv", True, "plain")},
        ),
        (
            ("recipe=adaptive_span_12",),
            {("Relative", "hidden", False, name) for name in ("auto", "plain")},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_choices_on_the_command_line_are_not_varied(cwd, checked_plans, words, expected):
    assert check(*words).code == 0
    assert {combination(plan) for plan in checked_plans} == expected


def test_refused_combinations_are_counted_in_one_line_with_each_reason_once(cwd, checked_plans):
    words = ("variant=dynamic_span", "position=rotary", *SINGLE[1:], "runtime.backend=fused")
    outcome = check(*words)
    assert (
        outcome.code == 2
        and "runtime.backend=fused cannot run with spans that depend on the input" in outcome.err
    )
    assert not checked_plans and not outcome.out
    outcome = check("variant=mhsa", *SINGLE[1:], "variant.attention.d_head=5")
    (refused,) = [line for line in outcome.out.splitlines() if line.startswith("refused")]
    assert refused.startswith("refused  1 combination, with position=rotary (add")
    assert (
        outcome.code == 0
        and "\nmhsa: PASSED: keeps the contract in 7 combinations (1 refused)\n" in outcome.out
    )
    (refused,) = [
        line for line in check("variant=linear").out.splitlines() if line.startswith("refused")
    ]
    reasons = "14 combinations, with model.cache=hidden, position=relative and position=rotary ("
    assert reasons in refused, refused


def test_an_error_after_a_broken_promise_keeps_its_exit_code(cwd, monkeypatch):
    monkeypatch.setattr("bench.check.BROKEN", ["mhsa"])
    assert (
        check("variant=dynamic_span", "position=rotary", *SINGLE[1:], "runtime.backend=fused").code
        == 2
    )


@pytest.mark.parametrize(
    "error, code, message",
    [
        (ValueError("model.span=512: too long"), 2, "error: model.span=512: too long\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_what_was_found_before_an_error_is_shown(
    cwd, checked_plans, monkeypatch, error, code, message
):
    def refuse(plan):
        raise error

    monkeypatch.setattr("harness.check.admission.findings_at_sizes", refuse)
    outcome = check("variant=mhsa", *SINGLE, "runtime.backend=plain")
    assert outcome.code == code and outcome.err == message
    assert outcome.out.endswith("pass  none, kv, attend_self=true, plain: 1 promise\n")


POSITION = "from variants.position import Alibi\n\nclass Steep(Alibi):\n    pass\n"
STEEP = "_target_: my_mixer.Steep\n_partial_: true\n"


def test_position_schemes_of_the_user_are_checked_as_well(cwd, checked_plans, imports):
    write(cwd, module="my_mixer", conf="my_conf")
    (cwd / "my_mixer.py").write_text(f"{MIXER}\n{POSITION}")
    (cwd / "my_conf" / "position").mkdir()
    (cwd / "my_conf" / "position" / "steep.yaml").write_text(STEEP)
    outcome = check("-cd", "my_conf", "trust=[my_mixer]", "variant=mine", *SINGLE[1:])
    assert (
        outcome.code == 0 and "mine: PASSED: keeps the contract in 6 combinations\n" in outcome.out
    ), outcome
    assert [combination(plan)[0] for plan in checked_plans].count("Steep") == 1


LEAK = ("self.into(x)", "self.into(x if self.training else x.roll(-1, 1))")


def test_a_broken_promise_is_shown_with_byte_and_mode_and_the_next_job_still_runs(
    cwd, imports, monkeypatch
):
    monkeypatch.setattr("harness.check.admission.findings_at_sizes", lambda plan: [])
    write(cwd, module="my_mixer", conf="my_conf")
    (cwd / "my_mixer.py").write_text(MIXER.replace(*LEAK))
    words = (
        "-cd",
        "my_conf",
        "-m",
        "trust=[my_mixer]",
        *SINGLE,
        "runtime.backend=plain",
        "variant=mine",
        "seed=0,1",
    )
    outcome = check(*words)
    lines = outcome.out.splitlines()
    assert outcome.code == 1 and not outcome.err and not list(cwd.glob("multirun*")), outcome
    details = r"^FAIL  none, kv, attend_self=true, plain: \d of 29 promises broken$"
    assert re.search(details, outcome.out, re.MULTILINE)
    broken = [
        line for line in lines if line.startswith("  FAIL  evaluation does not see the future: ")
    ]
    detail = (
        r"changing bytes 1 to 30 moved the output at byte 0 by [\d.e-]+ \(layers\.0\.mixer, "
        r"stream \d+; eval, "
    )
    assert len(broken) == 2 and re.search(detail, broken[0])
    verdicts = [line for line in lines if re.match(f"mine: FAILED: {detail}", line)]
    assert len(verdicts) == 4 and lines[-2] == verdicts[-1], lines
    assert re.search(r'; broken: "evaluation does not see the future" and \d more$', verdicts[-1])


# Backends

FAST_BACKENDS = {"fused": operation, "kernel": window_cpu}


@pytest.mark.parametrize("backend", ["fused", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])
def test_a_wrong_fast_backend_is_caught(monkeypatch, backend):
    correct = FAST_BACKENDS[backend].attend
    monkeypatch.setattr(
        FAST_BACKENDS[backend], "attend", lambda *a, **b: correct(*a, **b) * (1 + 1e-6)
    )
    finding = backends_agree(
        shrink(plan("variant=adaptive_span", f"runtime.backend={backend}")), backend
    )
    assert not finding.passed and finding.promise == f"the {backend} backend equals the plain one"
    assert re.match(r"span 78, eval: \S+ of .*, at most 1e-09", finding.detail)


def test_a_fault_that_affects_only_heads_with_different_windows_is_caught(monkeypatch):
    correct = fused.group_heads
    monkeypatch.setattr(fused, "group_heads", lambda max_keys: list(correct(max_keys))[-1:])
    small = shrink(plan("variant=adaptive_span", "runtime.backend=fused"))
    finding = backends_agree(small, "fused")
    assert not finding.passed and finding.detail.startswith("span 78, ")


class Phased(Gate):
    """A sublayer whose period is a keyword."""

    def __init__(self, context, *, block: int = 64):
        super().__init__(context)
        self.period = block


SMALL = "+variant.small={toy:{block:4},model:{span:12}}"


def test_a_variant_is_checked_at_the_small_sizes_of_its_file_unless_the_command_line_sets_them(
    cwd, checked_plans
):
    small = shrink(toy(Phased, SMALL))
    assert small.model.span == 12 and [s.period for _, s in small.make_model().sublayers()] == [
        4,
        4,
    ]
    assert Subject(small.make_model, small.model.span, 256).length == 29
    assert Subject(toy(Phased).make_model, 13, 256).length == 6 * 64 + 5
    (cwd / "my_conf" / "variant").mkdir(parents=True)
    text = (
        "toy: {_target_: tests.bench.test_check.Phased, _partial_: true}\nname: mine\nlayers: "
        "[toy]\nat: {}\ngroups: {}\n"
    )
    text += "small: {toy: {block: 4}, model: {span: 12}}\n"
    (cwd / "my_conf" / "variant" / "mine.yaml").write_text(text)
    words = (
        "-cd",
        "my_conf",
        "trust=[tests.bench.test_check]",
        "variant=mine",
        *SINGLE,
        "runtime.backend=plain",
    )
    assert (
        check(*words).code == 0 and check(*words, "+variant.toy.block=8", "model.span=20").code == 0
    )
    assert [(p.model.span, p.config["variant"]["toy"]["block"]) for p in checked_plans] == [
        (12, 4),
        (20, 8),
    ]


@pytest.mark.parametrize(
    "small, line",
    [
        (
            "{toy:{blok:4}}",
            r"variant\.small: variant\.toy\.blok=4: no such key .*; allowed are block$",
        ),
        ("{other:{block:4}}", r"variant\.small\.other=.*: no such key; allowed are .*toy, model"),
        ("[4]", r"variant\.small=\[4\]: must be a mapping or null"),
    ],
)
def test_small_sizes_with_unknown_keys_are_refused(small, line):
    with pytest.raises(ValueError, match=line):
        shrink(toy(Phased, f"+variant.small={small}"))


@pytest.mark.parametrize(
    "words, layers",
    [
        (
            ("variant=product_key_memory", "model=base"),
            [["attention", "feed_forward"], ["attention", "memory"]],
        ),
        (
            ("variant=product_key_memory", "model.layers=3", "+variant.at.0=[memory]"),
            [["memory"], ["attention", "memory"], ["attention", "feed_forward"]],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else None,
)
def test_a_small_plan_keeps_every_type_of_layer(words, layers):
    small = shrink(plan(*words))
    assert [list(layer) for layer in small.layers] == layers
    assert (small.model.d_model, small.model.heads, small.model.span) == (32, 2, 13)


class Grouped(Gate):
    """A sublayer whose number of groups must divide the heads."""

    def __init__(self, context, *, groups: int = 4):
        super().__init__(context)
        if context.heads % groups:
            raise ValueError(f"groups={groups}: must divide model.heads={context.heads}")


class Blocked(Gate):
    def __init__(self, context, *, block: int = 4):
        super().__init__(context)
        if context.span % block:
            raise ValueError(f"model.span={context.span}: must be a multiple of {block}")


@pytest.mark.parametrize("cls, sizes", [(Grouped, (4, 64, 13)), (Blocked, (2, 32, 64))])
def test_a_variant_that_refuses_the_small_sizes_is_checked_at_larger_ones(cls, sizes):
    small = shrink(toy(cls))
    assert (small.model.heads, small.model.d_model, small.model.span) == sizes
    assert shrink(toy(Blocked, "+variant.toy.block=256")).model.span == 512


def test_a_variant_that_fits_no_size_is_refused():
    with pytest.raises(ValueError, match="variant=mine: .*ValueError: variant.toy.groups=3"):
        admission(toy(Grouped, "+variant.toy.groups=3"))
