"""The counters of FLOPs and of bytes moved against numbers worked out by hand, and what kernels say that they execute."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from harness.count.flops import Flops, count_flops, optimizer_flops
from harness.count.formulas import causal_pairs
from harness.optim.muon import Muon
from harness.optim.optimizers import ClippedAdagrad
from tests import kernel_products
from tests.composing import TINY, plan
from variants.kernels import window_cpu
from variants.kernels.window import PastKV, Persistent, Window

aten = torch.ops.aten


def heads(rows: int, keys: int, **choices) -> list[Tensor]:
    """Queries, keys and values of 2 streams, 3 heads, 8 wide."""
    return [torch.randn(2, 3, length, 8, **choices) for length in (rows, keys, keys)]


def test_causal_pairs():
    for rows, keys in ((1, 1), (5, 5), (5, 9), (9, 5)):
        assert causal_pairs(rows, keys) == torch.ones(rows, keys).tril().sum()  # as torch defines is_causal


@pytest.mark.numeric
@pytest.mark.parametrize("causal, pairs", [(False, 7 * 5), (True, 1 + 2 + 3 + 4 + 5 + 5 + 5)])
def test_attention_on_a_cpu_counts_the_pairs_that_are_visible(causal, pairs):
    q, k, v = heads(7, 5, requires_grad=True)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    assert count_flops(forward).total == 4 * 2 * 3 * pairs * 8
    whole = count_flops(lambda: forward().sum().backward(), gradients=True)
    assert whole.total == (4 + 10) * 2 * 3 * pairs * 8
    assert whole.unknown == {"sum": 1}


CUDA = {
    "flash": lambda q, k, v, causal: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal),
    "efficient": lambda q, k, v, causal: aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal),
    "cudnn": lambda q, k, v, causal: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal),
}


@pytest.mark.parametrize("causal, pairs", [(False, 7 * 7), (True, 28)])
@pytest.mark.parametrize("kernel", CUDA)
def test_attention_on_a_gpu_counts_the_pairs_that_are_visible(kernel, causal, pairs):
    q, k, v = heads(7, 7, requires_grad=True, device="meta", dtype=torch.bfloat16)  # shapes alone: no GPU is needed
    assert count_flops(lambda: CUDA[kernel](q, k, v, causal)).total == 4 * 2 * 3 * pairs * 8
    whole = count_flops(lambda: CUDA[kernel](q, k, v, causal)[0].sum().backward(), gradients=True)
    assert whole.total == (4 + 10) * 2 * 3 * pairs * 8


def block_mask(visible, *, streams: int | None, heads: int | None) -> flex.BlockMask:
    return flex.create_block_mask(visible, streams, heads, 100, 72, device="cpu", BLOCK_SIZE=(32, 16))


def test_flex_attention_counts_the_blocks_that_it_executes():
    q, k, v = heads(100, 72)
    attend = partial(flex.flex_attention, q, k, v)

    def count(mask: flex.BlockMask) -> int:
        flops = count_flops(lambda: attend(block_mask=mask))
        assert flops.unknown == {}
        return flops.total

    causal = block_mask(lambda b, h, i, j: i >= j, streams=None, heads=None)
    # Rows 0-31, 32-63, 64-95, 96-99; keys in blocks of 16, the last one of 8 (64-71).
    assert count(causal) == 4 * 2 * 3 * 8 * (32 * 32 + 32 * 64 + 32 * 72 + 4 * 72)
    by_head = block_mask(lambda b, h, i, j: (j < 16 * h) | (j == 71), streams=None, heads=3)
    assert count(by_head) == 4 * 2 * 8 * 100 * (8 + (16 + 8) + (32 + 8))
    by_stream = block_mask(lambda b, h, i, j: (b == 1) & (i < 64), streams=2, heads=None)
    assert count(by_stream) == 4 * 3 * 8 * 64 * 72
    assert count_flops(attend).total == 4 * 2 * 3 * 8 * 100 * 72
    assert count_flops(lambda: torch.compile(attend)(block_mask=causal)).total == count(causal)


# 12 rows of a table of 9, each 5 wide, in 3 bags.
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_reading_a_table(weighted, sparse):
    table, rows = torch.randn(9, 5, requires_grad=True), torch.randint(9, (3, 4))
    weights = torch.rand(3, 4, requires_grad=True) if weighted else None

    def read():
        y = F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights, sparse=sparse)
        y.backward(torch.ones_like(y))

    passes = 2 + 2 + 2 if weighted else 1 + 1  # forward, gradient of the table, gradient of the weights
    assert count_flops(read, gradients=True)[:2] == (passes * 12 * 5, {})


def test_gradients_of_reading_by_index():
    table, at = torch.randn(9, 5, requires_grad=True), torch.tensor([4, 4, 0])
    reads = {
        "embedding": lambda: F.embedding(at, table),
        "index_select": lambda: table.index_select(0, at),
        "index": lambda: table[at],
        "gather": lambda: table.gather(0, at[:, None].expand(3, 5)),
    }
    for read in reads.values():

        def step(read=read):
            y = read()
            y.backward(torch.ones_like(y))

        table.grad = None
        assert count_flops(step, gradients=True)[:2] == (3 * 5, {})


def test_gradients_are_recorded_only_if_asked_for():
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        count_flops(lambda: (x @ x.T).sum().backward())
    assert x.grad is None
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert count_flops(lambda: (x @ x.T).sum().backward(), gradients=True).total == 3 * 2 * 3 * 4 * 3


FOUR = 4  # bytes of a float32
A, B = torch.randn(3, 4), torch.randn(4, 5)
WIDE, AT, ROWS = torch.randn(100, 4), torch.tensor([4, 2, 0]), torch.randn(3, 5)
TABLE, Q_K_V, SEEN = torch.randn(1000, 5), heads(50, 70), torch.zeros(1, 1, 50, 70)
MOVED = {  # operands are read and results written, views are read as far as they go, and of a table the rows in question
    "product": (lambda: A @ B, 12 + 20 + 15),
    "unfused": (lambda: A.exp().sum(), 2 * 12 + 12 + 1),
    "half": (lambda: A.to(torch.bfloat16), 12 + 6),
    "two results": (lambda: A.max(dim=1), 12 + 3 + 2 * 3),  # values, and int64 places
    "views": (lambda: (A.T, A[:, 1], A.expand(2, 3, 4), A.split(2), torch.empty(100), A.detach()), 0),
    "filled": (lambda: (torch.zeros(6), torch.ones_like(A)), 6 + 12),
    "part": (lambda: WIDE[:10].exp(), 2 * 40),
    "spread": (lambda: WIDE + WIDE[:, 1:2].expand(100, 4), 400 + 100 + 400),
    "in place": (lambda: A.add_(A.clone()), 2 * 12 + 3 * 12),
    "lists": (lambda: torch._foreach_mul_([A, WIDE], 2.0), 2 * 12 + 2 * 400),
    "embedding": (lambda: F.embedding(AT, TABLE), 2 * 15 + 6),
    "index": (lambda: TABLE[AT], 2 * 15 + 6),
    "gather": (lambda: TABLE.gather(1, torch.zeros(3, 2, dtype=torch.int64)), 2 * 6 + 2 * 6 + 12),
    "index_add_": (lambda: TABLE.index_add_(0, AT, ROWS), 3 * 15 + 6),
    "index_put_": (lambda: TABLE.index_put_((AT,), ROWS), 2 * 15 + 6),
    "no scores": (
        lambda: F.scaled_dot_product_attention(*Q_K_V, SEEN),
        6 * 8 * (50 + 70 + 70 + 50) + 6 * 50 + 50 * 70,
    ),
    "index_add": (lambda: TABLE.index_add(0, AT, ROWS), 5000 + 15 + 6 + 5000),  # a copy of the whole
}


@pytest.mark.parametrize("name", MOVED)
def test_bytes_that_are_moved(name):
    call, numbers = MOVED[name]
    assert count_flops(call).moved_bytes == FOUR * numbers


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def second_step(optimizer: torch.optim.Optimizer) -> Flops:
    optimizer.step()  # makes the state
    flops = optimizer_flops(optimizer.step)
    assert flops.unknown == {}
    return flops


# Of AdamW without fusing: decay 2, momentum 3, squares 2 + 4, root 2, correction 2, epsilon 2, update 4.
@pytest.mark.parametrize("kernel, passes", [("fused", 7), ("foreach", 21), (None, 21)])
def test_adamw(kernel, passes):
    choices = {"fused": kernel == "fused", "foreach": kernel == "foreach"} if kernel else {"foreach": False}
    made = parameters((3, 4), (5,))
    flops = second_step(torch.optim.AdamW(made, weight_decay=0.1, **choices))
    assert flops.total == 14 * 17 + 2  # and the two step counts
    steps = {"fused": 2 * 3, "foreach": 2 * 2 + 1, None: 2 * 2}[kernel]  # counted up; read once more; by a tensor of 1
    assert flops.moved_bytes == FOUR * (passes * 17 + steps)
    undecayed = second_step(torch.optim.AdamW(made, weight_decay=0.0, amsgrad=True, **choices))
    assert undecayed.total == 13 * 17 + 17 + 2


def test_adam_decays_by_the_gradient_and_adagrad_clips():
    for kernel in ({"fused": True}, {"foreach": False}):
        assert second_step(torch.optim.Adam(parameters((3, 4)), weight_decay=0.1, **kernel)).total == 15 * 12 + 1
    # Squares 2, root, epsilon, division, norm 2, factor, update 2; the factor itself 3 a tensor.
    assert second_step(ClippedAdagrad(parameters((3, 4), (5,)), lr=0.1, clip=0.5)).total == 10 * 17 + 3 * 2


@pytest.mark.numeric
@pytest.mark.parametrize("rows, columns", [(6, 10), (10, 6)])
def test_muon(rows, columns):
    made, size = parameters((rows, columns), (rows, columns), (rows, columns)), 3 * 60
    muon = Muon(made, lr=0.1, precision="float32")
    products = 3 * 5 * 2 * (2 * 6 * 6 * 10 + 6**3)  # three matrices, five steps: two products with X, one without
    muon.step()
    assert count_flops(muon.step).total == products
    # Momentum 3, Nesterov 3, norm 2, division 1, update 2; the norm's floor once a matrix.
    assert second_step(muon).total == products + 11 * size + 3


def test_sparse_adam_works_on_rows():
    table = nn.Parameter(torch.randn(1000, 5))
    at, rows = torch.tensor([[4, 2, 0]]), torch.randn(3, 5)
    table.grad = torch.sparse_coo_tensor(at, rows, table.shape, is_coalesced=True, check_invariants=False)
    optimizer = torch.optim.SparseAdam([table])
    optimizer.step()
    flops = optimizer_flops(optimizer.step)
    # Momentum 3, squares 4, both of them whole 2, root, epsilon, division, rate, update.
    assert flops.total == 14 * 15
    assert flops.unknown == {"sparse_mask": 2}
    assert flops.moved_bytes < FOUR * 1000 * 5  # less than the table


@pytest.mark.numeric
def test_a_step_of_all_optimizers_of_a_run():
    planned = plan(*TINY, "optim=adamw", "optim.clip=1.0")
    model = planned.make_model()
    optimizers = planned.make_optimizers(model)
    for _ in range(2):
        model(torch.randint(256, (1, 16))).logits.square().sum().backward()
        flops = optimizer_flops(lambda: optimizers.step(0.5))
    sizes = [p.numel() for p in model.parameters()]
    decayed = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    clip = 2 * sum(sizes) + 2 * len(sizes) + 3 + sum(sizes)  # norms, their norm, the factor, the scaling
    finite = sum(sizes) + 1 + len(sizes)  # whether gradients are finite, and all are; steps counted back if not
    assert flops.total == finite + 13 * sum(sizes) + decayed + len(sizes) + clip
    assert flops.unknown == {}


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("old", [False, True], ids=["past is carried", "past has gradients"])
@pytest.mark.parametrize("rows, past, shift, width", [(130, 150, 0, 8), (9, 700, 1, 20), (33, 0, 1, 16)])
def test_the_kernel_with_gradients(rows, past, shift, width, old, vectors):
    q, k, v = (torch.randn(2, 2, rows, width, requires_grad=True) for _ in range(3))
    before = [torch.randn(2, 2, past, width, requires_grad=old) for _ in range(2)]
    extra = [torch.randn(2, 300, width, requires_grad=True) for _ in range(2)]
    z = torch.tensor([20.0, 500.5], requires_grad=True)
    distances = 640 if vectors else None
    max_keys, p = (64, 640), torch.randn(640, width, requires_grad=True)
    forward = backward = 0
    for n in (37, 517):  # keys with a weight or a gradient, z + R and the nearest, not the whole buckets
        chunks = kernel_products.met(rows, past, n, shift)
        forward += 2 * kernel_products.forward(chunks, width, distances=distances)
        backward += 2 * kernel_products.backward(chunks, width, wanted=0 if old else past, distances=distances)
        forward += 2 * kernel_products.forward(kernel_products.always(rows, 300), width)
        backward += 2 * kernel_products.backward(kernel_products.always(rows, 300), width)

    def attend():
        window = Window(max_keys, shift, z, 16)
        own = {"vectors": p if vectors else None, "persistent": Persistent(q, *extra)}
        return window_cpu.attend(q, k, v, window, past=[PastKV((0, 1), *before)] if past else [], **own)

    assert count_flops(attend).total == forward
    assert count_flops(lambda: attend().sum().backward(), gradients=True).total == forward + backward


def test_the_backward_of_the_plain_path_is_twice_the_forward():
    planned = plan(*TINY, "runtime.backend=plain")
    model, tokens = planned.make_model(), torch.randint(256, (2, 16))
    forward = count_flops(lambda: model(tokens))
    step = count_flops(lambda: model(tokens).logits.square().sum().backward(), gradients=True)
    assert step.total == 3 * forward.total + 2 * 16 * 32  # and the additions into the embedding's gradient
    assert step.moved_bytes > 2 * forward.moved_bytes
    assert forward.unknown.keys() < step.unknown.keys()


# Variants whose heads look over windows, as their YAML has them; the others' are in their own tests


D, LAYERS, H, K, S, T, V = 48, 3, 4, 12, 300, 80, 256
