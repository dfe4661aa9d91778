"""Help of a command: what it does, examples, and its keys with the comments of their YAML files.
Hydra's own help would drop the comments, and list groups that the command does not accept."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import yaml

from harness.compose.untrusted_config import CONF

BASE = "command"  # the configuration that all commands share; it has no keys of its own
OPTIONS = """options:
  -m                 run a job for each combination of the values in KEY=VALUE,VALUE
  --cfg job          print the configuration, and do nothing
  --help GROUP       print the keys of a group"""


def help_text(command: str, group: str | None = None) -> str:
    """Return the help of ``conf/<command>.yaml``, or of a ``group``. ValueError for another
    group."""
    groups = dict(_groups(command))
    if group is not None:
        if group not in groups:
            raise ValueError(f"--help {group}: no such group; allowed are {', '.join(groups)}")
        default, _ = groups[group]
        path = CONF / group / f"{default or _choices(group)[0]}.yaml"
        title = f"{group}:\n{_choices_of(group, default)}"
        return f"{title}\n\nkeys of {group}={path.stem}:\n\n{_read(f'{group}/{path.stem}')}"
    about, examples = _header(command)
    parts = [about, "examples:\n" + textwrap.indent("\n".join(examples), "  ")]
    parts += [f"keys of {name}:\n{textwrap.indent(body, '  ')}" for name, body in _bodies(command)]
    if groups:
        lines = ["groups (GROUP=CHOICE; the first choice is the default):"]
        for name, (default, comment) in groups.items():
            lines += [f"  {name}: {comment}", _choices_of(name, default)]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, OPTIONS if groups else OPTIONS.rpartition("\n")[0]])


def _header(command: str) -> tuple[str, list[str]]:
    """Return the first sentences of a configuration's comment, and the example commands below
    them."""
    comment = re.match(r"(#.*\n)*", _read(command))[0]
    lines = [line.removeprefix("#") for line in comment.splitlines()]
    examples = [line.strip() for line in lines if line.startswith("   ")]
    return "\n".join(line.strip() for line in lines if not line.startswith("   ")), examples


def _bodies(command: str) -> Iterator[tuple[str, str]]:
    """Yield the YAML of a command's own keys, then that of its bases, each with its name."""
    text = re.sub(r"\A(#.*\n)*", "", _read(command))
    own = re.sub(r"^defaults:\n(  .*\n)*", "", text, flags=re.MULTILINE).strip("\n")
    if own:
        yield command, own
    for entry in yaml.safe_load(text)["defaults"]:
        if isinstance(entry, str) and entry not in ("_self_", BASE):
            yield from _bodies(entry)


def _groups(command: str) -> Iterator[tuple[str, tuple[str | None, str]]]:
    """Yield the groups of a command and its bases: name, default choice and comment."""
    for line in re.findall(r"^  - (.*)$", _read(command), flags=re.MULTILINE):
        entry, _, comment = line.partition("#")
        name, is_group, default = entry.strip().removeprefix("override ").partition(": ")
        if is_group and "/" not in name:
            yield name, (None if default == "null" else default, comment.strip())
        elif name not in ("_self_", BASE) and not is_group:
            yield from _groups(name)


def _choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _choices_of(group: str, default: str | None) -> str:
    names = [name for name in _choices(group) if name != default]
    text = ", ".join([default or "null", *names])
    return textwrap.fill(text, width=100, initial_indent="      ", subsequent_indent="      ")


def _read(name: str) -> str:
    return Path(CONF, f"{name}.yaml").read_text(encoding="utf-8")
