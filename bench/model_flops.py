"""Model-FLOPs utilisation, how much of a GPU's arithmetic a training step uses: FLOPs per byte that forward and backward
need (``Sublayer.needed_flops``) x bytes per second / dense peak of the device at the precision (``conf/fit.yaml``)."""

from functools import lru_cache
from pathlib import Path

from omegaconf import OmegaConf

from bench import CONF


@lru_cache
def dense_peak(device: str, precision: str) -> float | None:
    """FLOPs per second of a device by torch's name for it, in ``float32`` (no TF32) or ``bfloat16``; None if not known."""
    devices = OmegaConf.load(Path(CONF) / "fit.yaml").devices
    rates = [entry[f"{precision}_tflops"] * 1e12 for entry in devices.values() if device in entry.reported_as]
    return rates[0] if rates else None


def utilisation(row: dict) -> dict | None:
    """Of the training step of a row of ``bench.cost``: ``flops_per_s`` needed, the device's ``peak_flops_per_s``, and the
    ``share`` of it; None where the row was not measured or no peak is known."""
    peak = dense_peak(row["device"], row["precision"]) if row["device_kind"] == "cuda" else None
    step = (row["time"] or {}).get("train_ms")
    if peak is None or not step or not row["flops"]:
        return None
    needed = row["flops"]["training_per_byte"] * row["streams"] * row["segment"] / step["p50"] * 1000
    return {"flops_per_s": needed, "peak_flops_per_s": peak, "share": needed / peak}
