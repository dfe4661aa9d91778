"""Train a byte-level language model with one attention mechanism, and measure what it costs.

    python train.py variant=adaptive_span
    python train.py -m variant=mhsa,adaptive_span,all_attention,product_key_memory seed=0,1,2
    torchrun --nproc-per-node=8 train.py variant=adaptive_span

The thread of the whole project: compose (Hydra) -> plan (``harness/plan``) -> loop (here) -> record (``harness/record``).
"""

import hydra
from omegaconf import DictConfig

from harness.compose.cli import own_command, run_command, told
from harness.compose.sweep import Resuming


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """One run, or one job of a sweep. Returns bits per byte on valid, the objective of sweeps."""
    try:
        return run(cfg)
    except Exception as error:
        failure = told(error)  # now: a sweep goes on to its other jobs
    raise failure


def run(cfg: DictConfig) -> float | None:
    """Begin, go on with, or return a run."""
    from harness.device.processes import joined
    from harness.loop.prepare import prepare  # torch is imported late, so that --help and completion are quick

    with joined() as processes:
        job = prepare(cfg, command=own_command(), processes=processes)
        return job.earlier_result() if job.earlier else train(job)


def train(job) -> float | None:
    """Train until the budget is spent, or until a signal asks to stop."""
    if not job.hold():
        return job.earlier_result()
    run, plan = job.run, job.plan
    with job.opened() as progress, job.stop as stop:
        while not run.finished and not stop.number:
            before = job.step()
            if run.spent.steps % plan.record.every_steps == 0:
                job.append(run.train_row())
            if job.validation_due(before):
                job.validate(progress)
            if job.checkpoint_due():
                job.save()
            if progress.due:
                progress.update(**job.standing())
        job.save()
        if stop.number:
            stop.pass_on()
            same = "the same command without force=true" if plan.force else "the same command"
            progress.say(f"stopped at {run.spent.bytes:,} bytes; {same} goes on: {job.command}")
            raise SystemExit(128 + stop.number)
        summary = job.finish(progress)
    job.show(summary)
    return summary["valid_bits_per_byte"]


if __name__ == "__main__":
    run_command(main, many=True, launcher=Resuming)
