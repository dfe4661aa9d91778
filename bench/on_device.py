"""What a device makes of a variant, as ``bench.check`` shows it: every candidate's proof and time, and agreement with float64.

For agreement a small model reads three segments with carried state on the device, eager or compiled; plain PyTorch in
float64 on a CPU, from the same weights and bytes, says which logits and gradients must come out. Then the trainer takes one step.

In bfloat16, an error may be twice what plain PyTorch errs in bfloat16 on a CPU from the same weights and bytes; in float32,
what ``agree.float32_error`` says, or twice what plain errs on that device if that is more, as with TF32 it is.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from bench import conformance
from bench.planning import bench_plan, recompose
from harness.device import runtime
from harness.device.first_use import Choice
from harness.device.runtime import Runtime
from harness.loop.settle import chosen, products
from harness.loop.update import Update
from harness.model import LanguageModel
from harness.plan.build import Plan, varied
from harness.plan.settings import RuntimeSettings, parse
from variants.conformance import gradients_of, move

SEGMENTS = 3
SLACK = 2.0
FEW = 64
"""Numbers of a gradient below which plain may err little by luck: it may err as the worst of plain's does."""
PLAIN = {"backend": "plain", "precision": "float32", "compile": False}
HOST = Runtime(device=torch.device("cpu"), precision="float32", compile=False)


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
    name = parse(RuntimeSettings, cfg.runtime, key="runtime").device
    asked = conformance.named_kind(name) != "cpu" if settings.run is None else settings.run
    return settings if asked and _kind(cfg) else None


def _kind(cfg: DictConfig) -> str:
    return runtime.device_kind(parse(RuntimeSettings, cfg.runtime, key="runtime"))


def report(cfg: DictConfig, settings: AgreementSettings, *, typed: set[str], own: tuple[str, ...]) -> bool:
    """Print it, proofs on a device that is no CPU only; False where something fails, and ValueError where every case of agreement
    is refused. ``typed`` are keys on the command line, and ``own`` those of the command, which no plan has."""
    failed, outcomes = 0, Counter()
    if conformance.named_kind(cfg.runtime.device) != "cpu":
        # In the sizes that were typed, or in those that are compared.
        sections = {key.partition(".")[0] for key in typed - {"model.cache", "model.attend_self"}}
        sized = sections & {"recipe", "model"}
        lines, failed = proofs(bench_plan(recompose("check", own=own) if sized else _sized(cfg, settings, own=own)))
        print(*lines, sep="\n", flush=True)
    for label, outcome, detail in agreement(cfg, settings, typed=typed, own=own):
        print(f"{outcome}  {label}: {detail}", flush=True)
        outcomes[outcome] += 1
    if set(outcomes) == {"refused"}:
        raise ValueError(detail)
    beside = f", {outcomes['refused']} refused" if outcomes["refused"] else ""
    cases = f"{outcomes['pass']} of {outcomes['pass'] + outcomes['FAIL']} cases{beside}"
    print(f"{cfg.variant.name}: agrees with float64 on {cfg.runtime.device} in {cases}")
    return not failed + outcomes["FAIL"]


def proofs(plan: Plan, *, choosing: Callable[..., Choice | None] = chosen) -> tuple[list[str], int]:
    """A line for every candidate's verdict on the plan's device beside plain PyTorch in float64, with the case that is nearest to
    its limit, and for why one is taken; and how many failed, or did not run at the plan's shapes."""
    asked = varied(plan, runtime={"backend": "auto"})
    choice = choosing(asked, runtime.start(asked.runtime))
    if choice is None:
        return [f"{plan.variant}: has no candidates beside plain PyTorch on {plan.runtime.device}"], 0
    lines = []
    for backend, verdicts in choice.verdicts.items():
        step_ms = choice.step_ms.get(backend)
        speed = "does not run at the plan's shapes" if step_ms is None else f"{step_ms:.3g} ms in all layers"
        for sublayer, verdict in verdicts.items():
            errs = "" if verdict.error is None else f", errs {verdict.error:.1e} of {verdict.allowed:.1e}"
            told = f"{verdict.case or verdict.said}{errs}, {verdict.cases} cases in {verdict.seconds:.0f} s; {speed}"
            good = verdict.passed and step_ms is not None
            lines.append(f"{'pass' if good else 'FAIL'}  proof of {backend}, {sublayer}: {told}")
    return [*lines, *choice.why], sum(line.startswith("FAIL") for line in lines)


def agreement(
    cfg: DictConfig, settings: AgreementSettings, *, typed: set[str], own: tuple[str, ...]
) -> Iterator[tuple[str, str, str]]:
    """Each case: its label, ``pass``, ``FAIL`` or ``refused``, and how large the worst error is or why."""
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
        words = [f"position={scheme}", f"model.cache={kind}", f"runtime.backend={backend}"]
        words += [f"runtime.precision={precision}", f"runtime.compile={compiled}"]
        label = f"{scheme}, {kind}, {backend}, {precision}, {'compiled' if compiled else 'eager'}"
        yield label, *_case(_sized(cfg, settings, *words, own=own), settings)


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
    looked_up = any(sublayer.tables for sublayer in sublayers)
    rounds = looked_up and device.precision == "bfloat16"  # which changes what is read
    try:
        return _verdict(plan, device, least=math.inf if rounds else settings.float32_error)
    except Exception as error:
        return "FAIL", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def _verdict(plan: Plan, device: Runtime, *, least: float) -> tuple[str, str]:
    """``least`` is allowed whatever plain errs."""
    expected_plan = varied(plan, runtime=PLAIN | {"device": "cpu"})
    torch.manual_seed(plan.seed)
    reference = move(expected_plan.make_model())
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    expected = _outcome(expected_plan, reference.double(), HOST)
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
        return replace(HOST, precision=device.precision)
    exact = device.device.type == "cpu" or products() in ("highest", "ieee", "none")
    return None if exact else replace(device, compile=False)


def _with(plan: Plan, weights: dict[str, Tensor], device: Runtime) -> LanguageModel:
    """The plan's model with these weights, on a device."""
    model = plan.make_model()
    model.load_state_dict(weights)
    model.project_()
    return model.to(device.device)


def _outcome(plan: Plan, model: LanguageModel, device: Runtime) -> dict[str, Tensor]:
    """Logits of the last segment and every gradient, in float64 on the CPU."""
    b, generator = plan.batch, torch.Generator().manual_seed(1)
    tokens = torch.randint(plan.data["vocabulary"], (b.streams, SEGMENTS * b.segment + 1), generator=generator)
    tokens, state, forward = tokens.to(device.device), None, device.forward(model.train())
    for inputs, targets in zip(tokens[:, :-1].split(b.segment, 1), tokens[:, 1:].split(b.segment, 1), strict=True):
        with device.autocast():
            out = forward(inputs, state)
        state = out.state
        (F.cross_entropy(out.logits.flatten(0, 1), targets.flatten()) + out.loss).backward()
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    gradients = {f"the gradient of {name}": gradient for name, gradient in (zeros | gradients_of(model)).items()}
    return {name: t.detach().double().cpu() for name, t in ({"logits": out.logits} | gradients).items()}


def _errors(outcome: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative to the norm of what is expected, and to 1e-6 where nothing is; infinity where a number is not finite."""
    relative = {name: (outcome[name] - e).norm() / e.norm().clamp(min=1e-6) for name, e in expected.items()}
    return {name: error.nan_to_num(math.inf, math.inf).item() for name, error in relative.items()}


def _two_steps(plan: Plan, model: LanguageModel, device: Runtime) -> list[float]:
    """Nats before and after one step of the trainer's own."""
    update = Update(model, plan.make_optimizers(model), device)
    model.zero_grad(set_to_none=True)
    tokens = torch.zeros(plan.batch.streams, plan.batch.segment + 1, dtype=torch.int64, device=device.device)
    return [update(tokens[:, :-1], tokens[:, 1:], None, fraction=0.5)[0].item() for _ in range(2)]
