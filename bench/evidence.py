"""Evidence: runs a stage of the front page, each run on its own core: ``python -m bench.evidence stage=b path=FILE``.

``conf/evidence.yaml`` defines the cells of a stage: points of a sweep's grid, rates one step beyond those with a row,
and spans replayed from a run of the same seed. Each run writes a line of ``<rows>/<table>.jsonl``: cell, summary,
configuration and scores. A cell with a line is skipped on any machine; an interrupted run continues in its folder.
"""

import json
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from bench import CONF
from harness.cache import append_atomically, file_lock
from harness.compose.cli import run_command
from harness.failures import BUG, Diverged
from harness.record.rows import EVALUATIONS, RECORD, SUMMARY, read_rows, to_json

ROOT = Path(__file__).resolve().parents[1]
MADE = {"sweep=recall", "sweep=skills"}
"""Sweeps that read no file."""
RATE = "++variant.lr_scale.muon"
"""The key that the sweep of rates varies: a factor of ``optim.lr``."""
LEAST = 3  # rates that a mechanism must have before one is picked
RECORDED = (0, BUG, Diverged.exit_code)
"""Exit codes of runs that count; after another code, the cell is run again."""


def cell_of(line: dict) -> dict[str, str]:
    """The values of a line's cell, by key."""
    return dict(word.split("=", 1) for word in line["cell"])


def tried(file: Path) -> dict[str, dict[float, float]]:
    """Bits per byte on valid by mechanism and factor, infinite for a failed run; empty without the file."""
    scores: dict[str, dict[float, float]] = {}
    for line in read_rows(file):
        cell, summary = cell_of(line), line["summary"]
        bits = summary["valid_bits_per_byte"] if summary["status"] == "finished" else math.inf
        scores.setdefault(cell["variant"], {})[float(cell[RATE])] = bits
    return scores


def beyond(scores: dict[float, float]) -> float | None:
    """The factor one step beyond the best, if the best is at an end of at least ``LEAST`` factors; else None."""
    best = min(scores, key=scores.get)
    if len(scores) < LEAST or min(scores) < best < max(scores):
        return None
    return best * 2 if best == max(scores) else best / 2


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A run: the ``words`` of its command, the ``file`` for its line, and whether it is also scored by ``context``. If
    it takes spans from another run, ``source`` has that run's words; with ``mean`` it takes the mean of these spans."""

    words: tuple[str, ...]
    file: Path
    context: bool
    source: tuple[str, ...] | None = None
    mean: bool = False

    def line(self, words: tuple[str, ...]) -> dict | None:
        """The file's line for a cell of these words, or None."""
        return next((line for line in read_rows(self.file) if tuple(line["cell"]) == words), None)


def sweep_params(sweep: str) -> dict[str, object]:
    """The grid of a file of ``conf/sweep``, with the grids of the sweeps in its defaults."""
    read = OmegaConf.to_container(OmegaConf.load(Path(CONF, "sweep", f"{sweep}.yaml")))
    begin = [name for name in read["defaults"] if isinstance(name, str)]
    params = read["hydra"]["sweeper"]["params"]
    return {key: value for name in begin for key, value in sweep_params(name).items()} | params


def cells(grids: list[dict], *, words: list[str], rows: Path, replays: dict[str, str]) -> list[Cell]:
    """All points of a stage's grids, seeds outermost; ``replays``: the variant that learns spans (``source``), the
    one that takes them (``spans``), and the one that takes their ``mean``."""
    every = []
    for grid in grids:
        file = rows / f"{grid.get('table', grid['sweep'])}.jsonl"
        ends = [{}]
        if grid.get("further"):
            rates = ((name, beyond(scores)) for name, scores in tried(file).items())
            ends = [{"variant": name, RATE: f"{rate:g}"} for name, rate in rates if rate]
        for params in (sweep_params(grid["sweep"]) | grid.get("params", {}) | end for end in ends):
            keys = sorted(params, key=lambda key: key != "seed")
            for values in product(*(str(params[key]).split(",") for key in keys)):
                point = (f"{key}={value}" for key, value in zip(keys, values, strict=True))
                typed = (f"sweep={grid['sweep']}", *point, *words)
                takes = next((key for key in ("spans", "mean") if f"variant={replays[key]}" in typed), None)
                source = tuple(f"variant={replays['source']}" if w.startswith("variant=") else w for w in typed)
                context = grid.get("context", False)
                cell = Cell(words=typed, file=file, context=context, source=takes and source, mean=takes == "mean")
                every.append(cell)
    return every


def short(row: dict) -> dict:
    """A row of a record without identity, protocol and last metrics, which the summary has."""
    if row["kind"] == "provenance":
        return {key: row[key] for key in ("kind", "config") if key in row}
    return {key: value for key, value in row.items() if key not in ("metrics", "protocol")}


def span_word(line: dict | None, *, mean: bool) -> str:
    """The word that replays the spans of a run's line; ValueError if the line has none."""
    metrics = (line or {}).get("summary", {}).get("valid_metrics") or {}
    layers = {int(key.split(".")[1]): spans for key, spans in metrics.items() if key.endswith(".span")}
    if not layers:
        raise ValueError("the run whose spans are replayed has no row with spans")
    average = sum(map(sum, layers.values())) / sum(map(len, layers.values()))
    spans = [[round(average if mean else span, 4) for span in layers[layer]] for layer in sorted(layers)]
    return f"variant.attention.span.spans={json.dumps(spans, separators=(',', ':'))}"


@dataclass
class Runner:
    """Runs each cell in a child process, on the core of the thread that waits for it.

    Attributes:
        outputs: the folder of the run folders, one per cell.
        path: ``data.path`` of the runs that read enwik8.
        futures: futures by the words of their cells, in order of start.
        children: child processes that run.
    """

    outputs: Path
    path: str | None
    futures: dict[tuple[str, ...], Future] = field(default_factory=dict)
    children: list[subprocess.Popen] = field(default_factory=list)

    def run(self, cell: Cell) -> None:
        """Train, score and write the line; ValueError if the run gives none."""
        if cell.source in self.futures:
            wait([self.futures[cell.source]])
        folder = self.outputs / "-".join(word.rpartition("=")[2] for word in cell.words)
        words = [*cell.words, f"outputs={folder}"]
        words += [f"data.path={self.path}"] if self.path and not MADE & {*words} else []
        words += [span_word(cell.line(cell.source), mean=cell.mean)] if cell.source else []
        code, run = self.child("train.py", *words), folder / "latest"
        if code in RECORDED and (run / SUMMARY).exists():
            line = {"cell": cell.words, "summary": json.loads((run / SUMMARY).read_text())}
            line["record"] = [short(row) for row in read_rows(run / RECORD) if row["kind"] != "train"]
            if cell.context and not code:
                asked = (f"run={run.resolve()}", "split=test", "runtime.threads=1", "runtime.device=cpu")
                code = self.child("-m", "bench.evaluate", *asked)
                line["evaluation"] = None if code else read_rows(run / EVALUATIONS)[-1]
        if code not in RECORDED or not (run / SUMMARY).exists():
            raise ValueError(f"ended with {code}, see {self.outputs / 'log.txt'}: is left for another try")
        with file_lock(self.outputs / cell.file.name):
            if not cell.line(cell.words):
                text = json.dumps(to_json(line), allow_nan=False).replace(str(folder), "outputs")
                text = text.replace(self.path, Path(self.path).name) if self.path else text  # no path of this machine
                append_atomically(cell.file, text.encode() + b"\n")
        print(f"{' '.join(cell.words)}: {line['summary']['status']}", flush=True)

    def child(self, *words: str) -> int:
        """Run a Python process; returns its exit code."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with (self.outputs / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.children.append(process)
        code = process.wait()
        self.children.remove(process)
        return code


def _take_core(cores: list[int]) -> None:
    """Give the calling thread and its children a core, at low priority."""
    os.sched_setaffinity(0, {cores.pop()})
    os.nice(10)


@hydra.main(version_base="1.3", config_path=CONF, config_name="evidence")
def main(cfg: DictConfig) -> None:
    """Run the cells of a stage that have no row; ValueError for those that still have none."""
    if cfg.stage not in cfg.stages:
        raise ValueError(f"stage={cfg.stage}: allowed are {', '.join(cfg.stages)}")
    grids = OmegaConf.to_container(cfg.stages[cfg.stage], resolve=True)
    every = cells(grids, words=list(cfg.words), rows=Path(cfg.rows).resolve(), replays=dict(cfg.replays))
    left = [cell for cell in every if not cell.line(cell.words)]
    print(f"stage {cfg.stage}: {len(every)} cells, {len(every) - len(left)} have a row", flush=True)
    if cfg.list:
        print("\n".join(" ".join(cell.words) for cell in left))
        return
    runner = Runner(outputs=Path(cfg.outputs).resolve(), path=cfg.path and str(Path(cfg.path).resolve()))
    runner.outputs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cores = sorted(os.sched_getaffinity(0))[: cfg.workers]
    pool = ThreadPoolExecutor(len(cores), initializer=_take_core, initargs=(cores,))
    try:
        for cell in left:
            runner.futures[cell.words] = pool.submit(runner.run, cell)
        wait(runner.futures.values())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(runner.children):
            process.terminate()  # a run saves what it has
    errors = {words: future.exception() for words, future in runner.futures.items() if future.exception()}
    if errors:
        raise ValueError("\n".join(f"{' '.join(words)}: {error}" for words, error in errors.items()))


if __name__ == "__main__":
    run_command(main)
