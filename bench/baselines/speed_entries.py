"""The entrants of ``bench.speed``: plans of the workload, and entries with the provenance of their rows."""

from dataclasses import dataclass

from torch import Tensor

from bench.baselines.entrants import OurModel, PeerModel, Task
from bench.baselines.layer_lineup import LayerSettings
from bench.baselines.lineup import OURS, Gate, first_batches, peer_identity, set_memory, set_persistent
from bench.baselines.rivals import RIVALS, Memory, Sizes, traced
from bench.baselines.rounds import Entry
from bench.baselines.speed_cases import SETTINGS, SpeedSettings
from bench.baselines.steady import SteadyModel, SteadyTask
from bench.planning import bench_plan, provenance, recompose, typed_command
from harness.data import corpora
from harness.data.corpora import Corpus
from harness.device import runtime
from harness.loop.run import path_of
from harness.plan.build import Plan
from harness.plan.settings import parse

BATCHES, PROOF_POSITIONS = 32, 128
JOB = "whole training step"
HELD = {
    "variant": "every case has its own",
    "position": "every case has its own",
    "model": "the section of the device sets its sizes",
    "runtime.device": "device=.. sets it",
    **dict.fromkeys(("model.cache", "model.attend_self", "batch.carry"), "every case has its own"),
    **dict.fromkeys(("model.dropout", "model.embedding_dropout"), "dropout is off"),
    "batch.accumulate": "a step is taken whole",
    "record.every_steps": "the trainer case has its own",
}
HELD |= {
    key: f"{{device}}.{name} sets it"
    for key, name in {
        "model.d_model": "width",
        "model.heads": "heads",
        "model.layers": "layers",
        "model.span": "span",
        "batch.lanes": "batch",
        "batch.segment": "block",
        "data.vocabulary": "vocabulary",
        "runtime.path": "path",
        "runtime.precision": "precision",
        "runtime.compile": "compile",
    }.items()
}
"""Keys of a training run that the cases set, and how."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Keys that the sections ``cpu`` and ``cuda`` of ``conf/speed.yaml`` have in common."""

    path: str
    precision: str
    compile: bool
    vocabulary: int
    width: int
    heads: int
    layers: int
    block: int
    batch: int
    span: int
    spans: list


@dataclass(frozen=True, kw_only=True)
class CpuWorkload(Workload):
    persistent: int
    long_span: int
    near: int
    long_context: int


@dataclass(frozen=True, kw_only=True)
class CudaWorkload(Workload):
    short_span: int


class EntryMaker:
    """Makes plans and entries of one device's workload.

    Args:
        scratch: a folder for what entrants write.

    Attributes:
        sizes, layer: the sections ``cpu`` or ``cuda``, and ``layer``.
    """

    def __init__(self, settings: SpeedSettings, *, scratch: str):
        self.settings, self.scratch = settings, scratch
        kind = CudaWorkload if settings.device == "cuda" else CpuWorkload
        self.sizes = parse(kind, getattr(settings, settings.device), key=settings.device)
        self.layer = parse(LayerSettings, settings.layer, key="layer")

    def plan(
        self,
        variant: str,
        *,
        position: str = "rotary",
        carry: bool = True,
        span: int | None = None,
        lanes: int | None = None,
        segment: int | None = None,
        d_model: int | None = None,
        layers: int | None = None,
        memory: Memory | None = None,
        every_steps: int | None = None,
    ) -> Plan:
        """The plan of a variant on the workload, or with other sizes."""
        s = self.sizes
        words = (f"variant={variant}", f"position={position}")
        config = recompose("speed", *words, own=tuple(vars(self.settings)))
        model = {"d_model": d_model or s.width, "layers": layers or s.layers, "heads": s.heads, "span": span or s.span}
        model |= {"cache": SETTINGS[position], "attend_self": position == "rotary"}
        config.model.update(model | {"dropout": 0.0, "embedding_dropout": 0.0})
        config.batch.update({"lanes": lanes or s.batch, "segment": segment or s.block, "carry": carry, "accumulate": 1})
        config.runtime.update({"device": self.settings.device, "path": s.path})
        config.runtime.update({"precision": s.precision, "compile": s.compile})
        config.data.vocabulary = s.vocabulary
        config.record.every_steps = every_steps or config.record.every_steps
        if memory:
            set_memory(config, memory)
        if variant == "all_attention":
            set_persistent(config, s.persistent)
        return bench_plan(config)

    def ours(self, name: str, plan: Plan, *, spans: list | None = None, make: type[SteadyModel] = SteadyModel) -> Entry:
        corpus, batches = self._bytes(plan)
        here = runtime.start(plan.runtime)
        path_of(plan.make_model(), here)  # both complain
        same = {"config": plan.config, "trusted": plan.trust, "batches": batches, "proof_positions": PROOF_POSITIONS}
        steady = SteadyTask(**same, spans=None if spans is None else tuple(spans), scratch=self.scratch)
        return Entry(
            name=name,
            job=JOB,
            make=make if plan.batch.carry else OurModel,
            task=steady if plan.batch.carry else Task(**same),
            gate=(Gate, plan.config, plan.trust),
            package=OURS,
            reference=name,
            bytes_per_step=plan.batch.lanes * plan.batch.segment,
            identity=provenance(plan, kind="speed", corpus=corpus, runtime=here, command=typed_command("speed")),
        )

    def peer(self, name: str, plan: Plan) -> Entry:
        corpus, batches = self._bytes(plan)
        rival, sizes = RIVALS[name], self._rival_sizes(plan)
        same = {"config": plan.config, "trusted": plan.trust, "batches": batches, "proof_positions": PROOF_POSITIONS}
        about = {"corpus": corpus, "runtime": runtime.start(plan.runtime), "command": typed_command("speed")}
        known = peer_identity(provenance(plan, kind="speed", **about), name, traced(rival, sizes))
        return Entry(
            name=name,
            job=JOB,
            make=PeerModel,
            task=Task(**same, rival=rival, sizes=sizes),
            package=rival.package,
            reference=name,
            bytes_per_step=plan.batch.lanes * plan.batch.segment,
            identity=known,
        )

    def _rival_sizes(self, plan: Plan) -> Sizes:
        """Those of a peer; neither the yardstick nor its judge has a memory, persistent vectors or a window."""
        m, asked = plan.model, self.layer
        if m.d_model % m.heads:
            raise ValueError(f"{self.settings.device}.heads={m.heads}: must divide width={m.d_model}")
        memory = Memory(half_keys=asked.half_keys[0], top_k=asked.top_k, heads=asked.heads, d_query=asked.d_query)
        same = {"vocabulary": plan.data["vocabulary"], "d_model": m.d_model, "layers": m.layers, "heads": m.heads}
        return Sizes(**same, context=m.span, persistent=0, window=m.span, memory=memory)

    def _bytes(self, plan: Plan) -> tuple[Corpus, Tensor]:
        """The corpus, and the first batches of its training stream."""
        corpus = corpora.load(**plan.data)
        return corpus, first_batches(plan, corpus, number=BATCHES)
