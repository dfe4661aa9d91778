"""The processes of one run, as a value: how many, which one this is, and what they exchange.

``torchrun --nproc-per-node=N train.py ...`` starts the command N times. Each process reads its share of
``batch.streams``; gradients are averaged, so that every process makes the same update. The first one decides, holds the
run folder and speaks. With one process nothing here does anything.

torch averages gradients of dense matrices during the backward pass (``spread.py``); vectors, what layers share and sparse
rows are averaged here after it.
"""

import math
import os
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
"""The longest that a collective waits for a process that is silent; one that has ended is noticed at once."""
PATIENCE = timedelta(minutes=10)
"""The same where one may do alone what the others wait for: start, download, prove a backend or write a checkpoint."""
NONE, DENSE, SPARSE = range(3)  # what a parameter has for a gradient

T = TypeVar("T")


class ProcessGroup(Launch):
    """The processes of a run, seen from one of them.

    Attributes:
        tables: ``ShardedTables`` of the model, or None.
        standing: what is left of the run, as the last sentences of ``loss``.
    """

    tables: Any = None
    standing: Callable[[], str] = str
    _patient: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def shard(self) -> tuple[int, int]:
        """This process's part of what is divided: which, of how many."""
        return self.rank, self.world_size

    def meet(self) -> None:
        """Make torch's process group, or ``ProcessLost``: tensors on a GPU travel by NCCL, all others by gloo."""
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=PATIENCE))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it has what an earlier start left
                store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
            dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=self.rank, world_size=self.world_size)
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
        reason = f"another one has ended or is silent ({_first_line(error)})"
        return ProcessLost(f"process {self.rank} of {self.world_size}: {reason}. {self.standing()}".strip())

    def all_gather(self, local: T, *, patient: bool = False) -> list[T]:
        """Everybody's, by rank: anything that pickles, tensors on the CPU. ``patient`` waits for ten minutes."""
        everybodys: list[T] = [local] * self.world_size
        if self.world_size > 1:
            self._call(dist.all_gather_object, everybodys, local, group=self._patient if patient else None)
        return everybodys

    def largest(self, number: int) -> int:
        return max(self.all_gather(number, patient=True))

    def gather(self, tensor: Tensor, *, lengths: Sequence[int] | None = None) -> Tensor:
        """The rows of everybody's tensors by rank, on this one's device; ``lengths`` are their numbers, where known."""
        if self.world_size == 1:
            return tensor
        lengths, row = lengths or self.all_gather(len(tensor)), tensor.shape[1:]
        sizes = [tensor.numel()] * self.world_size, [length * math.prod(row) for length in lengths]
        return self.exchange(tensor.flatten().repeat(self.world_size), *sizes).view(sum(lengths), *row)

    def exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """So many numbers of a flat tensor to each process by rank, and so many from each of them."""
        arrived = flat.new_empty(sum(received))
        self._call(dist.all_to_all_single, arrived, flat, list(received), list(sent))
        return arrived

    def on_main(self, make: Callable[[], T]) -> T:
        """What ``make`` returns in the first process, which alone calls it; its failure is everybody's."""
        with self.fail_together():
            made = [make() if self.is_main else None]
        if self.world_size > 1:
            self._call(dist.broadcast_object_list, made, src=0)
        return made[0]

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Ranks may run different numbers of forwards inside; whoever is done takes part in what the others read."""
        yield
        if self.tables is not None:
            self.tables.serve()
        self.all_gather(None, patient=True)

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """A block that fails everywhere where it fails in one process, which alone says why; nothing is sent inside."""
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        codes = self.all_gather(0 if failure is None else exit_code(failure), patient=True)
        speaker = next((rank for rank, code in enumerate(codes) if code), None)
        if speaker == self.rank:
            raise failure
        if speaker is not None:
            silent = KINDS[codes[speaker]](f"process {speaker} of this run has failed")
            silent.already_printed = True
            raise silent from failure

    @torch.no_grad()
    def copy_first_(self, module: nn.Module) -> None:
        """The first process's parameters and buffers in all."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._call(dist.broadcast, tensor.data, src=0)

    @torch.no_grad()
    def average_gradients_(self, parameters: Iterable[nn.Parameter], *others: Tensor) -> None:
        """The mean of everybody's gradients in place of each one's, the same bits in all processes; and of ``others``.
        A parameter without a gradient counts as zero where another process has one; sparse ones end coalesced."""
        if self.world_size == 1:
            return
        trained = [p for p in parameters if p.requires_grad]
        kinds = self.all_gather([NONE if p.grad is None else SPARSE if p.grad.is_sparse else DENSE for p in trained])
        dense = [*others]
        for parameter, kind in zip(trained, map(max, zip(*kinds, strict=True)), strict=True):
            if kind == SPARSE:
                parameter.grad = self._sparse_mean(parameter)
            elif kind == DENSE:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dense.append(parameter.grad)
        for dtype, device in dict.fromkeys((tensor.dtype, tensor.device) for tensor in dense):
            alike = [tensor for tensor in dense if (tensor.dtype, tensor.device) == (dtype, device)]
            flat = torch.cat([tensor.flatten() for tensor in alike])
            self._call(dist.all_reduce, flat)
            parts = flat.div_(self.world_size).split([tensor.numel() for tensor in alike])
            torch._foreach_copy_(alike, [part.view_as(tensor) for part, tensor in zip(parts, alike, strict=True)])

    def _sparse_mean(self, parameter: nn.Parameter) -> Tensor:
        gradient, shape = parameter.grad, parameter.shape
        if gradient is None:
            rows, values = parameter.new_empty(1, 0, dtype=torch.int64), parameter.new_empty(0, *shape[1:])
            gradient = torch.sparse_coo_tensor(rows, values, shape)
        assert gradient.is_sparse and gradient.sparse_dim() == 1, "a sparse gradient is of whole rows in every process"
        gradient = gradient.coalesce()
        rows, values = (self.gather(part) for part in (gradient.indices()[0], gradient.values()))
        values = values.div_(self.world_size)
        return torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False).coalesce()

    def _call(self, collective: Callable, *values: object, **options: object) -> None:
        """A collective operation; its failure is one line, because another process tells the cause."""
        try:
            collective(*values, **options)
        except RuntimeError as error:
            raise self.loss(error) from error


SINGLE = ProcessGroup()


@contextmanager
def joined() -> Iterator[ProcessGroup]:
    """The processes that ``torchrun`` started with this one, in a ``with`` statement; only the first prints."""
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
            error.of_process = True  # what all of them met has been said by one
            raise
    dist.destroy_process_group()


def is_connection_failure(error: Exception) -> bool:
    """Whether an error is of torch's communication: gloo has no class of its own for it."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
