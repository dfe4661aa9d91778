"""Several machines, which are network namespaces of this one: a process, a machine or a link is lost, and what follows.

They need root and ``ip``. torchrun itself begins each process, so that each case takes half a minute or more.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from harness.device.processes import TIMEOUT
from tests.command import MADE, ROOT, TINY, empty_folder  # noqa: F401 - a fixture
from tests.patience import PATIENCE_SECONDS, wait_for

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="namespaces need root and ip"),
]
MACHINES = (1, 2)
WORDS = (
    *TINY,
    *MADE,
    "variant=mhsa",
    "budget.steps=100000",
    "checkpoint.every_steps=10",
    "checkpoint.every_seconds=null",
)
AT_ONCE_SECONDS = 10.0
WITHIN_SECONDS = TIMEOUT.total_seconds() + AT_ONCE_SECONDS


def ip(*words: str) -> None:
    subprocess.run(["ip", *" ".join(words).split()], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[None]:
    """Two of them at one switch; names and addresses that nobody else has."""
    names = [f"windtunnel{number}" for number in MACHINES]
    try:
        ip("link add wt-switch type bridge")
        ip("link set wt-switch up")
        for number, name in zip(MACHINES, names, strict=True):
            ip(f"netns add {name}")
            ip(f"link add wt-port{number} type veth peer name eth0 netns {name}")
            ip(f"link set wt-port{number} master wt-switch up")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} addr add 10.77.0.{number}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
        yield
    finally:
        for words in (
            *(f"link del wt-port{n}" for n in MACHINES),
            *(f"netns del {n}" for n in names),
            "link del wt-switch",
        ):
            with suppress(subprocess.CalledProcessError):
                ip(words)


class Machine:
    """``torchrun`` on one machine.

    Attributes:
        worker: the process id of its training process, newly read.
    """

    def __init__(self, number: int, *words: str):
        self.said, address = Path(f"said{number}"), f"10.77.0.{number}"
        command = ["ip", "netns", "exec", f"windtunnel{number}", sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29500"]
        command += [f"--rdzv-conf=is_host={int(number == 1)}", f"--local-addr={address}", *words]
        own = {"WANDB_MODE": "disabled", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                [*command, str(ROOT / "train.py"), *WORDS],
                stdout=said,
                stderr=said,
                env=os.environ | own | {"PYTHONPATH": str(ROOT)},
            )

    @property
    def worker(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def loss(self) -> str:
        """What its process said of another's loss, once."""
        (line,) = re.findall(
            r"^error: process \d of 2: another one has ended or is silent.*$", self.said.read_text(), re.M
        )
        assert "The newest whole checkpoint is outputs/mhsa-" in line and "bytes of training are lost" in line
        return line


@contextmanager
def training(*words: str) -> Iterator[list[Machine]]:
    """Both machines, from the first checkpoint on."""
    both = [Machine(number, *words) for number in MACHINES]
    try:
        wait_for(lambda: list(Path().glob("outputs/mhsa-*/checkpoints/step-*.pt")), "a checkpoint")
        yield both
    finally:
        for machine in both:
            with suppress(OSError, IndexError):  # torchrun's processes lead sessions of their own
                os.kill(machine.worker, signal.SIGKILL)
            machine.process.kill()
            machine.process.wait()


def ended(machine: Machine, *, within: float) -> None:
    began = time.monotonic()
    machine.process.wait(PATIENCE_SECONDS)
    took = time.monotonic() - began
    assert took < within + 30, f"{took:.0f} s"  # torchrun's own, on a machine that has other work
    assert "exitcode  : 6" in machine.said.read_text()


def test_a_killed_process_ends_the_other_machine(machines, here):
    with training() as (first, second):
        os.kill(second.worker, signal.SIGKILL)
        ended(first, within=AT_ONCE_SECONDS)
        first.loss()


def test_a_machine_whose_link_is_cut_is_lost_within_a_minute(machines, here):
    with training() as (first, _):
        ip("link set wt-port2 down")
        ended(first, within=WITHIN_SECONDS)
        assert "Timed out" in first.loss()


def test_torchrun_goes_on_by_itself(machines, here):
    with training("--max-restarts=3") as (first, second):
        before = second.worker
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: re.search(r"^resuming at [\d,]+ bytes", first.said.read_text(), re.M), "a second beginning")
        assert second.worker != before
        first.loss()
