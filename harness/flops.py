"""Executed floating-point operations: what the code that ran had to do, counted, two per multiply-add.

Torch's own counter knows matrix products, convolutions and attention on a GPU. Attention on a CPU and the weighted
reads of a table are missing (torch 2.13 counts them as 0), so their formulas are here. They are handed to one counter
at a time and registered nowhere, so that nobody else's counts change.

Attention counts every query against every key of a call, masked or not: that is what its matrix products execute.
Operations without a formula (softmax, norms, top-k, gathers, element by element) add nothing to the total and are
named beside it instead.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.memory import state_bytes
from harness.model import LanguageModel
from variants.contract import State

# They move, make or read numbers and compute none. Views are recognised by torch itself.
FACTORIES = (
    "arange empty empty_like empty_strided full full_like new_empty new_empty_strided new_full new_ones new_zeros ones "
    "ones_like scalar_tensor zeros zeros_like"
)
COPIES = "_local_scalar_dense _to_copy _unsafe_view cat clone constant_pad_nd copy fill flip repeat stack zero"
SILENT = frozenset(f"{FACTORIES} {COPIES}".split())


class Flops(NamedTuple):
    """What a call executed.

    Attributes:
        total: FLOPs of all operations that have a formula.
        unknown: calls of every other operation, most frequent first; in-place forms are counted with the others.
            Views, copies and the making of tensors are left out.
    """

    total: int
    unknown: dict[str, int]


class ForwardFlops(NamedTuple):
    """What a model executes to predict one byte.

    Attributes:
        per_byte: forward FLOPs, the mean over one segment.
        unknown: as in ``Flops``, calls in the whole segment.
        state_bytes: carried state of one stream before that segment.
        warm: whether it had stopped growing.
    """

    per_byte: float
    unknown: dict[str, int]
    state_bytes: int
    warm: bool


def count_flops(call: Callable[[], object]) -> Flops:
    """Run ``call`` once, without gradients, and count what it executes.

    Kernels that torch's dispatcher does not see (Triton templates of ``torch.compile``) are not counted: give it code
    that is not compiled.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    executed = _Executed()
    with torch.no_grad(), executed, counter:  # the counter takes composites apart; what it executes goes on outwards
        call()
    known = {str(packet) for packet in counter.flop_registry}
    unknown = Counter()
    for operation, calls in executed.calls.items():
        packet = str(operation).rpartition(".")[0]  # aten.add_.Tensor without the overload
        name = packet.removeprefix("aten.").removesuffix("_")
        if packet not in known and name not in SILENT and not operation.is_view and operation.namespace != "prim":
            unknown[name] += calls
    return Flops(counter.get_total_flops(), dict(sorted(unknown.items(), key=lambda item: (-item[1], item[0]))))


def forward_flops_per_byte(model: LanguageModel, *, segment: int, most_bytes: int = 2**16) -> ForwardFlops:
    """Count the evaluation of one segment of one stream, in warm state, on the model's device.

    Random bytes are fed until two segments in a row have left all shapes of the carried state as they were. The
    model's modes, its gradients and the generators of random numbers are left as they are found. Call it in the run's
    precision: under autocast the state is smaller.

    Args:
        segment: T, at least 1.
        most_bytes: after so many bytes a state that still grows is taken as it is, and ``warm`` is false.
            Attention over a window of S bytes needs S + 3 * T.
    """
    if segment < 1:
        raise ValueError(f"model.segment={segment}: allowed are integers from 1")
    device = next(model.parameters()).device
    random = torch.Generator().manual_seed(0)

    def tokens() -> torch.Tensor:
        return torch.randint(model.embedding.num_embeddings, (1, segment), generator=random).to(device)

    state, shapes, unchanged, fed = None, None, 0, 0
    with torch.no_grad(), _undisturbed(model, device):
        while unchanged < 2 and fed < most_bytes:
            state, before = model(tokens(), state).state, shapes
            shapes, fed = _shapes(state), fed + segment
            unchanged = unchanged + 1 if shapes == before else 0
        last = tokens()
        flops = count_flops(lambda: model(last, state))
    return ForwardFlops(flops.total / segment, flops.unknown, state_bytes(state), unchanged == 2)


@contextmanager
def _undisturbed(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """In evaluation mode; modes, module by module, and random numbers as before at the end."""
    modes = {module: module.training for module in model.modules()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            model.eval()
            yield
        finally:
            for module, training in modes.items():
                module.training = training


def _shapes(state: State):
    if isinstance(state, tuple):
        return tuple(_shapes(part) for part in state)
    return None if state is None else state.shape


class _Executed(TorchDispatchMode):
    """Counts the calls of every operation that reaches a kernel."""

    def __init__(self):
        super().__init__()
        self.calls: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def _formulas() -> dict:
    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
        aten._embedding_bag: embedding_bag_flops,
        aten._embedding_bag_forward_only: embedding_bag_flops,
    }


# The counter calls a formula as it calls the operation, with shapes for tensors and ``out_shape`` besides.


def attention_flops(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None, out_shape=None):
    """Scores and weighted values of ``query [B, H, T, K]``, ``key [.., L, K]``, ``value [.., L, K']``: 2BHTL(K + K')."""
    return 2 * prod(query[:3]) * key[2] * (query[3] + value[3])


def attention_backward_flops(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    dropout_p,
    is_causal,
    *,
    attn_mask=None,
    scale=None,
    out_shape=None,
):
    """Five products: the scores once more, and the gradients of weights, values, queries and keys: 2BHTL(3K + 2K')."""
    return 2 * prod(query[:3]) * key[2] * (3 * query[3] + 2 * value[3])


def embedding_bag_flops(
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=0,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
    *,
    out_shape=None,
):
    """Each row of ``weight [M, D]`` that is read: D multiply-adds if it has a weight of its own, else D additions."""
    return (1 if per_sample_weights is None else 2) * prod(indices) * weight[1]
