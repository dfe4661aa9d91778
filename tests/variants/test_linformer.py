"""Linformer: equality with windowed attention, changing spans, initial weights, selection of
summaries and metrics."""

import pytest
import torch

from tests.support.attention_case import (
    Case,
    D,
    assert_near,
    assert_outcome,
    gradients,
    outcome,
    run,
    starts,
)
from variants.blocks import top_mask
from variants.linformer import Linformer

BACKENDS = pytest.mark.parametrize(
    "backend", ["plain", pytest.param("kernel", marks=pytest.mark.cpu_kernel)]
)
numeric = pytest.mark.numeric
# Number of summaries that query t sees, for the default sizes of ``build``.
N_VISIBLE = [len([j for j in range(t // 3) if 4 <= t - 3 * j < 13]) for t in range(30)]


def build(*, noise: float = 0.3, **choices) -> Linformer:
    case, sizes = Case.split({"span": 13, "heads": 2, "ratio": 3, "window": 4} | choices)
    return case.build(Linformer, noise=noise, **sizes)


@numeric
@BACKENDS
def test_without_summaries_it_equals_windowed_attention_and_the_span_may_change_between_segments(
    backend,
):
    sublayer, x = build(position="rotary", backend=backend), Case(length=30).joined()
    attention = Case(heads=2, span=4, position="rotary").build()
    attention.load_state_dict(sublayer.state_dict(), strict=False)
    wide = sublayer(x[:, :20], None, starts(0))
    sublayer.set_span(4)
    expected = attention(x, None, starts(0)).y
    assert_near(sublayer(x, None, starts(0)).y, expected)
    narrow = sublayer(x[:, 20:25], wide.state, starts(20))
    assert_near(narrow.y, expected[:, 20:25])
    sublayer.set_span(13)  # earlier summaries are lost, and later ones are computed
    continued = sublayer(x[:, 25:], narrow.state, starts(25)).y
    # byte 25 sees bytes 22 to 25 and block 7: bytes 21 to 23
    fresh = sublayer(x[:, 21:], None, starts(21)).y
    assert_near(continued[:, :1], fresh[:, 4:5])
    sublayer.set_span(2)  # less than a block of 3, so that there are no summaries
    attention.set_span(2)
    first = sublayer(x[:, :1], None, starts(0))
    second = sublayer(x[:, 1:2], first.state, starts(1))
    assert_near(torch.cat([first.y, second.y], dim=1), attention(x[:, :2], None, starts(0)).y)
    with pytest.raises(ValueError, match=r"eval\.span=0: allowed are 1 to"):
        sublayer.set_span(0)


@numeric
@BACKENDS
def test_an_index_that_selects_all_summaries_changes_no_output_and_only_its_loss_trains_it(backend):
    sizes = {"position": "relative", "compressor": "softmax", "backend": backend, "d_index": 3}
    sublayer, without_index = (build(top_k=top_k, **sizes) for top_k in (9, None))
    without_index.load_state_dict(sublayer.state_dict(), strict=False)
    past, x = Case(length=11, past=19).stream()
    expected = outcome(
        run(without_index, x, past), dict(without_index.named_parameters()) | {"x": x}
    )
    parameters = dict(sublayer.named_parameters())
    index = [parameters.pop(f"index_{name}.weight") for name in ("query", "key")]
    first = sublayer(past, None, starts(0))
    out = sublayer(x, first.state, starts(19))
    assert_outcome(outcome(out.y, parameters | {"x": x}), expected)
    assert not any(g.any() for g in gradients(out.y, index))
    for loss in (first.loss, out.loss):
        assert all(g.any() for g in gradients(loss, index))
        assert not any(g.any() for g in gradients(loss, [*parameters.values(), x]))
    assert sublayer(past[:, :1]).loss == 0, "no query sees a summary"
    assert sublayer.eval()(past).loss is None


def test_needed_flops_exclude_gradients_of_the_inputs_of_the_index_and_of_unread_summaries():
    needed, dense = (
        build(position="relative", top_k=k, d_index=3).needed_flops(30, carried=0)
        for k in (2, None)
    )
    projections, scores = 2 * 3 * (30 * D + 10 * 4), 2 * 3 * sum(N_VISIBLE)
    unread = 2 * 4 * sum(max(0, n - 2) for n in N_VISIBLE)  # one product for each unread summary
    # With an index, the forward needs no product with an unread value. The backward needs neither
    # of the two gradients of an unread summary's three products: with its key, its value and the
    # vector of its distance.
    assert needed.forward * 30 == pytest.approx(dense.forward * 30 + projections + scores - unread)
    assert needed.backward * 30 == pytest.approx(
        dense.backward * 30 + projections + 2 * scores - 2 * 3 * unread
    )


@numeric
def test_every_compressor_starts_as_the_mean_and_its_weights_are_shared_as_configured():
    x, sizes = Case(length=30).joined(), {"ratio": 4, "position": "rotary", "noise": 0.0}
    mean = build(compressor="mean", **sizes)
    shapes = {"none": (2, 2, 4), "heads": (2, 1, 4), "key_value": (1, 1, 4), "layers": (1, 1, 4)}
    for compressor, share in [("softmax", "none"), *(("linear", share) for share in shapes)]:
        learned = build(compressor=compressor, share=share, **sizes)
        learned.load_state_dict(mean.state_dict(), strict=False)
        assert_near(learned(x).y, mean(x).y)
        if compressor == "linear":
            context = Case(span=13, heads=2).context(pool={})
            first, second = (
                Linformer(context, ratio=4, window=4, share=share, d_head=2) for _ in range(2)
            )
            assert first.compressor.places.shape == shapes[share]
            assert (first.compressor.places is second.compressor.places) == (share == "layers")


@pytest.mark.parametrize("number", [1, 3, 9])
def test_of_summaries_with_equal_scores_the_first_are_selected(number):
    scores = torch.randn(200, 9, generator=torch.Generator().manual_seed(number)).round()
    scores[:50, 4], scores[50:100, :7] = -torch.inf, -torch.inf
    first = scores.sort(dim=-1, descending=True, stable=True).indices[:, :number]
    assert torch.equal(
        top_mask(scores, number), torch.zeros(200, 9, dtype=torch.bool).scatter(-1, first, True)
    )
    scores[:, 5] = torch.nan
    assert top_mask(scores, number)[:, 5].all(), (
        "a score of NaN must be selected, so that it is noticed"
    )


@BACKENDS
def test_summary_mass_is_the_mean_attention_to_summaries(backend):
    sublayer, x = build(backend=backend), Case(length=30).joined()
    torch.nn.init.zeros_(sublayer.query.weight)  # equal attention to all keys
    first = sublayer(x[:, :11], collect_stats=True)
    second = sublayer(x[:, 11:], first.state, collect_stats=True)
    stats = {name: first.stats[name] + second.stats[name] for name in first.stats}
    expected = sum(n / (n + min(t + 1, 4)) for t, n in enumerate(N_VISIBLE)) / 30
    assert sublayer.metrics(stats)["summary_mass"].tolist() == pytest.approx([expected] * 2)
    assert sublayer.metrics({}) == {}


def test_on_a_gpu_the_plain_backend_is_the_only_one():
    assert build().backends(torch.device("cuda"), training=False) == ("plain",)
