"""The contract as pass and fail lines, for any variant: ``python -m bench.check variant=mhsa position=relative``.

A small model of the variant is built from the same configuration as a training run; what it promises is in
``variants/conformance.py``. Exit code 1 if a promise is broken.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import hydra
from omegaconf import DictConfig

from harness.cli import run_command

CONF = str(Path(__file__).resolve().parent.parent / "conf")


@hydra.main(version_base="1.3", config_path=CONF, config_name="check")
def main(cfg: DictConfig) -> None:
    from harness.build import hydra_facts, plan_run

    broken = 0
    plan = plan_run(cfg, **hydra_facts())
    for finding in findings(plan):
        print(finding, flush=True)
        broken += not finding.passed
    print(f"{plan.variant}: " + (f"{broken} promises broken" if broken else "keeps the contract"))
    if broken:
        sys.exit(1)


def findings(plan) -> Iterator:
    """Every promise, one finding each: the conformance suite, then what needs the harness."""
    from variants.conformance import check, learns

    vocabulary = plan.data["vocabulary"]
    yield from check(plan.make_model, span=plan.model.span, vocabulary=vocabulary)
    yield ideal_at_most_executed(plan)
    yield learns(plan.make_model, vocabulary=vocabulary)


def ideal_at_most_executed(plan):
    """What a mechanism says it needs is no more than what its code executes, in warm state."""
    from harness.flops import forward_flops_per_byte
    from variants.conformance import Finding

    model, promise = plan.make_model(), "ideal FLOPs are at most the executed ones"
    span = plan.model.span
    try:
        executed = forward_flops_per_byte(model, segment=2 * span, most_bytes=16 * span).per_byte
    except Exception as error:
        return Finding(promise, False, f"{type(error).__name__}: {error}")
    ideal = model.ideal_flops()
    return Finding(promise, ideal <= executed, f"{ideal:,} ideal, {executed:,.0f} executed per byte")


if __name__ == "__main__":
    run_command(main)
