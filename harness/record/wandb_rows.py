"""Metric names and values that W&B is sent for one row, without W&B. ``conf/dashboard.yaml`` names the same metrics.

- ``bytes_seen`` and the others of ``PLACE``: where in the run a row stands. ``bytes_seen`` is the x axis of everything.
- ``train/bits_per_byte``: a number of a row, by the row's kind.
- ``valid_bits_per_byte``: a final score, by its name in ``summary.json``. It is often of more bytes than the scores on
  the way, which are ``valid/bits_per_byte``.
- ``train_span/layers.0.attention``: a metric of a sublayer; all metrics of one word stand in one section. A list, one entry
  a head, is a histogram, with ``/mean``, ``/min`` and ``/max`` of its own.
- ``train_span/mean``: the same over all sublayers; ``train_span/all`` is the histogram of all heads.
"""

import math

PLACE = ("bytes_seen", "step", "epochs", "fraction", "training_flops", "seconds", "bytes_per_second")
LARGEST_INTEGER = 2**53
"""Larger ones are sent as floats, which readers make of them anyway."""


def numbers(row: dict) -> dict[str, float | list[float]]:
    """Numbers of one row by name; a list is one of a head each, to become a histogram. Texts are left out.

    Args:
        row: as ``Record.append`` returned it.
    """
    kind, clock = row["kind"], row.get("clock") or {}
    found = {name: row.get(name, clock.get(name)) for name in PLACE}
    if row.get("final"):
        found |= {f"{kind}_{name}": value for name, value in row.items() if name.endswith("bits_per_byte")}
    else:
        own = {name: value for name, value in (row | clock).items() if name not in (*PLACE, "kind", "metrics", "clock")}
        found |= flat(own, name=kind)
    found = {name: sent for name, value in found.items() if (sent := _number(value)) is not None}
    return found if row.get("final") else found | _metrics(row.get("metrics") or {}, kind=kind)


def facts(summary: dict) -> dict[str, float | str]:
    """Numbers, truths and texts of a summary or provenance row: ``{"memory/peak_bytes": 12345, "variant": "mhsa"}``."""
    found = {key: item if isinstance(item, str | bool) else _number(item) for key, item in flat(summary).items()}
    return {key: item for key, item in found.items() if item is not None}


def span_rows(metrics: dict) -> list[list]:
    """Sublayer, head, span and span with its ramp, of every head: the rows of a table."""
    found = []
    for name in metrics:
        place, _, word = name.rpartition(".")
        if word == "span":
            spans, ramped = (_listed(metrics.get(f"{place}.{which}")) for which in ("span", "span_with_ramp"))
            ramped += [None] * (len(spans) - len(ramped))
            found += [[place, head, *pair] for head, pair in enumerate(zip(spans, ramped, strict=False))]
    return found


def flat(value: object, *, name: str = "") -> dict[str, object]:
    """``{"a": {"b": 1}}`` named ``x`` as ``{"x/a/b": 1}``."""
    if not isinstance(value, dict):
        return {name: value}
    before = name and f"{name}/"
    return {key: item for inner, part in value.items() for key, item in flat(part, name=f"{before}{inner}").items()}


def _metrics(metrics: dict, *, kind: str) -> dict[str, float | list[float]]:
    found, pooled, listed = {}, {}, set()
    for name, metric in metrics.items():
        place, _, word = name.rpartition(".")
        section, values = f"{kind}_{word}", [sent for one in _listed(metric) if (sent := _number(one)) is not None]
        if not values:
            continue
        pooled.setdefault(section, []).extend(values)
        key = f"{section}/{place or 'model'}"
        if isinstance(metric, list):
            listed.add(section)
            found |= {key: values} | _extent(values, name=key)
        else:
            found[key] = values[0]
    for section, values in pooled.items():
        extent = _extent(values, name=section)
        found |= (
            extent | {f"{section}/all": values} if section in listed else {f"{section}/mean": extent[f"{section}/mean"]}
        )
    return found


def _extent(values: list[float], *, name: str) -> dict[str, float]:
    return {f"{name}/mean": sum(values) / len(values), f"{name}/min": min(values), f"{name}/max": max(values)}


def _listed(value: object) -> list:
    return value if isinstance(value, list) else [] if value is None else [value]


def _number(value: object) -> float | int | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value) if abs(value) > LARGEST_INTEGER else value
