"""Decides which rows share a table, names them, and writes the texts of captions.

Bits per byte of runs are comparable if their ``score_conditions`` and the numerics of the shared
code are equal. Time and memory are comparable if code and environment are equal: device, threads
and the other ``ENVIRONMENT_KEYS``. An *arm* is one configuration of a variant with one version
of the code, over all seeds."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import pandas as pd

from bench.tables import read_yaml
from harness.record import comparison
from harness.record.cells import join_words, pluralize
from harness.record.closing_table import data_label, pretrained_label, short_commit
from harness.record.schema import BENCH_COMMANDS, flatten

VARIANTS = read_yaml("tables/variants.yaml")
NOT_ARM_KEYS = (
    "seed",
    "outputs",
    "force",
    "reuse",
    "record",
    "checkpoint",
    "trust",
    "hydra",
    "data",
    "eval",
    "budget",
)
NOT_ARM_KEYS += ("purpose", "trial", "space")  # older rows have the last two
"""Keys of a configuration that tell no arms apart: they may differ within an arm, or are equal
in a whole table."""
IGNORED_KEYS = re.compile(r"variant\.(numerics|small|attention\.global_bytes)(\.|$)")
"""Keys that change no number. ``numerics`` is compared as a key of the row; ``global_bytes`` is
0 in older rows."""
# values of keys that older configurations lack
ADDED_KEYS = {"check": True, "batch.order": "random"}
# false where older configurations lack them
ADDED_OPTIONS = re.compile(r"variant\.\w+\.key_shift$")
ARM_KEYS = ("backend", "evaluation_backend", "checkpoint", "device_kind")
"""Keys of a row that tell arms apart, besides configuration and code."""
UNSET = "not set"
ALONE = "No other run or row that was read is comparable with this one."  # caption of one row
KEY_NAMES = {"spans_from": "values of learned spans"}  # in captions


def run_key(row: dict) -> str:
    """Return a text that is equal for runs whose bits per byte are comparable."""
    return f"{comparison.score_conditions(row)} {comparison.shared_code_version(row)}"


def cost_key(row: dict) -> str:
    """Return a text of code and environment, which is equal for rows whose times and memory are
    comparable."""
    return str((*comparison.cost_conditions(row), comparison.code_digest(row)))


def settings_of(row: dict, *, without: Sequence[str] = ()) -> dict[str, str]:
    """Return a configuration's settings as text by dotted key, without ``NOT_ARM_KEYS`` and the
    keys ``without``. A ``_target_`` is shortened to its class's name."""
    settings = {}
    for key, value in (ADDED_KEYS | flatten(row["config"])).items():
        ignored = key in without or key.partition(".")[0] in NOT_ARM_KEYS or IGNORED_KEYS.match(key)
        if ignored or (value is False and ADDED_OPTIONS.match(key)):
            continue
        settings[key] = _text(value)
        if key.endswith("_target_"):
            settings[key] = str(value).rpartition(".")[2]
    return settings


def arms_of(frame: pd.DataFrame, *, without: Sequence[str] = ()) -> pd.DataFrame:
    """Return for each row of a table: ``settings`` (``settings_of``); ``arm``, the variant's name
    with the settings that tell the arm apart; and ``order``, the arm's number among those of its
    variant. The keys ``without``, such as ``model.span`` or ``backend``, are not settings in
    this table."""

    def identity(row: dict) -> dict[str, str]:
        code = comparison.code_version(row)
        # times and memory depend on all of the code
        if row["kind"] in BENCH_COMMANDS or "source" in code:
            code = {"source": row["source"][:6]}
        facts = {name: row.get(name) for name in ARM_KEYS if name not in without} | {
            # Muon's dtypes
            "products": [group.get("products") for group in row.get("optimizers") or ()],
            "began with": pretrained_label(row),
        }
        return {name: _text(value) for name, value in (facts | code).items()}

    settings = [settings_of(row, without=without) for row in frame["row"]]
    facts = [setting | identity(row) for setting, row in zip(settings, frame["row"], strict=True)]
    identities = pd.DataFrame(facts, index=frame.index).fillna(UNSET)
    arms = pd.DataFrame({"settings": settings, "arm": "", "order": 0}, index=frame.index)
    for variant, group in identities.groupby(frame["variant"]):
        keys = [key for key in group if key != "variant.name"]
        codes = pd.DataFrame({key: pd.factorize(group[key])[0] for key in keys})
        names = pd.Series(variant, index=group.index)
        # Of keys that divide the rows into the same groups, the name has the first.
        for key in codes.loc[:, codes.any()].T.drop_duplicates().index:
            names += f", {key.removesuffix('._target_').split('.')[-1]}=" + group[key]
        arms.loc[group.index, "arm"] = names
        arms.loc[group.index, "order"] = names.rank(method="dense").astype(int) - 1
    return arms


def difference_words(arms: pd.DataFrame, *columns: str) -> str:
    """Return a sentence on the settings and ``columns`` in which the rows of a table differ, for
    captions, or ``ALONE``. All keys of a variant count as ``variant``."""
    settings = pd.DataFrame([*arms["settings"]]).fillna(UNSET)
    names = [
        "variant" if key.startswith("variant.") else key.removesuffix("._target_")
        for key in settings
        if settings[key].nunique() > 1
    ]
    names += [
        KEY_NAMES.get(key, key)
        for key in columns
        if key in arms and arms[key].nunique(dropna=False) > 1
    ]
    if names:
        return f"The rows differ in: {join_words(dict.fromkeys(names))}."
    if arms["arm"].nunique() > 1:
        return "The rows differ in what their names say."
    return ALONE


def commit_notes(rows: Iterable[dict]) -> list[str]:
    """Return a note on the commits of the rows, in the order of the rows; none if no row has a
    commit."""
    commits = [*dict.fromkeys(filter(None, map(short_commit, rows)))]
    if commits:
        return [f"Commit {join_words(commits)}."]
    return []


def missing_formulas_notes(arms: pd.DataFrame, key: str) -> list[str]:
    """Return a note on operators without a FLOP formula, which the rows count at ``key``; none if
    there are none. An operator that only some of these arms have is followed by their names."""
    arms_by_operator: dict[str, set[str]] = {}
    for run in arms.itertuples():
        for operator in (run.row.get(key) or {}).get("unknown") or ():
            arms_by_operator.setdefault(operator, set()).add(run.arm)
    all_arms = set().union(*arms_by_operator.values())
    texts = []
    for operator, names in sorted(
        arms_by_operator.items(), key=lambda entry: (-len(entry[1]), entry[0])
    ):
        only = ""
        if names != all_arms:
            only = f" ({join_words(sorted(names), limit=3)})"
        texts.append(operator + only)
    note = f"Executed FLOPs leave out operators without a formula: {', '.join(texts)}."
    if texts:
        return [note]
    return []


def _text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, str):
        return value
    return json.dumps(value)


def data_words(rows: Iterable[dict]) -> str:
    """Return the names of the corpora that the rows read."""
    return "; ".join(sorted({data_label(row["data"]) for row in rows}))


def budget_words(budget: dict | None) -> str:
    """Return ``{"bytes": 2000000}`` as ``2,000,000 bytes``."""
    amounts = [
        f"{value:,.10g} {name}" for name, value in (budget or {}).items() if value is not None
    ]
    return ", ".join(amounts) or "the model's default"


def protocol_words(rows: Sequence[dict]) -> str:
    """Return how bits of comparable rows were scored, as text."""
    protocol = rows[-1]["protocol"]
    objective = protocol.get("objective")
    spans, contexts = (
        sorted({row["protocol"][key] for row in rows}) for key in ("span", "context")
    )
    span = spans[0] if len(spans) == 1 else f"{spans[0]} to {spans[-1]}, as each row's model has it"
    scored = "every byte of a split"
    if protocol.get("bytes"):
        scored = f"the first {protocol['bytes']:,} bytes of a split"
    n_bytes = protocol["selection_bytes"]
    selection = "the second half of valid"
    if n_bytes:
        selection = f"the last {n_bytes:,} bytes of valid (at most half)"
    context = " to ".join(f"{n:,}" for n in dict.fromkeys((contexts[0], contexts[-1])))
    if objective:
        what = {
            "masked_lm": f"Bits per masked byte, {protocol.get('rate') or 0:.0%} of each window of "
            f"{protocol['segment']} bytes",
            "classify": f"Bits per label of texts of at most {protocol['segment']} bytes",
        }
        return (
            f"{what.get(objective, objective)}; in {scored}, except {selection}, which select the "
            f"weights; positions see {protocol.get('direction')}, span {span}"
        )
    order = ""
    if "order" in protocol:
        order = f"; windows of training in the order {protocol['order']}"
    return (
        f"Bits per byte: {scored} is scored once, except {selection}, which select the weights; "
        f"{pluralize(protocol['streams'], 'stream')} with carried state, each after {context} "
        f"unscored bytes, segment {protocol['segment']}, span {span}, vocabulary "
        f"{protocol['vocabulary']}, newlines "
        f"{'dropped' if protocol['drop_newlines'] else 'kept'}{order}"
    )


def environment_words(row: dict) -> str:
    """Return the environment of a row as text, for captions."""
    machine = row.get("machine") or {}
    kind = row["device_kind"]
    cores = ""
    if machine.get("cores"):
        cores = f" on {pluralize(machine['cores'], 'core')}"
    device = f"{row['device']} ({kind}), {pluralize(row['threads'], 'thread')}{cores}"
    if (row.get("processes") or 1) > 1:
        device = f"{row['processes']} processes on {device} each"
    words = [device, precision_word(row), "compiled" if row["compile"] else "not compiled"]
    words += [f"{name} {version}" for name, version in row["versions"].items()]
    words += [machine.get("cpu")] if kind != "cpu" else []
    words += [
        row.get("instruction_set"),
        row.get("allocator") and f"freed memory: {row['allocator']}",
    ]
    return ", ".join(
        filter(None, [*words, *(f"{k}={v}" for k, v in (row.get("environment") or {}).items())])
    )


def precision_word(row: dict) -> str:
    """Return ``float32``, ``bfloat16``, or ``float32 with TF32``, which rounds the factors of
    matrix products."""
    if row.get("tf32"):
        return f"{row['precision']} with TF32"
    return row["precision"]


def environment_differences(rows: Sequence[dict]) -> str:
    """Return the keys in which the environments of the rows differ, as text."""
    keys = comparison.ENVIRONMENT_KEYS
    return join_words(
        key for key in keys if len({comparison.cost_condition(row, key) for row in rows}) > 1
    )


def optimizer_words(optimizers: Sequence[dict] | None) -> str | None:
    """Return ``Muon 92%, AdamW 8%``: the share of the parameters that each optimizer updates; None
    without optimizers."""
    shares = Counter()
    for group in optimizers or []:
        shares[group["optimizer"]] += group["share"]
    return ", ".join(f"{name} {100 * share:.0f}%" for name, share in shares.most_common()) or None
