"""``bench.fit``: predictions against what a fresh process measures, closed forms, the search, and the command."""

import json
import os
import subprocess
import sys

import pytest
import torch

from bench import fit
from bench.fit import predict
from harness.count.memory import optimizer_bytes, parameter_bytes
from tests.bench_rows import fit_row
from tests.command import ROOT, call, empty_folder  # noqa: F401 - a fixture
from tests.composing import TINY, plan, small

GIB, MIB = 2**30, 2**20
ON_CPU = ("runtime.device=cpu", "runtime.precision=float32", "runtime.threads=1")
HANGS_SECONDS = 600

MEASURE = """
import json, multiprocessing, sys, torch, torch._dynamo  # which every optimizer imports
from harness.device import runtime
from harness.count.memory import PeakMemory
from harness.loop.update import Update
from tests.composing import plan

def steps(made, number, *, streams, state=None):
    model, batch = made.make_model(), made.batch
    update = Update(model, made.make_optimizers(model), runtime.start(made.runtime))
    for _ in range(number):
        yield
        inputs, targets = (torch.randint(256, (streams, batch.segment)) for _ in range(2))
        state = update(inputs, targets, state, fraction=0.5)[1]
        state = state if batch.carry else None

def measure(case):
    made = plans[case]
    list(steps(made, 1, streams=1))  # loads what libraries need
    meter = PeakMemory(torch.device("cpu"))
    for number, _ in enumerate(steps(made, 2, streams=made.batch.streams)):
        if number == 1:
            meter.reset()
    return meter.read().bytes

plans = [plan(*words) for words in json.loads(sys.argv[1])]  # and what is imported is so once, for all processes
with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # each in a process that did nothing yet
    print(json.dumps(pool.map(measure, range(len(plans)), chunksize=1)))
"""
TWO_LAYERS = (*ON_CPU, "model.layers=2")
KERNEL = (*TWO_LAYERS, "variant=mhsa", "runtime.backend=kernel", "batch.segment=512")
TABLE = (*TWO_LAYERS, "variant=product_key_memory", "runtime.backend=kernel", "batch.segment=512", "batch.streams=11")
CASES = {
    "spans": (*TWO_LAYERS, "variant=adaptive_span", "runtime.backend=plain", "batch.segment=256", "batch.streams=8"),
    "fused": (*TWO_LAYERS, "variant=all_attention", "runtime.backend=fused", "batch.segment=512", "batch.streams=12"),
    "a table": TABLE,
    "carried": (*KERNEL, "batch.streams=12", "batch.carry=true"),
    "layers again": (*KERNEL, "batch.streams=20", "runtime.checkpoint=layers"),
    "wide, AdamW": (*KERNEL, "batch.streams=4", "optim=adamw", "model.d_model=512"),
}
"""A step takes little more than the 100 MiB beside which an allocator's own blocks are small."""


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark can be lowered on Linux only")
@pytest.mark.parametrize(
    "cases", [("spans", "a table"), pytest.param([*CASES][1:], marks=pytest.mark.faults)], ids=["two", "others"]
)
def test_predictions_are_what_is_measured(cases):
    """Peaks of a training step in warm state, each in a process of its own.

    glibc raises the size from which on freed blocks go back to the system, and keeps up to 60% more than is in use;
    with a fixed size the high-water mark is that of memory in use.
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MEASURE, json.dumps([CASES[case] for case in cases])]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=HANGS_SECONDS)
    measured = dict(zip(cases, json.loads(done.stdout), strict=True))
    predicted = {case: predict(plan(*CASES[case]))["predicted_peak_bytes"] for case in cases}
    assert min(measured.values()) > 100 * MIB
    assert predicted == pytest.approx(measured, rel=0.1)


def test_split_has_the_closed_forms():
    made = plan(*ON_CPU, *TINY, "batch.carry=true", "model.head_zero_init=false")
    split, model = predict(made)["split"], made.make_model()
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    assert split["parameters"] == parameter_bytes(model) + buffers
    optimizers = made.make_optimizers(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step(0.5)
    assert len(optimizers.optimizers) > 1
    assert split["optimizer"] == optimizer_bytes(optimizers.optimizers.values())
    # Two layers' keys and values of a full past (15) for two streams, where these are, inputs and targets; views may keep more.
    shown, batch = 2 * 2 * (2 * 15 * 32 * 4), 2 * 2 * 16 * 8
    assert shown <= split["state"] - batch - 2 * 8 <= shown * 4 / 3


def test_streams_scale_the_peak_and_learned_spans_are_projected_and_can_be_put():
    made = plan(*ON_CPU, *TINY, "model.layers=1", "runtime.backend=plain", "batch.carry=true")
    one, two, three = (predict(made, streams=streams)["predicted_peak_bytes"] for streams in (10, 20, 30))
    assert three - two == pytest.approx(two - one, rel=0.02)
    words = ("variant=adaptive_span", "model.layers=1", "model.span=512", "batch.carry=true", "batch.segment=64")
    made = plan(*ON_CPU, *TINY, *words)
    short, long = (predict(made, spans=[keys, keys])["split"]["state"] for keys in (8.0, 500.0))
    assert long > 5 * short


@pytest.mark.parametrize("variant", ["dynamic_span", "product_key_memory"])
def test_what_depends_on_values_is_predicted_for_a_gpu(variant):
    made = plan(f"variant={variant}", *small(variant), *TINY[:-3], "runtime.device=cuda", "runtime.checkpoint=layers")
    assert predict(made)["predicted_peak_bytes"] > 0


def test_on_a_gpu_attention_keeps_no_scores():
    sizes = ("model.dropout=0.1", "batch.segment=256", "model.span=256", "batch.streams=8", "runtime.device=cuda")
    plain, auto = (predict(plan(*TINY[:-3], *sizes, *words)) for words in (["runtime.backend=plain"], []))
    assert (plain["backend"], auto["backend"]) == ("plain", "kernel")
    scores = 2 * 8 * 2 * 256 * 256 * 2  # of two layers, 8 streams and 2 heads, in bfloat16
    assert plain["split"]["activations"] - auto["split"]["activations"] > scores


@pytest.mark.parametrize("limit", [0, 107, 12345])
@pytest.mark.parametrize("shape", ["line", "steps", "bent"])
def test_search_finds_the_last_that_fits(shape, limit):
    calls = []

    def peak(size):
        calls.append(size)
        return {"line": 93 + 7 * size, "steps": 100 + size // 64 * 64, "bent": 90 + size + size * size // 50}[shape]

    size = fit.search(peak, limit_bytes=limit)
    assert (size == 0 or peak(size) <= limit) and peak(size + 1) > limit
    assert shape != "line" or len(calls) < 12
    assert fit.search(lambda size: 5, limit_bytes=5, most=1000) == 1000


def test_memory_is_read_or_refused():
    sizes = {"24GiB": 24 * GIB, "80GB": 80 * 10**9, "1.5 gib": 3 * GIB // 2, 4096: 4096, "1e9": 10**9}
    assert {text: fit.parse_memory(text) for text in sizes} == sizes
    for text in ("24GX", "-1GB", "0", True, "1 2GB", "nan", "1e400"):
        with pytest.raises(ValueError, match="device_memory=.*allowed are"):
            fit.parse_memory(text)


def run_fit(*words: str):
    return call("bench/fit.py", "data.bytes=60000", *TINY[:-2], *words)


def test_the_command_prints_a_table_and_writes_a_row(here):
    words = ("device_memory=64MiB", "largest=streams", "runtime.backend=plain", "model.layers=1")
    ended = run_fit(*words, "runtime.device=cpu")
    assert ended.code == 0, ended.err
    table = {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in ended.out.splitlines()}
    row = json.loads(next(here.rglob("rows.jsonl")).read_text(encoding="utf-8"))
    assert table["activations, MiB"] and table["predicted peak, MiB"] and table["fits"].startswith("yes")
    assert table["trust"].startswith("within 10%")
    assert fit_row().keys() <= row.keys() and (row["kind"], row["device_kind"]) == ("fit", "cpu")
    made, most = plan(*TINY[:-2], *words[2:], "runtime.device=cpu"), row["largest"]["streams"]
    peaks = [predict(made, streams=streams)["predicted_peak_bytes"] for streams in (most, most + 1)]
    assert peaks[0] <= 64 * MIB < peaks[1]
    assert "not verified" in run_fit("largest=[]", "runtime.device=cuda", "model.layers=1").out


@pytest.mark.parametrize(
    "words, message",
    [
        (("hardware=abacus",), "hardware=abacus: allowed are null, b200_sxm"),
        (("runtime.device=cpu", "hardware=h100_sxm"), "hardware=h100_sxm"),
        (("largest=heads",), "largest="),
    ],
)
def test_a_mistake_is_one_message(here, words, message):
    ended = run_fit(*words)
    assert ended.code == 2 and message in ended.err and not list(here.iterdir())
