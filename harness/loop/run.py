"""Run: one command's work in a run folder. It holds the folder, listens to signals, says when to record, validate and save, and
at the end scores the best weights and writes the summary. What comes before is in ``prepare.py``, a step in ``trainer.py``."""

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import yaml

from harness.cache import write_whole
from harness.count.memory import Peak, PeakMemory
from harness.device.processes import ProcessGroup, is_connection_failure
from harness.device.stop_signal import StopSignal
from harness.device.units import gathered, taken_out
from harness.failures import OutOfMemory, StorageFailure, is_out_of_memory
from harness.loop import summary
from harness.loop.futures import NOT_CAUSAL
from harness.loop.progress import ProgressBar
from harness.loop.trainer import Trainer
from harness.optim.budget import Spent
from harness.plan.build import Plan
from harness.record import checkpoint, folder, shards
from harness.record.closing_table import bits, print_closing_table, scored_splits
from harness.record.rows import CONFIG, Record, read_rows, write_summary
from harness.record.wandb_run import WandbRun

WARM_STEPS = 2
"""Steps after which peak memory is measured: the first compile, and make the optimizers' state."""
TRAINED_PER_SCORED = 10
"""Bytes that are trained on for each that a validation on the way scores: a count, so that what is chosen does not depend
on the machine's speed."""


@contextmanager
def recording(plan: Plan, place: folder.RunFolder, provenance: dict, processes: ProcessGroup) -> Iterator[None]:
    """Errors are recorded in the run folder, by the one process that writes there; short memory says what to lower."""
    with place.failing(provenance) if processes.is_main else nullcontext():
        try:
            yield
        except Exception as error:
            if is_connection_failure(error):
                raise processes.loss(error) from error
            if not is_out_of_memory(error) or isinstance(error, OutOfMemory):
                raise
            b, reason = plan.batch, str(error).partition("\n")[0][:200] or type(error).__name__
            words = re.split(r"\btrain(?:\.py)?(?: |$)", provenance["command"], maxsplit=1)[-1]
            short = OutOfMemory(
                f"out of memory ({reason}). Lower batch.streams={b.streams}, batch.segment={b.segment} or model.span="
                f"{plan.model.span}, raise batch.accumulate={b.accumulate} (at most batch.streams), or set "
                f"runtime.checkpoint=layers. What fits is predicted by: python -m bench.fit {words} "
                "device_memory=24GiB (or as much as there is)"
            )
            short.already_printed = getattr(error, "already_printed", None)
            raise short from error


class Run:
    """One run, as one command works on it; of several processes, the first one alone holds the folder and writes.

    Attributes:
        trainer: what trains; None where an earlier command finished the run, which is returned.
        stop: the signals that end training between two steps.
        best_bits: lowest bits per byte of the validations on the way, or infinity.
        validated: bytes and fraction of the budget spent before the last validation, and the pairs that each reads, once known.
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
        held: ExitStack | None = None,
    ):
        self.plan, self.folder, self.trainer, self.command = plan, place, trainer, command
        self._processes, self._held = processes, held
        self._peak, self._most, self._steps_here = peak, Peak(None, approximate=False), 0
        self.stop = StopSignal(alone=processes.world_size == 1)
        self._saved, self._saved_seconds, self._save_late = Spent(), time.monotonic(), False
        if trainer:
            self._saved = trainer.spent
        self.best_bits, self._last_bits = math.inf, math.nan
        self.validated = {"bytes": self._saved.bytes, "fraction": plan.budget.fraction(self._saved), "size": None}

    @property
    def earlier(self) -> dict | None:
        """The finished run's summary."""
        return self.folder.summary

    def earlier_result(self) -> float | None:
        """Show the finished run of this very configuration and source, and return its objective."""
        print(f"finished before: {self.folder.path} (force=true runs it again)")
        if not self.plan.sweeping:
            print_closing_table(self.earlier)
        if "WANDB_SWEEP_ID" in os.environ and self._processes.is_main:  # its agent waits for a run that has the metric
            with self._wandb_run(id=None, data=self.earlier["data"]["name"]) as again:
                again.log_end(summary=self.earlier, figures=sorted(self.folder.path.glob("*.png")))
        return self.earlier["valid_bits_per_byte"]

    def hold(self) -> bool:
        """Take the folder; False where another process has finished the run since ``prepare`` looked for it."""
        with self._held as held:
            if self._processes.is_main:
                held.callback(self.folder.release)
            self.folder.summary, self.folder.checkpoint = self._processes.on_main(self.folder.hold)
            if self.earlier is None:
                self._held = held.pop_all()
        return self.earlier is None

    @contextmanager
    def opened(self) -> Iterator[ProgressBar]:
        """Record and W&B are open, the run stands where its checkpoint left it; yields progress."""
        plan, trainer = self.plan, self.trainer
        with self._held as stack:
            provenance = summary.identity(trainer, self.folder.identity, command=self.command)
            stack.enter_context(recording(plan, self.folder, provenance, self._processes))
            rows, sha256, wandb_id = self._restore()
            verb = f"resuming at {trainer.spent.bytes:,} bytes" if rows else "training"
            how = f"{trainer.backend}, {trainer.runtime.precision}"
            print(f"{verb}: {self.folder.path}  |  {trainer.corpus.label()}  |  {how}")
            if self._processes.world_size > 1:
                self._processes.standing = self._losses
            with self._processes.fail_together():
                if self._processes.is_main:
                    write_whole(self.folder.path / CONFIG, yaml.safe_dump(plan.config, sort_keys=False).encode())
                    self._record = stack.enter_context(Record(self.folder.path, rows=rows, sha256=sha256))
                    self._wandb = stack.enter_context(self._wandb_run(id=wandb_id, data=trainer.corpus.name))
                    if not rows:  # the numbers of layers are keys: as text, for JSON
                        config = json.loads(json.dumps(plan.config))
                        self.append({"kind": "provenance", **provenance, "config": config})
            self._load = trainer.runtime.load_meter()
            name = self.folder.path.name if plan.beside_others else None
            yield stack.enter_context(ProgressBar(every_seconds=plan.record.progress_seconds, name=name))

    def _losses(self) -> str:
        """What a run that ends now, without saving, loses; as sentences."""
        spent, newest = self.trainer.spent.bytes, checkpoint.newest(self.folder.path)
        what = f"The newest whole checkpoint is {newest}" if newest else f"{self.folder.path} has no checkpoint yet"
        lost = f"{spent - self._saved.bytes:,} of {spent:,} bytes of training are lost"
        return f"{what}, and {lost}; the same command goes on: {self.command}"

    def _wandb_run(self, *, id: str | None, data: str) -> WandbRun:
        plan, name = self.plan, self.folder.path.name
        tags = (*plan.record.wandb.tags, *filter(None, (plan.variant, data)))
        settings = vars(plan.record.wandb) | {"name": name, "job_type": plan.purpose, "tags": tags}
        return WandbRun(self.folder.path, config=plan.config, id=id, **settings)

    def _restore(self) -> tuple[int, str | None, str | None]:
        """Go on from the newest checkpoint that is whole, if there is one: the rows that it had seen, their digest, W&B's run."""
        if self._processes.is_main:
            self.folder.begin()
        if self.folder.checkpoint is None:
            return 0, None, None
        content = shards.put_back(self._processes.on_main(self._read), self.trainer.update.units.empty)
        with self._processes.fail_together():
            self.trainer.restore(content)
        self.best_bits, self.validated = content["best_bits"], content["validated"]
        self._saved = self.trainer.spent
        return content["rows"], content["sha256"], content["wandb_id"]

    def _read(self) -> dict:
        """The checkpoint; the best weights are looked at as well: at the end they would be missed too late."""
        content = checkpoint.load_newest(self.folder.path, vars(self.folder.identity))
        if content["best_bits"] < math.inf:
            checkpoint.load_best(self.folder.path, vars(self.folder.identity))
        return content

    def append(self, row: dict) -> None:
        """A row for the record and for W&B."""
        if self._processes.is_main:
            row = self._record.append(row)
            self._last_bits = row.get("bits_per_byte") or self._last_bits
            self._wandb.log(row)

    def step(self) -> None:
        """One training step, after which all processes know of a signal that one has received, and whether by the clock of the
        first one a checkpoint is due."""
        self.trainer.step()
        every = self.plan.checkpoint.every_seconds
        late = every is not None and time.monotonic() - self._saved_seconds >= every
        words = self._processes.all_gather((self.stop.heard, late and self._processes.is_main))
        signals, lates = zip(*words, strict=True)
        self.stop.agreed, self._save_late = max(signals), any(lates)
        self._steps_here += 1
        if self._steps_here == WARM_STEPS:
            self._peak.reset()

    def standing(self) -> dict:
        """For the progress line."""
        trainer, fraction = self.trainer, self.trainer.fraction
        return {
            "bits_per_byte": trainer.recent_bits(self._last_bits),
            "fraction": fraction,
            "bytes_seen": trainer.spent.bytes,
            "bytes_per_second": trainer.bytes_per_second,
            "left_seconds": trainer.spent.seconds * (1 - fraction) / fraction if fraction else None,
        }

    def validation_due(self) -> bool:
        """Whether another ``eval.every`` of the budget is spent, and enough read since the last validation; the end has
        its own."""
        every, last, trainer = self.plan.eval.every, self.validated, self.trainer
        if every <= 0 or trainer.finished:
            return False
        marks, before = (int(fraction / every + 1e-9) for fraction in (trainer.fraction, last["fraction"]))
        return marks > before and trainer.spent.bytes - last["bytes"] >= TRAINED_PER_SCORED * (last["size"] or 1)

    def validate(self, progress: ProgressBar) -> None:
        """Score bytes of valid that are in no reported score, and save the weights if they are the best so far. The first
        validation decides how many pairs each of them reads, or they would not compare."""
        trainer, last, part = self.trainer, self.validated, self.trainer.choosing()
        most = min(len(part), self.plan.eval.bytes or math.inf) - 1
        size = last["size"] or max(1, min(most, (trainer.spent.bytes - last["bytes"]) // TRAINED_PER_SCORED))
        self._most = self._most.or_higher(self._peak.read())  # of training steps: scoring is apart
        score = trainer.evaluate(part, pairs=size)
        value = score.bits_per_byte
        self.validated = {"bytes": trainer.spent.bytes, "fraction": trainer.fraction, "size": size}
        row = {"kind": "valid", **trainer.place(), "bits_per_byte": value, "capped_bytes": len(score.nats)}
        self.append(row | {"metrics": trainer.model.metrics(score.stats)})
        progress.evaluated(split="valid", bits_per_byte=value, bytes_seen=trainer.spent.bytes, capped=True)
        # The first always, even NaN: there must be weights to score.
        if value < self.best_bits or self.best_bits == math.inf:
            self.best_bits = value if value < math.inf else math.inf
            best = {"model": gathered(trainer.model.state_dict()), "bytes": trainer.spent.bytes}
            with self._processes.fail_together():
                if self._processes.is_main:
                    checkpoint.save_best(self.folder.path, best | {"identity": vars(self.folder.identity)})
        self._peak.reset()

    def checkpoint_due(self) -> bool:
        every = self.plan.checkpoint.every_steps
        return self._save_late or (every is not None and self.trainer.spent.steps % every == 0)

    def save(self) -> None:
        """A checkpoint that agrees with the rows written so far."""
        step = self.trainer.spent.steps
        content, divided = taken_out(self.trainer.content())
        if divided:
            content[shards.KEY] = self._save_shards(divided, step=step)
        with self._processes.fail_together():
            if self._processes.is_main:
                content |= {"best_bits": self.best_bits, "validated": self.validated, "wandb_id": self._wandb.id}
                content |= {"rows": self._record.rows, "sha256": self._record.sha256}
                content["identity"] = vars(self.folder.identity)
                checkpoint.save(self.folder.path, content, step=step, keep=self.plan.checkpoint.keep)
        self._saved, self._saved_seconds = self.trainer.spent, time.monotonic()

    def _save_shards(self, divided: dict, *, step: int) -> dict:
        """Each process's rows, beside the checkpoint that is to name them."""
        from harness.record import shard_files  # late: slow to import

        place = self._processes.on_main(partial(checkpoint.new_shards, self.folder.path, step=step))
        with self._processes.fail_together():
            tensors, written = shard_files.write(place, divided)
        digests = {name: digest for each in self._processes.all_gather(written) for name, digest in each.items()}
        with self._processes.fail_together():
            if self._processes.is_main and (unseen := [name for name in digests if not (place / name).is_file()]):
                raise StorageFailure(
                    f"{place / unseen[0]}: another process has written it where the first one does not see it; "
                    f"runtime.shard=full needs a folder outputs={self.folder.path.parent} that all of them share"
                )
        return {"folder": place.name, "tensors": tensors, "sha256": digests}

    def finish(self, progress: ProgressBar) -> dict:
        """The last validation, the best weights' scores on whole splits, the summary and the figures."""
        trainer, plan = self.trainer, self.plan
        row = summary.identity(trainer, self.folder.identity, command=self.command) | {"load": self._load.read()}
        self.validate(progress)
        best = self._processes.on_main(lambda: checkpoint.load_best(self.folder.path, vars(self.folder.identity)))
        trainer.take_weights(best["model"])
        row |= summary.costs(trainer, peak=self._most.across(self._processes.largest))  # FLOPs of the best weights
        if row["unreached"]:
            progress.print(f"no gradient ever came to {', '.join(row['unreached'])}: in this run they learn nothing")
        row |= {"best_bytes_seen": best["bytes"], "spans": summary.spans(trainer.model.metrics({}))}
        row |= {"compressors": {}, "capped": {}, "test_bits_per_byte": None}
        for split in trainer.splits:
            scored = summary.final_score(trainer, split, row)
            self.append(scored)
            if scored["check"] == NOT_CAUSAL:
                change = f"what comes after a byte changes its prediction by {scored['future_nats']:.2g} nats"
                change += f"; the data's floor is {scored['floor_bits_per_byte']:.4f}" * (
                    "floor_bits_per_byte" in scored
                )
                progress.print(f"final {split}: NOT CAUSAL: {change}; no table compares this run")
            shown = {"bits_per_byte": scored["bits_per_byte"], "capped": bool(scored["capped_bytes"])}
            progress.evaluated(split=f"final {split}", bytes_seen=best["bytes"], **shown)
        row["memory"]["inference_peak_bytes"] = self._peak.read().across(self._processes.largest).bytes
        row["spans"] = row["spans"] or summary.spans(row["valid_metrics"])
        row["status"] = "finished"
        if self._processes.is_main:
            write_summary(self.folder.path, summary=row)
            self._wandb.log_end(summary=row, figures=self._figures(row) if plan.record.figures else [])
        return row

    def _figures(self, row: dict) -> list:
        """What could be drawn: the result does not depend on it."""
        drawn, plan = [], self.plan
        try:
            from harness.record.figures import draw_figures  # late: matplotlib is slow to import

            drawn += draw_figures(
                read_rows(self._record.path),
                folder=self.folder.path,
                label=f"{plan.variant}, seed {plan.seed}: {self.trainer.corpus.label()}",
                compressors=row["compressors"]["valid"],
                span_limit=plan.model.span,
            )
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            print(f"figures: {reason} (the run itself is finished)", file=sys.stderr)
        return drawn

    def show(self, row: dict) -> None:
        """The closing table, and how to sync W&B; of a sweep's job one line."""
        if not self._processes.is_main:
            return
        if self.plan.sweeping:  # bench.report has tables of all
            scores = ", ".join(f"{split} {bits(row, split=split)}" for split in scored_splits([row]))
            print(f"finished: {self.folder.path}  {scores} bits per byte")
            return
        print_closing_table(row)
        print(f"run folder: {self.folder.path}")
        if self._wandb.hint:
            print(self._wandb.hint)
