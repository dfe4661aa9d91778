"""Checks any variant against the contract, with pass and fail lines: ``python -m bench.check variant=mine``.

A small model of the variant (its YAML's ``small``) is built from a training run's configuration, for every position
scheme on Hydra's search path, both caches, and ``attend_self`` true and false. In each combination a fast backend is
compared with the plain one. Every second combination also checks the plain one in full; together these have each pair
of choices. Then causality, reach and segment cuts are checked at the sizes that ``train.py`` has with the same words.

Typed keys are not varied: ``position=relative`` (or any ``position.*``), ``model.cache=hidden``,
``model.attend_self=false``, ``runtime.backend=plain``, and ``recipe=..``, which stands for the first three.

Each combination prints a line, and a line below it for each broken promise (exit code 1). A ValueError while the model
is built is a refusal and prints a line; if all are refused, the exit code is 2.

With a ``runtime.device`` other than a CPU, one more line compares logits and gradients of few layers on the device, run
as by ``train.py``, with plain PyTorch in float64 on a CPU. ``-m`` runs several settings: ``-m
runtime.backend=plain,kernel runtime.precision=float32,bfloat16``. The contract is then checked in plain PyTorch,
because the CPU's kernels are not the device's.
"""

import copy
import functools
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from bench import CONF
from harness.compose.cli import MISTAKES, explain, run_command

VERB_KEYS = ("agree",)
UNSEEN = (
    "A kept contract is not a right mechanism: whether it is its paper's, only a reference tells, "
    "as in tests/reference."
)
BROKEN: list[str] = []
"""Variants that broke a promise. If there are any, the process ends with exit code 1 after a sweep's last job."""


class Combination(NamedTuple):
    """Choices as typed; ``backend`` is empty if the others are refused."""

    position: str
    cache: str
    attend_self: str
    backend: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.position, self.cache, f"attend_self={self.attend_self}", self.backend]))


@hydra.main(version_base="1.3", config_path=CONF, config_name="check")
def main(cfg: DictConfig) -> None:
    from bench.conformance import findings, named_kind
    from harness.device.runtime import device_kind
    from harness.plan.settings import RuntimeSettings, parse_section, parse_setting

    name, typed = cfg.variant.name, {word.lstrip("+~").partition("=")[0] for word in HydraConfig.get().overrides.task}
    asked = parse_setting(cfg.agree, bool | None, key="agree")
    if on_device := named_kind(cfg.runtime.device) != "cpu" if asked is None else asked:
        device_kind(parse_section(RuntimeSettings, cfg.runtime, key="runtime"))  # raises if there is none
    broken: dict[Combination, set[str]] = {}
    refused: list[str] = []
    for combination, plan in combinations(cfg, typed=typed):
        if isinstance(plan, Exception):
            error = plan
            refused.append(f"refused  {combination}: {explain(plan)}\n")
            continue
        broken[combination] = _show(str(combination), findings(plan))
    if not broken:
        raise error
    at_sizes = _show("sizes of the run", own_sizes(next(iter(broken))))
    print(*refused, sep="", end="")
    outcome = "keeps the contract in"
    if promises := at_sizes.union(*broken.values()):
        BROKEN.append(name)
        outcome = f"{len(promises)} promise{'s' * (len(promises) > 1)} broken; it keeps the contract in"
        outcome += f" {list(broken.values()).count(set())} of"
    others = f", {len(refused)} refused" if refused else ""
    print(f"{name}: {outcome} {len(broken)} combination{'s' * (len(broken) > 1)}{others}")
    if on_device and not agrees():
        BROKEN.append(name)
    print(UNSEEN)


def _show(what: str, findings: list) -> set[str]:
    """Print a line, and below it the broken promises, which are returned."""
    breaks = [finding for finding in findings if not finding.passed]
    count = f"{len(breaks)} of {len(findings)} promises broken" if breaks else f"{len(findings)} promises"
    print(f"{'FAIL' if breaks else 'pass'}  {what}: {count}")
    print(*(f"  {finding}\n" for finding in breaks), sep="", end="", flush=True)
    return {finding.promise for finding in breaks}


def combinations(cfg: DictConfig, *, typed: set[str]) -> Iterator[tuple[Combination, object]]:
    """Each combination of the choices that are not ``typed``, with its plan or the error of its refusal."""
    from bench.conformance import fast_backend, in_plain, named_kind
    from bench.planning import compose_typed, own_keys
    from harness.loop.prepare import make_plan
    from harness.plan.small import apply_small, contract_plan

    recipe = "recipe" in typed
    positioned = recipe or any(key.partition(".")[0] == "position" for key in typed)
    job, loader = HydraConfig.get(), GlobalHydra.instance().config_loader()
    every = loader.get_group_options("position", overrides=list(job.overrides.hydra))
    positions = [job.runtime.choices.position] if positioned else every
    caches = [cfg.model.cache] if recipe or "model.cache" in typed else ["kv", "hidden"]
    composed = functools.cache(  # composing takes a tenth of a check's time
        lambda position: compose_typed("check", *([] if positioned else [f"position={position}"]))
    )
    attending = [cfg.model.attend_self] if recipe or "model.attend_self" in typed else [True, False]
    for (i, position), (j, cache), (k, attend_self) in itertools.product(
        *map(enumerate, (positions, caches, attending))
    ):
        combination = Combination(position, cache, str(attend_self).lower())
        try:
            config = copy.deepcopy(composed(position))
            config.model.cache, config.model.attend_self = cache, attend_self
            own_keys(config, *VERB_KEYS)
            plan = apply_small(contract_plan(make_plan(config), named_kind(cfg.runtime.device)), command_line_keys=typed)
            backend = fast_backend(plan)
        except MISTAKES as error:
            yield combination, error
            continue
        yield combination._replace(backend=backend or "plain"), plan
        if backend and plan.runtime.backend == "auto" and (i + j + k) % 2 == 0:
            yield combination._replace(backend="plain"), in_plain(plan)


def own_sizes(combination: Combination) -> list:
    """Findings at the sizes of ``train.py`` with the typed words or, if these are refused, in ``combination``."""
    from harness.loop.admission import findings_at_sizes

    words = [f"position={combination.position}", f"model.cache={combination.cache}"]
    try:
        plan = _training_plan()
    except MISTAKES:
        plan = _training_plan(*words, f"model.attend_self={combination.attend_self}")
    return list(findings_at_sizes(plan))


def _training_plan(*words: str):
    from bench.planning import recompose
    from harness.loop.prepare import make_plan

    return make_plan(recompose("train", *words, verb_keys=(), leave=VERB_KEYS))


def agrees() -> bool:
    """Print whether the device agrees with plain PyTorch in float64 on a CPU. Errors may be ``TOLERANCE`` of
    ``select_backend``, or twice those of plain PyTorch in the device's precision. In bfloat16, tables are read at other
    slots, so numbers need only be finite. ValueError if the backend cannot run."""
    import torch

    from harness.device import runtime
    from harness.loop.select_backend import SEGMENTS, TOLERANCE, agreement
    from harness.plan.small import reduce_depth

    plan = _training_plan("model.dropout=0.0")  # the device draws other masks
    names = {name for layer in plan.layers for name in layer}
    small = reduce_depth(plan, sublayers=names, max_span=sum(SEGMENTS) // 2)
    small, where = replace(small, runtime=plan.runtime), runtime.start(plan.runtime)
    with torch.random.fork_rng(devices=[]):
        sublayers = [sublayer for _, sublayer in small.make_model().sublayers()]
    backends = {sublayer.backend(where.device, training=True) for sublayer in sublayers}
    looked_up = any(sublayer.tables for sublayer in sublayers) and where.precision == "bfloat16"
    passed, detail = agreement(small, where, tolerance=math.inf if looked_up else TOLERANCE)
    label = f"{where.device}, {'+'.join(sorted(backends))}, {where.precision}"
    print(f"{'pass' if passed else 'FAIL'}  agrees with float64 on {label}: {detail}", flush=True)
    return passed


@functools.wraps(main)
def command() -> None:
    """Run ``main``; exit code 1 after the last job if any job broke a promise."""
    try:
        main()
    finally:
        if BROKEN:
            sys.exit(1)


if __name__ == "__main__":
    run_command(command)
