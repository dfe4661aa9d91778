"""Memory tracker: which memory is alive when, and what work is done, read off the operations of a call, on real or on
fake tensors.

A storage is alive from the operation that made it to the one before which its last reference went: reference counts of
fake tensors are those of real ones, because the same Python and the same autograd hold them. What a kernel allocates for
itself while it runs is not seen.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bench.exchange import Collective, collective
from bench.stand_ins import call
from harness.count.bytes_moved import moved_bytes
from harness.count.formulas import FORMULAS, describe, tensors_of

aten, STAND_IN = torch.ops.aten, call._opoverload
IN_PLACE = {
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
}
"""Torch's formulas of gradients add to new zeros in place, and make a copy only because a mode is watching."""


class Work(NamedTuple):
    """What an operation does: FLOPs, bytes read and written, and the dtype that decides the peak rate."""

    flops: int
    bytes: int
    dtype: str


@dataclass(slots=True, eq=False)
class Block:
    """One storage: bytes, the phase it was made in, and the numbers of the first and last operation it was alive at."""

    bytes: int
    phase: str
    born: int
    died: int | None = None

    def alive(self, now: int) -> bool:
        return self.born <= now and (self.died is None or now <= self.died)


class Ledger(TorchDispatchMode):
    """Writes down blocks and work of all that runs under it.

    Args:
        granule_bytes: to which an allocator rounds up.

    Attributes:
        blocks: all that were alive at some time.
        work: how often each amount of work was done.
        backward_begins: number of the first operation of each backward pass.
        sent: how often the processes exchange what.
        exchanged: blocks that were given to collective operations, and what is made of them.
    """

    def __init__(self, *, granule_bytes: int = 1):
        super().__init__()
        self.granule_bytes, self.now, self.phase = granule_bytes, 0, "before"
        self.blocks: list[Block] = []
        self.work: Counter[Work] = Counter()
        self.backward_begins: list[int] = []
        self.sent: Counter[Collective] = Counter()
        self.exchanged: set[Block] = set()
        self._known: dict[int, tuple[Block, weakref.ref]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        in_backward = torch._C._current_graph_task_id() != -1
        if given := collective(func, args):
            self.sent[given] += 1
        self._look_at_sizes()
        if in_backward and func in IN_PLACE and self.find(args[:1])[0].born == self.now:
            func = IN_PLACE[func]
        out = func(*args, **kwargs)
        if func.namespace == "prim":
            return out
        self.now += 1
        if in_backward and self.phase != "backward":
            self.backward_begins.append(self.now)
        self.phase = "backward" if in_backward else "update" if self.phase == "backward" else self.phase
        self.find(tensors_of(out))
        if func.namespace in ("c10d", "_c10d_functional", "fsdp"):
            self.exchanged.update(self.find(tensors_of((args, kwargs))))
        elif func is STAND_IN:
            *_, flops, moved, scratch = args
            self.note(flops, moved, scratch_bytes=scratch, tensors=args[0])
        elif not func.is_view:
            self.work[_work(func, args, kwargs, out)] += 1
        return out

    def note(self, flops: int, moved_bytes: int, *, tensors: Iterable[Tensor], scratch_bytes: int = 0) -> None:
        """What a kernel does that is no operation of torch's, on some tensors: its work, and memory of its own until it ends."""
        if scratch_bytes:
            self.blocks.append(Block(scratch_bytes, self.phase, self.now, self.now))
        self.work[Work(flops, moved_bytes, _rate(tensors))] += 1

    def forward_of(self, forward: Callable) -> Callable:
        """The same function, at whose calls the phase becomes ``forward``."""

        def noted(*args, **kwargs):
            self.phase = "forward"
            return forward(*args, **kwargs)

        return noted

    def find(self, tensors: Iterable[Tensor]) -> list[Block]:
        """The blocks of some tensors; those seen for the first time are born now."""
        found = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._known:
                size = -(-storage.nbytes() // self.granule_bytes) * self.granule_bytes
                block = Block(size, self.phase, self.now)
                self.blocks.append(block)
                # Torch keeps a storage's Python object as long as the storage, so this fires when the memory is freed.
                self._known[key] = block, weakref.ref(storage, lambda _, key=key: self._died(key))
            found.append(self._known[key][0])
        return found

    def _look_at_sizes(self) -> None:
        """Where parameters are divided, torch frees gathered ones by making their storages empty, and fills them again."""
        for key, (block, reference) in list(self._known.items()) if self.exchanged else ():
            if block in self.exchanged and (storage := reference()) is not None:
                size = -(-storage.nbytes() // self.granule_bytes) * self.granule_bytes
                if size != block.bytes:
                    block.died = self.now
                    again = Block(size, self.phase, self.now + 1)
                    self.blocks.append(again)
                    self.exchanged.add(again)
                    self._known[key] = again, reference

    def _died(self, key: int) -> None:
        self._known.pop(key)[0].died = self.now

    def kept_for_backward(self, block: Block) -> bool:
        """Whether it was made by a forward pass and still alive when a backward pass began."""
        begins = self.backward_begins
        return block.phase == "forward" and any(block.born < begin and block.alive(begin) for begin in begins)

    def peak(self) -> tuple[int, int]:
        """The first operation at which most bytes were alive, and how many."""
        change = Counter()
        for block in self.blocks:
            change[block.born] += block.bytes
            if block.died is not None:
                change[block.died + 1] -= block.bytes
        moments = sorted(change)
        levels = itertools.accumulate(change[now] for now in moments)
        most, now = max(zip(levels, (-now for now in moments), strict=True))
        return -now, most


def _work(func, args: tuple, kwargs: dict, out: object) -> Work:
    done, formula = describe(func, args, kwargs, out), flop_registry.get(func._overloadpacket)
    if done.name in FORMULAS:
        flops = FORMULAS[done.name](done)
    else:
        flops = formula(*args, **kwargs, out_val=out) if formula else 0
    return Work(flops, moved_bytes(done), _rate(tensors_of((args, kwargs))))


def _rate(tensors: Iterable[Tensor]) -> str:
    """The dtype that decides the peak rate of an operation on these."""
    return "bfloat16" if any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors) else "float32"
