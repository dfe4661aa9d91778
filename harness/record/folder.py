"""Run folders ``outputs/<variant>-s<seed>-<hash>/``: a run's identity, earlier result and lock.

The hash covers the resolved configuration without keys that change no number, source, data, device and precision:
edited code is another run. The same command resumes an unfinished run and returns a finished one.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.cache import NO_SPACE, sha256_of, storage_failure, try_lock, write_all
from harness.failures import failure_class
from harness.record import checkpoint
from harness.record.rows import EVALUATIONS, RECORD, SUMMARY, check_format, look_at, read_object, write_summary
from harness.record.shapes import misfit, shapes

NOT_HASHED = ("outputs", "force", "record", "checkpoint", "trust", "hydra")
LOCK = "lock"
SECTIONS = ("model", "position", "batch")
"""Of a configuration, those that are compared with another run's."""


def config_hash(config: Mapping[str, object], *, pinned: Collection[str]) -> str:
    """SHA-256 of a resolved configuration without keys that change no number, such as the path of ``pinned`` corpora.
    ``init_from.run`` counts by the digest of its newest checkpoint."""
    hashed = {key: value for key, value in config.items() if key not in NOT_HASHED}
    hashed["data"] = {key: value for key, value in hashed["data"].items() if key != "fallback"}  # null in a sweep's job
    if hashed["data"]["name"] in pinned:
        hashed["data"]["path"] = None
    start = hashed["init_from"]
    newest = None if start["run"] is None else checkpoint.newest(Path(start["run"]))
    if newest is not None:
        hashed["init_from"] = start | {"run": sha256_of(newest)}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Digests and kinds of a run: runs of equal identity give equal numbers, and have one folder."""

    variant: str
    seed: int
    config: str
    source: str
    data: str
    device: str
    precision: str

    @property
    def name(self) -> str:
        words = (self.config, self.source, self.data, self.device, self.precision)
        return f"{self.variant}-s{self.seed}-{hashlib.sha256(' '.join(words).encode()).hexdigest()[:8]}"


class RunFolder:
    """The folder of one run, held alone.

    Attributes:
        summary: of the finished run that may be returned, or None; read at first, and by ``hold``.
        checkpoint: to resume from, or None; read together with it.
    """

    def __init__(self, outputs: Path, identity: Identity, *, force: bool = False):
        self.path, self.identity, self._lock, self._force = outputs / identity.name, identity, None, force
        self._look()

    def _look(self) -> tuple[dict | None, Path | None]:
        self.summary = None if self._force else finished_summary(self.path)
        self.checkpoint = None if self._force else checkpoint.newest(self.path)
        return self.summary, self.checkpoint

    def hold(self) -> tuple[dict | None, Path | None]:
        """Create and lock the folder, point ``latest`` at it, and return summary and checkpoint, which another process
        may have changed. ValueError where it cannot be written or is in use."""
        holder, link = f"process {os.getpid()} on {os.uname().nodename}".encode(), self.path / "latest.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            refuse_links(self.path, key="outputs")
            self._lock = open(self.path / LOCK, "ab+", buffering=0)  # noqa: SIM115 - held until release
            if not try_lock(self._lock):
                self._lock.seek(0)
                raise ValueError(
                    f"outputs={self.path.parent}: {self.path.name} is held by "
                    f"{self._lock.read().decode(errors='replace')}; allowed is to wait for it, or another outputs"
                )
            self._lock.truncate(0)
            write_all(self._lock, holder)
            for file in (*self.path.glob("*.tmp"), *(self.path / checkpoint.FOLDER).glob("*.tmp")):
                file.unlink()  # by a process that was killed while it wrote
            link.symlink_to(self.path.name)
            link.replace(self.path.parent / "latest")
        except OSError as error:
            with suppress(OSError):  # not empty, or no folder
                link.unlink(missing_ok=True)
                if not (self.path / RECORD).exists():
                    (self.path / LOCK).unlink(missing_ok=True)
                self.path.rmdir()
            if error.errno in NO_SPACE:
                raise storage_failure(self.path / LOCK, error, needed=len(holder)) from error
            where = f"{error.filename2}: " if error.filename2 else ""
            raise ValueError(f"outputs={self.path.parent}: cannot be written ({where}{error.strerror})") from error
        return self._look()

    def begin(self) -> None:
        """Remove the summary of an earlier try and, without a checkpoint to resume from, its other files."""
        old = [self.path / SUMMARY]
        if self.checkpoint is None:
            old += [self.path / RECORD, self.path / EVALUATIONS, *self.path.glob("*.png")]
            old += (path for path in (self.path / checkpoint.FOLDER).glob("*") if not path.is_dir())
        for path in old:
            path.unlink(missing_ok=True)

    @contextmanager
    def failing(self, facts: dict) -> Iterator[None]:
        """Record an error that ends the block in a summary with ``facts``. Before the folder is locked, a user's
        mistake leaves no file, and an earlier result stays."""
        try:
            yield
        except Exception as error:
            with suppress(OSError, ValueError):  # a full disk must not hide the error
                self._record_failure(error, facts)
            raise

    def _record_failure(self, error: Exception, facts: dict) -> None:
        is_held = self._lock is not None and not self._lock.closed
        if finished_summary(self.path) or (isinstance(error, ValueError) and not is_held):
            return  # a result stays
        if not is_held:
            self.hold()
        if os.path.samestat((self.path / LOCK).stat(), os.fstat(self._lock.fileno())):  # or somebody has removed it
            status = kind.status if (kind := failure_class(error)) else "failed"
            message = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
            write_summary(self.path, summary=facts | {"status": status, "error": message})
        if not is_held:
            self.release()

    def release(self) -> None:
        """Unlock it."""
        if self._lock:
            self._lock.close()


def finished_summary(path: Path) -> dict | None:
    """The summary in a run folder, if the run was finished and it is whole."""
    row = read_object(path / SUMMARY)
    return row if row.get("status") == "finished" and not misfit(row, shape=shapes()["summary"]) else None


def read_provenance(folder: Path, *, key: str) -> dict:
    """The first row of a run folder's record, of anybody's folder: within limits of size, and of the types that other
    code needs. ValueError, beginning with ``key`` and the folder, for anything else."""
    what, allowed = f"{key}={folder}: {RECORD}", "allowed is what a run wrote"
    row, wrong = look_at(folder / RECORD, first_line=True)
    if row is None:
        raise ValueError(f"{what}: {wrong or 'there is no such file'}; {allowed}")
    if row.get("kind") != "provenance":
        raise ValueError(f"{what}: the first line is no provenance; {allowed}")
    check_format(row, what=what)
    wrong = misfit(row, shape=shapes()["provenance"])
    for name in () if wrong else SECTIONS:
        if not isinstance(row["config"].get(name), dict):
            wrong = f"config.{name} is no section"
    if wrong:
        raise ValueError(f"{what}: {wrong}; {allowed}")
    return row


def identity_of(row: Mapping) -> dict[str, object]:
    """The identity in a run's checkpoints, by its provenance row."""
    names = {"variant": "variant", "seed": "seed", "config": "config_hash", "source": "source"}
    return {name: row.get(key) for name, key in names.items()}


def refuse_links(folder: Path, *, key: str) -> None:
    """ValueError for a link in a folder that is about to be written into."""
    for path in folder.iterdir():
        if path.is_symlink() and path.suffix != ".tmp":  # a killed process's, and removed before anything is written
            raise ValueError(f"{key}={folder}: {path.name} is a link; what is written there would land somewhere else")
