"""Trains the runs of the published tables: ``python -m bench.evidence stage=b path=FILE``.

``conf/evidence.yaml`` defines stages. A stage is a list of grids, and each point of a grid is a
cell: one training run. A cell may also have a learning rate beyond the tested ones, or the best of
the tested ones. Each run has a core of its own and adds a row to ``<rows>/<table>.jsonl``: cell,
summary, variant and scores. A cell that has a row is skipped, also on other machines. An
interrupted run continues in its run folder."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from bench import CONF
from harness.cache import append_atomically, file_lock
from harness.compose.cli import run_command, with_config
from harness.failures import BUG, Diverged
from harness.record.rows import EVALUATIONS, RECORD, SUMMARY, read_rows, to_json
from harness.record.schema import flatten
from harness.source import ROOT

GENERATED_DATA = {"sweep=recall", "sweep=skills", "sweep=recall_by_key"}
"""Sweeps whose corpora are generated, so that their runs have no ``data.path``."""
LR_FACTOR = "++variant.lr_scale.muon"
"""The key that ``sweep=rates`` varies: the factor of ``optim.lr`` with ``optim=muon``."""
LR_FACTORS = (LR_FACTOR, "++variant.lr_scale.adamw")
MIN_FACTORS = 3  # a mechanism's grid is extended only after training with so many factors
LEARNED_BITS = 0.01  # a score so close to the corpus's floor needs no better factor
COUNTED_EXIT_CODES = (0, BUG, Diverged.exit_code)
"""A run that ends with one of these exit codes gets a row. After any other code its cell is
trained again."""


def cell_keys(words: Iterable[str]) -> dict[str, str]:
    """Return the ``key=value`` words of a cell as a dictionary."""
    return dict(word.split("=", 1) for word in words)


def mechanism(words: Sequence[str]) -> str:
    """Return the variant and its options among the words of a cell: ``NAME
    ++variant.attention.key_shift=true``."""
    options = [word for word in words if word.lstrip("+").startswith("variant.")]
    options = [word for word in options if not word.startswith(LR_FACTORS)]
    return " ".join([cell_keys(words)["variant"], *options])


def rate_key(keys: Mapping[str, object]) -> str:
    """Return which of ``LR_FACTORS`` a cell or a grid has; ``LR_FACTOR`` without one."""
    return next((key for key in LR_FACTORS if keys.get(key)), LR_FACTOR)


def _conditions(words: Iterable[str]) -> set[str]:
    """Return the words of a cell that say nothing of its ``mechanism`` and learning rate."""
    return {word for word in words if not word.lstrip("+").startswith("variant")}


def scores_by_factor(file: Path) -> dict[str, dict[float, float]]:
    """Return bits per byte on valid, above the floor of a corpus that has one, by mechanism and
    factor of the learning rate: infinite for a failed run, empty without a file. ValueError if two
    rows have the same mechanism and factor. Rows of other conditions than the first row's, such as
    another seed, do not count."""
    scores: dict[str, dict[float, float]] = {}
    rows = read_rows(file)
    for row in rows:
        if _conditions(row["cell"]) != _conditions(rows[0]["cell"]):
            continue
        cell = cell_keys(row["cell"])
        summary = row["summary"]
        bits = math.inf
        if summary["status"] == "finished":
            bits = summary["valid_bits_per_byte"] - summary.get("valid_floor_bits_per_byte", 0.0)
        key = rate_key(cell)
        name = mechanism(row["cell"])
        factor = float(cell[key])
        mechanism_scores = scores.setdefault(name, {})
        if factor in mechanism_scores:
            raise ValueError(f"{file}: two rows of {name} have {key}={factor:g}")
        mechanism_scores[factor] = bits
    return scores


def best_factor(scores: dict[float, float]) -> float | None:
    """Return the factor with the best score, if there are at least ``MIN_FACTORS`` and it lies
    between others or its score is below ``LEARNED_BITS``; else None."""
    if len(scores) < MIN_FACTORS:
        return None
    best = min(scores, key=scores.get)
    if min(scores) < best < max(scores) or scores[best] < LEARNED_BITS:
        return best
    return None


def next_factor(scores: dict[float, float], *, step: float) -> float | None:
    """Return the factor that extends a mechanism's grid: ``step`` times the largest if it scored
    best, the smallest divided by ``step`` if it did. None if there is a ``best_factor``, or if
    there are fewer than ``MIN_FACTORS``."""
    if len(scores) < MIN_FACTORS or best_factor(scores):
        return None
    best = min(scores, key=scores.get)
    if best == max(scores):
        return best * step
    return best / step


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run of a stage: the words of its command, which identify it, and the file of its
    row. With ``score_context`` it is also scored by bytes of context."""

    words: tuple[str, ...]
    file: Path
    score_context: bool

    def find_row(self) -> dict | None:
        """Return the cell's row, or None."""
        return next((row for row in read_rows(self.file) if tuple(row["cell"]) == self.words), None)


def sweep_grid(sweep: str) -> dict[str, object]:
    """Return the grid of ``conf/sweep/<sweep>.yaml``, joined with the grids of the sweeps in its
    defaults list."""
    config = OmegaConf.to_container(OmegaConf.load(Path(CONF, "sweep", f"{sweep}.yaml")))
    grid: dict[str, object] = {}
    for name in (entry for entry in config["defaults"] if isinstance(entry, str)):
        grid |= sweep_grid(name)
    return grid | config["hydra"]["sweeper"]["params"]


def table_of(grid: dict) -> str:
    """Return the name of the file with the rows of a grid."""
    return f"{grid.get('table', grid['sweep'])}.jsonl"


def grid_params(grid: dict) -> dict[str, object]:
    """Return the keys and values of a stage's grid: those of its sweep, replaced and extended by
    its own."""
    return sweep_grid(grid["sweep"]) | grid.get("params", {})


def missing_runs(file: Path, *stages: str) -> list[dict[str, str]]:
    """Return the points of stages of ``conf/evidence.yaml`` of which ``file`` has no row: at any
    learning rate, if the stage trains at the best one."""
    config = OmegaConf.load(Path(CONF, "evidence.yaml"))
    cells = [cell_keys(row["cell"]).items() for row in read_rows(file)]
    points = []
    for stage in stages:
        for grid in OmegaConf.to_container(config.stages[stage], resolve=True):
            if file.name != table_of(grid):
                continue
            params = grid_params(grid)
            if "rates" in grid:  # at one learning rate, the best
                params |= dict.fromkeys(LR_FACTORS)
            points += map(cell_keys, _points(params))
    return [point for point in points if not any(point.items() <= cell for cell in cells)]


def stage_cells(
    grids: list[dict], *, words: Sequence[str], rows: Path, rates_of: Mapping[str, str]
) -> list[Cell]:
    """Return all cells of a stage, ordered by seed within each of its ``grids``. ``words`` end the
    command of every cell. ``rates_of`` names, for variants whose learning rates were not searched,
    the one whose best rate they have."""
    cells = []
    for grid in grids:
        file = rows / table_of(grid)
        params = grid_params(grid)
        changes: Iterable[dict[str, str]] = [{}]
        if grid.get("further"):
            changes = _extensions(file, key=rate_key(params), step=grid.get("step", 2))
        elif "rates" in grid:
            changes = _at_best_rates(rows / f"{grid['rates']}.jsonl", params, rates_of)
        for change in changes:
            for point in _points(params | change):
                cell_words = (f"sweep={grid['sweep']}", *point, *words)
                cells.append(
                    Cell(words=cell_words, file=file, score_context=grid.get("context", False))
                )
    return cells


def _extensions(file: Path, *, key: str, step: float) -> Iterator[dict[str, str]]:
    """Yield changes of a grid that train each mechanism with its next learning rate factor, if it
    has one."""
    for name, scores in scores_by_factor(file).items():
        if factor := next_factor(scores, step=step):
            yield cell_keys(f"variant={name}".split(" ")) | {key: f"{factor:.4g}"}


def _at_best_rates(
    file: Path, params: dict, rates_of: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Yield changes of a grid that train each seed of each of its mechanisms at the best learning
    rate factor in ``file``. Mechanisms without one are left out. The seed varies slowest."""
    scores = scores_by_factor(file)
    options = [f"{key}={params[key]}" for key in params if key not in ("variant", "seed")]
    key = rate_key(params)
    for seed in str(params["seed"]).split(","):
        for name in params["variant"].split(","):
            searched = mechanism([f"variant={rates_of.get(name, name)}", *options])
            if factor := best_factor(scores.get(searched, {})):
                yield {"seed": seed, "variant": name, key: f"{factor:.4g}"}


def _points(params: dict[str, object]) -> Iterator[list[str]]:
    """Yield the points of a grid as words, without keys whose value is None; the seed varies
    slowest."""
    keys = sorted((key for key in params if params[key] is not None), key=lambda key: key != "seed")
    for values in product(*(str(params[key]).split(",") for key in keys)):
        yield [f"{key}={value}" for key, value in zip(keys, values, strict=True)]


def compact(row: dict) -> dict:
    """Return what the tables need of a row of ``record.jsonl`` (the variant or a score) or
    ``evaluations.jsonl``."""
    names = ("kind", "bytes_seen", "bits_per_byte", "windows_bits_per_byte", "context_curve")
    kept = {name: row[name] for name in names if name in row}
    if "config" in row:
        kept["config"] = {"variant": row["config"]["variant"]}
    return kept


def published_record(rows: Iterable[dict]) -> list[dict]:
    """Return what the tables need of the rows of ``record.jsonl``, without final scores, which the
    summary has. Validations become one entry of kind ``curve``: lists of training bytes, bits per
    byte, and accuracies and bits of answers."""
    entries = [row for row in rows if row["kind"] != "train" and not row.get("final")]
    scored = [flatten(row) for row in entries if row["kind"] == "valid"]
    curve: dict[str, object] = {"kind": "curve"}
    for key in ("bytes_seen", "bits_per_byte", "answer_accuracy.all", "bits_per_copy.all"):
        if numbers := [round(row[key], 4) for row in scored if key in row]:
            curve[key.removesuffix(".all")] = numbers
    return [compact(row) for row in entries if row["kind"] != "valid"] + [curve]


@dataclass
class Runner:
    """Trains each cell in a child process, on the core of the thread that waits for the process.
    ``outputs`` is the folder of the run folders, ``path`` the ``data.path`` of the runs that read
    enwik8. ``children`` are the processes that it has started."""

    outputs: Path
    path: str | None
    children: list[subprocess.Popen] = field(default_factory=list)

    def run(self, cell: Cell) -> None:
        """Train and score a cell, and write its row. ValueError as from ``run_python``."""
        folder = self.outputs / "-".join(word.rpartition("=")[2] for word in cell.words)
        words = [*cell.words, f"outputs={folder}"]
        if self.path and not GENERATED_DATA & {*words}:
            words.append(f"data.path={self.path}")
        run = folder / "latest"
        exit_code = self.run_python(run, "train.py", *words)
        row = {"cell": cell.words, "summary": json.loads((run / SUMMARY).read_text())}
        row["record"] = published_record(read_rows(run / RECORD))
        if cell.score_context and not exit_code:
            command = ("-m", "bench.evaluate", f"run={run.resolve()}", "split=test")
            on_cpu = ("runtime.threads=1", "runtime.device=cpu")
            failed = self.run_python(run, *command, *on_cpu)
            row["evaluation"] = None if failed else compact(read_rows(run / EVALUATIONS)[-1])
        with file_lock(self.outputs / cell.file.name):
            if not cell.find_row():
                text = json.dumps(to_json(row), allow_nan=False, separators=(",", ":")).replace(
                    str(folder), "outputs"
                )
                if self.path:  # a row has no path of this machine
                    text = text.replace(self.path, Path(self.path).name)
                append_atomically(cell.file, text.encode() + b"\n")
        print(f"{' '.join(cell.words)}: {row['summary']['status']}", flush=True)

    def run_python(self, run: Path, *words: str) -> int:
        """Run Python with these arguments on one thread, and return its exit code. Its output
        goes to ``log.txt``. ValueError if the code is not counted, or the folder ``run`` has no
        summary."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with (self.outputs / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.children.append(process)
        exit_code = process.wait()
        if exit_code not in COUNTED_EXIT_CODES or not (run / SUMMARY).exists():
            raise ValueError(
                f"ended with {exit_code}, see {self.outputs / 'log.txt'}; the same command tries "
                "again"
            )
        return exit_code


def _take_core(cores: list[int]) -> None:
    """Pin the calling thread, and so its child processes, to one of the cores, at low priority."""
    os.sched_setaffinity(0, {cores.pop()})
    os.nice(10)


@with_config("evidence")
def main(cfg: DictConfig) -> None:
    """Train the cells of a stage that have no row; ValueError with the error of each cell that
    failed."""
    if cfg.stage not in cfg.stages:
        raise ValueError(f"stage={cfg.stage}: allowed are {', '.join(cfg.stages)}")
    grids = OmegaConf.to_container(cfg.stages[cfg.stage], resolve=True)
    rows = Path(cfg.rows).resolve()
    cells = stage_cells(grids, words=cfg.words, rows=rows, rates_of=cfg.rates_of)
    remaining = [cell for cell in cells if not cell.find_row()]
    print(
        f"stage {cfg.stage}: {len(cells)} cells, {len(cells) - len(remaining)} have a row",
        flush=True,
    )
    if cfg.list:
        print("\n".join(" ".join(cell.words) for cell in remaining))
        return
    runner = Runner(
        outputs=Path(cfg.outputs).resolve(), path=cfg.path and str(Path(cfg.path).resolve())
    )
    runner.outputs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cores = sorted(os.sched_getaffinity(0))[: cfg.workers]
    pool = ThreadPoolExecutor(len(cores), initializer=_take_core, initargs=(cores,))
    try:
        futures = {cell.words: pool.submit(runner.run, cell) for cell in remaining}
        errors = [
            f"{' '.join(words)}: {error}"
            for words, future in futures.items()
            if (error := future.exception())
        ]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in runner.children:  # those that have ended are not affected
            process.terminate()  # a run that is terminated writes a checkpoint first
    if errors:
        raise ValueError("\n".join(errors))


if __name__ == "__main__":
    run_command(main)
