"""The settings of an objective, and the settings of a run that would contradict it."""

from harness.plan.settings import RunSettings

DIRECTIONS = {"causal_lm": ("causal",), "masked_lm": ("both",), "classify": ("both", "causal")}
LABELLED = ("listops", "labelled")
"""The corpora that have labels."""


def check_objective(plan: RunSettings) -> None:
    """Raise ValueError for settings that the objective of a plan does not allow."""
    objective = plan.objective
    name = objective.name
    allowed = f"allowed with objective={name}"
    if objective.direction not in DIRECTIONS[name]:
        directions = ", ".join(DIRECTIONS[name])
        raise ValueError(f"objective.direction={objective.direction}: {allowed} are {directions}")
    for key, owner in (("rate", "masked_lm"), ("encoder", "classify")):
        setting = getattr(objective, key)
        if (setting is None) == (name == owner):
            if setting is None:
                raise ValueError(f"objective.{key}=null: {allowed} are other values")
            raise ValueError(f"objective.{key}={setting}: {allowed} is null")
    if name == "causal_lm":
        _check_sequence(plan)
        return
    contradictions = {
        "batch.carry=true": plan.batch.carry,
        "eval.windows=true": plan.eval.windows,
    }
    for setting, is_set in contradictions.items():
        if is_set:
            raise ValueError(f"{setting}: {allowed} is false")
    if plan.data["sequence"]:
        raise ValueError(f"data.sequence={plan.data['sequence']}: {allowed} is null")
    if name == "classify" and plan.data["name"] not in LABELLED:
        corpora = ", ".join(LABELLED)
        raise ValueError(f"data={plan.data['name']}: has no labels; {allowed} are {corpora}")
    if name == "classify" and plan.runtime.compile is True:  # texts have many lengths
        raise ValueError(f"runtime.compile=true: {allowed} are false, auto")
    if name == "classify" and plan.init_from.restore == "everything":
        raise ValueError(
            f"init_from.restore=everything: {allowed} is weights, because the head is a new one"
        )


def _check_sequence(plan: RunSettings) -> None:
    """Raise ValueError for settings that would cut sequences, or read them with state from before
    them."""
    sequence = plan.data["sequence"]
    e = plan.eval
    if sequence is None:
        return
    allowed = f"allowed with data.sequence={sequence} is"
    if plan.batch.carry:
        raise ValueError(f"batch.carry=true: {allowed} false, because sequences are independent")
    if plan.batch.segment != sequence:
        reason = "because a step reads whole sequences"
        raise ValueError(f"batch.segment={plan.batch.segment}: {allowed} {sequence}, {reason}")
    for key, n_bytes in (("bytes", e.bytes), ("selection_bytes", e.selection_bytes)):
        if n_bytes is not None and n_bytes < sequence:
            raise ValueError(f"eval.{key}={n_bytes}: {allowed} {sequence} or more, or null")
