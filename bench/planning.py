"""Plans from a verb's configuration or a run folder, checked as for a training run. ``conf/bench.yaml`` has the groups
of a training run, a verb's file adds keys: a verb measures what ``train.py`` would run with the same words."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf, open_dict

from bench import CONF
from harness import source
from harness.compose.cli import MISTAKES, explain
from harness.compose.untrusted_config import COMMAND_LINE_ONLY, read_config
from harness.data import corpora
from harness.data.corpora import Corpus
from harness.data.sources import PINNED
from harness.device import runtime
from harness.device.runtime import Runtime
from harness.loop import summary
from harness.loop.select_backend import with_backend
from harness.loop.trainer import load_weights
from harness.model import LanguageModel
from harness.plan.build import Plan, plan_run
from harness.record import checkpoint, folder
from harness.record.folder import identity_of, read_provenance
from harness.record.rows import CONFIG, RECORD


def own_keys(cfg: DictConfig, *names: str) -> dict:
    """Take a verb's own keys out of its configuration, and return their plain values; the rest is a training run's."""
    OmegaConf.resolve(cfg)  # other keys may name these
    values = OmegaConf.to_container(cfg)
    with open_dict(cfg):
        for name in names:
            del cfg[name]
    return {name: values[name] for name in names}


def recompose(verb: str, *overrides: str, verb_keys: tuple[str, ...], leave: tuple[str, ...] = ()) -> DictConfig:
    """The training run's configuration from the words typed for ``verb``, without keys in ``leave``, then
    ``overrides``. It works only inside a Hydra command."""
    cfg = compose_typed(verb, *overrides, leave=leave)
    own_keys(cfg, *verb_keys)
    return cfg


def compose_typed(verb: str, *overrides: str, leave: tuple[str, ...] = ()) -> DictConfig:
    """The same, but unresolved and with the verb's own keys."""
    from hydra import compose
    from hydra.core.hydra_config import HydraConfig

    typed = HydraConfig.get().overrides
    for word in overrides:
        if re.search(COMMAND_LINE_ONLY, word.partition("=")[0]):  # it may come from a file
            raise ValueError(f"words of {verb}: {word}: hydra.* and trust may be set on the command line only")
    search = [word for word in typed.hydra if word.startswith("hydra.searchpath=")]
    words = [word for word in typed.task if re.split(r"[=.]", word.lstrip("+~"), maxsplit=1)[0] not in leave]
    return compose(verb, overrides=[*search, *words, *overrides])


def typed_command(verb: str) -> str:
    """The command as typed, for provenance."""
    return shlex.join(["python", "-m", f"bench.{verb}", *sys.argv[1:]])


def provenance(plan: Plan, *, kind: str, corpus: Corpus, runtime: Runtime, command: str) -> dict:
    """The fields of a row about plan, code, data and machine."""
    digests = {"config_hash": folder.config_hash(plan.config, pinned=PINNED)}
    digests["source"] = source.digest(plan.config, trust=plan.trust, measuring=True)
    config = json.loads(json.dumps(plan.config))  # layer numbers are keys, which JSON needs as text
    facts = {"corpus": corpus, "runtime": runtime, "command": command, "measuring": True}
    return {"kind": kind, "config": config, **summary.provenance(plan, **facts, **digests)}


def read_run(path: Path, *, key: str) -> tuple[dict, dict]:
    """A run folder's provenance and best weights; ValueError naming ``key`` where one is missing."""
    best = path / checkpoint.FOLDER / checkpoint.BEST
    if not best.exists() or not (path / RECORD).exists():
        raise ValueError(f"{key}={path}: must be a run folder with {checkpoint.FOLDER}/{checkpoint.BEST} and {RECORD}")
    saved = read_provenance(path, key=key)
    return saved, checkpoint.load_best(path, identity_of(saved))


def plan_of_run(path: Path, *, key: str, runtime: DictConfig, trust: list | str) -> Plan:
    """The plan of any run, to be computed as ``runtime`` says; ValueError naming folder, file and key. The untrusted
    folder's configuration may have plain values only, and name only classes of ours and of this command's ``trust``."""
    what = f"{key}={path}"
    config = read_config(path / CONFIG, what=what)
    try:
        config.update({"runtime": runtime, "trust": trust, "record": OmegaConf.load(f"{CONF}/record/default.yaml")})
        return plan_run(config)
    except MISTAKES as error:
        raise ValueError(f"{what}: {CONFIG}: {explain(error)}") from error


class Trained(NamedTuple):
    """An opened run: its plan, its provenance, the content of its best checkpoint, and the key that named it."""

    plan: Plan
    saved: dict
    best: dict
    key: str

    def model(self, *, span: int | None = None) -> LanguageModel:
        """The plan's model and weights on the CPU; a query sees ``span`` bytes, or the run's. ValueError on misfit."""
        model = self.plan.make_model()
        load_weights(model, self.best["model"], source=self.key)
        if span is not None and span != self.plan.model.span:
            for _, sublayer in model.sublayers():
                sublayer.set_span(span)
        return model

    def on_device(self, *, span: int | None = None) -> tuple[LanguageModel, Runtime]:
        """The same on the plan's device, with the backend that is chosen there."""
        device = runtime.start(self.plan.runtime)
        model = self._replace(plan=with_backend(self.plan, device)).model(span=span)
        return model.to(device.device), device

    def corpus(self) -> Corpus:
        """The run's corpus; ValueError where it is not what the run read."""
        corpus = corpora.load(**self.plan.data)
        if corpus.sha256 != self.saved["data"]["sha256"]:
            raise ValueError(f"data: the run read {self.saved['data']['sha256']}, now it is {corpus.sha256}")
        return corpus

    def symbols(self) -> bytes:
        """The byte of each number of the vocabulary; for fewer than 256 numbers this reads the corpus."""
        return bytes(range(256)) if self.plan.data["vocabulary"] == 256 else self.corpus().symbols


def open_trained(path: Path, *, key: str, runtime: DictConfig | None = None, trust: list | str) -> Trained:
    """Open a run folder, which is not trusted; ValueError naming ``key``, the folder and what is wrong. Without
    ``runtime``, it is that of ``conf``, in float32 on the CPU."""
    if runtime is None:
        plain = {"device": "cpu", "precision": "float32", "compile": False}
        runtime = OmegaConf.merge(OmegaConf.load(f"{CONF}/runtime/default.yaml"), plain)
    saved, best = read_run(path, key=key)
    return Trained(plan_of_run(path, key=key, runtime=runtime, trust=trust), saved, best, key)
