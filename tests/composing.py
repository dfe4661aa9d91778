"""Configurations for tests: composed from ``conf/`` as the command line does, and small enough for a step in no time."""

from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from harness.data import corpora
from harness.data.corpora import Corpus
from harness.device import runtime
from harness.loop.trainer import Trainer
from harness.plan.build import Plan, plan_run

CONF = Path(__file__).resolve().parents[1] / "conf"

TINY = (
    *("model.d_model=32", "model.layers=2", "model.heads=2", "model.span=16"),
    *("batch.streams=2", "batch.segment=16", "runtime.precision=float32", "runtime.device=cpu", "runtime.threads=1"),
)


def compose_config(*overrides: str, name: str = "train") -> DictConfig:
    """What ``python train.py`` would be given."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def small(variant: str, *, slot: str | None = None) -> list[str]:
    """Words with which a variant, or its sublayer in a ``slot``, fits ``TINY``: the keywords that its file has for that."""
    node = yaml.safe_load((CONF / "variant" / f"{variant}.yaml").read_text(encoding="utf-8"))
    node = (node.get("variant", node).get("small") or {}).items()
    return [
        f"variant.{slot or name}.{key}={'null' if value is None else value}"
        for name, own in node
        if name != "model"
        for key, value in own.items()
    ]


def plan(*overrides: str) -> Plan:
    return plan_run(compose_config(*overrides))


def recall() -> Corpus:
    """A corpus that is made, not read."""
    return corpora.load("recall", bytes=20_000)


def one_step(plan: Plan, corpus: Corpus) -> dict:
    """Build the run and take a training step on ``corpus``, whatever the plan's data are: a row of the record."""
    run = Trainer(plan, corpus, runtime.start(plan.runtime))
    run.step()
    return run.train_row()
