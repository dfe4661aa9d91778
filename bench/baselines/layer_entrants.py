"""A product-key memory alone, the package's and ours, in a process of its own: forward, backward and update of the layer on
fixed inputs and a fixed gradient of its output, which is what the layer costs inside any network."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.baselines.entrants import Entrant
from bench.baselines.proof import Probe
from bench.baselines.rivals import INSTALL, Memory, build_pkm, pkm_arguments
from bench.baselines.yardstick import fused_adamw
from bench.subject import MIDDLE

PROOF_POSITIONS = 64


@dataclass(frozen=True, kw_only=True)
class LayerTask:
    """A product-key memory out of plain values, so that it can be sent to another process.

    Attributes:
        config, trusted: as in ``Entrant``; one sublayer of the variant is our memory.
        memory: its sizes.
        positions: bytes of a step.
        optimizer: of the package's: ``fused adamw``, or ``adam``, as its documentation has it.
    """

    config: dict
    trusted: tuple[str, ...]
    memory: Memory
    positions: int
    optimizer: str | None = None


class LayerEntrant(Entrant):
    """A layer; a subclass says how it is made, called and updated."""

    def __init__(self, task: LayerTask):
        self.task = task
        super().__init__(task.config, task.trusted)
        generator = torch.Generator().manual_seed(self.plan.seed)
        pair = torch.randn(2, 1, task.positions, self.plan.model.d_model, generator=generator)
        self.x, self.gradient = pair.to(self.runtime.device)  # [1, T, D] each
        self.x.requires_grad_()

    def call(self, x: Tensor) -> Tensor:
        """``[1, T, D]`` from ``x [1, T, D]``."""
        raise NotImplementedError

    def update(self) -> None:
        """Move the parameters, drop their gradients."""
        raise NotImplementedError

    def train(self) -> None:
        with self.runtime.autocast():
            y = self.call(self.x)
        y.backward(self.gradient.to(y.dtype))
        self.x.grad = None
        self.update()

    def probe(self) -> Probe:
        weight = self.gradient[:, :PROOF_POSITIONS].double()
        return Probe(
            model=self.model,
            outputs=self.call,
            inputs=self.x.detach()[:, :PROOF_POSITIONS],
            loss=lambda y: (y * weight).sum(),
        )


class OurLayer(LayerEntrant):
    """The memory of the configuration's variant, with the optimizers that a training run gives it."""

    def __init__(self, task: LayerTask):
        super().__init__(task)
        whole = self.plan.make_model().to(self.runtime.device)
        self.model = next(s for _, s in whole.sublayers() if hasattr(s, "half_keys")).train()
        self.optimizers = self.plan.make_optimizers(whole)  # what has no gradient is left alone
        self.optimizers.lr = 0.0
        self.moved_by = self.optimizers.optimizers.values()
        self.forward = self.runtime.forward(self.model)

    def call(self, x: Tensor) -> Tensor:
        return self.forward(x).y

    def update(self) -> None:
        self.optimizers.step(MIDDLE)
        self.optimizers.zero_grad()

    def touched(self) -> int:
        return self.model.touched_parameters()

    def path(self) -> str:
        return self.model.path(self.runtime.device, training=True)


class PackageLayer(LayerEntrant):
    """The layer of product-key-memory."""

    def __init__(self, task: LayerTask):
        super().__init__(task)
        self.model = build_pkm(self.arguments()).to(self.runtime.device).train()
        self.optimizer = _optimizer(self.model, task.optimizer)
        self.moved_by = [self.optimizer]
        self.forward = self.runtime.forward(self.model)

    def arguments(self) -> dict:
        """Of the package's class."""
        return pkm_arguments(self.task.memory, d_model=self.plan.model.d_model)

    def load(self) -> None:
        try:
            build_pkm(self.arguments())
        except ImportError as error:
            raise RuntimeError(f"product-key-memory: {INSTALL} ({error})") from error

    def call(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _optimizer(model: torch.nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "fused adamw":
        return fused_adamw(list(model.parameters()), lr=0.0)
    from product_key_memory import fetch_optimizer_parameters

    return torch.optim.Adam(fetch_optimizer_parameters(model, pkm_learning_rate=0.0), lr=0.0)
