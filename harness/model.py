"""The byte-level language model: an embedding, layers of named residual sublayers, and a head. The
variant defines the sublayers of each layer. A sublayer maps [B, T, D] to [B, T, D]. The model adds
norms, residual connections, and the input's positions. The model's state is passed in and returned,
as a tuple ``(start, states)``: ``start [B]`` is the number of bytes that each stream has read,
and ``states`` has one state per sublayer."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
    State,
    Stats,
    Sublayer,
    SublayerOutput,
    set_shapes,
)

Layers = list[dict[str, Callable[[LayerContext], Sublayer]]]

NUMERICS = 1
"""Version of the shared code (model, optimizers, data order, scoring). It is incremented when that
code changes golden numbers on purpose."""


class ModelOut(NamedTuple):
    """The model's output for one segment."""

    logits: Tensor  # [B, T, V], or [B, V] of a pooled model, float32 or float64
    state: State  # input state of the next segment of the same streams
    loss: Tensor  # sum of the sublayers' auxiliary losses, scalar, nats per byte
    stats: dict[str, Stats]  # of each sublayer; empty unless ``collect_stats``


class Residual(nn.Module):
    """Pre-norm, x + sublayer(norm(x)), or with ``norm_after`` post-norm, norm(x + sublayer(x))."""

    def __init__(self, sublayer: Sublayer, norm: nn.Module, *, norm_after: bool):
        super().__init__()
        self.sublayer = sublayer
        self.norm = norm
        self.norm_after = norm_after

    def forward(self, x: Tensor, state: State, start: Tensor, **keywords: object):
        out = self.sublayer(x if self.norm_after else self.norm(x), state, start, **keywords)
        y = self.norm(x + out.y) if self.norm_after else x + out.y
        # Not out._replace(y=y): compiled by torch 2.11, it returns an empty tuple.
        return SublayerOutput(y, out.state, out.loss, out.stats)


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` over the last dimension, with a faster implementation for a CPU that
    differs in rounding.

    torch's own runs on a GPU, when compiled, and if the types of input and weight differ. On a CPU
    it needs six operations (torch 2.13), and fourteen in the backward pass. This one makes fewer
    passes over memory:

        y = x r w,   r = 1 / sqrt(mean(x^2) + eps)   (1910.07467)
        dx = r (g w - x r^2 mean(g w x)),   dw = sum over rows of g x r,   g = dL/dy"""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != self.weight.dtype or torch.compiler.is_compiling():
            return super().forward(x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return _FastRMSNorm.apply(x, self.weight, eps)


class _FastRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        r = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            .square_()
            .div_(x.shape[-1])
            .add_(eps)
            .rsqrt_()
        )
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        # LayerNorm's backward with mean 0 is one kernel. It also subtracts r mean(g w), which is
        # added back below.
        mean = torch.zeros_like(r)
        output_mask = [True, True, False]
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            g.contiguous(), x, weight.shape, mean, r, weight, None, output_mask
        )
        return dx.addcmul_(r, (g @ weight)[..., None], value=1 / x.shape[-1]), dw, None


def _run_layer(
    layer: nn.ModuleDict,
    x: Tensor,
    states: tuple[State, ...],
    start: Tensor,
    collect_stats: bool,
    valid: Tensor | None,
) -> tuple[Tensor, list[tuple]]:
    """Return the output of a layer for ``x``, and for each of its sublayers a tuple of state, loss
    and statistics. ``valid`` is for sublayers of both directions."""
    outputs = []
    for residual, state in zip(layer.values(), states, strict=True):
        keywords = {"collect_stats": collect_stats}
        honours = residual.sublayer.honours
        if valid is not None and honours is not None and "both" in honours.direction:
            keywords["valid"] = valid
        x, *rest = residual(x, state, start, **keywords)
        outputs.append(tuple(rest))
    return x, outputs


class LanguageModel(nn.Module):
    """A model of bytes. It predicts a distribution over the next byte; with sublayers of both
    directions, over the byte at each position; or, ``pooled``, over the classes of a text, from the
    mean of its valid positions. ``conf/model/tiny.yaml`` describes ``norm``, ``norm_after``,
    ``tied`` and ``head_bias``. With ``checkpoint="layers"`` only the input of each layer is saved,
    and the layer is computed again in the backward pass, with the same random numbers. With
    ``none`` all activations that the backward pass needs are saved."""

    def __init__(
        self,
        # for each layer, the names of its sublayers and functions that build them, in order
        layers: Layers,
        context: Callable[[int], LayerContext],  # returns the ``LayerContext`` of a layer's index
        *,
        vocabulary: int,  # V, the number of token ids or classes that are predicted
        inputs: int | None = None,  # the number of token ids that are read; None for V
        pooled: bool = False,
        norm: str = "rms",
        norm_after: bool = False,
        tied: bool = False,
        head_bias: bool = False,
        embedding_std: float = 1.0,  # the initial standard deviation of the embedding
        embedding_scale: float = 1.0,  # a factor of embedded bytes
        embedding_dropout: float = 0.0,  # the dropout rate of embedded bytes
        # initialise the head to zero, so that it predicts the uniform distribution
        head_zero_init: bool = False,
        checkpoint: str = "none",
    ):
        super().__init__()
        norms = {"layer": nn.LayerNorm, "rms": RMSNorm}
        first = context(0)
        width = first.d_model
        self.embedding = nn.Embedding(inputs or vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=embedding_std)
        self.scale = embedding_scale
        self.dropout = embedding_dropout
        self.checkpoint = checkpoint
        self.pooled = pooled
        self.both = first.direction == "both"
        # adds positions to the embedding, which has no heads
        self.position = first.position(d_head=0)
        self.layers = nn.ModuleList(nn.ModuleDict() for _ in layers)
        for i, layer in enumerate(layers):
            for name, make in layer.items():
                self.layers[i][name] = Residual(
                    make(context(i)), norms[norm](width), norm_after=norm_after
                )
        self.norm = nn.Identity() if norm_after else norms[norm](width)
        self.head = nn.Linear(width, vocabulary, bias=head_bias)
        if tied and self.head.weight.shape != self.embedding.weight.shape:
            raise ValueError(
                f"model.tied=true: the model reads {inputs} token ids and predicts {vocabulary}; "
                "allowed is false"
            )
        if tied:
            self.head.weight = self.embedding.weight
        elif head_zero_init:
            nn.init.zeros_(self.head.weight)
        self.project_()

    def sublayers(self) -> Iterator[tuple[str, Sublayer]]:
        """Yield ``("layers.0.attention", module)`` in order of execution."""
        for i, layer in enumerate(self.layers):
            for name, residual in layer.items():
                yield f"layers.{i}.{name}", residual.sublayer

    def residuals(self) -> list[Residual]:
        return [residual for layer in self.layers for residual in layer.values()]

    def forward(
        self,
        tokens: Tensor,
        state: State = None,
        *,
        valid: Tensor | None = None,
        collect_stats: bool = False,
    ) -> ModelOut:
        """Predict from ``tokens`` (int64 ``[B, T]``); ``state`` is from the previous segment, and
        ``valid`` (int64 ``[B]``) is the number of tokens of each row, the others being padding."""
        start, states = state if state is not None else (tokens.new_zeros(tokens.shape[0]), None)
        # a new tensor in each pass: position.py caches rotations as an attribute of it
        start = start.view_as(start)
        x = self.position.embed(self.embedding(tokens) * self.scale, start)
        x = F.dropout(x, self.dropout, self.training)
        loss = x.new_zeros((), dtype=torch.float32)
        new_states = []
        stats = {}
        for i, layer in enumerate(self.layers):
            n_done = len(new_states)
            if states is None:
                layer_states = (None,) * len(layer)
            else:
                layer_states = states[n_done : n_done + len(layer)]
            inputs = (layer, x, layer_states, start, collect_stats, valid)
            if self.checkpoint == "layers" and torch.is_grad_enabled():
                x, outputs = recomputation.checkpoint(_run_layer, *inputs, use_reentrant=False)
            else:
                x, outputs = _run_layer(*inputs)
            for name, (sublayer_state, sublayer_loss, sublayer_stats) in zip(
                layer, outputs, strict=True
            ):
                new_states.append(sublayer_state)
                loss = loss if sublayer_loss is None else loss + sublayer_loss
                if sublayer_stats:
                    stats[f"layers.{i}.{name}"] = sublayer_stats
        x = self.norm(x)
        if self.pooled:
            x = mean_of_valid(x, valid)
        logits = self.head(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return ModelOut(logits, (start + tokens.shape[1], tuple(new_states)), loss, stats)

    @torch.no_grad()
    def inspect(self, tokens: Tensor) -> tuple[Tensor, dict[str, Inspection]]:
        """Return logits of streams that begin with ``tokens``, and the ``Inspection`` of each
        sublayer in this forward pass, by its name, without sublayers that return None."""
        inspections = {}

        def inspect_input(name: str, module: Sublayer, inputs: tuple) -> None:
            if (inspection := module.inspect(inputs[0])) is not None:
                inspections[name] = inspection

        with ExitStack() as hooks:
            for name, sublayer in self.sublayers():
                hooks.enter_context(
                    sublayer.register_forward_pre_hook(partial(inspect_input, name))
                )
            logits = self(tokens).logits
        return logits, inspections

    def trim(self, state: State) -> State:
        """Return the part of a state that the next forward pass needs; a compiled forward pass may
        return more."""
        start, states = state
        return start, tuple(
            module.trim(s) for (_, module), s in zip(self.sublayers(), states, strict=True)
        )

    def project_(self) -> None:
        """Project all sublayers' parameters into their range, and set the shapes that depend on
        learned lengths."""
        for _, sublayer in self.sublayers():
            sublayer.project_()
        set_shapes(self)

    def metrics(self, stats: dict[str, Stats]) -> dict[str, float | list[float]]:
        """Return metrics from summed statistics, such as ``layers.0.attention.span``: numbers, or
        lists of a number per head."""
        return {
            f"{name}.{key}": metric.tolist() if isinstance(metric, Tensor) else float(metric)
            for name, sublayer in self.sublayers()
            for key, metric in sublayer.metrics(stats.get(name, {})).items()
        }

    def ideal_flops(self, *, text: int | None = None) -> int:
        """Return the ideal forward FLOPs per byte of all sublayers and the head, at their present
        parameters: with a full past, where the head of a pooled model counts 0; if both sides are
        seen, of a ``text`` of so many bytes, at whose ends windows are shorter."""
        if self.both and text is not None:
            return round(self.needed_flops(text, carried=0).forward)
        head = 0 if self.pooled else 2 * self.head.weight.numel()
        return sum(s.ideal_flops() for _, s in self.sublayers()) + head

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """Return FLOPs per byte that a training step needs: those of ``Sublayer.needed_flops`` and
        of the head. A sublayer that does not state them is charged three times its ideal forward
        FLOPs. Norms, loss and embedding count 0."""
        bytes_per_use = segment if self.pooled else 1
        head = 2 * self.head.weight.numel() / bytes_per_use
        needed = [NeededFlops.of_products(head)]
        needed += (
            s.needed_flops(segment, carried=carried) or NeededFlops.of_products(s.ideal_flops())
            for _, s in self.sublayers()
        )
        total = NeededFlops(*map(sum, zip(*needed, strict=True)))
        if self.embedding.weight.requires_grad:
            return total
        return total._replace(backward=head)  # of a frozen encoder, only the head has a gradient

    def flops_estimated_3x(self) -> list[str]:
        """Return the names of the sublayers whose FLOPs of a training step are estimated: three
        times the ideal forward FLOPs."""
        return [name for name, s in self.sublayers() if s.needed_flops(1, carried=0) is None]

    def parameters_by_sublayer(self) -> dict[str, int]:
        """Return numbers of parameters of each sublayer, of embedding and head, and of all norms. A
        parameter that modules share counts in the first of them."""
        counted: set[int] = set()

        def count_new(module: nn.Module) -> int:
            sizes = {id(p): p.numel() for p in module.parameters() if id(p) not in counted}
            counted.update(sizes)
            return sum(sizes.values())

        counts = {name: count_new(sublayer) for name, sublayer in self.sublayers()}
        counts["embedding"], counts["head"] = count_new(self.embedding), count_new(self.head)
        return counts | {"norms": count_new(self)}

    def touched_parameters(self) -> int:
        """Return the number of parameters read for one byte: in sublayers, norms and head, and one
        row of the embedding."""
        counts = self.parameters_by_sublayer()
        in_sublayers = 0
        for name, sublayer in self.sublayers():
            unread = unread_parameters(sublayer)
            # A shared parameter counts once, but a shared table in each layer, because layers read
            # different rows.
            size = sum(p.numel() for p in sublayer.parameters()) if unread else counts[name]
            in_sublayers += size - unread
        # then counts["head"] lacks the matrix, which is read whole
        is_tied = self.head.weight is self.embedding.weight
        embedding = self.head.weight.numel() if is_tied else self.embedding.embedding_dim
        return in_sublayers + counts["norms"] + counts["head"] + embedding


def mean_of_valid(x: Tensor, valid: Tensor | None) -> Tensor:
    """Return the mean ``[B, D]`` of the first ``valid [B]`` positions of ``x [B, T, D]``, or of
    all."""
    if valid is None:
        return x.mean(dim=1)
    is_valid = torch.arange(x.shape[1], device=x.device) < valid[:, None]
    return (x * is_valid[..., None]).sum(dim=1) / valid[:, None].to(x.dtype)


def unread_parameters(sublayer: Sublayer) -> int:
    """Return the number of parameters that one byte does not read: unread rows of tables and of
    parameters with as many rows."""
    rows_read = {len(getattr(sublayer, name)): n for name, n in sublayer.tables.items()}
    tables = [p for p in sublayer.parameters(recurse=False) if p.dim() == 2 and len(p) in rows_read]
    return sum(max(0, len(table) - rows_read[len(table)]) * table.shape[1] for table in tables)


def add_stats(total: dict[str, Stats], stats: dict[str, Stats]) -> dict[str, Stats]:
    """Return the sums of the statistics of two forward passes; a statistic that only one of them
    has is copied."""
    sums = {name: dict(of_sublayer) for name, of_sublayer in total.items()}
    for name, of_sublayer in stats.items():
        added = sums.setdefault(name, {})
        for key, x in of_sublayer.items():
            added[key] = added[key] + x if key in added else x
    return sums
