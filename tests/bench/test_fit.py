"""``bench.fit``: its prediction against the measured peak, closed forms, the search for streams,
and the command."""

import ctypes
import os
import re
import sys
from collections.abc import Iterator

import pytest
import torch

from bench import fit
from bench.fit import predict
from harness.count.memory import PeakMemory, optimizer_bytes, tensor_bytes
from harness.device.torch_settings import configure_torch
from harness.loop.step import train_step
from harness.plan.build import Plan
from tests.support.command_line import call, empty_folder  # noqa: F401 - a fixture
from tests.support.rank_processes import launch
from tests.support.small_configs import TINY, plan, small

MIB = 2**20
ON_CPU = ("runtime.device=cpu", "runtime.precision=float32", "runtime.threads=1")
SIZES = TINY[:-3]  # without precision, device and threads
MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h


def peak_bytes(words: tuple[str, ...]) -> int:
    """Return the peak memory of the second training step, in a process that has computed nothing
    yet."""
    # With the variable ``set_allocator`` changes nothing. It is not set in the test's process,
    # whose later workers would inherit it, and glibc reads it at a start only.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 65536)
    run_plan = plan(*words)
    list(steps(run_plan, 1, streams=1))  # libraries allocate memory at their first use
    meter = PeakMemory(torch.device("cpu"))
    for step, _ in enumerate(steps(run_plan, 2, streams=run_plan.batch.streams)):
        if step == 1:
            meter.reset()
    return meter.read().bytes


def steps(run_plan: Plan, n_steps: int, *, streams: int) -> Iterator[None]:
    """Take training steps on random bytes. Yields before each of them."""
    model, batch, state = run_plan.make_model(), run_plan.batch, None
    optimizers, on_cpu = run_plan.make_optimizers(model), configure_torch(run_plan.runtime)
    for _ in range(n_steps):
        yield
        inputs, targets = (torch.randint(256, (streams, batch.segment)) for _ in range(2))
        batch_and_state = inputs, targets, state
        state = train_step(model, optimizers, on_cpu, *batch_and_state, fraction=0.5)[1]
        state = state if batch.carry else None


TWO_LAYERS = (*ON_CPU, "model.layers=2")
KERNEL = (*TWO_LAYERS, "runtime.backend=kernel", "batch.segment=512")
CASES = {
    "spans": (
        *TWO_LAYERS,
        "variant=adaptive_span",
        "runtime.backend=plain",
        "batch.segment=256",
        "batch.streams=4",
    ),
    "a table": (*KERNEL, "variant=product_key_memory", "batch.streams=5"),
    "carried state, recomputed layers, AdamW": (
        *(*TWO_LAYERS, "runtime.backend=fused", "batch.segment=512", "batch.streams=4"),
        *("batch.carry=true", "runtime.checkpoint=layers", "optim=adamw", "model.d_model=256"),
    ),
}
"""Runs whose step needs more than 50 MiB, so that the allocator's overhead is a small part of
it."""


@pytest.mark.skipif(
    sys.platform != "linux", reason="the high-water mark can be lowered on Linux only"
)
def test_the_prediction_is_within_10_percent_of_the_measured_peak():
    """By default glibc may hold 60% more memory than is in use. With a fixed threshold it
    returns freed blocks."""
    measured = {case: launch(peak_bytes, words, world_size=1)[0] for case, words in CASES.items()}
    predicted = {
        case: predict(plan(*words))["predicted_peak_bytes"] for case, words in CASES.items()
    }
    assert min(measured.values()) > 50 * MIB
    assert predicted == pytest.approx(measured, rel=0.1)


def test_the_parts_of_the_prediction_have_their_closed_forms():
    run_plan = plan(*ON_CPU, *TINY, "batch.carry=true", "model.head_zero_init=false")
    by_cause, model = predict(run_plan)["by_cause"], run_plan.make_model()
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    assert by_cause["parameters"] == tensor_bytes(model.parameters()) + buffers
    optimizers = run_plan.make_optimizers(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step(0.5)
    assert len(optimizers.optimizers) > 1
    assert by_cause["optimizer"] == optimizer_bytes(optimizers.optimizers.values())
    # Keys and values of 15 past bytes in two layers and two streams. A state may be a view of a
    # tensor a third larger.
    past, batch = 2 * 2 * (2 * 15 * 32 * 4), 2 * 2 * 16 * 8
    assert past <= by_cause["state"] - batch - 2 * 8 <= past * 4 / 3


def test_a_classifier_is_predicted_with_its_pooled_head_unless_its_encoder_is_frozen():
    words = (*ON_CPU, *TINY, "data=listops", "batch.segment=256", "batch.streams=8")
    masked, texts = (
        predict(plan(*words, f"objective={name}"))["predicted_peak_bytes"]
        for name in ("masked_lm", "classify")
    )
    assert masked - texts > 8 * 256 * 256 * 4  # logits of each byte
    with pytest.raises(ValueError, match="objective.encoder=frozen: cannot be predicted; allowed"):
        predict(plan(*words, "objective=classify", "objective.encoder=frozen"))


def test_the_predicted_state_follows_the_learned_spans():
    words = (
        "variant=adaptive_span",
        "model.layers=1",
        "model.span=512",
        "batch.carry=true",
        "batch.segment=64",
    )
    plans = [
        plan(*ON_CPU, *TINY, *words, f"variant.attention.span.initial={share}")
        for share in (0.02, 1)
    ]
    short, long = (predict(run_plan)["by_cause"]["state"] for run_plan in plans)
    assert long > 5 * short


@pytest.mark.parametrize("variant", ["dynamic_span", "product_key_memory"])
def test_variants_whose_shapes_depend_on_values_are_predicted_for_a_gpu(variant):
    words = ("runtime.device=cuda", "runtime.checkpoint=layers")
    assert (
        predict(plan(f"variant={variant}", *small(variant), *SIZES, *words))["predicted_peak_bytes"]
        > 0
    )


def test_on_a_gpu_the_default_backend_saves_no_scores():
    choices = (
        "model.dropout=0.1",
        "batch.segment=256",
        "model.span=256",
        "batch.streams=8",
        "runtime.device=cuda",
    )
    plain, auto = (
        predict(plan(*SIZES, *choices, *words)) for words in (["runtime.backend=plain"], [])
    )
    assert (plain["backend"], auto["backend"]) == ("plain", "chunked")
    scores = 2 * 8 * 2 * 256 * 256 * 2  # in two layers, 8 streams and 2 heads, in bfloat16
    assert plain["by_cause"]["activations"] - auto["by_cause"]["activations"] > scores


@pytest.mark.parametrize(
    "limit, least, most", [(99, 1, 0), (114, 3, 3), (12345, 2, 1750), (10**9, 1, 2**12)]
)
def test_the_search_returns_the_largest_number_of_streams_that_fits(limit, least, most):
    assert (
        fit.most_streams(lambda streams: 93 + 7 * streams, limit_bytes=limit, min_streams=least)
        == most
    )


def test_device_memory_is_parsed_or_refused():
    sizes = {"24GiB": 24 * 2**30, "80GB": 80 * 10**9, "1.5 gib": 3 * 2**29, 4096: 4096}
    assert {text: fit.parse_memory(text) for text in sizes} == sizes
    for text in ("24GX", "-1GB", True, "1e400"):
        with pytest.raises(ValueError, match="device_memory=.*allowed are bytes above 0"):
            fit.parse_memory(text)


def run_fit(*words: str):
    return call(
        "bench/fit.py",
        "data.bytes=20000",
        *SIZES,
        "runtime.precision=float32",
        "model.layers=1",
        *words,
    )


def test_the_command_prints_the_parts_of_the_peak(cwd):
    outcome = run_fit("device_memory=1MiB", "runtime.backend=plain", "runtime.device=cpu")
    assert outcome.code == 0, outcome.err
    table = dict(
        re.split(r"  +", line.strip())[:2]
        for line in outcome.out.splitlines()
        if "  " in line.strip()
    )
    parts = [float(table[f"{cause}, MiB"]) for cause in fit.CAUSES]
    assert (
        sum(parts) == pytest.approx(float(table["peak, MiB"]), rel=0.01) and table["fits"] == "yes"
    )
    assert "within 10%" in outcome.out and int(table["most streams"]) > 2
    assert "not verified" in run_fit("runtime.device=cuda").out
    assert not list(cwd.iterdir())
