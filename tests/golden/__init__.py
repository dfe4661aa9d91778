"""Golden numbers: losses, scores and counts of every shipped variant at a small size in float64, in
``<case>.json``.

They change with the model, the mechanisms, the kernels, the optimizers, the order of the data and
the scoring. Each initial weight is a hash (``harness.hashing``) of its parameter's index in the
order of registration, so new names or another random generator of torch move no number. No
weight is zero, so each affects the numbers."""

import copy
import json
import os
from collections.abc import Iterator
from ctypes import CDLL
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from harness.count.flops import forward_flops_per_byte
from harness.data import corpora
from harness.device.torch_settings import configure_torch
from harness.hashing import integer_hash
from harness.loop.trainer import Trainer
from harness.model import NUMERICS, LanguageModel
from harness.plan.build import plan_run
from tests.support.small_configs import VARIANT_NAMES, compose_config, sized, variant_file
from tests.support.small_runs import evaluate
from variants.kernels import native, window_cpu

FOLDER = Path(__file__).parent
TOLERANCE = 1e-9
"""Largest relative difference. The file of a case that cannot reach it has a ``tolerance`` and
the reason, ``why``."""
STEPS = 8
# initial values of bounded parameters are multiples of 1/16 of their range
BOUND_STEPS, OUTSIDE_BOUNDS = 16, 1e6
RATES = {"adamw": 0.01, "muon": 0.003}
BACKENDS = ("plain", "kernel")
POSITIONS = ("alibi", "sinusoidal", "relative")
CASES = {name: (name, ()) for name in VARIANT_NAMES}
CASES |= {f"mhsa_{position}": ("mhsa", (f"position={position}",)) for position in POSITIONS}
CASES["mhsa_hidden"] = "mhsa", ("model.cache=hidden",)
# Heads whose learned spans end in different buckets, so that they carry pasts of different lengths.
FAR_SPANS = ("model.span=192", "batch.segment=61", "data.bytes=1900", "data.distances=[3,5,17,90]")
CASES["adaptive_span_far"] = "adaptive_span", FAR_SPANS
SHIFT = "variant.attention.key_shift=true"
CASES |= {
    f"{name}_shift": (name, (SHIFT,))
    for name in ("local", "nsa", "latent", "gated_delta", "compressed_top_k")
}
CASES |= {
    f"{name}_shift": (CASES[name][0], (*CASES[name][1], SHIFT))
    for name in ("mhsa_hidden", "adaptive_span_far")
}

# 23 bytes are no multiple of a kernel's block. A stream has five segments, so streams restart in
# the sixth step.
SIZES = (
    *(
        "model.d_model=32",
        "model.layers=2",
        "model.heads=2",
        "model.span=16",
        "batch.streams=3",
        "batch.segment=23",
    ),
    *(
        "batch.carry=true",
        f"budget.steps={STEPS}",
        "seed=3",
        "data=recall",
        "data.bytes=700",
        "data.seed=1",
    ),
    *(
        "data.distances=[3,5,14,17]",
        "data.split=[0.5,0.4,0.1]",
        "eval.streams=3",
        "eval.segment=19",
    ),
    *(
        "eval.selection_bytes=20",
        "runtime.device=cpu",
        "runtime.precision=float32",
        "runtime.threads=1",
    ),
    "runtime.compile=false",
)
SPANS = ("variant.attention.span.ramp=4", "variant.attention.span.loss_weight=0.01")
MEMORY = (
    "variant.memory.half_keys=8",
    "variant.memory.top_k=4",
    "variant.memory.heads=2",
    "variant.memory.d_query=8",
)
PERSISTENT = ("variant.attention.persistent.number=5",)
VARIANT_WORDS = {
    **dict.fromkeys(("adaptive_span", "adaptive_span_alibi"), SPANS),
    "adaptive_span_memory": SPANS + MEMORY,
    **dict.fromkeys(("all_attention", "all_attention_6", "all_attention_10"), SPANS + PERSISTENT),
    "all_attention_fixed": PERSISTENT,
    "dynamic_span": SPANS,
    **dict.fromkeys(("product_key_memory", "memory_plus", "experts"), MEMORY),
    "replayed_spans": (SPANS[0], "variant.attention.span.spans=[[5,9],[2,16]]"),
    "uniform_span": (SPANS[0], "variant.attention.span.spans=[[7,7],[7,7]]"),
    # These were pinned at the sizes of a run, not at those under ``small``.
    "differential_alibi": ("model.heads=2",),
    "gated_delta_channel_latent": ("variant.attention.chunk=16",),
    **dict.fromkeys(
        ("gated_delta_forget_gate", "gated_delta_half", "gated_linear_softmax"),
        ("variant.attention.chunk=32",),
    ),
}
"""Overrides for a variant, in addition to the sizes under ``small`` in its file."""


def numerics(case: str) -> dict[str, int | None]:
    """Return versions of the pinned values: ``numerics`` of the variant's file, and ``NUMERICS`` of
    the shared code."""
    return {"variant": variant_file(CASES[case][0]).get("numerics"), "shared": NUMERICS}


def make_trainer(case: str, *, optim: str, backend: str) -> Trainer:
    """Return a trainer before its first step. ValueError if ``backend`` cannot compute the case."""
    config = copy.deepcopy(_composed(case))
    config.optim = compose_config(f"optim={optim}", f"optim.lr={RATES[optim]}").optim
    config.runtime.backend = backend
    planned = plan_run(config)
    trainer = Trainer(planned, corpora.load(**vars(planned.data)), configure_torch(planned.runtime))
    torch.manual_seed(planned.seed + 1)
    fill_(trainer.model, like=planned.make_model())
    return trainer


@cache
def _composed(case: str) -> DictConfig:
    variant, words = CASES[case]
    return compose_config(
        *SIZES, *sized(variant), *words, *VARIANT_WORDS.get(variant, ()), "++variant.lr_scale=null"
    )


@torch.no_grad()
def fill_(model: LanguageModel, *, like: LanguageModel):
    """Fill all parameters, and the buffers drawn at random, with float64 numbers from hashes.

    Args:
        like: the same model from another seed. A buffer that differs between both models was
            drawn at random."""
    model.double()
    drawn = [
        a
        for a, b in zip(model.buffers(), like.buffers(), strict=True)
        if not torch.equal(a.float(), b.float())
    ]
    for index, tensor in enumerate([*model.parameters(), *drawn]):
        low, high = (_projected(model, tensor, at) for at in (-OUTSIDE_BOUNDS, OUTSIDE_BOUNDS))
        bits = integer_hash(index, np.arange(tensor.numel()))
        unit = torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) / 2.0**53).view_as(
            tensor
        )
        sign = torch.from_numpy((bits & np.uint64(1)).astype(np.float64) * 2 - 1).view_as(tensor)
        # a row's norm is about 1.5
        scale = 1.5 * (3 / tensor.shape[-1]) ** 0.5 if tensor.dim() > 1 else 1.0
        # Spans are whole keys, where the soft mask has its kinks.
        inside = low + (high - low) * (1 + (unit * (BOUND_STEPS - 1)).floor()) / BOUND_STEPS
        bounded = (low > -OUTSIDE_BOUNDS) & (high < OUTSIDE_BOUNDS)
        tensor.copy_(torch.where(bounded, inside, sign * (0.1 + 0.9 * unit) * scale))
    before = [parameter.clone() for parameter in model.parameters()]
    model.project_()
    assert all(map(torch.equal, before, model.parameters())) and all(p.all() for p in before)


def _projected(model: LanguageModel, tensor: Tensor, value: float) -> Tensor:
    """Set a parameter to ``value`` and return it after ``project_``, which clamps it to its
    bounds if it has any."""
    tensor.fill_(value)
    model.project_()
    return tensor.clone()


@cache
def _kernel() -> CDLL | str:
    """Return the CPU kernel with vectors of at most 32 bytes. Executed FLOPs include the padding of
    keys to whole vectors, so they depend on the width of vectors."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    with patch.dict(os.environ, {native.MARCH: "x86-64-v3"} if wide else {}):
        return native.load("window_cpu", window_cpu.SOURCE)


@patch.object(window_cpu, "_library", _kernel)
def measure(case: str, *, backend: str) -> dict | None:
    """Return the numbers of a case by one backend, or None if the backend does not support the
    case."""
    numbers = {}
    for optim in RATES:
        try:
            trainer = make_trainer(case, optim=optim, backend=backend)
        except ValueError:
            if backend == "plain":
                raise
            return None
        if backend not in trainer.backend:
            return None
        if not numbers:
            flops = forward_flops_per_byte(trainer.model, segment=trainer.stream.segment)
            numbers = {
                "parameters": sum(p.numel() for p in trainer.model.parameters()),
                "state_bytes": {backend: flops.state_bytes},
                "executed_flops_per_byte": {backend: flops.per_byte},
                "ideal_flops_per_byte": trainer.model.ideal_flops(),
            }
        numbers[optim] = _train(trainer)
    return numbers


def _train(trainer: Trainer) -> dict:
    """Return bits per byte of each step and, after the last one, of valid with carried state; and
    the FLOPs spent."""
    losses = []
    for _ in range(STEPS):
        trainer.step()
        losses.append(trainer.train_row().bits_per_byte)
    assert trainer.state.carried is not None and trainer.finished
    valid = trainer.objective.reported_part("valid")
    return {
        "losses": losses,
        "valid_bits_per_byte": evaluate(trainer, valid).bits_per_byte,
        "training_flops": trainer.state.spent.flops,
    }


def path_of(case: str) -> Path:
    return FOLDER / f"{case}.json"


def read(case: str) -> dict:
    return json.loads(path_of(case).read_text())


def differences(file: dict, measured: dict) -> list[str]:
    """Return each difference between a file and one backend's measurement: key and both numbers,
    None where one is absent."""
    tolerance, new = file.get("tolerance", TOLERANCE), dict(flatten(measured))
    unmeasured = [f".{backend}" for backend in BACKENDS if f"state_bytes.{backend}" not in new]
    old = dict(flatten(file | {"numerics": None, "tolerance": None}))
    old = {key: number for key, number in old.items() if not key.endswith(tuple(unmeasured))}
    return [
        f"{key} is {old.get(key)!r} in the file, {new.get(key)!r} now"
        for key in old | new
        if key not in old
        or key not in new
        or not abs(new[key] - old[key]) <= tolerance * abs(old[key])
    ]


def flatten(node: dict | list, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield numbers by their dotted keys."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, dict | list):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", value


def explanation(case: str, moved: list[str]) -> str:
    """Return the message about numbers that moved, with instructions."""
    return (
        f"tests/golden/{case}.json: {'; '.join(moved)}. If this is intended: raise numerics in "
        f"conf/variant/{CASES[case][0]}.yaml, or for shared code NUMERICS in harness/model.py, "
        "run python -m tests.golden, and commit both with the reason"
    )
