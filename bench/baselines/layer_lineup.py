"""Who takes part in ``bench.peers job=layer``: for each number of half-keys the package's product-key memory with fused
AdamW, the same with Adam, as its documentation has it, and ours with the optimizers of a training run."""

from dataclasses import dataclass

from omegaconf import DictConfig

from bench.baselines.layer_entrants import LayerTask, OurLayer, PackageLayer
from bench.baselines.lineup import HELD, OURS, Gate, PeerSettings, check_typed, peer_identity, set_memory
from bench.baselines.rivals import Memory, pkm_arguments
from bench.baselines.rounds import Entry
from bench.planning import bench_plan, provenance, recompose, typed_command
from harness.data import corpora
from harness.device import runtime
from harness.plan.build import Plan
from harness.plan.settings import checked, parse

PACKAGE = "product-key-memory"
OPTIMIZERS = ("fused adamw", "adam")
"""Of the package; the first is the reference, because ours is moved by it, too."""
HELD_HERE = HELD | {
    "variants": "product_key_memory is the one",
    "peers": f"{PACKAGE} is the one",
    "context": "layer.positions sets it",
    "model.d_model": "layer.width sets it",
    "model.layers": "it is one layer",
    "batch.lanes": "it is one stream",
    "batch.segment": "layer.positions sets it",
}


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """The keys of ``layer`` in ``conf/peers.yaml``."""

    width: int
    positions: int
    half_keys: list
    top_k: int
    heads: int
    d_query: int


def layer_entries(_cfg: DictConfig, settings: PeerSettings) -> list[Entry]:
    """Entries by number of half-keys. ValueError naming the key, the value and what is allowed."""
    check_typed(HELD_HERE)
    asked = parse(LayerSettings, settings.layer, key="layer")
    if not asked.half_keys:
        raise ValueError("layer.half_keys=[]: must be a list of integers from 1")
    numbers = [checked(number, int, key="layer.half_keys") for number in asked.half_keys]
    if min(asked.positions, asked.width, *numbers) < 1 or len(set(numbers)) < len(numbers):
        raise ValueError(f"layer={vars(asked)}: positions, width and half_keys must be at least 1, half_keys each once")
    entries = []
    for half_keys in numbers:
        memory = Memory(half_keys=half_keys, top_k=asked.top_k, heads=asked.heads, d_query=asked.d_query)
        config = recompose("peers", "variant=product_key_memory", own=tuple(vars(settings)))
        config.model.d_model, config.model.layers = asked.width, 2
        config.batch.lanes, config.batch.segment = 1, asked.positions
        set_memory(config, memory)
        entries += entries_of_size(bench_plan(config), memory, positions=asked.positions)
    return entries


def entries_of_size(plan: Plan, memory: Memory, *, positions: int, verb: str = "peers") -> list[Entry]:
    """The package's layer with each of ``OPTIMIZERS``, and ours last.

    Args:
        plan: of product_key_memory, with the sizes of ``memory``.
        positions: bytes of a step.
        verb: of bench, for provenance.
    """
    here, corpus = runtime.start(plan.runtime), corpora.load(**plan.data)
    plan.make_model()  # it complains of sizes
    arguments = pkm_arguments(memory, d_model=plan.model.d_model)
    identity = provenance(plan, kind=verb, corpus=corpus, runtime=here, command=typed_command(verb))
    names = {optimizer: f"{PACKAGE} {memory.half_keys}^2 {optimizer}" for optimizer in OPTIMIZERS}
    same = {"job": f"product-key layer, {memory.half_keys}^2 slots", "bytes_per_step": positions}
    same |= {"reference": names[OPTIMIZERS[0]]}
    task = {"config": plan.config, "trusted": plan.trust, "memory": memory, "positions": positions}
    entries = []
    for optimizer, name in names.items():
        known = peer_identity(identity, name, {"package": PACKAGE, "arguments": arguments, "optimizer": optimizer})
        own = {"make": PackageLayer, "task": LayerTask(**task, optimizer=optimizer), "identity": known}
        entries.append(Entry(name=name, package=PACKAGE, **own, **same))
    own = {"make": OurLayer, "task": LayerTask(**task), "gate": (Gate, plan.config, plan.trust), "identity": identity}
    return [*entries, Entry(name=f"{plan.variant} {memory.half_keys}^2", package=OURS, **own, **same)]
