"""Scaling on paper: ``python -m bench.scaling`` draws ``docs/scaling.png``, efficiency and memory against processes.

Each process has as many streams, however many there are (weak scaling), on H100s, eight to a machine. What it computes and
sends is what ``bench.fit`` predicts for so many. Efficiency is a process's time alone over its time among them: above 100% where
an engine divides the update, too. At a band's lower edge all is exchanged after the computing, at its upper one as much as
possible meanwhile; latencies count nothing.

The memory's table of 64 GB is a small one where it computes. ``fully_shard`` divides its columns, and sends what the step of
the small one does. With ``replicate`` the rows that a step reads are gathered, all of them taken for different.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml
from hydra import compose, initialize_config_dir
from torch._subclasses import FakeTensorMode

from bench.exchange import pretended, sent_bytes
from bench.fake_step import predict, settled
from bench.hardware import OWN, Hardware, choose
from bench.memory_tracker import Ledger
from bench.planning import own_keys
from harness.plan.build import Plan, plan_run
from harness.record.drawing import INK, panels
from harness.source import ROOT

FIGURE = "docs/scaling.png"
SHOWN = yaml.safe_load(Path(__file__).with_name("scaling.yaml").read_text(encoding="utf-8"))
ENGINES = {"replicate": "none", "fully_shard": "full"}
COLOURS = {
    "replicate": "#0072B2",
    "fully_shard": "#D55E00",
    "replicate: rows gathered": "#0072B2",
    "fully_shard: by columns": "#009E73",
}


def rows() -> Iterator[dict]:
    """For each case, engine and number of processes: milliseconds of computing and exchanging, and bytes that each keeps."""
    for case in SHOWN["cases"]:
        table = case.get("table")
        for engine, shard in ENGINES.items():
            for processes in SHOWN["processes"]:
                of_all = (f"batch.streams={SHOWN['streams'] * processes}", f"runtime.shard={shard}")
                if table and shard == "full" and processes > table["columns"]:
                    continue  # each has at least one
                plan, hardware = planned(*SHOWN["common"], *case["words"], *of_all)
                found = predict(plan, kind="cuda", processes=processes)
                computing = found.seconds(hardware.flops_per_s.__getitem__, hardware.bytes_per_s)
                name, sent, kept = engine, found.sent, found.peak_bytes
                if table:
                    more = Counter() if shard == "full" else rows_sent(plan, processes, reads=table["reads"])
                    name += ": by columns" if shard == "full" else ": rows gathered"
                    small = 4 * 4 * table["slots"] * plan.model.d_model  # with gradient and moments
                    large = 2 * table["bytes"]  # with Adagrad's sums
                    kept += int((large - small) / (processes if shard == "full" else 1)) + gathered_bytes(
                        more, processes
                    )
                    sent = sent + more
                exchanging = hardware.links.seconds(sent_bytes(sent, processes, kind="cuda"), processes)
                row = {"case": case["title"], "processes": processes, "computing": computing}
                yield row | {"engine": name, "exchanging": exchanging, "kept": kept}


def planned(*words: str) -> tuple[Plan, Hardware]:
    """The plan and the hardware that ``bench.fit`` with these words has."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("fit", overrides=list(words))
    own = own_keys(cfg, *OWN)
    plan = settled(plan_run(cfg), kind="cuda")
    return plan, choose(own, device="cuda", precision=plan.runtime.precision)


def rows_sent(plan: Plan, processes: int, *, reads: int) -> Counter:
    """What the sparse gradient of a table exchanges, in collective operations.

    Args:
        reads: of a byte.
    """
    reads *= SHOWN["streams"] * plan.batch.segment
    with pretended(processes) as group, FakeTensorMode(), Ledger() as found:
        group.gather(torch.empty(reads, dtype=torch.int64))
        group.gather(torch.empty(reads, plan.model.d_model))
    return found.sent


def gathered_bytes(sent: Counter, processes: int) -> int:
    """Of what is gathered from all processes at once."""
    return processes * sum(one.bytes * calls for one, calls in sent.items() if one.name == "all_gather")


def draw(found: list[dict]):
    """Efficiency above and memory below, a column for each case."""
    figure, axes = panels(
        2,
        len(SHOWN["cases"]),
        width=12,
        height=6.4,
        title="How far each engine goes, on paper: counted from the collective operations of a step",
        subtitle="H100 SXM, 8 to a machine, 450 GB/s of NVLink and 400 Gb/s of network for each; bfloat16; "
        f"{SHOWN['streams']} x 512 bytes a process\n"
        "thick: exchanged while it computes, as far as possible; thin: exchanged afterwards",
    )
    for column, case in enumerate(case["title"] for case in SHOWN["cases"]):
        above, below = axes[column], axes[len(SHOWN["cases"]) + column]
        alone = next(
            row["computing"] for row in found if row["case"] == case
        )  # replicated, it computes as it does alone
        for engine in dict.fromkeys(row["engine"] for row in found if row["case"] == case):
            own = [row for row in found if (row["case"], row["engine"]) == (case, engine)]
            at = [row["processes"] for row in own]
            computing, exchanging = ([row[name] for row in own] for name in ("computing", "exchanging"))
            least = [100 * alone / (c + e) for c, e in zip(computing, exchanging, strict=True)]
            most = [100 * alone / max(c, e) for c, e in zip(computing, exchanging, strict=True)]
            style = {"color": COLOURS[engine], "linewidth": 1.8}
            above.fill_between(at, least, most, color=COLOURS[engine], alpha=0.18, linewidth=0)
            above.plot(at, most, **style, label=engine)
            above.plot(at, least, **style | {"linewidth": 0.8})
            below.plot(at, [row["kept"] / 1e9 for row in own], **style, marker="o", markersize=4, label=engine)
        above.set(title=case, ylim=(0, 130), ylabel="efficiency [%]" if column == 0 else "")
        above.axhline(100, color=INK, linewidth=1, linestyle=":")
        below.axhline(80, color=INK, linewidth=1, linestyle=":")
        below.set(yscale="log", ylim=(1, 3000), xlabel="processes", ylabel="memory of each [GB]" if column == 0 else "")
        below.text(SHOWN["processes"][-1], 84, "an H100 has 80 GB", ha="right", va="bottom", fontsize=8, color=INK)
        below.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
        below.minorticks_off()
        for ax in (above, below):
            ax.set_xscale("log", base=2)
            ax.set_xticks(SHOWN["processes"], [f"{n:,}" for n in SHOWN["processes"]])
            ax.minorticks_off()
        above.legend(loc="lower left", bbox_to_anchor=(0.2 if column == 2 else 0, 0.15), fontsize=8.5, frameon=False)
    return figure


def main() -> None:
    """Write the figure."""
    path = Path(sys.argv[1]) if sys.argv[1:] else ROOT / FIGURE
    draw(list(rows())).savefig(path)
    print(path)


if __name__ == "__main__":
    main()
