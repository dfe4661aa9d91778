"""What processes send each other, and need, as ``bench.fit processes=N`` predicts it: against runs by gloo, and closed forms."""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from bench import scaling
from bench.exchange import Collective, Links, sent_bytes
from bench.fake_step import Prediction, predict
from harness.count.memory import parameter_bytes
from harness.device import runtime
from harness.device.processes import joined
from harness.loop.step import Trainer
from tests.command import ROOT
from tests.composing import plan
from tests.many import launch
from tests.patience import PATIENCE_SECONDS
from tests.runs import own_folder, restored  # noqa: F401 - fixtures
from variants.product_key_memory import ProductKeyMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is sent is counted by Linux")

SIZES = ("model.layers=2", "model.heads=4", "model.span=32", "batch.segment=32", "variant=mhsa", "runtime.device=cpu")
SIZES += ("runtime.precision=float32", "runtime.threads=1", "batch.streams=12")
ENGINES = {
    "replicate": ("optim=adamw", "runtime.shard=none"),
    "fully_shard": ("optim=adamw", "runtime.shard=full"),
    "fully_shard, Muon": ("optim=muon", "runtime.shard=full"),
    "columns": ("optim=adamw", "runtime.shard=full", "variant=product_key_memory", "variant.memory.half_keys=128"),
}


def written_bytes() -> int:
    """By this process, to whatever: gloo's sockets among it."""
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


def steps_of(words: tuple[str, ...], number: int, *, before_last) -> None:
    """Training steps of one of several processes, on bytes of its own."""
    with joined() as processes:
        own = plan(*words)
        model = own.make_model()
        trainer = Trainer(model, own.make_optimizers(model), runtime.start(own.runtime, processes=processes))
        trainer.spread(shard=own.runtime.shard)
        share = own.batch.streams // processes.world_size
        for step in range(number):
            tokens = torch.randint(256, (2, share, own.batch.segment))
            if step == number - 1:
                processes.all_gather_numbers([0])
                before_last()
            trainer.step(*tokens, None, fraction=0.5)
        return processes


def sent_for_real(engines: list[tuple[str, ...]]) -> list[int]:
    """Bytes that this process writes in the second step of each."""
    found = []
    for words in engines:
        before = []
        steps_of(words, 2, before_last=lambda before=before: before.append(written_bytes()))
        found.append(written_bytes() - before[0])
    return found


@functools.cache
def predicted(name: str, number: int) -> Prediction:
    return predict(plan(*words_of(name)), processes=number)


def words_of(name: str) -> tuple[str, ...]:
    return (*SIZES, "model.d_model=64", *ENGINES[name])


def check_sent(names: Sequence[str], number: int) -> None:
    ranks = launch(sent_for_real, [words_of(name) for name in names], number=number)
    for name, *each in zip(names, *ranks, strict=True):
        foretold = sum(sent_bytes(predicted(name, number).sent, number, kind="cpu").values())
        assert foretold > 300_000
        assert sum(each) / number == pytest.approx(foretold, rel=0.03), name


def test_what_gloo_sends_is_what_is_predicted():
    check_sent(["replicate", "fully_shard, Muon", "columns"], 3)


@pytest.mark.faults
@pytest.mark.parametrize("number", [2, 4])
def test_what_gloo_sends_by_any_engine_is_what_is_predicted(number):
    check_sent(list(ENGINES), number)


def test_replicated_gradients_are_sent_once_and_states_are_divided():
    whole, divided = (predicted(name, 3) for name in ("replicate", "fully_shard, Muon"))
    averaged = sum(one.bytes * calls for one, calls in whole.sent.items() if one.name == "all_reduce")
    model = plan(*words_of("replicate")).make_model()
    assert averaged == parameter_bytes(model) + 4  # and the loss
    assert whole.split["optimizer"] == pytest.approx(2 * parameter_bytes(model), rel=0.05)
    assert divided.split["parameters"] < 0.4 * whole.split["parameters"]
    with pytest.raises(ValueError, match="batch.streams=12: 5 processes"):
        predict(plan(*SIZES), processes=5)


def test_a_table_by_columns_sends_less_than_its_rows():
    """Of what a step reads: slots and weights are gathered; outputs, their gradients and the weights' change hands."""
    own = plan(*words_of("columns"))
    reads = scaling.SHOWN["streams"] * own.batch.segment * 64
    rows = sent_bytes(scaling.rows_sent(own, 4, reads=64), 4, kind="cuda")
    assert rows == {"all_gather": 3 * (reads * (8 + 64 * 4) + 2 * 8)}  # and how many each has, twice
    with patch.object(ProductKeyMemory, "tables", ()):
        without = sent_bytes(predict(own, processes=4).sent, 4, kind="cuda")
    sent = sent_bytes(predicted("columns", 4).sent, 4, kind="cuda")
    tokens = own.batch.streams // 4 * own.batch.segment
    assert sent["all_to_all"] == 3 * tokens * (2 * 64 * 4 // 4 + 64 * 4)
    more = 3 * (tokens * 64 * (4 + 4) + 8)
    table = 4 * 128**2 * 64
    assert sent["all_gather"] == without["all_gather"] + more - 2 * 3 * table // 4, "the engine gathers it no more"


def test_rings_and_links():
    assert Collective("all_reduce", 800).sent_bytes(8, kind="cuda") == 1400
    assert Collective("all_gather", 100).sent_bytes(8, kind="cuda") == 700
    assert [Collective("reduce_scatter", 800).sent_bytes(8, kind=kind) for kind in ("cuda", "cpu")] == [700, 1400]
    assert sent_bytes(Counter({Collective("all_to_all", 800): 2}), 8, kind="cuda") == {"all_to_all": 1400}
    links = Links(per_machine=4, bytes_per_s=100, network_bytes_per_s=10)
    assert links.seconds({"all_reduce": 1000}, 4) == 10 and links.seconds({"all_reduce": 1000}, 8) == 25
    assert links.seconds({"all_to_all": 700}, 8) == pytest.approx(400 / 10)
    assert links.seconds({"all_to_all": 300}, 4) == pytest.approx(3)


# What the loopback counts, and memory, where nobody else computes or sends


def looped_bytes() -> int:
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def measured(words: tuple[str, ...]) -> dict[str, int]:
    """Of the last of three steps: the peak, and what went through the loopback by then for all processes."""
    from harness.count.memory import PeakMemory

    steps_of((*words, "model.d_model=32", "batch.streams=6"), 1, before_last=lambda: None)  # what libraries need
    meter, looped = PeakMemory(torch.device("cpu")), []

    def begin() -> None:
        meter.reset()
        looped.append(looped_bytes())

    steps_of(words, 3, before_last=begin)
    return {"peak": meter.read().bytes, "looped": looped_bytes() - looped[0]}


@pytest.mark.faults
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="a loopback of one's own needs root and ip")
@pytest.mark.parametrize("engine", ENGINES)
def test_the_loopback_and_memory_are_as_predicted(engine):
    words = (*SIZES, "model.layers=4", "model.d_model=320", *ENGINES[engine])
    script = "import json, sys; from tests.many import launch; from tests.test_exchange import measured; "
    script += "print(json.dumps(launch(measured, json.loads(sys.argv[1]), number=3)))"
    command = f"ip link set lo up; exec {sys.executable} -c '{script}' '{json.dumps(words)}'"
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    each, found = json.loads(done.stdout), predict(plan(*words), processes=3)
    sent = 3 * sum(sent_bytes(found.sent, 3, kind="cpu").values())
    print(
        f"{engine}: {found.peak_bytes:,} bytes predicted, {[one['peak'] for one in each]} measured; {sent:,} sent, {each}"
    )
    for one in each:
        if "Muon" not in engine:  # whose matrices go round in buffers that the prediction misses: up to a fifth
            assert found.peak_bytes == pytest.approx(one["peak"], rel=0.1)
        assert sent == pytest.approx(one["looped"], rel=0.03)
