"""Somebody else's losses as a row: ``python -m bench.score nats=FILE name=theirs data=enwik8 split=test sha256=...``.

A model that this trainer cannot run may still stand beside its runs, by the loss of every byte of a split. These are counted,
checked against the bytes and summed as ours are; whether a model made them, how, and what it cost, nobody here has seen. So
the row is marked as claimed wherever it is shown, and no difference is drawn to it. ``bench.compress`` is what proves ours.
"""

import json
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import hydra
import numpy as np
from omegaconf import DictConfig, OmegaConf

from bench import CONF
from harness.compose.cli import run_command

UNIFORM_BITS = 8
"""Bits per byte of a uniform guess."""


@dataclass(frozen=True, kw_only=True)
class ScoreSettings:
    """The keys of ``conf/score.yaml``."""

    nats: str
    name: str
    split: str = field(metadata={"allowed": ("train", "valid", "test")})
    sha256: str | None
    unit: str = field(metadata={"allowed": ("nats", "bits")})
    above_uniform: bool
    outputs: str
    data: dict


@hydra.main(version_base="1.3", config_path=CONF, config_name="score")
def main(cfg: DictConfig) -> None:
    from bench.planning import typed_command  # late, as everything slow
    from bench.rows import GROUND, RowFile
    from harness import source
    from harness.data import corpora
    from harness.data.sources import digest
    from harness.plan.settings import DataSettings, parse
    from harness.record.rows import FORMAT

    config = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    own = parse(ScoreSettings, config, key="")
    data = vars(parse(DataSettings, own.data, key="data"))
    if not own.name.strip() or not own.name.isprintable():
        raise ValueError(f"name={own.name!r}: must be one line of text")
    if data["vocabulary"] != 256:
        raise ValueError(
            f"data.vocabulary={data['vocabulary']}: allowed is 256, losses are of bytes however they are read"
        )
    losses = read_losses(own.nats)
    corpus = corpora.load(**data)
    split = corpus.splits[own.split].numpy()
    check_bytes(own.sha256, digest(split), what=f"{corpus.name} {own.split}, {len(split):,} bytes,")
    bits_per_byte = mean_bits(losses, own, n_bytes=len(split))
    of_others = dict.fromkeys(("seed", *GROUND))  # the machine that adds up is not the one that computed
    row = {"kind": "claimed", "format": FORMAT, "claimed": True, "variant": own.name, "command": typed_command("score")}
    row |= {"config": config, "config_hash": digest(json.dumps(config, sort_keys=True).encode()), **of_others}
    row |= {"source": source.digest(config, measuring=True), "commit": source.commit(), "data": corpus.provenance()}
    row |= {"split": own.split, "split_sha256": digest(split), "shares": data["split"]}
    row |= {"drop_newlines": data["drop_newlines"], "bytes": len(split), "scored": len(losses)}
    row |= {"losses_sha256": digest(losses), "bits_per_byte": bits_per_byte}
    file = RowFile(Path(own.outputs), verb="score")
    file.append(row)
    print(
        f"{own.name} (claimed): {bits_per_byte:.4f} bits per byte, {len(losses):,} losses, {corpus.label()} {own.split}"
    )
    print(f"rows: {file.path}")


def read_losses(name: str) -> np.ndarray:
    """One loss a byte, float64 ``[n]``; ValueError naming ``nats``."""
    path = Path(name)
    try:
        with warnings.catch_warnings(action="ignore"):  # an empty file: its count is refused
            packed = path.suffix == ".npy"
            found = np.load(path, allow_pickle=False) if packed else np.loadtxt(path, delimiter=",", ndmin=1)
    except OSError as error:
        raise ValueError(f"nats={name}: cannot be read ({error.strerror or error})") from error
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"nats={name}: {error}; allowed are a .npy of floats, or text with one number a line"
        ) from error
    if found.ndim != 1 or found.dtype.kind != "f":
        shape = list(found.shape)
        raise ValueError(
            f"nats={name}: is {found.dtype} {shape}; allowed are floats [n], the loss of each byte in order"
        )
    return found.astype(np.float64)


def mean_bits(losses: np.ndarray, own: ScoreSettings, *, n_bytes: int) -> float:
    """Bits per byte of losses that could be those of a split of ``n_bytes``; ValueError naming what shows they are not."""
    if len(losses) not in (n_bytes - 1, n_bytes):
        raise ValueError(
            f"nats={own.nats}: has {len(losses):,} losses; allowed are {n_bytes - 1:,}, one for each byte of {own.split} but "
            f"the first, or {n_bytes:,}, with the first"
        )
    wrong = np.flatnonzero(~(np.isfinite(losses) & (losses >= 0)))
    if len(wrong):
        told = f"the first is number {wrong[0]:,}, {losses[wrong[0]]}"
        raise ValueError(
            f"nats={own.nats}: {len(wrong):,} losses are below 0 or not finite, {told}; allowed are 0 or more"
        )
    mean = float(losses.mean())
    bits = mean / math.log(2) if own.unit == "nats" else mean
    if bits > UNIFORM_BITS and not own.above_uniform:
        raise ValueError(
            f"unit={own.unit}: a mean of {mean:.4f} {own.unit} is {bits:.4f} bits per byte, and {UNIFORM_BITS} is no model at "
            "all; allowed is the losses' own unit, nats or bits, or above_uniform=true where that is meant"
        )
    return bits


def check_bytes(claimed: str | None, found: str, *, what: str) -> None:
    """ValueError unless the bytes that were scored are these."""
    if claimed is None or claimed.lower() != found:
        raise ValueError(
            f"sha256={claimed}: must be that of the bytes that were scored, so that losses of others are not taken for "
            f"theirs; {what} has {found}"
        )


if __name__ == "__main__":
    run_command(main)
