"""Search spaces of hyperparameters: pinned points, recorded trials, seeds of sweeps, and invalid spaces."""

import json
from collections import Counter

import pytest
from omegaconf import OmegaConf

from harness.plan.build import plan_run
from harness.plan.space import Choice, Interval
from tests.small_configs import CONF, TINY, compose_config, plan

TUNE = ("purpose=tune",)
SPACE = {
    "optim.lr": {"low": 0.001, "high": 0.1, "scale": "log"},
    "model.dropout": {"low": 0.0, "high": 0.5, "scale": "linear"},
    "model.heads": {"choices": [1, 2, 4]},
    "model.layers": {"choices": [1, 2, 3]},
}


def plan_trial(space: dict, trial: int, *words: str, command_line_keys: tuple[str, ...] = ()):
    cfg = compose_config(*TINY, *TUNE, *words, f"trial={trial}")
    cfg.space = space
    return plan_run(cfg, command_line_keys=command_line_keys)


def point_of(run_plan) -> dict:
    keys = run_plan.config["space"]
    return {key: OmegaConf.select(OmegaConf.create(run_plan.config), key) for key in sorted(keys)}


def test_the_first_points_are_pinned():
    """Committed rows name their trials, so a point must not depend on the version of torch or the order of keys."""
    for space in (SPACE, dict(reversed(SPACE.items()))):
        points = [point_of(plan_trial(space, trial)) for trial in range(3)]
        assert points == [
            {"model.dropout": 0.2376, "model.heads": 2, "model.layers": 2, "optim.lr": 0.004243},
            {"model.dropout": 0.4053, "model.heads": 2, "model.layers": 3, "optim.lr": 0.05583},
            {"model.dropout": 0.2859, "model.heads": 4, "model.layers": 1, "optim.lr": 0.0013},
        ]
    point = {"model.dropout": 0.475107, "model.heads": 0.5, "model.layers": 0.5, "optim.lr": 0.313852}
    assert plan_trial(SPACE, 0).point == pytest.approx(point, abs=1e-6)


def test_intervals_and_choices_are_covered_from_end_to_end():
    log, linear = Interval(low=1e-4, high=1.0, scale="log"), Interval(low=-1.0, high=1.0, scale="linear")
    assert [log.select(unit)[0] for unit in (0.0, 0.25, 0.5)] == [1e-4, 1e-3, 1e-2]
    assert linear.select(0.75) == (0.5, 0.75)
    counts = Counter(Choice(choices=["a", "b", "c"]).select(step / 999) for step in range(999))
    assert counts == dict.fromkeys((("a", 0.0), ("b", 0.5), ("c", 1.0)), 333)
    assert log.select(1 / 3)[0] == 0.002154, "four digits, short enough to type on the command line"


def test_sweeps_that_compare_variants_have_five_seeds_and_adamw():
    for sweep in ("variants", "spans", "slots"):
        assert OmegaConf.load(CONF / "sweep" / f"{sweep}.yaml").hydra.sweeper.params.seed == "0,1,2,3,4"
        run_plan = plan(f"sweep={sweep}")
        assert run_plan.optim["default"].func.__name__ == "AdamW" and run_plan.optim["matrices"] is None
        assert run_plan.purpose == "result"
    assert plan("sweep=variants", "optim=muon").optim["matrices"] is not None, "a typed override wins"


def test_a_trial_is_recorded_and_planned_again_as_the_same_run():
    run_plan = plan("variant=adaptive_span", *TINY, *TUNE, "trial=3")
    assert run_plan.config["trial"] == 3 and point_of(run_plan)["optim.lr"] == run_plan.config["optim"]["lr"]
    replanned = plan_run(OmegaConf.create(recorded := json.loads(json.dumps(run_plan.config))))
    assert replanned.config == recorded and replanned.point == run_plan.point
    assert plan("variant=adaptive_span", *TINY).config["space"] is None, "a run that is not a trial has no space"
    assert list(plan("variant=adaptive_span", "space=rate", *TUNE, "trial=3").point) == ["optim.lr"]


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"model.widht": SPACE["optim.lr"]}, "space.model.widht: the configuration has no such key"),
        ({"optim.lr": {"low": 1, "high": 1, "scale": "log"}}, "space.optim.lr.low=1.0: must be below high=1.0"),
        ({"optim.lr": {"low": 0, "high": 1, "scale": "lin"}}, "space.optim.lr.scale=lin: allowed are log, linear"),
        ({"optim.lr": {"choices": [1]}}, "space.optim.lr.choices=[1]: must be a list of two"),
        (None, "trial=0: needs a search space"),
    ],
)
def test_an_invalid_or_missing_space_is_refused(space, message):
    with pytest.raises(ValueError) as caught:
        plan_trial(space, 0)
    assert str(caught.value).startswith(message)


def test_keys_of_a_trial_may_not_be_set_by_hand_and_the_trial_number_and_purpose_are_checked():
    with pytest.raises(ValueError, match=r"^optim\.lr: is set by trial=0"):
        plan_trial(SPACE, 0, "optim.lr=0.5", command_line_keys=("optim.lr", "seed"))
    with pytest.raises(ValueError, match=r"^purpose=result: trial=0 is only allowed with purpose=tune"):
        plan_trial(SPACE, 0, "purpose=result")
    for trial in (2**16, True):
        with pytest.raises(ValueError, match=rf"^trial={trial}: allowed are null and integers"):
            plan_trial(SPACE, trial)
