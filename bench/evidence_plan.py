"""The commands of ``bench.evidence``: ``conf/evidence.yaml``'s entries with every word filled in."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ENTRY_KEYS = ("name", "run", "seconds", "words", "lists", "each", "zip")
VERBS = ("agree", "cost", "fit", "peers", "speed")
FROM_RUNS = re.compile(r"<(spans|mean_span) ([\w.-]+)>")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process.

    Attributes:
        name: its own among all stages; names its log and the folder of its rows or runs.
        run: ``train``, ``pytest`` or a verb of ``bench``.
        seconds: after which it is ended.
        words: what is typed after it.
    """

    name: str
    stage: str
    run: str
    seconds: float
    words: tuple[str, ...]

    @property
    def arguments(self) -> list[str]:
        """What follows the interpreter."""
        program = {"train": ["train.py"], "pytest": ["-m", "pytest"]}.get(self.run, ["-m", f"bench.{self.run}"])
        return [*program, *self.words]

    @property
    def needs(self) -> set[str]:
        """Training commands whose spans it takes."""
        return {name for word in self.words for _, name in FROM_RUNS.findall(word)}

    def filled(self, runs: Path) -> "Command":
        """With the spans that other runs have learned; ValueError naming the run that has not ended."""

        def learned(match: re.Match) -> str:
            spans = learned_spans(runs / match[2])
            if match[1] == "spans":
                return json.dumps([[round(span, 2) for span in own] for own in spans]).replace(" ", "")
            flat = [span for own in spans for span in own]
            return str(max(1, round(sum(flat) / len(flat))))

        return replace(self, words=tuple(FROM_RUNS.sub(learned, word) for word in self.words))


def learned_spans(folder: Path) -> list[list[float]]:
    """Spans in keys of the best weights of the finished run below ``folder``, a list for each layer."""
    summaries = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-s*-*/summary.json"))]
    metrics = summaries[-1].get("valid_metrics") or {} if summaries else {}
    spans = [value for name, value in metrics.items() if name.endswith(".attention.span")]
    if not spans:
        raise ValueError(f"{folder.name}: has no finished run with learned spans; run its stage first")
    return spans


def commands(config: dict, *, corpus: Path | None) -> list[Command]:
    """All commands of the chosen stages, in order; ValueError naming what is wrong."""
    chosen = [config["stage"]] if isinstance(config["stage"], str) else config["stage"]
    stages = config["stages"]
    if not isinstance(chosen, list) or not chosen or not set(chosen) <= set(stages):
        raise ValueError(f"stage={config['stage']}: must be one of {', '.join(stages)}, or a list of them")
    found = [own for stage in chosen for entry in stages[stage] for own in _expanded(entry, stage, config, corpus)]
    names = [command.name for command in found]
    if len(set(names)) < len(names):
        raise ValueError(f"stages: names of commands stand twice in {', '.join(names)}")
    for key in ("only", "redo"):
        if strange := set(config[key] or ()) - set(names):
            raise ValueError(f"{key}={sorted(strange)}: must be names of this stage: {', '.join(names)}")
    return [command for command in found if config["only"] is None or command.name in config["only"]]


def _expanded(entry: dict, stage: str, config: dict, corpus: Path | None) -> Iterator[Command]:
    key = f"stages.{stage}.{entry.get('name')}"
    if set(entry) - set(ENTRY_KEYS) or not {"name", "run", "seconds"} <= set(entry):
        raise ValueError(f"{key}: allowed keys are {', '.join(ENTRY_KEYS)}; name, run and seconds must be given")
    if entry["run"] not in ("train", "pytest", *VERBS):
        raise ValueError(f"{key}.run={entry['run']}: allowed are train, pytest, {', '.join(VERBS)}")
    if strange := set(entry.get("lists", ())) - set(config["wordlists"]):
        raise ValueError(f"{key}.lists={sorted(strange)}: allowed are {', '.join(config['wordlists'])}")
    words = [word for name in entry.get("lists", ()) for word in config["wordlists"][name]] + entry.get("words", [])
    each = entry.get("each", {})
    rows = zip(*each.values(), strict=True) if entry.get("zip") else itertools.product(*each.values())
    for values in rows:
        tokens = dict(zip(each, values, strict=True))
        name = _replaced(entry["name"], tokens)
        own = [_replaced(word, tokens | {"corpus": str(corpus)}) for word in words]
        if any("<corpus>" in word for word in words) and corpus is None:
            raise ValueError(f"corpus=null: {name} trains on a corpus; give its file")
        own += _small(entry["run"], own, config) if config["small"] else ()
        own += _outputs(entry["run"], name, config["outputs"])
        yield Command(name=name, stage=stage, run=entry["run"], seconds=entry["seconds"], words=tuple(own))


def _replaced(word: str, tokens: dict[str, str]) -> str:
    for name, value in tokens.items():
        word = word.replace(f"<{name}>", value)
    return word


def _small(run: str, words: Sequence[str], config: dict) -> list[str]:
    has_memory = any(word.startswith("variant=") and "_memory" in word for word in words)
    return [*config["small_words"].get(run, ()), *(config["small_words"]["memory"] if has_memory else ())]


def _outputs(run: str, name: str, root: str) -> list[str]:
    if run in ("pytest", "agree"):
        return []
    return [f"outputs={root}/{'runs' if run == 'train' else 'rows'}/{name}"]
