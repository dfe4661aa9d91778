"""W&B in tests: an environment without key or server, servers that misbehave, and run files read back."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.command import MADE, ROOT, TINY, Ended, run_folders
from tests.forked import run
from tests.patience import PATIENCE_SECONDS

SIZES = tuple(word for word in TINY if not word.startswith(("record.", "budget.", "eval.every"))) + MADE
"""A training of a second that keeps W&B and its figures."""
PRETENDED_KEY = "0" * 40
MODES = ("hangs", "vanishes")


def lonely_environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    """No key, no settings of this user, and a server that nobody can reach."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    kept |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "no_netrc"), "WANDB_CONFIG_DIR": str(tmp_path / "config")}
    kept |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_ERROR_REPORTING": "false", "PYTHONPATH": str(ROOT)}
    return kept | variables


def python(*arguments, environment: dict[str, str]) -> subprocess.CompletedProcess:
    """Python in a process of its own, in the environment's home folder."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        cwd=environment["HOME"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )


def trained(script: str | Path, *words: str, environment: dict[str, str]) -> Ended:
    """A training by this script, as :func:`python` would run it; it has not imported W&B yet."""
    ended = run(script, *words, folder=Path(environment["HOME"]), environment=environment)
    assert ended.code == 0, ended
    return ended


def inspect(folder: Path, *, environment: dict[str, str]) -> dict:
    """State, configuration and summary of an offline run, as W&B's own reader has them."""
    command = ("-m", "wandb", "leet", "inspect", "--summary", "--json", folder)
    return json.loads(python(*command, environment=environment).stdout)


def records(folder: Path, *, environment: dict[str, str]) -> list[dict]:
    """All records of an offline run's file, as W&B's own reader has them."""
    lines = python("-m", "wandb", "leet", "inspect", "--json", folder, environment=environment).stdout.splitlines()
    return [json.loads(line) for line in lines]


@dataclass(frozen=True, kw_only=True)
class OfflineRuns:
    """Finished runs: their folders, and of each W&B's own reading of its file: ``inspect`` and ``records``."""

    folders: list[Path]
    inspected: list[dict]
    records: list[list[dict]]


def make_offline_runs(here: Path) -> OfflineRuns:
    """Train adaptive_span and product_key_memory for a second each, in one command."""
    environment = lonely_environment(here)
    words = (*SIZES, "variant=adaptive_span,product_key_memory", "budget.steps=12", "eval.every=0.4", "eval.test=true")
    words += ("record.every_steps=3", "record.wandb.every_seconds=0.001", "record.wandb.group=together")
    words += ("record.wandb.tags=[mine]", "eval.windows=true")
    trained("train.py", "-m", *words, environment=environment)
    folders = run_folders(here / "outputs")
    files = [next((folder / "wandb").glob("offline-run-*")) for folder in folders]
    return OfflineRuns(
        folders=folders,
        inspected=[inspect(file, environment=environment) for file in files],
        records=[records(file, environment=environment) for file in files],
    )


class MisbehavingServer:
    """A W&B server on a local socket. Use it in a ``with`` statement.

    Args:
        mode: ``hangs`` (accepts, and never answers), ``vanishes`` (answers until a run has started, then is gone).

    Attributes:
        url: for ``WANDB_BASE_URL``.
        asked: how many requests came.
    """

    def __init__(self, mode: str):
        self.mode, self.asked = mode, 0
        self._stopped = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                outer.answer(self)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked += 1
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if self.mode == "hangs" or self._stopped.is_set():
            self._stopped.wait()
            return
        content = json.dumps(_answer(json.loads(body))).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)
        if b"UpsertBucket" in body:
            threading.Thread(target=self._vanish, daemon=True).start()

    def _vanish(self) -> None:
        time.sleep(0.2)  # the answer arrives
        self.close()

    def close(self) -> None:
        if not self._stopped.is_set():
            self._stopped.set()
            self._server.shutdown()
            self._server.server_close()

    def __enter__(self) -> "MisbehavingServer":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _answer(asked: dict) -> dict:
    """As much as a run needs to start online."""
    if "UpsertBucket" not in asked["query"]:
        return {"data": {}}
    project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}}
    bucket = {"id": "b", "name": asked["variables"].get("name"), "config": "{}", "project": project}
    return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
