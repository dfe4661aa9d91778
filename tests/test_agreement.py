"""``bench.check`` on a device: what agrees passes, what cannot run is refused, and a wrong number fails."""

import pytest
import torch

from tests.command import Ended, call
from tests.command import empty_folder as here  # noqa: F401 - a fixture
from variants.conformance import Finding
from variants.kernels import fused, window

PLACE = ("position=rotary", "model.cache=kv", "model.attend_self=true")
QUICK = ("agree.settings=[rotary-kv]", "agree.precisions=[float32]", "runtime.device=cpu", "runtime.threads=1")


def check(*words: str) -> Ended:
    flags = [word for word in words if "=" not in word]
    return call("bench/check.py", *flags, "agree.run=true", *QUICK, *(word for word in words if "=" in word))


@pytest.fixture
def kept(monkeypatch):
    """The contract is not what is tested."""
    monkeypatch.setattr("bench.conformance.findings", lambda plan: [Finding("a promise", True, "kept")])
    monkeypatch.setattr("harness.loop.admission.findings_at_sizes", lambda plan: [])


def of_device(ended: Ended) -> list[str]:
    """Lines about the device, after those about the contract and before what the check cannot see."""
    return ended.out.partition(" keeps the contract in ")[2].splitlines()[1:-1]


def test_variants_agree_and_what_cannot_run_is_refused(here, kept):  # noqa: F811
    ended = check("-m", "variant=adaptive_span,dynamic_span", "agree.backends=[plain,fused]", *PLACE)
    assert ended.code == 0, ended.out + ended.err
    cases = [line for line in ended.out.splitlines() if ", float32, eager: " in line]
    assert [line.split()[0] for line in cases] == ["pass", "pass", "pass", "refused"]
    assert cases[1].startswith("pass  rotary, kv, fused, float32, eager: ") and "at most 0.001" in cases[1]
    assert "adaptive_span: agrees with float64 on cpu in 2 of 2 cases\n" in ended.out
    assert "dynamic_span: agrees with float64 on cpu in 1 of 1 cases, 1 refused\n" in ended.out


@pytest.mark.parametrize("wrong", [1.0, 1.1])
def test_bfloat16_may_err_twice_what_plain_does(here, kept, monkeypatch, wrong):  # noqa: F811
    inner = fused.attend
    monkeypatch.setattr(fused, "attend", lambda *arguments, **keywords: inner(*arguments, **keywords) * wrong)
    ended = check("variant=mhsa", "runtime.backend=fused", "agree.precisions=[bfloat16]", *PLACE)
    case, _ = of_device(ended)
    assert case.startswith(f"{'pass' if wrong == 1 else 'FAIL'}  rotary, kv, fused, bfloat16, eager: "), case
    assert ended.code == (wrong != 1) and float(case.rpartition("at most ")[2]) < 0.15


def test_what_is_given_is_not_varied(here, kept):  # noqa: F811
    words = (
        "variant=mhsa",
        "agree.settings=[rotary-kv,relative-hidden,relative-kv]",
        "agree.precisions=[float32,bfloat16]",
    )
    ended = check(
        *words, "position=alibi", "runtime.backend=plain", "runtime.precision=float32", "model.attend_self=true"
    )
    labels = [line.partition(": ")[0] for line in of_device(ended)[:-1]]
    assert labels == [f"pass  alibi, {cache}, plain, float32, eager" for cache in ("kv", "hidden")]


@pytest.mark.parametrize("wrong", ["gradient", "value", "not finite"])
def test_a_wrong_number_fails_though_the_contract_is_kept(here, monkeypatch, wrong):  # noqa: F811
    inner = window.attend

    def attend(q, k, v, *arguments, **keywords):
        on_device = q.dtype == torch.float32  # all else is in float64
        y = inner(q.detach() if on_device and wrong == "gradient" else q, k, v, *arguments, **keywords)
        return y * {"value": 1.01, "not finite": torch.nan}.get(wrong, 1.0) if on_device else y

    monkeypatch.setattr(window, "attend", attend)
    ended = check("variant=mhsa", "runtime.backend=plain", *PLACE)
    case, last = of_device(ended)
    assert ended.code == 1 and case.startswith("FAIL  rotary, kv, plain, float32, eager: ")
    assert {"gradient": "query.weight", "value": "at most 0.001", "not finite": "inf of "}[wrong] in case
    assert last == "mhsa: agrees with float64 on cpu in 0 of 1 cases"


def test_no_device_is_compared_unasked(here, kept):  # noqa: F811
    ended = call("bench/check.py", "variant=mhsa", "runtime.device=cpu", "runtime.backend=plain", *PLACE)
    assert ended.code == 0 and ended.out.count("\n") == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runtime.device=cuda:99"], "runtime.device=cuda:99: "),
        (["agree.run=often"], "agree.run=often: must be bool"),
        (["agree.models=3"], "agree.models=3: no such key"),
    ],
)
def test_a_mistake_ends_with_2_before_anything_is_checked(here, words, message):  # noqa: F811
    ended = call("bench/check.py", "variant=mhsa", *words)
    assert ended.code == 2 and message in ended.err and not ended.out


def test_where_every_case_is_refused_the_command_was_a_mistake(here, kept):  # noqa: F811
    ended = check("variant=dynamic_span", "agree.backends=[fused]", *PLACE)
    assert ended.code == 2 and "runtime.backend=fused cannot run with spans that depend on the input" in ended.err
