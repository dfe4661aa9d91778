"""The meters of FLOPs and memory against closed forms and known allocations."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.count import memory
from harness.count.flops import count_flops, forward_flops_per_byte
from harness.count.memory import (
    PeakMemory,
    gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
    state_bytes,
    tensor_bytes,
)
from harness.device import allocator
from harness.model import LanguageModel
from variants.adaptive_span import AdaptiveSpan, DynamicSpan
from variants.all_attention import PersistentKV
from variants.attention import Attention
from variants.contract import LayerContext, Sublayer, SublayerOutput
from variants.feed_forward import FeedForward
from variants.kernels import fused
from variants.kernels.window import Window
from variants.local import LocalAttention
from variants.position import Relative, Rotary
from variants.product_key_memory import ProductKeyMemory

D, H, K, V, HIDDEN, VECTORS = 16, 4, 4, 32, 24, 5
MIB = 2**20


def feed_forward(place: LayerContext) -> FeedForward:
    return FeedForward(place, hidden=HIDDEN, activation="relu", bias=True, zero_init=False)


def memory_table(place: LayerContext, *, sparse: bool = False) -> ProductKeyMemory:
    sizes = {"half_keys": 8, "top_k": 4, "heads": 2, "d_query": 6}
    choices = {"query_norm": "layer", "activation": "softmax", "share": "layer", "sparse": sparse}
    return ProductKeyMemory(place, **sizes, **choices)


def build(
    *makers, span: int = 24, backend: str = "auto", shift: int = 0, cache: str = "kv", scheme=Rotary
) -> LanguageModel:
    """One layer with a sublayer from each of ``makers``."""
    torch.manual_seed(0)
    common = {"heads": H, "span": span, "attend_self": not shift, "backend": backend, "cache": cache, "scheme": scheme}
    layer = {f"part{i}": make for i, make in enumerate(makers)}
    return LanguageModel([layer], lambda i: LayerContext(d_model=D, layer=i, n_layers=1, **common), vocabulary=V)


def spread_spans(model: LanguageModel, fractions: list[float]) -> None:
    """Heads with different learned spans."""
    for _, sublayer in model.sublayers():
        sublayer.span.fraction.data = torch.tensor(fractions)
    model.project_()


def per_byte(model: LanguageModel, segment: int) -> float:
    flops = forward_flops_per_byte(model, segment=segment, most_bytes=1000)
    assert flops.warm
    return flops.per_byte


HEAD = 2 * D * V
PROJECTIONS = 4 * 2 * D * D


def test_a_block_longer_than_a_segment_is_counted_whole():
    """Four queries at a time meet 4, 8 and 12 keys of their block."""
    model = build(partial(LocalAttention, block=12), span=12, backend="plain")
    assert per_byte(model, 4) == HEAD + PROJECTIONS + 4 * D * 8 >= model.ideal_flops()


def band(segment: int, columns: int, chunk: int) -> int:
    """FLOPs of one head that meets, ``chunk`` queries at a time, the keys that any of them sees."""
    rows = [min(chunk, segment - begin) for begin in range(0, segment, chunk)]
    return sum(4 * r * (columns - 1 + r) * K for r in rows)


def test_matrix_products():
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    linear = nn.Linear(4, 7)
    assert count_flops(lambda: a @ b).total == 2 * 2 * 3 * 4 * 5
    assert count_flops(lambda: linear(a)).total == 2 * (2 * 3) * 4 * 7
    assert count_flops(lambda: linear(a[:1, :1])).total == 2 * 4 * 7


@pytest.mark.parametrize("causal, pairs", [(False, 6 * 6), (True, 21)])
def test_attention_on_a_cpu(causal, pairs):
    q, k, v = torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 8)
    flops = count_flops(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    assert flops[:2] == (4 * 2 * 3 * pairs * 8, {})


def test_attention_backward_on_a_cpu():
    q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))

    def step():
        with torch.enable_grad():
            F.scaled_dot_product_attention(q, k, v).sum().backward()

    assert count_flops(step).total == (4 + 10) * 2 * 3 * 5 * 7 * 8  # two products forward, five backward


def test_the_fused_path_counts_the_rectangles_that_it_executes():
    # One head sees 40 keys, the others 100: groups, chunks of 40 and 100 queries, 130 rows with 99 keys of past.
    rows, past = 130, 99
    q, k, v = torch.randn(2, 3, rows, K), torch.randn(2, 3, rows + past, K), torch.randn(2, 3, rows + past, K)
    flops = count_flops(lambda: fused.attend(q, k, v, Window((40, 100, 100))))
    assert flops.total == 2 * (band(rows, 40, 40) + 2 * band(rows, 100, 100))


@pytest.mark.parametrize("weights, per_number", [(torch.ones(3, 4), 2), (None, 1)])
@pytest.mark.parametrize("learned", [False, True])  # another operation where a gradient is wanted
def test_reads_of_a_table(weights, per_number, learned):
    table, rows = torch.randn(9, 5, requires_grad=learned), torch.randint(9, (3, 4))

    def read():
        with torch.set_grad_enabled(learned):
            F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights)

    assert count_flops(read)[:2] == (per_number * 12 * 5, {})


def test_operations_without_a_formula_are_named():
    x, at = torch.randn(3, 4), torch.zeros(3, 4, dtype=torch.int64)

    def call():
        assert not torch.is_grad_enabled()
        y = x.softmax(-1).T.contiguous().clone().view(4, 3).double().float()  # one operation, views and copies
        y = torch.cat([y, torch.zeros(4, 3)]).mul(2).mul_(3).exp()
        return y.topk(2), x.gather(1, at), x.index_select(1, at[0]), x[at[0, :1]], x @ x.T

    flops = count_flops(call)
    assert flops.total == 2 * 3 * 4 * 3
    assert list(flops.unknown.items()) == [
        ("mul", 2),
        ("_softmax", 1),
        ("exp", 1),
        ("topk", 1),
    ]


@pytest.mark.parametrize(
    "call, total",
    [
        (lambda x: x.cumsum(-1), 3 * 4),  # lines of five
        (lambda x: x.cummax(0), 2 * 5),  # lines of three
        (lambda x: x.sort(), 3 * 5 * 3),  # three levels merge up to eight
        (lambda x: x.argsort(dim=0, stable=True), 5 * 3 * 2),
        (lambda x: x[:, :1].sort(), 0),
        (lambda x: x[:0].cumsum(0), 0),
        (lambda x: x.int().argsort(stable=True), 0),
    ],
)
def test_sorts_and_running_sums_count(call, total):
    x = torch.randn(3, 5)
    assert count_flops(lambda: call(x))[:2] == (total, {})


def test_nothing_is_registered_for_others():
    from torch.utils.flop_counter import FlopCounterMode, flop_registry

    before = dict(flop_registry)
    count_flops(lambda: None)
    assert flop_registry == before
    with FlopCounterMode(display=False, custom_mapping={}) as counter:
        F.embedding_bag(torch.zeros(1, 2, dtype=torch.int64), torch.randn(3, 4), mode="sum")
    assert counter.get_total_flops() == 0


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("segment", [1, 7, 64])
def test_plain_attention_and_feed_forward(segment, shift):
    span = 24
    model = build(Attention, feed_forward, span=span, backend="plain", shift=shift)
    keys = segment + span - 1 + shift  # every query meets all of them, seen or not
    expected = HEAD + PROJECTIONS + 4 * H * keys * K + 2 * 2 * D * HIDDEN
    assert per_byte(model, segment) == expected


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("segment", [1, 7, 100])
def test_fused_attention(segment, shift):
    model = build(Attention, span=40, backend="fused", shift=shift)
    expected = HEAD + PROJECTIONS + H * band(segment, 40, 40) / segment
    assert per_byte(model, segment) == pytest.approx(expected, rel=1e-12)


def test_fused_attention_goes_by_each_heads_span():
    model = build(partial(Attention, span=partial(AdaptiveSpan, ramp=8)), span=200, backend="fused")
    spread_spans(model, [0.0, 0.25, 0.5, 1.0])  # 9, 59, 109 and 200 keys, in buckets of 64, 64, 128 and 200
    heads = [band(150, 64, 64), band(150, 64, 64), band(150, 128, 128), band(150, 200, 128)]
    assert per_byte(model, 150) == pytest.approx(HEAD + PROJECTIONS + sum(heads) / 150, rel=1e-12)


@pytest.mark.parametrize("backend", ["plain", "fused"])
def test_persistent_vectors(backend):
    model = build(partial(Attention, persistent=partial(PersistentKV, number=VECTORS)), backend=backend)
    without = per_byte(build(Attention, backend=backend), 7)
    assert per_byte(model, 7) == pytest.approx(without + 4 * H * VECTORS * K, rel=1e-12)


def test_product_key_memory():
    half_keys, top_k, heads, d_query = 8, 4, 2, 6
    per_head = 2 * D * d_query + 2 * half_keys * d_query + 2 * top_k * D
    flops = forward_flops_per_byte(build(memory_table), segment=7, most_bytes=100)
    assert flops.per_byte == HEAD + heads * per_head
    assert "_softmax" in flops.unknown and flops.unknown.keys() & {"topk", "windtunnel::product_search"}


def test_hidden_cache_projects_the_past_again():
    segment, past = 7, 23
    model = build(Attention, backend="plain", cache="hidden")
    keys = segment + past
    projections = 2 * 2 * D * D * (1 + keys / segment)  # queries and output; keys and values
    assert per_byte(model, segment) == pytest.approx(HEAD + projections + 4 * H * keys * K, rel=1e-12)


SPREAD = [0.0, 0.3, 0.6, 1.0]
KINDS = {
    "fixed": Attention,
    "adaptive": partial(Attention, span=partial(AdaptiveSpan, ramp=8)),
    "dynamic": partial(Attention, span=partial(DynamicSpan, ramp=8)),
    "all_attention": partial(Attention, persistent=partial(PersistentKV, number=VECTORS)),
    "adaptive_all_attention": partial(
        Attention, span=partial(AdaptiveSpan, ramp=8), persistent=partial(PersistentKV, number=VECTORS)
    ),
    "memory": memory_table,
    "feed_forward": feed_forward,
}


@pytest.mark.parametrize("scheme", [Rotary, Relative])
@pytest.mark.parametrize("backend", ["plain", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_mechanism_needs_more_than_is_executed(kind, backend, scheme):
    for span in (20, 100):
        model = build(KINDS[kind], span=span, backend=backend, scheme=scheme, shift=1)
        if kind.startswith("adaptive"):
            spread_spans(model, SPREAD)
        for segment in (1, 7, 64):
            assert model.ideal_flops() <= per_byte(model, segment)


def test_the_run_is_not_disturbed():
    model = build(partial(Attention, span=partial(AdaptiveSpan, ramp=8)), memory_table, feed_forward)
    model.train()
    model.norm.eval()  # one module in another mode than the rest
    modes = [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    drawn = []
    model.head.register_forward_hook(
        lambda *_: drawn.append((torch.rand(()), model.training or torch.is_grad_enabled()))
    )
    forward_flops_per_byte(model, segment=5, most_bytes=100)
    assert drawn and not any(wrong for _, wrong in drawn)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Growing(Sublayer):
    """Keeps everything it has seen."""

    def __init__(self, place: LayerContext):
        super().__init__()

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        state = x if state is None else torch.cat([state, x], dim=1)
        return SublayerOutput(torch.zeros_like(x) + (x @ state.mT).sum(), state)


def test_a_state_that_never_stops_growing_is_not_called_warm():
    flops = forward_flops_per_byte(build(Growing), segment=4, most_bytes=18)
    assert not flops.warm
    assert flops.per_byte == HEAD + 2 * D * (5 * 4 + 4)  # five segments fed, the sixth counted
    assert flops.state_bytes == 8 + 5 * 4 * D * 4


def test_segment_is_checked():
    with pytest.raises(ValueError, match="model.segment=0"):
        forward_flops_per_byte(build(feed_forward), segment=0, most_bytes=10)


def test_bytes_of_tensors():
    a = torch.zeros(3, 4)
    assert tensor_bytes([a, a, torch.zeros(2, dtype=torch.int64), torch.zeros(5, dtype=torch.bfloat16)]) == 48 + 16 + 10
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1, 3]]), torch.ones(3, 7), (1000, 7), check_invariants=True)
    assert tensor_bytes([sparse]) == 3 * 8 + 3 * 7 * 4


def test_bytes_of_a_state_are_per_stream():
    model, span, segment = build(Attention, feed_forward), 24, 9
    for streams in (1, 3):
        state = None
        for _ in range(4):
            state = model(torch.zeros(streams, segment, dtype=torch.int64), state).state
        expected = 8 + 2 * (span - 1) * D * 4  # where the stream is; keys and values
        assert state_bytes(state) == expected
    assert forward_flops_per_byte(model, segment=segment).state_bytes == expected
    assert state_bytes(None) == state_bytes((None, ())) == 0


def test_bytes_of_parameters_gradients_and_optimizers():
    model = build(feed_forward, partial(memory_table, sparse=True))
    model.head.weight = model.embedding.weight  # tied: counted once
    count = sum(p.numel() for p in model.parameters())
    assert parameter_bytes(model) == 4 * count
    assert gradient_bytes(model.parameters()) == 0

    values = next(p for name, p in model.named_parameters() if name.endswith("values"))
    others = [p for p in model.parameters() if p is not values]
    optimizers = [torch.optim.AdamW(others), torch.optim.SparseAdam([values])]
    assert optimizer_bytes(optimizers) == 0
    streams, segment, reads = 2, 3, 2 * 4  # heads times top_k
    model(torch.zeros(streams, segment, dtype=torch.int64)).logits.square().sum().backward()
    read = values.grad._nnz()  # each row once, however often it was read
    assert read == len(values.grad.coalesce().values()) <= streams * segment * reads
    assert gradient_bytes(model.parameters()) == 4 * (count - values.numel()) + read * (8 + 4 * D)

    for optimizer in optimizers:
        optimizer.step()
    assert optimizer_bytes(optimizers) == 2 * 4 * count + 4 * len(others)  # AdamW's step is a tensor


def allocate(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB // 4)


def test_peak_of_a_known_allocation():
    meter = PeakMemory(torch.device("cpu"))
    kept = allocate(50)
    allocate(200)  # freed at once; the peak stays
    peak = meter.read()
    assert peak.approximate
    assert peak.bytes == pytest.approx(250 * MIB, rel=0.1)
    assert meter.read().bytes == pytest.approx(peak.bytes, rel=0.01)
    del kept


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the high-water mark can be lowered on Linux only"
)
def test_reset_forgets_the_peak_and_keeps_the_baseline():
    meter = PeakMemory(torch.device("cpu"))
    kept = allocate(100)
    small = [torch.ones(MIB // 16) for _ in range(800)]  # 200 MiB in blocks that glibc would keep for itself
    last = torch.ones(8)  # above them in the heap, so that its end cannot fall by itself
    del small
    meter.reset()
    assert meter.read().bytes == pytest.approx(100 * MIB, rel=0.1)
    del kept, last


def test_peak_where_the_mark_cannot_be_read_or_lowered(monkeypatch, tmp_path):
    allocator.use("return")  # an earlier test's run may have kept memory, which would be taken first
    memory.lower_high_water()
    for name in ("STATUS", "CLEAR"):
        monkeypatch.setattr(memory, name, tmp_path / "none" / name)
    meter = PeakMemory(torch.device("cpu"))
    allocate(200)
    assert meter.read().bytes == pytest.approx(200 * MIB, rel=0.1)
    meter.reset()
    assert meter.read().bytes == pytest.approx(200 * MIB, rel=0.1)


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="runtime.device=meta"):
        PeakMemory(torch.device("meta"))


@pytest.mark.gpu
def test_on_cuda():
    device = torch.device("cuda")
    meter = PeakMemory(device)
    kept = torch.ones(50 * MIB // 4, device=device)
    torch.ones(200 * MIB // 4, device=device)
    assert meter.read()[:2] == (250 * MIB, False) and meter.read().reserved_bytes >= 250 * MIB
    meter.reset()
    assert meter.read()[:2] == (50 * MIB, False)
    del kept
    model = build(Attention, feed_forward)
    on_cpu = forward_flops_per_byte(build(Attention, feed_forward, backend="plain"), segment=7, most_bytes=1000)
    assert forward_flops_per_byte(model.to(device), segment=7, most_bytes=1000).per_byte == on_cpu.per_byte
