"""Fused graph: what a compiled model keeps, reads and writes, without compiling it.

The forward and backward graphs are those that ``torch.compile`` gives its code generator: traced by the same AOTAutograd with
the same decompositions and cut by its partitioner, which decides what is kept for the backward pass. What is
disabled for the compiler is a node that runs as eager code does (``graph_breaks.py``). Chains that Inductor makes one kernel of
are then merged (``Graph``), and a call of a graph makes what the kernels write, and does nothing else.

What is left out makes the figures too large: kernels that merge because they read the same, and buffers that are written in
place. One thing makes them too small: around a break is one graph here, where compiled code has two, which may keep more.
"""

import operator
from collections.abc import Callable, Sequence
from itertools import chain
from unittest.mock import patch

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from bench.graph_breaks import Break, compiling, eager, leave_out, leaves
from bench.stand_ins import call, listed
from harness.count.bytes_moved import memory_bytes
from harness.count.formulas import tensors_of
from harness.model import ModelOut
from variants.contract import State

REDUCTIONS = ("sum", "amax", "amin", "mean", "var", "var_mean", "any", "all", "prod", "argmax", "argmin", "max", "min")
REDUCTIONS += ("linalg_vector_norm",)
GATHERS = ("embedding", "index", "index_select", "gather")
"""Reads of a table, the first argument, by index: only the rows that are asked for are read."""
APART = "mm addmm bmm baddbmm convolution topk sort cumsum index_put scatter_add scatter _embedding_bag call"
APART = frozenset(f"{APART} eager embedding_dense_backward run_and_save_rng_state run_with_rng_state".split())
"""What is a kernel of its own."""
EAGER = eager._opoverload
RANDOM_STATE_BYTES = 16
"""Of a GPU's generator: a seed and an offset."""


def compiled(model: nn.Module, mode: FakeTensorMode) -> Callable:
    """The model's forward as compiled code takes memory and does work; call it on tensors that are fake by ``mode``."""
    known: dict[tuple, tuple[Callable, list]] = {}
    names, weights = zip(*chain(model.named_parameters(), model.named_buffers()), strict=True)
    breaks = leave_out(model, mode)

    def forward(tokens: Tensor, state: State = None) -> ModelOut:
        tensors, rebuild = leaves(state)
        key = tuple((x.shape, x.stride(), x.dtype) for x in (tokens, *tensors))
        if key not in known:
            known[key] = _traced(model, names, rebuild, breaks)
        run, rebuilds = known[key]
        logits, loss, *after = run(*weights, tokens, *tensors)
        return ModelOut(logits, model.trim(rebuilds[0](after)), loss, {})

    return forward


def _traced(
    model: nn.Module, names: tuple[str, ...], rebuild: Callable, breaks: list[Break]
) -> tuple[Callable, list[Callable]]:
    """The function of parameters and buffers, tokens and tensors of a state, and what makes a state of its other results."""
    rebuilds: list[Callable] = []

    def run(*given: Tensor):
        own, (tokens, *tensors) = dict(zip(names, given, strict=False)), given[len(names) :]
        with compiling(True):
            out = torch.func.functional_call(model, own, (tokens, rebuild(tensors)))
        after, again = leaves(out.state)
        rebuilds[:] = [again]
        return out.logits, out.loss, *after

    def compiler(module: fx.GraphModule, inputs) -> Callable:
        return Graph(module, breaks)

    how = {"fw_compiler": compiler, "bw_compiler": compiler, "partition_fn": _partition}
    return aot_function(run, decompositions=select_decomp_table(), **how), rebuilds


def tracing():
    """Where a graph is traced, what is to be recomputed is marked and not run twice."""
    number = iter(range(2**31))

    def marked(function: Callable, *args, use_reentrant: bool):
        with traceback.annotate({"recomputed_layer": next(number)}):
            return function(*args)

    return patch("torch.utils.checkpoint.checkpoint", marked)


def _partition(joint: fx.GraphModule, inputs, **options):
    for node in joint.graph.nodes:
        layer = (node.meta.get("custom") or {}).get("recomputed_layer")
        if layer is not None and not node.meta.get("autograd_backward"):
            node.meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": layer}
    return min_cut_rematerialization_partition(joint, inputs, **options)


class Graph:
    """A graph as kernels.

    A kernel is an operation of its own, or a chain of elementwise operations and at most one kind of reduction over rows, all
    over the same elements. What a chain makes for itself alone is never in memory.

    Args:
        breaks: what its nodes that are calls of eager code do, by their number.

    Attributes:
        kernels: nodes of each, in the order in which they run.
    """

    _boxed_call = True  # to AOTAutograd: that it takes a list, which it empties

    def __init__(self, module: fx.GraphModule, breaks: Sequence[Break] = ()):
        self.module, self.nodes, self.breaks = module, list(module.graph.nodes), breaks
        self.base: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            if "val" not in node.meta and node.op in ("placeholder", "call_function"):
                node.meta["val"] = _value(node)
            view = _is_view(node) and not self.is_part(node)
            self.base[node] = self.base[node.all_input_nodes[0]] if view else node
        self.kernels = _Merge(self).kernels()
        self._schedule()

    def is_part(self, node: fx.Node) -> bool:
        """Whether it is one of the results of an operation that has several: each has memory of its own."""
        return node.target is operator.getitem and not isinstance(self.base[node.args[0]].meta["val"], Tensor)

    def _schedule(self) -> None:
        """What each kernel reads, writes and does, and after which one a value is no longer needed."""
        of = {node: number for number, kernel in enumerate(self.kernels) for node in kernel}
        (output,) = (node for node in self.nodes if node.op == "output")
        self.results = output.args[0]
        kept = {self.base[node] for node in output.all_input_nodes}
        outside = {
            self.base[source]
            for node in self.nodes
            for source in node.all_input_nodes
            if node in of and of.get(self.base[source]) != of[node]
        }
        self.calls, last = [], {}
        for number, kernel in enumerate(self.kernels):
            read: dict[fx.Node, int] = {}
            for node in kernel:
                for source in node.all_input_nodes:
                    value = self.base[source]
                    if of.get(value) != number:
                        size = sum(memory_bytes(x) for x in _values(value))
                        read[value] = min(size, read.get(value, 0) + _bytes_read(node, source))
                        last[value] = number
            made = [node for node in kernel if node in kept or node in outside]
            alone = len([node for node in kernel if not self.is_part(node)]) == 1
            flops, moved, scratch = _work(kernel[0]) if alone else (0, None, 0)
            if moved is None:
                moved = sum(read.values()) + sum(memory_bytes(x) for node in made for x in _values(node))
            shapes = listed(x for node in made for x in _values(node))
            self.calls.append((list(read), made, shapes, flops, moved, scratch))
        dies: dict[int, list[fx.Node]] = {}
        for value, number in last.items():
            if value not in kept:
                dies.setdefault(number, []).append(value)
        self.dies = dies

    def __call__(self, given: list[Tensor]) -> list:
        """Results without data, made as the kernels would, one after the other; ``given`` is emptied, to live no longer."""
        found = dict(zip((node for node in self.nodes if node.op == "placeholder"), given, strict=True))
        given.clear()
        for node in self.nodes:
            if node.op == "get_attr":
                found[node] = getattr(self.module, node.target)
        for number, (read, made, shapes, *cost) in enumerate(self.calls):
            first = self.kernels[number][0]
            if first.target is EAGER:
                results = self._left_out(first, found)
                tensors = (results[node.args[1]] for node in made)
            else:
                tensors = iter(call(tensors_of([found[node] for node in read]), shapes, *cost))
            for node in made:
                found[node] = _like(node.meta["val"], tensors)
            for node in self.dies.get(number, ()):
                found.pop(node, None)
        return [self._result(node, found) for node in self.results]

    def _left_out(self, node: fx.Node, found: dict) -> list[Tensor]:
        given, _, number, forward = node.args
        own = self.breaks[number]
        return (own.forward if forward else own.backward)([self._result(x, found) for x in given])

    def _result(self, node, found: dict):
        if not isinstance(node, fx.Node):
            return node
        if node in found:
            return found[node]
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self._result(source, found))
        return node.target(*args, **kwargs)


class _Merge:
    """Merges the nodes of a graph into kernels, never so that two would wait for each other."""

    def __init__(self, graph: Graph):
        self.graph, self.of, self.members, self.before, self.shape = graph, {}, [], [], []
        for node in graph.nodes:
            if graph.base[node] is node and graph.is_part(node):
                self.of[node] = self.of[node.args[0]]
                self.members[self.of[node]].append(node)
            elif node.op == "call_function" and not _is_view(node):
                self._place(node)

    def kernels(self) -> list[list[fx.Node]]:
        position = {node: number for number, node in enumerate(self.graph.nodes)}
        left = {g for g, members in enumerate(self.members) if members}
        done, order = 0, []
        while left:
            ready = [g for g in left if not self.before[g] & ~done]
            first = min(ready, key=lambda g: max(position[node] for node in self.members[g]))
            order.append(sorted(self.members[first], key=position.get))
            done |= 1 << first
            left.remove(first)
        return order

    def _place(self, node: fx.Node) -> None:
        sources = [self.graph.base[source] for source in node.all_input_nodes]
        own = len(self.members)
        self.members.append([node])
        self.of[node] = own
        waits = 0
        for group in {self.of[source] for source in sources if source in self.of}:
            waits |= self.before[group] | 1 << group
        self.before.append(waits)
        self.shape.append(_shape(node))
        for source in sources:
            if source in self.of:
                self._unite(self.of[source], self.of[node])

    def _unite(self, one: int, other: int) -> None:
        together = None if one == other else _common(self.shape[one], self.shape[other])
        if together is None or self._between(one, other) or self._between(other, one):
            return
        for node in self.members[other]:
            self.of[node] = one
        self.members[one] += self.members[other]
        self.members[other] = []
        pair = 1 << one | 1 << other
        waits = (self.before[one] | self.before[other]) & ~pair
        for group, before in enumerate(self.before):
            if before & pair:
                self.before[group] = (before & ~(1 << other)) | 1 << one | waits
        self.before[one], self.before[other], self.shape[one] = waits, 0, together

    def _between(self, one: int, other: int) -> bool:
        """Whether a third kernel waits for ``one`` and is waited for by ``other``."""
        through = self.before[other] & ~(1 << one)
        return any(through >> group & 1 and before >> one & 1 for group, before in enumerate(self.before))


def _shape(node: fx.Node) -> tuple[int, int | None] | None:
    """Elements that a node goes over, and how many are left by its reduction over rows; None for a kernel of its own."""
    name, made = _name(node), _values(node)
    if name in APART or not made:
        return None
    if name not in REDUCTIONS:
        return made[0].numel(), None
    whole = node.all_input_nodes[0].meta["val"]
    dims = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], list | tuple) else list(range(whole.dim()))
    rows = sorted(d % whole.dim() for d in dims) == list(range(whole.dim() - len(dims), whole.dim()))
    return (whole.numel(), made[0].numel()) if rows else None


def _common(one: tuple | None, other: tuple | None) -> tuple[int, int | None] | None:
    """The same of two kernels as one, or None where they go over different elements."""
    if one is None or other is None:
        return None
    (whole, rows), (whole2, rows2) = sorted((one, other), key=lambda shape: shape[1] is None)
    if rows is None:  # one may be broadcast into the other
        return (max(whole, whole2), None) if max(whole, whole2) % min(whole, whole2) == 0 else None
    if rows2 is None:
        return (whole, rows) if whole2 in (whole, rows) or whole % whole2 == 0 and whole2 < rows else None
    return (whole, rows) if (whole, rows) == (whole2, rows2) else None


def _name(node: fx.Node) -> str:
    return getattr(node.target, "_opname", None) or getattr(node.target, "__name__", str(node.target))


def _is_view(node: fx.Node) -> bool:
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    return node.target is operator.getitem or _name(node) == "_unsafe_view" or getattr(node.target, "is_view", False)


def _value(node: fx.Node):
    """What the partitioner does not say of nodes that it adds: the states of random numbers, and what is drawn again by them."""
    if node.op == "placeholder":
        return torch.empty(RANDOM_STATE_BYTES, dtype=torch.uint8)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    if node.target is operator.getitem:
        return args[0][args[1]]
    saves = _name(node) == "run_and_save_rng_state"
    operation, *given = args if saves else args[1:]
    drawn = operation(*given, **kwargs)
    return (torch.empty(RANDOM_STATE_BYTES, dtype=torch.uint8), drawn) if saves else drawn


def _values(node: fx.Node) -> list[Tensor]:
    return tensors_of(node.meta.get("val"))


def _bytes_read(node: fx.Node, source: fx.Node) -> int:
    if _name(node) in GATHERS and node.args[0] is source:
        return sum(x.numel() * x.element_size() for x in _values(node))
    return sum(memory_bytes(x) for x in _values(source))


def _work(node: fx.Node) -> tuple[int, int | None, int]:
    """FLOPs, bytes where they are not what is read and written, and scratch memory."""
    if node.target is torch.ops.windtunnel_fit.call.default:
        return node.args[2:5]
    formula = flop_registry.get(getattr(node.target, "_overloadpacket", None))
    if formula is None:
        return 0, None, 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return formula(*args, **kwargs, out_val=node.meta["val"]), None, 0


def _like(value, tensors):
    if isinstance(value, Tensor):
        return next(tensors)
    return type(value)(_like(part, tensors) for part in value) if isinstance(value, list | tuple) else value
