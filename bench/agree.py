"""Does a device compute what the mechanisms are? ``python -m bench.agree runtime.device=cuda``, the first thing to run on one.

Every variant of a small model reads three segments with carried state on the device, eager or compiled, and gives logits and
the gradient of every parameter; plain PyTorch in float64 on a CPU, from the same weights and bytes, says what they must be.
Then the trainer takes one step. A case is a line, ``pass``, ``FAIL`` or ``refused``, as it ends; exit code 1 if one fails.
"""

import itertools
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import hydra
from omegaconf import DictConfig

from bench import CONF
from harness.compose.cli import run_command

SEGMENTS = 3
SPAN_SHARE = 0.3
"""Where learned spans begin: their ramps then lie on keys that are there."""
FAILED: list[str] = []


@dataclass(frozen=True, kw_only=True)
class AgreeSettings:
    """The keys of ``conf/agree.yaml``, which says what they mean."""

    variants: list | None
    settings: list
    paths: list
    precisions: list
    compiled: list
    float32_error: float
    bfloat16_error: float


@hydra.main(version_base="1.3", config_path=CONF, config_name="agree")
def main(cfg: DictConfig) -> None:
    from bench.planning import own_keys
    from harness.plan.settings import parse

    settings = parse(AgreeSettings, own_keys(cfg, *AgreeSettings.__dataclass_fields__), key="")
    cases = list(
        itertools.product(*(getattr(settings, name) for name in ("compiled", "settings", "paths", "precisions")))
    )
    for variant in settings.variants or sorted(path.stem for path in (Path(CONF) / "variant").glob("*.yaml")):
        for compiled, setting, path, precision in cases:
            began = time.perf_counter()
            said = _case(variant, settings, setting=setting, path=path, precision=precision, compiled=compiled)
            how = f"{setting}, {path}, {precision}, {'compiled' if compiled else 'eager'}"
            print(f"{said[0]:7}  {variant}, {how}: {said[1]} ({time.perf_counter() - began:.1f} s)", flush=True)
            if said[0] == "FAIL":
                FAILED.append(variant)


def _case(
    variant: str, settings: AgreeSettings, *, setting: str, path: str, precision: str, compiled: bool
) -> tuple[str, str]:
    """``pass``, ``FAIL`` or ``refused``, and why."""
    import torch

    from bench.planning import bench_plan
    from harness.device import runtime

    limit = getattr(settings, f"{precision}_error")
    torch.compiler.reset()
    try:
        plan = bench_plan(_config(variant, setting, path=path, precision=precision, compiled=compiled))
        device = runtime.start(plan.runtime)
        model = plan.make_model()
        for _, sublayer in model.sublayers():
            sublayer.path(device.device, training=True)
    except ValueError as error:
        return "refused", str(error)
    try:
        return _verdict(plan, device, limit=math.inf if "memory" in variant and precision == "bfloat16" else limit)
    except Exception as error:
        return "FAIL", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def _config(variant: str, setting: str, *, path: str, precision: str, compiled: bool) -> DictConfig:
    from bench.planning import recompose

    position, _, cache = setting.partition("-")
    words = [f"variant={variant}", f"position={position}", f"model.cache={cache}", f"runtime.path={path}"]
    words += [f"runtime.precision={precision}", f"runtime.compile={compiled}"]
    config = recompose("agree", *words, own=tuple(AgreeSettings.__dataclass_fields__))
    for node in config.variant.values():
        if isinstance(node, DictConfig) and isinstance(node.get("reach"), DictConfig) and "initial" in node.reach:
            node.reach.initial = SPAN_SHARE
        if isinstance(node, DictConfig) and "half_keys" in node:
            node.half_keys, node.top_k = 16, 8
        if isinstance(node, DictConfig) and isinstance(node.get("persistent"), DictConfig):
            node.persistent.number = 24
    return config


def _verdict(plan, device, *, limit: float) -> tuple[str, str]:
    import torch

    from bench.conformance import varied
    from harness.device.runtime import Runtime

    expected_plan = varied(plan, runtime={"path": "plain", "device": "cpu", "precision": "float32", "compile": False})
    torch.manual_seed(plan.seed)
    reference = expected_plan.make_model()
    with torch.no_grad():  # what starts at zero would hide what is behind it
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    reference.project_()
    model = plan.make_model()
    model.load_state_dict(reference.state_dict())
    model.project_()
    host = Runtime(device=torch.device("cpu"), precision="float32", compile=False)
    expected = _outcome(expected_plan, reference.double(), host)
    model = model.to(device.device)
    found = _outcome(plan, model, device)
    errors = {name: _error(found[name], expected[name]) for name in expected}
    worst = max(errors, key=lambda name: errors[name] if math.isfinite(errors[name]) else math.inf)
    said = f"{errors[worst]:.1e} of {worst}, at most {limit:g}"
    if not math.isfinite(errors[worst]) or errors[worst] > limit:
        return "FAIL", said
    return _stepped(plan, model, device, said)


def _outcome(plan, model, device) -> dict:
    """Logits of the last segment and every gradient, in float64 on the CPU."""
    import torch
    import torch.nn.functional as F

    b, generator = plan.batch, torch.Generator().manual_seed(1)
    tokens = torch.randint(plan.data["vocabulary"], (b.lanes, SEGMENTS * b.segment + 1), generator=generator)
    tokens, state, forward = tokens.to(device.device), None, device.forward(model.train())
    for first in range(0, SEGMENTS * b.segment, b.segment):
        with device.autocast():
            out = forward(tokens[:, first : first + b.segment], state)
        state = out.state
        targets = tokens[:, first + 1 : first + b.segment + 1]
        (F.cross_entropy(out.logits.flatten(0, 1), targets.flatten()) + out.loss).backward()
    found = {"logits": out.logits.detach()} | {
        f"the gradient of {name}": torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    return {name: tensor.double().cpu() for name, tensor in found.items()}


def _error(found, expected) -> float:
    """Relative to the norm of what is expected, and to 1e-6 where nothing is; infinity where a number is not finite."""
    if not found.isfinite().all():
        return math.inf
    return ((found - expected).norm() / expected.norm().clamp(min=1e-6)).item()


def _stepped(plan, model, device, said: str) -> tuple[str, str]:
    """One step of the trainer's own, scored before and after."""
    import torch

    from harness.loop.step import Trainer

    trainer = Trainer(model, plan.make_optimizers(model), device)
    model.zero_grad(set_to_none=True)
    tokens = torch.zeros(plan.batch.lanes, plan.batch.segment + 1, dtype=torch.int64, device=device.device)
    losses = [trainer.step(tokens[:, :-1], tokens[:, 1:], None, fraction=0.5)[0].item() for _ in range(2)]
    learned = math.isfinite(losses[1]) and losses[1] < losses[0]
    return ("pass", said) if learned else ("FAIL", f"{said}; a training step went from {losses[0]} to {losses[1]} nats")


def command() -> None:
    """Exit code 1 after the last case, if one failed."""
    main()
    if FAILED:
        sys.exit(1)


if __name__ == "__main__":
    run_command(command)
