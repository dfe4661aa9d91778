"""Everything around the loop of ``train.py``: in it, when and what to record; after it, the best weights' scores, the
summary, the figures and the closing table. What comes before it is in ``prepare.py``."""

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
from harness.loop.train_state import TrainState
from harness.optim.budget import Spent
from harness.plan.build import Plan
from harness.record import checkpoint, folder, shards
from harness.record.cells import busy_words
from harness.record.closing_table import bits, print_closing_table, scored_splits
from harness.record.comparison import find_comparable
from harness.record.rows import CONFIG, Record, read_rows, write_summary
from harness.record.wandb_run import WandbRun

WARM_STEPS = 2
"""Steps after which peak memory is measured: the first compile, and make the optimizers' state."""


@contextmanager
def recording(plan: Plan, place: folder.RunFolder, known: dict, processes: ProcessGroup) -> Iterator[None]:
    """Errors are recorded in the run folder, by the one process that writes there; short memory says what to lower."""
    with place.failing(known) if processes.is_main else nullcontext():
        try:
            yield
        except Exception as error:
            if is_connection_failure(error):
                raise processes.loss(error) from error
            if not is_out_of_memory(error) or isinstance(error, OutOfMemory):
                raise
            said, words = (
                str(error).partition("\n")[0],
                re.split(r"\btrain(?:\.py)?(?: |$)", known["command"], maxsplit=1)[-1],
            )
            b, m = plan.batch, plan.model
            short = OutOfMemory(
                f"out of memory ({said[:200] or type(error).__name__}). Lower batch.streams={b.streams}, batch.segment="
                f"{b.segment} or model.span={m.span}, raise batch.accumulate={b.accumulate} (at most batch.streams), or set "
                f"runtime.checkpoint=layers. What fits is predicted by: python -m bench.fit {words} "
                "device_memory=24GiB (or as much as there is)"
            )
            short.already_printed = getattr(error, "already_printed", None)
            raise short from error


class Run:
    """One run, as one command works on it in its folder; of several processes, the first one alone holds and writes it.

    Attributes:
        stop: the signals that end training between two steps.
        training: what changes from step to step, or None where an earlier command finished the run, which is returned.
    """

    def __init__(
        self,
        plan: Plan,
        place: folder.RunFolder,
        training: TrainState | None,
        *,
        command: str,
        processes: ProcessGroup,
        peak: PeakMemory | None = None,
        held: ExitStack | None = None,
    ):
        self.plan, self.folder, self.training, self.command = plan, place, training, command
        self._peak, self._most, self._held = peak, Peak(None, approximate=False), held
        self._saved, self._saved_seconds = training.spent if training else Spent(), time.monotonic()
        self._last_bits = float("nan")
        self._steps_here = 0
        self._scored_bytes_per_second: float | None = None
        self._processes = processes
        self.stop = StopSignal(alone=processes.world_size == 1)

    @property
    def earlier(self) -> dict | None:
        """The finished run's summary."""
        return self.folder.summary

    def earlier_result(self) -> float | None:
        """Show the finished run of this very configuration and source, and return its objective."""
        other = self.earlier["source"] != self.folder.identity.source
        mark = ", made by OTHER SOURCE CODE than is here now" if other else ""
        print(f"finished before{mark}: {self.folder.path} (force=true runs it again)")
        print_closing_table(self.earlier, others=self._comparable(self.earlier))
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
        with self._held as stack:
            whose = summary.identity(self.training, self.folder.identity, command=self.command)
            stack.enter_context(recording(self.plan, self.folder, whose, self._processes))
            seen = self._restore()
            if self._processes.world_size > 1:
                self._processes.standing = self._left
            with self._processes.fail_together():
                if self._processes.is_main:
                    self._open(stack, seen=seen, whose=whose)
            name = self.folder.path.name if self.plan.beside_others else None
            self._load = self.training.runtime.load_meter()
            yield stack.enter_context(ProgressBar(every_seconds=self.plan.record.progress_seconds, name=name))

    def _left(self) -> str:
        """What is left of the run where it ends now, as sentences."""
        now, newest = self.training.spent.bytes, checkpoint.newest(self.folder.path)
        what = f"The newest whole checkpoint is {newest}" if newest else f"{self.folder.path} has no checkpoint yet"
        lost = f"{now - self._saved.bytes:,} of {now:,} bytes of training are lost"
        return f"{what}, and {lost}; the same command goes on: {self.command}"

    def _open(self, stack: ExitStack, *, seen: dict, whose: dict) -> None:
        """What is written into: the record, which has the rows ``seen`` or begins with ``whose`` it is, and W&B."""
        text = yaml.safe_dump(self.plan.config, sort_keys=False)
        write_whole(self.folder.path / CONFIG, text.encode())
        self._record = stack.enter_context(Record(self.folder.path, **seen))
        self._wandb = self._wandb_run(id=self.training.wandb_id, data=self.training.corpus.name)
        stack.enter_context(self._wandb)
        self.training.wandb_id = self._wandb.id
        if not seen["rows"]:
            config = json.loads(json.dumps(self.plan.config))  # the numbers of layers are keys: as text, for JSON
            self.append({"kind": "provenance", **whose, "config": config})

    def _wandb_run(self, *, id: str | None, data: str) -> WandbRun:
        plan, path = self.plan, self.folder.path
        own = {"name": path.name, "job_type": plan.purpose}
        own |= {"tags": (*plan.wandb.tags, *filter(None, (plan.variant, data)))}
        return WandbRun(path, config=plan.config, id=id, **vars(plan.wandb) | own)

    def _restore(self) -> dict:
        """Go on from the checkpoint if there is one; returns what it had seen of the record, as keywords of ``Record``."""
        training, seen = self.training, {"rows": 0}
        if self._processes.is_main:
            self.folder.begin()
        if self.folder.checkpoint is not None:
            content = self._processes.on_main(self._read_checkpoint)
            content = shards.put_back(content, training.trainer.units.empty)
            with self._processes.fail_together():
                training.restore(content)
            seen = {"rows": content["rows"], "sha256": content["sha256"]}
            self._saved = training.spent
        verb = f"resuming at {training.spent.bytes:,} bytes" if seen["rows"] else "training"
        how = f"{training.backend}, {training.runtime.precision}"
        print(f"{verb}: {self.folder.path}  |  {training.corpus.label()}  |  {how}")
        for line in (self.folder.note, *self.folder.odd):
            if line:
                print(line)
        return seen

    def _read_checkpoint(self) -> dict:
        """The newest that is whole; the best weights are looked at as well: at the end they would be missed too late."""
        path, whose = self.folder.path, vars(self.folder.identity)
        content = checkpoint.load_newest(path, whose)
        if content["best_bits"] < math.inf:
            checkpoint.load_best(path, whose)
        return content

    def append(self, row: dict) -> None:
        """A row for the record and for W&B."""
        if not self._processes.is_main:
            return
        row = self._record.append(row)
        self._last_bits = row.get("bits_per_byte") or self._last_bits
        self._wandb.log(row)

    def step(self) -> None:
        """One training step."""
        self.training.step(self.stop.heard, self._save_is_due())
        self.stop.agreed = self.training.agreed[0]
        self._steps_here += 1
        if self._steps_here == WARM_STEPS:
            self._peak.reset()

    def standing(self) -> dict:
        """For the progress line."""
        return {
            "fraction": self.training.fraction,
            "bytes_seen": self.training.spent.bytes,
            "bits_per_byte": self.training.recent_bits(self._last_bits),
            "bytes_per_second": self.training.bytes_per_second,
            "left_seconds": self._left_seconds(),
        }

    def _left_seconds(self) -> float | None:
        """Until the end, scoring included; before a validation has been timed a forward takes a third of a step."""
        training, fraction = self.training, self.training.fraction
        training.settle()
        if not fraction:
            return None
        rate = self._scored_bytes_per_second or 3 * training.bytes_per_second
        return training.spent.seconds * (1 - fraction) / fraction + training.bytes_to_score / rate

    def validate(self, progress: ProgressBar) -> None:
        """Score bytes of valid that are in no reported score, and keep the weights if they are the best so far."""
        training, began = self.training, time.monotonic()
        self._most = self._most.or_higher(self._peak.read())  # of training steps: scoring is apart
        score = training.validate()
        found = score.bits_per_byte
        self._scored_bytes_per_second = training.validated.size / max(time.monotonic() - began, 1e-9)
        row = {"kind": "valid", **training.place(), "bits_per_byte": found, "capped_bytes": len(score.nats)}
        self.append(row | {"metrics": training.model.metrics(score.stats)})
        progress.evaluated(split="valid", bits_per_byte=found, bytes_seen=training.spent.bytes, capped=True)
        better = found < training.best_bits
        if better or training.best_bits == math.inf:  # the first always, even NaN: there must be weights to score
            training.best_bits = found if better else math.inf
            best = {"model": gathered(training.model.state_dict()), "bytes": training.spent.bytes}
            with self._processes.fail_together():
                if self._processes.is_main:
                    checkpoint.save_best(self.folder.path, best | {"identity": vars(self.folder.identity)})
        self._peak.reset()

    def checkpoint_due(self) -> bool:
        every = self.plan.checkpoint.every_steps
        return bool(self.training.agreed[1]) or (every is not None and self.training.spent.steps % every == 0)

    def _save_is_due(self) -> bool:
        """By the clock of the first process."""
        every = self.plan.checkpoint.every_seconds
        late = every is not None and time.monotonic() - self._saved_seconds >= every
        return late and self._processes.is_main

    def save(self) -> None:
        """A checkpoint that agrees with the rows written so far."""
        with self._processes.fail_together():
            rows = self._record.rows if self._processes.is_main else 0
            if self._processes.is_main and self.training.validated.size:
                checkpoint.must_have_best(self.folder.path)
        content, divided = taken_out(self.training.content(rows=rows))
        if divided:
            content[shards.KEY] = self._save_shards(divided)
        with self._processes.fail_together():
            if self._processes.is_main:
                content |= {"identity": vars(self.folder.identity), "sha256": self._record.sha256}
                checkpoint.save(
                    self.folder.path, content, step=self.training.spent.steps, keep=self.plan.checkpoint.keep
                )
        self._saved, self._saved_seconds = self.training.spent, time.monotonic()

    def _save_shards(self, divided: dict) -> dict:
        """Each process's rows, beside the checkpoint that is to name them."""
        from harness.record import shard_files  # late: slow to import

        make = partial(checkpoint.new_shards, self.folder.path, step=self.training.spent.steps)
        place = self._processes.on_main(make)
        with self._processes.fail_together():
            tensors, own = shard_files.write(place, divided)
        digests = {name: digest for each in self._processes.all_gather(own) for name, digest in each.items()}
        with self._processes.fail_together():
            if self._processes.is_main and (unseen := [name for name in digests if not (place / name).is_file()]):
                raise StorageFailure(
                    f"{place / unseen[0]}: another process has written it where the first one does not see it; "
                    f"runtime.shard=full needs a folder outputs={self.folder.path.parent} that all of them share"
                )
        return {"folder": place.name, "tensors": tensors, "sha256": digests}

    def finish(self, progress: ProgressBar) -> dict:
        """The last validation, the best weights' scores on whole splits, the summary and the figures."""
        training, plan = self.training, self.plan
        found = summary.identity(training, self.folder.identity, command=self.command) | {"load": self._load.read()}
        if said := busy_words(found["load"]):
            progress.print(said)
        self.validate(progress)
        best = self._processes.on_main(lambda: checkpoint.load_best(self.folder.path, vars(self.folder.identity)))
        training.take_weights(best["model"])
        peak = self._most.across(self._processes.largest)
        found |= summary.costs(training, peak=peak)  # FLOPs are those of the weights that are scored
        if unreached := found["unreached"]:
            progress.print(f"no gradient ever came to {', '.join(unreached)}: in this run they learn nothing")
        found |= {"best_bytes_seen": best["bytes"], "spans": summary.spans(training.model.metrics({}))}
        found |= {"compressors": {}, "capped": {}, "test_bits_per_byte": None}
        for split in training.splits:
            row = summary.final_score(training, split, found)
            self.append(row)
            score, capped = row["bits_per_byte"], bool(row["capped_bytes"])
            if row["check"] == NOT_CAUSAL:
                told = f"what comes after a byte changes its prediction by {row['future_nats']:.2g} nats"
                progress.print(f"final {split}: NOT CAUSAL: {told}; no table compares this run")
            progress.evaluated(split=f"final {split}", bits_per_byte=score, bytes_seen=best["bytes"], capped=capped)
        found["memory"]["inference_peak_bytes"] = self._peak.read().across(self._processes.largest).bytes
        found["spans"] = found["spans"] or summary.spans(found["valid_metrics"])
        found["status"] = "finished"
        if self._processes.is_main:
            write_summary(self.folder.path, summary=found)
            self._wandb.log_end(summary=found, figures=self._figures(found) if plan.record.figures else [])
        return found

    def _figures(self, found: dict) -> list:
        """What could be drawn: the result does not depend on it."""
        drawn = []
        try:
            from harness.record.figures import draw_figures  # late: matplotlib is slow to import

            for path in draw_figures(
                read_rows(self._record.path),
                folder=self.folder.path,
                label=f"{self.plan.variant}, seed {self.plan.seed}: {self.training.corpus.label()}",
                compressors=found["compressors"]["valid"],
                span_limit=self.plan.model.span,
            ):
                drawn.append(path)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            print(f"figures: {reason} (the run itself is finished)", file=sys.stderr)
        return drawn

    def _comparable(self, found: dict) -> list[dict]:
        return find_comparable(self.plan.outputs, summary=found, any_source=self.plan.reuse == "config")

    def show(self, found: dict) -> None:
        """The closing table, beside earlier runs that compare, and how to sync W&B; of a sweep's job one line."""
        if not self._processes.is_main:
            return
        if self.plan.sweeping:  # the sweep has a table of all its jobs at its end
            scores = ", ".join(f"{split} {bits(found, split=split)}" for split in scored_splits([found]))
            print(f"finished: {self.folder.path}  {scores} bits per byte")
            return
        print_closing_table(found, others=self._comparable(found))
        print(f"run folder: {self.folder.path}")
        if self._wandb.hint:
            print(self._wandb.hint)
