"""One entry of ``bench.peers`` in a process of its own: a variant of ours, the reference model, or a package's.

Every entry gets the same bytes in the same order and takes whole training steps: forward, loss, backward, optimizer.
Ours take the trainer's own step, and what carries a state begins with a full one. Rates are 0: the optimizer does all
its work, and spans stay where they were put. Packages are built as their documentation says, without dropout.
"""

from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata

import torch
import torch.nn.functional as F
from einops import rearrange
from omegaconf import OmegaConf
from torch import Tensor, nn

from bench.cost_worker import MEASURED_STEPS, MIDDLE, WARM_STEPS, full_state
from bench.measure import peak_bytes, times
from bench.weights import learned_spans, place_spans, shake_
from harness.count.memory import PeakMemory
from harness.device import random_state, runtime
from harness.loop.select_backend import settled
from harness.loop.trainer import backend_of
from harness.loop.update import Update
from harness.plan.build import Plan, plan_run

REFERENCE, TRANSFORMERS, MEMORY = "reference_model", "x-transformers", "product-key-memory"
PACKAGES = {REFERENCE: "torch", TRANSFORMERS: TRANSFORMERS, MEMORY: MEMORY}  # as pip calls what a peer comes from
INSTALL = "not installed; python -m pip install -e .[peers]"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What an entry is made of: plain values, so that they can be sent to another process."""

    config: dict  # of a training run, resolved: sizes, streams, segment, runtime, and for ours the variant
    trusted: tuple[str, ...]  # packages that it may name beside its trust
    batches: Tensor  # uint8 [n, B, T + 1], read in a circle
    peer: str | None = None  # of PACKAGES; None for a variant of ours
    layer: str | None = None  # the variant's sublayer that is measured alone, on fixed inputs; None for the whole model
    spans: tuple[int, ...] | None = None  # keys of every head, the same in each layer; None: as they start


class ReferenceModel(nn.Module):
    """The least transformer that a competent user writes in PyTorch: pre-norm, ``scaled_dot_product_attention``, a GELU
    feed-forward of four times the width, learned positions, no biases but those of the norms. It sees the segment and
    has 2 V D + T D + layers (12 D^2 + 4 D) + 2 D parameters.
    """

    def __init__(self, *, vocabulary: int, d_model: int, layers: int, heads: int, longest: int):
        super().__init__()
        wide, self.heads = 4 * d_model, heads

        def matrix(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.embedding, self.positions = nn.Embedding(vocabulary, d_model), nn.Embedding(longest, d_model)
        self.query_key_value = nn.ModuleList(matrix(d_model, 3 * d_model) for _ in range(layers))
        self.output = nn.ModuleList(matrix(d_model, d_model) for _ in range(layers))
        self.feed_forward = nn.ModuleList(
            nn.Sequential(matrix(d_model, wide), nn.GELU(), matrix(wide, d_model)) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(2 * layers + 1))
        self.head = matrix(d_model, vocabulary)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens`` (int64 ``[B, T]``, T at most ``longest``) to logits ``[B, T, V]``."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for i, feed_forward in enumerate(self.feed_forward):
            stacked = self.query_key_value[i](self.norms[2 * i](x))
            q, k, v = rearrange(stacked, "b t (three h k) -> three b h t k", three=3, h=self.heads)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.output[i](rearrange(y, "b h t k -> b t (h k)"))
            x = x + feed_forward(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


def build_peer(name: str, plan: Plan) -> nn.Module:
    """A peer in the sizes of a plan: bytes ``[B, T]`` to logits, or the memory's layer, ``[B, T, D]`` to the same;
    RuntimeError with what a package says where it cannot be had."""
    m, vocabulary, longest = plan.model, plan.data["vocabulary"], plan.batch.segment
    try:
        if name == REFERENCE:
            sizes = {"d_model": m.d_model, "layers": m.layers, "heads": m.heads}
            return ReferenceModel(vocabulary=vocabulary, longest=longest, **sizes)
        library = import_module(PACKAGES[name].replace("-", "_"))
        if name == TRANSFORMERS:
            sizes = {"dim": m.d_model, "depth": m.layers, "heads": m.heads, "attn_dim_head": m.d_model // m.heads}
            decoder = library.Decoder(**sizes, attn_flash=True, rotary_pos_emb=True, verbose=False)
            return library.TransformerWrapper(num_tokens=vocabulary, max_seq_len=longest, attn_layers=decoder)
        memory = plan.config["variant"]["memory"]
        sizes = {"num_keys": memory["half_keys"], "topk": memory["top_k"], "heads": memory["heads"]}
        return library.PKM(dim=m.d_model, dim_head=memory["d_query"] // 2, **sizes)
    except ImportError as error:
        raise RuntimeError(f"{PACKAGES[name]}: {INSTALL} ({error})") from error
    except Exception as error:  # a package's complaint is no mistake of the user's
        raise RuntimeError(f"{name} cannot be built: {type(error).__name__}: {error}") from error


def version(package: str) -> str | None:
    """Of the installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Worker:
    """What a cell is asked: ``weigh`` first, then ``round`` by round. Weights are shaken, ours and packages' alike:
    networks start in part at zero, where hardware is quicker."""

    def __init__(self, task: Task):
        self.task, self.plan = task, plan_run(OmegaConf.create(task.config), trusted=task.trusted)
        self.runtime = runtime.start(self.plan.runtime)
        self.plan = self.plan if task.peer else settled(self.plan, self.runtime)
        self.device, self.taken, self.state = self.runtime.device, 0, None
        self.rehearse()
        self.meter = PeakMemory(self.device)  # what is imported belongs to no model
        random_state.seed(self.plan.seed)
        if task.layer:
            generator, b = torch.Generator().manual_seed(self.plan.seed), self.plan.batch
            pair = torch.randn(2, b.streams, b.segment, self.plan.model.d_model, generator=generator)
            self.x, self.gradient = pair.to(self.device)  # [B, T, D] each
            self.x.requires_grad_()
        else:
            pairs = task.batches.to(self.device).long()
            self.inputs, self.targets = pairs[:, :, :-1], pairs[:, :, 1:]
        self.make_peer() if task.peer else self.make_ours()

    def rehearse(self) -> None:
        """What torch and a package load and allocate at first."""
        x = torch.ones(1, 2, 64, 32, device=self.device, requires_grad=True)
        F.scaled_dot_product_attention(x, x, x @ x.mT @ x).softmax(-1).sum().backward()
        torch.optim.AdamW([x]).step()
        if self.task.peer:
            build_peer(self.task.peer, self.plan)

    def make_ours(self) -> None:
        """The variant with the trainer's step and optimizers, its spans at ``task.spans``; or its sublayer alone."""
        whole = self.plan.make_model().to(self.device)
        optimizers = self.plan.make_optimizers(whole)
        optimizers.lr = 0.0
        self.model, self.step, self.zero_grad = whole.train(), partial(optimizers.step, MIDDLE), optimizers.zero_grad
        if self.task.layer:
            self.model = next(part for name, part in whole.sublayers() if name.endswith(f".{self.task.layer}"))
            self.backend = self.model.backend(self.device, training=True)
            forward = self.runtime.forward(self.model)
            self.call = lambda x: forward(x).y
            return
        self.update, self.backend = Update(whole, optimizers, self.runtime), backend_of(whole, self.runtime)
        if self.task.spans is not None:
            if not learned_spans(whole):
                raise ValueError(f"spans={list(self.task.spans)}: cannot be set, no sublayer has learned spans")
            place_spans(whole, [self.task.spans], heads=len(self.task.spans))

    def make_peer(self) -> None:
        self.model = build_peer(self.task.peer, self.plan).to(self.device).train()
        self.backend = "plain" if self.task.layer else "fused"  # models ask for fused attention
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad
        self.call = self.runtime.forward(self.model)

    def train(self) -> None:
        """One whole training step."""
        if self.task.layer:
            with self.runtime.autocast():
                y = self.call(self.x)
            y.backward(self.gradient.to(y.dtype))
            self.x.grad = None
            self.step(), self.zero_grad()
            return
        number = self.taken % len(self.inputs)
        self.taken, inputs, targets = self.taken + 1, self.inputs[number], self.targets[number]
        if self.task.peer:
            with self.runtime.autocast():
                logits = self.call(inputs)
            F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
            self.step(), self.zero_grad()
            return
        carry = self.plan.batch.carry
        if carry and self.state is None:
            self.state = full_state(self.model, self.inputs[0], span=self.plan.model.span, where=self.runtime)
        _, after = self.update(inputs, targets, self.state, fraction=MIDDLE)
        self.state = after if carry else None

    def weigh(self) -> dict:
        """Parameters, backend, and the peak of memory of training steps after warm-up."""
        shake_(self.model)
        for _ in range(WARM_STEPS):
            self.train()
        steps = partial(
            times, self.train, least_calls=MEASURED_STEPS, synchronise=self.runtime.synchronise, most_seconds=0.0
        )
        peak = peak_bytes(steps, device=self.device, meter=self.meter)
        memory = {"train_peak_bytes": peak.bytes, "peak_reserved_bytes": peak.reserved_bytes}
        parameters = {"total": sum(p.numel() for p in self.model.parameters())}
        parameters |= {} if self.task.peer else {"touched": self.model.touched_parameters()}
        backend = f"{self.backend}, compiled" if self.runtime.compile else self.backend
        return {"parameters": parameters, "backend": backend, "memory": memory | {"approximate": peak.approximate}}

    def round(self, seconds: float) -> list[float]:
        """Milliseconds of each training step, for so long, two steps at least; the one before finds others' caches."""
        clock = {"synchronise": self.runtime.synchronise, "most_seconds": seconds}
        return times(self.train, **clock, least_calls=2, warm_calls=1)
