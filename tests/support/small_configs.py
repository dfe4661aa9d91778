"""Configurations composed from ``conf/`` as on the command line, overrides for small models, and
their plans."""

import copy
from functools import cache
from pathlib import Path
from unittest.mock import patch

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

from harness.data import corpora
from harness.device.torch_settings import configure_torch
from harness.loop.trainer import Trainer
from harness.plan.build import Plan, plan_run
from harness.record.row import Train

CONF = Path(__file__).resolve().parents[2] / "conf"
GROUPS = {path.relative_to(CONF).as_posix() for path in CONF.rglob("*") if path.is_dir()}
VARIANT_NAMES = sorted(path.stem for path in (CONF / "variant").glob("*.yaml"))
CPU = ("runtime.device=cpu", "runtime.threads=1")
TINY = (
    *("model.d_model=32", "model.layers=2", "model.heads=2", "model.span=16"),
    *("batch.streams=2", "batch.segment=16", "runtime.precision=float32", *CPU),
)


def compose_config(*overrides: str, name: str = "train") -> DictConfig:
    """Return the configuration of a command. Hydra composes each selection of files once; other
    overrides change a copy."""
    parsed = {word: _parsed(word) for word in overrides}
    files = tuple(word for word, override in parsed.items() if _chooses_a_file(override))
    if len(parsed) < len(overrides):  # ``parsed`` has lost the place of a repeated word
        return copy.deepcopy(_composed(name, overrides))
    cfg = copy.deepcopy(_composed(name, files))
    ConfigLoaderImpl._apply_overrides_to_config(
        [parsed[word] for word in overrides if word not in files], cfg
    )
    return cfg


@cache
def _composed(name: str, overrides: tuple[str, ...]) -> DictConfig:
    with (
        initialize_config_dir(str(CONF), version_base="1.3"),
        patch.object(ConfigRepository, "load_config", _load),
    ):
        return compose(name, overrides=list(overrides))


CACHED_FILES: dict[str, ConfigResult | None] = {}
LOAD_CONFIG = ConfigRepository.load_config


def _load(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
    """Return a copy of a configuration file that is read once, because reading takes half of the
    time of a composition."""
    if config_path not in CACHED_FILES:
        CACHED_FILES[config_path] = LOAD_CONFIG(repository, config_path)
    if file := copy.copy(CACHED_FILES[config_path]):
        file.config = copy.deepcopy(file.config)
    return file


@cache
def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_overrides([word])[0]


def _chooses_a_file(override: Override) -> bool:
    """Return whether the override selects a file, so that Hydra needs it before it reads files."""
    group = override.key_or_group
    return (
        group in GROUPS
        or group.startswith("hydra")
        or override.package is not None
        or override.is_sweep_override()
    )


def jobs(words: list[str]) -> list[list[str]]:
    """Return the words of each job of a sweep with these words."""
    return [
        list(job)
        for job in BasicSweeper.split_arguments(
            OverridesParser.create().parse_overrides(words), None
        )[0]
    ]


def variant_file(variant: str) -> dict:
    node = yaml.safe_load((CONF / "variant" / f"{variant}.yaml").read_text())
    return node.get("variant", node)


def small(variant: str) -> list[str]:
    """Return the overrides that shrink a variant's sublayers to the sizes under ``small`` in its
    file, which fit ``TINY``."""
    node = (variant_file(variant).get("small") or {}).items()
    return [
        f"variant.{name}.{key}={'null' if value is None else value}"
        for name, keywords in node
        if name != "model"
        for key, value in keywords.items()
    ]


def sized(variant: str) -> list[str]:
    """Return ``variant=..``, ``small(variant)``, and the sizes of the model under ``small`` in the
    variant's file."""
    sizes = (variant_file(variant).get("small") or {}).get("model") or {}
    return [
        f"variant={variant}",
        *small(variant),
        *(f"model.{key}={value}" for key, value in sizes.items()),
    ]


def plan(*overrides: str) -> Plan:
    """Return the plan of ``python train.py`` with these overrides."""
    return plan_run(compose_config(*overrides))


def one_step(plan: Plan) -> Train:
    """Take one training step on a generated corpus and return its row of the record."""
    trainer = Trainer(plan, corpora.load("recall", bytes=20_000), configure_torch(plan.runtime))
    trainer.step()
    return trainer.train_row()
