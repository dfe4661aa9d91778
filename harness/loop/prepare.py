"""Preparation of a run: plan, corpus, model and initial weights. Into the run folder it writes
only errors."""

import dataclasses
import json
import re
from pathlib import Path

from omegaconf import DictConfig

from harness import source
from harness.cache import user_path
from harness.check.admission import admission
from harness.check.select_backend import with_backend
from harness.count.memory import PeakMemory
from harness.data import corpora
from harness.data.sources import PINNED
from harness.device.full_tensors import full_tensors
from harness.device.processes import SINGLE, ProcessGroup
from harness.device.runtime import Runtime
from harness.device.selection import device_kind, resolve_auto
from harness.device.torch_settings import configure_torch, free_earlier_jobs
from harness.failures import note
from harness.loop.distribute import distribute
from harness.loop.run import Run, record_errors
from harness.loop.state import Validated
from harness.loop.trainer import Trainer
from harness.plan.build import OLD_OBJECTIVE, Plan, is_sweep, job_number, plan_run, typed_keys
from harness.record import checkpoint, folder
from harness.record.closing_table import data_label
from harness.record.display import Display, job_label
from harness.record.folder import identity_of, read_provenance
from harness.record.rows import RECORD, read_accepted_rows
from harness.record.schema import flatten

SMALL_CORPUS = 100_000  # bytes of a user's file, below which a line warns
WARM_UP_BYTES = 16  # largest segment of the warm-up step
MAY_DIFFER = (
    "dropout",
    "embedding_dropout",
    "embedding_std",
    "head_zero_init",
    "default_bytes",
)
"""Keys of ``model`` in which a run may differ from the run of ``init_from.run``."""


def prepare(cfg: DictConfig, *, command: str, processes: ProcessGroup = SINGLE) -> Run:
    """Return the run of a configuration, checked and ready to train. ValueError for a user's
    mistake."""
    with processes.fail_together():
        plan = make_plan(cfg)
    label = ""
    if plan.sweeping:
        label = job_label(job_number())
    with Display(label=label if processes.is_main else None) as display:
        display.phase("reading the corpus")
        with processes.fail_together():
            corpus = corpora.load(**vars(plan.data))
        if plan.data.path and corpus.n_bytes < SMALL_CORPUS:
            note(
                f"WARNING: data.path has only {corpus.n_bytes:,} bytes; scores of so few say little"
            )
        if plan.objective.name == "classify":
            _warn_of_cut_texts(plan, corpus)
        run_folder = processes.on_main(lambda: _run_folder(plan, data_digest=corpus.sha256))
        run = Run(
            plan=plan, folder=run_folder, command=command, processes=processes, display=display
        )
        if run_folder.summary:
            return run
        display.phase("checking the mechanism")
        admitted = processes.on_main(lambda: admission(plan, text=corpus.splits["train"]))
        plan = dataclasses.replace(plan, admission=admitted)
        provenance = {"variant": plan.variant, "seed": plan.seed, "command": command}
        with record_errors(plan, run_folder, provenance, processes):
            with processes.fail_together():
                device_runtime = configure_torch(plan.runtime, processes=processes)
            record = run_folder.path / RECORD
            rows, _ = processes.on_main(lambda: read_accepted_rows(record, first_line=True))
            row = {}
            if rows and run_folder.checkpoint:
                row = rows[0]
            if device_runtime.is_asynchronous:
                display.phase("comparing the kernels with plain PyTorch")
            plan = with_backend(plan, device_runtime, recorded_choice=row.get("backend_choice"))
            display.phase("compiling the kernels")
            with processes.fail_together():
                _warm_up(plan, corpus, device_runtime)
                free_earlier_jobs()
                peak = PeakMemory(device_runtime.device)
                display.phase("building the model")
                trainer = Trainer(plan, corpus, device_runtime)
            distribute(trainer.model, trainer.optimizers, processes, shard=plan.runtime.shard)
            pretrained = row.get("pretrained")
            if run_folder.checkpoint is None and plan.init_from.run is not None:
                pretrained = initialise(trainer)
            plan = dataclasses.replace(plan, pretrained=pretrained)
            trainer.plan = plan
            return dataclasses.replace(run, plan=plan, trainer=trainer, peak_meter=peak)


def _warn_of_cut_texts(plan: Plan, corpus: corpora.Corpus) -> None:
    segment = plan.batch.segment
    n_cut = sum(int((texts.lengths > segment).sum()) for texts in corpus.texts.values())
    if n_cut:
        note(
            f"WARNING: {n_cut:,} texts have more than batch.segment={segment} bytes; their first "
            f"{segment} are read"
        )


def make_plan(cfg: DictConfig) -> Plan:
    """Return the plan of a configuration. ``auto`` is resolved in ``runtime.precision`` and
    ``runtime.compile``, and in ``Plan.config`` as well, which identifies the run. ValueError
    names key, value and what is allowed."""
    plan = plan_run(cfg, sweeping=is_sweep())
    _check_name(plan, typed="variant.name" in typed_keys())
    runtime = plan.runtime
    if plan.objective.name == "classify" and runtime.compile == "auto":
        runtime = dataclasses.replace(runtime, compile=False)
    runtime = resolve_auto(runtime)
    config = plan.config | {"runtime": vars(runtime)}
    return dataclasses.replace(plan, runtime=runtime, config=config)


def _check_name(plan: Plan, *, typed: bool) -> None:
    """Raise ValueError if a variant of the user has the name of a shipped one, with which tables
    would confuse it."""
    targets = re.findall(r'"_target_": "([^"]*)"', json.dumps(plan.config["variant"]))
    ours = ("variants.", "harness.", "torch.optim.")
    foreign = any(
        not target.startswith(ours) or target.endswith(".AnyModule") for target in targets
    )
    if (foreign or typed) and (source.ROOT / "conf" / "variant" / f"{plan.variant}.yaml").exists():
        raise ValueError(
            f"variant.name={plan.variant}: is the name of a shipped variant; allowed are other "
            "names"
        )


def _run_folder(plan: Plan, *, data_digest: str) -> folder.RunFolder:
    identity = folder.Identity(
        variant=plan.variant,
        seed=plan.seed,
        config=folder.config_hash(plan.config, pinned=PINNED),
        source=source.digest(plan.config, trust=plan.trust),
        data=data_digest,
        device=device_kind(plan.runtime),
        precision=plan.runtime.precision,
    )
    return folder.RunFolder(user_path(plan.outputs, key="outputs"), identity, force=plan.force)


def _warm_up(plan: Plan, corpus: corpora.Corpus, device_runtime: Runtime) -> None:
    """Make one step on a few bytes, so that memory and time that libraries need only once do not
    count as the run's."""
    batch = dataclasses.replace(
        plan.batch, streams=1, segment=min(plan.batch.segment, WARM_UP_BYTES), accumulate=1
    )
    single_process = dataclasses.replace(device_runtime, compile=False, processes=SINGLE)
    Trainer(dataclasses.replace(plan, batch=batch), corpus, single_process).step()


def initialise(trainer: Trainer) -> dict:
    """Restore the weights of ``init_from.run``, for a new schedule, or everything, to train longer.
    Learning rates, weight decays and clips are those of the present run. Returns
    ``Plan.pretrained``, and warns of another variant or corpus. ValueError names the keys that
    differ."""
    path = trainer.plan.init_from.run
    processes = trainer.runtime.processes
    content, provenance = processes.on_main(
        lambda: _read_initial(user_path(path, key="init_from.run"))
    )
    with processes.fail_together():
        try:
            _restore_initial(trainer, content, provenance)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"init_from.run={path}: its checkpoint or its {RECORD} is not what this code wrote "
                f"({type(error).__name__}: {error}); allowed is the folder of a run"
            ) from error
    pretrained = {"variant": provenance["variant"], "data": provenance["data"]}
    present = {"variant": trainer.plan.variant, "data": trainer.corpus.provenance()}
    if pretrained != present:
        before, after = (
            f"{each['variant']} on {data_label(each['data'])}" for each in (pretrained, present)
        )
        note(f"WARNING: init_from.run={path}: trained {before}; this run trains {after}")
    earlier = provenance.get("pretrained") or {}
    bytes_seen = content["spent"]["bytes"] + earlier.get("bytes_seen", 0)
    return pretrained | {"bytes_seen": bytes_seen}


def _read_initial(path: Path) -> tuple[dict, dict]:
    """Return the newest checkpoint of a run folder, and its provenance row."""
    # the next command changes the link outputs/latest
    if checkpoint.newest(path) is None or path.is_symlink():
        raise ValueError(
            f"init_from.run={path}: must be a run folder that has a checkpoint, and not a link to "
            "one"
        )
    provenance = read_provenance(path, key="init_from.run")
    return checkpoint.load_newest(path, identity_of(provenance)), provenance


def _restore_initial(trainer: Trainer, content: dict, provenance: dict) -> None:
    plan = trainer.plan
    optimizers = trainer.optimizers
    label = f"init_from.run={plan.init_from.run}"
    unit = plan.budget.unit
    restore = plan.init_from.restore
    everything = restore == "everything"
    spent = content["spent"][unit]
    if everything and spent >= plan.budget.amount:
        raise ValueError(
            f"budget.{unit}={plan.budget.amount}: {label} has spent {spent} already; allowed with "
            f"init_from.restore=everything is more than {spent}"
        )
    if not everything:
        if plan.objective.name == "classify":
            encoder = {
                name: tensor
                for name, tensor in content["model"].items()
                if not name.startswith("head.")
            }
            head = full_tensors(trainer.model.head.state_dict(prefix="head."))
            content = content | {"model": encoder | head}
        trainer.load_checkpoint(content, restore="weights")
    present = {
        "config": plan.config,
        "data": {"sha256": trainer.corpus.sha256},
        "optimizers": optimizers.describe(),
    }
    before, after = (_compared_keys(row, everything=everything) for row in (provenance, present))
    differing = [key for key in after | before if before.get(key) != after.get(key)]
    if differing:
        differences = "; ".join(
            f"{key} was {before.get(key)}, is {after.get(key)}" for key in differing
        )
        raise ValueError(f"{label}: must be equal with init_from.restore={restore}: {differences}")
    if everything:
        for name, optimizer in optimizers.optimizers.items():
            content["optimizers"]["groups"][name]["param_groups"] = optimizer.state_dict()[
                "param_groups"
            ]
        trainer.load_checkpoint(content, restore="everything")
        trainer.state.validated = Validated(
            bytes=trainer.state.spent.bytes, fraction=trainer.fraction
        )


def _compared_keys(row: dict, *, everything: bool) -> dict[str, object]:
    """Return settings that must be equal, by key. ``everything`` adds those of data, batches and
    optimizers."""
    config = row["config"]
    model = {key: config["model"][key] for key in config["model"] if key not in MAY_DIFFER}
    objective = config.get("objective", OLD_OBJECTIVE)
    compared = {
        "model": model,
        "position": config["position"],
        "objective": {"direction": objective["direction"]},
    }
    if everything:
        batch = {"order": "random"} | config["batch"]  # older rows lack the order
        compared |= {
            "objective": objective,
            "batch": {key: batch[key] for key in ("streams", "segment", "carry", "order")},
            "seed": config["seed"],
            "data": {"sha256": row["data"]["sha256"]},
        }
        for group in row["optimizers"]:
            compared[f"optim {group['name']}"] = (group["optimizer"], group["parameters"])
    return flatten(compared)
