"""The processes of one run, as a value: how many, which one this is, and what they exchange.

``torchrun --nproc-per-node=N train.py ...`` starts the command N times. Each process reads its share of ``batch.streams``;
gradients are averaged, so that every process makes the same update. The first one decides, holds the run folder and speaks.
With one process nothing here does anything.

Torch averages gradients of dense matrices during the backward pass (``spread.py``), and the few others are averaged here
after it: vectors, what layers share, and sparse rows, for which torch has no way.
"""

import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.device.torchrun import Launch, read_launch
from harness.failures import KINDS, ProcessLost, exit_code

TIMEOUT = timedelta(minutes=1)
"""The longest that a step waits for a process that is silent; one that has ended is noticed at once."""
PATIENCE = timedelta(minutes=10)
"""The same where one may be at work that the others do not have, as when it downloads, compiles or writes a checkpoint."""
MEETING = timedelta(minutes=5)
"""The longest that a process looks for the others at its start."""
NONE, DENSE, SPARSE = range(3)  # what a parameter has for a gradient

T = TypeVar("T")


class ProcessGroup(Launch):
    """The processes of a run, seen from one of them.

    Attributes:
        columns: of tables that are divided among them (``columns.py``), or None.
        standing: what is left of the run, as the last sentences of ``loss``.
    """

    columns: Any = None
    standing: Callable[[], str] = str
    _patient: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is the process that decides, writes and speaks."""
        return self.rank == 0

    @property
    def shard(self) -> tuple[int, int]:
        """This process's part of what is divided: which, of how many."""
        return self.rank, self.world_size

    def meet(self) -> None:
        """Make torch's process group: tensors on a GPU travel by NCCL, all others by gloo. ``ProcessLost`` if that fails."""
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        try:
            store = _store_of_this_start(next(dist.rendezvous("env://", timeout=MEETING))[0], self)
            dist.init_process_group(backend, timeout=PATIENCE, store=store, rank=self.rank, world_size=self.world_size)
            self._patient = dist.new_group(backend="gloo", timeout=PATIENCE)
        except RuntimeError as error:
            place = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise ProcessLost(
                f"process {self.rank} of {self.world_size} did not meet the others at {place}, which MASTER_ADDR and "
                f"MASTER_PORT name ({_first_line(error)}); allowed are an address and a free port of the first machine "
                "that all can reach, and, where a machine has several networks or its name stands for 127.0.0.1, "
                "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            ) from error

    def loss(self, error: Exception) -> ProcessLost:
        """What to raise in the place of an error that another process has caused."""
        who = f"process {self.rank} of {self.world_size}"
        reason = f"another one has ended or is silent ({_first_line(error)})"
        return ProcessLost(f"{who}: {reason}. {self.standing()}".strip())

    def wait(self) -> None:
        """Until all are here, be it for minutes: collectives that follow find everybody ready."""
        self.all_gather_numbers([0], patient=True)

    def shorten_timeout(self) -> None:
        """To a minute from now on, once the first step is made, and all that it needs compiled; all call it together."""
        if self.world_size > 1:
            dist.distributed_c10d._set_pg_timeout(TIMEOUT)

    def all_gather_numbers(self, numbers: Sequence[float], *, patient: bool = False) -> list[list[float]]:
        """Everybody's numbers by rank, equally many of each; whole ones are exact below 2^53."""
        if self.world_size == 1:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        self._call(dist.all_gather, found, own, group=self._patient if patient else None)
        return [one.tolist() for one in found]

    def largest(self, number: int) -> int:
        """The largest of everybody's numbers."""
        return int(max(one for (one,) in self.all_gather_numbers([number], patient=True)))

    def gather(self, tensor: Tensor, *, lengths: Sequence[int] | None = None) -> list[Tensor]:
        """Everybody's tensors by rank, on this one's device; only their first dimensions, ``lengths``, may differ."""
        if self.world_size == 1:
            return [tensor]
        lengths = lengths or [int(length) for (length,) in self.all_gather_numbers([len(tensor)])]
        longest = tensor.detach().new_zeros(max(lengths), *tensor.shape[1:])
        longest[: len(tensor)] = tensor
        sent = longest.contiguous().flatten().view(torch.uint8)  # any dtype travels, bit for bit
        found = [torch.empty_like(sent) for _ in lengths]
        if len(sent):
            self._call(dist.all_gather, found, sent)
        whole = [one.view(tensor.dtype).view(longest.shape) for one in found]
        return [one[:length] for one, length in zip(whole, lengths, strict=True)]

    def exchange(self, given: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """One tensor to each process by rank, and of these shapes one from each."""
        sizes = [math.prod(shape) for shape in shapes]
        found = given[0].new_empty(sum(sizes))
        sent = torch.cat([tensor.flatten() for tensor in given])
        self._call(dist.all_to_all_single, found, sent, sizes, [tensor.numel() for tensor in given])
        return [part.view(*shape) for part, shape in zip(found.split(sizes), shapes, strict=True)]

    def gather_values(self, value: T) -> list[T]:
        """Everybody's values by rank: anything that pickles, tensors on the CPU."""
        if self.world_size == 1:
            return [value]
        found: list[T] = [value] * self.world_size
        self._call(dist.all_gather_object, found, value)
        return found

    def on_main(self, make: Callable[[], T]) -> T:
        """What ``make`` returns in the first process, which alone calls it; its failure is everybody's."""
        sent = [None]
        with self.fail_together():
            if self.is_main:
                sent = [make()]
        if self.world_size > 1:
            self._call(dist.broadcast_object_list, sent, src=0)
        return sent[0]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A part in which each makes as many forward passes as it likes; whoever is done takes part in what the others read."""
        with nullcontext() if self.columns is None else self.columns.apart():
            yield
        self.wait()

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """A part that fails everywhere where it fails in one process, which alone says why; nothing is sent inside."""
        failed = None
        try:
            yield
        except Exception as error:
            if self.world_size == 1:
                raise
            failed = error
        own = [0 if failed is None else exit_code(failed)]
        codes = [int(code) for (code,) in self.all_gather_numbers(own, patient=True)]
        if not any(codes):
            return
        speaker = next(rank for rank, code in enumerate(codes) if code)
        if speaker == self.rank:
            raise failed
        silent = KINDS[codes[speaker]](f"process {speaker} of this run has failed")
        silent.already_printed = True
        raise silent from failed

    @torch.no_grad()
    def copy_first_(self, module: nn.Module) -> None:
        """The first process's parameters and buffers in all."""
        if self.world_size > 1:
            for tensor in (*module.parameters(), *module.buffers()):
                self._call(dist.broadcast, tensor.data, src=0)

    @torch.no_grad()
    def average_gradients_(self, parameters: Iterable[nn.Parameter], *others: Tensor) -> None:
        """The mean of everybody's gradients in place of each one's, the same bits in all processes; and of ``others``.

        A parameter without a gradient counts as zero where another process has one. Sparse gradients are gathered row
        by row, and coalesced.
        """
        if self.world_size == 1:
            return
        trained = [p for p in parameters if p.requires_grad]
        kinds = self.all_gather_numbers(
            [NONE if p.grad is None else SPARSE if p.grad.is_sparse else DENSE for p in trained]
        )
        dense: dict[tuple, list[Tensor]] = {}
        for parameter, *found in zip(trained, *kinds, strict=True):
            if max(found) == SPARSE:
                parameter.grad = self._sparse_mean(parameter)
            elif max(found) == DENSE:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dense.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter.grad)
        for tensor in others:
            dense.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for gradients in dense.values():
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            self._call(dist.all_reduce, flat)
            parts = flat.div_(self.world_size).split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])

    def _sparse_mean(self, parameter: nn.Parameter) -> Tensor:
        own = parameter.grad
        if own is None:
            rows, values = parameter.new_empty(0, dtype=torch.int64), parameter.new_empty(0, *parameter.shape[1:])
        else:
            assert own.is_sparse and own.sparse_dim() == 1, "a sparse gradient is of whole rows in every process"
            own = own.coalesce()
            rows, values = own.indices()[0], own.values()
        rows, values = torch.cat(self.gather(rows)), torch.cat(self.gather(values)).div_(self.world_size)
        return torch.sparse_coo_tensor(rows[None], values, parameter.shape, check_invariants=False).coalesce()

    def _call(self, collective: Callable, *values: object, **options: object) -> None:
        """A collective operation; its failure is one line, because another process tells the cause."""
        try:
            collective(*values, **options)
        except RuntimeError as error:
            raise self.loss(error) from error


SINGLE = ProcessGroup()


@contextmanager
def joined() -> Iterator[ProcessGroup]:
    """The processes that ``torchrun`` started with this one, while the ``with`` statement lasts; only the first prints."""
    launch = read_launch()
    if launch.world_size == 1:
        yield SINGLE
        return
    processes = ProcessGroup(*launch)
    processes.meet()
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere) if launch.rank else nullcontext():
        try:
            yield processes
        except SystemExit:  # of all at the same step; after an error, a farewell would wait for the others
            dist.destroy_process_group()
            raise
        except Exception as error:
            error.own = True  # what all of them met has been said by one
            raise
    dist.destroy_process_group()


def is_connection_failure(error: Exception) -> bool:
    """Whether an error is of torch's communication: gloo has no class of its own for it."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def _store_of_this_start(store: dist.Store, launch: Launch) -> dist.Store:
    """A part of torch's store in which processes that torchrun started before these have left no addresses.

    torchrun (torch 2.13) has one store for all its restarts, and machines count restarts differently. So the first process
    of each start names a part anew, and the others take it once it lists their own names.
    """
    name, end = uuid.uuid4().hex, time.monotonic() + MEETING.total_seconds()
    if launch.rank == 0:
        store.set("first", name)
        store.set(f"{name}/met", " ".join(store.get(f"{name}/{n}").decode() for n in range(1, launch.world_size)))
        return dist.PrefixStore(name, store)
    while time.monotonic() < end:
        first = store.get("first").decode()
        store.set(f"{first}/{launch.rank}", name)
        if store.check([f"{first}/met"]) and name in store.get(f"{first}/met").decode():
            return dist.PrefixStore(first, store)
        time.sleep(0.05)
    raise RuntimeError("not all of them have come")


def _first_line(error: Exception) -> str:
    """Of a message, without the frames that torch adds."""
    return str(error).partition("\n")[0][:200]
