"""``python -m bench.peers lineup=targets``: cases and what they must reach, steady state, verdicts, what is shown."""

import json
from dataclasses import replace

import pytest
import torch

from bench import front_page
from bench.baselines import entries as entries_module
from bench.baselines.entries import first_batches
from bench.baselines.entry_workers import OurModel, Task, TrainerLoop, set_spans
from bench.baselines.lineup import cases_of, comparison_settings
from bench.baselines.proof import passed
from bench.baselines.rounds import Entry
from bench.baselines.settings import Case, PeerSettings
from bench.cost_worker import full_state
from bench.planning import own_keys
from bench.rows import refusal
from harness.device.runtime import Runtime
from harness.plan.settings import parse
from tests.command import call
from tests.command import empty_folder as here  # noqa: F401 - a fixture
from tests.composing import TINY, compose_config, plan, recall
from tests.pretended_device import pretend

SIZES = ("model.d_model=32", "model.heads=2", "model.layers=2", "batch.segment=16", "batch.streams=2", "model.span=64")
SMALL = (
    *(*SIZES, "sizes.spans=[8,40]", "sizes.long_span=96", "sizes.one_open=[32,96]", "sizes.long_context=32"),
    *(
        "persistent=8",
        "sizes.width=16",
        "sizes.positions=32",
        "sizes.half_keys=[8]",
        "memory.top_k=4",
        "memory.d_query=8",
    ),
    *("runtime.threads=1", "data.bytes=20000", "rounds=1", "seconds=0.001", "lineup=targets"),
)
CUDA = (
    *SIZES,
    "sizes.spans=[8,40]",
    "sizes.short_span=16",
    "runtime.threads=1",
    "data.bytes=20000",
    "lineup=targets_cuda",
)
SETTINGS = {"relative": "hidden", "rotary": "kv"}
SPANS = (3, 20)
LONG = ("model.span=48", "batch.carry=true", "record.every_steps=1", "data=recall", "data.bytes=20000")


def task(variant: str, *words: str, spans: tuple[int, ...] | None = SPANS, scratch=None) -> Task:
    made = plan(f"variant={variant}", *TINY, *LONG, *words)
    batches = first_batches(made, recall(), number=3)
    return Task(config=made.config, trusted=(), batches=batches, spans=spans, scratch=scratch)


@pytest.fixture(autouse=True)
def _global_settings_of_torch_come_back():
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


# What is measured


def lineup(name: str, *words: str) -> list[tuple[str | None, list[tuple[Case, str | None, list[str]]]]]:
    """Of each comparison of a lineup its sanity check, and its cases with their positions and their entries' words."""
    cfg = compose_config(f"lineup={name}", *words, name="peers")
    settings = parse(PeerSettings, own_keys(cfg, *PeerSettings.__dataclass_fields__), key="")
    found = []
    for comparison, entries in comparison_settings(settings):
        cases = []
        for case in cases_of(comparison, entries):
            typed = f"{comparison.words} {entries[case.entry].words}".split()
            (position,) = (
                [None] if comparison.layer else [w.partition("=")[2] for w in typed if w.startswith("position=")]
            )
            cases.append((case, position, typed))
        found.append((comparison.sanity_check, cases))
    return found


def case(name: str, position: str | None = None) -> Case:
    (found,) = [c for _, cases in lineup("targets") for c, p, _ in cases if c.name == name and position in (None, p)]
    return found


def test_the_cases_and_what_they_must_reach():
    # speed in the reference model's, and half of the published implementation's peak above the bare process in MB
    asked = {
        "fixed": (0.22, 0.55, 615.5),
        "zero": (0.85, 0.95, 288.0),
        "mixed": (0.6, 0.8, 755.5),
        "persistent": (0.45, 0.9, 1108.5),
    }
    variants = {"fixed": "mhsa", "zero": "adaptive_span", "mixed": "adaptive_span", "persistent": "all_attention"}
    (sanity_check, workload), *_ = lineup("targets")
    assert sanity_check == "x-transformers"
    assert {c.name for c, _, _ in workload if c.reference == "reference_model"} == set(asked)
    for name, (relative, rotary, peak) in asked.items():
        for position, cache, target in (("relative", "hidden", relative), ("rotary", "kv", rotary)):
            found = case(name, position)
            (words,) = [words for c, _, words in workload if c == found]
            assert {f"variant={variants[name]}", f"model.cache={cache}"} <= set(words)
            assert (f"model.attend_self={str(position == 'rotary').lower()}") in words
            assert (found.at_least, found.at_most) == (target, None) and found.peak_mb == peak
    one_open = case("one_open")
    assert (one_open.at_least, one_open.at_most) == (None, 0.25) and one_open.reference == "all open"
    assert one_open.second == ["all open", "mhsa", 1.1]
    for name in (f"pkm_{number}{kind}" for number in (128, 256, 512) for kind in ("", "_adam")):
        assert (case(name).at_least, case(name).at_most, case(name).peak_share) == (2.0, None, 0.7)
    for name, target in (("mhsa_256", 1.0), ("mhsa_1024", 1.0), ("trainer", 0.97)):
        assert (case(name).at_least, case(name).at_most) == (target, None)
    for _, cases in lineup("targets_cuda"):
        ((cuda, _, _),) = cases
        assert (cuda.at_least, cuda.at_most, cuda.peak_share) == (None, 1.25, 1.3)


def test_the_workload_is_the_one_of_the_targets():
    cfg = compose_config("lineup=targets", name="peers")
    assert set(PeerSettings.__dataclass_fields__) <= set(cfg)
    assert {"d_model": 256, "heads": 8, "layers": 4, "span": 1024}.items() <= dict(cfg.model).items()
    assert (
        dict(cfg.batch) == {"streams": 8, "segment": 256, "carry": True, "accumulate": 1} and cfg.data.vocabulary == 205
    )
    assert list(cfg.sizes.spans) == [16, 16, 24, 32, 48, 64, 200, 900] and cfg.persistent == 512
    assert list(cfg.sizes.one_open) == [32] * 7 + [4096] and cfg.sizes.long_span == 4096
    assert {"width": 256, "positions": 2048, "long_context": 1024}.items() <= dict(cfg.sizes).items()
    assert {"top_k": 32, "heads": 4, "d_query": 256}.items() <= dict(cfg.memory).items()
    assert list(cfg.sizes.half_keys) == [128, 256, 512] and cfg.runtime.threads == 2
    cfg = compose_config("lineup=targets_cuda", name="peers")
    assert {"d_model": 512, "heads": 8, "layers": 12, "span": 8192}.items() <= dict(cfg.model).items()
    assert {"streams": 64, "segment": 512}.items() <= dict(cfg.batch).items() and cfg.data.vocabulary == 205
    assert sum(cfg.sizes.spans) / 8 == 314 and cfg.sizes.short_span == 512


@pytest.mark.parametrize(("position", "cache"), SETTINGS.items())
def test_a_model_keeps_its_spans_and_a_full_past(position, cache):
    worker = OurModel(task("adaptive_span", f"position={position}", f"model.cache={cache}"))
    lengths = []
    for _ in range(3):
        worker.train()
        lengths.append({tuple(part.shape) for part in parts(worker.state)})
        for _, sublayer in worker.model.sublayers():
            if hasattr(sublayer, "span"):
                assert sublayer.span.metrics({})["span"].tolist() == pytest.approx(SPANS)
    assert lengths[0] == lengths[1] == lengths[2]
    fixed = OurModel(task("mhsa", spans=None))
    fixed.train()
    assert any(47 <= part.shape[-2] <= 48 for part in parts(fixed.state) if part.dim() > 2)


def parts(state) -> list[torch.Tensor]:
    if isinstance(state, tuple):
        return [part for own in state for part in parts(own)]
    return [] if state is None else [state]


def test_spans_that_reach_beyond_the_segment_are_proved_within_it():
    assert passed(OurModel(task("adaptive_span", spans=(48, 48))).prove())


def test_only_learned_spans_can_be_set():
    with pytest.raises(ValueError, match="no sublayer has learned spans"):
        set_spans(plan("variant=mhsa", *TINY).make_model(), SPANS)


def test_a_state_is_full_when_as_many_bytes_were_seen():
    model = plan("variant=mhsa", *TINY, "model.span=48").make_model()
    where = Runtime(device=torch.device("cpu"), precision="float32", compile=False)
    start, _ = full_state(model, torch.zeros(2, 16, dtype=torch.int64), span=48, where=where)
    assert start.tolist() == [48, 48]


def test_the_trainer_takes_the_runs_own_step_and_writes_rows(tmp_path):
    worker = TrainerLoop(task("adaptive_span", scratch=str(tmp_path)))
    for _ in range(3):
        worker.train()
    (record,) = tmp_path.glob("*/record.jsonl")
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and worker.training.spent.steps == 3
    assert rows[-1]["learning_rate"] == 0 and worker.training.state[0].tolist() == [
        80,
        80,
    ]  # 48 of the past, then two steps


# The command


def test_rows_from_the_command_line_are_added_to_the_file(here):  # noqa: F811
    (here / "mine.jsonl").write_text("{}\n")
    ended = call("bench/peers.py", "only=[mixed]", "rows=mine.jsonl", *SMALL)
    assert ended.code == 0, ended.err
    first, *rows = [json.loads(line) for line in (here / "mine.jsonl").read_text().splitlines()]
    assert first == {} and {path.name for path in here.iterdir()} == {"mine.jsonl"}
    assert [(row["case"], row["position"], row["cache"]) for row in rows] == [
        ("mixed", "relative", "hidden"),
        ("mixed", "rotary", "kv"),
    ]
    for row in rows:
        assert refusal(row) is None and row["kind"] == "speed" and row["status"] == "measured", row["reason"]
        assert row["ratio_range"][0] == row["ratio"] == row["ratio_range"][1]  # of one round
        assert row["opponent"]["name"] == row["relative_to"] and row["opponent"]["package"] == "torch"
        for side in (row["entry"], row["opponent"]):
            assert side["optimizer"] == "fused AdamW" and side["parameters"] > 0 and side["training_flops_per_byte"] > 0
        assert (row["allocator"], row["peak_allocator"]) == ("keep", "return") and row["timed_peak"]["bytes"] > 0
        assert row["ratio"] > 0 and row["peak_bytes"] > 0 and row["reached"] is None and row["spans"] == [8, 40]
        assert row["config"]["data"]["vocabulary"] == 205 and row["config"]["model"]["span"] == 64
        assert row["config"]["batch"]["carry"] and row["config"]["model"]["attend_self"] == (
            row["position"] == "rotary"
        )
    assert "NOT JUDGED" in ended.out
    found = here / "bench/results/machine/speed.jsonl"
    found.parent.mkdir(parents=True)
    found.write_text("".join(json.dumps(row | {"commit": "ab" * 20}) + "\n" for row in rows))
    page = front_page.written(f"{front_page.BEGIN}{front_page.END}", front_page.speeds, here, name="a page")
    assert "not judged)" in page and page.count(" M | fused AdamW |") == 2


@pytest.fixture
def untimed(monkeypatch) -> list[Entry]:
    """The entries of a command that ends before they compete."""
    entries = []
    monkeypatch.setattr("bench.baselines.rounds.compete", lambda own, **_: entries.extend(own))
    return entries


def test_every_case_has_its_entrants_and_each_takes_a_step(here, untimed, monkeypatch):  # noqa: F811
    comparisons = []
    monkeypatch.setattr("bench.baselines.cases.rows_of", lambda comparison, **_: comparisons.append(comparison) or [])
    ended = call("bench/peers.py", *SMALL)
    assert ended.code == 0 and "nothing was measured" in ended.out, ended.err
    assert [(one.allocator, one.timed) for one in untimed] == [("keep", True), ("return", False)] * (len(untimed) // 2)
    kept, returned = untimed[::2], untimed[1::2]
    assert [one.name for one in returned] == [one.name for one in kept]
    assert [one.name for one in kept] == [
        *("reference_model", "x-transformers", "fixed relative", "fixed rotary", "zero relative", "zero rotary"),
        *("mixed relative", "mixed rotary", "persistent relative", "persistent rotary", "mhsa_256"),
        *("one open", "all open", "mhsa", "product-key-memory 8^2 fused adamw"),
        *("product-key-memory 8^2 adam", "product_key_memory 8^2"),
        *("reference_model", "x-transformers", "mhsa_1024", "bare loop", "trainer"),
    ]
    against = {case.name: case.reference for comparison in comparisons for case in comparison.cases}
    assert against == {
        **dict.fromkeys(("fixed", "zero", "mixed", "persistent"), "reference_model"),
        **dict.fromkeys(("mhsa_256", "mhsa_1024"), "x-transformers"),
        **{"one_open": "all open", "trainer": "bare loop", "pkm_8": "product-key-memory 8^2 fused adamw"},
        "pkm_8_adam": "product-key-memory 8^2 adam",
    }
    judges = [
        comparison.sanity_check for comparison in comparisons if comparison.cases[-1].reference == "x-transformers"
    ]
    assert judges == ["x-transformers"] * 2
    by_name = {one.name: one for one in kept}
    assert by_name["one open"].task.spans == (32, 96) and by_name["all open"].task.spans == (96, 96)
    assert by_name["mhsa"].task.config["model"]["span"] == 96 and by_name["zero rotary"].task.spans == (0, 0)
    assert by_name["persistent rotary"].task.config["variant"]["attention"]["persistent"]["number"] == 8
    assert by_name["mhsa_1024"].task.config["batch"] | {"streams": 0} == {
        **{"streams": 0, "segment": 32, "carry": False, "accumulate": 1}
    }
    (here / "scratch").mkdir()
    for one in kept:
        if one.status is None:  # what is installed
            known = replace(one.task, scratch=str(here / "scratch")) if one.make is TrainerLoop else one.task
            facts = one.make(known).weigh()
            assert facts["optimizer"] == ("Adam" if one.name.endswith(" adam") else "fused AdamW"), one.name
            assert facts["step_flops"] > 3 * facts["parameters"]["touched"], (
                one.name
            )  # a byte's two passes at the least


def test_the_cuda_cases_are_made_and_take_a_step(here, untimed, monkeypatch):  # noqa: F811
    on_cpu = Runtime(device=torch.device("cpu"), precision="bfloat16", compile=False)
    monkeypatch.setattr(entries_module.runtime, "start", lambda _: on_cpu)
    with monkeypatch.context() as patch:
        pretend(patch, "cuda")
        ended = call("bench/peers.py", *CUDA)
    assert ended.code == 0, ended.err
    assert [one.name for one in untimed] == [f"{v} {p}" for p in SETTINGS for v in ("mhsa", "adaptive_span")]
    for one in untimed:
        asked = one.task.config["runtime"]
        assert [asked[key] for key in ("device", "backend", "precision", "compile")] == [
            "cuda",
            "auto",
            "bfloat16",
            True,
        ]
        assert one.task.config["model"]["span"] == (16 if one.task.spans is None else 64)
        one.make(one.task).train()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["only=[foo]"], ["only=['foo']", "fixed, zero", "pkm_128", "trainer"]),
        (["only=[]"], ["only=[]", "mixed"]),
        (["runtime.device=tpu"], ["runtime.device=tpu", "auto, cpu"]),
        (["lineup=targets_cuda"], ["device=cuda", "no CUDA"]),
        (["sizes.spans=[1,2]"], ["spans of mixed relative=[1, 2]", "8 integers from 0 to 1024"]),
        (["model.span=64"], ["spans of mixed relative=", "from 0 to 64"]),
        (["sizes.widht=3"], ["sizes.widht", "width"]),
        (["position=alibi"], ["position=alibi", "every case"]),
        (["comparisons=[{job: a, reference: b, wrods: c}]"], ["comparisons.0.wrods=c", "words"]),
        (["variant=mhsa"], ["variant=mhsa", "every case"]),
        (["rows=."], ["rows=.", "folder"]),
        (["rows=file/rows.jsonl"], ["rows=file/rows.jsonl", "is a file"]),
        (["rounds=0"], ["rounds=0", "above 0"]),
    ],
)
def test_a_mistake_ends_with_2_before_anything_runs(here, untimed, words, parts, monkeypatch):  # noqa: F811
    pretend(monkeypatch, None)
    (here / "file").write_text("")
    ended = call("bench/peers.py", "lineup=targets", *words)
    assert ended.code == 2 and all(part in ended.err for part in parts), ended.err
    assert "Traceback" not in ended.err and [path.name for path in here.iterdir()] == ["file"] and not untimed


def test_other_sizes_are_not_judged(here, untimed, monkeypatch):  # noqa: F811
    said = []
    monkeypatch.setattr(
        "bench.baselines.cases.rows_of", lambda comparison, judged, planned_rounds: said.append(judged) or []
    )
    for words in (["rounds=2", "rows=x.jsonl"], ["batch.streams=2"], ["optim.lr=1"], ["runtime.backend=plain"]):
        assert call("bench/peers.py", "lineup=targets", "only=[trainer]", *words).code == 0
    assert said == [True, False, False, False]
