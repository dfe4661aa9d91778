"""Run: the work of one command in a run folder. It holds the folder's lock, the record and the
signal handlers, decides when to validate and to save, and at the end writes the scores of the
best weights and the summary."""

import functools
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import yaml

from harness.cache import write_atomically
from harness.count.memory import Peak, PeakMemory
from harness.device.full_tensors import full_tensors
from harness.device.processes import ProcessGroup, is_connection_failure
from harness.device.stop_signal import StopSignal
from harness.failures import OutOfMemory, Stopped, first_line, is_out_of_memory, refuse_exit
from harness.loop import summary
from harness.loop.state import Validated
from harness.loop.trainer import Trainer
from harness.plan.build import Plan
from harness.record import checkpoint
from harness.record.cells import duration, score_unit
from harness.record.closing_table import (
    bits,
    data_label,
    next_steps,
    print_closing_table,
    scored_splits,
)
from harness.record.display import Display
from harness.record.folder import RunFolder
from harness.record.row import Provenance, RunOrigin, Score, Summary
from harness.record.rows import CONFIG, RECORD, Record, read_rows, to_json, write_summary
from harness.record.wandb_run import WandbRun

# steps before peak memory is measured; they compile and allocate the optimizers' state
WARM_UP_STEPS = 2
TRAINED_BYTES_PER_SCORED_BYTE = 10
"""Bytes trained per byte scored in a validation. Not seconds, so that the selected weights do
not depend on speed."""


@contextmanager
def record_errors(
    plan: Plan, folder: RunFolder, provenance: dict, processes: ProcessGroup
) -> Iterator[None]:
    """Context that records errors in the run folder. An error for lack of memory names the keys
    to change."""
    with folder.record_failure(provenance) if processes.is_main else nullcontext():
        try:
            with refuse_exit(f"variant={plan.variant}"):
                yield
        except Exception as error:
            if is_connection_failure(error):
                raise processes.process_lost(error) from error
            if not is_out_of_memory(error) or isinstance(error, OutOfMemory):
                raise
            b = plan.batch
            reason = first_line(error)[:200] or type(error).__name__
            out_of_memory = OutOfMemory(
                f"out of memory ({reason}). Lower batch.streams={b.streams}, "
                f"batch.segment={b.segment} or model.span={plan.model.span}, raise "
                f"batch.accumulate={b.accumulate} (at most batch.streams), or set "
                "runtime.checkpoint=layers; python -m bench.fit with the same overrides predicts "
                "what fits"
            )
            out_of_memory.already_printed = getattr(error, "already_printed", None)
            raise out_of_memory from error


@dataclass(kw_only=True, eq=False)
class Run:
    """One run. If it has several processes, only the main one locks the folder and writes.
    ``trainer`` is None if an earlier command has finished the run."""

    plan: Plan
    folder: RunFolder
    command: str
    processes: ProcessGroup
    display: Display
    trainer: Trainer | None = None
    peak_meter: PeakMemory | None = None

    def __post_init__(self):
        self.stop_signal = StopSignal(single_process=self.processes.world_size == 1)
        self._is_main = self.processes.is_main
        self._saved_at = self._printed_at = time.monotonic()
        self._save_by_clock = False
        self._steps_of_command = 0

    def return_finished(self) -> float | None:
        """Print the scores of the run that an earlier command has finished, and return its bits
        per byte on valid."""
        self.display.stop()
        print(f"finished before: {self.folder.path} (force=true runs it again)")
        # a trial of W&B's agent, which needs a score
        if "WANDB_SWEEP_ID" in os.environ and self._is_main:
            with self._wandb_run(self.folder.summary["data"]["name"], id=None) as trial:
                trial.log_end(summary=self.folder.summary)
        if not self.plan.sweeping:
            print_closing_table(self.folder.summary)
        return self.folder.summary["valid_bits_per_byte"]

    def lock_folder(self) -> bool:
        """Lock the run folder. Return False if another process has finished the run in the
        meantime."""
        with self.display:
            self.folder.summary, self.folder.checkpoint = self.processes.on_main(self.folder.lock)
        if self.folder.summary:
            self.folder.unlock()
        return not self.folder.summary

    @contextmanager
    def open_record(self) -> Iterator[None]:
        """Context with an open record and W&B run, in which training continues from the newest
        checkpoint."""
        plan = self.plan
        trainer = self.trainer
        with ExitStack() as stack:
            stack.callback(self.folder.unlock)
            stack.callback(self.display.stop)
            origin = summary.run_origin(trainer, self.folder.identity, command=self.command)
            stack.enter_context(record_errors(plan, self.folder, to_json(origin), self.processes))
            is_resumed = self._restore()
            task = "training"
            if is_resumed:
                task = f"resuming at {trainer.state.spent.bytes:,} bytes"
            device = f"{origin.device}, {trainer.backend}, {trainer.runtime.precision}"
            device += ", compiled" if trainer.runtime.compile else ""
            self.display.print(
                f"{task}: {self.folder.path}  |  {data_label(origin.data)}  |  {device}"
            )
            self.processes.on_main(lambda: self._open_files(stack, origin, is_resumed))
            yield

    def _open_files(self, stack: ExitStack, origin: RunOrigin, is_resumed: bool) -> None:
        """Write the configuration, and open record and W&B run."""
        plan = self.plan
        path = self.folder.path
        state = self.trainer.state
        write_atomically(path / CONFIG, yaml.safe_dump(plan.config, sort_keys=False).encode())
        self._record = Record(path, rows=state.rows, sha256=state.sha256)
        self._wandb = stack.enter_context(
            self._wandb_run(self.trainer.corpus.name, id=state.wandb_id)
        )
        if is_resumed:
            self._wandb.resume(read_rows(path / RECORD))
        else:
            self.append(Provenance(kind="provenance", **vars(origin), config=plan.config))

    def _wandb_run(self, corpus: str, *, id: str | None) -> WandbRun:
        plan = self.plan
        settings = vars(plan.record.wandb) | {
            "name": self.folder.path.name,
            "tags": (*plan.record.wandb.tags, plan.variant, corpus),
            "job_type": plan.purpose,
            "config": to_json(plan.config),
            "id": id,
            "sweeping": plan.sweeping,
        }
        return WandbRun(self.folder.path, **settings)

    def _restore(self) -> bool:
        """Continue from the newest undamaged checkpoint. Returns whether there is one."""
        if self._is_main:
            self.folder.remove_outdated()
        if self.folder.checkpoint is None:
            return False
        content = self.processes.on_main(self._read_checkpoint)
        with self.processes.fail_together():
            self.trainer.load_checkpoint(content)
        return True

    def _read_checkpoint(self) -> dict:
        """Read the newest checkpoint. The best weights are read as well, so that damage is
        reported before training."""
        content = checkpoint.load_newest(self.folder.path, vars(self.folder.identity))
        if content["best_bits"] < math.inf:
            checkpoint.load_best(self.folder.path, vars(self.folder.identity))
        return content

    def print(self, line: str) -> None:
        """Print a line, in a sweep with the run's name."""
        self.display.print(f"{self.folder.path.name}: {line}" if self.plan.sweeping else line)

    def append(self, row: object) -> None:
        """Write a row to the record and to W&B. A train row is shown behind the bar. Without a bar
        it is printed, at most every ``record.progress_seconds``."""
        if not self._is_main:
            return
        row = to_json(row)
        self._record.append(row)
        self._wandb.log(row)
        if row["kind"] != "train":
            return
        speed = f"{row['clock']['bytes_per_second']:,.0f} bytes/s"
        self.display.note(f"{self._score_text(row['bits_per_byte'])}, {speed}")
        waited = time.monotonic() - self._printed_at
        if not self.display.is_shown and waited >= self.plan.record.progress_seconds:
            self._printed_at = time.monotonic()
            steps = self.plan.record.every_steps
            fraction = self.trainer.fraction
            spent = self.trainer.state.spent
            left = duration(spent.seconds * (1 - fraction) / max(fraction, 1e-9))
            self.print(
                f"{fraction:4.0%} train  {self._score_text(row['bits_per_byte'])} after "
                f"{spent.bytes:,} bytes (mean of {steps} steps), {speed}, {left} left"
            )

    def step(self) -> None:
        """Make one training step. Processes agree on stop signals, and on checkpoints by the
        main process's clock."""
        if self._steps_of_command == 0 and self.plan.runtime.compile:
            self.display.phase("compiling the model")
        self.trainer.step()
        save_due = time.monotonic() - self._saved_at >= (
            self.plan.checkpoint.every_seconds or math.inf
        )
        signals, saves_due = zip(
            *self.processes.all_gather((self.stop_signal.received_signal, save_due)), strict=True
        )
        self.stop_signal.shared_signal = max(signals)
        self._save_by_clock = saves_due[0]
        self._steps_of_command += 1
        self.display.advance(self.trainer.fraction)
        if self._steps_of_command == WARM_UP_STEPS:
            self.peak_meter.reset()

    def validation_due(self) -> bool:
        """Return whether another ``eval.every`` of the budget is spent, and enough bytes since the
        last validation."""
        every = self.plan.eval.every
        last = self.trainer.state.validated
        trainer = self.trainer
        if every <= 0 or trainer.finished:
            return False
        intervals, validated_intervals = (
            int(spent / every + 1e-9) for spent in (trainer.fraction, last.fraction)
        )
        trained_bytes = trainer.state.spent.bytes - last.bytes
        return (
            intervals > validated_intervals
            and trained_bytes >= TRAINED_BYTES_PER_SCORED_BYTE * (last.size or 1)
        )

    def validate(self) -> None:
        """Score bytes of valid that no reported score includes, and save the weights if they are
        the best so far. All validations score as many pairs as the first, so that they are
        comparable."""
        trainer = self.trainer
        objective = trainer.objective
        state = trainer.state
        split = objective.selection_part()
        max_pairs = min(len(split), self.plan.eval.bytes or math.inf) - 1
        trained_bytes = state.spent.bytes - state.validated.bytes
        size = state.validated.size or max(
            1, min(max_pairs, trained_bytes // TRAINED_BYTES_PER_SCORED_BYTE)
        )
        self.display.phase("scoring a sample of valid")
        with self._outside_training_peak():
            trainer.check_weights()
            with trainer.whole_parameters():
                score, answers = objective.score_sample(trainer.model, split, pairs=size)
            state.validated = Validated(
                bytes=state.spent.bytes, fraction=trainer.fraction, size=size
            )
            self.append(
                Score(
                    kind="valid",
                    **trainer.progress(),
                    bits_per_byte=score.bits_per_byte,
                    capped_bytes=len(score.nats),
                    metrics=trainer.model.metrics(score.stats),
                    **answers,
                )
            )
            self.print(
                f"     sample {self._score_text(score.bits_per_byte)} after "
                f"{state.spent.bytes:,} bytes ({len(score.nats):,} {objective.scored} of valid)"
            )
            # The first weights are saved even with a score of NaN, because the final scores need
            # weights.
            if score.bits_per_byte < state.best_bits or state.best_bits == math.inf:
                # beside NaN, min returns its first argument
                state.best_bits = min(state.best_bits, score.bits_per_byte)
                self._save_best()

    def _save_best(self) -> None:
        weights = full_tensors(self.trainer.model.state_dict(), keep=self._is_main)
        n_bytes = self.trainer.state.spent.bytes
        content = {"model": weights, "bytes": n_bytes, "identity": vars(self.folder.identity)}
        self.processes.on_main(lambda: checkpoint.save_best(self.folder.path, content))

    @contextmanager
    def _outside_training_peak(self) -> Iterator[None]:
        """Context whose memory does not count towards the peak of training."""
        state = self.trainer.state
        state.peak = state.peak.maximum(self.peak_meter.read())
        yield
        self.peak_meter.reset()

    def _over_processes(self, peak: Peak) -> Peak:
        """Return the maximum of all processes' peaks."""
        return functools.reduce(Peak.maximum, self.processes.all_gather(peak, long_wait=True))

    def checkpoint_due(self) -> bool:
        """Return whether ``checkpoint.every_steps`` or ``checkpoint.every_seconds`` asks for a
        checkpoint."""
        return (
            self._save_by_clock
            or self.trainer.state.spent.steps % (self.plan.checkpoint.every_steps or math.inf) == 0
        )

    def save(self) -> None:
        """Save a checkpoint, with the number and digest of the rows written so far."""
        with (
            self._outside_training_peak()
            if self._steps_of_command >= WARM_UP_STEPS
            else nullcontext()
        ):
            state = self.trainer.state
            state.rows, state.sha256, state.wandb_id = self.processes.on_main(
                lambda: (*self._record.flush(), self._wandb.id)
            )
            self.trainer.check_weights()
            content = state.to_checkpoint(self.processes) | {"identity": vars(self.folder.identity)}
            step = state.spent.steps
            keep = self.plan.checkpoint.keep
            self.processes.on_main(
                lambda: checkpoint.save(self.folder.path, content, step=step, keep=keep)
            )
        self._saved_at = time.monotonic()

    def exit_by_signal(self) -> None:
        """Print the command that resumes the run, and exit with the signal's exit code."""
        command = "the same command"
        if self.plan.force:
            command = "the same command without force=true"
        self.print(
            f"stopped at {self.trainer.state.spent.bytes:,} bytes; {command} resumes the run: "
            f"{self.command}"
        )
        raise Stopped(128 + self.stop_signal.signal_number)

    def finish(self) -> dict:
        """Validate once more, score the best weights on all of the final splits, and write
        the summary."""
        trainer = self.trainer
        self.validate()
        best = self.processes.on_main(
            lambda: checkpoint.load_best(self.folder.path, vars(self.folder.identity))
        )
        # before the costs, because FLOPs depend on the weights
        trainer.load_checkpoint(best, restore="weights")
        self.display.phase("counting FLOPs")
        costs = summary.costs(trainer, peak=self._over_processes(trainer.state.peak))
        finals = []
        objective = trainer.objective
        for split in objective.splits:
            self.display.phase(f"scoring {split}, checking what is read")
            finals.append(summary.final_score(trainer, split))
        for final in finals:
            self.append(final)
        self.display.phase("scoring compressors")
        failed = [final for final in finals if final.check == objective.failed]
        for final in failed:
            self.print(
                f"final {final.kind}: {objective.failed.upper()}: "
                f"{objective.explain(vars(final))}; no table compares this run"
            )
        scores = {
            f"{final.kind}_{key}": entry
            for final in finals
            for key, entry in vars(final).items()
            if hasattr(Summary, f"{final.kind}_{key}")
        }
        inference = self._over_processes(self.peak_meter.read())
        # What earlier jobs of this process have left would count in a process's memory.
        unknown = inference.approximate and self.plan.sweeping
        memory = replace(costs.memory, inference_peak_bytes=None if unknown else inference.bytes)
        # The backends are those of now, because the run may have continued uncompiled.
        origin = summary.run_origin(trainer, self.folder.identity, command=self.command)
        row = Summary(
            **vars(origin) | {"check": (failed or finals)[0].check},
            **vars(costs) | {"memory": memory},
            best_bytes_seen=best["bytes"],
            spans=summary.spans(trainer.model.metrics({})) or summary.spans(finals[0].metrics),
            # After the peak is read, because they use memory.
            compressors=summary.compressors(trainer) if self._is_main else {},
            capped={final.kind: final.capped_bytes for final in finals if final.capped_bytes},
            **{"test_bits_per_byte": None} | scores,
            status="finished",
        )
        row = to_json(row)
        if self._is_main:
            write_summary(self.folder.path, summary=row)
            self._wandb.log_end(summary=row)
        return row

    def print_scores(self, row: dict) -> None:
        """Print the closing table and W&B's hint, or for a job of a sweep one line."""
        if self.plan.sweeping:
            scores = ", ".join(f"{split} {bits(row, split=split)}" for split in scored_splits(row))
            print(f"finished: {self.folder.path}  {scores} {score_unit(row)}")
        elif self._is_main:
            print_closing_table(row)
            generates = self.plan.objective.predicts_next
            print(next_steps(self.folder.path, upload=self._wandb.hint, generates=generates))

    def _score_text(self, bits: float | None) -> str:
        number = "not finite"
        if bits is not None:
            number = f"{bits:.4f}"
        unit = score_unit({"protocol": self.plan.protocol()}).replace(" per ", "/")
        return f"{number} {unit}"
