"""What is taken on a device that has not been seen: what has passed there and is fastest, by a made-up device."""

import json
import threading

import pytest

from harness.device.first_use import Answer, Subject, Verdict, choose

PASSED = Verdict(passed=True, said="fine", case="a", error=1e-6, allowed=1e-4, cases=3, seconds=1.0)
FAILED = Verdict(passed=False, said="300 queries: the gradient of z: 2.0e-02, allowed 1.0e-04", cases=3)


class Device:
    """What each candidate does, by name: passes, or fails, and how long a step takes; what was asked is kept."""

    def __init__(self, ms: dict[str, float | None], *, failing: tuple[str, ...] = ()):
        self.ms, self.failing, self.asked = ms, failing, []

    def subject(self, name: str = "attention", *, layers: int = 2, driver: str = "1", span: int = 64) -> dict:
        def ask(backend, *, prove, timed, limit_seconds):
            self.asked.append((name, backend, prove, timed))
            verdict = (FAILED if backend in self.failing else PASSED) if prove else None
            ms = self.ms.get(backend) if timed and backend not in self.failing else None
            return Answer(verdict=verdict, step_ms=ms, reason=None if ms else "out of memory" if timed else None)

        key = {"driver": driver, "kind": name}
        return {name: Subject(layers=layers, key=key, shapes={"span": span}, ask=ask)}


def test_the_fastest_of_those_that_passed_is_taken_and_the_others_cost_a_line_each(tmp_path, capsys):
    device = Device({"fused": 3.0, "kernel": 2.0, "sdpa": None}, failing=("flex",))
    choice = choose(["fused", "flex", "kernel", "sdpa"], device.subject(), folder=tmp_path)
    assert choice.backend == "kernel" and choice.step_ms == {"fused": 6.0, "kernel": 4.0}
    assert [asked[1] for asked in device.asked] == ["fused", "flex", "kernel", "sdpa"]
    line, other = capsys.readouterr().err.splitlines()
    assert "sdpa failed for attention: out of memory" in other, "it passes and cannot run at the shapes of the run"
    assert line.startswith(f"WARNING: runtime.backend=auto: flex failed for attention: {FAILED.said}")
    assert choice.why[-1] == "kernel is the fastest that passed: kernel 4 ms, fused 6 ms"
    assert choice.as_dict()["verdicts"]["flex"]["attention"]["passed"] is False
    json.dumps(choice.as_dict(), allow_nan=False)


def test_a_verdict_is_remembered_and_what_is_new_is_proven_again(tmp_path):
    first, again = Device({"fused": 3.0, "kernel": 2.0}, failing=("kernel",)), Device({"fused": 5.0})
    assert choose(["fused", "kernel"], first.subject(), folder=tmp_path).backend == "fused"
    choice = choose(["fused", "kernel"], again.subject(), folder=tmp_path)
    assert choice.backend == "fused" and choice.step_ms == {"fused": 6.0} and not again.asked
    assert choice.verdicts["kernel"]["attention"] == FAILED
    choose(["fused", "kernel"], again.subject(span=128), folder=tmp_path)
    assert again.asked == [("attention", "fused", False, True)], "other shapes are timed, and nothing is proven twice"
    newer = Device({"fused": 5.0, "kernel": 1.0})
    assert choose(["fused", "kernel"], newer.subject(driver="2"), folder=tmp_path).backend == "kernel"


def test_nothing_passes_is_plain_with_a_warning(tmp_path, capsys):
    choice = choose(["fused"], Device({}, failing=("fused",)).subject(), folder=tmp_path)
    assert choice.backend == "plain" and not choice.step_ms
    assert "plain, because no other code is proven here" in capsys.readouterr().err.splitlines()[-1]


def test_every_kind_of_sublayer_must_pass_and_layers_are_added_up(tmp_path):
    one, other = Device({"fused": 3.0, "kernel": 1.0}), Device({"fused": 1.0, "kernel": 4.0})
    both = one.subject("short", layers=2) | other.subject("long", layers=1)
    assert choose(["fused", "kernel"], both, folder=tmp_path).step_ms == {"fused": 7.0, "kernel": 6.0}
    both = one.subject("short") | Device({"fused": 1.0}, failing=("kernel",)).subject("longer")
    assert choose(["kernel", "fused"], both, folder=tmp_path).backend == "fused"


def test_what_is_asked_for_by_name_is_proven_and_its_failure_is_an_error(tmp_path, capsys):
    device = Device({"fused": 1.0}, failing=("kernel",))
    assert choose(["fused", "kernel"], device.subject(), asked="fused", folder=tmp_path).backend == "fused"
    assert device.asked == [("attention", "fused", True, False)]
    with pytest.raises(ValueError, match=r"runtime.backend=kernel: .*gradient of z: 2.0e-02.*allowed are auto, plain"):
        choose(["fused", "kernel"], device.subject(), asked="kernel", folder=tmp_path)
    assert not capsys.readouterr().err


def test_jobs_side_by_side_prove_a_candidate_once(tmp_path):
    device, chosen = Device({"fused": 1.0}), []

    def job() -> None:
        chosen.append(choose(["fused"], device.subject(), folder=tmp_path).backend)

    jobs = [threading.Thread(target=job) for _ in range(3)]
    for one in jobs:
        one.start()
    for one in jobs:
        one.join()
    assert chosen == ["fused"] * 3 and len(device.asked) == 1
