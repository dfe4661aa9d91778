"""What a device makes of a variant, as ``bench.check`` shows it: agreement with float64.

A small model reads three segments with carried state on the device, eager or compiled; plain PyTorch in
float64 on a CPU, from the same weights and bytes, says which logits and gradients must come out
(``variants/conformance/agreement.py``). In bfloat16, an error may be twice what plain PyTorch errs in bfloat16 on a CPU; in
float32, ``FLOAT32_ERROR``, or twice what plain errs on that device if that is more, as with TF32 it is.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from bench.conformance import named_kind
from bench.planning import bench_plan, recompose
from harness.device import runtime
from harness.loop.select_backend import agreement
from harness.plan.settings import RuntimeSettings, checked, parse

SETTINGS = (("rotary", "kv"), ("relative", "hidden"), ("alibi", "kv"))
"""Position scheme and cache."""
BACKENDS, PRECISIONS, SEGMENTS = ("plain", "kernel"), ("float32", "bfloat16"), 3
FLOAT32_ERROR = 1e-3
"""Largest |actual - expected| / |expected| of logits or of a parameter's gradient. Where a table is looked up, whose slots then
differ, bfloat16 is only to be finite."""
SIZES = {
    "cpu": "model.d_model=64 model.layers=2 model.heads=4 model.span=100 batch.streams=3 batch.segment=48",
    "cuda": "model.d_model=256 model.layers=2 model.heads=4 model.span=1000 batch.streams=2 batch.segment=512",
}
"""On a GPU heads of width 64 and whole blocks of kernels."""
SMALL = {"span.initial": 0.3, "persistent.number": 24, "half_keys": 16, "top_k": 8}
"""Of sublayers that have such keywords: spans that begin on keys that are there, few vectors, few slots."""


def wanted(cfg: DictConfig) -> bool:
    """Whether to compare on the device; ValueError for a wrong key, or if the device is not there."""
    asked = checked(cfg.agree, bool | None, key="agree")
    return bool((named_kind(cfg.runtime.device) != "cpu" if asked is None else asked) and _kind(cfg))


def _kind(cfg: DictConfig) -> str:
    return runtime.device_kind(parse(RuntimeSettings, cfg.runtime, key="runtime"))


def report(cfg: DictConfig, *, typed: set[str], verb_keys: tuple[str, ...]) -> bool:
    """Print it; False where something fails, and ValueError where every case is refused. ``typed`` are keys on the command line,
    and ``verb_keys`` those of the command, which no plan has."""
    outcomes = Counter()
    for label, config in _cases(cfg, typed=typed, verb_keys=verb_keys):
        outcome, detail = _case(config)
        print(f"{outcome}  {label}: {detail}", flush=True)
        outcomes[outcome] += 1
    if set(outcomes) == {"refused"}:
        raise ValueError(detail)
    refused = f", {outcomes['refused']} refused" if outcomes["refused"] else ""
    cases = f"{outcomes['pass']} of {outcomes['pass'] + outcomes['FAIL']} cases{refused}"
    print(f"{cfg.variant.name}: agrees with float64 on {cfg.runtime.device} in {cases}")
    return not outcomes["FAIL"]


def _cases(cfg: DictConfig, *, typed: set[str], verb_keys: tuple[str, ...]) -> Iterator[tuple[str, DictConfig]]:
    """Labels and configurations, in small sizes; what was typed is not varied."""
    positioned = "recipe" in typed or any(key.partition(".")[0] == "position" for key in typed)
    position = HydraConfig.get().runtime.choices.position if positioned else None
    cache = cfg.model.cache if typed & {"recipe", "model.cache"} else None
    compiled = cfg.runtime.compile if "runtime.compile" in typed else False
    for (scheme, kind), backend, precision in itertools.product(
        dict.fromkeys((position or scheme, cache or kind) for scheme, kind in SETTINGS),
        [cfg.runtime.backend] if "runtime.backend" in typed else BACKENDS,
        [cfg.runtime.precision] if "runtime.precision" in typed else PRECISIONS,
    ):
        words = [f"position={scheme}", f"model.cache={kind}", f"runtime.backend={backend}", "model.dropout=0.0"]
        words += [f"runtime.precision={precision}", f"runtime.compile={compiled}", *SIZES[_kind(cfg)].split()]
        config = recompose("check", *words, verb_keys=verb_keys)
        for node in (node for node in config.variant.values() if isinstance(node, DictConfig)):
            for key, value in SMALL.items():
                if OmegaConf.select(node, key) is not None:
                    OmegaConf.update(node, key, value)
        yield f"{scheme}, {kind}, {backend}, {precision}, {'compiled' if compiled else 'eager'}", config


def _case(config: DictConfig) -> tuple[str, str]:
    """``pass``, ``FAIL`` or ``refused``, and how large the worst error is or why."""
    torch.compiler.reset()
    try:
        plan = bench_plan(config)
        where = runtime.start(plan.runtime)
        sublayers = [sublayer for _, sublayer in plan.make_model().sublayers()]
        for sublayer in sublayers:
            sublayer.backend(where.device, training=True)
    except ValueError as error:
        return "refused", str(error)
    looked_up = any(sublayer.tables for sublayer in sublayers)
    least = math.inf if looked_up and where.precision == "bfloat16" else FLOAT32_ERROR  # other slots are read
    try:
        passed, detail = agreement(plan, where, segments=(plan.batch.segment,) * SEGMENTS, least=least)
    except Exception as error:
        return "FAIL", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
    return "pass" if passed else "FAIL", detail
