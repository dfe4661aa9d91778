"""Linformer beyond its reference: what it must equal, which summaries are read, and spans that change."""

from dataclasses import dataclass, replace

import pytest
import torch

from tests.attention_case import Case, D, assert_near, assert_outcome, gradients, outcome, run, starts
from variants.blocks import highest
from variants.kernels import window_cpu
from variants.linformer import Linformer

BACKENDS = pytest.mark.parametrize("backend", ["plain", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])
numeric = pytest.mark.numeric
SEEN = [len([j for j in range(t // 3) if 4 <= t - 3 * j < 13]) for t in range(30)]  # blocks, at the sizes below


@dataclass(frozen=True, kw_only=True)
class Summarised(Case):
    """``Case``, of which the sublayer has summaries."""

    ratio: int = 3
    window: int = 4
    span: int = 13
    heads: int = 2
    compressor: str = "linear"
    share: str = "none"
    top_k: int | None = None
    d_index: int = 3

    def made(self, *, moved: float = 0.3) -> Linformer:
        names = ("ratio", "window", "compressor", "share", "top_k", "d_index")
        return self.build(Linformer, moved=moved, **{name: getattr(self, name) for name in names})

    def window_alone(self, like: Linformer, *, span: int):
        """Attention over ``span`` keys with the same matrices."""
        fields = {name: getattr(self, name) for name in Case.__dataclass_fields__} | {"span": span, "backend": "plain"}
        attention = Case(**fields).build()
        attention.load_state_dict(like.state_dict(), strict=False)
        return attention


@numeric
@BACKENDS
def test_without_summaries_it_is_a_window_and_spans_may_change_between_segments(backend):
    case = Summarised(length=30, position="rotary", backend=backend)
    sublayer, x = case.made(), case.whole()
    wide = sublayer(x[:, :20], None, starts(0))
    sublayer.set_span(4)
    attention = case.window_alone(sublayer, span=4)
    expected = attention(x, None, starts(0)).y
    assert_near(sublayer(x, None, starts(0)).y, expected)
    narrow = sublayer(x[:, 20:25], wide.state, starts(20))
    assert_near(narrow.y, expected[:, 20:25])
    sublayer.set_span(13)  # summaries from before are gone, and those of bytes since are made
    again = sublayer(x[:, 25:], narrow.state, starts(25)).y
    fresh = sublayer(x[:, 21:], None, starts(21)).y  # block 7 began at byte 21; a window of four reaches back to 22
    assert_near(again[:, :1], fresh[:, 4:5])
    sublayer.set_span(2)  # less than a block: a byte alone meets no summary, not even one that it does not see
    attention.set_span(2)
    one = sublayer(x[:, :1], None, starts(0))
    two = sublayer(x[:, 1:2], one.state, starts(1))
    assert_near(torch.cat([one.y, two.y], dim=1), attention(x[:, :2], None, starts(0)).y)
    with pytest.raises(ValueError, match=r"eval\.span=0: allowed are 1 to"):
        sublayer.set_span(0)


@numeric
@BACKENDS
def test_an_index_that_leaves_nothing_out_changes_nothing_and_only_its_loss_moves_it(backend):
    case = Summarised(length=11, past=19, position="relative", top_k=9, compressor="softmax", backend=backend)
    (past, x), sublayer, every = case.stream(), case.made(), replace(case, top_k=None).made()
    every.load_state_dict(sublayer.state_dict(), strict=False)
    shared, own = dict(every.named_parameters()), dict(sublayer.named_parameters())
    index = [own.pop(f"index_{name}.weight") for name in ("query", "key")]
    first = sublayer(past, None, starts(0))
    out = sublayer(x, first.state, starts(19))
    assert_outcome(outcome(out.y, own | {"x": x}), outcome(run(every, x, past), shared | {"x": x}))
    for loss in (first.loss, out.loss):
        assert [g.any().item() for g in gradients(loss, [*index, *own.values(), x])] == [True] * 2 + [False] * (
            len(own) + 1
        )
    assert not any(g.any() for g in gradients(out.y, index))
    assert sublayer(past[:, :1]).loss == 0 and sublayer.eval()(past).loss is None


def test_the_index_is_charged_without_its_inputs_and_its_target_forward_alone():
    case = Summarised(position="relative")
    needed, whole = (replace(case, top_k=k).made().needed_flops(30, carried=0) for k in (2, None))
    maps, scores = 2 * 3 * (30 * D + 10 * 4), 2 * 3 * sum(SEEN)
    fewer = 2 * 4 * sum(max(0, n - 2) for n in SEEN)  # products with values
    assert needed.forward * 30 == pytest.approx(whole.forward * 30 + maps + scores - fewer)
    assert needed.backward * 30 == pytest.approx(whole.backward * 30 + maps + 2 * scores - 2 * 3 * fewer)


@numeric
def test_every_compressor_begins_as_the_mean_and_weights_are_shared_as_asked():
    case = Summarised(length=30, ratio=4, position="rotary")
    mean = replace(case, compressor="mean").made(moved=0.0)
    shapes = {"none": (2, 2, 4), "heads": (2, 1, 4), "key_value": (1, 1, 4), "layers": (1, 1, 4)}
    for compressor, share in [("softmax", "none"), *(("linear", share) for share in shapes)]:
        other = replace(case, compressor=compressor, share=share).made(moved=0.0)
        other.load_state_dict(mean.state_dict(), strict=False)
        assert_near(other(case.whole()).y, mean(case.whole()).y)
        if compressor == "linear":
            context = case.context(pool={})
            first, second = (Linformer(context, ratio=4, window=4, share=share, d_head=2) for _ in range(2))
            assert first.compressor.places.shape == shapes[share]
            assert (first.compressor.places is second.compressor.places) == (share == "layers")


@pytest.mark.parametrize("number", [1, 3, 9])
def test_of_equal_summaries_the_first_are_read(number):
    scores = torch.randn(200, 9, generator=torch.Generator().manual_seed(number)).round()
    scores[:50, 4], scores[50:100, :7] = -torch.inf, -torch.inf
    first = scores.sort(dim=-1, descending=True, stable=True).indices[:, :number]
    assert torch.equal(highest(scores, number), torch.zeros(200, 9, dtype=torch.bool).scatter(-1, first, True))
    scores[:, 5] = torch.nan
    assert highest(scores, number)[:, 5].all()  # so that it shows


@BACKENDS
def test_summary_mass_is_the_share_of_attention(backend):
    case = Summarised(length=30, backend=backend)
    sublayer, x = case.made(), case.whole()
    torch.nn.init.zeros_(sublayer.query.weight)  # all keys alike
    first = sublayer(x[:, :11], collect_stats=True)
    second = sublayer(x[:, 11:], first.state, collect_stats=True)
    stats = {name: first.stats[name] + second.stats[name] for name in first.stats}
    expected = sum(n / (n + min(t + 1, 4)) for t, n in enumerate(SEEN)) / 30
    assert sublayer.metrics(stats)["summary_mass"].tolist() == pytest.approx([expected] * 2)
    assert sublayer.metrics({}) == {}


def test_a_backend_that_cannot_run_is_refused_and_auto_takes_another(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(window_cpu, "available", lambda: None)
    auto, kernel, fused = (Summarised(backend=backend, dropout=0.5).made() for backend in ("auto", "kernel", "fused"))
    assert auto.backend(cpu, training=True) == "plain" and auto.backend(cpu, training=False) == "kernel"
    assert auto.backends(gpu, training=False) == ("plain",)
    for asked, device, training in ((kernel, gpu, False), (kernel, cpu, True), (fused, cpu, False)):
        with pytest.raises(ValueError, match=r"runtime\.backend=\w+ cannot run .*: allowed are auto, (kernel, )?plain"):
            asked.backend(device, training=training)
