"""Layer workers: one layer alone, ours or a package's, in a process of its own: forward, backward and update."""

import torch
from torch import Tensor

from bench.baselines.entry_workers import PROOF_STREAMS, EntryWorker, Task
from bench.baselines.proof import Probe
from bench.cost_worker import MIDDLE

PROOF_POSITIONS = 64


class OurLayer(EntryWorker):
    """One sublayer of a variant alone, on fixed inputs and a fixed gradient of its output, which is what it costs
    inside any network; with the optimizers that a training run gives it."""

    def __init__(self, task: Task):
        super().__init__(task)
        generator, b = torch.Generator().manual_seed(self.plan.seed), self.plan.batch
        pair = torch.randn(2, b.streams, b.segment, self.plan.model.d_model, generator=generator)
        self.x, self.gradient = pair.to(self.device)  # [B, T, D] each
        self.x.requires_grad_()
        self.make()

    def make(self) -> None:
        """The layer and what moves it."""
        whole = self.plan.make_model().to(self.device)
        self.model = next(s for name, s in whole.sublayers() if name.endswith(f".{self.task.layer}")).train()
        self.optimizer = self.plan.make_optimizers(whole)  # what has no gradient is left alone
        self.optimizer.lr = 0.0
        self.moved_by = self.optimizer.optimizers.values()
        self.forward = self.runtime.forward(self.model)

    def call(self, x: Tensor) -> Tensor:
        """``[B, T, D]`` from ``x [B, T, D]``."""
        return self.forward(x).y

    def update(self) -> None:
        """Move the parameters, drop their gradients."""
        self.optimizer.step(MIDDLE)
        self.optimizer.zero_grad()

    def train(self) -> None:
        with self.runtime.autocast():
            y = self.call(self.x)
        y.backward(self.gradient.to(y.dtype))
        self.x.grad = None
        self.update()

    def probe(self) -> Probe:
        few = (slice(PROOF_STREAMS), slice(PROOF_POSITIONS))
        weight = self.gradient[few].double()
        return Probe(
            model=self.model, outputs=self.call, inputs=self.x.detach()[few], loss=lambda y: (y * weight).sum()
        )

    def backend(self) -> str:
        return self.model.backend(self.device, training=True)


class PeerLayer(OurLayer):
    """A package's layer."""

    def make(self) -> None:
        self.make_peer()

    def call(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def backend(self) -> str:
        return self.task.peer.backend
