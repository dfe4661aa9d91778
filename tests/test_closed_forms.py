"""What a step and every variant compute against closed forms of their FLOPs."""

import pytest
import torch

from harness.count.flops import count_flops, forward_flops_per_byte
from tests import kernel_products
from tests.composing import TINY, plan
from variants.kernels import fused, window_cpu
from variants.kernels.window import PastKV, Persistent, Window

# The fused path: two products of each rectangle forward, five backward, and the ramps once more.


def rectangles(rows: int, max_keys: int, chunk: int) -> int:
    """Pairs of one head whose ``chunk`` queries at a time meet all keys that any of them sees."""
    sizes = [min(chunk, rows - begin) for begin in range(0, rows, chunk)]
    return sum(size * (max_keys - 1 + size) for size in sizes)


def test_the_fused_path_with_gradients():
    rows, past, width, number, ramp = 130, 150, 8, 5, 16
    q = torch.randn(2, 2, rows, width, requires_grad=True)
    k, v = (torch.randn(2, 2, rows + past, width, requires_grad=True) for _ in range(2))
    extra = [torch.randn(2, number, width, requires_grad=True) for _ in range(2)]
    z = torch.tensor([36.0, 120.0], requires_grad=True)

    def step(window, persistent=None):
        fused.attend(q, k, v, window, persistent=persistent).sum().backward()

    pairs = 2 * (rectangles(rows, 40, 40) + rectangles(rows, 100, 100))
    hard = count_flops(lambda: step(Window((40, 100))), gradients=True)
    assert hard.total == 14 * width * pairs
    with_vectors = count_flops(lambda: step(Window((40, 100)), Persistent(q, *extra)), gradients=True)
    assert with_vectors.total == hard.total + 14 * width * 2 * 2 * rows * number
    soft = count_flops(lambda: step(Window((52, 140), 0, z, ramp)), gradients=True)
    pairs = 2 * (rectangles(rows, 52, 52) + rectangles(rows, 140, 128))
    blocks = 3 * 64 * (64 + ramp)  # three blocks of 64 queries, each with the keys on their ramps
    assert soft.total == 14 * width * pairs + 2 * 2 * width * 4 * blocks  # scores and rewards, 2 streams of 2 heads


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
VECTORS = 2 * D
SPREAD = (0.0, 0.2, 0.5, 1.0)  # of S, with a ramp of 32: 33, 93, 183 and 300 keys, in buckets
SPANS = {"plain": (64, 128, 192, 300), "fused": (64, 128, 192, 300), "kernel": (33, 93, 183, 300)}
WHOLE = (S,) * H
SIZES = (f"model.d_model={D}", f"model.layers={LAYERS}", f"model.heads={H}", f"model.span={S}", "runtime.device=cpu")
MEMORY = ("variant.memory.half_keys=9", "variant.memory.top_k=5", "variant.memory.heads=2", "variant.memory.d_query=6")

PROJECTIONS = 4 * 2 * D * D
FEED_FORWARD = 2 * 2 * D * 4 * D
GATES = 2 * D * H
READS = 2 * (2 * D * 6 + 2 * 9 * 6 + 2 * 5 * D)  # two heads: query, half-keys, values


def attention(max_keys: tuple[int, ...], backend: str) -> float:
    """FLOPs per byte of scores and weighted values in warm state."""
    if backend == "plain":  # every query of the segment meets all keys that one of them sees, in every head alike
        return H * 4 * K * (T + max(max_keys) - 1)
    if backend == "kernel":
        return sum(kernel_products.forward(kernel_products.met(T, S - 1, n), K) for n in max_keys) / T
    rows = {64: 64, 128: 128, 192: 128, S: 128}  # of a block, by its columns
    return sum(4 * K * rectangles(T, n, rows[n]) / T for n in max_keys)


def transformer_xl(backend: str) -> float:
    """Past inputs are projected again, and the sinusoids of all distances once a segment."""
    again = (2 * 2 * D * D * (S - 1) + 2 * S * D * D) / T
    if backend == "kernel":
        met = kernel_products.met(T, S - 1, S)
        return again + H * kernel_products.forward(met, K + 1, distances=S) / T
    return again + attention(WHOLE, backend) + H * 2 * K * S


def persistent(backend: str) -> float:
    if backend == "kernel":
        return H * kernel_products.forward(kernel_products.always(T, VECTORS), K) / T
    return H * 4 * K * VECTORS


CLOSED_FORMS = {
    "mhsa": lambda backend: LAYERS * (PROJECTIONS + attention(WHOLE, backend) + FEED_FORWARD),
    "adaptive_span": lambda backend: LAYERS * (PROJECTIONS + attention(SPANS[backend], backend) + FEED_FORWARD),
    "replayed_spans": lambda backend: LAYERS * (PROJECTIONS + attention(WHOLE, backend) + FEED_FORWARD),
    "dynamic_span": lambda backend: LAYERS * (PROJECTIONS + GATES + attention(WHOLE, backend) + FEED_FORWARD),
    "all_attention": lambda backend: LAYERS * (PROJECTIONS + attention(SPANS[backend], backend) + persistent(backend)),
    "all_attention_fixed": lambda backend: LAYERS * (PROJECTIONS + attention(WHOLE, backend) + persistent(backend)),
    "transformer_xl": lambda backend: LAYERS * (PROJECTIONS + transformer_xl(backend) + FEED_FORWARD),
    "product_key_memory": lambda backend: (
        LAYERS * (PROJECTIONS + attention(WHOLE, backend)) + (LAYERS - 1) * FEED_FORWARD + READS
    ),
    "adaptive_span_memory": lambda backend: (
        LAYERS * (PROJECTIONS + attention(SPANS[backend], backend)) + (LAYERS - 1) * FEED_FORWARD + READS
    ),
}


@pytest.mark.parametrize("backend", ["plain", "fused", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])
@pytest.mark.parametrize("variant", sorted(CLOSED_FORMS))
def test_every_variant_of_windows_against_its_closed_form(variant, backend):
    memory = MEMORY if variant.endswith("memory") else ()
    model = plan(*SIZES, *memory, f"variant={variant}", f"runtime.backend={backend}").make_model()
    for name, parameter in model.named_parameters():
        if name.endswith(".span.fraction"):
            parameter.data = torch.tensor(SPREAD)
    model.project_()
    if (variant == "dynamic_span" and backend != "plain") or (variant == "transformer_xl" and backend == "fused"):
        with pytest.raises(ValueError, match=f"runtime.backend={backend}"):
            forward_flops_per_byte(model, segment=T)
        return
    flops = forward_flops_per_byte(model, segment=T, most_bytes=1000)
    assert flops.warm
    assert flops.per_byte == pytest.approx(2 * D * V + CLOSED_FORMS[variant](backend), rel=1e-9)
    assert model.ideal_flops() <= flops.per_byte
