"""Checks a variant against the contract, and prints pass and fail lines: ``python -m bench.check
variant=mine``.

A promise is one property that the contract demands, such as causality. Promises are checked on a
small model of the variant, with the sizes of ``small`` in its YAML, in every combination of three
choices: the position schemes on Hydra's search path, ``model.cache`` and ``model.attend_self``.
Each combination is checked with the fast backend, if there is one, which must also agree with the
plain backend. Every second combination is checked with the plain backend as well; if no choice is
typed, these combinations cover every pair of choices. Then causality, reach and segment cuts are
checked at the sizes that ``train.py`` would use with the same overrides.

A choice that is typed does not vary: ``position=relative`` (or any key of ``position``),
``model.cache=hidden``, ``model.attend_self=false``, ``runtime.backend=plain``, or ``recipe=..``,
which fixes position, cache and attend_self.

The verdict is printed first and last. Between them each combination has a line, followed by a line
for each broken promise, and one line counts the combinations that the mechanism refuses: those
whose configuration or model cannot be built. If a promise is broken, the exit code is 1. If all
combinations are refused, it is 2.

With a ``runtime.device`` that names a GPU, or ``agree=true``, one more line compares the device
with plain PyTorch in float64 on a CPU: logits and gradients of a model with few layers, by the
backend that ``train.py`` would select. If a GPU is named, the contract is checked in plain PyTorch
on the CPU, because the CPU's kernels are not the GPU's. ``-m`` checks several settings: ``-m
runtime.backend=plain,kernel``."""

import copy
import functools
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from harness.compose.cli import MISTAKES, explain, run_command, with_config
from harness.record.cells import duration, join_words, pluralize

COMMAND_KEYS = ("agree",)
COMBINATION_SECONDS = 2.0
"""Typical time to check a combination of a small model, on one core."""
RUN_SIZES_SECONDS = 40.0
"""Typical time to check the sizes of a run, on one core."""
LIMITATION = (
    "Only a reference, as in tests/reference, shows whether a mechanism computes what "
    "its paper says."
)
BROKEN: list[str] = []
"""Names of variants that broke a promise, or that a device computes wrongly, in any job of a
sweep."""


class Combination(NamedTuple):
    """A combination that the mechanism accepts: its name, its choices as one would type them, and
    its plan."""

    name: str
    words: Sequence[str]
    plan: object


@with_config("check")
def main(cfg: DictConfig) -> None:
    from bench.progress import Progress
    from harness.check.admission import findings_at_sizes
    from harness.check.conformance import findings, named_kind
    from harness.device.selection import device_kind
    from harness.plan.build import typed_keys
    from harness.plan.settings import RuntimeSettings, parse_section, parse_setting
    from variants.conformance import AT_RUN_SIZES

    name = cfg.variant.name
    typed = {key.lstrip("~") for key in typed_keys()}
    compare_device = parse_setting(cfg.agree, bool | None, key="agree")
    if compare_device is None:
        compare_device = named_kind(cfg.runtime.device) != "cpu"
    if compare_device:
        # raises if there is no such device
        device_kind(parse_section(RuntimeSettings, cfg.runtime, key="runtime"))
    accepted, refusals = combinations(cfg, typed=typed)
    if not accepted:
        raise refusals[-1]
    seconds = len(accepted) * COMBINATION_SECONDS + RUN_SIZES_SECONDS
    found = {}
    compared = []
    with Progress(seconds) as progress:
        progress.print(
            f"{name}: about {duration(seconds)} for {pluralize(len(accepted), 'combination')} and "
            "the sizes of a run"
        )
        at_sizes = []
        try:
            for combination in accepted:
                progress.begin(f"checking {combination.name}", seconds=COMBINATION_SECONDS)
                found[combination.name] = findings(combination.plan)
            progress.begin("checking the sizes of the run, which take longest", seconds=0.0)
            for finding in findings_at_sizes(run_size_plan(accepted[0].words)):
                at_sizes.append(finding)
                each = RUN_SIZES_SECONDS / (len(AT_RUN_SIZES) + 1)
                progress.begin(f"checked: {finding.promise}", seconds=each)
            found["sizes of the run"] = at_sizes
        except (*MISTAKES, KeyboardInterrupt):  # what was found before may explain a mistake
            progress.stop()
            print(*itertools.starmap(_details, found.items()), sep="\n")
            raise
        if compare_device:
            progress.phase("comparing the device with float64")
            compared.append(compare_with_float64())
    broken = [finding for finding in sum(found.values(), compared) if not finding.passed]
    if broken:
        BROKEN.append(name)
    verdict = f"{name}: {_verdict(broken, len(accepted), len(refusals))}"
    print(verdict)
    print(*itertools.starmap(_details, found.items()), *compared, sep="\n")
    if refusals:
        # keys and values that are refused, without the reasons
        refused = dict.fromkeys(explain(error).partition(": ")[0] for error in refusals)
        print(
            f"refused  {pluralize(len(refusals), 'combination')}, with {join_words(refused)} "
            "(add one of these to the command to read why)"
        )
    print(verdict, LIMITATION, sep="\n")


def _verdict(broken: list, n_checked: int, n_refused: int) -> str:
    """Return what was found in ``n_checked`` combinations, in one sentence."""
    if not broken:
        refused = f" ({n_refused} refused)" if n_refused else ""
        return f"PASSED: keeps the contract in {pluralize(n_checked, 'combination')}{refused}"
    first = broken[0]
    n_others = len({finding.promise for finding in broken}) - 1
    others = f" and {n_others} more" if n_others else ""
    return f'FAILED: {first.detail}; broken: "{first.promise}"{others}'


def _details(title: str, findings: list) -> str:
    """Return a line, and below it a line for each broken promise."""
    failures = [finding for finding in findings if not finding.passed]
    if not failures:
        return f"pass  {title}: {pluralize(len(findings), 'promise')}"
    count = f"{len(failures)} of {pluralize(len(findings), 'promise')} broken"
    return "\n  ".join([f"FAIL  {title}: {count}", *map(str, failures)])


def combinations(cfg: DictConfig, *, typed: set[str]) -> tuple[list[Combination], list[Exception]]:
    """Return the accepted combinations, and the error of each refused one. Choices whose keys are
    ``typed`` do not vary."""
    from bench.planning import pop_keys, recompose
    from harness.check.conformance import fast_backend, named_kind, plain_plan
    from harness.check.small import apply_small, contract_plan
    from harness.loop.prepare import make_plan

    recipe = "recipe" in typed
    position_typed = recipe or any(key.partition(".")[0] == "position" for key in typed)
    job = HydraConfig.get()
    loader = GlobalHydra.instance().config_loader()
    positions = [job.runtime.choices.position]
    if not position_typed:
        positions = loader.get_group_options("position", overrides=list(job.overrides.hydra))
    caches = [cfg.model.cache] if recipe or "model.cache" in typed else ["kv", "hidden"]
    compose_cached = functools.cache(  # because composing takes a tenth of a check's time
        lambda position: recompose("check", *([] if position_typed else [f"position={position}"]))
    )
    attend = [cfg.model.attend_self] if recipe or "model.attend_self" in typed else [True, False]
    choices = itertools.product(*map(enumerate, (positions, caches, attend)))
    accepted = []
    refusals = []
    for (i, position), (j, cache), (k, attend_self) in choices:
        try:
            config = copy.deepcopy(compose_cached(position))
            config.model.cache = cache
            config.model.attend_self = attend_self
            pop_keys(config, *COMMAND_KEYS)
            plan = contract_plan(make_plan(config), named_kind(cfg.runtime.device))
            plan = apply_small(plan, command_line_keys=typed)
            backend = fast_backend(plan)
        except MISTAKES as error:
            refusals.append(error)
            continue
        attends = f"attend_self={str(attend_self).lower()}"
        name = f"{position}, {cache}, {attends}"
        words = (f"position={position}", f"model.cache={cache}", f"model.{attends}")
        accepted.append(Combination(f"{name}, {backend or 'plain'}", words, plan))
        if backend and plan.runtime.backend == "auto" and (i + j + k) % 2 == 0:
            accepted.append(Combination(f"{name}, plain", words, plain_plan(plan)))
    return accepted, refusals


def run_size_plan(words: Sequence[str]):
    """Return the plan of ``train.py`` with the typed overrides. If the mechanism refuses these,
    ``words`` are added to them."""
    try:
        return _training_plan()
    except MISTAKES:
        return _training_plan(*words)


def _training_plan(*words: str):
    """Return the plan of ``train.py`` with the typed overrides, followed by ``words``."""
    from bench.planning import recompose
    from harness.loop.prepare import make_plan

    return make_plan(recompose("train", *words, drop=COMMAND_KEYS))


def compare_with_float64() -> object:
    """Return a Finding of whether the device, in float32, agrees with plain PyTorch in float64 on a
    CPU. In bfloat16 some activations change sign and some scores their order, so numbers only have
    to be finite; but ``with_backend`` compares a GPU's attention backend, uncompiled, in the run's
    precision."""
    import torch

    from harness.check.select_backend import SEGMENTS, TOLERANCE, agreement, with_backend
    from harness.check.small import reduce_depth
    from harness.device.torch_settings import configure_torch
    from variants.conformance import Finding

    plan = _training_plan("model.dropout=0.0")  # because the device draws other dropout masks
    names = {name for layer in plan.layers for name in layer}
    small = reduce_depth(plan, sublayers=names, max_span=sum(SEGMENTS) // 2)
    device_runtime = configure_torch(plan.runtime)
    try:
        small = with_backend(replace(small, runtime=plan.runtime), device_runtime)
    except ValueError as error:
        return Finding("agrees with float64", False, str(error))
    with torch.random.fork_rng(devices=[]):
        backends = {
            s.backend(device_runtime.device, training=True)
            for _, s in small.make_model().sublayers()
        }
    passed, detail = agreement(
        small, replace(device_runtime, precision="float32"), tolerance=TOLERANCE
    )
    if passed and device_runtime.precision != "float32":
        passed, finite = agreement(small, device_runtime, tolerance=math.inf)
        detail += f", {device_runtime.precision} is {'finite' if passed else finite}"
    promise = f"agrees with float64 on {device_runtime.device}, {'+'.join(sorted(backends))}"
    return Finding(f"{promise}, float32", passed, detail)


@functools.wraps(main)
def command() -> None:
    """Run ``main``. If no job of a sweep fails and ``BROKEN`` has a name, the exit code is 1."""
    try:
        main()
    except SystemExit as exit:  # also the end of a sweep without errors, whose code is 0
        if exit.code or not BROKEN:
            raise
    if BROKEN:
        sys.exit(1)


if __name__ == "__main__":
    run_command(command)
