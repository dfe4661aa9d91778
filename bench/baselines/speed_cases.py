"""The cases of ``bench.speed``, their targets, and who is timed in turn with whom.

A case is an entrant, the one it is held against, and what must be reached. Cases with a common opponent make one heat.
The workload's sizes are those of ``conf/speed.yaml``; S bytes of past are carried, but where nothing is said to be.

- ``fixed``, ``zero``, ``mixed``, ``persistent``: speed in the yardstick's, which sees one block and carries nothing; with
  relative positions and past inputs carried (the papers' setting, no byte sees itself), and with rotary ones and kv.
- ``one_open``: time with one head open to S over that with all open; and that over a fixed window's.
- ``pkm_128``, ...: the layer's speed in that of the package, fused AdamW on both sides; ``pkm_128_adam``, ...: with Adam
  for the package's, as its documentation has it.
- ``mhsa_256``, ``mhsa_1024``: speed in x-transformers' with flash attention and rotary positions, nothing carried.
- ``trainer``: speed of ``Run.step`` with a row of the record after each, in that of a bare loop over the same step.
- ``mean_314`` (CUDA): time over that of a fixed window of ``short_span`` in the same setting.
"""

from dataclasses import dataclass, field

from bench.baselines.rounds import Entry

MB = 10**6
BARE_MB = 230
PUBLISHED_PEAK_MB = {"fixed": 1461, "zero": 806, "mixed": 1741, "persistent": 2447}
"""Resident memory of the published span implementation on this workload, the bare process in it."""
TARGETS = {
    "fixed": {"relative": 0.22, "rotary": 0.55},
    "zero": {"relative": 0.85, "rotary": 0.95},
    "mixed": {"relative": 0.6, "rotary": 0.8},
    "persistent": {"relative": 0.45, "rotary": 0.9},
}
WORKLOAD = tuple(TARGETS)
SETTINGS = {"relative": "hidden", "rotary": "kv"}
"""Position scheme to cache; the first is the papers' setting."""
VARIANTS = {"fixed": "mhsa", "zero": "adaptive_span", "mixed": "adaptive_span", "persistent": "all_attention"}
MATCHES = ("mhsa_256", "mhsa_1024")
ON_CUDA = "mean_314"
LONGER_HEAT = 3
"""Times as many rounds for the trainer, whose target lies nearest to 1."""


@dataclass(frozen=True, kw_only=True)
class SpeedSettings:
    """The keys of ``conf/speed.yaml``, which says what they mean."""

    device: str = field(metadata={"allowed": ("cpu", "cuda")})
    rows: str | None
    cases: list | None
    rounds: int
    seconds: float
    cpu: dict
    cuda: dict
    layer: dict


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a ratio must keep: speeds are to be at least, times at most ``limit``."""

    limit: float
    at_most: bool = False

    def kept(self, ratio: float) -> bool:
        return ratio <= self.limit if self.at_most else ratio >= self.limit


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row.

    Attributes:
        name: as in ``cases``.
        position, cache: the setting, or None where it has no attention.
        entrant, reference: names of entries of its heat.
        bound: of the entrant's speed in the reference's, or of its time over the reference's.
        peak_limit_bytes: of its peak above the bare process; or
        peak_limit_share: of the reference's peak.
        second: a further bound: entries whose times are divided, and what that must keep.
    """

    name: str
    position: str | None
    cache: str | None
    entrant: str
    reference: str
    bound: Bound
    peak_limit_bytes: int | None = None
    peak_limit_share: float | None = None
    second: tuple[str, str, Bound] | None = None


@dataclass(frozen=True, kw_only=True)
class Heat:
    """Entries that are timed in turn.

    Attributes:
        entries: their names differ.
        cases: what is read off them.
        longer: times as many rounds as the others.
        yardstick, judge: names of the yardstick and the peer that must find it fair, where a yardstick is there.
    """

    entries: list[Entry] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    longer: int = 1
    yardstick: str | None = None
    judge: str | None = None

    def entry(self, name: str) -> Entry:
        return next(entry for entry in self.entries if entry.name == name)


def workload_case(name: str, position: str, *, reference: str) -> Case:
    """A case of the workload in one setting."""
    return Case(
        name=name,
        position=position,
        cache=SETTINGS[position],
        entrant=f"{name} {position}",
        reference=reference,
        bound=Bound(limit=TARGETS[name][position]),
        peak_limit_bytes=(PUBLISHED_PEAK_MB[name] - BARE_MB) * MB // 2,
    )


def match_case(name: str, *, reference: str) -> Case:
    """Plain attention against a peer."""
    return Case(name=name, position="rotary", cache="kv", entrant=name, reference=reference, bound=Bound(limit=1.0))


def one_open_case(*, entrant: str, all_open: str, fixed: str) -> Case:
    """Cost follows the mean span, not the longest."""
    return Case(
        name="one_open",
        position="rotary",
        cache="kv",
        entrant=entrant,
        reference=all_open,
        bound=Bound(limit=0.25, at_most=True),
        second=(all_open, fixed, Bound(limit=1.1, at_most=True)),
    )


def memory_case(name: str, *, entrant: str, reference: str) -> Case:
    """A product-key memory against the package's."""
    bound = Bound(limit=2.0)
    same = {"position": None, "cache": None, "peak_limit_share": 0.7}
    return Case(name=name, entrant=entrant, reference=reference, bound=bound, **same)


def trainer_case(*, entrant: str, reference: str) -> Case:
    """Everything around the step."""
    return Case(
        name="trainer",
        position="rotary",
        cache="kv",
        entrant=entrant,
        reference=reference,
        bound=Bound(limit=0.97),
    )


def cuda_case(position: str, *, entrant: str, reference: str) -> Case:
    """Long spans beside a short window, in one setting."""
    return Case(
        name=ON_CUDA,
        position=position,
        cache=SETTINGS[position],
        entrant=entrant,
        reference=reference,
        bound=Bound(limit=1.25, at_most=True),
        peak_limit_share=1.3,
    )
