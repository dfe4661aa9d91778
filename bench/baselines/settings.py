"""The keys of ``conf/peers.yaml`` and of a heat, an entrant and a case in ``conf/lineup``."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """The keys of ``conf/peers.yaml``, which says what they mean."""

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
    heats: list


@dataclass(frozen=True, kw_only=True)
class HeatSettings:
    """Who is timed in turn with whom.

    Attributes:
        job: what all train, for the table.
        reference: the entrant that all are compared with, where a case names no other.
        words: of a training run, for all entrants; later ones win.
        each: the heat is repeated with each of these in place of ``<each>``.
        judge: the peer that must find the yardstick fair, which then takes part, too.
        peers, variants: entrants that need no more than their name.
        entries: the others by name, see ``EntrySettings``.
        layer: the sublayer, as the variants call it, that is measured alone; null for the whole model.
        longer: times as many rounds as other heats.
        proof_positions: bytes of a segment that are enough to prove it; null for all.
    """

    job: str
    reference: str
    words: str = ""
    each: list | None = None
    judge: str | None = None
    peers: list | None = None
    variants: list | None = None
    entries: dict | None = None
    layer: str | None = None
    longer: int = 1
    proof_positions: int | None = None


@dataclass(frozen=True, kw_only=True)
class EntrySettings:
    """An entrant.

    Attributes:
        peer: who, or null for a variant of ours.
        words: after the heat's.
        spans: bytes that each head of a layer is to see, or one number for all; null where they stay as they start.
        trainer: whether the trainer's loop is timed instead of its bare step.
        optimizer: of a peer: ``fused adamw``, or ``adam`` as the documentation of a product-key memory has it.
        cases: by name what it must reach, see ``CaseSettings``.
    """

    peer: str | None = None
    words: str = ""
    spans: list | None = None
    trainer: bool = False
    optimizer: str = "fused adamw"
    cases: dict | None = None


@dataclass(frozen=True, kw_only=True)
class CaseSettings:
    """A target: a speed ``at_least`` so many times the reference's, or a time ``at_most``.

    Attributes:
        reference: null for the heat's.
        peak_mb: most memory of a training step above the bare process, in 10^6 bytes; or
        peak_share: in the reference's.
        second: ``[a, b, limit]``: the time of a over b is to be at most the limit, too.
    """

    reference: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    peak_mb: float | None = None
    peak_share: float | None = None
    second: list | None = None
