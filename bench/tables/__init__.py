"""Makes tables, figures and a page from rows, with neither torch nor a server."""

from pathlib import Path

import yaml


def read_yaml(name: str) -> dict | list:
    """Return the content of a YAML file of ``bench``."""
    return yaml.safe_load((Path(__file__).parents[1] / name).read_text(encoding="utf-8"))
