"""The processes of a run: their number, the rank of this one, and what they exchange.

``torchrun --nproc-per-node=N train.py ...`` starts the command N times. Each process reads its share of
``batch.streams``; gradients are averaged, so that all make the same update: torch does so for matrices during the
backward pass (``spread.py``), this module for vectors, shared parameters and sparse rows after it. The first process
decides, holds the run folder and prints.
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
from harness.failures import ERROR_CLASSES, ProcessLost, exit_code

TIMEOUT = timedelta(minutes=1)
"""A collective's longest wait for a silent process; one that has ended is noticed at once."""
PATIENCE = timedelta(minutes=10)
"""The same while one works alone: start, download, comparison of backends, checkpoint."""
NONE, DENSE, SPARSE = range(3)  # what a parameter has for a gradient

T = TypeVar("T")


class ProcessGroup(Launch):
    """The processes of a run, seen from one of them; ``tables`` are the model's ``ShardedTables``, or None."""

    tables: Any = None
    _patient: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def shard(self) -> tuple[int, int]:
        """This process's part of divided work: which, of how many."""
        return self.rank, self.world_size

    def meet(self) -> None:
        """Make torch's process group: NCCL for tensors on a GPU, gloo for others; ProcessLost where that fails."""
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=PATIENCE))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it has keys of an earlier start
                store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
            dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=self.rank, world_size=self.world_size)
            self._patient = dist.new_group(backend="gloo", timeout=PATIENCE)
        except RuntimeError as error:
            place = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise ProcessLost(
                f"process {self.rank} of {self.world_size} did not meet the others at {place}, which MASTER_ADDR and "
                f"MASTER_PORT name ({_first_line(error)}); allowed are an address and a free port of the first machine "
                "that all can reach; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose one of several networks"
            ) from error

    def loss(self, error: Exception) -> ProcessLost:
        """What to raise in place of an error that another process has caused."""
        reason = f"another one has ended or is silent ({_first_line(error)})"
        return ProcessLost(f"process {self.rank} of {self.world_size}: {reason}; the same command goes on")

    def all_gather(self, local: T, *, patient: bool = False) -> list[T]:
        """Everybody's, by rank: anything that pickles, with tensors on the CPU. ``patient`` waits for ten minutes."""
        everybodys: list[T] = [local] * self.world_size
        if self.world_size > 1:
            self._call(dist.all_gather_object, everybodys, local, group=self._patient if patient else None)
        return everybodys

    def largest(self, number: int) -> int:
        return max(self.all_gather(number, patient=True))

    def gather(self, tensor: Tensor, *, lengths: Sequence[int] | None = None) -> Tensor:
        """The rows of everybody's tensors by rank, on this process's device; ``lengths``: their numbers, if known."""
        if self.world_size == 1:
            return tensor
        lengths, row = lengths or self.all_gather(len(tensor)), tensor.shape[1:]
        sizes = [tensor.numel()] * self.world_size, [length * math.prod(row) for length in lengths]
        return self.exchange(tensor.flatten().repeat(self.world_size), *sizes).view(sum(lengths), *row)

    def exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send so many numbers of a flat tensor to each process by rank, and receive so many from each."""
        arrived = flat.new_empty(sum(received))
        self._call(dist.all_to_all_single, arrived, flat, list(received), list(sent))
        return arrived

    def on_main(self, make: Callable[[], T]) -> T:
        """What ``make`` returns in the first process, the only one to call it; its failure is everybody's."""
        with self.fail_together():
            made = [make() if self.is_main else None]
        if self.world_size > 1:
            self._call(dist.broadcast_object_list, made, src=0)
        return made[0]

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Context in which ranks may run different numbers of forwards: those done serve the others' tables."""
        yield
        if self.tables is not None:
            self.tables.serve()
        self.all_gather(None, patient=True)

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """A block that fails everywhere if it fails in one process, which prints why; nothing is sent inside."""
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
            silent = ERROR_CLASSES[codes[speaker]](f"process {speaker} of this run has failed")
            silent.already_printed = True
            raise silent from failure

    @torch.no_grad()
    def copy_first_(self, module: nn.Module) -> None:
        """The first process's parameters and buffers in all."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._call(dist.broadcast, tensor.data, src=0)

    @torch.no_grad()
    def average_gradients_(self, parameters: Iterable[nn.Parameter], *others: Tensor) -> None:
        """Average gradients and ``others`` in place, to the same bits in all processes. A missing gradient counts as
        zero where another process has one; sparse ones end coalesced."""
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
        """A collective operation; ProcessLost where it fails: another process has the cause."""
        try:
            collective(*values, **options)
        except RuntimeError as error:
            raise self.loss(error) from error


SINGLE = ProcessGroup()


@contextmanager
def joined() -> Iterator[ProcessGroup]:
    """Context with the processes that ``torchrun`` started; only the first one prints."""
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
            error.of_process = True  # the first one prints it for all
            raise
    dist.destroy_process_group()


def is_connection_failure(error: Exception) -> bool:
    """Whether an error comes from torch's communication; gloo has no class for it."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
