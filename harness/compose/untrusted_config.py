"""Configuration from outside: a user's folder (``-cd``), where setting ``hydra.*`` or ``trust`` is an error, so that no
file decides what may run; and the ``config.yaml`` of anybody's run folder."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from hydra._internal.core_plugins import file_config_source
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from harness.record.rows import read_file

CONF = Path(__file__).resolve().parents[2] / "conf"
MAX_BYTES, MAX_DEPTH = 1 << 18, 40
COMMAND_LINE_ONLY = r"\b(hydra|trust)\b"
SWEEP = rf"hydra\.mode|hydra\.sweeper\.params\.(?!.*{COMMAND_LINE_ONLY}).+"
# SWEEP: the keys of Hydra that a user's file may set. ENTRY of ``defaults``: ``override /optim@package=muon``.
PARTS = r"[\w-][\w.-]*(/[\w-][\w.-]*)*"
PLACE = rf"((optional|override)\s+)*/?(?!{COMMAND_LINE_ONLY}){PARTS}(@(?![\w.:-]*{COMMAND_LINE_ONLY})[\w.:-]+)?"
ENTRY = rf"{PLACE}(=({PARTS}|\$\{{[\w./@-]+\}}|\?\?\?|None))?"


class FileConfigSource(file_config_source.FileConfigSource):
    """Replacement of Hydra's source of YAML files, with its class name, by which launchers register it. ValueError for
    a user's file that sets ``hydra.*`` or ``trust``, or has the name of one of ours."""

    def load_config(self, config_path: str) -> ConfigResult:
        loaded, name = super().load_config(config_path), self._normalize_file_name(config_path)
        file = Path(self.path, name).resolve()
        if not file.is_relative_to(CONF):
            check_user_file(loaded, name=name, file=file)
        elif GlobalHydra.instance().is_initialized():  # ours come first in Hydra's order
            for folder in GlobalHydra.instance().config_loader().get_search_path().get_path():
                hidden = Path(str(folder.path).removeprefix("file://"), name)
                if folder.provider == "command-line" and hidden.exists() and hidden.resolve() != file:
                    raise ValueError(f"{hidden}: is not read, because ours of this name comes first; rename it")
        return loaded


def check_user_file(loaded: ConfigResult, *, name: str, file: Path) -> None:
    """ValueError if the file's group, package or a key sets ``hydra.*`` or ``trust``."""
    wrong = [
        place
        for place in (name.rpartition("/")[0], loaded.header["package"] or "")
        if re.search(COMMAND_LINE_ONLY, place)
    ]
    for key, value in _leaves(OmegaConf.to_container(loaded.config, resolve=False)):
        entry = re.fullmatch(r"defaults\.\d+\.?(.*)", key)  # a mapping {group: choice}, or plain text
        word = "=".join(filter(None, (entry[1], str(value)))) if entry else key
        if not re.fullmatch(ENTRY if entry else rf"(?!{COMMAND_LINE_ONLY}).*|{SWEEP}", word):
            wrong.append(f"{key}={value}")
    if wrong:
        raise ValueError(f"{file}: {wrong[0]}: hydra.* and trust may be set on the command line only")


def _leaves(node: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Values that are neither lists nor sections, with their dotted keys."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    yield from () if isinstance(node, dict | list) else ((key, node),)
    for name, value in inner:
        yield from _leaves(value, f"{key}.{name}".lstrip("."))


def read_config(path: Path, *, what: str) -> DictConfig:
    """The sections of a run's ``config.yaml``: plain values, within limits; ValueError that begins with ``what``."""
    try:
        text, depth = read_file(path, max_bytes=MAX_BYTES).decode("utf-8"), 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH or isinstance(event, yaml.AliasEvent) or "${" in getattr(event, "value", ""):
                raise ValueError(f"must have plain values only: no ${{..}}, no alias, at most {MAX_DEPTH} levels")
        config = OmegaConf.load(io.StringIO(text))
        if not isinstance(config, DictConfig):
            raise ValueError("must have sections, such as variant and model")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{what}: {path.name}: {' '.join(str(error).split())}") from error
    return config
