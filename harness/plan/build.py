"""Plan of a run: the whole configuration, checked; below this module there are only plain arguments."""

import importlib
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue
from torch.optim import Optimizer

from harness.model import LanguageModel, Layers
from harness.optim.budget import UNITS
from harness.optim.optimizers import Optimizers
from harness.optim.parameter_groups import Group, assign
from harness.plan.instantiate import resolve
from harness.plan.network import make_network, plan_layers
from harness.plan.settings import OptimSettings, PositiveFloat, RunSettings, check_keys, checked, parse, section
from harness.plan.space import take_trial
from variants.contract import Position

_HINTS = get_type_hints(Group, include_extras=True) | {"match": str | list[str]}
GROUP = {name: _HINTS[name] for name in ("match", "optimizer", "lr_scale", "weight_decay", "schedule", "clip")}
"""Keys of a variant's parameter group, and their types."""
LONGEST_CONTEXT = 16_384
"""Most bytes that a stream of a score reads before its own."""


@section
class Plan(RunSettings):
    """A configured run: ``config`` is the resolved configuration as a plain dictionary, for hashing and the record;
    ``data`` has keywords of ``harness.data.corpora.load``; ``point`` is a trial's place in its space;
    ``backend_choice`` comes from ``select_backend``, ``admission`` from ``harness.loop.admission``."""

    variant: str
    outputs: Path
    data: dict
    optim: dict
    trust: tuple[str, ...]
    config: dict
    layers: Layers
    scheme: Callable[..., Position]
    groups: dict
    point: dict | None
    sweeping: bool
    backend_choice: dict | None = None
    admission: str | None = None

    def make_model(self) -> LanguageModel:
        """The model, initialised by torch's generator; ValueError where sizes do not fit together."""
        computed = {"backend": self.runtime.backend, "checkpoint": self.runtime.checkpoint}
        return make_network(self.layers, self.scheme, self.model, vocabulary=self.data["vocabulary"], **computed)

    def make_optimizers(self, model: LanguageModel) -> Optimizers:
        """The optimizers of a model built by ``make_model``."""
        o = self.optim
        groups = assign(model, default=o["default"], matrices=o["matrices"], groups=self.groups)
        return Optimizers(groups, **{name: o[name] for name in ("lr", "schedule", "clip")})

    def protocol(self) -> dict:
        """How bits per byte are scored: part of the number."""
        e = self.eval
        how = {"streams": e.streams, "segment": e.segment, "span": self.model.span, "bytes": e.bytes}
        how |= {"context": streamed_context(self.model.span, self.model.layers), "selection_bytes": e.selection_bytes}
        return how | {key: self.data[key] for key in ("vocabulary", "drop_newlines", "split")}


def streamed_context(span: int, layers: int) -> int:
    """Unscored bytes that each stream of a score reads first: as far back as ``span`` reaches through all layers."""
    return min(span * layers, LONGEST_CONTEXT)


def plan_run(
    cfg: DictConfig, *, trusted: tuple[str, ...] = (), sweeping: bool = False, typed: Collection[str] = ()
) -> Plan:
    """Check a composed configuration whole; ValueError names the key, the value and what is allowed.

    Args:
        trusted: modules beside those of the configuration's ``trust``.
        sweeping: whether this is a job of a sweep, where no fallback corpus is read.
        typed: keys on the command line.
    """
    config, point = _resolved(cfg, typed=typed)
    if sweeping:
        config["data"] = config["data"] | {"fallback": None}
    settings = parse(RunSettings, config, key="")
    variant, trust = settings.variant, tuple(dict.fromkeys(_trust(settings.trust) + trusted))
    objects = {
        "variant": checked(variant.get("name"), str, key="variant.name"),
        "outputs": Path(settings.outputs),
        "data": vars(settings.data),
        "optim": _optim(settings.optim, trust, lr_scale=variant.get("lr_scale")),
        "budget": replace(settings.budget, default_bytes=settings.model.default_bytes),
        "trust": trust,
        "layers": plan_layers(variant, n_layers=settings.model.layers, trust=trust),
        "scheme": resolve(settings.position, key="position", kind=Position, trust=trust),
        "groups": {},
    }
    for name, group in (checked(variant.get("groups"), dict | None, key="variant.groups") or {}).items():
        objects["groups"][name] = _group(group, GROUP, trust, key=f"variant.groups.{name}", required=("match",))
    plan = Plan(**vars(settings) | objects, config=config, point=point, sweeping=sweeping)
    if plan.init_from.restore == "everything" and plan.init_from.run is None:
        raise ValueError(
            "init_from.run=null: init_from.restore=everything needs a run's folder; "
            "without one init_from.restore=weights"
        )
    if not re.fullmatch(r"\w[\w.-]*", plan.variant):
        raise ValueError(f"variant.name={plan.variant}: must be one word, because it begins the run folder's name")
    if plan.batch.accumulate > plan.batch.streams:
        raise ValueError(f"batch.accumulate={plan.batch.accumulate}: at most batch.streams={plan.batch.streams}")
    return plan


def varied(plan: Plan, **sections: dict) -> Plan:
    """The plan of the same configuration with other keys in some sections."""
    config = plan.config | {name: plan.config[name] | changes for name, changes in sections.items()}
    return plan_run(OmegaConf.create(config), trusted=plan.trust)


def _resolved(cfg: DictConfig, *, typed: Collection[str]) -> tuple[dict, dict | None]:
    """The configuration at its trial as a plain dictionary of all sections, and the trial's point."""
    if "sweep" in cfg:  # Hydra's own sweeps leave no such key behind
        raise ValueError(
            "sweep: W&B runs this file, not Hydra: wandb sweep conf/sweep/wandb_grid.yaml, then wandb agent"
        )
    cfg = OmegaConf.merge({"check": True}, cfg)  # older run folders and commands that train nothing lack it
    sections = {name: node for name, node in OmegaConf.to_container(cfg).items() if name != "hydra"}
    check_keys(sections, list(RunSettings.__dataclass_fields__), key="")
    check_keys(sections["budget"], UNITS, key="budget")
    cfg, point = take_trial(OmegaConf.masked_copy(cfg, list(sections)), typed=typed)
    try:
        return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True), point
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key}=???: must be given") from error


def _trust(names: object) -> tuple[str, ...]:
    """The user's modules, importable from the folder in which the command was typed."""
    names = [names] if isinstance(names, str) else names or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"trust={names}: must be a list of modules, e.g. trust=[my_file]")
    if names and str(Path.cwd()) not in sys.path:  # last, and only with trust: the folder may be a stranger's
        sys.path.append(str(Path.cwd()))
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(
                f"trust={name}: cannot be imported ({error}); run from its folder or set PYTHONPATH"
            ) from error
    return tuple(names)


def _optim(settings: OptimSettings, trust: tuple[str, ...], *, lr_scale: object) -> dict:
    """``optim`` with partials, its rate times the variant's ``lr_scale`` for ``optim.name``."""
    scales = checked(lr_scale, dict | None, key="variant.lr_scale") or {}
    for name, factor in scales.items():
        checked(factor, PositiveFloat, key=f"variant.lr_scale.{name}")
    optim = vars(settings) | {"lr": settings.lr * scales.get(settings.name, 1.0)}
    optim["default"] = resolve(settings.default, key="optim.default", kind=Optimizer, trust=trust)
    if settings.matrices:
        hints = {name: GROUP[name] for name in ("lr_scale", "optimizer")}
        optim["matrices"] = _group(settings.matrices, hints, trust, key="optim.matrices")
    return optim


def _group(node: object, hints: Mapping[str, object], trust: tuple[str, ...], *, key: str, required=None) -> dict:
    """A group's keys, checked, with its optimizer, if any, as a partial."""
    check_keys(checked(node, dict, key=key), list(hints), key=key, required=required)
    values = {name: checked(v, hints[name], key=f"{key}.{name}") for name, v in node.items() if name != "optimizer"}
    if node.get("optimizer"):
        values["optimizer"] = resolve(node["optimizer"], key=f"{key}.optimizer", kind=Optimizer, trust=trust)
    return values


def hydra_facts() -> dict[str, object]:
    """Keywords of ``plan_run`` that Hydra knows: the typed keys, and whether this is a job of a sweep."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    words = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    typed = {word.lstrip("+").partition("=")[0] for word in words}
    return {"sweeping": hydra.mode == RunMode.MULTIRUN, "typed": typed}
