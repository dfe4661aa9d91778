"""How far random features are from what they estimate: ``python -m bench.features position=none``.

The first sublayer of either variant that sees a past gets the same random matrices, and the same random inputs without
state. The error is the root mean square of the difference of their outputs over that of the exact ones. Numbers in
queries and keys are normal, with a standard deviation that is given: that of scores is its square. All of it is in
float32 on the CPU.
"""

from dataclasses import dataclass

import hydra
from omegaconf import DictConfig

from bench import CONF
from harness.compose.cli import run_command


@dataclass(frozen=True, kw_only=True)
class FeaturesSettings:
    """The keys of ``conf/features.yaml``, which says what they mean."""

    exact: str
    keyword: str
    numbers: list
    lengths: list
    scales: list
    draws: int


OWN = tuple(FeaturesSettings.__dataclass_fields__)


@hydra.main(version_base="1.3", config_path=CONF, config_name="features")
def main(cfg: DictConfig) -> None:
    from bench.planning import own_keys  # late, as everything slow, so that a wrong word is answered at once
    from harness.plan.settings import parse
    from harness.record.table import Cell, Column, Table, print_table

    own = parse(FeaturesSettings, own_keys(cfg, *OWN), key="")
    _check(own)
    scheme = cfg.position["_target_"].rpartition(".")[2]
    for scale in own.scales:
        rows = []
        for length in own.lengths:
            found = errors(cfg, own, length=length, scale=scale)
            cells = [Cell(text=f"{error:.3f}", value=error) for error in found]
            rows.append((Cell(text=f"{length:,}", value=length), *cells))
        table = Table(
            name="features",
            title=f"{cfg.variant.name} beside {own.exact}, queries and keys of {scale:g}: error by {own.keyword}",
            caption=f"{scheme}, {cfg.model.heads} heads, width {cfg.model.d_model}, {own.draws} draws",
            columns=tuple(map(Column, ["bytes", *(f"{number:,}" for number in own.numbers)])),
            rows=tuple(rows),
        )
        print_table(table)


def errors(cfg: DictConfig, own: FeaturesSettings, *, length: int, scale: float) -> list[float]:
    """The error with each of ``numbers``, for inputs of ``length`` bytes."""
    from bench.planning import bench_plan, recompose

    same = ("runtime.device=cpu", "runtime.precision=float32", f"model.span={length}")
    beside = recompose("features", *same, f"variant={own.exact}", own=OWN)
    beside.position = cfg.position  # a variant may have a default of its own
    found = []
    for number in own.numbers:
        estimate = bench_plan(recompose("features", *same, f"{own.keyword}={number}", own=OWN))
        sums = [0.0, 0.0]
        for seed in range(own.draws):
            for place, square in enumerate(_squares(estimate, bench_plan(beside), length, scale=scale, seed=seed)):
                sums[place] += square
        found.append((sums[0] / sums[1]) ** 0.5)
    return found


def _squares(estimate, exact, length: int, *, scale: float, seed: int) -> tuple[float, float]:
    """Mean squares of the difference of two plans' outputs, and of the second's."""
    import torch

    torch.manual_seed(seed)
    ours, theirs = (
        next(sublayer for _, sublayer in plan.make_model().eval().sublayers() if sublayer.honours is not None)
        for plan in (estimate, exact)
    )
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        known = dict(ours.named_parameters())
        for name, parameter in theirs.named_parameters():
            parameter.copy_(known[name])
        x = scale * torch.randn(1, length, estimate.model.d_model)
        expected = theirs(x).y
        return (ours(x).y - expected).square().mean().item(), expected.square().mean().item()


def _check(own: FeaturesSettings) -> None:
    """ValueError naming the key of a list that has something else in it."""
    for key in ("numbers", "lengths"):
        found = getattr(own, key)
        if not found or not all(isinstance(n, int) and n > 0 for n in found):
            raise ValueError(f"{key}={found}: must be a list of integers above 0")
    if not own.scales or not all(isinstance(scale, int | float) and scale > 0 for scale in own.scales):
        raise ValueError(f"scales={own.scales}: must be a list of numbers above 0")
    if own.draws < 1:
        raise ValueError(f"draws={own.draws}: must be at least 1")


if __name__ == "__main__":
    run_command(main)
