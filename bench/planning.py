"""Plans from a verb's configuration, or from a run folder: checked exactly as a training run is.

``conf/bench.yaml`` has the groups of a training run; a verb's file adds keys of its own. What is measured is therefore
what ``train.py`` would run with the same words.
"""

import json
import shlex
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from harness import source
from harness.data import corpora
from harness.data.corpora import Corpus
from harness.device.runtime import Runtime
from harness.loop import summary
from harness.loop.prepare import planned
from harness.loop.train_state import load_weights
from harness.model import LanguageModel
from harness.plan.build import Plan, hydra_facts, plan_run
from harness.record import checkpoint, folder
from harness.record.rows import RECORD, check_format, identity_of, read_rows


def own_keys(cfg: DictConfig, *names: str) -> dict:
    """Take a verb's own keys out of its configuration: their plain values; the rest is a training run's."""
    OmegaConf.resolve(cfg)  # what is left may name what is taken out
    values = OmegaConf.to_container(cfg)
    with open_dict(cfg):
        for name in names:
            del cfg[name]
    return {name: values[name] for name in names}


def recompose(verb: str, *overrides: str, own: tuple[str, ...]) -> DictConfig:
    """The training part of what the user typed with ``overrides`` after it; inside a command of Hydra's only."""
    from hydra import compose
    from hydra.core.hydra_config import HydraConfig

    typed = HydraConfig.get().overrides
    search = [word for word in typed.hydra if word.startswith("hydra.searchpath=")]  # compose() knows its words only
    cfg = compose(verb, overrides=[*search, *typed.task, *overrides])
    own_keys(cfg, *own)
    return cfg


def bench_plan(cfg: DictConfig) -> Plan:
    """The plan of a training configuration, checked whole, with what ``auto`` means here; ValueError names key, value and
    what is allowed."""
    return planned(cfg, **hydra_facts())


def varied(plan: Plan, **sections: dict) -> Plan:
    """The plan of the same configuration with other keys in some sections."""
    config = plan.config | {name: plan.config[name] | changes for name, changes in sections.items()}
    return plan_run(OmegaConf.create(config), trusted=plan.trust)


def typed_command(verb: str) -> str:
    """What was typed, for provenance."""
    return shlex.join(["python", "-m", f"bench.{verb}", *sys.argv[1:]])


def provenance(plan: Plan, *, kind: str, corpus: Corpus, runtime: Runtime, command: str) -> dict:
    """The part of a row that says what was measured, by which code and on what."""
    known = {"config_hash": folder.config_hash(plan.config), "source": source.digest(plan.trust, measuring=True)}
    config = json.loads(json.dumps(plan.config))  # the numbers of layers are keys: as text, for JSON
    own = summary.provenance(plan, corpus=corpus, runtime=runtime, command=command, **known)
    return {"kind": kind, "config": config, **own}


def read_run(path: Path, *, key: str) -> tuple[dict, dict]:
    """A run folder's provenance and best weights; ValueError naming ``key`` if it has not both."""
    best = path / checkpoint.FOLDER / checkpoint.BEST
    if not best.exists() or not (path / RECORD).exists():
        raise ValueError(f"{key}={path}: must be a run folder with {checkpoint.FOLDER}/{checkpoint.BEST} and {RECORD}")
    saved = read_rows(path / RECORD)[0]
    check_format(saved, what=f"{key}={path}")
    return saved, checkpoint.load_best(path, identity_of(saved))


def config_of_run(path: Path, *, runtime: DictConfig, trust: list | None) -> DictConfig:
    """The run's resolved configuration, to be computed as ``runtime`` says; ``trust`` None is the run's own."""
    own = OmegaConf.load(path / "config.yaml")
    own.runtime = runtime
    own.trust = own.trust if trust is None else trust
    return own


def corpus_of_run(plan: Plan, saved: dict) -> Corpus:
    """The run's corpus; ValueError where it is not what the run read."""
    corpus = corpora.load(**plan.data)
    if corpus.sha256 != saved["data"]["sha256"]:
        raise ValueError(f"data: the run read {saved['data']['sha256']}, now it is {corpus.sha256}")
    return corpus


def trained_model(plan: Plan, best: dict, *, span: int, key: str) -> LanguageModel:
    """The plan's model with the weights; a query may see ``span`` bytes. ValueError where they do not fit the code."""
    model = plan.make_model()
    load_weights(model, best["model"], what=key)
    if span != plan.model.span:
        for _, sublayer in model.sublayers():
            sublayer.set_span(span)
    return model
