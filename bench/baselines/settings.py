"""Keys of ``conf/peers.yaml``, and of a comparison, an entry and a case in ``conf/lineup``."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """``conf/peers.yaml`` says what they mean."""

    rows: str | None
    only: list | None
    rounds: int
    seconds: float
    batches: int
    variants: list | None
    peers: list | None
    context: int | None
    persistent: int | None
    window: int | None
    memory: dict
    sizes: dict
    held: dict
    comparisons: list


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings:
    """Who is timed in turn with whom. What has a default may be left out, here and below."""

    job: str  # what all train, for the table
    reference: str  # the entry that all are compared with, where a case names no other
    words: str = ""  # of a training run, for all entries; later ones win
    each: list | None = None  # the comparison is repeated with each of these in place of <each>
    sanity_check: str | None = None  # the peer beside which the reference model must not be slow; both then take part
    peers: list | None = None  # entries that need no more than their name
    variants: list | None = None  # the same
    entries: dict | None = None  # the others by name: EntrySettings
    layer: str | None = None  # the sublayer, as its variant calls it, that is measured alone; null for the whole model
    longer: int = 1  # times as many rounds as other comparisons
    proof_positions: int | None = None  # bytes of a segment that are enough to prove it; null for all


@dataclass(frozen=True, kw_only=True)
class EntrySettings:
    """An entry."""

    peer: str | None = None  # null for a variant of ours
    words: str = ""  # after the comparison's
    spans: list | None = None  # bytes that each head of a layer sees, or one number for all; null: as they start
    trainer: bool = False  # whether the trainer's loop is timed instead of its bare step
    optimizer: str = "fused adamw"  # of a peer, or adam, as the documentation of a product-key memory has it
    cases: dict | None = None  # by name what it must reach: Case


@dataclass(frozen=True, kw_only=True)
class Case:
    """What an entry must reach: ``at_least`` so many times the reference's speed, or ``at_most`` its time."""

    name: str
    entry: str
    reference: str
    at_least: float | None = None
    at_most: float | None = None
    peak_mb: float | None = None  # most memory of a training step above the bare process, in 10^6 bytes; or
    peak_share: float | None = None  # in the reference's
    second: list | None = None  # [a, b, limit]: the time of a over b is to be at most the limit, too

    @property
    def names(self) -> list[str]:
        """The entry, its reference, and whoever else it needs, each once."""
        return list(dict.fromkeys([self.entry, self.reference, *(self.second or ())[:2]]))
