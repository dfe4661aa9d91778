"""Scaling on paper: ``python -m bench.scaling`` draws ``docs/scaling.png``, efficiency and memory against processes.

Each process has as many streams, however many there are (weak scaling), on H100s, eight to a machine. What it computes and
sends is what ``bench.fit`` predicts for so many. Efficiency is a process's time alone over its time among them: above 100% where
an engine divides the update, too. At a band's lower edge all is exchanged after the computing, at its upper one as much as
possible meanwhile; latencies count nothing.

The memory's table of 64 GB is a small one where it computes. What it sends are the rows that a step reads, all of them
different, gathered as ``ProcessGroup`` does. Divided by columns is a plan, of which there is no code: all processes' slots
and weights are gathered, outputs and their gradients go by an all-to-all, and the weights' gradients are summed.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from torch._subclasses import FakeTensorMode

from bench.exchange import pretended, sent_bytes
from bench.fake_step import predict, settled
from bench.fit import OWN, Hardware, choose
from bench.memory_tracker import Ledger
from bench.planning import own_keys
from harness.plan.build import Plan, plan_run
from harness.record.drawing import INK, panels
from harness.source import ROOT

FIGURE = "docs/scaling.png"
PROCESSES = (8, 16, 64, 256, 1024)
COMMON = ("model=base", "optim=adamw", "runtime.device=cuda", "runtime.precision=bfloat16", "runtime.compile=false")
COMMON += ("hardware=h100_sxm", "runtime.checkpoint=none", "model.dropout=0.0")
LARGE = ("model.d_model=2048", "model.layers=20", "model.heads=16")
HALF_KEYS, TOP_K, HEADS = 64, 32, 4
MEMORY = ("variant=product_key_memory", f"variant.memory.half_keys={HALF_KEYS}", f"variant.memory.top_k={TOP_K}")
MEMORY += (f"variant.memory.heads={HEADS}",)
TABLE_BYTES = 64 * 10**9
STREAMS = 8
CASES = {
    "model=base, 38M parameters": ("variant=mhsa",),
    "1.0 B parameters, dense": ("variant=mhsa", *LARGE),
    "model=base with a memory of 64 GB": MEMORY,
}
ENGINES = {"replicate": "none", "fully_shard": "full"}
COLOURS = {
    "replicate": "#0072B2",
    "fully_shard": "#D55E00",
    "rows gathered (now)": "#0072B2",
    "by columns (a plan)": "#009E73",
}


def rows() -> Iterator[dict]:
    """For each case, engine and number of processes: milliseconds of computing and exchanging, and bytes that each keeps."""
    for case, words in CASES.items():
        of_table = words is MEMORY
        for engine, shard in ENGINES.items() if not of_table else [("replicate", "none")]:
            for processes in PROCESSES:
                own = (*COMMON, *words, f"batch.streams={STREAMS * processes}", f"runtime.shard={shard}")
                plan, hardware = planned(*own)
                found = predict(plan, kind="cuda", processes=processes)
                computing = found.seconds(hardware.flops_per_s.__getitem__, hardware.bytes_per_s)
                row = {"case": case, "processes": processes, "computing": computing}
                sent = {engine: found.sent}
                kept = {engine: found.peak_bytes}
                if of_table:
                    small = 4 * HALF_KEYS**2 * plan.model.d_model
                    rest = Counter(found.sent)
                    sent = {name: rest + more for name, more in table_sent(plan, processes).items()}
                    rest_bytes = found.peak_bytes - 4 * small  # weights, gradient and two moments of the stand-in
                    kept = {
                        name: rest_bytes + 2 * TABLE_BYTES // share + gathered_bytes(sent[name], processes)
                        for name, share in (("rows gathered (now)", 1), ("by columns (a plan)", processes))
                    }  # with Adagrad's sums
                for name, collectives in sent.items():
                    exchanging = hardware.links.seconds(sent_bytes(collectives, processes, kind="cuda"), processes)
                    yield row | {"engine": name, "exchanging": exchanging, "kept": kept[name]}


def planned(*words: str) -> tuple[Plan, Hardware]:
    """The plan and the hardware that ``bench.fit`` with these words has."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("fit", overrides=list(words))
    own = own_keys(cfg, *OWN)
    plan = settled(plan_run(cfg), kind="cuda")
    return plan, choose(own, device="cuda", precision=plan.runtime.precision)


def table_sent(plan: Plan, processes: int) -> dict[str, Counter]:
    """What the two ways of having a table exchange, in collective operations."""
    width, tokens = plan.model.d_model, STREAMS * plan.batch.segment
    reads = tokens * HEADS * TOP_K
    with pretended(processes) as group, FakeTensorMode(), Ledger() as by_rows:
        group.gather(torch.empty(reads, dtype=torch.int64))
        group.gather(torch.empty(reads, width))
    with pretended(processes) as group, FakeTensorMode(), Ledger() as by_columns:
        group.gather_like(torch.empty(reads, dtype=torch.int64))
        group.gather_like(torch.empty(reads))
        for _ in ("outputs", "their gradients"):
            dist.all_to_all_single(torch.empty(tokens, width), torch.empty(tokens, width))
        dist.reduce_scatter_single(torch.empty(reads), torch.empty(processes * reads))
    return {"rows gathered (now)": by_rows.sent, "by columns (a plan)": by_columns.sent}


def gathered_bytes(sent: Counter, processes: int) -> int:
    """Of what is gathered from all processes at once."""
    return processes * sum(one.bytes * calls for one, calls in sent.items() if one.name == "all_gather")


def draw(found: list[dict]):
    """Efficiency above and memory below, a column for each case."""
    figure, axes = panels(
        2,
        len(CASES),
        width=12,
        height=6.4,
        title="How far each engine goes, on paper: counted from the collective operations of a step",
        subtitle="H100 SXM, 8 to a machine, 450 GB/s of NVLink and 400 Gb/s of network for each; bfloat16; "
        f"{STREAMS} x 512 bytes a process\nthick: exchanged while it computes, as far as possible; thin: exchanged afterwards",
    )
    for column, case in enumerate(CASES):
        above, below = axes[column], axes[len(CASES) + column]
        alone = next(
            row["computing"] for row in found if row["case"] == case
        )  # replicated, it computes as it does alone
        for engine in dict.fromkeys(row["engine"] for row in found if row["case"] == case):
            own = [row for row in found if (row["case"], row["engine"]) == (case, engine)]
            at = [row["processes"] for row in own]
            computing, exchanging = ([row[name] for row in own] for name in ("computing", "exchanging"))
            least = [100 * alone / (c + e) for c, e in zip(computing, exchanging, strict=True)]
            most = [100 * alone / max(c, e) for c, e in zip(computing, exchanging, strict=True)]
            style = {"color": COLOURS[engine], "linestyle": "--" if "plan" in engine else "-", "linewidth": 1.8}
            above.fill_between(at, least, most, color=COLOURS[engine], alpha=0.18, linewidth=0)
            above.plot(at, most, **style, label=engine)
            above.plot(at, least, **style | {"linewidth": 0.8})
            below.plot(at, [row["kept"] / 1e9 for row in own], **style, marker="o", markersize=4, label=engine)
        above.set(title=case, ylim=(0, 130), ylabel="efficiency [%]" if column == 0 else "")
        above.axhline(100, color=INK, linewidth=1, linestyle=":")
        below.axhline(80, color=INK, linewidth=1, linestyle=":")
        below.set(yscale="log", ylim=(1, 3000), xlabel="processes", ylabel="memory of each [GB]" if column == 0 else "")
        below.text(PROCESSES[-1], 84, "an H100 has 80 GB", ha="right", va="bottom", fontsize=8, color=INK)
        below.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
        below.minorticks_off()
        for ax in (above, below):
            ax.set_xscale("log", base=2)
            ax.set_xticks(PROCESSES, [f"{n:,}" for n in PROCESSES])
            ax.minorticks_off()
        above.legend(loc="lower left" if column < 2 else "center left", fontsize=8.5, frameon=False)
    return figure


def main() -> None:
    """Write the figure."""
    path = Path(sys.argv[1]) if sys.argv[1:] else ROOT / FIGURE
    draw(list(rows())).savefig(path)
    print(path)


if __name__ == "__main__":
    main()
