"""Run folders ``outputs/<variant>-s<seed>-<hash>/``. The hash covers source, data, device,
precision and the resolved configuration without keys that change no number: edited code gets
another folder. The same command resumes an unfinished run and returns a finished one."""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.cache import (
    NO_SPACE,
    digest,
    raise_storage_failure,
    sha256_of,
    try_lock,
    user_path,
    write_all,
)
from harness.failures import failure_class
from harness.record import checkpoint
from harness.record.rows import (
    EVALUATIONS,
    RECORD,
    SUMMARY,
    read_accepted_rows,
    write_summary,
    wrong_format,
)
from harness.record.schema import violation

NOT_HASHED = ("outputs", "force", "record", "checkpoint", "trust", "hydra")
LOCK = "lock"
COMPARED_SECTIONS = ("model", "position", "batch")
"""Sections of a configuration that are compared with those of another run."""


def config_hash(config: Mapping[str, object], *, pinned: Collection[str]) -> str:
    """Return the SHA-256 of a resolved configuration without keys that change no number, such as
    the path of a corpus whose digest is ``pinned``. ``init_from.run`` is replaced by the digest
    of its newest checkpoint."""
    hashed = {key: section for key, section in config.items() if key not in NOT_HASHED}
    # Jobs of a sweep have fallback=null, and share the folder with the same run outside of a sweep.
    data = {key: setting for key, setting in config["data"].items() if key != "fallback"}
    if data.get("sequence") is None:  # configurations of older rows lack the key
        data.pop("sequence", None)
    if data["name"] in pinned:
        data["path"] = None
    hashed["data"] = data
    if hashed["objective"]["name"] == "causal_lm":
        hashed.pop("objective")
    init_from = hashed["init_from"]
    if init_from["run"] is not None:
        newest = checkpoint.newest(user_path(init_from["run"], key="init_from.run"))
        if newest is not None:
            hashed["init_from"] = init_from | {"run": sha256_of(newest)}
    return digest(json.dumps(hashed, sort_keys=True).encode())


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What determines the numbers of a run, mostly as digests. Runs of equal identity share a
    folder."""

    variant: str
    seed: int
    config: str
    source: str
    data: str
    device: str
    precision: str

    @property
    def name(self) -> str:
        """Name of the run folder."""
        hashed = " ".join((self.config, self.source, self.data, self.device, self.precision))
        return f"{self.variant}-s{self.seed}-{digest(hashed.encode())[:8]}"


class RunFolder:
    """The folder of one run, into which only the process that has locked it writes. ``summary`` is
    that of a finished run, and ``checkpoint`` the path of the newest one, or None; both are None
    with ``force``."""

    def __init__(self, outputs: Path, identity: Identity, *, force: bool = False):
        self.path = outputs / identity.name
        self.identity = identity
        self._lock = None
        self._force = force
        self.summary, self.checkpoint = self._read()

    def _read(self) -> tuple[dict | None, Path | None]:
        if self._force:
            return None, None
        return finished_summary(self.path), checkpoint.newest(self.path)

    def lock(self) -> tuple[dict | None, Path | None]:
        """Create and lock the folder, and point ``latest`` at it. Returns ``summary`` and
        ``checkpoint``, read again, because another process may have changed them. ValueError if
        the folder is locked or cannot be written."""
        owner = f"process {os.getpid()} on {os.uname().nodename}".encode()
        link = self.path / "latest.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            refuse_links(self.path, key="outputs")
            self._lock = open(self.path / LOCK, "ab+", buffering=0)  # noqa: SIM115
            if not try_lock(self._lock):
                self._lock.seek(0)
                raise ValueError(
                    f"outputs={self.path.parent}: {self.path.name} is locked by "
                    f"{self._lock.read().decode(errors='replace')}; allowed is to wait for it, or "
                    "another outputs"
                )
            self._lock.truncate(0)
            write_all(self._lock, owner)
            for file in (*self.path.glob("*.tmp"), *(self.path / checkpoint.FOLDER).glob("*.tmp")):
                file.unlink()  # a process that was killed while writing has left it
            with suppress(OSError):  # a file system without links
                link.symlink_to(self.path.name)
                link.replace(self.path.parent / "latest")
        except OSError as error:
            with suppress(OSError):  # the folder is not empty, or does not exist
                link.unlink(missing_ok=True)
                if not (self.path / RECORD).exists():
                    (self.path / LOCK).unlink(missing_ok=True)
                self.path.rmdir()
            if error.errno in NO_SPACE:
                with raise_storage_failure(self.path / LOCK, needed=len(owner)):
                    raise
            file_name = ""
            if error.filename2:
                file_name = f"{error.filename2}: "
            raise ValueError(
                f"outputs={self.path.parent}: cannot be written ({file_name}{error.strerror})"
            ) from error
        return self._read()

    def remove_outdated(self) -> None:
        """Remove the summary of an earlier command and, if there is no checkpoint to resume
        from, its other files."""
        outdated = [self.path / SUMMARY]
        if self.checkpoint is None:
            outdated += [self.path / RECORD, self.path / EVALUATIONS, *self.path.glob("*.png")]
            outdated += (
                path for path in (self.path / checkpoint.FOLDER).glob("*") if not path.is_dir()
            )
        for path in outdated:
            path.unlink(missing_ok=True)

    @contextmanager
    def record_failure(self, provenance: dict) -> Iterator[None]:
        """Context that writes an error into a summary with ``provenance``. The summary of a
        finished run is kept. A ValueError before the folder is locked is a user's mistake, and
        is not written."""
        try:
            yield
        except Exception as error:
            with suppress(OSError, ValueError):  # a full disk must not hide the error
                self._write_failure(error, provenance)
            raise

    def _write_failure(self, error: Exception, provenance: dict) -> None:
        is_locked = self._lock is not None and not self._lock.closed
        if finished_summary(self.path) or (isinstance(error, ValueError) and not is_locked):
            return
        if not is_locked:
            self.lock()
        # else a user has removed it
        if os.path.samestat((self.path / LOCK).stat(), os.fstat(self._lock.fileno())):
            status = "failed"
            if kind := failure_class(error):
                status = kind.status
            message = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
            write_summary(self.path, summary=provenance | {"status": status, "error": message})
        if not is_locked:
            self.unlock()

    def unlock(self) -> None:
        """Unlock the folder."""
        if self._lock:
            self._lock.close()


def finished_summary(path: Path) -> dict | None:
    """Return the summary in a run folder, or None if it is missing or damaged, or if the run was
    not finished."""
    rows = _summaries(path, schema="summary")
    return next((row for row in rows if row["status"] == "finished"), None)


def _summaries(path: Path, *, schema: str) -> list[dict]:
    """Return the row of ``summary.json`` in a run folder, if it has one that keeps a schema."""
    return read_accepted_rows(path / SUMMARY, check=lambda row, _: violation(row, schema=schema))[0]


def why_unfinished(path: Path) -> str:
    """Return the status of a folder's run, if it has failed, and the name of the run beside it that
    finished last, as the end of a message."""
    text = ""
    for row in _summaries(path, schema="failed"):
        text += f"; this run has {row['status']} ({row.get('error') or 'no reason is recorded'})"
    summaries = path.resolve().parent.glob(f"*/{SUMMARY}")
    for summary in sorted(summaries, key=lambda summary: summary.stat().st_mtime, reverse=True):
        if finished_summary(summary.parent):
            return f"{text}; the last run that finished is {summary.parent.name}"
    return text


def read_provenance(folder: Path, *, key: str) -> dict:
    """Return the first row of a run folder's record. The folder is not trusted: size and types are
    checked. ValueError, beginning with ``key`` and the folder, for anything but a provenance
    row."""
    rows, reasons = read_accepted_rows(
        folder / RECORD,
        check=lambda row, _: wrong_format(row) or violation(row, schema="provenance"),
        first_line=True,
    )
    for row in rows:
        sections = [row["config"].get(name) for name in COMPARED_SECTIONS]
        if row["kind"] == "provenance" and all(isinstance(section, dict) for section in sections):
            return row
    reason = " ".join(reasons) or "there is no provenance with a configuration"
    raise ValueError(f"{key}={folder}: {RECORD}: {reason}; allowed is what a run wrote")


def identity_of(row: Mapping) -> dict[str, object]:
    """Return the part of the ``identity`` of a run's checkpoints that its provenance row has."""
    keys = {"variant": "variant", "seed": "seed", "config": "config_hash", "source": "source"}
    return {name: row[key] for name, key in keys.items()}


def refuse_links(folder: Path, *, key: str) -> None:
    """Raise ValueError if a folder contains a link, through which a file would be written
    outside of the folder."""
    for path in folder.iterdir():
        # killed processes leave .tmp links, which lock() removes
        if path.is_symlink() and path.suffix != ".tmp":
            raise ValueError(
                f"{key}={folder}: {path.name} is a link; allowed is a folder without links"
            )
