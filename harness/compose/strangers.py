"""Strangers' YAML: files of a configuration folder (``-cd``), and the ``config.yaml`` of a run folder.

Such a file chooses values. What makes Hydra call or import something, open a file or set a variable, it may not say at all,
and neither whom to trust: that counts from the command line alone. Ours, and those of a package that the command line names
(``hydra.searchpath=[pkg://..]``), are no strangers'.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.record.rows import read_file

OURS = Path(__file__).resolve().parents[2] / "conf"
TYPED = frozenset({"hydra", "trust"})
"""Keys and groups that count from the command line alone."""
ALLOWED = "hydra.mode and hydra.sweeper.params"
"""Of Hydra's own, what a sweep's file needs."""
LARGEST_BYTES = 1 << 18
DEEPEST = 40
MOST_NODES = 20_000
"""Values of a file, those of an alias counted as often as it is used: seven lines can stand for millions."""
_COMPONENTS = r"[\w-][\w.-]*(/[\w-][\w.-]*)*"
_ENTRY = re.compile(rf"((optional|override)\s+)*/?{_COMPONENTS}(@[\w.:-]+)?")
_CHOICE = re.compile(rf"{_COMPONENTS}|\$\{{[\w./@-]+\}}|\?\?\?")
_KEY = re.compile(r"(?<!\\)\$\{[\w.\[\]-]+\}")
"""Another key's value, which a resolver such as ``oc.env`` is not."""


def is_strangers(path: Path) -> bool:
    """Whether a file of configuration is none of ours; wherever a path or a link to it begins."""
    return not path.resolve().is_relative_to(OURS)


def read_text(path: Path, *, what: str) -> str:
    """The text of a file of YAML that is short, shallow and without an alias that multiplies it; ValueError, which begins
    with ``what``."""
    try:
        text = read_file(path, most=LARGEST_BYTES).decode("utf-8")
        _check_size(text, what=f"{what}: {path.name}")
    except OSError as error:
        raise ValueError(f"{what}: {path.name} cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{what}: {path.name} is no YAML ({' '.join(str(error).split())})") from error
    return text


def read_config(path: Path, *, what: str) -> DictConfig:
    """The configuration in a run's ``config.yaml``: sections of plain values, nothing in it refers to anything else.

    Raises:
        ValueError: beginning with ``what``, and naming the file and the key.
    """
    text = read_text(path, what=what)
    try:
        found = OmegaConf.load(io.StringIO(text))
        plain = OmegaConf.to_container(found, resolve=False)
    except (OSError, ValueError, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ValueError(f"{what}: {path.name} is no configuration ({' '.join(str(error).split())})") from error
    if not isinstance(plain, dict):
        raise ValueError(f"{what}: {path.name} must have sections, such as variant and model")
    for key, value in _texts(plain):
        if "${" in value:
            raise ValueError(f"{what}: {path.name}: {key}={value}: a run's configuration has values only")
    return found


def check_loaded(found: ConfigResult, *, name: str, file: Path) -> None:
    """ValueError where a stranger's file of configuration says what it may not.

    Args:
        found: as Hydra has read it.
        name: group and name, by which it was chosen.
    """
    plain = OmegaConf.to_container(found.config, resolve=False)
    for key, value in _texts(plain):
        rest = _KEY.sub("", value)
        if "$" in rest and not key.startswith("defaults."):
            raise ValueError(
                f"{file}: {key}={value}: a file of configuration may refer to another key, as in ${{model.heads}}, and to "
                "nothing else; $ has no other meaning in it"
            )
    entries = plain.pop("defaults", None) or [] if isinstance(plain, dict) else []
    for entry in entries if isinstance(entries, list) else [entries]:
        _check_default(entry, file=file)
    for word, said in ((name, "its name"), (found.header["package"] or "", "its package")):
        if _names_typed(word):
            raise ValueError(f"{file}: {said} is {word}; {_told('')}")
    if not isinstance(plain, dict):
        return
    if "trust" in plain:
        raise ValueError(f"{file}: trust={plain['trust']}: {_told('trust')}, as in trust=[my_file]")
    _check_hydra(plain.get("hydra", {}), file=file)


def check_seen(name: str, having: Sequence[ConfigSource]) -> None:
    """ValueError where a folder of the user's has a file that is hidden by another of the same group and name.

    Args:
        name: group and name, by which it was chosen.
        having: folders with such a file, in Hydra's order: the first is read.
    """
    for hidden in having[1:]:
        given = hidden.provider == "command-line" or hidden.provider.startswith("hydra.searchpath in")
        if given and Path(hidden.path).resolve() != Path(having[0].path).resolve():
            group, _, choice = name.removesuffix(".yaml").rpartition("/")
            word = f"{group}={choice}" if group else choice
            raise ValueError(
                f"{word}: {hidden.path} has a file of this name, which is not read, because {having[0].path} comes first; "
                "allowed are names that are free"
            )


def check_word(word: str, *, what: str) -> None:
    """ValueError where a word of the form KEY=VALUE, which a file says and nobody typed, sets what must be typed."""
    key = word.partition("=")[0]
    if not re.fullmatch(r"\w[\w./@-]*", key) or _names_typed(key):
        raise ValueError(f"{what}: {word}: {_told(key)}")


def _check_hydra(node: object, *, file: Path) -> None:
    """ValueError unless of Hydra's own keys there are only those that a sweep needs."""

    def section(node: object, allowed: tuple[str, ...] | None, *, key: str) -> Mapping:
        if not isinstance(node, Mapping):
            raise ValueError(f"{file}: {key}={node}: must be a section; allowed are {ALLOWED}")
        for name, value in node.items():
            if allowed is not None and name not in allowed:
                raise ValueError(f"{file}: {key}.{name}={value}: {_told(f'{key}.{name}')}; in a file: {ALLOWED}")
        return node

    sweeper = section(node, ("mode", "sweeper"), key="hydra").get("sweeper", {})
    params = section(sweeper, ("params",), key="hydra.sweeper").get("params", {})
    for name, value in section(params, None, key="hydra.sweeper.params").items():
        check_word(f"{name}={value}", what=f"{file}: hydra.sweeper.params")


def _check_default(entry: object, *, file: Path) -> None:
    """ValueError unless an entry of ``defaults`` chooses one of the groups, on the search path, for a place of the run's."""
    ((group, choices),) = entry.items() if isinstance(entry, dict) and len(entry) == 1 else ((entry, None),)
    choices = [choice for choice in (choices if isinstance(choices, list) else [choices]) if choice is not None]
    words = [(_ENTRY, group), *((_CHOICE, choice) for choice in choices)]
    if any(not isinstance(word, str) or not shape.fullmatch(word) or _names_typed(word) for shape, word in words):
        raise ValueError(
            f"{file}: defaults has {entry}; allowed are groups and names on the search path, as in /model: tiny, and none of "
            f"{' and '.join(sorted(TYPED))}, which count from the command line alone"
        )


def _names_typed(place: str) -> bool:
    return not TYPED.isdisjoint(re.split(r"[^\w-]+", place))


def _told(key: str) -> str:
    return f"{key or ' and '.join(sorted(TYPED))} {'counts' if key else 'count'} from the command line alone"


def _texts(node: object, *, key: str = "") -> Iterator[tuple[str, str]]:
    """All texts in plain values, with their places."""
    if isinstance(node, str):
        yield key, node
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in inner:
        yield from _texts(value, key=f"{key}.{name}" if key else str(name))


def _check_size(text: str, *, what: str) -> None:
    """ValueError where a text has too many levels or values; nothing is built, and nothing recurs."""
    opened, sizes = [[None, 0]], {}  # anchors of what is open, and the values in it; the same of what was closed
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append([anchor, 1])
        elif isinstance(event, yaml.CollectionEndEvent):
            closed, size = opened.pop()
            sizes[closed], opened[-1][1] = size, opened[-1][1] + size
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == own for own, _ in opened):
                raise ValueError(f"{what}: *{anchor} stands in itself")
            opened[-1][1] += sizes.get(anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            opened[-1][1] += 1
        if len(opened) > DEEPEST:
            raise ValueError(f"{what}: is nested more than {DEEPEST} levels deep")
        if opened[-1][1] > MOST_NODES:
            raise ValueError(f"{what}: has more than {MOST_NODES:,} values")
