"""Run: one command's work in a run folder. It holds the folder, listens to signals, says when to record, validate and save, and
at the end scores the best weights and writes the summary. What comes before is in ``prepare.py``, a step in ``trainer.py``."""

import json
import math
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
from harness.loop.trainer import Trainer
from harness.optim.budget import Spent
from harness.plan.build import Plan
from harness.record import checkpoint, folder, shards
from harness.record.closing_table import bits, print_closing_table, scored_splits
from harness.record.rows import CONFIG, Record, write_summary
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
            short = OutOfMemory(
                f"out of memory ({reason}). Lower batch.streams={b.streams}, batch.segment={b.segment} or model.span="
                f"{plan.model.span}, raise batch.accumulate={b.accumulate} (at most batch.streams), or set "
                "runtime.checkpoint=layers; python -m bench.fit with the same words predicts what fits"
            )
            short.already_printed = getattr(error, "already_printed", None)
            raise short from error


class Run:
    """One run, as one command works on it; of several processes, the first one alone holds the folder and writes.

    Attributes:
        trainer: what trains; None where an earlier command finished the run, which is returned.
        stop: the signals that end training between two steps.
        best_bits: lowest bits per byte of the validations on the way, or infinity.
        validated: bytes and fraction of the budget spent before the last validation, and the pairs that each reads, or None.
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
        self._saved = trainer.spent if trainer else Spent()
        self._saved_seconds, self._save_late = time.monotonic(), False
        self._steps_here, self._shown_seconds, self.best_bits = 0, time.monotonic(), math.inf
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
            rows, sha256, wandb_id = self._restore()
            verb = f"resuming at {trainer.spent.bytes:,} bytes" if rows else "training"
            how = f"{provenance['device']}, {trainer.backend}, {trainer.runtime.precision}"
            how += ", compiled" * trainer.runtime.compile
            print(f"{verb}: {self.folder.path}  |  {trainer.corpus.label()}  |  {how}")
            if self._processes.world_size > 1:
                self._processes.standing = self._losses
            with self._processes.fail_together():
                if self._processes.is_main:
                    config = json.loads(json.dumps(plan.config))  # the numbers of layers are keys: as text
                    write_whole(self.folder.path / CONFIG, yaml.safe_dump(plan.config, sort_keys=False).encode())
                    self._record = stack.enter_context(Record(self.folder.path, rows=rows, sha256=sha256))
                    tags = (*plan.record.wandb.tags, plan.variant, trainer.corpus.name)
                    settings = vars(plan.record.wandb) | {"name": self.folder.path.name, "tags": tags}
                    settings |= {"job_type": plan.purpose, "config": config, "id": wandb_id}
                    self._wandb = stack.enter_context(WandbRun(self.folder.path, **settings))
                    if not rows:
                        self.append({"kind": "provenance", **provenance, "config": config})
            self._load = trainer.runtime.load_meter()
            yield

    def _losses(self) -> str:
        """What a run that ends now, without saving, loses; as sentences."""
        spent, newest = self.trainer.spent.bytes, checkpoint.newest(self.folder.path)
        what = f"The newest whole checkpoint is {newest}" if newest else f"{self.folder.path} has no checkpoint yet"
        lost = f"{spent - self._saved.bytes:,} of {spent:,} bytes of training are lost"
        return f"{what}, and {lost}; the same command goes on: {self.command}"

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

    def print(self, line: str) -> None:
        """A line, with the run's name where several runs write to one terminal."""
        print(f"{self.folder.path.name}: {line}" if self.plan.beside_others else line, flush=True)

    def append(self, row: dict) -> None:
        """A row for the record and for W&B; of train rows, one in ``record.progress_seconds`` is shown."""
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

    def validation_due(self) -> bool:
        """Whether another ``eval.every`` of the budget is spent, and enough read since the last validation; the end has
        its own."""
        every, last, trainer = self.plan.eval.every, self.validated, self.trainer
        if every <= 0 or trainer.finished:
            return False
        marks, before = (int(fraction / every + 1e-9) for fraction in (trainer.fraction, last["fraction"]))
        return marks > before and trainer.spent.bytes - last["bytes"] >= TRAINED_PER_SCORED * (last["size"] or 1)

    def validate(self) -> None:
        """Score bytes of valid that are in no reported score, and save the weights if they are the best so far. The first
        validation decides how many pairs each of them reads, or they would not compare."""
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
            # The first always, even NaN: there must be weights to score.
            if bits_per_byte < self.best_bits or self.best_bits == math.inf:
                self.best_bits = bits_per_byte if bits_per_byte < math.inf else math.inf
                best = {"model": gathered(trainer.model.state_dict()), "bytes": trainer.spent.bytes}
                with self._processes.fail_together():
                    if self._processes.is_main:
                        checkpoint.save_best(self.folder.path, best | {"identity": vars(self.folder.identity)})

    @contextmanager
    def _unmeasured(self) -> Iterator[None]:
        """Memory used inside of the block does not count in the peak of training."""
        self._highest = self._highest.or_higher(self._peak.read())
        yield
        self._peak.reset()

    def checkpoint_due(self) -> bool:
        every = self.plan.checkpoint.every_steps
        return self._save_late or (every is not None and self.trainer.spent.steps % every == 0)

    def save(self) -> None:
        """A checkpoint that agrees with the rows written so far."""
        step = self.trainer.spent.steps
        with self._unmeasured() if self._steps_here >= WARM_STEPS else nullcontext():
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

    def end_early(self) -> None:
        """Say how to go on after a signal, and end the process as it asks."""
        self.stop.pass_on()
        same = "the same command without force=true" if self.plan.force else "the same command"
        self.print(f"stopped at {self.trainer.spent.bytes:,} bytes; {same} goes on: {self.command}")
        raise SystemExit(128 + self.stop.number)

    def finish(self) -> dict:
        """The last validation, the best weights' scores on whole splits, and the summary."""
        trainer = self.trainer
        row = summary.identity(trainer, self.folder.identity, command=self.command) | {"load": self._load.read()}
        self.validate()
        best = self._processes.on_main(lambda: checkpoint.load_best(self.folder.path, vars(self.folder.identity)))
        trainer.take_weights(best["model"])
        row |= summary.costs(trainer, peak=self._highest.across(self._processes.largest))  # FLOPs of the best weights
        if row["unreached"]:
            self.print(f"no gradient ever came to {', '.join(row['unreached'])}: in this run they learn nothing")
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
        row["memory"]["inference_peak_bytes"] = self._peak.read().across(self._processes.largest).bytes
        row["spans"] = row["spans"] or summary.spans(row["valid_metrics"])
        row |= {
            "backend": trainer.backend,
            "evaluation_backend": trainer.evaluation_backend,
        }  # compiled to the end or not
        row["status"] = "finished"
        if self._processes.is_main:
            write_summary(self.folder.path, summary=row)
            self._wandb.log_end(summary=row)
        return row

    def show(self, row: dict) -> None:
        """The closing table, and how to sync W&B; of a sweep's job one line."""
        if not self._processes.is_main:
            return
        if self.plan.sweeping:  # bench.report has tables of all
            scores = ", ".join(f"{split} {bits(row, split=split)}" for split in scored_splits(row))
            print(f"finished: {self.folder.path}  {scores} bits per byte")
            return
        print_closing_table(row)
        print(f"run folder: {self.folder.path}")
        if self._wandb.hint:
            print(self._wandb.hint)
