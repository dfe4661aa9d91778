"""``python -m bench.cost``: rows that can be traced, costs that grow where they must, and toys caught by their own rows."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from bench import measuring
from bench.cost_worker import Subject, Task
from bench.planning import read_run
from bench.report.columns import for_terminal
from bench.report.tables_costs import cost_tables
from bench.rows import refusal
from bench.turns import Asked, in_turn
from harness.loop.progress import Steps
from harness.record.cells import LEAST_CALLS
from tests.bench_rows import cost_row
from tests.command import Ended, call, empty_folder, run_folders, train  # noqa: F401 - a fixture
from tests.composing import CONF, compose_config

TINY = (
    "model.d_model=32",
    "model.layers=2",
    "model.heads=2",
    "runtime.device=cpu",
    "runtime.precision=float32",
    "runtime.threads=1",
)
QUICK = ("rounds=1", "seconds=0.01", "allocators=[keep]")
TOY = """import time
from torch import nn
from variants.contract import Sublayer, SublayerOutput

class Toy(Sublayer):
    def __init__(self, place, *, sleep_s: float = 0.0):
        super().__init__()
        self.sleep_s = sleep_s
        self.inner = nn.Linear(place.d_model, place.d_model)

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        if x.shape[1] == 64:  # not where the contract is checked
            time.sleep(self.sleep_s)
        return SublayerOutput(self.inner(x))
"""


def cost(*words: str) -> Ended:
    first = next((i for i, word in enumerate(words) if "=" in word), len(words))
    return call("bench/cost.py", *words[:first], *TINY, *QUICK, *words[first:])


def rows_of(ended: Ended) -> list[dict]:
    assert ended.code == 0, ended.err
    path = Path(ended.out.rpartition("rows: ")[2].strip())
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def cold(tmp_path_factory) -> dict[tuple, dict]:
    """Two variants at two lengths, learned spans as a run left them and with one long head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cost"))
        words = ("variants=[mhsa,adaptive_span]", "lengths=[64,256]", "backends=[auto]", "spans=[learned,one_long]")
        return {(row["length"], row["variant"], row["spans_from"]): row for row in rows_of(cost(*words))}


def test_every_cell_has_a_row_that_can_stand_alone(cold):
    cells = (("mhsa", None), ("adaptive_span", "learned"), ("adaptive_span", "one_long"))
    assert list(cold) == [(length, *cell) for length in (64, 256) for cell in cells]  # one where no span is learned
    for row in cold.values():
        assert refusal(row) is None
        assert row["status"] == "measured" and row["interleaved"]
        assert row["span"] == row["segment"] == row["length"] == row["config"]["model"]["span"]
        assert row["config"]["runtime"]["backend"] == "auto" and row["allocator"] == "keep"
        assert row["data"]["name"] == "synthetic_text" and row["data"]["sha256"].startswith("a8ae164c")
        assert row["utilisation"] is None  # of a CPU no peak is known
        assert row["load"].keys() >= {"busy", "others_cores", "stolen_cores", "average_at_start"}
    longest = {length: cold[length, "adaptive_span", "learned"]["spans"]["max"] for length in (64, 256)}
    assert longest == pytest.approx({64: 64, 256: 119.59})  # cut by the shorter, the same keys in the longer
    assert cold[256, "adaptive_span", "one_long"]["spans"]["max"] == 256


def test_costs_are_there_and_in_order(cold):
    for (length, variant, _), row in cold.items():
        flops, memory = row["flops"], row["memory"]
        assert 0 < flops["ideal_per_byte"] <= flops["executed_per_byte"]
        assert flops["ideal_per_byte"] < flops["training_per_byte"] <= flops["step"] / length
        assert flops["unknown"].keys() & {"exp", "mul", "_softmax"}
        assert memory["gradient_bytes"] == memory["parameter_bytes"] == 4 * row["parameters"]["total"]
        if variant == "mhsa":  # keys and values of S - 1 bytes in 2 layers of width 32, and the stream's position
            assert memory["state_bytes"] == 2 * 2 * (length - 1) * 32 * 4 + 8
        for time in (row["time"][f"{kind}_ms"] for kind in ("train", "evaluate", "generate")):
            assert time["p50"] > 0 and time["n"] > 0
            assert (time["p20"] is time["p80"] is None) if time["n"] < 20 else time["p20"] <= time["p50"] <= time["p80"]
    learned, long = (cold[256, "adaptive_span", kind]["flops"]["ideal_per_byte"] for kind in ("learned", "one_long"))
    assert learned < long


def test_a_warm_stream_keeps_its_segment_and_what_a_file_has_is_not_measured_again(here, cold):
    """With dropout both cells train on the plain path, because the kernel has none; what is scored and counted differs."""
    words = ("mode=stream", "batch.segment=32", "streams=2", "model.dropout=0.1", "memory_limit_gib=8", "rows=r.jsonl")
    ended = cost(*words, "lengths=[128]", "backends=[plain,auto]")
    first, both = rows_of(ended), rows_of(cost(*words, "lengths=[128,48]", "backends=[plain]"))
    assert both[:-1] == first and [row["length"] for row in both] == [128, 128, 48]
    plain, auto = first
    for row in first:
        assert (row["segment"], row["span"], row["streams"], row["mode"]) == (32, 128, 2, "stream")
        assert row["backend"] == "plain" and row["memory_limit_gib"] == 8.0
    assert plain["evaluation_backend"] == "plain" != auto["evaluation_backend"]
    assert auto["flops"]["executed_per_byte"] < plain["flops"]["executed_per_byte"]
    memory = plain["memory"]
    assert memory["train_peak_bytes"] > memory["inference_peak_bytes"] > 0
    layers, width = 2, 32
    products = 12 * width**2 * layers + width * 256  # projections, feed-forward, head
    past = 128 - 33 / 2  # of 128 keys that a byte sees in a stream
    needed = 6 * (products + layers * 2 * width * 128) - 4 * layers * width * past  # a constant past has no gradients
    assert plain["flops"]["training_per_byte"] == pytest.approx(needed, rel=1e-12)
    assert cold[64, "mhsa", None]["flops"]["training_per_byte"] == 6 * (products + layers * 2 * width * 65 / 2)
    (table,) = cost_tables([plain, auto])
    place = [column.heading for column in table.columns].index("in evaluation")
    assert {row[place].text for row in table.rows} == {"", auto["evaluation_backend"]}
    assert "in evaluation" in ended.out
    (table,) = cost_tables([plain])
    assert "in evaluation" not in [column.heading for column in table.columns]


def test_a_quantity_is_timed_twenty_times_or_for_a_minute():
    """By default: each round takes a call of ``bench.cost``, and two of ``bench.peers``, each with keys of its own."""
    assert compose_config(name="cost").rounds >= LEAST_CALLS
    for comparison in CONF.glob("comparison/*.yaml"):
        assert 2 * compose_config(f"comparison={comparison.stem}", name="peers").rounds >= LEAST_CALLS, comparison


@pytest.mark.parametrize(
    ("kind", "timed"), [("cpu", ["train", "evaluate", "generate"]), ("cuda", ["train", "evaluate"])]
)
def test_a_byte_is_generated_against_the_clock_on_a_cpu_only(kind, timed, monkeypatch):
    asked, row = [], cost_row()

    class Answers:
        """A cell whose device is made up."""

        def __init__(self, *_, **__):
            pass

        def ask(self, method: str, *words: object, **_):
            asked.extend(words)
            own = {key: value for key, value in row.items() if key != "time"} | {"device_kind": kind}
            whole = {"identity": own, "inference_memory": dict(row["memory"]), "times": [1.0]}
            return whole.get(method, {})

        def close(self) -> None:
            pass

    monkeypatch.setattr(measuring, "Cell", Answers)
    task = Mock(
        span=64, weights=None, config={"variant": {"name": "mhsa"}, "runtime": {"backend": "plain"}, "batch": row}
    )
    settings = Mock(memory_limit_gib=None, rounds=1, seconds=0.01, mode="cold")
    with Steps(9) as progress:
        (found,) = measuring.measure_together([task], settings=settings, progress=progress)
    assert asked == timed and (found["time"]["generate_ms"] is None) == (kind == "cuda")
    notes = cost_tables([row | {"device_kind": kind, "time": found["time"]}])[0].notes
    assert any("waits for launches" in note for note in notes) == (kind == "cuda")


def test_nobody_is_asked_again_after_a_minute():
    slow, quick, spent = Asked(name="slow"), Asked(name="quick"), {"slow": 0.0, "quick": 0.0}
    for one in (slow, quick):
        one.cell = Mock(ask=lambda *words, one=one: 25_000.0 if one is slow else 1.0)
    answers = []
    with Steps(1) as progress:
        for one, ms in in_turn(
            [slow, quick], "round", rounds=5, progress=progress, spent_ms=lambda one: spent[one.name]
        ):
            spent[one.name] += ms
            answers.append(one.name)
    assert answers.count("slow") == 3 and answers.count("quick") == 5


def test_a_table_shows_both_settings_of_the_allocator_and_one_figure_each():
    (speed,) = cost_tables([cost_row(length=512, allocator=setting) for setting in ("keep", "return")])
    freed = [column.heading for column in speed.columns].index("freed memory")
    assert [row[freed].text for row in speed.rows] == ["keep", "return"]
    assert "what becomes of freed memory" in speed.caption
    assert "freed memory" in [column.heading for column in for_terminal(speed).columns]


def test_out_of_memory_is_a_row(here):
    (row,) = rows_of(cost("lengths=[2048]", "backends=[plain]", "memory_limit_gib=0.15"))
    assert row["status"] == "out of memory" and "allocate" in row["reason"]
    assert row["time"]["train_ms"] is None and refusal(row) is None


def write_toy(*, sleep_s: float) -> tuple[str, ...]:
    """A variant of the user's own; returns the words that name it."""
    files = {
        "my_toy.py": TOY,
        "my_conf/sublayer/toy.yaml": f"_target_: my_toy.Toy\n_partial_: true\nsleep_s: {sleep_s}\n",
        "my_conf/variant/toy.yaml": "defaults: [/sublayer@toy: toy]\nname: toy\nlayers: [toy]\nat: {}\ngroups: {}\n",
    }
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    return ("-cd", "my_conf", "trust=[my_toy]", "variant=toy", "lengths=[64]", "backends=[plain]")


def test_a_slow_variant_is_caught_by_its_own_row(here):
    (row,) = rows_of(cost(*write_toy(sleep_s=0.03)))
    assert row["time"]["evaluate_ms"]["p50"] >= 60  # two layers
    assert row["time"]["generate_ms"]["p50"] < 30


def test_a_checkpoint_is_measured_at_its_learned_spans(here):
    assert train("variant=adaptive_span", "model.span=64", "data=recall", "data.bytes=60000").code == 0
    (folder,) = run_folders(Path("outputs"))
    summary = json.loads((folder / "summary.json").read_text())
    (row,) = rows_of(call("bench/cost.py", *QUICK, f"checkpoint={folder}", "lengths=[128]", "backends=[auto]"))
    assert row["span"] == 128 and row["spans"] == pytest.approx(summary["spans"])
    assert row["checkpoint"] == str(folder) and row["spans_from"] is None
    task = Task(config=row["config"], trusted=(), warm=False, weights=str(folder), span=64, spans="learned", command="")
    subject = Subject(task)
    subject.build()
    _, best = read_run(folder, key="checkpoint")
    for name, parameter in subject.model.named_parameters():
        assert torch.equal(parameter, best["model"][name])  # nothing is shaken
    missing = call("bench/cost.py", "checkpoint=nowhere")
    assert missing.code == 2 and "checkpoint=nowhere: must be a run folder" in missing.err
    refused = call("bench/cost.py", f"checkpoint={folder}", "model.d_model=64")
    assert refused.code == 2 and "model.d_model=64" in refused.err and "its own configuration" in refused.err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("backends=[nope]",), ("backends", "nope", "auto, plain, chunked, fused, kernel")),
        (("spans=[long]",), ("spans", "long", "learned, one_long, initial")),
        (("lengths=[0]",), ("lengths", "0")),
        (("lengths=[]",), ("lengths=[]",)),
        (("mode=warm",), ("mode=warm", "cold, stream")),
        (("variants=[mhsa,nope]",), ("variant=nope", "adaptive_span")),
        (("lenghts=[3]",), ("lenghts=[3]", "lengths")),
        (("model.heads=3",), ("model.heads=3", "model.d_model=32")),
    ],
)
def test_mistakes_are_refused_and_leave_nothing(here, words, parts):
    ended = cost(*words)
    assert ended.code == 2
    assert all(part in ended.err for part in parts), ended.err
    assert ended.err.count("error:") == 1 and not list(here.iterdir())
