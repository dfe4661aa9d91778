"""Configuration from outside the project. Files of a user's folder (``-cd``) must not set
``hydra.*`` or ``trust``, which decide which code may run. The ``config.yaml`` of a run folder
may come from anybody; only plain values pass."""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from hydra._internal.core_plugins import file_config_source
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from harness.record.rows import open_regular

CONF = Path(__file__).resolve().parents[2] / "conf"
MAX_BYTES = 2**18
MAX_DEPTH = 40
COMMAND_LINE_ONLY = r"\b(hydra|trust)\b"
# The keys of Hydra that a user's file may set, because a sweep needs them.
SWEEP_KEY = rf"hydra\.mode|hydra\.sweeper\.params\.(?!.*{COMMAND_LINE_ONLY}).+"
# An entry of ``defaults`` is a group and a choice, as in ``override /optim@package=muon``.
NAME = r"[\w-][\w.-]*(/[\w-][\w.-]*)*"
PACKAGE = rf"(@(?![\w.:-]*{COMMAND_LINE_ONLY})[\w.:-]+)?"
GROUP = rf"((optional|override)\s+)*/?(?!{COMMAND_LINE_ONLY}){NAME}{PACKAGE}"
DEFAULTS_ENTRY = rf"{GROUP}(=({NAME}|\$\{{[\w./@-]+\}}|\?\?\?|None))?"


class FileConfigSource(file_config_source.FileConfigSource):
    """Replaces Hydra's source of YAML files. It has the same class name, because Hydra refuses
    another for ``file``. ValueError if a user's file sets ``hydra.*`` or ``trust``, or has the
    name of a file of the project."""

    def load_config(self, config_path: str) -> ConfigResult:
        loaded = super().load_config(config_path)
        name = self._normalize_file_name(config_path)
        file = Path(self.path, name).resolve()
        if not file.is_relative_to(CONF):
            check_user_file(loaded, name=name, file=file)
        # Hydra would silently ignore a user's file of the same name
        elif GlobalHydra.instance().is_initialized():
            for folder in GlobalHydra.instance().config_loader().get_search_path().get_path():
                user_file = Path(str(folder.path).removeprefix("file://"), name)
                if (
                    folder.provider == "command-line"
                    and user_file.exists()
                    and user_file.resolve() != file
                ):
                    raise ValueError(
                        f"{user_file}: has the name of a file of the project; rename it"
                    )
        return loaded


def check_user_file(loaded: ConfigResult, *, name: str, file: Path) -> None:
    """Raise ValueError if the file's group, its package or a key sets ``hydra.*`` or ``trust``, or
    if it gives the name of a shipped variant to another."""
    group = name.rpartition("/")[0]
    packages = (group, loaded.header["package"] or "")
    violations = [package for package in packages if re.search(COMMAND_LINE_ONLY, package)]
    for key, leaf in _leaves(OmegaConf.to_container(loaded.config, resolve=False)):
        is_name = key == "variant.name" or (key == "name" and group == "variant")
        if is_name and Path(CONF, "variant", f"{leaf}.yaml").exists():
            raise ValueError(
                f"{file}: {key}={leaf}: is the name of a shipped variant; allowed are other names"
            )
        entry = re.fullmatch(r"defaults\.\d+\.?(.*)", key)
        if entry:  # a mapping {group: choice}, or a string
            is_allowed = re.fullmatch(
                DEFAULTS_ENTRY, "=".join(part for part in (entry[1], str(leaf)) if part)
            )
        else:
            is_allowed = re.fullmatch(rf"(?!{COMMAND_LINE_ONLY}).*|{SWEEP_KEY}", key)
        if not is_allowed:
            violations.append(f"{key}={leaf}")
    if violations:
        raise ValueError(
            f"{file}: {violations[0]}: hydra.* and trust may be set on the command line only"
        )


def _leaves(node: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the content of each entry, at any depth, that is neither a section
    nor a list."""
    if not isinstance(node, dict | list):
        yield key, node
        return
    for name, child in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _leaves(child, f"{key}.{name}".lstrip("."))


def read_config(path: Path, *, label: str) -> dict:
    """Return the sections of a run's ``config.yaml``, which must have plain values and stay within
    limits of size and depth. They are read by the rules by which PyYAML writes them: OmegaConf
    takes the text ``1e5`` for a number. ``label`` begins the message of a ValueError."""
    try:
        with open_regular(path, max_bytes=MAX_BYTES) as file:
            text = file.read().decode("utf-8")
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                event, yaml.CollectionEndEvent
            )
            if depth > MAX_DEPTH or isinstance(event, yaml.AliasEvent):
                raise ValueError(
                    f"must have plain values without aliases, in at most {MAX_DEPTH} levels"
                )
        config = yaml.safe_load(text)
        if not isinstance(config, dict):
            raise ValueError("must have sections, such as variant and model")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{label}: {path.name}: {' '.join(str(error).split())}") from error
    return config
