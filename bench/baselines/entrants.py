"""One entrant of ``bench.peers`` in a process of its own: it proves itself, says what it takes, and trains when asked.

Every entrant gets the same bytes in the same order, and takes the whole training step: forward, loss, backward, optimizer,
gradients dropped. Ours take the trainer's own step. The learning rate is 0: the optimizer does all its work, and spans
stay where they start.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn

from bench.baselines.proof import Probe, prove
from bench.baselines.rivals import INSTALL, Rival, Sizes, touched_parameters
from bench.baselines.yardstick import fused_adamw
from bench.measure import peak_bytes, times
from bench.subject import MIDDLE, WARM_STEPS
from harness.count.flops import count_flops
from harness.count.memory import PeakMemory, keep_freed
from harness.device import runtime
from harness.loop.run import path_of
from harness.loop.step import Trainer
from harness.plan.build import plan_run

MEASURED_STEPS = 3
PROOF_STREAMS = 2


class Entrant:
    """What a cell is asked: ``prove`` in a process that is thrown away, in another ``weigh`` and then ``round`` after round.

    Args:
        config: of a training run, resolved: sizes, lanes, segment, runtime, and for ours the variant.
        trusted: packages that it may name beside its ``trust``.

    Attributes:
        model: on the run's device; made by the subclass, below whose ``load`` the memory's baseline lies.
        moved_by: its optimizers.
    """

    model: nn.Module
    moved_by: Iterable[torch.optim.Optimizer]

    def __init__(self, config: dict, trusted: tuple[str, ...]):
        self.plan = plan_run(OmegaConf.create(config), trusted=trusted)
        self.runtime = runtime.start(self.plan.runtime)
        load_libraries(self.runtime.device)
        self.load()
        self.meter = PeakMemory(self.runtime.device)
        runtime.seed(self.plan.seed)

    def load(self) -> None:
        """Import what is measured: code is not what its memory is about."""

    def train(self) -> None:
        """One whole training step."""
        raise NotImplementedError

    def probe(self) -> Probe:
        """What is checked."""
        raise NotImplementedError

    def touched(self) -> int:
        """Parameters read per byte."""
        return touched_parameters(self.model)

    def path(self) -> str:
        """``plain``, ``fused``, ..."""
        return "plain"

    def prove(self) -> dict[str, str]:
        """The checks: name to ``ok`` or the reason of the failure."""
        return prove(self.probe())

    def weigh(self) -> dict:
        """Parameters, optimizer, path, FLOPs of a training step, and its peak of memory after warm-up."""
        keep_freed(False)
        for _ in range(WARM_STEPS):
            self.train()
        peak = peak_bytes(self._some_steps, device=self.runtime.device, meter=self.meter)
        keep_freed(True)  # from here on time counts
        path, seen = self.path(), self.runtime.device.type == "cpu" and not self.runtime.compile
        names = [("fused " if o.defaults.get("fused") else "") + type(o).__name__ for o in self.moved_by]
        return {
            "parameters": {"total": sum(p.numel() for p in self.model.parameters()), "touched": self.touched()},
            "optimizer": " + ".join(dict.fromkeys(names)),
            "step_flops": count_flops(self.train, gradients=True).total if seen else None,  # not of compiled kernels
            "path": f"{path}, compiled" if self.runtime.compile and "compiled" not in path else path,
            "memory": {"train_peak_bytes": peak.bytes, "approximate": peak.approximate},
        }

    def _some_steps(self) -> None:
        for _ in range(MEASURED_STEPS):
            self.train()

    def round(self, seconds: float) -> list[float]:
        """Milliseconds of each training step, for so long, two steps at least; one before them is not counted, because
        others have used the caches since the last round."""
        clock = {"synchronise": self.runtime.synchronise, "most_seconds": seconds}
        return times(self.train, **clock, least_calls=2, warm_calls=1)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A language model out of plain values, so that it can be sent to another process.

    Attributes:
        config, trusted: as in ``Entrant``.
        batches: uint8 ``[n, B, T + 1]``, read in a circle.
        rival, sizes: for a peer.
        proof_positions: of a segment that are enough to prove it; None for all.
    """

    config: dict
    trusted: tuple[str, ...]
    batches: Tensor
    rival: Rival | None = None
    sizes: Sizes | None = None
    proof_positions: int | None = None


class LanguageEntrant(Entrant):
    """A language model; a subclass says how it is made, called and trained."""

    def __init__(self, task: Task):
        self.task = task
        super().__init__(task.config, task.trusted)
        pairs = task.batches.to(self.runtime.device).long()
        self.inputs, self.targets, self.taken = pairs[:, :, :-1], pairs[:, :, 1:], 0

    def logits(self, tokens: Tensor) -> Tensor:
        """``[B, T, V]`` from ``tokens [B, T]``."""
        raise NotImplementedError

    def batch(self) -> tuple[Tensor, Tensor]:
        """The next inputs and targets, int64 ``[B, T]``."""
        number = self.taken % len(self.inputs)
        self.taken += 1
        return self.inputs[number], self.targets[number]

    def probe(self) -> Probe:
        few = (slice(PROOF_STREAMS), slice(self.task.proof_positions))
        targets = self.targets[0][few]
        return Probe(
            model=self.model,
            outputs=self.logits,
            inputs=self.inputs[0][few],
            loss=lambda logits: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
            vocabulary=self.plan.data["vocabulary"],
        )


class OurModel(LanguageEntrant):
    """A variant of the configuration, with the trainer's step and optimizers."""

    def __init__(self, task: Task):
        super().__init__(task)
        self.model = self.plan.make_model().to(self.runtime.device)
        optimizers = self.plan.make_optimizers(self.model)
        optimizers.lr = 0.0
        self.moved_by = optimizers.optimizers.values()
        self.trainer = Trainer(self.model, optimizers, self.runtime)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits

    def train(self) -> None:
        self.trainer.step(*self.batch(), None, fraction=MIDDLE)

    def touched(self) -> int:
        return self.model.touched_parameters()

    def path(self) -> str:
        return path_of(self.model, self.runtime)


class PeerModel(LanguageEntrant):
    """A peer, with fused AdamW."""

    def __init__(self, task: Task):
        super().__init__(task)
        self.model = built(task.rival, task.sizes).to(self.runtime.device)
        self.optimizer = fused_adamw(list(self.model.parameters()), lr=0.0)
        self.moved_by = [self.optimizer]
        self.forward = self.runtime.forward(self.model.train())

    def load(self) -> None:
        built(self.task.rival, self.task.sizes)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def train(self) -> None:
        inputs, targets = self.batch()
        with self.runtime.autocast():
            logits = self.forward(inputs)
        F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def path(self) -> str:
        return self.task.rival.path


def built(rival: Rival, sizes: Sizes) -> nn.Module:
    """The peer's model; RuntimeError with what its package says where it cannot be had with these sizes."""
    arguments = rival.arguments(sizes)
    try:
        return rival.build(sizes, arguments)
    except ImportError as error:
        raise RuntimeError(f"{rival.package}: {INSTALL} ({error})") from error
    except Exception as error:  # a package's complaint is no mistake of the user's
        raise RuntimeError(f"cannot be built with {arguments}: {type(error).__name__}: {error}") from error


def load_libraries(device: torch.device) -> None:
    """What torch loads and allocates at its first products belongs to no model."""
    x = torch.ones(1, 2, 64, 32, device=device, requires_grad=True)
    F.scaled_dot_product_attention(x, x, x @ x.mT @ x).softmax(-1).sum().backward()
    torch.optim.AdamW([x]).step()
