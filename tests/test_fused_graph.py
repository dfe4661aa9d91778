"""Fused graph: chains are one kernel, products are their own, what a graph makes has the shapes that it would have."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from bench.fake_step import predict
from bench.fused_graph import Graph
from tests.composing import TINY, plan

N, D = 64, 32
FLOAT = 4


def graph_of(function, *shapes: tuple[int, ...]) -> Graph:
    with FakeTensorMode():
        given = [torch.empty(shape) for shape in shapes]
        return Graph(make_fx(function)(*given))


def moved(graph: Graph) -> list[int]:
    """Bytes of each kernel."""
    return [bytes_ for *_, bytes_, _ in graph.calls]


def test_a_chain_of_elementwise_operations_is_one_kernel():
    graph = graph_of(lambda x, y: (((x + y).relu() * 2).exp(),), (N, D), (N, D))
    assert len(graph.kernels) == 1 and moved(graph) == [3 * N * D * FLOAT]


def test_a_reduction_over_rows_takes_what_is_before_and_after_it():
    graph = graph_of(lambda x: (x * (x * x).mean(-1, keepdim=True).rsqrt(),), (N, D))
    assert len(graph.kernels) == 1 and moved(graph) == [2 * N * D * FLOAT]


def test_a_reduction_over_columns_is_a_kernel_of_its_own():
    graph = graph_of(lambda x: ((x * 2).sum(0),), (N, D))
    assert len(graph.kernels) == 2


def test_a_product_is_a_kernel_of_its_own_with_its_flops():
    graph = graph_of(lambda x, w: ((x.relu() @ w).relu(),), (N, D), (D, D))
    assert len(graph.kernels) == 3
    assert [flops for *_, flops, _, _ in graph.calls] == [0, 2 * N * D * D, 0]


def test_kernels_never_wait_for_each_other():
    # x + 1 is needed by the product and by what is after it: as one kernel the two would wait for themselves.
    graph = graph_of(lambda x, w: ((x + 1) * ((x + 1) @ w) + (x + 1).relu(),), (N, D), (D, D))
    of = {node: number for number, kernel in enumerate(graph.kernels) for node in kernel}
    for node, number in of.items():
        assert all(of.get(graph.base[source], -1) <= number for source in node.all_input_nodes)


def test_of_a_table_only_the_rows_asked_for_are_read():
    with FakeTensorMode():
        given = torch.empty(1000, D), torch.zeros(N, dtype=torch.int64)
        graph = Graph(make_fx(lambda table, at: (nn.functional.embedding(at, table),))(*given))
    assert moved(graph) == [2 * N * D * FLOAT + N * 8]


def test_results_are_those_of_the_graph_without_data():
    with FakeTensorMode():
        given = torch.empty(N, D), torch.empty(D, D)
        graph = Graph(make_fx(lambda x, w: ((x @ w).T[:5], (x + 1).sum(-1)))(*given))
        first, second = graph(list(given))
    assert first.shape == (5, N) and first.stride() == (1, D) and second.shape == (N,)


def test_each_of_several_results_lives_as_long_as_it_is_read():
    """Values and places of the largest: the places are read at the end, the values not after the first product."""

    def function(x, w):
        values, places = x.topk(D)
        return ((values @ w).exp() @ w) * places

    graph = graph_of(lambda x, w: (function(x, w),), (N, 2 * D), (D, D))
    (kernel,) = (k for k in graph.kernels if k[0].target is torch.ops.aten.topk.default)
    values, places = kernel[1:]
    dies = {node: number for number, nodes in graph.dies.items() for node in nodes}
    assert dies[values] < dies[places] and moved(graph)[graph.kernels.index(kernel)] == (2 + 1 + 2) * N * D * FLOAT


@pytest.mark.parametrize("checkpoint", ["none", "layers"])
def test_a_compiled_step_keeps_and_moves_less_and_has_the_same_products(checkpoint):
    words = (*TINY[:-2], "batch.carry=true", "model.span=24", "model.dropout=0.1", "batch.streams=64", "optim=adamw")
    eager, compiled, kept = (
        predict(plan(*words, f"runtime.compile={own}", f"runtime.checkpoint={how}"), kind="cuda")
        for own, how in ((False, checkpoint), (True, checkpoint), (True, "none"))
    )
    total = [
        sum(getattr(work, what) * calls for work, calls in found.work.items())
        for found in (eager, compiled)
        for what in ("flops", "bytes")
    ]
    assert compiled.backend == "kernel, compiled" and sum(compiled.split.values()) == compiled.peak_bytes
    assert total[3] < total[1]
    if checkpoint == "none":
        assert compiled.peak_bytes < eager.peak_bytes and total[2] == pytest.approx(total[0], rel=0.03)
    else:
        assert compiled.split["activations"] < kept.split["activations"]


@pytest.mark.parametrize(
    "words",
    [["variant=dynamic_span"], ["variant=adaptive_span", "runtime.backend=chunked", "position=relative"]],
)
def test_what_is_left_out_of_the_graph_runs_and_keeps_as_eager_code_does(words):
    words = (*TINY[:-2], "batch.carry=true", "model.cache=hidden", "model.span=24", "model.layers=1", *words)
    eager, compiled = (
        predict(plan(*words, "batch.streams=64", f"runtime.compile={own}"), kind="cuda") for own in (False, True)
    )
    flops, moved = (
        [sum(getattr(work, what) * calls for work, calls in found.work.items()) for found in (eager, compiled)]
        for what in ("flops", "bytes")
    )
    assert compiled.backend == "chunked, compiled"
    peaks = [found.peak_bytes - found.split["library"] for found in (eager, compiled)]
    assert peaks[1] < 1.02 * peaks[0]
    assert flops[1] == pytest.approx(flops[0], rel=1e-3) and 0.9 * moved[0] < moved[1] < moved[0]
