"""A trained model out of its run folder: its own configuration, its best weights, and a span of the reader's choice."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from harness.model import LanguageModel
from harness.plan.build import Plan
from harness.record import checkpoint
from harness.record.rows import RECORD, read_rows


def read_run(path: Path, *, key: str) -> tuple[dict, dict]:
    """Provenance and best weights; ValueError naming ``key`` if there is no run folder with both."""
    best = path / checkpoint.FOLDER / checkpoint.BEST
    if not best.exists() or not (path / RECORD).exists():
        raise ValueError(f"{key}={path}: must be a run folder with {checkpoint.FOLDER}/{checkpoint.BEST} and {RECORD}")
    return read_rows(path / RECORD)[0], checkpoint.load(best)


def config_of_run(path: Path, *, runtime: DictConfig, trust: list | None) -> DictConfig:
    """The run's resolved configuration, to be computed as ``runtime`` says; ``trust`` None is the run's own."""
    own = OmegaConf.load(path / "config.yaml")
    own.runtime = runtime
    own.trust = own.trust if trust is None else trust
    return own


def trained_model(plan: Plan, best: dict, *, span: int, key: str) -> LanguageModel:
    """The plan's model with the weights; a query may see ``span`` bytes. ValueError where they do not fit the code."""
    model = plan.make_model()
    try:
        model.load_state_dict(best["model"])
    except RuntimeError as error:
        raise ValueError(f"{key}: its weights do not fit the code as it is now ({error})") from error
    model.project_()
    if span != plan.model.span:
        for _, sublayer in model.sublayers():
            sublayer.set_span(span)
    return model
