"""Train a byte-level language model with one attention mechanism, and measure what it costs.

    python train.py variant=adaptive_span
    python train.py -m variant=mhsa,adaptive_span,all_attention,product_key_memory seed=0,1,2
    torchrun --nproc-per-node=8 train.py variant=adaptive_span

A run has four parts: compose (Hydra), plan (``harness/plan``), loop (this file) and record
(``harness/record``).
"""

import hydra
from omegaconf import DictConfig

from harness.compose.cli import command_of_run, run_command


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Start or resume a run, or report a finished one. Returns bits per byte on valid, the
    objective of sweeps."""
    from harness.device.processes import join_processes

    # imports torch, which --help and completion do not need
    from harness.loop.prepare import prepare

    with join_processes() as processes:
        run = prepare(cfg, command=command_of_run(), processes=processes)
        if run.folder.summary:
            return run.return_finished()
        return train(run)


def train(run) -> float | None:
    """Train until the budget is spent or a signal asks to stop. Returns bits per byte on valid."""
    if not run.lock_folder():
        return run.return_finished()
    trainer = run.trainer
    plan = run.plan
    with run.open_record(), run.stop_signal as stop_signal:
        while not trainer.finished and not stop_signal.signal_number:
            run.step()
            if trainer.state.spent.steps % plan.record.every_steps == 0:
                run.append(trainer.train_row())
            if run.validation_due():
                run.validate()
            if run.checkpoint_due():
                run.save()
        run.save()
        if stop_signal.signal_number:
            run.exit_by_signal()
        summary = run.finish()
    run.print_scores(summary)
    return summary["valid_bits_per_byte"]


if __name__ == "__main__":
    run_command(main, multiprocess=True)
