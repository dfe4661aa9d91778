"""The contract as pass and fail lines, for any variant: ``python -m bench.check variant=mine``.

A small model of the variant (with what its YAML has under ``small``) is built from the same configuration as a training run,
once for every position scheme on Hydra's search path, both caches, and ``attend_self`` true and false. Where a fast backend
runs, it is compared with the plain one each time, and the plain one is checked whole in every other combination: it meets
each pair of choices.

What is given is not varied: ``position=relative`` (or any ``position.*``), ``model.cache=hidden``,
``model.attend_self=false``, ``runtime.backend=plain``, and ``recipe=..``, which stands for the first three.

One line a combination, then one a broken promise, and one a refusal, each with the combinations in which it is so;
``verbose=true`` shows the promises that are kept, too.

What the variant, the scheme or the backend refuses with a ValueError when the model is built is no break; where all is
refused, the command was a mistake (exit code 2). A ValueError later is a break. Exit code 1 if a promise is broken.

``runtime.device=cuda``, or any device that is no CPU, adds what the device computes: every candidate's proof and time, as a
run has it before its first step; logits and the gradient of every parameter, on its backends and in its precisions, beside
plain PyTorch in float64 on the CPU, which ``agree.run=true`` does on a CPU, too; and last, whether a short training in the
fast mode ends where plain float32 does. The contract is then checked in plain PyTorch: the CPU's kernels are not the device's.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from bench import CONF
from bench.combinations import Combination, Lines, kind_of
from harness.compose.cli import MISTAKES, explain, run_command

if TYPE_CHECKING:  # torch and all that needs it is imported late, so that a wrong word is answered at once
    from bench.agreement import AgreementSettings
    from harness.plan.build import Plan

OWN = ("verbose", "agree")
UNSEEN = "A kept contract is not a right mechanism: whether it is its paper's, only a reference tells, as in tests/reference."
BROKEN: list[str] = []
"""Variants that broke a promise in this process: a sweep's other jobs run before it ends with exit code 1."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="check")
def main(cfg: DictConfig) -> None:
    from bench.conformance import findings
    from harness.plan.settings import checked

    verbose, name = checked(cfg.verbose, bool, key="verbose"), cfg.variant.name
    given = {word.lstrip("+~").partition("=")[0] for word in HydraConfig.get().overrides.task}
    settings = on_device(cfg)
    shown, refused, checked_in, refused_in, broken = Lines(), Lines(), [], [], set()
    for combination, plan in combinations(cfg, given=given):
        if isinstance(plan, Exception):
            refused_in.append(combination)
            refused.add(explain(plan), f"refused  {{where}}: {explain(plan)}", combination)
            error = plan
            continue
        found = findings(plan)
        checked_in.append(combination)
        breaks = [finding for finding in found if not finding.passed]
        count = f"{len(breaks)} of {len(found)} promises broken" if breaks else f"{len(found)} promises"
        print(f"{'FAIL' if breaks else 'pass'}  {combination}: {count}", flush=True)
        for finding in found if verbose else breaks:
            key = (finding.promise, finding.passed or kind_of(finding.detail))
            shown.add(key, str(finding).replace(finding.promise, f"{finding.promise} ({{where}})", 1), combination)
        broken.update((combination, finding.promise) for finding in breaks)
    if not checked_in:
        raise error
    tried = [combination._replace(backend="") for combination in checked_in]
    lines = [*shown.told(checked_in), *refused.told(dict.fromkeys([*tried, *refused_in]))]
    print("\n".join(lines), end="\n" * bool(lines))
    outcome, kept = "keeps the contract in", len(checked_in) - len({combination for combination, _ in broken})
    if broken:
        BROKEN.append(name)
        number = len({promise for _, promise in broken})
        outcome = f"{number} promise{'s' * (number > 1)} broken; it keeps the contract in {kept} of"
    beside = f", {len(refused_in)} refused" if refused_in else ""
    print(f"{name}: {outcome} {len(checked_in)} combination{'s' * (len(checked_in) > 1)}{beside}")
    if settings is not None:
        prove(cfg, settings, given=given)
        compare(cfg, settings, given=given)
        train(cfg, settings, given=given)
    print(UNSEEN)


def combinations(cfg: DictConfig, *, given: set[str]) -> "Iterator[tuple[Combination, Plan | Exception]]":
    """All that the typed words leave open: each combination, and its plan or why it is refused.

    Args:
        given: keys that were typed.
    """
    from bench.conformance import fast_backend, named_kind, of_mechanism
    from bench.planning import bench_plan, recompose, varied
    from bench.small import with_small

    recipe = "recipe" in given
    positioned = recipe or any(key.partition(".")[0] == "position" for key in given)
    factors = (
        [HydraConfig.get().runtime.choices.position] if positioned else position_schemes(),
        [cfg.model.cache] if recipe or "model.cache" in given else ["kv", "hidden"],
        [cfg.model.attend_self] if recipe or "model.attend_self" in given else [True, False],
    )
    for places in itertools.product(*map(range, map(len, factors))):
        position, cache, attend_self = (values[i] for values, i in zip(factors, places, strict=True))
        combination = Combination(position, cache, str(attend_self).lower())
        words = [] if positioned else [f"position={position}"]
        words += [f"model.cache={cache}", f"model.attend_self={attend_self}"]
        try:
            plan = of_mechanism(bench_plan(recompose("check", *words, own=OWN)), named_kind(cfg.runtime.device))
            plan = with_small(plan, given=given)
            backend = fast_backend(plan)
        except MISTAKES as error:
            yield combination, error
            continue
        yield combination._replace(backend=backend or "plain"), plan
        if backend and plan.runtime.backend == "auto" and sum(places) % 2 == 0:
            yield combination._replace(backend="plain"), varied(plan, runtime={"backend": "plain"})


def position_schemes() -> list[str]:
    """Choices of ``position`` in every place where Hydra looks for configuration."""
    from hydra._internal.config_repository import ConfigRepository
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl

    path = ConfigSearchPathImpl()
    for source in HydraConfig.get().runtime.config_sources:
        path.append(source.provider, f"{source.schema}://{source.path}")
    return ConfigRepository(path).get_group_options("position")


def on_device(cfg: DictConfig) -> "AgreementSettings | None":
    """What to compare on the device, or None; ValueError for a wrong key, or if the device is not there."""
    from bench.agreement import AgreementSettings
    from bench.conformance import named_kind
    from harness.device.runtime import device_kind
    from harness.plan.settings import RuntimeSettings, parse

    sections = OmegaConf.to_container(cfg, resolve=True)
    settings = parse(AgreementSettings, sections["agree"], key="agree")
    runtime = parse(RuntimeSettings, sections["runtime"], key="runtime")
    if settings.run is False or (settings.run is None and named_kind(runtime.device) == "cpu"):
        return None
    device_kind(runtime)
    return settings


def prove(cfg: DictConfig, settings: "AgreementSettings", *, given: set[str]) -> None:
    """Print every candidate's proof, on a device that is no CPU."""
    from bench.conformance import named_kind

    if named_kind(cfg.runtime.device) == "cpu":
        return
    from bench import on_device
    from bench.planning import bench_plan
    from harness.record.table import print_table

    found = on_device.proofs(bench_plan(_sized(cfg, settings, given=given)))
    if found is None:
        print(f"{cfg.variant.name}: has no candidates beside plain PyTorch on {cfg.runtime.device}")
        return
    table, failed = found
    print_table(table)
    if failed:
        BROKEN.append(cfg.variant.name)


def train(cfg: DictConfig, settings: "AgreementSettings", *, given: set[str]) -> None:
    """Print whether the fast mode learns what plain float32 does, on a device that is no CPU."""
    from bench.conformance import named_kind

    if named_kind(cfg.runtime.device) == "cpu":
        return
    from bench import on_device
    from bench.planning import bench_plan

    words = [f"budget.steps={settings.steps}"]
    words += [] if "runtime.precision" in given else ["runtime.precision=bfloat16"]
    good, said = on_device.learns_alike(bench_plan(_sized(cfg, settings, *words, given=given)), seeds=settings.seeds)
    print(f"{'pass' if good else 'FAIL'}  {settings.steps} steps of training: {said}")
    if not good:
        BROKEN.append(cfg.variant.name)


def _sized(cfg: DictConfig, settings: "AgreementSettings", *words: str, given: set[str]) -> DictConfig:
    """What was typed, in its own sizes where they were typed, or else in those that are compared."""
    from bench.agreement import sized
    from bench.planning import recompose
    from harness.device.runtime import device_kind
    from harness.plan.settings import RuntimeSettings, parse

    if any(key.partition(".")[0] in ("recipe", "model") for key in given - {"model.cache", "model.attend_self"}):
        return recompose("check", *words, own=OWN)
    kind = device_kind(parse(RuntimeSettings, cfg.runtime, key="runtime"))
    return sized(settings, *words, kind=kind, own=OWN)


def compare(cfg: DictConfig, settings: "AgreementSettings", *, given: set[str]) -> None:
    """Print what the device computes, case by case."""
    from bench.agreement import agreement

    counts = Counter()
    for label, outcome, detail in agreement(cfg, settings, given=given, own=OWN):
        print(f"{outcome}  {label}: {detail}", flush=True)
        counts[outcome] += 1
    if set(counts) == {"refused"}:
        raise ValueError(detail)
    if counts["FAIL"]:
        BROKEN.append(cfg.variant.name)
    beside = f", {counts['refused']} refused" if counts["refused"] else ""
    cases = f"{counts['pass']} of {counts['pass'] + counts['FAIL']} cases{beside}"
    print(f"{cfg.variant.name}: agrees with float64 on {cfg.runtime.device} in {cases}")


def command() -> None:
    """Exit code 1 after the last job, if any broke a promise."""
    main()
    if BROKEN:
        sys.exit(1)


if __name__ == "__main__":
    run_command(command)
