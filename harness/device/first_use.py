"""First use of a device: which code computes attention there is decided by what was proven there, never by hope.

Each candidate is proven in a process of its own, because one that reads where it must not leaves a device's context
unusable for whatever follows, and one that hangs must not hang the run. A verdict is remembered under everything that
it depends on, so that all jobs of a sweep, and all later runs, share one. Of those that passed, the fastest at the
run's shapes is taken.

Whatever asks the device comes as an argument; nothing here knows what is proven, or how.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.cache import cache_folder, locked, write_whole

LIMIT_SECONDS = 120.0
"""The longest that a candidate may take; it has failed then."""
ALL_SECONDS = 480.0
"""The longest that all of them may take: other processes of the run wait for ten minutes, and no longer."""
PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a candidate: ``said`` is the worst case with its numbers, or how it ended, and ``case``, ``error``
    and ``allowed`` the same apart; None where it ended otherwise, error also where it is not finite. ``cases``: how
    many there were.
    """

    passed: bool
    said: str
    case: str | None = None
    error: float | None = None
    allowed: float | None = None
    cases: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a candidate's process has found out; ``verdict`` and ``step_ms``, of forward and backward at the run's
    shapes, are None where they were not asked for. ``reason`` says why a time was asked for and not reached."""

    verdict: Verdict | None = None
    step_ms: float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The backend that runs, why in lines for a reader, verdicts by candidate and sublayer, and ``step_ms`` of all
    layers by candidate that passed."""

    backend: str
    why: tuple[str, ...]
    verdicts: dict[str, dict[str, Verdict]]
    step_ms: dict[str, float]

    def as_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A sublayer that has candidates, in so many ``layers``. ``key`` is what its verdicts depend on, device, driver and
    source among it, and ``shapes`` what its times depend on beside, both values of JSON; ``ask`` takes a backend,
    whether to prove it, whether to time it, and the most seconds that it may take."""

    layers: int
    key: Mapping[str, object]
    shapes: Mapping[str, object]
    ask: Callable[..., Answer]


def choose(
    candidates: Sequence[str],
    subjects: Mapping[str, Subject],
    *,
    asked: str = "auto",
    because: str = "asked for by name",
    folder: Path | None = None,
) -> Choice:
    """The fastest candidate that computes the same for all subjects, or ``plain`` where there is none.

    Args:
        candidates: in order of preference; plain is none of them.
        subjects: by the sublayer's name.
        asked: one of the candidates, which is then proven and not timed, or ``auto``.
        because: why it must be this one, for the message.
        folder: of remembered verdicts; None for the one in the user's cache.

    Raises:
        ValueError: naming the verdict, where what was asked for fails.
    """
    folder, ends = folder or cache_folder() / "verdicts", time.monotonic() + ALL_SECONDS
    verdicts: dict[str, dict[str, Verdict]] = {}
    step_ms: dict[str, float] = {}
    why: list[str] = []
    for backend in candidates if asked == "auto" else [asked]:
        verdicts[backend], times, failure = {}, {}, None
        for name, subject in subjects.items():
            if (left := min(LIMIT_SECONDS, ends - time.monotonic())) <= 0:
                failure = f"{backend} was not proven: {ALL_SECONDS:g} s are over"
                break
            answer, path = _remembered(subject, backend, timed=asked == "auto", folder=folder, limit_seconds=left)
            verdicts[backend][name], times[name] = answer.verdict, answer.step_ms
            if reason := answer.reason if answer.verdict.passed else answer.verdict.said:
                failure = f"{backend} failed for {name}: {reason} (remembered in {path})"
                break
        if asked != "auto" and failure:
            raise ValueError(f"runtime.backend={asked}: {because}; {failure}; allowed are auto, {PLAIN}")
        if asked != "auto":
            return Choice(backend=asked, why=(because,), verdicts=verdicts, step_ms={})
        if failure:
            why.append(failure)
            _warn(failure)
        else:
            step_ms[backend] = sum(times[name] * subject.layers for name, subject in subjects.items())
    if step_ms:
        best = min(step_ms, key=step_ms.get)
        listed = ", ".join(f"{name} {ms:.3g} ms" for name, ms in sorted(step_ms.items(), key=lambda item: item[1]))
        why.append(f"{best} is the fastest that passed: {listed}")
    else:
        best = PLAIN
        why.append(f"{PLAIN}, because no other code is proven here: slow, with all scores in memory")
        _warn(why[-1])
    return Choice(backend=best, why=tuple(why), verdicts=verdicts, step_ms=step_ms)


def _warn(line: str) -> None:
    print(f"WARNING: runtime.backend=auto: {line}", file=sys.stderr)


def _remembered(
    subject: Subject, backend: str, *, timed: bool, folder: Path, limit_seconds: float
) -> tuple[Answer, Path]:
    """A verdict and, if ``timed`` and it passed, a time: remembered, or found out and remembered; and where."""
    key = {**subject.key, "backend": backend}
    path, shapes = folder / f"{_digest(key)}.json", _digest(subject.shapes)
    with locked(path, waiting=f"runtime.backend: waiting for another process that proves {backend}, verdict in"):
        memory = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"key": key, "times": {}}
        verdict = memory.get("verdict")
        to_time = timed and shapes not in memory["times"] and (verdict is None or verdict["passed"])
        if verdict is None or to_time:
            answer = subject.ask(backend, prove=verdict is None, timed=to_time, limit_seconds=limit_seconds)
            memory["verdict"] = verdict = verdict or asdict(answer.verdict)
            if to_time and verdict["passed"]:
                time_here = {"shapes": dict(subject.shapes), "step_ms": answer.step_ms, "reason": answer.reason}
                memory["times"][shapes] = time_here
            try:
                write_whole(path, json.dumps(memory, indent=1).encode())
            except OSError as error:
                _warn(f"the verdict is not remembered ({error})")
    time_here = memory["times"].get(shapes, {}) if timed else {}
    return Answer(verdict=Verdict(**verdict), step_ms=time_here.get("step_ms"), reason=time_here.get("reason")), path


def _digest(key: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
