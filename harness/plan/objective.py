"""The settings of an objective, and the settings of a run that would contradict it."""

from harness.plan.settings import RunSettings

DIRECTIONS = {"causal_lm": ("causal",), "masked_lm": ("both",), "classify": ("both", "causal")}
LABELLED = ("listops", "labelled")
"""The corpora that have labels."""


def check_objective(plan: RunSettings) -> None:
    """Raise ValueError for settings that the objective of a plan does not allow."""
    objective = plan.objective
    name = objective.name
    data = plan.data.name
    sequence = plan.data.sequence
    allowed = f"allowed with objective={name}"
    directions = DIRECTIONS[name]
    mistakes = {
        f"objective.direction={objective.direction}: {allowed} are {', '.join(directions)}": (
            objective.direction not in directions
        )
    }
    for key, owner, values in (
        ("rate", "masked_lm", "numbers between 0 and 1"),
        ("encoder", "classify", "trained, frozen"),
    ):
        setting = getattr(objective, key)
        mistakes |= {
            f"objective.{key}=null: {allowed} are {values}": setting is None and name == owner,
            f"objective.{key}={setting}: {allowed} is null": setting is not None and name != owner,
        }
    if name == "causal_lm":
        mistakes |= _sequence_mistakes(plan)
    else:
        mistakes |= {
            f"batch.carry=true: {allowed} is false": plan.batch.carry,
            f"eval.windows=true: {allowed} is false": plan.eval.windows,
            f"data.sequence={sequence}: {allowed} is null": sequence,
        }
    if name == "classify":
        mistakes |= {
            f"data={data}: has no labels; {allowed} are {', '.join(LABELLED)}": (
                data not in LABELLED
            ),
            # texts have many lengths
            f"runtime.compile=true: {allowed} are false, auto": plan.runtime.compile is True,
            f"init_from.restore=everything: {allowed} is weights, because the head is a new one": (
                plan.init_from.restore == "everything"
            ),
        }
    for message, is_made in mistakes.items():
        if is_made:
            raise ValueError(message)


def _sequence_mistakes(plan: RunSettings) -> dict[str, bool]:
    """Return for each message whether its mistake was made: settings that would cut sequences, or
    read them with state from before them."""
    data = plan.data
    sequence = data.sequence
    segment = plan.batch.segment
    if sequence is None:
        return {}
    allowed = f"allowed with data.sequence={sequence} is"
    mistakes = {
        f"batch.carry=true: {allowed} false, because sequences are independent": plan.batch.carry,
        f"batch.segment={segment}: {allowed} {sequence}, because a step reads whole sequences": (
            segment != sequence
        ),
        f"data.vocabulary={data.vocabulary}: {allowed} 256": data.vocabulary < 256,
    }
    for key in ("bytes", "first_bytes"):
        n_bytes = getattr(data, key)
        mistakes[f"data.{key}={n_bytes}: allowed are multiples of data.sequence={sequence}"] = (
            n_bytes is not None and n_bytes % sequence > 0
        )
    for key in ("bytes", "selection_bytes"):
        n_bytes = getattr(plan.eval, key)
        mistakes[f"eval.{key}={n_bytes}: {allowed} {sequence} or more, or null"] = (
            n_bytes is not None and n_bytes < sequence
        )
    return mistakes
