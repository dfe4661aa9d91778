"""Meeting: the processes of a run find each other, or say in one line why they do not.

torchrun (torch 2.13) keeps one store of addresses for all its restarts: a process that is quick would call the address of
one that is dead. So the first process of each start names a part of the store anew, and the others take it when met.
"""

import os
import socket
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist

from harness.device.heartbeat import Heartbeat, first_line
from harness.device.torchrun import Launch
from harness.failures import ProcessLost

MEETING = timedelta(minutes=5)
"""The longest that a process looks for the others."""
LOOK_SECONDS = 0.05


def meet(launch: Launch, *, timeout: timedelta) -> Heartbeat:
    """The process group of torch is there, and the heart beats; ``ProcessLost`` where the others are not met.

    Args:
        timeout: of the group's collectives.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        _check_address(launch)
        store, rank, number = next(dist.rendezvous("env://", timeout=MEETING))
        store = _part_of_this_start(store, rank, number)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=number)
        return Heartbeat(launch)
    except RuntimeError as error:
        place = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise ProcessLost(
            f"process {launch.rank} of {launch.world_size} did not meet the others at {place}, which MASTER_ADDR and "
            f"MASTER_PORT name ({first_line(error)}); allowed are an address and a free port of the first machine that all "
            "can reach, and, where a machine has several networks, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        ) from error


def _check_address(launch: Launch) -> None:
    """RuntimeError where gloo would tell the other machines an address of this one that they cannot reach, and wait."""
    if launch.world_size == launch.local_world_size or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    name = socket.gethostname()
    try:
        found = socket.gethostbyname(name)
    except OSError:
        found = "no address"
    if found.startswith(("127.", "no")):
        raise RuntimeError(f"this machine's name, {name}, stands for {found}: set GLOO_SOCKET_IFNAME")


def _part_of_this_start(store: dist.Store, rank: int, number: int) -> dist.Store:
    """Where nothing is left of processes that were started before these."""
    own, end = uuid.uuid4().hex, time.monotonic() + MEETING.total_seconds()
    if rank == 0:
        store.set("first", own)
        store.set(f"{own}/met", " ".join(store.get(f"{own}/{other}").decode() for other in range(1, number)))
        return dist.PrefixStore(own, store)
    while time.monotonic() < end:
        first = store.get("first").decode()
        store.set(f"{first}/{rank}", own)
        if store.check([f"{first}/met"]) and own in store.get(f"{first}/met").decode():
            return dist.PrefixStore(first, store)
        time.sleep(LOOK_SECONDS)
    raise RuntimeError("not all of them have come")
