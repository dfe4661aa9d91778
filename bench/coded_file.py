"""Coded files on disk, and what must be equal where one is decoded: else the probabilities would be others.

    AWT1 | length of the header, 2 bytes | header: JSON, deflated | code

Whatever could move a last bit of a logit is in the header, and where it differs the file is refused by its name. What is
not, such as another compiler of the kernels, ends in another SHA-256 of what was decoded, which is refused, too.
"""

import hashlib
import json
import zlib
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from bench.coding import ModelCoder
from bench.planning import open_trained
from harness import source
from harness.data.corpora import SPLITS, Corpus
from harness.device import runtime
from harness.record import checkpoint

MAGIC = b"AWT1"
FILE = ("bytes", "sha256", "streams", "checksum")
"""Of the header: length and digest of what was coded, its cut, and a checksum of the code."""
CONDITIONS = ("weights", "source", "device", "device_kind", "instruction_set", "threads", "precision", "backend")
CONDITIONS += ("torch", "environment")
"""Of the header: what must be equal."""
DIGITS = 16
"""Of the digests of weights and source; the file's own digest is whole."""
_MOST_BYTES = 1 << 16
_USUAL = (
    b'{"bytes":,"sha256":"","streams":,"weights":"","source":"","device":"Intel(R) Xeon(R) Processor '
    b'(family 6 model 143 stepping 8)","device_kind":"cpu",'
    b'"instruction_set":"AVX512","threads":2,"precision":"float32","backend":"kernel+plain","torch":"2.13.0+cpu",'
    b'"environment":{"GOMP_SPINCOUNT":"10000"},"checksum":'
)
"""A usual header, for the deflater to point at: beside a code of 60 kB another 200 bytes would be seen. Part of the format."""


class Opened(NamedTuple):
    """A run's model, ready to code.

    Attributes:
        corpus: its data, where they were needed.
        conditions: of its probabilities, by the names of ``CONDITIONS``.
    """

    coder: ModelCoder
    corpus: Corpus | None
    conditions: dict


def open_run(cfg: DictConfig, *, with_data: bool = False) -> Opened:
    """The model of ``run``, computing as ``runtime`` says.

    Args:
        with_data: whether its corpus is wanted.

    Raises:
        ValueError: naming the key.
    """
    path = Path(cfg.run)
    opened = open_trained(path, key="run", runtime=cfg.runtime, trust=cfg.trust)
    plan, model, symbols = opened.plan, opened.model(), opened.symbols()
    if not plan.runtime.deterministic:
        raise ValueError("runtime.deterministic=false: allowed is true, for a decoder must find the same probabilities")
    device, corpus = runtime.start(plan.runtime), opened.corpus() if with_data else None
    model.to(device.device)
    made_of = [plan.config[name] for name in ("variant", "model", "position")] + [list(symbols)]
    weights = (path / checkpoint.FOLDER / checkpoint.BEST).read_bytes() + json.dumps(made_of, default=str).encode()
    told = device.describe()
    named = {
        "weights": hashlib.sha256(weights).hexdigest()[:DIGITS],
        "source": source.digest(plan.config, trust=plan.trust)[:DIGITS],
        "backend": "+".join(sorted({own.backend(device.device, training=False) for _, own in model.sublayers()})),
        "torch": told["versions"]["torch"],
    }
    coder = ModelCoder(model=model, symbols=symbols, runtime=device)
    return Opened(coder, corpus, {name: named.get(name, told.get(name)) for name in CONDITIONS})


def bytes_of_split(corpus: Corpus, split: str) -> bytes:
    """A split as bytes; ValueError naming ``split``."""
    if split not in SPLITS:
        raise ValueError(f"split={split}: allowed are {', '.join(SPLITS)}")
    return corpus.splits[split].numpy().tobytes().translate(corpus.symbols.ljust(256, b"\0"))


def pack(header: dict, code: bytes) -> bytes:
    """A file's bytes; ``header`` has the keys of ``CONDITIONS`` and of ``FILE``, less the checksum."""
    text = json.dumps(header | {"checksum": zlib.crc32(code)}, separators=(",", ":"))
    deflater = zlib.compressobj(9, zdict=_USUAL)
    packed = deflater.compress(text.encode()) + deflater.flush()
    return MAGIC + len(packed).to_bytes(2, "big") + packed + code


def unpack(content: bytes, *, key: str) -> tuple[dict, bytes]:
    """Header and code of a file's bytes; ValueError, which begins with ``key``, where it is none or damaged."""
    if not content.startswith(MAGIC):
        raise ValueError(f"{key}: is no file of this format ({MAGIC.decode()}); allowed is what bench.compress wrote")
    first = len(MAGIC) + 2
    end = first + int.from_bytes(content[len(MAGIC) : first], "big")
    inflater = zlib.decompressobj(zdict=_USUAL)
    try:
        header = json.loads(inflater.decompress(content[first:end], _MOST_BYTES))
    except (zlib.error, ValueError):
        header = None
    whole = inflater.eof and isinstance(header, dict) and set(header) == {*FILE, *CONDITIONS}
    if not whole or zlib.crc32(content[end:]) != header["checksum"]:
        raise ValueError(f"{key}: is damaged or cut off; allowed is a whole file of bench.compress")
    return header, content[end:]


def check_conditions(header: dict, conditions: dict, *, key: str) -> None:
    """ValueError that names all that differs from where the file was coded."""
    other = [
        f"{name} (then {header[name]}, now {conditions[name]})"
        for name in CONDITIONS
        if header[name] != conditions[name]
    ]
    if other:
        raise ValueError(
            f"{key}: was coded with other probabilities, these differ: {', '.join(other)}; allowed are the same run, "
            "code and machine, with runtime.threads, .device, .precision and .backend as then"
        )


def read_file(name: str, *, key: str) -> bytes:
    """All bytes of a file; ValueError naming the key."""
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ValueError(f"{key}={name}: cannot be read ({error.strerror})") from error


def check_out(out: str, *, file: str | None) -> None:
    """ValueError, before the work, where ``out`` is a folder, is below a file, or is the very file that is read."""
    path = Path(out)
    if path.is_dir() or (file is not None and path.exists() and path.samefile(file)):
        raise ValueError(
            f"out={out}: is {'a folder' if path.is_dir() else 'the file that is read'}; allowed is another"
        )
    if not (there := next(place for place in path.absolute().parents if place.exists())).is_dir():
        raise ValueError(f"out={out}: cannot be written ({there} is no folder)")
