"""Lineup of ``bench.peers``: who takes part, by the configuration, ``conf/lineup``, read whole and checked."""

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields

from bench.baselines.cases import Comparison
from bench.baselines.entries import EntryMaker
from bench.baselines.packages import PACKAGES, REFERENCE_MODEL
from bench.baselines.settings import Case, ComparisonSettings, EntrySettings, PeerSettings
from harness.plan.settings import check_keys, checked, parse

EACH = "<each>"
FREE = ("lineup", "rows", "only", "rounds", "seconds", "outputs")
"""Keys that leave a lineup's workload as it is, which its targets are for; any other costs the verdicts."""


def make_comparisons(settings: PeerSettings, *, scratch: str) -> list[Comparison]:
    """The comparisons of the lineup, or those that have the cases of ``only``.

    Args:
        scratch: a folder for what entries write.

    Raises:
        ValueError: naming the key, the value and what is allowed.
    """
    for word in typed_words():
        if (key := word.lstrip("+~").partition("=")[0]) in settings.held:
            raise ValueError(f"{word}: cannot be chosen in this lineup; {settings.held[key]}")
    _check(settings)
    asked = [
        (comparison, entries, cases_of(comparison, entries)) for comparison, entries in comparison_settings(settings)
    ]
    allowed = list(dict.fromkeys(case.name for _, _, cases in asked for case in cases))
    if settings.only is not None and (not settings.only or set(map(str, settings.only)) - set(allowed)):
        raise ValueError(f"only={settings.only}: must be a list of {', '.join(allowed) or 'cases'}, or null for all")
    maker, comparisons = EntryMaker(kind="speed" if allowed else "peers", scratch=scratch), []
    for comparison, entries, cases in asked:
        cases = [case for case in cases if settings.only is None or case.name in settings.only]
        needed = {name for case in cases for name in case.names} | (
            {REFERENCE_MODEL, comparison.sanity_check} if cases else set()
        )
        chosen = {name: entry for name, entry in entries.items() if name in needed or not allowed}
        if chosen:
            made = [
                one
                for name, entry in chosen.items()
                for one in maker.entries(name, entry, comparison, cases=bool(allowed))
            ]
            comparisons.append(
                Comparison(entries=made, cases=cases, longer=comparison.longer, sanity_check=comparison.sanity_check)
            )
    return comparisons


def typed_words() -> list[str]:
    """What the user typed; inside a command of Hydra's only."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task)


def comparison_settings(settings: PeerSettings) -> Iterator[tuple[ComparisonSettings, dict[str, EntrySettings]]]:
    """Every comparison of the configuration with all its entries."""
    for number, node in enumerate(settings.comparisons):
        text = json.dumps(node)
        for each in node["each"] if isinstance(node, dict) and node.get("each") is not None else [None]:
            own = json.loads(text.replace(EACH, str(each)))
            comparison = _parsed(ComparisonSettings, own, key=f"comparisons.{number}")
            reference = [REFERENCE_MODEL] * (comparison.sanity_check is not None)
            nodes = {name: {"peer": name} for name in reference + (comparison.peers or [])}
            nodes |= {name: {"words": f"variant={name}"} for name in comparison.variants or []}
            nodes |= comparison.entries or {}
            key = f"comparisons.{number}"
            yield comparison, {name: _parsed(EntrySettings, own, key=f"{key}.{name}") for name, own in nodes.items()}


def cases_of(comparison: ComparisonSettings, entries: dict[str, EntrySettings]) -> list[Case]:
    """What is to be reached in a comparison."""
    found = []
    for entry, asked in entries.items():
        for name, node in (asked.cases or {}).items():
            own = {"name": name, "entry": entry, "reference": comparison.reference}
            case = _parsed(Case, own | node, key=f"cases.{name}")
            if (case.at_least is None) == (case.at_most is None):
                raise ValueError(f"cases.{name}={node}: must have one of at_least and at_most")
            found.append(case)
    return found


def _parsed(cls: type, node: object, *, key: str):
    """As ``parse``, but what has a default may be left out."""
    known = {own.name: own.default for own in fields(cls) if own.default is not MISSING}
    if not isinstance(node, dict):
        check_keys(node, known, key=key)
    return parse(cls, known | node, key=key)


def _check(settings: PeerSettings) -> None:
    allowed = [name for name in PACKAGES if name != REFERENCE_MODEL]
    for key in ("peers", "variants"):
        names = getattr(settings, key) or []
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise ValueError(f"{key}={names}: must be a list of names, each once")
    if strange := [name for name in settings.peers or [] if name not in allowed]:
        raise ValueError(f"peers={strange}: there is no such peer; allowed are {', '.join(allowed)}")
    for key, least in (("context", 4), ("batches", 1), ("persistent", 1), ("window", 1)):
        value = getattr(settings, key)
        if value is not None and value < least:
            raise ValueError(f"{key}={value}: allowed are integers from {least}")
    if (numbers := settings.sizes.get("half_keys")) is not None:
        whole = [checked(number, int, key="sizes.half_keys") for number in numbers]
        if not whole or min(whole) < 1 or len(set(whole)) < len(whole):
            raise ValueError(f"sizes.half_keys={numbers}: must be a list of integers from 1, each once")
