"""Train a byte-level language model with one attention mechanism, and measure what it costs.

    python train.py variant=adaptive_span
    python train.py -m variant=mhsa,adaptive_span,all_attention,product_key_memory seed=0,1,2
    torchrun --nproc-per-node=8 train.py variant=adaptive_span

The thread of the project: compose (Hydra) -> plan (``harness/plan``) -> loop (here) -> record (``harness/record``).
"""

import hydra
from omegaconf import DictConfig

from harness.compose.cli import command_of_run, run_command


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Begin, continue or return a run, or a sweep's job. Returns bits per byte on valid, the objective of sweeps."""
    from harness.device.processes import joined
    from harness.loop.prepare import prepare  # torch is imported late, so that --help and completion are quick

    with joined() as processes:
        run = prepare(cfg, command=command_of_run(), processes=processes)
        return run.earlier_result() if run.earlier else train(run)


def train(run) -> float | None:
    """Train until the budget is spent, or until a signal asks to stop."""
    if not run.hold():
        return run.earlier_result()
    trainer, plan = run.trainer, run.plan
    with run.opened(), run.stop as stop:
        while not trainer.finished and not stop.number:
            run.step()
            if trainer.spent.steps % plan.record.every_steps == 0:
                run.append(trainer.train_row())
            if run.validation_due():
                run.validate()
            if run.checkpoint_due():
                run.save()
        run.save()
        if stop.number:
            run.end_early()
        summary = run.finish()
    run.show(summary)
    return summary["valid_bits_per_byte"]


if __name__ == "__main__":
    run_command(main, many=True)
