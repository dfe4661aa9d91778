"""What a device makes of a variant, as ``bench.check`` shows it: agreement with float64.

A small model reads three segments with carried state on the device, eager or compiled; plain PyTorch in
float64 on a CPU, from the same weights and bytes, says which logits and gradients must come out
(``variants/conformance/agreement.py``). In bfloat16, an error may be twice what plain PyTorch errs in bfloat16 on a CPU; in
float32, what ``agree.float32_error`` says, or twice what plain errs on that device if that is more, as with TF32 it is.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from bench.conformance import named_kind
from bench.planning import bench_plan, recompose
from harness.device import runtime
from harness.loop.select_backend import agreement
from harness.plan.settings import RuntimeSettings, parse

SEGMENTS = 3


@dataclass(frozen=True, kw_only=True)
class AgreementSettings:
    """The keys of ``agree`` in ``conf/check.yaml``, which says what they mean."""

    run: bool | None
    settings: list
    backends: list
    precisions: list
    compiled: list
    float32_error: float
    model: dict
    batch: dict
    large: dict
    large_batch: dict
    small: dict


def settings_of(cfg: DictConfig) -> AgreementSettings | None:
    """What to compare on the device, or None; ValueError for a wrong key, or if the device is not there."""
    settings = parse(AgreementSettings, OmegaConf.to_container(cfg, resolve=True)["agree"], key="agree")
    wanted = named_kind(cfg.runtime.device) != "cpu" if settings.run is None else settings.run
    return settings if wanted and _kind(cfg) else None


def _kind(cfg: DictConfig) -> str:
    return runtime.device_kind(parse(RuntimeSettings, cfg.runtime, key="runtime"))


def report(cfg: DictConfig, settings: AgreementSettings, *, typed: set[str], own: tuple[str, ...]) -> bool:
    """Print it; False where something fails, and ValueError where every case is refused. ``typed`` are keys on the command line,
    and ``own`` those of the command, which no plan has."""
    outcomes = Counter()
    for label, config in _cases(cfg, settings, typed=typed, own=own):
        result, detail = _case(config, settings)
        print(f"{result}  {label}: {detail}", flush=True)
        outcomes[result] += 1
    if set(outcomes) == {"refused"}:
        raise ValueError(detail)
    refused = f", {outcomes['refused']} refused" if outcomes["refused"] else ""
    cases = f"{outcomes['pass']} of {outcomes['pass'] + outcomes['FAIL']} cases{refused}"
    print(f"{cfg.variant.name}: agrees with float64 on {cfg.runtime.device} in {cases}")
    return not outcomes["FAIL"]


def _cases(
    cfg: DictConfig, settings: AgreementSettings, *, typed: set[str], own: tuple[str, ...]
) -> Iterator[tuple[str, DictConfig]]:
    """Labels and configurations; what was typed is not varied."""
    positioned = "recipe" in typed or any(key.partition(".")[0] == "position" for key in typed)
    position = HydraConfig.get().runtime.choices.position if positioned else None
    cache = cfg.model.cache if typed & {"recipe", "model.cache"} else None
    pairs = [setting.partition("-")[::2] for setting in settings.settings]
    for (scheme, kind), backend, precision, compiled in itertools.product(
        dict.fromkeys((position or scheme, cache or kind) for scheme, kind in pairs),
        [cfg.runtime.backend] if "runtime.backend" in typed else settings.backends,
        [cfg.runtime.precision] if "runtime.precision" in typed else settings.precisions,
        [cfg.runtime.compile] if "runtime.compile" in typed else settings.compiled,
    ):
        words = [f"position={scheme}", f"model.cache={kind}", f"runtime.backend={backend}", "model.dropout=0.0"]
        words += [f"runtime.precision={precision}", f"runtime.compile={compiled}"]
        label = f"{scheme}, {kind}, {backend}, {precision}, {'compiled' if compiled else 'eager'}"
        yield label, _sized(cfg, settings, *words, own=own)


def _sized(cfg: DictConfig, settings: AgreementSettings, *words: str, own: tuple[str, ...]) -> DictConfig:
    """What was typed with these words after it, in the sizes that are compared on such a device."""
    sizes = ("model", "batch") if _kind(cfg) == "cpu" else ("large", "large_batch")
    for section, name in zip(("model", "batch"), sizes, strict=True):
        words += tuple(f"{section}.{key}={value}" for key, value in getattr(settings, name).items())
    config = recompose("check", *words, own=own)
    for node in (node for node in config.variant.values() if isinstance(node, DictConfig)):
        for key, value in settings.small.items():
            if OmegaConf.select(node, key) is not None:
                OmegaConf.update(node, key, value)
    return config


def _case(config: DictConfig, settings: AgreementSettings) -> tuple[str, str]:
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
    least = math.inf if looked_up and where.precision == "bfloat16" else settings.float32_error  # other slots are read
    try:
        passed, detail = agreement(plan, where, segments=(plan.batch.segment,) * SEGMENTS, least=least)
    except Exception as error:
        return "FAIL", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
    return "pass" if passed else "FAIL", detail
