"""Run: one command's work in a run folder: its lock, record and signals, when to validate and save, and at the end the
scores of the best weights and the summary."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import yaml

from harness.cache import write_atomically
from harness.count.memory import Peak, PeakMemory
from harness.device.processes import ProcessGroup, is_connection_failure
from harness.device.stop_signal import StopSignal
from harness.device.units import gathered
from harness.failures import OutOfMemory, is_out_of_memory
from harness.loop import summary
from harness.loop.scoring import NOT_CAUSAL
from harness.loop.trainer import Trainer
from harness.optim.budget import Spent
from harness.plan.build import Plan
from harness.record import checkpoint, folder
from harness.record.closing_table import bits, data_label, print_closing_table, scored_splits
from harness.record.rows import CONFIG, Record, write_summary
from harness.record.wandb_run import WandbRun

WARM_STEPS = 2
"""Steps before peak memory is measured: they compile, and allocate the optimizers' state."""
TRAINED_PER_SCORED = 10
"""Trained bytes for each byte that a validation on the way scores: a count, so that the choice does not depend on
speed."""


@contextmanager
def recording(plan: Plan, place: folder.RunFolder, provenance: dict, processes: ProcessGroup) -> Iterator[None]:
    """Record errors in the run folder, in the process that writes there; for lack of memory, name the keys to lower."""
    with place.failing(provenance) if processes.is_main else nullcontext():
        try:
            yield
        except Exception as error:
            if is_connection_failure(error):
                raise processes.loss(error) from error
            if not is_out_of_memory(error) or isinstance(error, OutOfMemory):
                raise
            b, reason = plan.batch, str(error).partition("\n")[0][:200] or type(error).__name__
            short = OutOfMemory(
                f"out of memory ({reason}). Lower batch.streams={b.streams}, batch.segment={b.segment} or model.span="
                f"{plan.model.span}, raise batch.accumulate={b.accumulate} (at most batch.streams), or set "
                "runtime.checkpoint=layers; python -m bench.fit with the same words predicts what fits"
            )
            short.already_printed = getattr(error, "already_printed", None)
            raise short from error


class Run:
    """One run; of several processes, the first one alone holds the folder and writes.

    Attributes:
        trainer: None where an earlier command has finished the run.
        best_bits: lowest bits per byte of the validations so far, or infinity.
        validated: bytes and fraction of the budget spent at the last validation, and the pairs each reads, or None.
    """

    def __init__(
        self,
        plan: Plan,
        place: folder.RunFolder,
        trainer: Trainer | None,
        *,
        command: str,
        processes: ProcessGroup,
        peak: PeakMemory | None = None,
    ):
        self.plan, self.folder, self.trainer, self.command = plan, place, trainer, command
        self._processes, self._peak, self._highest = processes, peak, Peak(None, approximate=False)
        self.stop = StopSignal(alone=processes.world_size == 1)
        self._saved_seconds, self._save_late = time.monotonic(), False
        self._steps_here, self._shown_seconds, self.best_bits = 0, time.monotonic(), math.inf
        spent = trainer.spent if trainer else Spent()
        self.validated = {"bytes": spent.bytes, "fraction": plan.budget.fraction(spent), "size": None}

    @property
    def earlier(self) -> dict | None:
        """The finished run's summary."""
        return self.folder.summary

    def earlier_result(self) -> float | None:
        """Show the finished run and return its objective."""
        print(f"finished before: {self.folder.path} (force=true runs it again)")
        if not self.plan.sweeping:
            print_closing_table(self.earlier)
        return self.earlier["valid_bits_per_byte"]

    def hold(self) -> bool:
        """Take the folder; False where another process has finished the run since ``prepare`` looked for it."""
        self.folder.summary, self.folder.checkpoint = self._processes.on_main(self.folder.hold)
        if self.earlier:
            self.folder.release()
        return not self.earlier

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Record and W&B are open, and the run stands where its checkpoint left it."""
        plan, trainer = self.plan, self.trainer
        with ExitStack() as stack:
            stack.callback(self.folder.release)
            provenance = summary.identity(trainer, self.folder.identity, command=self.command)
            stack.enter_context(recording(plan, self.folder, provenance, self._processes))
            saved = self._restore()
            verb = f"resuming at {trainer.spent.bytes:,} bytes" if saved else "training"
            how = f"{provenance['device']}, {trainer.backend}, {trainer.runtime.precision}"
            how += ", compiled" * trainer.runtime.compile
            print(f"{verb}: {self.folder.path}  |  {data_label(provenance['data'])}  |  {how}")
            with self._processes.fail_together():
                if self._processes.is_main:
                    config = json.loads(json.dumps(plan.config))  # the numbers of layers are keys: as text
                    write_atomically(self.folder.path / CONFIG, yaml.safe_dump(plan.config, sort_keys=False).encode())
                    seen = {"rows": saved.get("rows", 0), "sha256": saved.get("sha256")}
                    self._record = stack.enter_context(Record(self.folder.path, **seen))
                    tags = (*plan.record.wandb.tags, plan.variant, trainer.corpus.name)
                    settings = vars(plan.record.wandb) | {"name": self.folder.path.name, "tags": tags}
                    settings |= {"job_type": plan.purpose, "config": config, "id": saved.get("wandb_id")}
                    self._wandb = stack.enter_context(WandbRun(self.folder.path, **settings))
                    if not saved:
                        self.append({"kind": "provenance", **provenance, "config": config})
            yield

    def _restore(self) -> dict:
        """Go on from the newest undamaged checkpoint; its content, empty where there is none."""
        if self._processes.is_main:
            self.folder.begin()
        if self.folder.checkpoint is None:
            return {}
        content = self._processes.on_main(self._read)
        with self._processes.fail_together():
            self.trainer.restore(content)
        self.best_bits, self.validated = content["best_bits"], content["validated"]
        return content

    def _read(self) -> dict:
        """The checkpoint; the best weights are read as well, because at the end their damage would show too late."""
        content = checkpoint.load_newest(self.folder.path, vars(self.folder.identity))
        if content["best_bits"] < math.inf:
            checkpoint.load_best(self.folder.path, vars(self.folder.identity))
        return content

    def print(self, line: str) -> None:
        """Print a line, in a sweep with the run's name."""
        print(f"{self.folder.path.name}: {line}" if self.plan.sweeping else line, flush=True)

    def append(self, row: dict) -> None:
        """Write a row to the record and to W&B, and print a train row every ``record.progress_seconds``."""
        if not self._processes.is_main:
            return
        row = self._record.append(row)
        self._wandb.log(row)
        if row["kind"] == "train" and time.monotonic() - self._shown_seconds >= self.plan.record.progress_seconds:
            self._shown_seconds, speed = time.monotonic(), f"{row['clock']['bytes_per_second']:,.0f} bytes/s"
            self.print(f"{self.trainer.fraction:6.1%}  {self._score(row['bits_per_byte'])}, {speed}")

    def _score(self, bits_per_byte: float | None, *, capped: object = False) -> str:
        bits = "not finite" if bits_per_byte is None else f"{bits_per_byte:.4f}"
        return f"{bits}{'*' * bool(capped)} bits/byte after {self.trainer.spent.bytes:,} bytes"

    def step(self) -> None:
        """One training step; all processes agree on signals, and by the first's clock if a checkpoint is due."""
        self.trainer.step()
        late = time.monotonic() - self._saved_seconds >= (self.plan.checkpoint.every_seconds or math.inf)
        signals, lates = zip(*self._processes.all_gather((self.stop.heard, late)), strict=True)
        self.stop.agreed, self._save_late = max(signals), lates[0]
        self._steps_here += 1
        if self._steps_here == WARM_STEPS:
            self._peak.reset()

    def validation_due(self) -> bool:
        """Whether another ``eval.every`` of the budget is spent, and enough bytes since the last validation."""
        every, last, trainer = self.plan.eval.every, self.validated, self.trainer
        if every <= 0 or trainer.finished:
            return False
        marks, before = (int(fraction / every + 1e-9) for fraction in (trainer.fraction, last["fraction"]))
        return marks > before and trainer.spent.bytes - last["bytes"] >= TRAINED_PER_SCORED * (last["size"] or 1)

    def validate(self) -> None:
        """Score bytes of valid that no reported score reads, and save the weights if they are the best so far. All
        validations read as many pairs as the first, so that they compare."""
        trainer, last, part = self.trainer, self.validated, self.trainer.choosing()
        most = min(len(part), self.plan.eval.bytes or math.inf) - 1
        size = last["size"] or max(1, min(most, (trainer.spent.bytes - last["bytes"]) // TRAINED_PER_SCORED))
        with self._unmeasured():
            score = trainer.evaluate(part, pairs=size)
            bits_per_byte = score.bits_per_byte
            self.validated = {"bytes": trainer.spent.bytes, "fraction": trainer.fraction, "size": size}
            row = {"kind": "valid", **trainer.place(), "bits_per_byte": bits_per_byte, "capped_bytes": len(score.nats)}
            self.append(row | {"metrics": trainer.model.metrics(score.stats)})
            self.print(f" valid  {self._score(bits_per_byte, capped=True)}")
            # The first always, even with NaN: the end needs weights to score.
            if bits_per_byte < self.best_bits or self.best_bits == math.inf:
                self.best_bits = bits_per_byte if bits_per_byte < math.inf else math.inf
                weights = gathered(trainer.model.state_dict(), keep=self._processes.is_main)
                best = {"model": weights, "bytes": trainer.spent.bytes}
                with self._processes.fail_together():
                    if self._processes.is_main:
                        checkpoint.save_best(self.folder.path, best | {"identity": vars(self.folder.identity)})

    @contextmanager
    def _unmeasured(self) -> Iterator[None]:
        """Leave the memory that the block uses out of the peak of training."""
        self._highest = self._highest.maximum(self._peak.read())
        yield
        self._peak.reset()

    def checkpoint_due(self) -> bool:
        return self._save_late or self.trainer.spent.steps % (self.plan.checkpoint.every_steps or math.inf) == 0

    def save(self) -> None:
        """A checkpoint that agrees with the rows written so far."""
        with self._unmeasured() if self._steps_here >= WARM_STEPS else nullcontext():
            content = gathered(self.trainer.content(), keep=self._processes.is_main)
            with self._processes.fail_together():
                if self._processes.is_main:
                    content |= {"best_bits": self.best_bits, "validated": self.validated, "wandb_id": self._wandb.id}
                    content |= {"rows": self._record.rows, "sha256": self._record.sha256}
                    content["identity"] = vars(self.folder.identity)
                    step, keep = self.trainer.spent.steps, self.plan.checkpoint.keep
                    checkpoint.save(self.folder.path, content, step=step, keep=keep)
        self._saved_seconds = time.monotonic()

    def end_early(self) -> None:
        """Print how to go on, and end the process with the signal's exit code."""
        same = "the same command without force=true" if self.plan.force else "the same command"
        self.print(f"stopped at {self.trainer.spent.bytes:,} bytes; {same} goes on: {self.command}")
        raise SystemExit(128 + self.stop.number)

    def finish(self) -> dict:
        """The last validation, the best weights' scores on whole splits, and the summary."""
        trainer = self.trainer
        row = summary.identity(trainer, self.folder.identity, command=self.command)
        self.validate()
        best = self._processes.on_main(lambda: checkpoint.load_best(self.folder.path, vars(self.folder.identity)))
        trainer.take_weights(best["model"])
        row |= summary.costs(
            trainer, peak=self._highest.over_processes(self._processes.largest)
        )  # FLOPs of the best weights
        row |= {"best_bytes_seen": best["bytes"], "spans": summary.spans(trainer.model.metrics({}))}
        row |= {"compressors": {}, "capped": {}, "test_bits_per_byte": None}
        for split in trainer.splits:
            scored = summary.final_score(trainer, split, row)
            self.append(scored)
            if scored["check"] == NOT_CAUSAL:
                change = f"what comes after a byte changes its prediction by {scored['future_nats']:.2g} nats"
                if floor := scored.get("floor_bits_per_byte"):
                    change += f"; the data's floor is {floor:.4f}"
                self.print(f"final {split}: NOT CAUSAL: {change}; no table compares this run")
        row["memory"]["inference_peak_bytes"] = self._peak.read().over_processes(self._processes.largest).bytes
        row["spans"] = row["spans"] or summary.spans(row["valid_metrics"])
        # Compiled to the end or not.
        row |= {"backend": trainer.backend, "evaluation_backend": trainer.evaluation_backend}
        row["status"] = "finished"
        if self._processes.is_main:
            write_summary(self.folder.path, summary=row)
            self._wandb.log_end(summary=row)
        return row

    def show(self, row: dict) -> None:
        """Print the closing table and W&B's hint, or one line for a job of a sweep."""
        if self.plan.sweeping:  # bench.report has tables of all
            scores = ", ".join(f"{split} {bits(row, split=split)}" for split in scored_splits(row))
            print(f"finished: {self.folder.path}  {scores} bits per byte")
        elif self._processes.is_main:
            print_closing_table(row)
            print("\n".join(filter(None, [f"run folder: {self.folder.path}", self._wandb.hint])))
