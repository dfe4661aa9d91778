"""Checkpoints: everything an exact resume needs (``Trainer.content`` and ``Run.save``), written whole or not at all.
The newest stay, and ``best.pt`` with weights only. Random states alone depend on the number of processes.

The file is torch's zip archive with the SHA-256 of the preceding bytes as comment, compared before unpickling.
"""

import hashlib
import io
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from harness.cache import write_atomically
from harness.failures import Damaged
from harness.record.rows import FORMAT, check_format, read_file

FOLDER = "checkpoints"
BEST = "best.pt"
_NAME = re.compile(r"step-(\d{9,})\.pt")
_NO_COMMENT = bytes(2)
"""End of an archive without comment: the comment's length."""
_MARK = b"sha256:"
_ENDING_BYTES = len(_NO_COMMENT) + len(_MARK) + 64


def save(folder: Path, content: dict, *, step: int, keep: int) -> Path:
    """Write ``checkpoints/step-N.pt`` of a run folder, and remove all but the newest ``keep`` and those of later steps,
    which are damaged: the run did not resume from them."""
    path = _write(folder / FOLDER / f"step-{step:09d}.pt", content)
    every = _all(folder)
    for old in set(every).difference(every[: every.index(path) + 1][-keep:]):
        old.unlink()
    return path


def save_best(folder: Path, content: dict) -> Path:
    return _write(folder / FOLDER / BEST, content)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint of a run folder, perhaps damaged, or None."""
    return next(reversed(_all(folder)), None)


def load_newest(folder: Path, whose: Mapping[str, object]) -> dict:
    """The newest undamaged checkpoint, with a warning where a newer one is damaged; ``whose`` as of ``load``."""
    damaged = []
    for path in reversed(_all(folder)):
        try:
            content = load(path, whose)
        except Damaged as error:
            damaged.append(str(error))
            continue
        if damaged:
            print(f"WARNING: {'; '.join(damaged)}: {path.name}, the one before, is taken", file=sys.stderr)
        return content
    reasons = "; ".join(damaged) or f"{folder / FOLDER} has no checkpoint any more"
    raise Damaged(f"{reasons}; allowed is force=true, to run it again")


def load_best(folder: Path, whose: Mapping[str, object] | None = None) -> dict:
    """What ``save_best`` wrote."""
    try:
        return load(folder / FOLDER / BEST, whose)
    except Damaged as error:
        raise Damaged(f"{error}; allowed is the run's own command with force=true, to make it again") from error


def load(path: Path, whose: Mapping[str, object] | None = None) -> dict:
    """Tensors on the CPU and plain values; nothing in the file is executed. ``whose``: the identity of the checkpoint's
    run, None for any. Damaged where the file is not as it was written; ValueError for another format or run."""
    try:
        file = read_file(path, most=path.stat().st_size)
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror})") from error
    if damage := _damage(file):
        raise Damaged(f"{path} {damage}")
    try:
        content = torch.load(io.BytesIO(file), map_location="cpu", weights_only=True)
        identity = dict(content.get("identity") or {})
    except MemoryError:
        raise
    except Exception as error:  # a foreign file with a valid digest; torch names no errors
        raise Damaged(f"{path} is no checkpoint of a run ({type(error).__name__})") from error
    check_format(content, what=str(path))
    pairs = {key: (identity.get(key), value) for key, value in (whose or {}).items()}
    if differ := [f"{key} was {then}, is {now}" for key, (then, now) in pairs.items() if then != now]:
        raise ValueError(f"{path} is of another run: {'; '.join(differ)}; allowed is this run's own, or none")
    del content["format"]
    return content


def _all(folder: Path) -> list[Path]:
    """Files with a checkpoint's name, the newest last."""
    paths = [path for path in (folder / FOLDER).glob("step-*.pt") if _NAME.fullmatch(path.name)]
    paths = [path for path in paths if path.is_file() or not path.exists()]
    return sorted(paths, key=lambda path: int(_NAME.fullmatch(path.name)[1]))


def _write(path: Path, content: dict) -> Path:
    file = io.BytesIO()
    torch.save({"format": FORMAT} | content, file)
    digest = _ending(file.getbuffer())
    file.seek(-len(_NO_COMMENT), io.SEEK_END)
    file.write(digest)
    write_atomically(path, file.getbuffer())
    return path


def _ending(archive: bytes | memoryview) -> bytes:
    """The end of a file with this archive: the comment's length, and the digest as a comment."""
    comment = _MARK + hashlib.sha256(archive).hexdigest().encode()
    return len(comment).to_bytes(len(_NO_COMMENT), "little") + comment


def _damage(file: bytes) -> str | None:
    """Why a file is not as it was written, or None."""
    archive, ending = file[:-_ENDING_BYTES], file[-_ENDING_BYTES:]
    if _MARK not in ending:
        return "is damaged or cut off: it has no digest"
    return None if ending == _ending(archive + _NO_COMMENT) else "is damaged: its bytes are not those of its digest"
