"""Commands that measure, check and report, one module each, such as ``python -m bench.cost``."""

from pathlib import Path

import yaml

import harness  # noqa: F401 - sets environment variables that torch reads when it is loaded

CONF = str(Path(__file__).resolve().parent.parent / "conf")  # the folder of the configuration


def read_yaml(name: str) -> dict | list:
    """The content of a YAML file of ``bench``."""
    return yaml.safe_load((Path(__file__).parent / name).read_text(encoding="utf-8"))
