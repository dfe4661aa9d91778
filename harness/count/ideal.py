"""Compare the ideal FLOPs that sublayers declare with the executed ones. The ideal FLOPs of the
model must be at most the executed ones. Those of each sublayer must be at least half of the
executed ones, unless it declares the limit ``ideal_flops``."""

from collections import deque
from collections.abc import Generator
from contextlib import ExitStack
from functools import partial

from torch import Tensor

from harness.count.flops import count_flops, forward_flops_per_byte
from harness.model import LanguageModel
from variants.contract import Sublayer

MIN_RATIO = 0.5
LIMIT = "ideal_flops"
PROMISE = "ideal FLOPs are at most the executed ones, and at least half"


def compare_ideal(
    model: LanguageModel, *, span: int, segment: int | None = None, text: Tensor | None = None
) -> Generator[str, None, str]:
    """Yield a line for each broken requirement, and return a line that describes the comparison.
    FLOPs are counted in evaluation mode after a full past, on segments of ``segment`` bytes, by
    default twice ``span``. ``text`` is that of ``forward_flops_per_byte``. A kernel multiplies
    whole vectors, which a short block of keys hardly fills, so the lower bound is half of what it
    or plain PyTorch executes, whichever is less."""
    segment = segment or 2 * span
    sublayers = dict(model.eval().sublayers())
    # in the longest period
    n_segments = -(-max((s.period for s in sublayers.values()), default=1) // segment)
    # of the counted segments, which are the last ones
    calls = {name: deque(maxlen=n_segments) for name in sublayers}

    def record_call(name: str, module: Sublayer, args: tuple, keywords: dict) -> None:
        calls[name].append(partial(module, *args, **keywords))

    def executed_by(name: str) -> float:
        return sum(count_flops(call).total for call in calls[name]) / (n_segments * segment)

    with ExitStack() as hooks:
        for name, sublayer in sublayers.items():
            hooks.enter_context(
                sublayer.register_forward_pre_hook(partial(record_call, name), with_kwargs=True)
            )
        counted = forward_flops_per_byte(model, segment=segment, max_bytes=16 * span, text=text)
        executed = counted.per_byte
    ideal = model.ideal_flops()
    comparison = [
        f"eval, {segment} bytes after a full past: {ideal:,} ideal, {executed:,.0f} executed per "
        "byte"
    ]
    if ideal > executed:
        yield comparison[0]
    for name, sublayer in sublayers.items():
        sublayer_flops = executed_by(name)
        if sublayer.ideal_flops() < MIN_RATIO * sublayer_flops:
            sublayer.wanted_backend = "plain"
            sublayer_flops = min(sublayer_flops, executed_by(name))
        ratio = 1.0
        if sublayer_flops:
            ratio = sublayer.ideal_flops() / sublayer_flops
        line = f"{name}: ideal is {ratio:.2g} of {sublayer_flops:,.0f} executed per byte"
        if ratio < MIN_RATIO and LIMIT not in sublayer.limits:
            yield (
                f"{line}; must be at least {MIN_RATIO}, or the sublayer must declare the limit "
                f"{LIMIT}"
            )
        elif ratio < MIN_RATIO:
            comparison.append(line)
        needed = sublayer.needed_flops(sublayer.period, carried=max(segment, 2 * span))
        if needed and (
            needed.forward < sublayer.ideal_flops() - 1 or needed.backward < needed.forward
        ):
            yield (
                f"{name}: {needed}; must be at least the ideal FLOPs forward, and no less backward"
            )
    return "; ".join(comparison)


def ideal_excuses(model: LanguageModel) -> list[str]:
    """Return for a run's row, a line for each sublayer that declares the limit ``ideal_flops``."""
    return [
        f"{name}: ideal FLOPs may be less than half of the executed ones"
        for name, sublayer in model.sublayers()
        if LIMIT in sublayer.limits
    ]
