"""The byte-level language model: an embedding, layers of named residual sublayers, a head.

The variant defines the sublayers of each layer. The model adds norms, residuals and positions on the input; a sublayer
maps [B, T, D] to [B, T, D] and does not see its neighbours. State is a value, ``(start, states)``: ``start [B]`` counts
the bytes that each stream has read, and ``states`` holds one state per sublayer.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint as recomputation

from variants.contract import (
    Inspection,
    LayerContext,
    NeededFlops,
    Position,
    State,
    Sublayer,
    SublayerOutput,
    set_shapes,
)

Layers = list[dict[str, Callable[[LayerContext], Sublayer]]]

NUMERICS = 1
"""Version of the shared code (model, optimizers, data order, scoring): raised when its golden numbers change on
purpose."""


class ModelOut(NamedTuple):
    """The model's output for one segment."""

    logits: Tensor  # [B, T, V], float32 or wider
    state: State  # for the next segment of the same streams
    loss: Tensor  # sum of the sublayers' own losses, scalar, nats per byte
    stats: dict[str, dict[str, Tensor]]  # by sublayer; empty unless asked for


class Residual(nn.Module):
    """x + sublayer(norm(x)), or with ``after`` norm(x + sublayer(x)), as in papers of 2017 to 2019."""

    def __init__(self, sublayer: Sublayer, norm: nn.Module, *, after: bool):
        super().__init__()
        self.sublayer, self.norm, self.after = sublayer, norm, after

    def forward(self, x: Tensor, state: State, start: Tensor, *, collect_stats: bool):
        out = self.sublayer(x if self.after else self.norm(x), state, start, collect_stats=collect_stats)
        y = self.norm(x + out.y) if self.after else x + out.y
        # With torch.compile of torch 2.11, out._replace(..) returns an empty value.
        return SublayerOutput(y, out.state, out.loss, out.stats)


class RMSNorm(nn.RMSNorm):
    """Equals ``torch.nn.RMSNorm`` over the last dimension, to rounding; torch's on a GPU, compiled or for mixed types.

    On a CPU it makes few passes over memory, where torch 2.13 needs six operations, and fourteen in the backward pass:

        y = x r w,   r = 1 / sqrt(mean(x^2) + eps)                                                    (1910.07467)
        dx = r (g w - x r^2 mean(g w x)),   dw = sum over rows of g x r
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != self.weight.dtype or torch.compiler.is_compiling():
            return super().forward(x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return _Norm.apply(x, self.weight, eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        # LayerNorm's backward with mean 0 subtracts r mean(g w) too much. It is added back: one kernel and pass in all.
        nothing, needed = torch.zeros_like(r), [True, True, False]
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            g.contiguous(), x, weight.shape, nothing, r, weight, None, needed
        )
        return dx.addcmul_(r, (g @ weight)[..., None], value=1 / x.shape[-1]), dw, None


def _through(
    layer: nn.ModuleDict, x: Tensor, states: tuple[State, ...], start: Tensor, collect_stats: bool
) -> tuple[Tensor, list[tuple]]:
    """A layer's output for ``x``, and the state, loss and statistics of each of its sublayers."""
    outputs = []
    for residual, state in zip(layer.values(), states, strict=True):
        x, *rest = residual(x, state, start, collect_stats=collect_stats)
        outputs.append(tuple(rest))
    return x, outputs


class LanguageModel(nn.Module):
    """Bytes in, a distribution over the next byte out.

    Args:
        layers: for each layer, the names of its sublayers and functions that build them, in order.
        context: makes a layer's context from its number.
        vocabulary: V, the number of symbols; the other keywords are keys of ``conf/model``.
        tied: whether the head's matrix is the embedding's.
        embedding_std, embedding_scale, embedding_dropout: initial deviation, factor and dropout rate of embedded bytes.
        head_zero_init: start with a head of zeros, which predicts the uniform distribution.
        checkpoint: ``layers`` saves only each layer's input and computes the layer again in the backward pass, with the
            same random numbers; ``none`` saves all that the backward pass needs.
    """

    def __init__(
        self,
        layers: Layers,
        context: Callable[[int], LayerContext],
        *,
        vocabulary: int,
        norm: str = "rms",
        norm_after: bool = False,
        tied: bool = False,
        head_bias: bool = False,
        embedding_std: float = 1.0,
        embedding_scale: float = 1.0,
        embedding_dropout: float = 0.0,
        head_zero_init: bool = False,
        checkpoint: str = "none",
    ):
        super().__init__()
        norms, width = {"layer": nn.LayerNorm, "rms": RMSNorm}, context(0).d_model
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=embedding_std)
        self.scale, self.dropout, self.checkpoint = embedding_scale, embedding_dropout, checkpoint
        self.position: Position = context(0).position(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {name: Residual(make(context(i)), norms[norm](width), after=norm_after) for name, make in layer.items()}
            )
            for i, layer in enumerate(layers)
        )
        self.norm = nn.Identity() if norm_after else norms[norm](width)
        self.head = nn.Linear(width, vocabulary, bias=head_bias)
        if tied:
            self.head.weight = self.embedding.weight
        elif head_zero_init:
            nn.init.zeros_(self.head.weight)
        self.project_()

    def sublayers(self) -> Iterator[tuple[str, Sublayer]]:
        """``("layers.0.attention", module)`` in order of execution."""
        for i, layer in enumerate(self.layers):
            for name, residual in layer.items():
                yield f"layers.{i}.{name}", residual.sublayer

    def residuals(self) -> list[Residual]:
        return [residual for layer in self.layers for residual in layer.values()]

    def forward(self, tokens: Tensor, state: State = None, *, collect_stats: bool = False) -> ModelOut:
        """Predict the byte after each of ``tokens`` (int64 ``[B, T]``), given the ``state`` of what came before."""
        start, states = state if state is not None else (tokens.new_zeros(tokens.shape[0]), None)
        start = start.view_as(start)  # a new tensor for each pass: layers share what they derive from it
        x = self.position.embed(self.embedding(tokens) * self.scale, start)
        x = F.dropout(x, self.dropout, self.training)
        loss, after, stats = x.new_zeros((), dtype=torch.float32), [], {}
        for i, layer in enumerate(self.layers):
            old = (None,) * len(layer) if states is None else states[len(after) : len(after) + len(layer)]
            inputs = (layer, x, old, start, collect_stats)
            if self.checkpoint == "layers" and torch.is_grad_enabled():
                x, outputs = recomputation.checkpoint(_through, *inputs, use_reentrant=False)
            else:
                x, outputs = _through(*inputs)
            for name, (own_state, own_loss, own_stats) in zip(layer, outputs, strict=True):
                after.append(own_state)
                loss = loss if own_loss is None else loss + own_loss
                stats |= {f"layers.{i}.{name}": own_stats} if own_stats else {}
        logits = self.head(self.norm(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return ModelOut(logits, (start + tokens.shape[1], tuple(after)), loss, stats)

    @torch.no_grad()
    def inspect(self, tokens: Tensor) -> tuple[Tensor, dict[str, Inspection]]:
        """Logits of streams that begin with ``tokens``, and by name each sublayer's ``Inspection`` of this forward
        pass. Sublayers that give none are left out."""
        inspections = {}

        def look(name: str, module: Sublayer, inputs: tuple) -> None:
            inspections[name] = module.inspect(inputs[0])

        hooks = [s.register_forward_pre_hook(partial(look, name)) for name, s in self.sublayers()]
        try:
            logits = self(tokens).logits
        finally:
            for hook in hooks:
                hook.remove()
        return logits, {name: seen for name, seen in inspections.items() if seen is not None}

    def trim(self, state: State) -> State:
        """The part of a compiled forward's state that is worth carrying."""
        start, states = state
        return start, tuple(s.trim(part) for (_, s), part in zip(self.sublayers(), states, strict=True))

    def project_(self) -> None:
        """Project all sublayers' parameters into their range; one copy tells the host all lengths that shapes need."""
        for _, sublayer in self.sublayers():
            sublayer.project_()
        set_shapes(self)

    def metrics(self, stats: dict[str, dict[str, Tensor]]) -> dict[str, float | list[float]]:
        """Numbers, or lists with one per head, by names as ``"layers.0.attention.span"``, from summed statistics."""
        return {
            f"{name}.{key}": value.tolist() if isinstance(value, Tensor) else float(value)
            for name, sublayer in self.sublayers()
            for key, value in sublayer.metrics(stats.get(name, {})).items()
        }

    def ideal_flops(self) -> int:
        """Forward FLOPs per byte that mechanisms and head need at their present parameters, with a full past."""
        return sum(s.ideal_flops() for _, s in self.sublayers()) + 2 * self.head.weight.numel()

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """FLOPs per byte that a training step needs, with the head, from ``Sublayer.needed_flops``. A sublayer that
        does not state them counts three times its ideal forward. Norms, loss and the embedding's rows are neglected."""
        needed = [NeededFlops.of_products(2 * self.head.weight.numel())]
        for _, sublayer in self.sublayers():
            stated = sublayer.needed_flops(segment, carried=carried)
            needed.append(NeededFlops.of_products(sublayer.ideal_flops()) if stated is None else stated)
        return NeededFlops(*map(sum, zip(*needed, strict=True)))

    def flops_estimated_3x(self) -> list[str]:
        """Names of the sublayers that do not state the FLOPs of a training step."""
        return [name for name, s in self.sublayers() if s.needed_flops(1, carried=0) is None]

    def parameters_by_sublayer(self) -> dict[str, int]:
        """Parameters in each sublayer, norms and embeddings apart; a table shared by layers counts in the first."""
        counted: set[int] = set()

        def fresh(module: nn.Module) -> int:
            new = {id(p): p.numel() for p in module.parameters() if id(p) not in counted}
            counted.update(new)
            return sum(new.values())

        counts = {name: fresh(sublayer) for name, sublayer in self.sublayers()}
        counts["embedding"], counts["head"] = fresh(self.embedding), fresh(self.head)
        return counts | {"norms": fresh(self)}

    def touched_parameters(self) -> int:
        """Parameters read for one byte: those of each sublayer, the norms, the head, and a row of the embedding."""
        counts = self.parameters_by_sublayer()
        whole = {name: sum(p.numel() for p in sublayer.parameters()) for name, sublayer in self.sublayers()}
        touched = {name: whole[name] - unread_parameters(sublayer) for name, sublayer in self.sublayers()}
        # Parameters that layers share count once. A shared table counts in each layer, which reads its own rows.
        inside = sum(counts[n] if touched[n] == whole[n] else touched[n] for n in touched)
        tied = self.head.weight is self.embedding.weight  # then the embedding is the head's matrix
        embedding = self.head.weight.numel() if tied else self.embedding.embedding_dim
        return inside + counts["norms"] + counts["head"] + embedding


def unread_parameters(sublayer: Sublayer) -> int:
    """Number of parameters in table rows that one byte does not read."""
    tables = [(getattr(sublayer, name), reads) for name, reads in sublayer.tables.items()]
    return sum(max(0, len(table) - reads) * table.shape[1] for table, reads in tables)


def add_stats(total: dict[str, dict[str, Tensor]], stats: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Statistics of two stretches of bytes, added."""

    def add(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: a[k] + b[k] if k in a and k in b else a.get(k, b.get(k)) for k in sorted(a.keys() | b.keys())}

    return {name: add(total.get(name, {}), stats.get(name, {})) for name in sorted(total.keys() | stats.keys())}
