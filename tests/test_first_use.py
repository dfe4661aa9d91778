"""What is taken on a device that has not been seen: what has passed there and is fastest, by a made-up device."""

import json
import threading

import pytest

from harness.device.first_use import Answer, Subject, Verdict, choose

PASSED = Verdict(passed=True, said="fine", case="a", error=1e-6, allowed=1e-4, cases=3, seconds=1.0)
FAILED = Verdict(passed=False, said="300 queries: the gradient of z: 2.0e-02, allowed 1.0e-04", cases=3)


class Device:
    """What each candidate does, by name: passes, fails or hangs, and how long a step takes; what was asked is kept."""

    def __init__(self, ms: dict[str, float | None], *, failing: dict[str, Verdict] = {}):  # noqa: B006 - not changed
        self.ms, self.failing, self.asked = ms, failing, []

    def ask(self, name: str):
        def ask(backend, *, prove, timed, limit_seconds):
            self.asked.append((name, backend, prove, timed))
            verdict = self.failing.get(backend, PASSED) if prove else None
            ms = self.ms.get(backend) if timed and backend not in self.failing else None
            return Answer(verdict=verdict, step_ms=ms, reason=None if ms else "out of memory" if timed else None)

        return ask

    def subject(self, name: str = "attention", *, layers: int = 2, driver: str = "1", span: int = 64) -> dict:
        key = {"driver": driver, "kind": name}
        return {name: Subject(layers=layers, key=key, shapes={"span": span}, ask=self.ask(name))}


def test_the_fastest_of_those_that_passed_is_taken_and_the_others_cost_a_line_each(tmp_path, capsys):
    device = Device({"fused": 3.0, "kernel": 2.0, "chunked": 9.0, "sdpa": None}, failing={"flex": FAILED})
    choice = choose(["fused", "flex", "kernel", "chunked", "sdpa"], device.subject(), folder=tmp_path)
    assert choice.backend == "kernel" and choice.step_ms == {"fused": 6.0, "kernel": 4.0, "chunked": 18.0}
    assert [asked[1] for asked in device.asked] == ["fused", "flex", "kernel", "chunked", "sdpa"]
    line, other = capsys.readouterr().err.splitlines()
    assert "sdpa failed for attention: out of memory" in other, "it passes and cannot run at the shapes of the run"
    assert line.startswith(
        "WARNING: runtime.backend=auto: flex failed for attention: 300 queries: the gradient of z: 2.0e-02"
    )
    assert choice.why[-1] == "kernel is the fastest that passed: kernel 4 ms, fused 6 ms, chunked 18 ms"
    assert choice.as_dict()["verdicts"]["flex"]["attention"]["passed"] is False
    json.dumps(choice.as_dict(), allow_nan=False)


def test_a_verdict_is_remembered_and_what_is_new_is_proven_again(tmp_path):
    first, again = Device({"fused": 3.0, "kernel": 2.0}, failing={"kernel": FAILED}), Device({"fused": 5.0})
    assert choose(["fused", "kernel"], first.subject(), folder=tmp_path).backend == "fused"
    choice = choose(["fused", "kernel"], again.subject(), folder=tmp_path)
    assert choice.backend == "fused" and choice.step_ms == {"fused": 6.0} and not again.asked
    assert choice.verdicts["kernel"]["attention"] == FAILED
    choose(["fused", "kernel"], again.subject(span=128), folder=tmp_path)
    assert again.asked == [("attention", "fused", False, True)], "other shapes are timed, and nothing is proven twice"
    newer = Device({"fused": 5.0, "kernel": 1.0})
    assert choose(["fused", "kernel"], newer.subject(driver="2"), folder=tmp_path).backend == "kernel"
    assert [asked[1:] for asked in newer.asked] == [("fused", True, True), ("kernel", True, True)]


def test_nothing_passes_is_plain_and_said_loudly(tmp_path, capsys):
    device = Device({}, failing={"fused": FAILED, "kernel": FAILED})
    choice = choose(["fused", "kernel"], device.subject(), folder=tmp_path)
    assert choice.backend == "plain" and not choice.step_ms
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and "plain, because no other code is proven here" in lines[-1]


def test_every_kind_of_sublayer_must_pass_and_layers_are_added_up(tmp_path):
    one, other = Device({"fused": 3.0, "kernel": 1.0}), Device({"fused": 1.0, "kernel": 4.0})
    both = one.subject("short", layers=2) | other.subject("long", layers=1)
    assert choose(["fused", "kernel"], both, folder=tmp_path).step_ms == {"fused": 7.0, "kernel": 6.0}
    other = Device({"fused": 1.0}, failing={"kernel": FAILED})
    both = one.subject("short") | other.subject("longer")
    assert choose(["kernel", "fused"], both, folder=tmp_path).backend == "fused"


def test_what_is_asked_for_by_name_is_proven_and_its_failure_is_an_error(tmp_path, capsys):
    device = Device({"fused": 1.0}, failing={"kernel": FAILED})
    choice = choose(["fused", "kernel"], device.subject(), asked="fused", folder=tmp_path)
    assert choice.backend == "fused" and device.asked == [("attention", "fused", True, False)]
    with pytest.raises(
        ValueError, match=r"runtime.backend=kernel: .*the gradient of z: 2.0e-02.*allowed are auto, plain"
    ):
        choose(["fused", "kernel"], device.subject(), asked="kernel", folder=tmp_path)
    assert not capsys.readouterr().err


def test_jobs_side_by_side_prove_a_candidate_once(tmp_path):
    device, chosen = Device({"fused": 1.0, "kernel": 2.0}), []
    jobs = [
        threading.Thread(
            target=lambda: chosen.append(choose(["fused", "kernel"], device.subject(), folder=tmp_path).backend)
        )
        for _ in range(4)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert chosen == ["fused"] * 4 and sorted(asked[1] for asked in device.asked) == ["fused", "kernel"]
