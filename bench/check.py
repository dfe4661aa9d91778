"""The contract as pass and fail lines, for any variant: ``python -m bench.check variant=mine``.

A small model of the variant is built from the same configuration as a training run, once for every position scheme of
``conf/position`` (and of the folders and packages on Hydra's search path), both caches, and ``attend_self`` true and
false. Where a fused path runs, it is compared with the plain one each time, and the plain one is checked whole in every
other combination, so that it meets each pair of choices. What is promised is in ``variants/conformance.py``.

What is given is not varied: ``position=relative`` (or any ``position.*``), ``model.cache=hidden``,
``model.attend_self=false``, ``runtime.path=plain``, and ``recipe=..``, which stands for the first three. A combination
that keeps everything is one line; ``verbose=true`` shows its promises, too.

A combination that the variant, the scheme or the path refuses with a ValueError when the model is built is shown as
refused, which is no break; where all are refused, the command was a mistake (exit code 2). A ValueError later is a break.
Exit code 1 if a promise is broken.

``passed`` is the gate before anything is measured.
"""

import hashlib
import itertools
import json
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

from harness.cli import MISTAKES, explain, run_command

if TYPE_CHECKING:  # torch and all that needs it is imported late, so that a wrong word is answered at once
    from harness.build import Plan
    from variants.conformance import Finding

BENCH = Path(__file__).resolve().parent
CONF = str(BENCH.parent / "conf")
BROKEN: list[str] = []
"""Variants that broke a promise in this process: a sweep's other jobs run before it ends with exit code 1."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="check")
def main(cfg: DictConfig) -> None:
    from bench.conformance import findings
    from harness.settings import checked

    verbose, name = checked(cfg.verbose, bool, key="verbose"), cfg.variant.name
    refused, broken = [], []
    for label, plan in combinations(cfg):
        if isinstance(plan, Exception):
            refused.append((label, plan))
        else:
            broken.append(show(label, findings(plan), verbose=verbose))
    if not broken:
        raise refused[0][1]
    for label, error in refused:
        print(f"refused  {label}: {explain(error)}")
    if any(broken):
        BROKEN.append(name)
        outcome = f"{sum(broken)} promises broken; it keeps the contract in {broken.count(0)} of"
    else:
        outcome = "keeps the contract in"
    beside = f", {len(refused)} refused" if refused else ""
    print(f"{name}: {outcome} {len(broken)} combination{'s' * (len(broken) > 1)}{beside}")


def show(label: str, found: "list[Finding]", *, verbose: bool) -> int:
    """Print what became of one combination; the number of promises that it breaks."""
    breaks = [finding for finding in found if not finding.passed]
    count = f"{len(breaks)} of {len(found)} promises broken" if breaks else f"{len(found)} promises"
    lines = [f"{'FAIL' if breaks else 'pass'}  {label}: {count}", *(found if verbose else breaks)]
    print("\n      ".join(map(str, lines)), flush=True)
    return len(breaks)


def combinations(cfg: DictConfig) -> "Iterator[tuple[str, Plan | Exception]]":
    """All that the typed words leave open: each combination's label, and its plan or why it is refused."""
    from hydra.core.hydra_config import HydraConfig

    from bench.conformance import fast_path, varied
    from bench.planning import bench_plan, recompose

    given = {word.lstrip("+~").partition("=")[0] for word in HydraConfig.get().overrides.task}
    recipe = "recipe" in given
    positioned = recipe or any(key.partition(".")[0] == "position" for key in given)
    factors = (
        [HydraConfig.get().runtime.choices.position] if positioned else position_schemes(),
        [cfg.model.cache] if recipe or "model.cache" in given else ["kv", "hidden"],
        [cfg.model.attend_self] if recipe or "model.attend_self" in given else [True, False],
    )
    for places in itertools.product(*map(range, map(len, factors))):
        position, cache, attend_self = (values[i] for values, i in zip(factors, places, strict=True))
        label = f"{position}, {cache}, attend_self={str(attend_self).lower()}"
        words = [] if positioned else [f"position={position}"]
        words += [f"model.cache={cache}", f"model.attend_self={attend_self}"]
        try:
            plan = bench_plan(recompose("check", *words, own=("verbose",)))
            path = fast_path(plan)
        except MISTAKES as error:
            yield label, error
            continue
        yield f"{label}, {path or 'plain'}", plan
        if path and plan.runtime.path == "auto" and sum(places) % 2 == 0:
            yield f"{label}, plain", varied(plan, runtime={"path": "plain"})


def position_schemes() -> list[str]:
    """Choices of ``position`` in every place where Hydra looks for configuration."""
    from hydra._internal.config_repository import ConfigRepository
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra.core.hydra_config import HydraConfig

    path = ConfigSearchPathImpl()
    for source in HydraConfig.get().runtime.config_sources:
        path.append(source.provider, f"{source.schema}://{source.path}")
    return ConfigRepository(path).get_group_options("position")


def gate(plan: "Plan") -> "list[Finding]":
    """The promises that a plan breaks, in a second or two, or at once where nothing has changed since they were kept.

    The plan is checked with its own position scheme, cache, ``attend_self``, dropout and path, at the sizes of
    ``bench.conformance.shrunk``, in float64 on the CPU. That nothing was broken is remembered in the user's cache folder,
    under a hash of configuration, code and versions; breaks never are, nor variants from outside.

    Raises:
        ValueError: the plan cannot be built, or its path cannot run.
    """
    from bench.conformance import findings, shrunk
    from harness import source
    from harness.cache import cache_folder, write_whole

    small = shrunk(plan)
    what = {
        "config": [small.config["variant"], small.config["model"] | {"default_bytes": None}, small.config["position"]],
        "vocabulary": small.data["vocabulary"],
        "path": small.runtime.path,
        "code": source.digest(measuring=True),
        "versions": [platform.python_version(), platform.machine(), *map(version, ("torch", "einops"))],
    }
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    kept = cache_folder() / "gate" / key
    if not small.trust and kept.exists():
        return []
    broken = [finding for finding in findings(small) if not finding.passed]
    if not small.trust and not broken:
        with suppress(OSError):  # then the next call checks again
            write_whole(kept, b"")
    return broken


def passed(plan: "Plan") -> None:
    """Refuse to measure a variant that breaks the contract: ValueError naming it and the first breaks."""
    broken = gate(plan)
    if broken:
        first = "; ".join(f"{finding.promise}: {finding.detail}" for finding in broken[:2])
        more = f"; and {len(broken) - 2} more" if len(broken) > 2 else ""
        raise ValueError(
            f"variant={plan.variant}: breaks the contract, so it is not measured: {first}{more}; "
            f"all of it says python -m bench.check variant={plan.variant}"
        )


def command() -> None:
    """Exit code 1 after the last job, if any broke a promise."""
    main()
    if BROKEN:
        sys.exit(1)


if __name__ == "__main__":
    run_command(command)
