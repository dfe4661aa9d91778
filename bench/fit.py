"""Will it fit? ``python -m bench.fit variant=V model=base device_memory=24GiB``, without the hardware.

The trainer's very step runs on tensors without data (``fake_step.py``): peak memory by cause, and the largest batch or span
that stays within the device's memory. The roofline is the time below which no step can be: every operation takes its
FLOPs at the peak rate or its bytes at the peak bandwidth, whichever is longer; latencies and launches count nothing.

With ``processes=64`` all of it is of one of so many, which share ``batch.streams``: memory as ``runtime.shard`` divides it, and
what it sends the others in a step (``exchange.py``).

``runtime.device`` says what is predicted: ``cpu``, or a GPU (any other word). Attention's kernels there are stand-ins with the
tensors, FLOPs and bytes of any such kernel (``stand_ins.py``); compiled code is predicted from its graphs (``fused_graph.py``).
Not in the figures: what kernels and libraries take for themselves (a CUDA context is about half a GiB, its allocator's fragments
come on top), and on a CPU the corpus and freed blocks that the C library keeps. Learned spans are as they start, or ``spans``.
"""

from collections.abc import Callable
from pathlib import Path

import hydra
from omegaconf import DictConfig
from rich.console import Console

from bench import CONF
from bench.hardware import OWN, Hardware, choose, kind_of
from harness.compose.cli import run_command

MOST = 2**20
"""Streams or span from which on a search ends: at least so many fit."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="fit")
def main(cfg: DictConfig) -> None:
    from bench.conformance import (
        of_mechanism,
        passed,
    )  # late, as everything slow, so that a wrong word is answered at once
    from bench.fake_step import predict, settled
    from bench.planning import own_keys
    from bench.report.tables_costs import fit_tables, for_terminal
    from bench.rows import RowFile
    from harness.plan.build import hydra_facts, plan_run
    from harness.plan.settings import checked
    from harness.record.table import print_table

    own = own_keys(cfg, *OWN)
    plan = plan_run(cfg, **hydra_facts())
    plan = settled(plan, kind=kind_of(plan.runtime.device))
    tf32 = plan.runtime.tf32
    hardware = choose(own, device=plan.runtime.device, precision=plan.runtime.precision, tf32=tf32)
    processes = checked(own["processes"], int, key="processes")
    if processes < 1:
        raise ValueError(f"processes={processes}: must be above 0")
    known = {"kind": hardware.kind, "processes": processes, "spans": checked(own["spans"], list | None, key="spans")}
    asked = _asked(own["largest"], hardware)
    passed(of_mechanism(plan, hardware.kind))
    file = RowFile(Path(cfg.outputs), verb="fit")
    found, largest = predict(plan, **known), {"streams": None, "span": None}
    times = {"streams": processes, "span": 1}
    for name in asked:
        with Console(stderr=True).status(f"the largest {name} that fits"):
            largest[name] = push(
                lambda size, name=name: predict(plan, **known, **{name: size * times[name]}).peak_bytes,
                limit_bytes=hardware.memory_bytes,
                least=plan.batch.accumulate if name == "streams" else 1,
            )
            largest[name] *= times[name]
    row = file.append(_row(plan, found, hardware, largest, processes))
    (table,) = fit_tables([row])
    print_table(for_terminal(table))
    print(f"rows: {file.path}")


def _asked(names: object, hardware: Hardware) -> list[str]:
    names = [names] if isinstance(names, str) else names or []
    if not isinstance(names, list) or not set(names) <= {"streams", "span"}:
        raise ValueError(f"largest={names}: allowed are streams, span, [streams,span] and []")
    if names and hardware.memory_bytes is None:
        raise ValueError("device_memory=null: must be given with largest, as in device_memory=24GiB; or set largest=[]")
    return names


def push(peak_bytes: Callable[[int], int], *, limit_bytes: int, least: int = 1, most: int = MOST) -> int:
    """The largest size from ``least`` to ``most`` whose peak stays within the limit and that of the next does not; 0 if none.

    Memory is nearly affine in the size: each guess lies on the line through the last that fits and the first that does
    not, or the two last that fit; every fourth one halves or doubles, which ends the search whatever the shape.
    """
    low, low_bytes = least, peak_bytes(least)
    if low_bytes > limit_bytes:
        return 0
    below, below_bytes, high, high_bytes, turn = 0, 0, None, 0, 0
    while low < most and high != low + 1:
        turn += 1
        if turn == 1:
            guess = low + 1
        elif turn % 4 == 0:
            guess = 2 * low if high is None else (low + high) // 2
        elif high is None:
            slope = (low_bytes - below_bytes) / (low - below)
            guess = most if slope <= 0 else low + int(min(most, (limit_bytes - low_bytes) / slope))
        else:
            guess = low + int((limit_bytes - low_bytes) / (high_bytes - low_bytes) * (high - low))
        guess = max(low + 1, min(guess, most if high is None else high - 1))
        guess_bytes = peak_bytes(guess)
        if guess_bytes <= limit_bytes:
            below, below_bytes, low, low_bytes = low, low_bytes, guess, guess_bytes
        else:
            high, high_bytes = guess, guess_bytes
    return low


def _row(plan, found, hardware: Hardware, largest: dict[str, int | None], processes: int) -> dict:
    """As ``tests/bench_rows.py`` has it; the device is the predicted one, versions are of the torch that predicts."""
    import torch

    from bench.exchange import sent_bytes
    from bench.planning import provenance, typed_command
    from harness.data import corpora
    from harness.device.runtime import Runtime

    here = Runtime(device=torch.device("cpu"), precision=plan.runtime.precision, compile=False)
    corpus, command = corpora.load(**plan.data), typed_command("fit")
    sent = sent_bytes(found.sent, processes, kind=hardware.kind)
    roofline = None
    if hardware.bytes_per_s is not None:
        roofline = {
            "name": hardware.name,
            "peak_flops_per_s": hardware.flops_per_s[plan.runtime.precision],
            "bytes_per_s": hardware.bytes_per_s,
            "train_ms": 1000 * found.seconds(hardware.flops_per_s.__getitem__, hardware.bytes_per_s),
            "exchange_ms": 1000 * hardware.links.seconds(sent, processes) if hardware.links else None,
        }
    return provenance(plan, kind="fit", corpus=corpus, runtime=here, command=command) | {
        "processes": processes,
        "device": f"{hardware.name}, predicted",
        "device_kind": hardware.kind,
        **{name: getattr(found, name) for name in ("streams", "segment", "span", "backend", "split", "warm")},
        "shard": plan.runtime.shard,
        "sent": sent,
        "device_memory_bytes": hardware.memory_bytes,
        "predicted_peak_bytes": found.peak_bytes,
        "measured_peak_bytes": None,
        "largest": largest,
        "roofline": roofline,
    }


if __name__ == "__main__":
    run_command(main)
