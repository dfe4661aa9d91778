"""Entries of ``bench.peers``, each with the provenance of its row, before anything is started.

An entry is the configuration of a training run, what was typed with further words, as a variant of ours or in the
sizes of a peer.
"""

import json
from dataclasses import asdict, replace

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from bench.baselines.entry_workers import OurModel, PeerModel, Task, TrainerLoop
from bench.baselines.layers import OurLayer, PeerLayer
from bench.baselines.packages import LAYERS, PACKAGES, REFERENCE_MODEL, Memory, Sizes
from bench.baselines.rounds import Entry
from bench.baselines.settings import ComparisonSettings, EntrySettings, PeerSettings
from bench.planning import bench_plan, own_keys, provenance, recompose, typed_command
from harness.data import corpora
from harness.data.corpora import Corpus, Streams
from harness.device import runtime
from harness.device.allocator import SETTINGS
from harness.device.runtime import Runtime
from harness.loop.train_state import backend_of
from harness.plan.build import Plan, plan_run
from harness.plan.settings import checked, parse
from harness.record import folder

OURS = "attention-windtunnel"
Planned = tuple[Plan, Sizes, Tensor, Corpus]
TIMED = "keep"
"""The setting of the allocator in which the entries of cases are timed; in the others they are weighed."""


class Gate:
    """Holds a variant of ours to the contract, in a process of its own."""

    def __init__(self, config: dict, trusted: tuple[str, ...]):
        self.plan = plan_run(OmegaConf.create(config), trusted=trusted)

    def broken(self) -> list[str]:
        """Promises that are broken, one line each."""
        from bench.conformance import gate

        torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other
        return [f"{finding.promise}: {finding.detail}" for finding in gate(self.plan)]


class EntryMaker:
    """Makes entries; plans of equal words are made once.

    Args:
        kind: of their rows.
        scratch: a folder for what entries write.
    """

    def __init__(self, *, kind: str, scratch: str):
        self.kind, self.scratch = kind, scratch
        self._planned: dict[tuple[str, ...], Planned] = {}
        self._corpora: dict[str, Corpus] = {}

    def entries(self, name: str, asked: EntrySettings, comparison: ComparisonSettings, *, cases: bool) -> list[Entry]:
        """An entry that has not begun, for each setting of the allocator, where there are some; of cases one is timed."""
        words = (*comparison.words.split(), *asked.words.split())
        here = runtime.start(self._plan(*words)[0].runtime)
        managed = here.allocator is not None and here.device.type == "cpu"
        found = []
        for setting in SETTINGS if managed else (None,):
            own = [*words, f"runtime.allocator={setting}"] if setting else words
            entry = self._entry(
                name, asked, comparison, planned=self._plan(*own), here=replace(here, allocator=setting)
            )
            entry.allocator, entry.timed = setting, not cases or setting in (TIMED, None)
            found.append(entry)
        return found

    def _entry(
        self, name: str, asked: EntrySettings, comparison: ComparisonSettings, *, planned: Planned, here: Runtime
    ) -> Entry:
        plan, sizes, batches, corpus = planned
        identity = provenance(plan, kind=self.kind, corpus=corpus, runtime=here, command=typed_command("peers"))
        setting = {"position": None, "cache": None, "spans": None}
        task = {"config": plan.config, "trusted": plan.trust, "batches": batches, "layer": comparison.layer}
        task |= {"proof_positions": comparison.proof_positions, "scratch": self.scratch}
        if asked.peer is None:
            backend_of(plan.make_model(), here)  # both complain
            make = OurLayer if comparison.layer else TrainerLoop if asked.trainer else OurModel
            task |= {"spans": _spans(name, asked, plan)}
            if not comparison.layer:
                scheme = plan.config["position"]["_target_"].rpartition(".")[2].lower()
                setting = {"position": scheme, "cache": plan.model.cache, "spans": task["spans"]}
            own = {"package": OURS, "gate": (Gate, plan.config, plan.trust)}
        else:
            peer = (LAYERS if comparison.layer else PACKAGES)[asked.peer]
            if peer.device not in (None, here.device.type):
                fit = [
                    n
                    for n, other in PACKAGES.items()
                    if other.device in (None, here.device.type) and n != REFERENCE_MODEL
                ]
                where = f"takes part on runtime.device={peer.device} only; on {here.device.type} allowed are"
                raise ValueError(f"peers=[{name}]: {where} {', '.join(fit)}")
            make = PeerLayer if comparison.layer else PeerModel
            task |= {"peer": peer, "sizes": sizes, "optimizer": asked.optimizer}
            built = {
                "name": name,
                "package": peer.package,
                "arguments": peer.arguments(sizes),
                "sizes": asdict(sizes),
            }
            config = identity["config"] | {
                "variant": built | {"optimizer": asked.optimizer}
            }  # for a variant, what was built
            identity |= {"variant": name, "config": config, "config_hash": folder.config_hash(config)}
            own = {"package": peer.package}
        bytes_per_step = plan.batch.streams * plan.batch.segment
        same = {
            "job": comparison.job,
            "reference": comparison.reference,
            "bytes_per_step": bytes_per_step,
            "identity": identity,
        }
        return Entry(name=name, make=make, task=Task(**task), setting=setting, **same, **own)

    def _plan(self, *words: str) -> Planned:
        """The plan of a training run with these words, its peers' sizes, its first batches, and its corpus."""
        if words not in self._planned:
            config = recompose("peers", *words, own=())
            settings = parse(PeerSettings, own_keys(config, *PeerSettings.__dataclass_fields__), key="")
            memory = parse(Memory, settings.memory, key="memory")
            persistent = settings.persistent or 2 * config.model.d_model
            for node in config.variant.values():
                if isinstance(node, DictConfig) and "half_keys" in node:
                    node.update(vars(memory))
                if isinstance(node, DictConfig) and isinstance(node.get("persistent"), DictConfig):
                    node.persistent.number = persistent
            plan = bench_plan(config)
            m, data = plan.model, json.dumps(plan.data)
            if data not in self._corpora:
                self._corpora[data] = corpora.load(**plan.data)
            corpus = self._corpora[data]
            if m.layers < 2:
                allowed = "allowed are integers from 2, one of them with a product-key memory"
                raise ValueError(f"model.layers={m.layers}: {allowed}")
            if m.d_model % m.heads:
                raise ValueError(f"model.heads={m.heads}: must divide model.d_model={m.d_model}")
            same = {"vocabulary": plan.data["vocabulary"], "d_model": m.d_model, "layers": m.layers, "heads": m.heads}
            segment = plan.batch.segment
            same |= {"context": segment, "persistent": persistent, "window": settings.window or segment}
            batches = first_batches(plan, corpus, number=settings.batches)
            self._planned[words] = plan, Sizes(**same, memory=memory), batches, corpus
        return self._planned[words]


def _spans(name: str, asked: EntrySettings, plan: Plan) -> tuple[int, ...] | None:
    """Of every head."""
    if asked.spans is None:
        return None
    found, m = [checked(span, int, key=f"spans of {name}") for span in asked.spans], plan.model
    found = found * m.heads if len(found) == 1 else found
    if len(found) != m.heads or not all(0 <= span <= m.span for span in found):
        raise ValueError(f"spans of {name}={asked.spans}: must be {m.heads} integers from 0 to {m.span}, one a head")
    return tuple(found)


def first_batches(plan: Plan, corpus: Corpus, *, number: int) -> Tensor:
    """The first batches of the training stream, uint8 ``[number, B, T + 1]``: inputs and the byte after them."""
    b = plan.batch
    streams = Streams(corpus.splits["train"], streams=b.streams, segment=b.segment, seed=plan.seed, carry=False)
    pairs = [streams.batch(position) for position in range(number)]
    return torch.stack([torch.cat([inputs, targets[:, -1:]], dim=1) for inputs, targets in pairs]).byte()
