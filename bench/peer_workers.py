"""Measurements of one entry of ``bench.peers``: a variant of ours, the reference model, or a
package's model.

Every entry makes whole training steps on the same bytes in the same order: forward, loss, backward
and optimizer. A variant of ours makes the trainer's step. Packages are built as documented, without
dropout. Noise is added to weights.
"""

from functools import partial
from importlib import import_module, metadata

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from bench.cost_worker import CostWorker, add_noise_
from bench.turns import time_calls
from harness.data.sources import PINNED
from harness.loop.trainer import backend_of
from harness.plan.build import Plan
from harness.record.folder import config_hash

REFERENCE = "reference_model"
TRANSFORMERS = "x-transformers"
PACKAGES = {REFERENCE: "torch", TRANSFORMERS: TRANSFORMERS}
"""The package of each peer, as pip names it. Speeds are reported relative to that of the first
peer."""
INSTALL = "not installed; python -m pip install -e .[peers]"


class ReferenceModel(nn.Module):
    """A minimal transformer as users write it in PyTorch: pre-norm,
    ``scaled_dot_product_attention``, a GELU feed-forward of four times the width, learned absolute
    positions, and biases in the norms only. It carries no state. With vocabulary V, width D,
    ``max_length`` T and L layers it has (2 V + T + 2) D + L (12 D^2 + 4 D) parameters."""

    def __init__(self, *, vocabulary: int, d_model: int, layers: int, heads: int, max_length: int):
        super().__init__()
        self.heads = heads
        matrix = partial(nn.Linear, bias=False)
        self.embedding = nn.Embedding(vocabulary, d_model)
        self.positions = nn.Embedding(max_length, d_model)

        def layer() -> nn.ModuleList:
            """Return queries, keys and values; the output of attention; and a feed-forward."""
            to_hidden = matrix(d_model, 4 * d_model)
            feed_forward = (to_hidden, nn.GELU(), matrix(4 * d_model, d_model))
            return nn.ModuleList(
                [
                    nn.Sequential(nn.LayerNorm(d_model), matrix(d_model, 3 * d_model)),
                    matrix(d_model, d_model),
                    nn.Sequential(nn.LayerNorm(d_model), *feed_forward),
                ]
            )

        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(d_model), matrix(d_model, vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[B, T, V]`` of ``tokens``, int64 ``[B, T]`` with T at most
        ``max_length``."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for query_key_value, output, feed_forward in self.layers:
            stacked = query_key_value(x)
            q, k, v = rearrange(stacked, "b t (three h k) -> three b h t k", three=3, h=self.heads)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + output(rearrange(y, "b h t k -> b t (h k)"))
            x = x + feed_forward(x)
        return self.head(x)


def build_peer(name: str, plan: Plan) -> nn.Module:
    """Return the model of a peer in a plan's sizes, which maps bytes ``[B, T]`` to logits ``[B, T,
    V]``. RuntimeError with the package's message if the package is not installed or raises an
    error."""
    m = plan.model
    vocabulary = plan.data.vocabulary
    max_length = plan.batch.segment
    if name == REFERENCE:
        return ReferenceModel(
            vocabulary=vocabulary,
            d_model=m.d_model,
            layers=m.layers,
            heads=m.heads,
            max_length=max_length,
        )
    try:
        library = import_module(name.replace("-", "_"))
        decoder = library.Decoder(
            dim=m.d_model,
            depth=m.layers,
            heads=m.heads,
            attn_dim_head=m.d_model // m.heads,
            attn_flash=True,
            rotary_pos_emb=True,
            verbose=False,
        )
        return library.TransformerWrapper(
            num_tokens=vocabulary, max_seq_len=max_length, attn_layers=decoder
        )
    except ImportError as error:
        raise RuntimeError(f"{PACKAGES[name]}: {INSTALL} ({error})") from error
    except Exception as error:  # a package's ValueError is no mistake of the user
        raise RuntimeError(f"{name} cannot be built: {type(error).__name__}: {error}") from error


def version(package: str) -> str | None:
    """Return the version of the installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class PeerWorker(CostWorker):
    """Makes the measurements of one entry: provenance, training memory and time."""

    kind = "peers"
    memory = ("train_memory",)

    def identity(self) -> dict:
        """Return the row's provenance, with the package and its version. ``variant`` is the peer's
        name."""
        row = super().identity()
        peer = self.task.peer
        package = PACKAGES.get(peer, "attention-windtunnel")
        if peer:
            config = row["config"] | {"variant": {"name": peer, "package": package}}
            row |= {
                "variant": peer,
                "config": config,
                "config_hash": config_hash(config, pinned=PINNED),
            }
        return row | {"package": package, "package_version": version(package)}

    def build(self) -> dict:
        """Make the model; return ``facts``."""
        if self.task.peer:
            # imports the package, so that no peak contains the package itself
            build_peer(self.task.peer, self.plan)
        facts = super().build()
        if self.task.peer:
            self.forward = torch.compile(self.model) if self.runtime.compile else self.model
        return facts

    def facts(self) -> dict:
        """Return the row's backend and numbers of parameters: all (``total``), and, of ours, those
        of a byte (``touched``)."""
        parameters = {"total": sum(p.numel() for p in self.model.parameters())}
        if self.task.peer:
            backend = "fused" + ", compiled" * self.runtime.compile
        else:
            parameters["touched"] = self.model.touched_parameters()
            backend = backend_of(self.model, self.runtime)
        return {"parameters": parameters, "backend": backend}

    def train_memory(self) -> dict:
        """Return the peak memory of a training step, in bytes."""
        if self.task.peer:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
            return self.step_peak()
        memory = super().train_memory()
        return {
            name: memory[name]
            for name in ("train_peak_bytes", "peak_reserved_bytes", "approximate")
        }

    def times(self, quantity: str, *, seconds: float) -> list[float]:
        """Return milliseconds of training steps, made for ``seconds`` but two or more, after an
        untimed one."""
        return time_calls(
            self._train,
            synchronise=self.runtime.synchronise,
            max_seconds=seconds,
            min_calls=2,
            warmup_calls=1,
        )

    def flops(self) -> dict:
        """Return an empty dictionary, because rows of peers have no FLOPs."""
        return {}

    def _model(self) -> nn.Module:
        if self.task.peer is None:
            return super()._model()
        model = build_peer(self.task.peer, self.plan)
        add_noise_(model)
        return model.train()

    def _train(self) -> None:
        """Return one whole training step."""
        if not self.task.peer:
            return super()._train()
        inputs, targets = self._batch()
        with self.runtime.autocast():
            logits = self.forward(inputs)
        F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
