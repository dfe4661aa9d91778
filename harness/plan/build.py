"""Plan of a run: the validated configuration, and factories made of it. Models and optimizers
see no configuration."""

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_type_hints

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue
from torch.optim import Optimizer

from harness.failures import refuse_exit
from harness.model import LanguageModel, Layers
from harness.optim.budget import UNITS, Budget
from harness.optim.optimizers import Optimizers
from harness.optim.parameter_groups import Group, assign
from harness.plan.network import plan_layers
from harness.plan.objective import check_objective
from harness.plan.settings import (
    OptimSettings,
    PositiveFloat,
    RunSettings,
    check_keys,
    parse_section,
    parse_setting,
    variant_section,
)
from harness.plan.targets import resolve
from variants.contract import LayerContext, Position

GROUP_HINTS = get_type_hints(Group, include_extras=True) | {"match": str | list[str]}
"""Types of the keys of a parameter group."""
GROUP_KEYS = ("match", "optimizer", "lr_scale", "weight_decay", "schedule", "clip")
"""Keys of a variant's parameter group."""
CONTEXT_KEYS = ("d_model", "heads", "span", "attend_self", "cache", "dropout")
"""Keys of ``model`` for ``LayerContext``. ``LanguageModel`` gets the rest without ``layers`` and
``default_bytes``."""
# most unscored bytes that a stream of an evaluation reads before its first scored byte
MAX_CONTEXT = 16_384


OLD_OBJECTIVE = {"name": "causal_lm", "direction": "causal"}
MADE = ("variant", "position", "optim", "budget", "trust")
"""Keys of a run that a plan has in another form."""


@dataclass(frozen=True, kw_only=True)
class Plan(RunSettings):
    """What to run: the sections of a configuration, with factories of the objects that it names."""

    variant: str
    layers: Layers  # for each layer, the factories of its sublayers by name
    groups: dict  # the variant's parameter groups
    scheme: Callable[..., Position]  # the factory of the position scheme
    optim: OptimSettings  # with optimizers as factories
    budget: Budget
    trust: tuple[str, ...]
    config: dict  # the resolved configuration as a plain dictionary, for hashing and the record
    sweeping: bool
    backend_choice: dict | None = (
        None  # what ``check/select_backend.py`` has selected, and the errors of its candidates
    )
    # variant, data and bytes of the training before ``init_from.run``, as in rows
    pretrained: dict | None = None
    admission: str | None = None  # what ``admission`` of ``check/admission.py`` has returned

    def make_model(
        self, *, dropout_seed: int | None = None, classes: int | None = None
    ) -> LanguageModel:
        """Return the model, initialised by torch's default generator. ``dropout_seed`` is that of
        ``LayerContext``. With ``objective=classify`` it predicts ``classes``; without them, as the
        checks of a mechanism need it, it predicts bytes. ValueError for sizes or settings that a
        sublayer does not support."""
        pool: dict = {}
        shared = {name: getattr(self.model, name) for name in CONTEXT_KEYS} | {
            "n_layers": self.model.layers,
            "pool": pool,
            "backend": self.runtime.backend,
            "scheme": self.scheme,
            "dropout_seed": dropout_seed,
            "direction": self.objective.direction,
        }
        vocabulary = self.data.vocabulary
        inputs = vocabulary
        if not self.objective.predicts_next:
            inputs += 1  # the last id hides a byte
        is_classifier = self.objective.name == "classify" and classes is not None
        excluded = (*CONTEXT_KEYS, "layers", "default_bytes")
        model = LanguageModel(
            self.layers,
            lambda layer: LayerContext(layer=layer, **shared),
            vocabulary=classes if is_classifier else vocabulary,
            inputs=inputs,
            pooled=is_classifier,
            checkpoint=self.runtime.checkpoint,
            **{name: setting for name, setting in vars(self.model).items() if name not in excluded},
        )
        pool.clear()  # the pool is only for objects that layers share while the model is built
        if is_classifier and self.objective.encoder == "frozen":
            model.requires_grad_(False)
            model.head.requires_grad_(True)
        return model

    def make_optimizers(self, model: LanguageModel) -> Optimizers:
        """Return the optimizers of a model built by ``make_model``."""
        optim = self.optim
        # of a frozen encoder, their patterns match nothing that is trained
        groups = {} if self.objective.encoder == "frozen" else self.groups
        groups = assign(model, default=optim.default, matrices=optim.matrices, groups=groups)
        return Optimizers(groups, lr=optim.lr, schedule=optim.schedule, clip=optim.clip)

    def protocol(self) -> dict:
        """Return the evaluation protocol and the order of training bytes, by which
        ``record/comparison.py`` decides whether bits per byte are comparable."""
        protocol = {
            "streams": self.eval.streams,
            "segment": self.eval.segment,
            "span": self.model.span,
            "bytes": self.eval.bytes,
            "context": streamed_context(self.model.span, self.model.layers),
            "selection_bytes": self.eval.selection_bytes,
            "vocabulary": self.data.vocabulary,
            "drop_newlines": self.data.drop_newlines,
            "split": [*self.data.split],
        }
        if self.batch.order != "random":  # the order of rows without the key
            protocol["order"] = self.batch.order
        if self.data.sequence:  # read one by one, from an empty state
            protocol |= {"sequence": self.data.sequence, "context": 0}
        if not self.objective.predicts_next:  # the objective of rows without the key
            protocol |= {
                "context": 0,
                "segment": self.batch.segment,
                "objective": self.objective.name,
                "direction": self.objective.direction,
                "rate": self.objective.rate,
            }
        return protocol


def streamed_context(span: int, layers: int) -> int:
    """Return unscored bytes that each stream of an evaluation reads first: the receptive field,
    ``span`` times ``layers``, but at most ``MAX_CONTEXT``."""
    return min(span * layers, MAX_CONTEXT)


def plan_run(cfg: DictConfig, *, trusted: tuple[str, ...] = (), sweeping: bool = False) -> Plan:
    """Make a plan of a composed configuration. ValueError names the key, the value and what is
    allowed.

    Args:
        trusted: modules that targets may come from, in addition to the configuration's ``trust``.
        sweeping: whether this is a job of a sweep, which never reads a fallback corpus."""
    if "sweep" in cfg:  # only the files of W&B's sweeps have such a key
        raise ValueError(
            "sweep: this file is for W&B; run wandb sweep conf/sweep/wandb_grid.yaml, then wandb "
            "agent"
        )
    # run folders of older versions lack these keys
    cfg = OmegaConf.merge({"check": True, "objective": OLD_OBJECTIVE}, cfg)
    sections = OmegaConf.masked_copy(cfg, [name for name in cfg if name != "hydra"])
    names = [*RunSettings.__dataclass_fields__, *MADE]
    unresolved = OmegaConf.to_container(sections)
    check_keys(unresolved, names, key="")
    check_keys(unresolved["budget"], UNITS, key="budget")
    try:
        config = OmegaConf.to_container(sections, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key}=???: is required, but has no value") from error
    if sweeping:
        config["data"] = config["data"] | {"fallback": None}
    settings = parse_section(
        RunSettings, {name: config[name] for name in names if name not in MADE}, key=""
    )
    variant = parse_setting(config["variant"], dict, key="variant")
    trust = tuple(dict.fromkeys(_import_trusted(config["trust"]) + trusted))
    budget = parse_section(Budget, config["budget"], key="budget")
    if budget.unit is None:
        budget = Budget(bytes=settings.model.default_bytes)
    plan = Plan(
        **vars(settings),
        variant=parse_setting(variant.get("name"), str, key="variant.name"),
        layers=plan_layers(variant, n_layers=settings.model.layers, trust=trust),
        groups={
            name: _resolve_group(
                group, GROUP_KEYS, trust, key=f"variant.groups.{name}", required=("match",)
            )
            for name, group in variant_section(variant, "groups").items()
        },
        scheme=resolve(config["position"], key="position", base=Position, trust=trust),
        optim=_resolve_optim(config["optim"], trust, scales=variant_section(variant, "lr_scale")),
        budget=budget,
        trust=trust,
        config=config,
        sweeping=sweeping,
    )
    if plan.init_from.restore == "everything" and plan.init_from.run is None:
        raise ValueError(
            "init_from.run=null: must be the folder of a run, or init_from.restore=weights must "
            "be set"
        )
    if not re.fullmatch(r"\w[\w.-]*", plan.variant):
        raise ValueError(
            f"variant.name={plan.variant}: must be one word, because it begins the name of the "
            "run folder"
        )
    if plan.batch.accumulate > plan.batch.streams:
        raise ValueError(
            f"batch.accumulate={plan.batch.accumulate}: at most batch.streams={plan.batch.streams}"
        )
    if plan.batch.carry and plan.batch.order != "random":
        raise ValueError(
            f"batch.order={plan.batch.order}: allowed with batch.carry=true is random; its "
            "streams read each byte once in an epoch"
        )
    check_objective(plan)
    return plan


def replan(plan: Plan, **sections: dict) -> Plan:
    """Return the plan of the same configuration with some keys of some sections replaced."""
    config = plan.config | {name: plan.config[name] | changes for name, changes in sections.items()}
    return plan_run(literal(config), trusted=plan.trust)


def literal(config: dict) -> DictConfig:
    """Return a configuration of plain values, in whose texts ``${`` begins no reference."""

    def escape(node: object) -> object:
        if isinstance(node, dict):
            return {key: escape(child) for key, child in node.items()}
        if isinstance(node, list):
            return [escape(child) for child in node]
        if isinstance(node, str):
            return re.sub(r"(\\*)\$\{", r"\1\1\\${", node)
        return node

    return OmegaConf.create(escape(config))


def _import_trusted(names: object) -> tuple[str, ...]:
    """Import the modules of ``trust``, which may lie in the working directory; returns their
    names."""
    names = [names] if isinstance(names, str) else names or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"trust={names}: must be a list of modules, e.g. trust=[my_file]")
    # The working directory is searched last, and only with trust, because others may have put files
    # into it.
    if names and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    for name in names:
        try:
            with refuse_exit(f"trust={name}"):
                importlib.import_module(name)
        except ImportError as error:
            remedy = (
                "install the package or, for a file, run the command in its folder or set "
                "PYTHONPATH"
            )
            raise ValueError(f"trust={name}: cannot be imported ({error}); {remedy}") from error
    return tuple(names)


def _resolve_optim(node: object, trust: tuple[str, ...], *, scales: dict) -> OptimSettings:
    """Return the settings of ``optim``, with optimizers as partials. ``lr`` is multiplied by the
    factor that ``scales``, the variant's ``lr_scale``, has for ``optim.name``, or 1."""
    settings = parse_section(OptimSettings, node, key="optim")
    for name, factor in scales.items():
        parse_setting(factor, PositiveFloat, key=f"variant.lr_scale.{name}")
    matrices = settings.matrices
    if matrices:
        matrices = _resolve_group(matrices, ("lr_scale", "optimizer"), trust, key="optim.matrices")
    return replace(
        settings,
        lr=settings.lr * scales.get(settings.name, 1.0),
        default=resolve(settings.default, key="optim.default", base=Optimizer, trust=trust),
        matrices=matrices,
    )


def _resolve_group(
    node: object, keys: tuple[str, ...], trust: tuple[str, ...], *, key: str, required=None
) -> dict:
    """Return the validated keys of a parameter group, of which ``keys`` are allowed, with its
    optimizer, if it has one, as a partial."""
    check_keys(node, keys, key=key, required=required)
    settings = {}
    for name, setting in node.items():
        if name != "optimizer":
            settings[name] = parse_setting(setting, GROUP_HINTS[name], key=f"{key}.{name}")
    if node.get("optimizer"):
        settings["optimizer"] = resolve(
            node["optimizer"], key=f"{key}.optimizer", base=Optimizer, trust=trust
        )
    return settings


def is_sweep() -> bool:
    """Return whether Hydra runs the jobs of a sweep."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def job_number() -> int:
    """Return the number of this job of a sweep, counted from 0."""
    return HydraConfig.get().job.num


def typed_keys() -> set[str]:
    """Return the keys that the command line of Hydra sets."""
    overrides = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return {override.lstrip("+").partition("=")[0] for override in overrides}
