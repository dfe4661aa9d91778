"""The processes of a run: their number, the rank of this process, and the collective operations
between them.

``torchrun --nproc-per-node=N train.py ...`` starts the command N times. Each process trains on its
share of ``batch.streams``, and gradients are averaged, so that all processes make the same update.
Gradients of matrices are averaged by torch during the backward pass
(``distributed_parameters.py``); those of vectors, shared parameters and sparse rows by this
module afterwards. The main process (rank 0) makes decisions, writes the run folder and prints."""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from harness.device.output import libraries_on_stderr
from harness.device.torchrun import Launch, read_launch
from harness.failures import ERROR_CLASSES, ProcessLost, exit_code, first_line, refuse_exit

TIMEOUT = timedelta(minutes=1)
"""How long a collective operation waits for a process that does not answer. The end of a process
is noticed at once."""
LONG_TIMEOUT = timedelta(minutes=10)
"""Timeout where one process may work while the others wait: start, download, comparison of
backends, checkpoint."""

T = TypeVar("T")


class ProcessGroup(Launch):
    """The processes of a run."""

    _long_wait_group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def shard(self) -> tuple[int, int]:
        """Rank and number of processes, by which work is divided."""
        return self.rank, self.world_size

    def connect(self) -> None:
        """Make torch's process group, with NCCL for tensors on a GPU and gloo for others.
        ProcessLost if that fails."""
        backend = "gloo"
        if torch.cuda.is_available() and dist.is_nccl_available():
            backend = "cpu:gloo,cuda:nccl"
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=LONG_TIMEOUT))
            # the store has keys of an earlier start
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
            with libraries_on_stderr():
                dist.init_process_group(
                    backend,
                    timeout=TIMEOUT,
                    store=store,
                    rank=self.rank,
                    world_size=self.world_size,
                )
                self._long_wait_group = dist.new_group(backend="gloo", timeout=LONG_TIMEOUT)
        except RuntimeError as error:
            address = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise ProcessLost(
                f"MASTER_ADDR:MASTER_PORT={address}: process {self.rank} of {self.world_size} "
                f"could not connect to the others ({first_line(error)[:200]}); allowed are an "
                "address and a free port of the first machine that all can reach; "
                "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose one of several networks"
            ) from error

    def process_lost(self, error: Exception) -> ProcessLost:
        """Return the exception to raise in place of an ``error`` that another process has
        caused."""
        return ProcessLost(
            f"process {self.rank} of {self.world_size}: another process has ended or does not "
            f"answer ({first_line(error)[:200]}); the same command resumes the run"
        )

    def all_gather(self, local: T, *, long_wait: bool = False) -> list[T]:
        """Return every process's ``local``, by rank: any object that pickles, with tensors on the
        CPU. With ``long_wait`` the timeout is ``LONG_TIMEOUT``."""
        gathered: list[T] = [local] * self.world_size
        if self.world_size > 1:
            self._call(
                dist.all_gather_object,
                gathered,
                local,
                group=self._long_wait_group if long_wait else None,
            )
        return gathered

    def concatenate(self, tensor: Tensor) -> Tensor:
        """Return all processes' tensors, concatenated by rank; their numbers of rows may differ."""
        if self.world_size == 1:
            return tensor
        row = tensor.shape[1:]
        received = [length * math.prod(row) for length in self.all_gather(len(tensor))]
        sent = [tensor.numel()] * self.world_size
        arrived = tensor.new_empty(sum(received))
        self._call(
            dist.all_to_all_single,
            arrived,
            tensor.flatten().repeat(self.world_size),
            received,
            sent,
        )
        return arrived.view(-1, *row)

    def on_main(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the main process only, and return its result in all. If it fails,
        all processes fail."""
        with self.fail_together():
            returned = [function() if self.is_main else None]
        if self.world_size > 1:
            self._call(dist.broadcast_object_list, returned, src=0)
        return returned[0]

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Context that raises in all processes if its block raises in one. Of the failed processes,
        the one of lowest rank prints its error. The block must not call collective operations."""
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        codes = self.all_gather(0 if failure is None else exit_code(failure), long_wait=True)
        failed_rank = next((rank for rank, code in enumerate(codes) if code), None)
        if failed_rank == self.rank:
            raise failure
        if failed_rank is not None:
            error = ERROR_CLASSES[codes[failed_rank]](
                f"process {failed_rank} of this run has failed"
            )
            error.already_printed = True
            raise error from failure

    @torch.no_grad()
    def broadcast_from_main_(self, module: nn.Module) -> None:
        """Copy the main process's parameters and buffers into the ``module`` of all processes."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._call(dist.broadcast, tensor.data, src=0)

    @torch.no_grad()
    def average_gradients_(self, parameters: Iterable[nn.Parameter], *scalars: Tensor) -> None:
        """Average gradients and ``scalars`` over all processes, in place, with bitwise equal
        results. A missing gradient counts as zero if another process has one. Sparse gradients
        are coalesced."""
        if self.world_size == 1:
            return
        trainable = [p for p in parameters if p.requires_grad]
        # by process and parameter; None without a gradient
        is_sparse = self.all_gather(
            [None if p.grad is None else p.grad.is_sparse for p in trainable]
        )
        dense = [*scalars]
        for parameter, layouts in zip(trainable, zip(*is_sparse, strict=True), strict=True):
            if True in layouts:
                parameter.grad = self._sparse_mean(parameter)
            elif False in layouts:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dense.append(parameter.grad)
        for dtype, device in dict.fromkeys((tensor.dtype, tensor.device) for tensor in dense):
            bucket = [
                tensor for tensor in dense if (tensor.dtype, tensor.device) == (dtype, device)
            ]
            flat = _flatten_dense_tensors(bucket)
            self._call(dist.all_reduce, flat)
            means = _unflatten_dense_tensors(flat.div_(self.world_size), bucket)
            torch._foreach_copy_(bucket, means)

    def _sparse_mean(self, parameter: nn.Parameter) -> Tensor:
        """Return the mean of all processes' sparse gradients of a parameter."""
        gradient = parameter.grad
        shape = parameter.shape
        if gradient is None:
            rows = parameter.new_empty(1, 0, dtype=torch.int64)
            values = parameter.new_empty(0, *shape[1:])
            gradient = torch.sparse_coo_tensor(rows, values, shape)
        assert gradient.is_sparse and gradient.sparse_dim() == 1, (
            "a sparse gradient must be sparse in its rows only"
        )
        gradient = gradient.coalesce()
        rows = self.concatenate(gradient.indices()[0])
        values = self.concatenate(gradient.values()).div_(self.world_size)
        return torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False).coalesce()

    def _call(self, collective: Callable, *values: object, **options: object) -> None:
        """Run a collective operation. ProcessLost if it fails, because then another process has
        failed."""
        try:
            collective(*values, **options)
        except RuntimeError as error:
            raise self.process_lost(error) from error


SINGLE = ProcessGroup()


@contextmanager
def join_processes() -> Iterator[ProcessGroup]:
    """Context in which the processes that ``torchrun`` started are connected. Only the main
    process prints."""
    launch = read_launch()
    if launch.world_size == 1:
        with refuse_exit("trust or variant"):
            yield SINGLE
        return
    processes = ProcessGroup(*launch)
    processes.connect()
    with (
        open(os.devnull, "w", encoding="utf-8") as null,
        redirect_stdout(null) if launch.rank else nullcontext(),
    ):
        try:
            with refuse_exit("trust or variant"):
                yield processes
        # all processes exit at the same step; after an error, destroying the group would wait
        except SystemExit:
            dist.destroy_process_group()
            raise
        except Exception as error:
            # so that cli.print_error prints it in this process, whatever its rank
            error.of_process = True
            raise
    dist.destroy_process_group()


def is_connection_failure(error: Exception) -> bool:
    """Return whether an error comes from torch's communication. gloo has no exception class: its
    messages name its files."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "/gloo/" in str(error)
    )
