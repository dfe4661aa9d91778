"""Makes plans from a command's configuration or from a run folder, with the checks of a training run.

A command that trains or measures adds its own keys to the configuration of a training run, so it computes what
``train.py`` would with the same overrides."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from bench import CONF
from harness import source
from harness.compose.cli import MISTAKES, explain, task_words
from harness.compose.untrusted_config import COMMAND_LINE_ONLY, read_config
from harness.data import corpora
from harness.data.corpora import Corpus
from harness.data.sources import PINNED
from harness.device import runtime
from harness.device.runtime import Runtime
from harness.loop import summary
from harness.loop.select_backend import with_backend
from harness.loop.state import load_weights
from harness.model import LanguageModel
from harness.plan.build import Plan, literal, plan_run
from harness.record import checkpoint, folder
from harness.record.folder import identity_of, read_provenance
from harness.record.rows import CONFIG, RECORD

OLD_KEYS = ("trial", "space")
"""Keys of the configurations of older run folders. They said which point of a search the others came from."""


def pop_keys(cfg: DictConfig, *names: str) -> dict:
    """Remove a command's own keys, which a training run lacks, from its configuration; return them as a plain dict."""
    OmegaConf.resolve(cfg)  # before the removal, because other keys may refer to the removed ones
    config = OmegaConf.to_container(cfg)
    cfg.merge_with(literal(config))  # they are resolved again with the plan
    with open_dict(cfg):
        for name in names:
            del cfg[name]
    return {name: config[name] for name in names}


def recompose(command: str, *overrides: str, pop: tuple[str, ...], drop: tuple[str, ...] = ()) -> DictConfig:
    """Compose a command's configuration again, and remove the command's own keys ``pop``. It is composed with the typed
    overrides, except those of the keys ``drop``, followed by ``overrides``."""
    cfg = compose_typed(command, *overrides, drop=drop)
    pop_keys(cfg, *pop)
    return cfg


def compose_typed(command: str, *overrides: str, drop: tuple[str, ...] = ()) -> DictConfig:
    """The configuration of ``recompose`` before its values are resolved and the command's keys are removed."""
    hydra = HydraConfig.get()
    for word in overrides:
        if re.search(COMMAND_LINE_ONLY, word.partition("=")[0]):  # because an override may come from a file
            raise ValueError(f"words of {command}: {word}: hydra.* and trust may be set on the command line only")
    search_path = [word for word in hydra.overrides.hydra if word.startswith("hydra.searchpath=")]
    words = [word for word in task_words(hydra) if re.split(r"[=.]", word.lstrip("+~"), maxsplit=1)[0] not in drop]
    return compose(command, overrides=[*search_path, *words, *overrides])


def typed_command(command: str) -> str:
    """The command line as typed, for provenance."""
    return shlex.join(["python", "-m", f"bench.{command}", *sys.argv[1:]])


def provenance(plan: Plan, *, kind: str, corpus: Corpus, runtime: Runtime, command: str) -> dict:
    """The keys and values of a row that describe plan, code, data and machine."""
    digests = row_digests(plan.config, trust=plan.trust)
    config = json.loads(json.dumps(plan.config))  # JSON turns integer keys, such as layer indices, into text
    facts = {"corpus": corpus, "runtime": runtime, "command": command, "measuring": True}
    return {"kind": kind, "config": config, **vars(summary.origin(plan, **facts, **digests))}


def row_digests(config: dict, *, trust: tuple[str, ...]) -> dict[str, str]:
    """The digests by which a row names its configuration and the source that measured it."""
    code = source.digest(config, trust=trust, measuring=True)
    return {"config_hash": folder.config_hash(config, pinned=PINNED), "source": code}


def read_run(path: Path, *, key: str) -> tuple[dict, dict]:
    """A run folder's provenance and its best checkpoint; ValueError naming ``key`` if either is missing."""
    best = path / checkpoint.FOLDER / checkpoint.BEST
    if not best.exists() or not (path / RECORD).exists():
        raise ValueError(f"{key}={path}: must be a run folder with {checkpoint.FOLDER}/{checkpoint.BEST} and {RECORD}")
    provenance = read_provenance(path, key=key)
    return provenance, checkpoint.load_best(path, identity_of(provenance))


def plan_of_run(path: Path, *, key: str, runtime: DictConfig, trust: list | str) -> Plan:
    """The plan of a run folder, with ``runtime`` as its section of that name; ValueError naming folder, file and key.
    The folder is untrusted: its configuration may have plain values only, and classes only of ours and of ``trust``."""
    origin = f"{key}={path}"
    config = read_config(path / CONFIG, label=origin)
    for name in OLD_KEYS:
        config.pop(name, None)
    try:
        config = literal(config)
        config.update({"runtime": runtime, "trust": trust, "record": OmegaConf.load(f"{CONF}/record/default.yaml")})
        return plan_run(config)
    except MISTAKES as error:
        raise ValueError(f"{origin}: {CONFIG}: {explain(error)}") from error


class TrainedRun(NamedTuple):
    """An opened run folder: its plan, the first row of its record (``provenance``), the content of its best checkpoint,
    and the configuration key that named the folder."""

    plan: Plan
    provenance: dict
    best: dict
    key: str

    def model(self, *, span: int | None = None) -> LanguageModel:
        """The model with the best weights, on the CPU, at ``span`` or the run's; ValueError if weights do not fit."""
        model = self.plan.make_model()
        load_weights(model, self.best["model"], source=self.key)
        if span is not None and span != self.plan.model.span:
            for _, sublayer in model.sublayers():
                sublayer.set_span(span)
        return model

    def on_device(self, *, span: int | None = None) -> tuple[LanguageModel, Runtime]:
        """The model on the plan's device, with the backend selected there, and the device's runtime."""
        device_runtime = runtime.start(self.plan.runtime)
        model = self._replace(plan=with_backend(self.plan, device_runtime)).model(span=span)
        return model.to(device_runtime.device), device_runtime

    def corpus(self) -> Corpus:
        """The run's corpus; ValueError if it differs from the one that the run read."""
        corpus = corpora.load(**self.plan.data)
        expected = self.provenance["data"]["sha256"]
        if corpus.sha256 != expected:
            raise ValueError(f"data: its SHA-256 must be {expected}, as when the run read it; it is {corpus.sha256}")
        return corpus

    def symbols(self) -> bytes:
        """The byte of each token id. A vocabulary of fewer than 256 ids is read from the corpus."""
        return bytes(range(256)) if self.plan.data["vocabulary"] == 256 else self.corpus().symbols


def open_trained(path: Path, *, key: str, runtime: DictConfig | None = None, trust: list | str) -> TrainedRun:
    """Open a run folder, which is untrusted. ``runtime`` is by default ``conf/runtime/default.yaml`` in float32 on the
    CPU. ValueError naming ``key``, the folder and the mistake."""
    if runtime is None:
        defaults = OmegaConf.load(f"{CONF}/runtime/default.yaml")
        runtime = OmegaConf.merge(defaults, {"device": "cpu", "precision": "float32", "compile": False})
    provenance, best = read_run(path, key=key)
    return TrainedRun(plan_of_run(path, key=key, runtime=runtime, trust=trust), provenance, best, key)
