"""Checkpoints have everything that an exact resume needs (``harness/loop/state.py``).

A file is written completely or not at all. It is torch's zip archive with the SHA-256 of the
preceding bytes as comment, which is compared before unpickling. A run folder keeps the newest
ones, and ``best.pt`` with only weights."""

import io
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from harness.cache import digest, write_atomically
from harness.failures import Damaged, note
from harness.record.rows import FORMAT, open_regular, wrong_format

FOLDER = "checkpoints"
BEST = "best.pt"
_NAME = re.compile(r"step-(\d{9,})\.pt")
# last bytes of a zip archive without comment: the length of the comment, which is 0
_NO_COMMENT = bytes(2)
_COMMENT_PREFIX = b"sha256:"
_ENDING_BYTES = len(_NO_COMMENT) + len(_COMMENT_PREFIX) + 64


def save(folder: Path, content: dict, *, step: int, keep: int) -> Path:
    """Write ``checkpoints/step-N.pt`` of a run folder, and return its path. All but the newest
    ``keep`` are removed. Checkpoints of later steps are removed too: they are damaged, because
    the run did not resume from them."""
    path = _write(folder / FOLDER / f"step-{step:09d}.pt", content)
    paths = _checkpoints(folder)
    remaining = paths[: paths.index(path) + 1][-keep:]
    for removed in set(paths).difference(remaining):
        removed.unlink()
    return path


def save_best(folder: Path, content: dict) -> None:
    """Write ``checkpoints/best.pt`` of a run folder."""
    _write(folder / FOLDER / BEST, content)


def newest(folder: Path) -> Path | None:
    """Return the path of a run folder's newest checkpoint, which may be damaged, or None."""
    return next(reversed(_checkpoints(folder)), None)


def load_newest(folder: Path, identity: Mapping[str, object]) -> dict:
    """Return the newest undamaged checkpoint; a warning names newer, damaged ones. ``identity``
    as in ``load``."""
    damages = []
    for path in reversed(_checkpoints(folder)):
        try:
            content = load(path, identity)
        except Damaged as error:
            damages.append(str(error))
            continue
        if damages:
            note(f"WARNING: {'; '.join(damages)}: {path.name}, the one before, is loaded")
        return content
    reasons = "; ".join(damages) or f"{folder / FOLDER} has no checkpoint any more"
    raise Damaged(f"{reasons}; allowed is force=true, which runs it again")


def load_best(folder: Path, identity: Mapping[str, object] = {}) -> dict:
    """Return the content of ``best.pt``. ``identity`` is that of ``load``."""
    try:
        return load(folder / FOLDER / BEST, identity)
    except Damaged as error:
        raise Damaged(
            f"{error}; allowed is the run's command with force=true, which writes it again"
        ) from error


def load(path: Path, identity: Mapping[str, object] = {}) -> dict:
    """Return plain values, and tensors on the CPU; nothing in the file is executed. Raises Damaged
    if the file is not as it was written, and ValueError if its format or a key of ``identity``
    differs."""
    try:
        with open_regular(path) as opened:
            file = opened.read()
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror})") from error
    archive = file[:-_ENDING_BYTES]
    ending = file[-_ENDING_BYTES:]
    if ending != _ending(archive + _NO_COMMENT):
        raise Damaged(f"{path} is damaged or cut off: its bytes do not match its digest")
    try:
        content = torch.load(io.BytesIO(file), map_location="cpu", weights_only=True)
        saved_identity = dict(content.get("identity") or {})
    except MemoryError:
        raise
    except Exception as error:  # a foreign file with a valid digest; torch may raise any exception
        raise Damaged(f"{path} is no checkpoint of a run ({type(error).__name__})") from error
    if reason := wrong_format(content):
        raise ValueError(f"{path}: {reason}; allowed is that format")
    if differing := [key for key in identity if saved_identity.get(key) != identity[key]]:
        differences = "; ".join(
            f"{key} was {saved_identity.get(key)}, is {identity[key]}" for key in differing
        )
        raise ValueError(
            f"{path} is of another run: {differences}; allowed is one of this run, or none"
        )
    del content["format"]
    return content


def _checkpoints(folder: Path) -> list[Path]:
    """Return the files of a run folder that are named like checkpoints, by increasing step."""
    steps = {}
    for path in (folder / FOLDER).glob("step-*.pt"):
        if match := _NAME.fullmatch(path.name):
            steps[path] = int(match[1])
    return sorted(steps, key=steps.get)


def _write(path: Path, content: dict) -> Path:
    file = io.BytesIO()
    torch.save({"format": FORMAT} | content, file)
    ending = _ending(file.getbuffer())
    file.seek(-len(_NO_COMMENT), io.SEEK_END)
    file.write(ending)
    write_atomically(path, file.getbuffer())
    return path


def _ending(archive: bytes | memoryview) -> bytes:
    """Return the last bytes of a file with this archive: the length of the comment, and the
    comment with its digest."""
    comment = _COMMENT_PREFIX + digest(archive).encode()
    return len(comment).to_bytes(len(_NO_COMMENT), "little") + comment
