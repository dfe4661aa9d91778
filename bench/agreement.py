"""Agreement of a device with float64: logits and the gradient of every parameter, as ``bench.check`` shows them.

A small model of the variant reads three segments with carried state on the device, eager or compiled; plain PyTorch in
float64 on a CPU, from the same weights and bytes, says what must come out. Then the trainer takes one step.

In bfloat16, an error may be twice what plain PyTorch errs in bfloat16 on a CPU from the same weights and bytes; in float32,
what ``agree.float32_error`` says, or twice what plain errs on that device if that is more, as with TF32 it is.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from bench.planning import bench_plan, recompose
from harness.device import runtime
from harness.device.runtime import Runtime
from harness.loop.settle import products
from harness.loop.step import Trainer
from harness.model import LanguageModel
from harness.plan.build import Plan, varied
from harness.plan.settings import RuntimeSettings, parse
from variants.conformance import gradients_of, move

SEGMENTS = 3
SLACK = 2.0
FEW = 64
"""Numbers of a gradient below which plain may err little by luck: it may err as the worst of plain's does."""


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
    steps: int
    seeds: list


def agreement(
    cfg: DictConfig, settings: AgreementSettings, *, given: set[str], own: tuple[str, ...]
) -> Iterator[tuple[str, str, str]]:
    """Each case: its label, ``pass``, ``FAIL`` or ``refused``, and how large the worst error is or why.

    Args:
        cfg: of the command.
        given: keys that were typed, which are not varied.
        own: the command's keys, which no plan has.
    """
    positioned = "recipe" in given or any(key.partition(".")[0] == "position" for key in given)
    position = HydraConfig.get().runtime.choices.position if positioned else None
    cache = cfg.model.cache if given & {"recipe", "model.cache"} else None
    pairs = [setting.partition("-")[::2] for setting in settings.settings]
    for (scheme, kind), backend, precision, compiled in itertools.product(
        dict.fromkeys((position or scheme, cache or kind) for scheme, kind in pairs),
        [cfg.runtime.backend] if "runtime.backend" in given else settings.backends,
        [cfg.runtime.precision] if "runtime.precision" in given else settings.precisions,
        [cfg.runtime.compile] if "runtime.compile" in given else settings.compiled,
    ):
        words = [f"position={scheme}", f"model.cache={kind}", f"runtime.backend={backend}"]
        words += [f"runtime.precision={precision}", f"runtime.compile={compiled}"]
        config = sized(
            settings, *words, kind=runtime.device_kind(parse(RuntimeSettings, cfg.runtime, key="runtime")), own=own
        )
        label = f"{scheme}, {kind}, {backend}, {precision}, {'compiled' if compiled else 'eager'}"
        yield label, *_case(config, settings)


def sized(settings: AgreementSettings, *words: str, kind: str, own: tuple[str, ...]) -> DictConfig:
    """What was typed with these words after it, in the sizes that are compared on a device of this kind."""
    model, batch = (settings.model, settings.batch) if kind == "cpu" else (settings.large, settings.large_batch)
    words += tuple(f"model.{key}={value}" for key, value in model.items())
    words += tuple(f"batch.{key}={value}" for key, value in batch.items())
    config = recompose("check", *words, own=own)
    for node in (node for node in config.variant.values() if isinstance(node, DictConfig)):
        for key, value in settings.small.items():
            if OmegaConf.select(node, key) is not None:
                OmegaConf.update(node, key, value)
    return config


def _case(config: DictConfig, settings: AgreementSettings) -> tuple[str, str]:
    """``pass``, ``FAIL`` or ``refused``, and why."""
    torch.compiler.reset()
    try:
        plan = bench_plan(config)
        device = runtime.start(plan.runtime)
        sublayers = [sublayer for _, sublayer in plan.make_model().sublayers()]
        for sublayer in sublayers:
            sublayer.backend(device.device, training=True)
    except ValueError as error:
        return "refused", str(error)
    least = settings.float32_error
    looked_up = any(s.touched_parameters() < sum(p.numel() for p in s.parameters()) for s in sublayers)
    if looked_up and device.precision == "bfloat16":  # rounding changes what is read
        least = math.inf
    try:
        return _verdict(plan, device, least=least)
    except Exception as error:
        return "FAIL", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def _verdict(plan: Plan, device: Runtime, *, least: float) -> tuple[str, str]:
    """``least`` is allowed whatever plain errs."""
    expected_plan = varied(
        plan, runtime={"backend": "plain", "device": "cpu", "precision": "float32", "compile": False}
    )
    torch.manual_seed(plan.seed)
    reference = move(expected_plan.make_model())
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    host = Runtime(device=torch.device("cpu"), precision="float32", compile=False)
    expected = _outcome(expected_plan, reference.double(), host)
    model = _with(plan, weights, device)
    errors = _errors(_outcome(plan, model, device), expected)
    allowed = dict.fromkeys(expected, least)
    if mode := _rounding(device):
        own = _errors(_outcome(expected_plan, _with(expected_plan, weights, mode), mode), expected)
        most = max(own.values())
        allowed = {n: max(least, SLACK * (own[n] if expected[n].numel() >= FEW else most)) for n in expected}
    worst = max(errors, key=lambda name: errors[name] / allowed[name] if allowed[name] < math.inf else errors[name])
    said = f"{errors[worst]:.1e} of {worst}, at most {allowed[worst]:.2g}"
    if not math.isfinite(errors[worst]) or errors[worst] > allowed[worst]:
        return "FAIL", said
    losses = _two_steps(plan, model, device)
    if math.isfinite(losses[1]) and losses[1] < losses[0]:
        return "pass", said
    return "FAIL", f"{said}; a training step went from {losses[0]} to {losses[1]} nats"


def _rounding(device: Runtime) -> Runtime | None:
    """Where plain PyTorch shows what the mode costs: bfloat16 on a CPU, TF32 on the device; None for IEEE float32."""
    if device.precision != "float32":
        return Runtime(device=torch.device("cpu"), precision=device.precision, compile=False)
    exact = device.device.type == "cpu" or products() in ("highest", "ieee", "none")
    return None if exact else replace(device, compile=False)


def _with(plan: Plan, weights: dict[str, Tensor], device: Runtime) -> LanguageModel:
    """The plan's model with these weights, on a device."""
    model = plan.make_model()
    model.load_state_dict(weights)
    model.project_()
    return model.to(device.device)


def _errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {name: _error(found[name], tensor) for name, tensor in expected.items()}


def _outcome(plan: Plan, model: LanguageModel, device: Runtime) -> dict[str, Tensor]:
    """Logits of the last segment and every gradient, in float64 on the CPU."""
    b, generator = plan.batch, torch.Generator().manual_seed(1)
    tokens = torch.randint(plan.data["vocabulary"], (b.streams, SEGMENTS * b.segment + 1), generator=generator)
    tokens, state, forward = tokens.to(device.device), None, device.forward(model.train())
    for first in range(0, SEGMENTS * b.segment, b.segment):
        with device.autocast():
            out = forward(tokens[:, first : first + b.segment], state)
        state = out.state
        targets = tokens[:, first + 1 : first + b.segment + 1]
        (F.cross_entropy(out.logits.flatten(0, 1), targets.flatten()) + out.loss).backward()
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    found = {f"the gradient of {name}": gradient for name, gradient in (zeros | gradients_of(model)).items()}
    return {name: tensor.double().cpu() for name, tensor in ({"logits": out.logits.detach()} | found).items()}


def _error(found: Tensor, expected: Tensor) -> float:
    """Relative to the norm of what is expected, and to 1e-6 where nothing is; infinity where a number is not finite."""
    if not found.isfinite().all():
        return math.inf
    error = ((found - expected).norm() / expected.norm().clamp(min=1e-6)).item()
    return math.inf if math.isnan(error) else error


def _two_steps(plan: Plan, model: LanguageModel, device: Runtime) -> list[float]:
    """Nats before and after one step of the trainer's own."""
    trainer = Trainer(model, plan.make_optimizers(model), device)
    model.zero_grad(set_to_none=True)
    tokens = torch.zeros(plan.batch.streams, plan.batch.segment + 1, dtype=torch.int64, device=device.device)
    return [trainer.step(tokens[:, :-1], tokens[:, 1:], None, fraction=0.5)[0].item() for _ in range(2)]
