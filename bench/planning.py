"""Makes plans from a command's configuration, with the checks of a training run.

A command that trains or measures adds its own keys to the configuration of a training run, so it
computes what ``train.py`` would with the same overrides."""

import re
import shlex
import sys

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from harness import source
from harness.compose.cli import task_words
from harness.compose.untrusted_config import COMMAND_LINE_ONLY
from harness.data.sources import PINNED
from harness.plan.build import literal
from harness.record import folder


def pop_keys(cfg: DictConfig, *names: str) -> dict:
    """Remove a command's own keys, which a training run lacks, from its configuration; return
    them as a plain dict."""
    OmegaConf.resolve(cfg)  # before the removal, because other keys may refer to the removed ones
    config = OmegaConf.to_container(cfg)
    cfg.merge_with(literal(config))  # they are resolved again with the plan
    with open_dict(cfg):
        for name in names:
            del cfg[name]
    return {name: config[name] for name in names}


def recompose(
    command: str, *overrides: str, pop: tuple[str, ...] = (), drop: tuple[str, ...] = ()
) -> DictConfig:
    """Compose a command's configuration again: with the typed overrides, except those of the keys
    ``drop``, followed by ``overrides``. Remove the command's own keys ``pop``."""
    hydra = HydraConfig.get()
    for word in overrides:
        # because an override may come from a file
        if re.search(COMMAND_LINE_ONLY, word.partition("=")[0]):
            raise ValueError(
                f"words of {command}: {word}: hydra.* and trust may be set on the command line only"
            )
    search_path = [word for word in hydra.overrides.hydra if word.startswith("hydra.searchpath=")]
    words = [
        word
        for word in task_words(hydra)
        if re.split(r"[=.]", word.lstrip("+~"), maxsplit=1)[0] not in drop
    ]
    cfg = compose(command, overrides=[*search_path, *words, *overrides])
    if pop:
        pop_keys(cfg, *pop)
    return cfg


def typed_command(command: str) -> str:
    """Return the command line as typed, for provenance."""
    return shlex.join(["python", "-m", f"bench.{command}", *sys.argv[1:]])


def row_digests(config: dict, *, trust: tuple[str, ...]) -> dict[str, str]:
    """Return the digests by which a row names its configuration and the source that measured it."""
    code = source.digest(config, trust=trust, measuring=True)
    return {"config_hash": folder.config_hash(config, pinned=PINNED), "source": code}
