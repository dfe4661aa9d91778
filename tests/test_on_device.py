"""``bench.check`` on a device: what agrees passes, what cannot run is refused, a wrong number fails; and whoever measures takes
what was proven there."""

import pytest
import torch

from bench.cost_worker import Subject, Task
from bench.peer_workers import Worker
from harness.loop import select_backend
from harness.plan.build import varied
from harness.plan.small import of_mechanism
from tests.command import Ended, call
from tests.command import empty_folder as here  # noqa: F401 - a fixture
from tests.composing import TINY, plan
from variants.conformance import Finding
from variants.kernels import window

SMALL = (*TINY, "data=recall", "data.bytes=20000", "budget.steps=4", "eval.selection_bytes=400", "eval.bytes=400")
SMALL += ("optim=adamw",)
QUICK = ("agree=true", "runtime.precision=float32", "runtime.device=cpu", "runtime.threads=1")
PLACE = ("position=rotary", "model.cache=kv", "model.attend_self=true")


@pytest.fixture(autouse=True)
def contract_kept(monkeypatch):
    """The contract is not what is tested."""
    monkeypatch.setattr("bench.conformance.findings", lambda plan: [Finding(plan.runtime.backend, True, "kept")])
    monkeypatch.setattr("harness.loop.admission.findings_at_sizes", lambda plan: [])


def check(*words: str) -> Ended:
    flags = [word for word in words if "=" not in word]
    return call("bench/check.py", *flags, *QUICK, *(word for word in words if "=" in word))


def of_device(ended: Ended) -> list[str]:
    """Lines about the device, after those about the contract and before what the check cannot see."""
    return ended.out.partition(" keeps the contract in ")[2].splitlines()[1:-1]


def test_variants_agree_and_what_cannot_run_is_refused(here):  # noqa: F811
    ended = check("-m", "variant=adaptive_span,dynamic_span", *PLACE)
    assert ended.code == 0, ended.out + ended.err
    cases = [line for line in ended.out.splitlines() if ", float32, eager: " in line]
    assert [line.split()[0] for line in cases] == ["pass", "pass", "pass", "refused"]
    assert cases[1].startswith("pass  rotary, kv, kernel, float32, eager: ") and "at most 0.001" in cases[1]
    assert "adaptive_span: agrees with float64 on cpu in 2 of 2 cases\n" in ended.out
    assert "dynamic_span: agrees with float64 on cpu in 1 of 1 cases, 1 refused\n" in ended.out
    ended = check("variant=dynamic_span", "runtime.backend=fused", *PLACE)
    assert ended.code == 2 and "runtime.backend=fused cannot run with spans that depend on the input" in ended.err


def test_what_is_typed_is_not_varied(here):  # noqa: F811
    typed = ("position=alibi", "runtime.backend=plain", "model.attend_self=true")
    labels = [line.partition(": ")[0] for line in of_device(check("variant=mhsa", *typed))[:-1]]
    assert labels == [f"pass  alibi, {cache}, plain, float32, eager" for cache in ("kv", "hidden")]


@pytest.mark.parametrize(
    ("precision", "wrong", "words"),
    [
        ("float32", "gradient", "query.weight, at most 0.001"),
        ("bfloat16", "value", "at most 0.0"),
        ("float32", "not finite", "inf of "),
    ],
)
def test_a_wrong_number_fails(here, monkeypatch, precision, wrong, words):  # noqa: F811
    """Of which plain in float64 and, in bfloat16, on the host is right: twice its error may be made."""
    inner, calls = window.attend, []

    def attend(q, k, v, *arguments, **keywords):
        exact = q.dtype == torch.float64 or len(calls) >= 6  # 2 layers, 3 segments: then it is the host's turn
        calls.extend([] if q.dtype == torch.float64 else [q])
        y = inner(q.detach() if not exact and wrong == "gradient" else q, k, v, *arguments, **keywords)
        return y if exact else y * {"value": 1.1, "not finite": torch.nan}.get(wrong, 1.0)

    monkeypatch.setattr(window, "attend", attend)
    words_of_run = ("runtime.backend=plain", f"runtime.precision={precision}", "runtime.deterministic=false")
    case, last = of_device(check("variant=mhsa", *words_of_run, *PLACE))
    assert case.startswith(f"FAIL  rotary, kv, plain, {precision}, eager: ") and words in case, case
    assert last == "mhsa: agrees with float64 on cpu in 0 of 1 cases"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runtime.device=cuda:99"], "runtime.device=cuda:99: "),
        (["agree=often"], "agree=often: must be a valid boolean"),
    ],
)
def test_a_mistake_ends_with_2_before_anything_is_checked(here, words, message):  # noqa: F811
    ended = call("bench/check.py", "variant=mhsa", *words)
    assert ended.code == 2 and message in ended.err and not ended.out


def test_on_a_cpu_nothing_is_compared_unasked(here):  # noqa: F811
    ended = call("bench/check.py", "variant=mhsa", "runtime.device=cpu", "runtime.backend=plain", *PLACE)
    assert ended.code == 0 and ended.out.count("\n") == 4


def test_the_contract_of_what_runs_elsewhere_is_checked_in_plain_pytorch():
    wanted = plan("variant=mhsa", "runtime.device=cuda", "runtime.backend=kernel", "runtime.precision=bfloat16")
    made = of_mechanism(wanted, "cuda").runtime
    assert (made.backend, made.device, made.precision) == ("plain", "cpu", "float32")
    assert of_mechanism(wanted, "cpu") is wanted


def test_what_is_measured_obeys_the_proof(monkeypatch):
    """Both verbs' workers take what was settled, and refuse what was asked for by name and fails."""
    made = plan("variant=mhsa", *SMALL)

    def select(wanted, where):
        if wanted.runtime.backend != "auto":
            raise ValueError("runtime.backend=kernel: asked for by name; kernel failed")
        return {"backend": "fused", "why": ["fused it is"], "verdicts": {}}

    monkeypatch.setattr(select_backend, "TESTED", ())
    monkeypatch.setattr(select_backend, "select", select)
    subject = Subject(Task(config=made.config, span=16))
    facts = subject.build()
    assert facts["backend"] == "fused" and facts["backend_choice"]["why"] == ["fused it is"]
    assert Worker(Task(config=made.config, span=16)).build()["backend"] == "fused"
    named = varied(made, runtime={"backend": "kernel"}).config
    for refused in (Subject, Worker):
        with pytest.raises(ValueError, match="kernel failed"):
            refused(Task(config=named, span=16))
