"""``bench.fit``: predictions against what a fresh process measures, known allocations, the search, and the command."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf

from bench import fit, hardware
from bench.fake_step import CAUSES, predict, settled
from bench.memory_tracker import Ledger
from harness.count.flops import count_flops
from harness.count.memory import optimizer_bytes, parameter_bytes
from harness.device.choice import abilities
from tests.bench_rows import fit_row
from tests.command import ROOT, call, empty_folder  # noqa: F401 - a fixture
from tests.composing import CONF, TINY, plan

GIB, MIB = 2**30, 2**20
DEVICES = OmegaConf.to_container(OmegaConf.load(CONF / "fit.yaml").devices)
ON_CPU = ("runtime.device=cpu", "runtime.precision=float32", "runtime.threads=1")
HANGS_SECONDS = 600

MEASURE = """
import json, multiprocessing, sys, torch, torch._dynamo  # which every optimizer imports
from harness.device import runtime
from harness.count.memory import PeakMemory
from harness.loop.step import Trainer
from tests.composing import plan

def steps(made, number, *, streams, state=None):
    model, batch = made.make_model(), made.batch
    trainer = Trainer(model, made.make_optimizers(model), runtime.start(made.runtime))
    for _ in range(number):
        yield trainer
        inputs, targets = (torch.randint(256, (streams, batch.segment)) for _ in range(2))
        state = trainer.step(inputs, targets, state, fraction=0.5)[1]
        state = state if batch.carry else None

def measure(case):
    made = plans[case]
    list(steps(made, 1, streams=1))  # loads what libraries need
    meter = PeakMemory(torch.device("cpu"))
    for number, trainer in enumerate(steps(made, 2, streams=made.batch.streams)):
        if number == 1:
            meter.reset()
    return meter.read().bytes

plans = [plan(*words) for words in json.loads(sys.argv[1])]  # and what is imported is so once, for all processes
with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # each in a process that did nothing yet
    print(json.dumps(pool.map(measure, range(len(plans)), chunksize=1)))
"""
VARIANTS = ("mhsa", "adaptive_span", "all_attention", "product_key_memory")
SEGMENTS = {"plain": 256, "fused": 512, "kernel": 512}
STREAMS = {"plain": (10, 8, 5, 10), "fused": (11, 11, 12, 11), "kernel": (12, 12, 17, 11)}
"""By variant: a step takes little more than the 100 MiB beside which an allocator's own blocks are small."""
CASES = {
    f"{variant}, {backend}": (
        *(*ON_CPU, f"variant={variant}", f"runtime.backend={backend}"),
        *("model.layers=2", f"batch.segment={segment}", f"batch.streams={streams}"),
    )
    for backend, segment in SEGMENTS.items()
    for variant, streams in zip(VARIANTS, STREAMS[backend], strict=True)
}
CASES["mhsa, carried"] = (*CASES["mhsa, kernel"], "batch.carry=true")


@pytest.fixture(scope="module")
def measured_bytes() -> dict[str, int]:
    """Peak of a training step in warm state, each in a process of its own.

    glibc raises the size from which on freed blocks go back to the system, and keeps up to 60% more than is in use;
    with a fixed size the high-water mark is that of memory in use.
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MEASURE, json.dumps(list(CASES.values()))]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=HANGS_SECONDS)
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark can be lowered on Linux only")
@pytest.mark.parametrize("case", CASES)
def test_prediction_is_what_is_measured(case, measured_bytes):
    predicted, measured = predict(plan(*CASES[case])), measured_bytes[case]
    assert measured > 100 * MIB
    assert predicted.peak_bytes == pytest.approx(measured, rel=0.1)
    assert sum(predicted.split.values()) == predicted.peak_bytes
    print(f"{case}: {predicted.peak_bytes / MIB:.1f} predicted, {measured / MIB:.1f} MiB measured")


def test_ledger_of_known_allocations():
    kept, ledger = torch.zeros(1000), Ledger()
    ledger.find([kept])
    with ledger:
        product = kept * 2
        view = product[10:]
        del product  # the view keeps it
        again = view + 1
        del view
        last = again.sum()
    now, most = ledger.peak()
    assert most == 4 * (1000 + 1000 + 990)
    assert [block.bytes for block in ledger.blocks if block.alive(now)] == [4000, 4000, 3960]
    assert [block.bytes for block in ledger.blocks if block.died is None] == [4000, 3960, 4]
    del again, last


def test_what_is_kept_for_the_backward_is_told_from_what_is_temporary():
    first, second, found = torch.zeros(1000, 10, requires_grad=True), torch.zeros(10, 1000, requires_grad=True), {}
    ledger = Ledger()

    def forward():
        found["temporary"] = ledger.find([first + 1])
        kept = (first @ second).exp()  # whose gradient needs the result
        found["kept"] = ledger.find([kept])
        return kept.sum()

    with ledger:
        ledger.forward_of(forward)().backward()
    assert len(ledger.backward_begins) == 1
    assert found["kept"][0].phase == found["temporary"][0].phase == "forward"
    assert found["kept"][0].alive(ledger.backward_begins[0])
    assert not found["temporary"][0].alive(ledger.backward_begins[0])


def test_split_has_the_closed_forms():
    own = plan(*ON_CPU, *TINY, "batch.carry=true", "model.head_zero_init=false")
    found, model = predict(own), own.make_model()
    assert set(found.split) == set(CAUSES)
    rounded = 64 * len(list(model.parameters()))
    assert found.split["parameters"] == pytest.approx(parameter_bytes(model), abs=rounded)
    optimizers = own.make_optimizers(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step(0.5)
    kept = optimizer_bytes(optimizers.optimizers.values())
    assert found.split["optimizer"] == pytest.approx(kept, abs=3 * rounded)
    # Two layers' keys and values of a full past (15) for two streams, and where the streams are; views may keep a third more.
    shown = 2 * 2 * (2 * 15 * 32 * 4)
    assert shown + 64 <= found.split["state"] <= shown * 4 / 3 + 64
    assert found.warm


def test_flops_are_three_forwards_and_the_updates():
    own = plan(*ON_CPU, *TINY, "runtime.backend=plain", "optim=adamw")
    model, b = own.make_model(), own.batch
    tokens = torch.zeros(b.streams, b.segment, dtype=torch.int64)
    forward = count_flops(lambda: model(tokens)).total
    step = sum(work.flops * calls for work, calls in predict(own).work.items())
    assert step == pytest.approx(3 * forward, rel=0.03)


def test_roofline_takes_the_longer_of_arithmetic_and_traffic():
    found = predict(plan(*ON_CPU, *TINY))
    flops = sum(work.flops * calls for work, calls in found.work.items())
    moved = sum(work.bytes * calls for work, calls in found.work.items())
    assert found.seconds(lambda dtype: 1e9, 1e30) == pytest.approx(flops / 1e9)
    assert found.seconds(lambda dtype: 1e30, 1e9) == pytest.approx(moved / 1e9)
    both = found.seconds(lambda dtype: 1e9, 1e9)
    assert max(flops, moved) / 1e9 < both < (flops + moved) / 1e9


def test_spans_grow_the_peak_and_streams_scale_it():
    own = plan(*ON_CPU, *TINY, "runtime.backend=plain", "batch.carry=true")
    one, two, three = (predict(own, streams=streams).peak_bytes for streams in (10, 20, 30))
    assert three - two == pytest.approx(two - one, rel=0.02)
    assert predict(own, span=64).peak_bytes > predict(own).peak_bytes
    assert predict(own, segment=32).segment == 32
    with pytest.raises(ValueError, match="batch.streams=0"):
        predict(own, streams=0)


def test_on_a_gpu_dropout_keeps_a_byte_an_element():
    own = plan(
        *TINY[:-2],
        "runtime.backend=plain",
        "runtime.compile=false",
        "model.dropout=0.1",
        "batch.segment=64",
        "model.span=64",
        "batch.streams=32",
    )
    cpu, cuda = (predict(own, kind=kind) for kind in ("cpu", "cuda"))
    assert cuda.backend == "plain" and cuda.split["library"] > 0
    scores = 32 * 2 * 64 * 64  # streams, heads, segment, keys
    masks = 2 * (4 - 1) * scores  # of two layers; a float on a CPU
    assert cpu.split["activations"] - cuda.split["activations"] > masks


@pytest.mark.parametrize("limit", [0, 99, 100, 107, 1000, 12345])
@pytest.mark.parametrize("shape", ["line", "steps", "bent"])
def test_search_finds_the_last_that_fits(shape, limit):
    calls = []

    def peak(size):
        calls.append(size)
        return {"line": 93 + 7 * size, "steps": 100 + size // 64 * 64, "bent": 90 + size + size * size // 50}[shape]

    size = fit.push(peak, limit_bytes=limit)
    assert (size == 0 or peak(size) <= limit) and peak(size + 1) > limit
    assert shape != "line" or len(calls) < 12


def test_search_ends_where_memory_does_not_grow():
    assert fit.push(lambda size: 5, limit_bytes=5, most=1000) == 1000


@pytest.mark.parametrize(
    "text, size", [("24GiB", 24 * GIB), ("80GB", 80 * 10**9), ("1.5 gib", 3 * GIB // 2), (4096, 4096), ("1e9", 10**9)]
)
def test_memory_is_read(text, size):
    assert hardware.parse_memory(text, key="device_memory") == size


@pytest.mark.parametrize("text", ["24GX", "", "-1GB", "GiB", "0", True, "0.1", "1 2GB", "nan", "1e400"])
def test_memory_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="device_memory=.*allowed are"):
        hardware.parse_memory(text, key="device_memory")


def run_fit(*words: str):
    small = ("data.bytes=60000", *TINY[:-2])
    return call("bench/fit.py", *small, *words)


def test_the_command_prints_a_table_and_writes_a_row(here):
    ended = run_fit(
        "variant=adaptive_span", "device_memory=1GiB", "hardware=h100_sxm", "largest=[streams]", "runtime.compile=false"
    )
    assert ended.code == 0, ended.err
    row = json.loads(next(here.rglob("rows.jsonl")).read_text(encoding="utf-8"))
    told = {line.partition("  ")[0]: line.partition("  ")[2].split() for line in ended.out.splitlines()}
    assert told["variant"][0] == "adaptive_span" and told["activations, MiB"] and told["predicted peak, MiB"]
    assert (told["device memory, MiB"][0], told["fits"][0]) == ("1,024", "yes")
    assert told["most streams"][0] == f"{row['largest']['streams']:,}" and "H100" in told["roofline"]
    assert fit_row().keys() <= row.keys()
    assert fit_row()["roofline"].keys() == row["roofline"].keys()
    assert row["kind"] == "fit" and row["device_kind"] == "cuda" and row["backend"] == "fused"
    largest = row["largest"]["streams"]
    own = plan(*TINY[:-2], "variant=adaptive_span", "runtime.compile=false")
    peaks = [predict(own, streams=streams, kind="cuda").peak_bytes for streams in (largest, largest + 1)]
    assert peaks[0] <= GIB < peaks[1]


@pytest.mark.parametrize(
    "words, message",
    [
        (("device_memory=24GX",), "device_memory=24GX"),
        (("hardware=abacus",), "hardware=abacus"),
        (("runtime.device=cpu", "hardware=h100_sxm"), "hardware=h100_sxm"),
        (("runtime.device=cpu",), "device_memory=null"),
        (("largest=heads",), "largest="),
        (("peak_tflops=-1",), "peak_tflops=-1"),
        (("hardware=null", "device_memory=1GB", "peak_tflops=3"), "bandwidth_gbs=null"),
        (("runtime.compile=true", "runtime.device=cpu", "largest=[]"), "runtime.compile=true"),
        (("variant=dynamic_span", "runtime.backend=kernel"), "runtime.backend=kernel"),
        (("spans=many",), "spans=many"),
    ],
)
def test_a_mistake_is_one_message(here, words, message):
    ended = run_fit(*words)
    assert ended.code == 2 and message in ended.err and not list(here.iterdir())


def test_tf32_has_a_rate_of_its_own():
    own = {
        "hardware": "a100_80gb",
        "devices": DEVICES,
        "device_memory": None,
        "peak_tflops": None,
        "bandwidth_gbs": None,
        "per_machine": 8,
        "link_gbs": None,
        "network_gbs": None,
    }
    rates = [hardware.choose(own, device="cuda", precision="float32", tf32=tf32).flops_per_s for tf32 in (False, True)]
    assert [rate["float32"] for rate in rates] == [19.5e12, 156e12] and rates[0]["bfloat16"] == rates[1]["bfloat16"]
    with pytest.raises(ValueError, match="runtime.tf32=true: Apple M4 Max.*allowed is false"):
        hardware.choose(own | {"hardware": "m4_max"}, device="mps", precision="float32", tf32=True)


def test_every_device_has_peaks_that_are_in_order():
    assert len(DEVICES) > 11
    for device in DEVICES.values():
        assert device["bfloat16_tflops"] >= (device["tfloat32_tflops"] or 0) and device["bandwidth_gbs"] > 500
        assert (device["tfloat32_tflops"] or device["float32_tflops"]) >= device["float32_tflops"]


def test_what_is_left_to_the_device_is_settled_for_the_predicted_one():
    own = plan(*TINY[:-2])
    automatic = dataclasses.replace(own, runtime=dataclasses.replace(own.runtime, precision="auto", compile="auto"))
    found = [settled(automatic, kind=kind).runtime for kind in ("cpu", "cuda")]
    here = "bfloat16" if abilities("cpu").bfloat16 else "float32"
    assert [(one.precision, one.compile) for one in found] == [(here, False), ("bfloat16", True)]
    given = dataclasses.replace(own, runtime=dataclasses.replace(own.runtime, compile=False))
    assert settled(given, kind="cuda") == given


def test_sparse_gradients_are_refused():
    sparse = ("variant=product_key_memory", "variant.memory.sparse=true", "optim=adamw")
    optimizer = "+variant.groups.values.optimizer={_target_: harness.optim.ClippedAdagrad, _partial_: true}"
    with pytest.raises(ValueError, match="variant.memory.sparse=false"):
        predict(plan(*ON_CPU, *TINY, *sparse, optimizer))
