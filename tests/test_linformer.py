"""Linformer: its reference, what it must equal, streams at phases of their own, what is visible when, and what it costs."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.attention_case import DOUBLE, Case, D, assert_near, assert_same, covering, gradients, run, starts
from tests.reference.linformer import linformer as reference
from variants.blocks import highest
from variants.contract import cat_streams
from variants.kernels import window_cpu
from variants.linformer import Linformer

SHAPES = [(3, 4, 13), (4, 2, 11), (1, 3, 8), (2, 5, 9), (5, 1, 12)]
"""r, w and S: windows longer and shorter than a block, and spans that are no multiple of one."""
BACKENDS = ["plain", pytest.param("kernel", marks=pytest.mark.cpu_kernel)]
FACTORS = {
    "shape": SHAPES,
    "compressor": ["mean", "linear", "softmax"],
    "position": ["none", "rotary", "relative", "alibi"],
    "cache": ["kv", "hidden"],
    "attend_self": [True, False],
    "top_k": [None, 1, 2],
    "lengths": [(0, 11), (7, 6), (14, 1), (16, 4)],
}


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

    def build(self, *, moved: bool = True, **changes) -> Linformer:
        torch.manual_seed(0)
        names = ("ratio", "window", "compressor", "share", "top_k", "d_index", "d_head")
        keywords = {name: getattr(self, name) for name in names}
        found = Linformer(self.context(**changes), **keywords).to(DOUBLE)
        with torch.no_grad():
            for parameter in found.parameters() if moved else ():
                parameter.add_(0.3 * torch.randn(parameter.shape, dtype=DOUBLE))
        return found

    def whole(self) -> Tensor:
        """Past and segment, ``[B, past + length, D]``."""
        return torch.cat(self.stream(), dim=1).detach()


@pytest.mark.numeric
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", covering(FACTORS, strength=2), ids=lambda row: "-".join(map(str, row.values())))
def test_it_is_the_reference_in_value_and_every_gradient(row, backend):
    (ratio, window, span), (past, length) = row["shape"], row["lengths"]
    same = {name: row[name] for name in ("compressor", "position", "cache", "attend_self", "top_k")}
    sizes = {"ratio": ratio, "window": window, "span": span}
    case = Summarised(past=past, length=length, backend=backend, **sizes, **same)
    sublayer = case.build()
    old, x = case.stream()
    weights = {name.removesuffix(".weight").removeprefix("compressor."): p for name, p in sublayer.named_parameters()}
    given = weights | {"table": weights.get("position.table")}
    expected = reference(
        x, past=old, weights={n: w for n, w in given.items() if w is not None}, heads=2, **sizes, **same
    )
    assert_same(run(sublayer, x, old), expected, named={"x": x} | weights)


@pytest.mark.numeric
@pytest.mark.parametrize("backend", BACKENDS)
def test_several_chunks_of_queries_are_the_reference(backend):
    sizes, same = {"ratio": 4, "window": 6, "span": 21}, {"compressor": "linear", "position": "rotary", "top_k": None}
    case = Summarised(past=10, length=37, heads=1, backend=backend, **sizes, **same)
    sublayer = case.build()
    old, x = case.stream()
    assert sublayer.blocks.chunks(37) == (2, 32)
    weights = {name.removesuffix(".weight").removeprefix("compressor."): p for name, p in sublayer.named_parameters()}
    same |= {"cache": "kv", "attend_self": True}
    expected = reference(x, past=old, weights=weights, heads=1, **sizes, **same)
    assert_same(run(sublayer, x, old), expected, named={"x": x} | weights)


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("cache", "top_k", "position"), [("kv", None, "rotary"), ("hidden", 1, "alibi"), ("hidden", None, "relative")]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_streams_of_a_batch_may_be_at_any_phase_and_of_any_age(cache, top_k, position, backend):
    case = Summarised(length=60, cache=cache, top_k=top_k, position=position, backend=backend)
    sublayer, x = case.build(), case.whole()[:1]
    ages = [1, 5, 24, 25, 26]
    states = [sublayer(x[:, :age]).state for age in ages]
    start = torch.tensor(ages)
    states, found = cat_streams(states), []
    for length in (1, 20, 4):
        more = torch.cat([x[:, at : at + length] for at in start.tolist()])
        out = sublayer(more, states, start)
        states, start = out.state, start + length
        found.append(out.y)
    whole = sublayer(x).y
    for row, age in zip(torch.cat(found, dim=1), ages, strict=True):
        assert_near(row, whole[0, age : age + 25], tolerance=1e-9)


@pytest.mark.numeric
@pytest.mark.parametrize("compressor", ["mean", "linear", "softmax"])
@pytest.mark.parametrize("position", ["none", "rotary", "relative", "alibi"])
@pytest.mark.parametrize("attend_self", [True, False])
def test_blocks_of_one_byte_are_attention_over_the_span(compressor, position, attend_self):
    case = Summarised(
        length=9, past=17, ratio=1, compressor=compressor, position=position, attend_self=attend_self, d_head=2
    )
    sublayer = case.build(moved=False)
    attention = Case(**{name: getattr(case, name) for name in Case.__dataclass_fields__}).build()
    with torch.no_grad():
        for name in ("query", "key", "value", "output"):
            getattr(attention, name).weight.copy_(getattr(sublayer, name).weight)
        if position == "relative":
            attention.position.table.copy_(sublayer.position.table)
    past, x = case.stream()
    assert_near(run(sublayer, x, past), run(attention, x, past))


@pytest.mark.numeric
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_summaries_it_is_a_window_and_spans_may_change_between_segments(backend):
    case = Summarised(length=30, position="rotary", backend=backend)
    sublayer, x = case.build(), case.whole()
    wide = sublayer(x[:, :20], None, starts(0))
    sublayer.set_span(4)
    attention = Case(length=30, span=4, heads=2, position="rotary").build()
    with torch.no_grad():
        for name in ("query", "key", "value", "output"):
            getattr(attention, name).weight.copy_(getattr(sublayer, name).weight)
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


@pytest.mark.numeric
def test_every_compressor_begins_as_the_mean():
    case = Summarised(length=30, ratio=4, position="rotary")
    mean = replace(case, compressor="mean").build(moved=False)
    for compressor, share in [("softmax", "none"), *(("linear", s) for s in ("none", "heads", "key_value", "layers"))]:
        other = replace(case, compressor=compressor, share=share).build(moved=False)
        other.load_state_dict(mean.state_dict(), strict=False)
        assert_near(other(case.whole()).y, mean(case.whole()).y)


def test_who_shares_weights():
    shapes = {"none": (2, 2, 3), "heads": (2, 1, 3), "key_value": (1, 1, 3), "layers": (1, 1, 3)}
    for share, shape in shapes.items():
        case, pool = Summarised(share=share), {}
        first, second = case.build(pool=pool), case.build(pool=pool)
        assert first.compressor.places.shape == shape
        assert (first.compressor.places is second.compressor.places) == (share == "layers")


@pytest.mark.numeric
def test_a_choice_of_all_by_an_index_of_nothing_is_no_choice_and_the_index_learns():
    case = Summarised(length=30, position="alibi")
    plain, chosen = case.build(), replace(case, top_k=99).build()
    chosen.load_state_dict(plain.state_dict(), strict=False)
    torch.nn.init.zeros_(chosen.index_key.weight)
    assert_near(chosen(case.whole()).y, plain(case.whole()).y)
    few = replace(case, top_k=1).build()
    found = gradients(few(case.whole()).y, [few.index_query.weight, few.index_key.weight])
    assert all(g.abs().max() > 1e-6 for g in found)


@pytest.mark.parametrize("number", [1, 3, 9])
def test_of_equal_summaries_the_first_are_read(number):
    scores = torch.randn(200, 9, generator=torch.Generator().manual_seed(number)).round()
    scores[:50, 4], scores[50:100, :7] = -torch.inf, -torch.inf
    first = scores.sort(dim=-1, descending=True, stable=True).indices[:, :number]
    assert torch.equal(highest(scores, number), torch.zeros(200, 9, dtype=torch.bool).scatter(-1, first, True))
    scores[:, 5] = torch.nan
    assert highest(scores, number)[:, 5].all()  # so that it shows


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"ratio": 0}, r"ratio=0: must be at least 1"),
        ({"window": 0}, r"window=0: must be at least 1"),
        ({"top_k": 0}, r"top_k=0: must be at least 1, or null"),
        ({"d_index": 0}, r"d_index=0"),
        ({"compressor": "max"}, r"compressor=max: allowed are mean, linear, softmax"),
        ({"share": "all"}, r"share=all with compressor=linear: allowed are none, heads, key_value, layers"),
        ({"share": "heads", "compressor": "mean"}, r"share=heads with compressor=mean: allowed are none"),
        ({"span": 4}, r"model\.span=4: must be above window=4 and ratio=3"),
        ({"ratio": 13}, r"model\.span=13: must be above .* ratio=13"),
        ({"d_head": None, "heads": 3}, r"model\.heads=3 must divide model\.d_model=5"),
        ({"d_head": 0}, r"d_head=0: must be at least 1"),
        ({"backend": "fused"}, r"runtime\.backend=fused cannot run Linformer: allowed are auto, kernel, plain"),
    ],
)
def test_what_is_refused(keywords, message):
    with pytest.raises(ValueError, match=message):
        Summarised(**keywords).build()


@pytest.mark.parametrize("backend", BACKENDS)
def test_summary_mass_is_the_share_of_attention(backend):
    case = Summarised(length=30, backend=backend)
    sublayer, x = case.build(), case.whole()
    torch.nn.init.zeros_(sublayer.query.weight)  # all keys alike
    first = sublayer(x[:, :11], collect_stats=True)
    second = sublayer(x[:, 11:], first.state, collect_stats=True)
    stats = {name: first.stats[name] + second.stats[name] for name in first.stats}
    blocks = [len([j for j in range(t // 3) if 4 <= t - 3 * j < 13]) for t in range(30)]
    expected = sum(n / (n + min(t + 1, 4)) for t, n in enumerate(blocks)) / 30
    assert sublayer.metrics(stats)["summary_mass"].tolist() == pytest.approx([expected] * 2)
    assert sublayer.metrics({}) == {}


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("compressor", ["mean", "linear", "softmax"])
def test_flops_by_hand(compressor, top_k):
    sublayer = Summarised(length=45, compressor=compressor, top_k=top_k).build()
    pooling = {"mean": 0, "linear": 4, "softmax": 6}[compressor] * 2 * 2
    matrices = 4 * 2 * D * 4 + (2 * D * 3 + 2 * 4 * 3 // 3 if top_k else 0)  # keys of the index once a block
    index, read = (2 * 3 * 3, 2) if top_k else (0, 3)  # S - w = 9 bytes are three blocks at every phase
    assert sublayer.ideal_flops() == matrices + pooling + index + 2 * 4 * 2 * (4 + read)
    cold = sublayer.needed_flops(30, carried=0)
    seen = [len([j for j in range(t // 3) if 4 <= t - 3 * j < 13]) for t in range(30)]
    keys = sum(min(t + 1, 4) + (min(n, top_k) if top_k else n) for t, n in enumerate(seen)) / 30
    assert cold.forward == pytest.approx(matrices + pooling + 2 * 4 * 2 * keys + (sum(seen) / 30 * 6 if top_k else 0))
    assert cold.backward == pytest.approx(2 * cold.forward)


def test_a_backend_that_cannot_run_is_refused_and_auto_takes_another(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(window_cpu, "available", lambda: None)
    auto, asked = (Summarised(backend=backend, dropout=0.5).build() for backend in ("auto", "kernel"))
    assert auto.backend(cpu, training=True) == "plain" and auto.backend(cpu, training=False) == "kernel"
    assert auto.backends(gpu, training=False) == ("plain",)
    for device, training in ((gpu, False), (cpu, True)):
        with pytest.raises(ValueError, match=r"runtime\.backend=kernel cannot run .*: allowed are auto, plain"):
            asked.backend(device, training=training)
