"""Who takes part in ``bench.peers``: entries made from its settings, each with the provenance of its row.

Everything that a user may have got wrong is found here, before a process is started.
"""

from dataclasses import dataclass, field

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from bench.baselines.entrants import OurModel, PeerModel, Task
from bench.baselines.rivals import RIVALS, YARDSTICK, Memory, Sizes, traced
from bench.baselines.rounds import Entry
from bench.planning import bench_plan, provenance, recompose, typed_command
from harness.data import corpora
from harness.data.corpora import Corpus, Lanes
from harness.device import runtime
from harness.loop.run import path_of
from harness.plan.build import Plan, plan_run
from harness.plan.settings import parse
from harness.record import folder

OURS = "attention-windtunnel"
JOB = "language model"
HELD = {
    "variant": "variants=[..] names those that take part",
    "batch.segment": "context=.. sets it",
    "model.span": "context=.. sets it",
    "batch.carry": "no state is carried in this job",
    "batch.accumulate": "a step is taken whole",
    "model.dropout": "dropout is off",
    "model.embedding_dropout": "dropout is off",
}
"""Keys of a training run that are the same for everybody here, and why."""


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """The keys of ``conf/peers.yaml``, which says what they mean."""

    job: str = field(metadata={"allowed": ("language_model", "layer")})
    variants: list
    peers: list
    context: int
    rounds: int
    seconds: float
    batches: int
    persistent: int | None
    window: int | None
    memory: dict
    layer: dict


class Gate:
    """Holds a variant of ours to the contract, in a process of its own."""

    def __init__(self, config: dict, trusted: tuple[str, ...]):
        self.plan = plan_run(OmegaConf.create(config), trusted=trusted)

    def broken(self) -> list[str]:
        """Promises that are broken, one line each."""
        from bench.conformance import gate

        torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other
        return [f"{finding.promise}: {finding.detail}" for finding in gate(self.plan)]


def language_entries(cfg: DictConfig, settings: PeerSettings) -> list[Entry]:
    """The yardstick first, then the peers, then ours. ValueError naming the key, the value and what is allowed."""
    check_typed(HELD)
    _check_names(settings)
    _share(cfg, settings)
    base = bench_plan(cfg)
    sizes = _sizes(base, settings)
    ours = []
    for name in settings.variants:
        config = recompose("peers", f"variant={name}", own=tuple(vars(settings)))
        _share(config, settings)
        _set_sizes(config, sizes)
        ours.append(bench_plan(config))
    here = runtime.start(base.runtime)
    _check_devices(settings, here)
    for plan in ours:
        path_of(plan.make_model(), here)  # both complain
    corpus = corpora.load(**base.data)
    batches = first_batches(base, corpus, number=settings.batches)
    same = {"job": JOB, "reference": YARDSTICK, "bytes_per_step": base.batch.lanes * base.batch.segment}

    def identity(plan: Plan) -> dict:
        return provenance(plan, kind="peers", corpus=corpus, runtime=here, command=typed_command("peers"))

    entries = []
    for name in (YARDSTICK, *settings.peers):
        rival = RIVALS[name]
        task = Task(config=base.config, trusted=base.trust, batches=batches, rival=rival, sizes=sizes)
        known = peer_identity(identity(base), name, traced(rival, sizes))
        entries.append(Entry(name=name, make=PeerModel, task=task, package=rival.package, identity=known, **same))
    for plan in ours:
        task = Task(config=plan.config, trusted=plan.trust, batches=batches)
        own = {"gate": (Gate, plan.config, plan.trust), "package": OURS, "identity": identity(plan)}
        entries.append(Entry(name=plan.variant, make=OurModel, task=task, **own, **same))
    return entries


def peer_identity(identity: dict, name: str, facts: dict) -> dict:
    """Provenance of a peer: in place of a variant, what was built."""
    config = identity["config"] | {"variant": {"name": name, **facts}}
    return identity | {"variant": name, "config": config, "config_hash": folder.config_hash(config)}


def check_typed(held: dict[str, str]) -> None:
    """ValueError if a key was typed that is the same for everybody."""
    from hydra.core.hydra_config import HydraConfig

    for word in HydraConfig.get().overrides.task:
        key = word.lstrip("+~").partition("=")[0]
        if key in held:
            raise ValueError(f"{word}: cannot be chosen in this job; {held[key]}")


def set_memory(config: DictConfig, memory: Memory) -> None:
    """Its sizes into every sublayer that has half-keys."""
    for node in config.variant.values():
        if isinstance(node, DictConfig) and "half_keys" in node:
            for name, value in vars(memory).items():
                node[name] = value


def set_persistent(config: DictConfig, number: int) -> None:
    """So many vectors into every sublayer that has persistent ones."""
    for node in config.variant.values():
        if isinstance(node, DictConfig) and isinstance(node.get("persistent"), DictConfig):
            node.persistent.number = number


def _check_names(settings: PeerSettings) -> None:
    allowed = [name for name in RIVALS if name != YARDSTICK]
    for key, names in (("peers", settings.peers), ("variants", settings.variants)):
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise ValueError(f"{key}={names}: must be a list of names, each once")
    if strange := [name for name in settings.peers if name not in allowed]:
        raise ValueError(f"peers={strange}: there is no such peer; allowed are {', '.join(allowed)}")
    for key, least in (("context", 4), ("batches", 1), ("persistent", 1), ("window", 1)):
        value = getattr(settings, key)
        if value is not None and value < least:
            raise ValueError(f"{key}={value}: allowed are integers from {least}")


def _check_devices(settings: PeerSettings, here: runtime.Runtime) -> None:
    """ValueError where a peer runs on another kind of device only."""
    kind = here.device.type
    for name in settings.peers:
        if RIVALS[name].device not in (None, kind):
            others = [other for other, rival in RIVALS.items() if rival.device in (None, kind) and other != YARDSTICK]
            raise ValueError(
                f"peers=[{name}]: takes part on runtime.device={RIVALS[name].device} only; on {kind} allowed are "
                f"{', '.join(others)}"
            )


def _share(config: DictConfig, settings: PeerSettings) -> None:
    """What is the same for everybody, into a training configuration."""
    config.batch.segment = config.model.span = settings.context
    config.batch.carry, config.batch.accumulate = False, 1
    config.model.dropout = config.model.embedding_dropout = 0.0


def _set_sizes(config: DictConfig, sizes: Sizes) -> None:
    """Those of memories and persistent vectors, where the variant has them."""
    set_memory(config, sizes.memory)
    set_persistent(config, sizes.persistent)


def _sizes(plan: Plan, settings: PeerSettings) -> Sizes:
    m = plan.model
    if m.layers < 2:
        raise ValueError(f"model.layers={m.layers}: allowed are integers from 2, one of them with a product-key memory")
    if m.d_model % m.heads:
        raise ValueError(f"model.heads={m.heads}: must divide model.d_model={m.d_model}")
    return Sizes(
        vocabulary=plan.data["vocabulary"],
        d_model=m.d_model,
        layers=m.layers,
        heads=m.heads,
        context=settings.context,
        persistent=settings.persistent or 2 * m.d_model,
        window=settings.window or settings.context,
        memory=parse(Memory, settings.memory, key="memory"),
    )


def first_batches(plan: Plan, corpus: Corpus, *, number: int) -> Tensor:
    """The first batches of the training stream, uint8 ``[number, B, T + 1]``: inputs and the byte after them."""
    b = plan.batch
    lanes = Lanes(corpus.splits["train"], lanes=b.lanes, segment=b.segment, seed=plan.seed, carry=False)
    pairs = [lanes.batch(position) for position in range(number)]
    return torch.stack([torch.cat([inputs, targets[:, -1:]], dim=1) for inputs, targets in pairs]).byte()
