"""FLOPs that a training step needs: compared with loops over pairs and with executed FLOPs, and
charged to a run."""

import math
from itertools import pairwise

import pytest
import torch

from harness.count.flops import count_flops
from harness.model import LanguageModel
from tests.support.attention_case import DOUBLE, B, Case, D, covering_array
from tests.support.promises import Gate
from tests.support.small_configs import TINY, plan
from tests.support.small_runs import make_trainer, temporary_cwd  # noqa: F401 - a fixture
from variants.contract import LayerContext, NeededFlops, Sublayer
from variants.feed_forward import FeedForward
from variants.kernels.window import soft_mask
from variants.position import Rotary
from variants.product_key_memory import ProductKeyMemory

CASES = {
    "length": [1, 7],
    "past": [0, 3, 20],
    "span": [1, 8],
    "position": ["rotary", "relative"],
    "cache": ["kv", "hidden"],
    "attend_self": [True, False],
    "spans": ["fixed", "fractional", "zero", "dynamic"],
    "persistent": [0, 3],
    "kv_heads": [None, 1],
    "key_shift": [False, True],
    "parts": ["", "gate sink", "key_bias"],
}


def visible_distances(attention, head: int) -> list[int]:
    """Return distances at which the mask gives a key a weight above 0."""
    span = attention.span
    if (z := span(torch.zeros(1, 1, D, dtype=DOUBLE))) is None:
        return list(range(span.span))
    # dynamic spans are those of zero inputs
    mask = soft_mask(z.flatten()[head], span.ramp, span.span)
    return [x for x, weight in enumerate(mask.tolist()) if weight > 0]


def by_loops(attention, *, segment: int, carried: int, relative: bool) -> tuple[int, int]:
    """Return the forward and backward FLOPs of a segment, counted product by product. Key 0 is the
    first key of the segment."""
    width, hidden = attention.d_head, attention.cache == "hidden"
    forward = backward = 0
    for name in (*attention.maps, "output"):
        size = getattr(attention, name).weight.numel()
        forward, backward = forward + segment * 2 * size, backward + segment * (2 * size + 2 * size)
    if hasattr(attention.span, "gate"):
        gate = segment * 2 * attention.span.gate.weight.numel()
        forward, backward = forward + gate, backward + 2 * gate
    bias_flops = 0 if attention.key_bias is None else 2 * D  # for each head and byte
    forward += segment * attention.heads * bias_flops
    backward += 2 * segment * attention.heads * bias_flops
    past_keys, past_values = set(), set()
    for head in range(attention.heads):
        distances = visible_distances(attention, head)
        for t in range(segment):
            for x in distances:
                key = t - attention.shift - x
                if key < -carried:
                    continue
                forward += 2 * width + 2 * width  # score, weighted value
                backward += 2 * width + 2 * width  # gradients of the attention weight and the query
                if key >= 0 or hidden:
                    backward += 2 * width + 2 * width  # gradients of the key and the value
                if relative:  # gradients of the position vector and of the query
                    forward, backward = forward + 2 * width, backward + 2 * width + 2 * width
                shared = head * attention.kv_heads // attention.heads
                past_values |= {(shared, key)} if key < 0 else set()
                mixed = range(max(-carried, key - 1) if attention.key_shift else key, key + 1)
                past_keys |= {(shared, at) for at in mixed if at < 0}
            if attention.persistent is not None:
                for _ in range(attention.persistent.number):
                    forward, backward = forward + 4 * width, backward + 8 * width
    if hidden:  # past inputs are projected again, and the matrices have gradients
        projections = (len(past_keys) + len(past_values)) * 2 * D * width
        projections += len(past_values) * bias_flops * attention.heads // attention.kv_heads
        forward, backward = forward + projections, backward + projections
    return forward, backward


@pytest.mark.parametrize(
    "sizes", covering_array(CASES, strength=2), ids=lambda row: "-".join(map(str, row.values()))
)
def test_needed_flops_of_attention_equal_those_of_loops(sizes):
    attention = Case(**sizes).build()
    needed = attention.needed_flops(sizes["length"], carried=sizes["past"])
    lengths = {"segment": sizes["length"], "carried": sizes["past"]}
    forward, backward = by_loops(attention, relative=sizes["position"] == "relative", **lengths)
    assert needed.forward * sizes["length"] == pytest.approx(forward, rel=1e-12)
    assert needed.backward * sizes["length"] == pytest.approx(backward, rel=1e-12)
    for carried in (sizes["span"] + 1, 10**6):  # a full past
        if sizes["cache"] == "kv":
            assert attention.needed_flops(1, carried=carried).forward == pytest.approx(
                attention.ideal_flops(), abs=0.5
            )


def executed(sublayer: Sublayer, x: torch.Tensor, state=None, start=None) -> tuple[int, int]:
    """Return the executed forward and backward FLOPs per byte of a sublayer whose input has a
    gradient."""
    forward = count_flops(lambda: sublayer(x, state, start)).total
    total = count_flops(lambda: sublayer(x, state, start).y.sum().backward(), gradients=True).total
    return forward / x[..., 0].numel(), (total - forward) / x[..., 0].numel()


def test_needed_flops_of_sublayers_without_a_past_equal_the_executed_ones():
    context = LayerContext(d_model=D, layer=0, n_layers=1, heads=1, span=4, scheme=Rotary)
    x = torch.randn(B, 3, D, requires_grad=True)
    for activation in ("relu", "swiglu"):
        block = FeedForward(context, hidden=7, activation=activation, bias=True, zero_init=False)
        assert executed(block, x) == block.needed_flops(3, carried=5)
    sizes = {
        "half_keys": 6,
        "heads": 2,
        "d_query": 4,
        "query_norm": "none",
        "share": "layer",
        "sparse": False,
    }
    # all half-keys may be selected
    memory = ProductKeyMemory(context, top_k=6, activation="relu", **sizes)
    forward, backward = executed(memory, x)
    # additions of gradients to rows of scores and of the table are not needed FLOPs
    additions = 3 * 2 * 6
    assert (forward, backward - additions) == memory.needed_flops(3, carried=0)
    few = ProductKeyMemory(context, top_k=2, activation="relu", **sizes).needed_flops(3, carried=0)
    assert few.forward == 2 * 2 * (D * 4 + 6 * 4 + 2 * D)
    assert few.backward == 2 * 2 * 2 * (D * 4 + 2 * 4 + 2 * D)  # two selected half-keys of each set


def test_a_sublayer_without_needed_flops_is_charged_three_forwards_and_named():
    context = LayerContext(d_model=D, layer=0, n_layers=1, heads=1, span=4, scheme=Rotary)
    model = LanguageModel([{"first": Gate, "second": Gate}], lambda layer: context, vocabulary=11)
    assert model.flops_estimated_3x() == ["layers.0.first", "layers.0.second"]
    forward = model.ideal_flops()
    assert model.needed_flops(7, carried=3) == NeededFlops(forward, 2 * forward)
    assert plan(*TINY).make_model().flops_estimated_3x() == []


def charged(run) -> list[int]:
    """Return FLOPs charged for each of the first eight steps of a run."""
    spent = [0]
    for _ in range(8):
        run.step()
        spent.append(run.state.spent.flops)
    return [after - before for before, after in pairwise(spent)]


def test_segments_without_a_carried_state_are_charged_for_their_visible_keys():
    layers, width, span, vocabulary = 2, 16, 16, 256
    # projections, feed-forward, head
    products = 2 * 12 * width**2 * layers + 2 * width * vocabulary
    step = 3 * 64 * (products + layers * 4 * width * (span + 1) / 2)
    trainer = make_trainer("variant=mhsa", f"budget.flops={7.2 * step}")
    assert charged(trainer) == [step] * 8 and trainer.finished
    assert math.ceil(7.2 * step / (3 * 64 * trainer.model.ideal_flops())) == 7, (
        "charged with a full past: 7 steps"
    )
