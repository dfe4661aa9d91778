"""Score a checkpoint under another protocol: ``python -m bench.evaluate run=outputs/latest split=test eval.streams=1``.

The score depends on streams, segment and span; on valid, bytes that selected the weights are left out. Each call
appends a row to the run's ``evaluations.jsonl``, with protocol and bits per byte by context in windows without past
(``context.png``).
"""

from pathlib import Path
from typing import Annotated, Literal

import hydra
from annotated_types import Ge
from omegaconf import DictConfig

from bench import CONF
from harness.compose.cli import run_command


@hydra.main(version_base="1.3", config_path=CONF, config_name="evaluate")
def main(cfg: DictConfig) -> None:
    from bench.planning import open_trained  # late, as everything slow
    from harness import source
    from harness.loop.scoring import MAX_FUTURE_NATS, NOT_CAUSAL, score_context, score_stream, score_windows
    from harness.loop.trainer import backend_of
    from harness.plan.build import streamed_context
    from harness.plan.settings import parse_setting
    from harness.record.folder import refuse_links
    from harness.record.rows import EVALUATIONS, FORMAT, append_row

    path = Path(cfg.run)
    opened = open_trained(path, key="run", runtime=cfg.runtime, trust=cfg.trust)
    plan, saved = opened.plan, opened.saved
    refuse_links(path, key="run")  # a row and a figure are written there
    parse_setting(cfg.split, Literal["train", "valid", "test"], key="split")
    keys = ("streams", "segment", "span", "context")
    asked = {key: parse_setting(cfg.eval[key], int | None, key=f"eval.{key}") for key in keys}
    limit = parse_setting(cfg.eval.bytes, Annotated[int, Ge(2)] | None, key="eval.bytes")
    p = plan.protocol() | {key: number for key, number in asked.items() if number is not None}
    corpus, (model, device) = opened.corpus(), opened.on_device(span=p["span"])
    split = corpus.scored_part(cfg.split, selection_bytes=p["selection_bytes"])
    p["bytes"] = limit if limit is not None and limit < len(split) else None
    if asked["context"] is None:
        p["context"] = streamed_context(p["span"], plan.model.layers)
    split, cut, look = split[:limit], {key: p[key] for key in ("streams", "segment", "context")}, saved["seed"]
    score = score_stream(model, split, runtime=device, collect_stats=True, future_seed=look, **cut)
    windows = score_windows(model, split, runtime=device, future_seed=look)
    future_nats = max(score.future_nats, windows.future_nats)
    row = {
        "kind": "evaluation",
        "format": FORMAT,
        "split": cfg.split,
        "protocol": p,
        "bits_per_byte": score.bits_per_byte,
        "windows_bits_per_byte": windows.bits_per_byte,
        "future_nats": future_nats,
        "context_curve": score_context(model, split, runtime=device, longest=2 * p["span"], segment=p["segment"]),
        "bytes": len(score.nats),
        "metrics": model.metrics(score.stats),
        "check": saved.get("check") if future_nats <= MAX_FUTURE_NATS else NOT_CAUSAL,
        **{name: saved[name] for name in ("variant", "seed", "data", "config_hash", "command")},
        "trained_source": saved["source"],
        "commit": source.commit(),
        "source": source.digest(plan.config, trust=plan.trust),
        "measuring_source": source.digest(plan.config, trust=plan.trust, measuring=True),
        "evaluation_backend": backend_of(model, device, training=False),
        "weights_bytes_seen": opened.best["bytes"],
        **device.describe(),
    }
    append_row(path / EVALUATIONS, row)
    show(row, path)


def show(row: dict, folder: Path) -> None:
    """Print a row, and draw its curve."""
    from harness.loop.scoring import NOT_CAUSAL
    from harness.record.closing_table import WINDOWS_LABEL

    p, mark = row["protocol"], "*" if row["protocol"]["bytes"] else ""
    sizes = f"streams {p['streams']}, segment {p['segment']}, span {p['span']}, unscored context {p['context']}"
    run = f"{row['variant']}, seed {row['seed']}"
    split = f"{row['data']['name']} {row['split']}, {row['bytes']:,} bytes scored"
    print(f"{run}: {split}\n  {row['bits_per_byte']:.4f}{mark} bits per byte with {sizes}")
    print(f"  {row['windows_bits_per_byte']:.4f}{mark} bits per byte with {WINDOWS_LABEL}")
    if row["check"] == NOT_CAUSAL:
        print(f"  NOT CAUSAL: what comes after a byte changes its prediction by {row['future_nats']:.2g} nats")
    if mark:
        print(f"* first {p['bytes']:,} bytes only")
    print(f"by context: {draw_context(row['context_curve'], folder / 'context.png', title=run, subtitle=split)}")
    print(f"appended to {folder / 'evaluations.jsonl'}")


def draw_context(curve: list[dict], path: Path, **titles: str) -> Path:
    """Plot bits per byte against bytes of context, as steps; ``curve`` is a row's ``context_curve``."""
    from bench.report.drawing import BLUE, panels, save, styled

    with styled():
        figure, (ax,) = panels(1, 1, width=7.0, height=4.2, **titles)
        for point in curve:
            ax.hlines(point["bits_per_byte"], point["from_bytes"], point["to_bytes"] + 1, color=BLUE, linewidth=2)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.set(xlabel="bytes of context", ylabel="bits per byte")
        return save(figure, path)


if __name__ == "__main__":
    run_command(main)
