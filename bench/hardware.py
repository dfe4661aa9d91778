"""Hardware that a step is predicted for: the words of ``conf/fit.yaml``, and the devices and links that it names."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.exchange import Links

OWN = ("hardware", "device_memory", "largest", "spans", "peak_tflops", "bandwidth_gbs", "devices")
OWN += ("processes", "per_machine", "link_gbs", "network_gbs")
UNITS = {"": 1} | {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a step is predicted for.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        name: as shown.
        memory_bytes: to stay within, or None.
        flops_per_s: dense peak by dtype, empty where no roofline was asked for.
        bytes_per_s: of its memory, or None.
        links: to other such devices, or None.
    """

    kind: str
    name: str
    memory_bytes: int | None
    flops_per_s: dict[str, float]
    bytes_per_s: float | None
    links: "Links | None" = None


def parse_memory(value: object, *, key: str) -> int:
    """Bytes of ``24GiB``, ``80GB``, ``24e9`` or a number; ValueError naming the key."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\+?\d+)?)\s*([KMGT]?I?B)?\s*", str(value), re.IGNORECASE)
    unit = (match[2] or "").upper().removeprefix("B") if match else None
    if isinstance(value, bool) or unit not in UNITS or not 1 <= float(match[1]) * UNITS[unit] < 2**63:
        raise ValueError(f"{key}={value}: allowed are bytes above 0, as in 24GiB (2^30), 80GB (10^9) or 25769803776")
    return int(float(match[1]) * UNITS[unit])


def kind_of(device: str) -> str:
    """``cpu`` or ``cuda``: a device's code is predicted as one or the other's."""
    return "cpu" if device.partition(":")[0] == "cpu" else "cuda"


def choose(own: dict, *, device: str, precision: str, tf32: bool = False) -> Hardware:
    """The hardware that the verb's own keys and ``runtime.device`` name; ValueError where they are at odds.

    Args:
        tf32: whether products of float32 are of factors rounded to 10 bits.
    """
    kind = kind_of(device)
    name, devices = own["hardware"], own["devices"]
    if name == "auto":
        name = "rtx_4090" if kind == "cuda" else None
    if name is not None and name not in devices:
        raise ValueError(f"hardware={name}: allowed are auto, null, {', '.join(devices)}")
    if name is not None and kind == "cpu":
        raise ValueError(f"hardware={name}: is a GPU, with runtime.device={device} allowed are auto and null")
    entry = devices[name] if name else {}
    own_rate, own_width = (_positive(own, key) for key in ("peak_tflops", "bandwidth_gbs"))
    rates = {dtype: entry.get(f"{dtype}_tflops") for dtype in ("float32", "bfloat16")}
    if tf32 and name:
        if entry["tfloat32_tflops"] is None:
            raise ValueError(f"runtime.tf32=true: {entry['name']} has no such products; allowed is false")
        rates["float32"] = entry["tfloat32_tflops"]
    if own_rate is not None:
        rates = dict.fromkeys(rates, own_rate) if not name else rates | {precision: own_rate}
    width = own_width or entry.get("bandwidth_gbs")
    if (width is None) != (None in rates.values()):
        missing = "bandwidth_gbs" if width is None else "peak_tflops"
        raise ValueError(f"{missing}=null: must be given for a roofline without a named hardware")
    key, memory = "device_memory", own["device_memory"]
    if memory is None:
        key, memory = f"devices.{name}.memory", entry.get("memory")
    return Hardware(
        kind=kind,
        name=entry.get("name", kind),
        memory_bytes=None if memory is None else parse_memory(memory, key=key),
        flops_per_s={} if width is None else {dtype: rate * 1e12 for dtype, rate in rates.items()},
        bytes_per_s=None if width is None else width * 1e9,
        links=_links(own, entry),
    )


def _links(own: dict, entry: dict) -> "Links | None":
    """What the configuration says of links; None where it says nothing."""
    from bench.exchange import Links
    from harness.plan.settings import checked

    per_machine = checked(own["per_machine"], int, key="per_machine")
    if per_machine < 1:
        raise ValueError(f"per_machine={per_machine}: must be above 0")
    link, network = (_positive(own, key) or entry.get(key) for key in ("link_gbs", "network_gbs"))
    if link is None or network is None:
        return None
    return Links(per_machine=per_machine, bytes_per_s=link * 1e9, network_bytes_per_s=network * 1e9)


def _positive(own: dict, key: str) -> float | None:
    from harness.plan.settings import checked

    value = checked(own[key], float | None, key=key)
    if value is not None and value <= 0:
        raise ValueError(f"{key}={value}: must be above 0")
    return value
