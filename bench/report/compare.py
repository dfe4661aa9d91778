"""Which rows stand in one table, how they are named, and words for captions.

Bits per byte compare where ``score_conditions`` of ``harness.record.comparison`` and the numbers of the shared code are
equal; time and memory on equal ``cost_conditions`` and code. An *arm* is one variant, configuration and code, with any
seed.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd
import yaml

from harness.record.cells import join_words, pluralize
from harness.record.closing_table import data_label, short_commit
from harness.record.comparison import (
    ENVIRONMENT_KEYS,
    code_digest,
    code_version,
    cost_condition,
    cost_conditions,
    score_conditions,
    shared_code_version,
)
from harness.record.schema import BENCH_COMMANDS, flatten

VARIANTS = yaml.safe_load((Path(__file__).parent / "variants.yaml").read_text(encoding="utf-8"))
NOT_AN_ARM = ("seed", "outputs", "force", "reuse", "record", "checkpoint", "trust", "hydra", "data", "eval", "budget")
NOT_AN_ARM += ("purpose", "trial", "space")
"""Keys of a configuration in which seeds of one arm may differ, or that a comparison holds equal."""
NO_SETTING = re.compile(r"variant\.(numerics|small|attention\.global_bytes)(\.|$)")
"""Keys that change no number: a row has ``numerics`` itself, and ``global_bytes`` of older rows is 0."""
ADDED_KEYS = {"check": True}
"""Keys that older configurations lack, with their meaning there."""
IDENTITY = ("backend", "evaluation_backend", "checkpoint", "device_kind")
"""Keys of another arm, beside configuration and code."""
UNSET = "not set"
MOST_KEYS = 8
IN_CAPTIONS = {"spans_from": "where learned spans are"}


def results(runs: pd.DataFrame) -> Iterator[tuple[int, pd.DataFrame, list[str]]]:
    """Groups of runs that compare, numbered in the order in which their first runs ended, with the names of left-out
    runs, whose seed chose a setting of their variant. Tuning runs are no results."""
    tune = [row.get("purpose") == "tune" for row in runs["row"]]
    chose = {*zip(runs[tune]["variant"], runs[tune]["seed"], strict=True)} if any(tune) else set()
    keys = [f"{score_conditions(row)} {shared_code_version(row)}" for row in runs["row"]]
    for index, (_, same) in enumerate(runs.groupby(keys, sort=False) if keys else (), start=1):
        clean = same[[pair not in chose for pair in zip(same["variant"], same["seed"], strict=True)]]
        if len(clean):
            yield index, clean, same["run"].drop(clean.index).tolist()


def cost_ground(row: dict) -> str:
    """Equal for runs whose times and memory stand together."""
    return str((*cost_conditions(row), code_digest(row)))


def settings_of(row: dict, *, without: Sequence[str] = ()) -> dict[str, str]:
    """A configuration as flat keys and words, without keys that rows of one table share or in which seeds may differ;
    of a target, the class's name."""
    leaves = ADDED_KEYS | flatten({key: value for key, value in row["config"].items() if key not in NOT_AN_ARM})
    chosen = {key: value for key, value in leaves.items() if key not in without and not NO_SETTING.match(key)}
    return {k: str(v).rpartition(".")[2] if k.endswith("_target_") else _word(v) for k, v in chosen.items()}


def with_arms(frame: pd.DataFrame, *, without: Sequence[str] = ()) -> pd.DataFrame:
    """Rows of one table with ``settings``; ``arm``, the name of what differs by its seed only; and ``order``, the arm's
    place among those of its variant. Sorted by variant, then by arm, then by seed.

    Args:
        without: further keys of the configuration, as ``model.span``, or ``backend``, that one arm may have several of.
    """

    def identity(row: dict) -> dict[str, str]:
        timed = row["kind"] in BENCH_COMMANDS  # times and memory depend on all of the code
        code = {"source": row["source"]} if timed else code_version(row)
        code |= {"source": row["source"][:6]} if "source" in code else {}
        products = [] if timed else [group.get("products") for group in row.get("optimizers") or ()]
        about = {name: row.get(name) for name in IDENTITY if name not in without} | {"products": products}
        return {name: _word(value) for name, value in (about | code).items()}

    settings = [settings_of(row, without=without) for row in frame["row"]]
    both = [setting | identity(row) for setting, row in zip(settings, frame["row"], strict=True)]
    identities = pd.DataFrame(both, index=frame.index).fillna(UNSET)
    arms, order = pd.Series("", index=frame.index), pd.Series(0, index=frame.index)
    for variant, same in identities.groupby(frame["variant"]):
        differing = [key for key in same if key != "variant.name" and same[key].nunique() > 1]
        first = {tuple(pd.factorize(same[key])[0]): key for key in reversed(differing)}  # of those that differ together
        labels = pd.Series(variant, index=same.index)
        for key in (key for key in differing if key in first.values()):
            labels += f", {key.removesuffix('._target_').split('.')[-1]}=" + same[key]
        arms[same.index] = labels
        order[same.index] = arms[same.index].rank(method="dense").astype(int) - 1
    frame = frame.assign(settings=settings, arm=arms, order=order)
    return frame.sort_values(["variant", "order", "seed"], kind="stable")


def differences(arms: pd.DataFrame, *keys: str) -> str:
    """Keys in which a table's rows differ: of their configurations, with all of a variant as one, and of the frame."""
    settings = pd.DataFrame([*arms["settings"]]).fillna(UNSET)
    names = ["variant" if key.startswith("variant.") else key for key in settings if settings[key].nunique() > 1]
    names += [IN_CAPTIONS.get(key, key) for key in keys if key in arms and arms[key].nunique(dropna=False) > 1]
    return join_words(dict.fromkeys(names), limit=MOST_KEYS)


def commit_notes(frame: pd.DataFrame) -> list[str]:
    """The commits of the rows, in the order in which they were measured."""
    commits = [*dict.fromkeys(filter(None, map(short_commit, frame["row"])))]
    return [f"Commit {join_words(commits)}."] * bool(commits)


def _word(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else f"{value:.10g}" if isinstance(value, float) else json.dumps(value)


def data_words(rows: Iterable[dict]) -> str:
    """The corpora that were read."""
    return "; ".join(sorted({data_label(row["data"]) for row in rows}))


def budget_words(budget: dict | None) -> str:
    """``{"bytes": 2000000}`` as ``2,000,000 bytes``."""
    amounts = [f"{value:,.10g} {name}" for name, value in (budget or {}).items() if value is not None]
    return ", ".join(amounts) or "the model's default"


def protocol_words(rows: Sequence[dict]) -> str:
    """How bits per byte of rows that compare were scored."""
    protocol = rows[-1]["protocol"]
    spans, contexts = (sorted({row["protocol"][key] for row in rows}) for key in ("span", "context"))
    span = spans[0] if len(spans) == 1 else f"of each row's own ({spans[0]} to {spans[-1]})"
    part = f"the first {protocol['bytes']:,} bytes of a split" if protocol.get("bytes") else "every byte of a split"
    chosen = protocol["selection_bytes"]
    selection = f"the last {chosen:,} bytes of valid (at most half)" if chosen else "the second half of valid"
    context = " to ".join(f"{n_bytes:,}" for n_bytes in dict.fromkeys((contexts[0], contexts[-1])))
    return (
        f"{part} scored once, {selection} choose the weights and are left out, streamed with carried state in "
        f"{pluralize(protocol['streams'], 'stream')}, each after {context} bytes of "
        f"unscored context, segment {protocol['segment']}, span {span}, vocabulary {protocol['vocabulary']}, newlines "
        f"{'dropped' if protocol['drop_newlines'] else 'kept'}"
    )


def ground_words(row: dict) -> str:
    """Everything beside the code that time and memory depend on."""
    machine, kind = row.get("machine") or {}, row["device_kind"]
    cores = f" on {pluralize(machine['cores'], 'core')}" if machine.get("cores") else ""
    where = f"{row['device']} ({kind}), {pluralize(row['threads'], 'thread')}{cores}"
    if (row.get("processes") or 1) > 1:
        where = f"{row['processes']} processes on {where} each"
    words = [where, precision_word(row), "compiled" if row["compile"] else "not compiled"]
    words += [f"{name} {version}" for name, version in row["versions"].items()]
    words += [machine.get("cpu")] if kind != "cpu" else []
    words += [row.get("instruction_set"), row.get("allocator") and f"freed memory: {row['allocator']}"]
    return ", ".join(filter(None, [*words, *(f"{k}={v}" for k, v in (row.get("environment") or {}).items())]))


def precision_word(row: dict) -> str:
    """``float32``, ``bfloat16``, or ``float32 with TF32``, whose products are of shorter factors."""
    return f"{row['precision']} with TF32" if row.get("tf32") else row["precision"]


def ground_differences(rows: Sequence[dict]) -> str:
    """In what the grounds of some rows differ, for a note."""
    return join_words(key for key in ENVIRONMENT_KEYS if len({cost_condition(row, key) for row in rows}) > 1)


def optimizer_words(optimizers: Sequence[dict] | None) -> str | None:
    """``Muon 92%, AdamW 8%``: shares of the parameters."""
    shares: dict[str, float] = {}
    for group in optimizers or []:
        shares[group["optimizer"]] = shares.get(group["optimizer"], 0.0) + group["share"]
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {100 * share:.0f}%" for name, share in ordered) or None
