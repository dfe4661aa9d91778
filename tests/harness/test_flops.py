"""The FLOP counter, compared with numbers worked out by hand: single operations, our kernels,
and models."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from harness.count.flops import count_flops, forward_flops_per_byte
from harness.model import LanguageModel
from variants.adaptive_span import AdaptiveSpan
from variants.attention import Attention
from variants.contract import LayerContext, Sublayer, SublayerOutput
from variants.feed_forward import FeedForward
from variants.kernels import window_cpu
from variants.kernels.window import PastKV, Window
from variants.position import Rotary
from variants.product_key_memory import ProductKeyMemory

aten = torch.ops.aten


def queries_keys_values(rows: int, keys: int, **choices) -> list[Tensor]:
    """Return queries, keys and values of 2 streams and 3 heads of width 8."""
    return [torch.randn(2, 3, length, 8, **choices) for length in (rows, keys, keys)]


PLAIN = (None, True, 0.0)  # no bias, with the log-sum-exp for the backward, no dropout
ATTENTION = {
    "cpu": lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
    "flash": lambda q, k, v, causal: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[
        0
    ],
    "efficient": lambda q, k, v, causal: aten._scaled_dot_product_efficient_attention(
        q, k, v, *PLAIN, causal
    )[0],
    "cudnn": lambda q, k, v, causal: aten._scaled_dot_product_cudnn_attention(
        q, k, v, *PLAIN, causal
    )[0],
}


@pytest.mark.numeric
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ATTENTION)
def test_flops_of_torchs_attention_are_those_of_the_visible_pairs(kernel, causal):
    rows, keys = (7, 5) if kernel == "cpu" else (7, 7)
    pairs = int(torch.ones(rows, keys).tril().sum()) if causal else rows * keys
    device = {} if kernel == "cpu" else {"device": "meta", "dtype": torch.bfloat16}  # needs no GPU
    q, k, v = queries_keys_values(rows, keys, requires_grad=True, **device)
    forward = partial(ATTENTION[kernel], q, k, v, causal)
    assert count_flops(forward) == (4 * 2 * 3 * pairs * 8, {})
    total = count_flops(lambda: forward().sum().backward(), gradients=True)
    # two matrix products forward, five backward
    assert total == ((4 + 10) * 2 * 3 * pairs * 8, {"sum": 1})


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_not_compiled_and_counts_all_pairs():
    q, k, v = queries_keys_values(64, 64)
    flops = count_flops(lambda: flex_attention(q, k, v))
    has_formula = "flex_attention" not in flops.unknown  # of torch, from 2.12 or 2.13 on
    assert flops.total == has_formula * 4 * 2 * 3 * 64 * 64 * 8


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_embedding_bags_count_the_rows_that_they_read_and_their_gradients(weighted, sparse):
    """12 rows of width 5 are read in 3 bags."""
    table, rows = torch.randn(9, 5, requires_grad=True), torch.randint(9, (3, 4))
    weights = torch.rand(3, 4, requires_grad=True) if weighted else None

    def read() -> Tensor:
        return F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights, sparse=sparse)

    assert count_flops(read) == ((2 if weighted else 1) * 12 * 5, {})
    # forward, gradient of the table, gradient of the weights
    passes = 2 + 2 + 2 if weighted else 1 + 1
    assert count_flops(lambda: read().backward(torch.ones(3, 5)), gradients=True) == (
        passes * 12 * 5,
        {},
    )


def test_the_gradient_of_indexing_counts_an_addition_for_each_number():
    table, at = torch.randn(9, 5, requires_grad=True), torch.tensor([4, 4, 0])
    reads = {
        "embedding": lambda: F.embedding(at, table),
        "index_select": lambda: table.index_select(0, at),
        "index": lambda: table[at],
        "gather": lambda: table.gather(0, at[:, None].expand(3, 5)),
    }
    for read in reads.values():
        table.grad = None
        assert count_flops(lambda read=read: read().backward(torch.ones(3, 5)), gradients=True) == (
            3 * 5,
            {},
        )


def test_operations_without_a_formula_are_listed_by_name():
    x, at = torch.randn(3, 4), torch.zeros(3, 4, dtype=torch.int64)

    def call():
        assert not torch.is_grad_enabled()
        # one operation, views and copies
        y = x.softmax(-1).T.contiguous().clone().view(4, 3).double().float()
        y = torch.cat([y, torch.zeros(4, 3)]).mul(2).mul_(3).exp()
        return y.topk(2), x.gather(1, at), x.index_select(1, at[0]), x[at[0, :1]], x @ x.T

    flops = count_flops(call)
    assert flops.total == 2 * 3 * 4 * 3
    assert list(flops.unknown.items()) == [("mul", 2), ("_softmax", 1), ("exp", 1), ("topk", 1)]


def test_sorts_and_cumulative_sums_are_counted():
    x = torch.randn(3, 5)
    triangle, right = torch.randn(2, 4, 4), torch.randn(2, 4, 3)
    for unit, factor in (
        (True, 3),
        (False, 4),
    ):  # 0 + 2 + 4 + 6 in each column, and 4 divisions if the diagonal is not 1
        solve = partial(torch.linalg.solve_triangular, upper=False, unitriangular=unit)
        assert count_flops(lambda solve=solve: solve(triangle, right)) == (2 * 4 * 3 * factor, {})
    assert count_flops(lambda: x.cumsum(-1)) == (3 * 4, {})  # lines of five
    assert count_flops(lambda: x.cummax(0)) == (2 * 5, {})  # lines of three
    assert count_flops(lambda: x.sort()) == (3 * 5 * 3, {})  # three levels merge up to eight
    assert count_flops(lambda: x.argsort(dim=0, stable=True)) == (5 * 3 * 2, {})
    assert (
        count_flops(lambda: (x[:, :1].sort(), x[:0].cumsum(0), x.int().argsort(stable=True))).total
        == 0
    )


@pytest.mark.cpu_kernel
@pytest.mark.parametrize(
    "past_gradients", [False, True], ids=["past is carried", "past has gradients"]
)
def test_the_cpu_kernel_executes_little_more_than_the_visible_pairs(past_gradients):
    """A block of 8 rows computes up to 7 keys more than a row sees, and vectors of 16 keys are
    computed completely.

    ``key_counts`` are the keys of each head with a weight or a gradient, z + R + 1."""
    rows, past, width, key_counts = 128, 600, 16, (37, 517)
    q, k, v = (torch.randn(2, 2, rows, width, requires_grad=True) for _ in range(3))
    before = [torch.randn(2, 2, past, width, requires_grad=past_gradients) for _ in range(2)]
    z = torch.tensor([20.0, 500.5], requires_grad=True)

    def attend():
        return window_cpu.attend(q, k, v, Window((64, 640), z=z, ramp=16), past=[PastKV(*before)])

    products = 2 * 2 * rows * width  # FLOPs of one product of all rows with a key, in two streams
    forward = count_flops(attend).total
    assert (
        2 * products * sum(key_counts)
        <= forward
        <= 2 * products * sum(count + 7 + 2 * 16 for count in key_counts)
    )
    backward = count_flops(lambda: attend().sum().backward(), gradients=True).total - forward
    segment_counts = [min(count, rows) - min(count, rows) ** 2 / (2 * rows) for count in key_counts]
    least = 3 * sum(key_counts) + 2 * sum(key_counts if past_gradients else segment_counts)
    assert products * least <= backward <= 1.25 * products * (least + 2 * 48)


MATRIX, WIDE, VECTOR = torch.randn(4, 5), torch.randn(5, 6), torch.randn(5)
STACKS = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
SQUARE = torch.randn(2, 4, 4)
X = torch.randn(2, 8, 16)
MASK = torch.nn.Transformer.generate_square_subsequent_mask(8)
LAYER = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
HEADS = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
# queries, keys, values and output; scores and values
PROJECTED, PAIRS = 2 * 16 * 4 * 16 * 16, 4 * 2 * 8 * 8 * 16


@pytest.mark.parametrize(
    "call, expected",
    [
        (lambda: torch.zeros(4, 6).addmm_(MATRIX, WIDE), 2 * 4 * 5 * 6),
        (lambda: torch.zeros(3, 4, 6).baddbmm_(*STACKS), 2 * 3 * 4 * 5 * 6),
        (lambda: torch.addbmm(torch.zeros(4, 6), *STACKS), 2 * 3 * 4 * 5 * 6),
        (lambda: MATRIX @ VECTOR, 2 * 4 * 5),
        (lambda: torch.zeros(4).addmv_(MATRIX, VECTOR), 2 * 4 * 5),
        (lambda: VECTOR @ VECTOR, 2 * 5),
        (lambda: torch.addr(torch.zeros(4, 5), MATRIX[:, 0], VECTOR), 2 * 4 * 5),
        (lambda: MATRIX.cfloat() @ WIDE.cfloat(), 4 * 2 * 4 * 5 * 6),
        (lambda: F.bilinear(MATRIX, MATRIX, torch.ones(3, 5, 5)), 2 * 4 * 3 * 5 * 5),
        (lambda: torch.cdist(X, X), 3 * 2 * 8 * 8 * 16),
        (lambda: torch.fft.fft(X.cfloat(), dim=1), 5 * 2 * 8 * 16 * 3),
        (lambda: torch.linalg.inv(SQUARE), 2 * 2 * 4**3),
        (lambda: torch.linalg.solve(SQUARE, SQUARE), round(2 * (2 / 3 + 2) * 4**3)),
        (lambda: torch.sparse.mm(torch.eye(4).to_sparse(), MATRIX), 2 * 4 * 5),
        (lambda: torch.nn.LSTM(16, 16, batch_first=True)(X), 2 * 16 * (64 * 16 + 64 * 16)),
        (lambda: HEADS(X, X, X), PROJECTED + PAIRS),  # torch's fused attention
        (lambda: LAYER(X), PROJECTED + PAIRS + 2 * 16 * 2 * 16 * 32),  # torch's fused layer
        (lambda: LAYER(X, src_mask=MASK), PROJECTED + PAIRS + 2 * 16 * 2 * 16 * 32),
    ],
)
def test_products_that_torchs_registry_lacks_are_counted(call, expected):
    assert count_flops(call).total == expected


def test_data_dependent_computation_is_counted_on_the_text():
    class Reads(Sublayer):
        """Multiplies the bytes of which the first entry is positive."""

        def __init__(self, context: LayerContext):
            super().__init__()

        def forward(self, x, state=None, start=None, *, collect_stats=False):
            return SublayerOutput(0 * x + (x[x[..., 0] > 0] @ torch.ones(D, D)).sum())

    model = build(Reads)
    positive = [token for token in range(V) if model.embedding.weight[token, 0] > 0]
    text = torch.tensor(positive[:3] * 7, dtype=torch.uint8)
    flops = forward_flops_per_byte(model, segment=8, max_bytes=100, text=text)
    assert flops.per_byte == HEAD + 2 * D * D


D, H, K, V, HIDDEN, VECTORS = 16, 4, 4, 32, 24, 5
HEAD, PROJECTIONS = 2 * D * V, 4 * 2 * D * D


def feed_forward(context: LayerContext) -> FeedForward:
    return FeedForward(context, hidden=HIDDEN, activation="relu", bias=True, zero_init=False)


def memory_table(context: LayerContext, *, sparse: bool = False) -> ProductKeyMemory:
    sizes = {"half_keys": 8, "top_k": 4, "heads": 2, "d_query": 6}
    choices = {"query_norm": "layer", "activation": "softmax", "share": "layer", "sparse": sparse}
    return ProductKeyMemory(context, **sizes, **choices)


def build(*makers, span: int = 24, backend: str = "auto", shift: int = 0) -> LanguageModel:
    """Return a model of one layer with a sublayer from each of ``makers``."""
    torch.manual_seed(0)
    common = {
        "heads": H,
        "span": span,
        "attend_self": not shift,
        "backend": backend,
        "cache": "kv",
        "scheme": Rotary,
    }
    layer = {f"part{i}": make for i, make in enumerate(makers)}
    return LanguageModel(
        [layer], lambda i: LayerContext(d_model=D, layer=i, n_layers=1, **common), vocabulary=V
    )


def per_byte(model: LanguageModel, segment: int) -> float:
    flops = forward_flops_per_byte(model, segment=segment, max_bytes=1000)
    assert flops.warm
    return flops.per_byte


def band(segment: int, columns: int, chunk: int) -> int:
    """Return FLOPs of one head that computes scores of ``chunk`` queries and all keys that any of
    them sees."""
    rows = [min(chunk, segment - begin) for begin in range(0, segment, chunk)]
    return sum(4 * r * (columns - 1 + r) * K for r in rows)


@pytest.mark.parametrize("segment, shift", [(1, 0), (100, 1)])
def test_flops_of_attention_with_a_full_past(segment, shift):
    plain = build(Attention, feed_forward, span=24, backend="plain", shift=shift)
    keys = segment + 24 - 1 + shift  # the plain backend computes all scores, visible or not
    assert per_byte(plain, segment) == HEAD + PROJECTIONS + 4 * H * keys * K + 2 * 2 * D * HIDDEN
    fused = build(Attention, span=40, backend="fused", shift=shift)
    expected = HEAD + PROJECTIONS + H * band(segment, 40, 40) / segment
    assert per_byte(fused, segment) == pytest.approx(expected, rel=1e-12)


def test_counting_changes_no_weight_mode_gradient_or_random_state():
    model = build(
        partial(Attention, span=partial(AdaptiveSpan, ramp=8)), memory_table, feed_forward
    )
    model.train()
    model.norm.eval()  # one module in another mode than the others
    modes = [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    random_state, training = torch.get_rng_state(), []

    def draw_and_watch(*_: object):
        torch.rand(())
        training.append(model.training or torch.is_grad_enabled())

    model.head.register_forward_hook(draw_and_watch)
    forward_flops_per_byte(model, segment=5, max_bytes=100)
    assert training and not any(training)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Growing(Sublayer):
    """Carries all bytes of the stream."""

    def __init__(self, context: LayerContext):
        super().__init__()

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        state = x if state is None else torch.cat([state, x], dim=1)
        return SublayerOutput(torch.zeros_like(x) + (x @ state.mT).sum(), state)


def test_a_state_that_still_grows_is_not_called_warm():
    flops = forward_flops_per_byte(build(Growing), segment=4, max_bytes=18)
    assert not flops.warm
    assert flops.per_byte == HEAD + 2 * D * (5 * 4 + 4)  # the sixth segment, after five others
    assert flops.state_bytes == 8 + 5 * 4 * D * 4
