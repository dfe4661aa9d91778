"""Scores a run's best weights again: ``python -m bench.evaluate run=outputs/latest split=test
eval.streams=1``.

A score depends on its protocol: streams, segment, span and context. On valid, the bytes that
selected the weights are left out. Each call adds a row to the run's ``evaluations.jsonl``: the
protocol, bits per byte in streams with carried state, in windows without state, and by bytes of
context. The last are also drawn in ``context.png``."""

from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge
from omegaconf import DictConfig

from harness.cache import write_atomically
from harness.compose.cli import run_command, with_config


@with_config("evaluate")
def main(cfg: DictConfig) -> None:
    from bench.progress import Progress
    from harness import source
    from harness.loop.trainer import backend_of
    from harness.objective.checks import NOT_CAUSAL
    from harness.objective.scoring import (
        CUTS,
        WINDOW_CUTS_SHARE,
        check_causality,
        score_context,
        score_stream,
        score_windows,
    )
    from harness.plan.build import streamed_context
    from harness.plan.settings import parse_setting
    from harness.record.folder import refuse_links
    from harness.record.rows import EVALUATIONS, FORMAT, append_row

    # slow imports come after the command line has been parsed
    from harness.trained import open_trained

    run = open_trained(cfg.run, key="run", runtime=cfg.runtime, trust=cfg.trust)
    run.require_causal()
    folder = run.folder
    plan = run.plan
    provenance = run.provenance
    refuse_links(folder, key="run")  # because a row and a figure are written into the folder
    parse_setting(cfg.split, Literal["train", "valid", "test"], key="split")
    keys = ("streams", "segment", "span", "context")
    changes = {key: parse_setting(cfg.eval[key], int | None, key=f"eval.{key}") for key in keys}
    limit = parse_setting(cfg.eval.bytes, Annotated[int, Ge(2)] | None, key="eval.bytes")
    protocol = plan.protocol() | {key: size for key, size in changes.items() if size is not None}
    corpus, (model, runtime) = run.corpus(), run.on_device(span=protocol["span"])
    if corpus.sequence:
        raise ValueError(
            f"run={cfg.run}: its scores are of sequences, data.sequence={corpus.sequence}, read "
            "without state; allowed is a run with data.sequence=null"
        )
    split = corpus.scored_part(cfg.split, selection_bytes=protocol["selection_bytes"])
    protocol["bytes"] = limit if limit is not None and limit < len(split) else None
    if changes["context"] is None:
        protocol["context"] = streamed_context(protocol["span"], plan.model.layers)
    split = split[:limit]
    cut = {key: protocol[key] for key in ("streams", "segment", "context")}
    window_cuts = round(CUTS * WINDOW_CUTS_SHARE)
    options = {"runtime": runtime, "future_seed": provenance["seed"]}
    with Progress() as progress:
        progress.phase(f"{plan.variant}: scoring {len(split):,} bytes of {cfg.split} three times")
        score = score_stream(
            model, split, collect_stats=True, cuts=CUTS - window_cuts, **options, **cut
        )
        windows = score_windows(model, split, cuts=window_cuts, **options)
        floor = corpus.floor_bits(split)
        future, causal = check_causality(
            model, [score, windows], floor=floor, precision=runtime.precision
        )
        context_curve = score_context(
            model,
            split,
            runtime=runtime,
            longest=2 * protocol["span"],
            segment=protocol["segment"],
        )
    row = {
        "kind": "evaluation",
        "format": FORMAT,
        "split": cfg.split,
        "protocol": protocol,
        "bits_per_byte": score.bits_per_byte,
        "windows_bits_per_byte": windows.bits_per_byte,
        "bits_per_repeat": score.bits_by_label(corpus.repeat_masks(split)),
        "floor_bits_per_byte": floor,
        **future.row(),
        "context_curve": context_curve,
        "bytes": len(score.nats),
        "metrics": model.metrics(score.stats),
        "check": provenance.get("check") if causal else NOT_CAUSAL,
        **{
            name: provenance[name] for name in ("variant", "seed", "data", "config_hash", "command")
        },
        "trained_source": provenance["source"],
        "commit": source.commit(),
        "source": source.digest(plan.config, trust=plan.trust),
        "measuring_source": source.digest(plan.config, trust=plan.trust, measuring=True),
        "evaluation_backend": backend_of(model, runtime, training=False),
        "weights_bytes_seen": run.best["bytes"],
        **runtime.describe(),
    }
    append_row(folder / EVALUATIONS, row)
    print_row(row, folder)


def print_row(row: dict, folder: Path) -> None:
    """Print a row of ``evaluations.jsonl``, and draw its ``context_curve`` in the run folder."""
    from harness.objective.checks import NOT_CAUSAL, not_causal
    from harness.record.closing_table import WINDOWS_LABEL

    p = row["protocol"]
    mark = "*" if p["bytes"] else ""
    sizes = (
        f"streams {p['streams']}, segment {p['segment']}, span {p['span']}, unscored context "
        f"{p['context']}"
    )
    run = f"{row['variant']}, seed {row['seed']}"
    split = f"{row['data']['name']} {row['split']}, {row['bytes']:,} bytes scored"
    print(f"{run}: {split}\n  {row['bits_per_byte']:.4f}{mark} bits per byte with {sizes}")
    print(f"  {row['windows_bits_per_byte']:.4f}{mark} bits per byte with {WINDOWS_LABEL}")
    if row["check"] == NOT_CAUSAL:
        print(f"  NOT CAUSAL: {not_causal(row)}")
    if mark:
        print(f"* first {p['bytes']:,} bytes only")
    draw_context(row["context_curve"], folder / "context.png", title=run, subtitle=split)
    print(f"by context: {folder / 'context.png'}")
    print(f"appended to {folder / 'evaluations.jsonl'}")


def draw_context(curve: list[dict], path: Path, **titles: str) -> None:
    """Draw bits per byte by bytes of context, with a horizontal line for each range of context."""
    from bench.tables.drawing import BLUE, panels, png_of, styled

    with styled():
        figure, (ax,) = panels(1, 1, width=7.0, height=4.2, **titles)
        for row in curve:
            ax.hlines(
                row["bits_per_byte"],
                row["from_bytes"],
                row["to_bytes"] + 1,
                color=BLUE,
                linewidth=2,
            )
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.set(xlabel="bytes of context", ylabel="bits per byte")
        write_atomically(path, png_of(figure))


if __name__ == "__main__":
    run_command(main)
