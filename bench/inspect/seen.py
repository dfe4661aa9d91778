"""What a model sees in passages, as plain values for a page: maps as text, the rest as numbers.

A weight is 8 bits, round(255 w^(2/3)): finer near 0, where most are, and yet few enough values that noise deflates. A map is
its lower triangle, row by row; the share that each query gives to learned vectors follows the triangles of all heads.
"""

import base64
import math
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.device.runtime import Runtime
from harness.loop.step import score_context, score_stream
from harness.model import LanguageModel
from harness.record.rows import plain
from variants.contract import Inspection

POWER = 2 / 3
GUESSES, TOP_ENTRIES, TOP_CONTEXTS = 3, 8, 6
MASK_POINTS = 97
"""Of a soft mask, from its nearest key to the farthest that any head sees."""
MARKUP = b"<>[]{}|='&;#*/_\"~"
KINDS = (
    "letters",
    "digits",
    "spaces and line ends",
    "markup",
    "other signs",
    "UTF-8, first bytes",
    "UTF-8, continuation",
)


def kind_of(byte: int) -> int:
    """Of ``KINDS``."""
    if byte >= 128:
        return 5 if byte >= 192 else 6
    if byte in MARKUP:
        return 3
    letter = chr(byte)
    return 0 if letter.isalpha() else 1 if letter.isdigit() else 2 if letter in " \t\n\r" else 4


def packed(weights: Tensor, beside: Tensor | None) -> str:
    """Maps ``[H, T, T]`` and shares of learned vectors ``[H, T]``, deflated, as text."""
    rows, columns = np.tril_indices(weights.shape[-1])
    codes = coded(weights)[:, rows, columns].tobytes()
    codes += b"" if beside is None else coded(beside).tobytes()
    return base64.b64encode(zlib.compress(codes, 9)).decode()


def coded(weights: Tensor) -> np.ndarray:
    """8 bits for each of some weights from 0 to 1."""
    return weights.float().cpu().clamp(0, 1).pow(POWER).mul(255).round().byte().numpy()


def seen(model: LanguageModel, passages: list[tuple[str, Tensor]], *, runtime: Runtime, symbols: bytes) -> dict:
    """``passages`` with what the model made of each byte, and ``sublayers`` with what each took of them."""
    shown, found = [], []
    for title, tokens in passages:
        inputs = tokens.long()[None].to(runtime.device)
        with runtime.autocast():
            logits, inspected = model.inspect(inputs)
        if not logits.isfinite().all():
            raise ValueError("run: its weights give numbers that are not finite, so there is nothing to be seen")
        shown.append({"title": title} | _predicted(logits[0].float().cpu(), tokens, symbols))
        found.append(inspected)
    sublayers = []
    for name, own in model.sublayers():
        inspected = [one[name] for one in found if name in one]
        if inspected:
            sublayers.append({"name": name, "silent": None} | _of_sublayer(inspected))
        elif own.honours is not None:
            sublayers.append({"name": name, "silent": type(own).__name__})
    _sample_masks(sublayers)
    return {"passages": shown, "sublayers": sublayers}


def _predicted(logits: Tensor, tokens: Tensor, symbols: bytes) -> dict:
    """Bytes; bits of each but the first, to 1/100; and the likeliest three in its place, each with its per cent."""
    logs = F.log_softmax(logits[:-1], dim=-1)
    bits = -logs.gather(1, tokens[1:, None].long())[:, 0] / math.log(2)
    best, at = logs[:, : len(symbols)].exp().topk(min(GUESSES, len(symbols)))
    guesses = [
        [number for value, share in zip(*row, strict=True) for number in (symbols[value], round(100 * share, 1))]
        for row in zip(at.tolist(), best.tolist(), strict=True)
    ]
    content = bytes(symbols[token] for token in tokens.tolist())
    return {
        "bytes": base64.b64encode(content).decode(),
        "bits": [round(value, 2) for value in bits.tolist()],
        "guesses": guesses,
    }


def _of_sublayer(found: list[Inspection]) -> dict:
    """What one sublayer took in all passages: maps, mass by distance, the mask and learned vectors, of each head."""
    own, first = {}, found[0]
    if first.weights is not None:
        beside = [None if one.shares is None else one.shares[0].sum(-1) for one in found]
        own["heads"], own["beside"] = first.weights.shape[1], first.shares is not None
        own["maps"] = [packed(one.weights[0], share) for one, share in zip(found, beside, strict=True)]
        own["distance"] = mass_by_distance([one.weights[0] for one in found]).round(4).tolist()
        if own["beside"]:
            own["mass"] = torch.cat(beside, dim=1).mean(1).tolist()
    if first.mask is not None:
        own["mask"] = torch.stack([one.mask for one in found]).mean(0).float().cpu()
    if first.entries is not None:
        own["entries"] = _entries(found)
    return own


def mass_by_distance(maps: list[Tensor]) -> np.ndarray:
    """Share of the mass of some maps ``[H, T, T]`` at distances 0, 1, 2 to 3, 4 to 7, ..: of the queries of the second half of
    each, which have as many bytes behind them; ``[H, n]``."""
    place, queries = torch.arange(max(one.shape[-1] for one in maps)), 0
    bins = (place[:, None] - place).clamp(min=0).float().log2().add(1).clamp(min=0).long()  # of 0: minus infinity
    mass = torch.zeros(len(maps[0]), int(bins.max()) + 1)
    for one in maps:
        length = one.shape[-1]
        half = slice(length // 2, length)
        mass.index_add_(1, bins[half, :length].flatten(), one[:, half].flatten(1).float().cpu())
        queries += length - length // 2
    return (mass / queries).numpy()


def _entries(found: list[Inspection]) -> list[list[dict]]:
    """For each head, the learned vectors that are taken most: number, mean share of a byte, how many bytes took any of it,
    and the bytes that took most of it, as passage, place and share."""
    heads = []
    for head in range(found[0].entries.shape[1]):
        entries, shares = (
            [getattr(one, name)[0, head].cpu().numpy() for one in found] for name in ("entries", "shares")
        )
        passage = np.concatenate([np.full(x.size, p) for p, x in enumerate(entries)])
        place = np.concatenate([np.repeat(np.arange(x.shape[0]), x.shape[1]) for x in entries])
        number, share = (np.concatenate([x.ravel() for x in parts]) for parts in (entries, shares))
        total = np.bincount(number, weights=share)
        own = []
        for entry in np.argsort(-total, kind="stable")[:TOP_ENTRIES]:
            if total[entry] == 0:
                break
            takers = np.flatnonzero((number == entry) & (share > 0))
            best = takers[np.argsort(-share[takers], kind="stable")][:TOP_CONTEXTS]
            contexts = [[int(passage[i]), int(place[i]), round(float(share[i]), 4)] for i in best]
            mean = float(total[entry] / sum(len(x) for x in entries))
            own.append({"number": int(entry), "share": mean, "takers": len(takers), "contexts": contexts})
        heads.append(own)
    return heads


def _sample_masks(sublayers: list[dict]) -> None:
    """Masks as whole numbers from 0 to 255 at ``MASK_POINTS`` distances, the same for all: to the farthest that any sees."""
    masks = [own["mask"] for own in sublayers if own.get("mask") is not None]
    last = max((int((mask > 0).any(0).nonzero().max()) for mask in masks), default=0)
    at = torch.linspace(0, last, MASK_POINTS).round().long()
    for own in sublayers:
        if own.get("mask") is not None:
            own["mask"] = {"last": last, "at": own["mask"][:, at].mul(255).round().int().tolist()}


def scored(model: LanguageModel, split: Tensor, *, runtime: Runtime, symbols: bytes, segment: int, span: int) -> dict:
    """Bits per byte of ``split`` as a stream: in all, by position in a cold window and by kind of byte; and metrics of the
    sublayers over the same bytes."""
    streams = max(1, min(8, (len(split) - 1) // segment))
    score = score_stream(model, split, runtime=runtime, streams=streams, segment=segment, collect_stats=True)
    kinds = np.array([kind_of(byte) for byte in symbols])[split[1:].numpy()]
    bits = score.nats.double().numpy() / math.log(2)
    by_kind = [
        {
            "kind": name,
            "bytes": int(own.sum()),
            "bits": float(bits[own].mean()),
            "share": float(bits[own].sum() / bits.sum()),
        }
        for number, name in enumerate(KINDS)
        if (own := kinds == number).any()
    ]
    return {
        "scored": len(split),
        "bits_per_byte": score.bits_per_byte,
        "kinds": by_kind,
        "positions": score_context(model, split, runtime=runtime, longest=2 * span, segment=segment),
        "metrics": plain(model.metrics(score.stats)),
    }
