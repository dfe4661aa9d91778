"""A mechanism's declared ideal FLOPs against executed ones: no more for the model, not much less for each sublayer."""

from collections import deque
from collections.abc import Generator
from functools import partial

from harness.count.flops import count_flops, forward_flops_per_byte
from harness.model import LanguageModel
from variants.contract import Sublayer

HALF, LIMIT, IDEAL = 0.5, "ideal_flops", "ideal FLOPs are at most the executed ones, and at least half"


def compare_ideal(model: LanguageModel, *, span: int) -> Generator[str, None, str]:
    """A line for each break, then the comparison, in evaluation mode on warm segments of twice ``span`` bytes."""
    segment, sublayers = 2 * span, dict(model.eval().sublayers())
    number = -(-max((s.period for s in sublayers.values()), default=1) // segment)  # segments in the longest block
    calls = {name: deque(maxlen=number) for name in sublayers}

    def keep(name: str, module: Sublayer, args: tuple, keywords: dict) -> None:
        calls[name].append(partial(module, *args, **keywords))

    hooks = [s.register_forward_pre_hook(partial(keep, name), with_kwargs=True) for name, s in sublayers.items()]
    try:
        executed = forward_flops_per_byte(model, segment=segment, most_bytes=16 * span).per_byte
    finally:
        for hook in hooks:
            hook.remove()
    ideal = model.ideal_flops()
    compared = [f"eval, segments of {segment} warm bytes: {ideal:,} ideal, {executed:,.0f} executed per byte"]
    if ideal > executed:
        yield compared[0]
    for name, sublayer in sublayers.items():
        executed_part = sum(count_flops(call).total for call in calls[name]) / (number * segment)
        share = sublayer.ideal_flops() / executed_part if executed_part else 1.0
        line = f"{name}: ideal is {share:.2g} of {executed_part:,.0f} executed per byte"
        if share < HALF and LIMIT not in sublayer.limits:
            yield f"{line}; allowed is {HALF} or more, or less with the limit {LIMIT}"
        elif share < HALF:
            compared.append(line)
    return "; ".join(compared)


def excuses(model: LanguageModel) -> list[str]:
    """Sublayers whose ideal FLOPs may be below half of the executed ones, for a run's row."""
    named = (name for name, sublayer in model.sublayers() if LIMIT in sublayer.limits)
    return [f"{name}: ideal FLOPs may be less than half of the executed ones" for name in named]
