"""``python -m bench.peers``: the reference model, the checks before the clock, the fairness of the table, and what a
user sees."""

import itertools
import json
import re
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from bench.baselines import packages
from bench.baselines.cases import Comparison, rows_of
from bench.baselines.entry_workers import LanguageWorker
from bench.baselines.packages import (
    APART,
    INSTALL,
    LAYERS,
    MEMORY_PACKAGE,
    PACKAGES,
    Memory,
    Peer,
    Sizes,
    missing,
    touched_parameters,
    version,
)
from bench.baselines.proof import OK, Probe, passed, prove
from bench.baselines.reference_model import ReferenceModel
from bench.baselines.rounds import Entry, compete, ratio, verdict
from bench.baselines.settings import PeerSettings
from bench.progress import Steps
from bench.report.tables_peers import peer_tables
from bench.turns import MOST_MS
from harness.record.table import print_table
from tests.bench_rows import identity, peer_row
from tests.command import call
from tests.command import empty_folder as here  # noqa: F401 - a fixture
from tests.needs import need

MEMORY = Memory(half_keys=32, top_k=4, heads=2, d_query=8)
SIZES = Sizes(vocabulary=256, d_model=32, layers=2, heads=2, context=16, persistent=8, window=8, memory=MEMORY)
YARD = {"vocabulary": 256, "d_model": 32, "layers": 2, "heads": 2, "longest": 16}
TINY = (
    *(
        "model.d_model=32",
        "model.layers=2",
        "model.heads=2",
        "context=16",
        "batch.streams=2",
        "batches=3",
        "persistent=8",
    ),
    *("memory.half_keys=32", "memory.top_k=4", "memory.heads=2", "memory.d_query=8", "rounds=2", "seconds=0.01"),
    *("runtime.device=cpu", "runtime.precision=float32", "runtime.threads=1", "data.bytes=20000"),
)
PEERS = [name for name, peer in PACKAGES.items() if name != "reference_model" and peer.device is None]


def proved(model: nn.Module, *, plain: nn.Module | None = None) -> dict[str, str]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (2, 17), generator=generator)
    loss = partial(F.cross_entropy, target=tokens[:, 1:].flatten())
    same = {"inputs": tokens[:, :-1], "loss": lambda y: loss(y.flatten(0, 1))}
    beside = None if plain is None else lambda: Probe(model=plain, outputs=plain, **same)
    return prove(Probe(model=model, outputs=model, plain=beside, **same))


class Toy(nn.Module):
    """A causal mean of embedded bytes, and ways to spoil it."""

    def __init__(self, fault: str = ""):
        super().__init__()
        torch.manual_seed(0)
        self.fault = fault
        self.embedding, self.head, self.norm = nn.Embedding(256, 8), nn.Linear(8, 256), nn.BatchNorm1d(8)
        self.unused = nn.Parameter(torch.ones(3)) if fault == "unused" else None

    def forward(self, tokens):
        x = self.embedding(tokens)
        place = torch.arange(1, tokens.shape[1] + 1)[:, None]
        mean = x.mean(1, keepdim=True).expand_as(x) if self.fault == "leaks" else x.cumsum(1) / place
        if self.fault == "leaks in training":
            mean = self.norm(mean.transpose(1, 2)).transpose(1, 2)
        else:
            mean = mean * self.norm.weight + self.norm.bias
        if self.fault == "gradient":
            mean = mean + 0.5 * (mean.detach() - mean)
        if self.fault == "deaf":
            mean = mean * 0 + self.norm.weight
        return self.head(mean)


def leaking(_sizes, _arguments):
    return Toy("leaks")


def absent(_sizes, _arguments):
    raise AssertionError("what is not installed is not built")


def test_the_reference_model_has_the_closed_forms_parameters_and_passes():
    model = ReferenceModel(**YARD)
    V, D, T, layers = (YARD[name] for name in ("vocabulary", "d_model", "longest", "layers"))
    closed_form = 2 * V * D + T * D + layers * (12 * D * D + 4 * D) + 2 * D
    assert sum(p.numel() for p in model.parameters()) == closed_form
    assert proved(model) == {"gradients": OK, "causal": OK}


def test_a_reference_model_that_sees_the_future_would_be_found(monkeypatch):
    plainly = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, is_causal: plainly(q, k, v))
    assert "evaluation: another input at" in proved(ReferenceModel(**YARD))["causal"]


@pytest.mark.parametrize(
    ("fault", "check", "reason"),
    [
        ("leaks", "causal", "evaluation: another input at 1 moved the output at 0"),
        ("leaks in training", "causal", "training: another input at 1 moved the output at 0"),
        ("deaf", "causal", "moved nothing"),
        ("gradient", "gradients", "along one direction the loss changes by"),
        ("unused", "gradients", "no gradient: unused"),
    ],
)
def test_what_a_spoilt_toy_breaks_is_named(fault, check, reason):
    assert passed(proved(Toy()))
    found = proved(Toy(fault))
    assert reason in found[check] and not passed(found)


class SingleOnly(Toy):
    """As a kernel that has no float64, and says so as ours do."""

    def forward(self, tokens):
        if self.head.weight.dtype != torch.float32:
            raise ValueError("torch.float64: the kernel takes torch.float32")
        return super().forward(tokens)


def test_a_kernel_without_float64_is_proved_in_float32_and_its_plain_form_in_float64():
    def checked(fault: str = "", **plain) -> dict[str, str]:
        return proved(SingleOnly(fault), **plain)

    alone = checked()
    assert passed(alone) and "no finite difference" in alone["gradients"] and "float32 only" in alone["causal"]
    beside = checked(plain=Toy())
    assert passed(beside) and beside["gradients"].endswith("the kernel takes torch.float32; in plain PyTorch ok)")
    assert checked(plain=Toy("gradient"))["gradients"].startswith("in plain PyTorch: along one direction")
    assert "unused" in checked("unused", plain=Toy())["gradients"]
    assert "moved the output at" in checked("leaks", plain=Toy())["causal"]


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_computes_the_job_and_is_what_it_is_said_to_be(name):
    peer = PACKAGES[name]
    need(version(peer.package), f"{peer.package}: {INSTALL}")
    torch.manual_seed(0)
    model = peer.build(SIZES, peer.arguments(SIZES))
    assert model(torch.zeros(2, 16, dtype=torch.int64)).shape == (2, 16, 256)
    total = sum(p.numel() for p in model.parameters())
    assert 0 < touched_parameters(model) < total
    found = proved(model)
    if name == "reformer-lsh":  # which bucket a byte falls into depends on the bytes after it
        assert found["gradients"].startswith(OK) and "moved the output at" in found["causal"]
    else:
        assert passed(found), found


@pytest.mark.parametrize("name", [name for name in LAYERS if name != MEMORY_PACKAGE])
def test_a_packages_attention_alone_is_causal_or_apart(name):
    peer = LAYERS[name]
    if peer.package in APART and version(peer.package) is None:
        pytest.skip(missing(peer.package))  # in no extra
    need(version(peer.package), f"{peer.package}: {INSTALL}")
    torch.manual_seed(0)
    layer, x = peer.built(SIZES), torch.randn(2, 16, 32)
    found = prove(Probe(model=layer, outputs=layer, inputs=x, loss=lambda y: y.square().sum()))
    assert passed(found) == (peer.package not in APART), found
    assert peer.package not in APART or "moved the output at" in found["causal"]


def test_the_lineup_of_attention_has_all_of_them_and_says_how_to_get_what_is_missing(monkeypatch):
    from tests.composing import compose_config

    (one,) = compose_config("lineup=attention", name="peers").comparisons
    assert {asked.get("peer") for asked in one.entries.values()} == {*LAYERS, None} - {MEMORY_PACKAGE}
    monkeypatch.setattr("bench.baselines.rounds.version", lambda package: None)
    for package, how in {"linformer": "linformer", "x-transformers": "-e .[peers]"}.items():
        gone = Entry(
            name="x", job="", make=None, task=None, package=package, reference="", bytes_per_step=1, identity={}
        )
        assert (gone.status, gone.reason) == ("failed", f"not installed; python -m pip install {how}")


def entry(name: str, *rounds: list[float], bytes_per_step: int = 100) -> Entry:
    made = Entry(
        name=name,
        job="language model",
        make=LanguageWorker,
        task=None,
        package="torch",
        reference="reference_model",
        bytes_per_step=bytes_per_step,
        identity=identity("peers", variant=name) | {"config": {"batch": {"streams": 4, "segment": 25}}},
    )
    made.checks, made.rounds = {"gradients": OK, "causal": OK}, list(rounds)
    made.facts = {"parameters": {"total": 5, "touched": 5}, "backend": "plain"}
    made.facts["memory"] = {"train_peak_bytes": 2**20, "approximate": True}
    return made


def comparison(*entries: Entry, sanity_check: str | None = "x-transformers") -> Comparison:
    return Comparison(entries=list(entries), sanity_check=sanity_check)


def printed(rows: list[dict]) -> str:
    """What a terminal shows of them."""
    (table,) = peer_tables([row | {"read_from": "outputs/somewhere"} for row in rows])
    console = Console(record=True, width=150)
    print_table(table, console=console)
    return console.export_text()


def test_speeds_are_compared_within_a_round():
    slow_weather = [20.0, 20.0, 22.0]
    reference_model = entry("reference_model", [10.0, 10.0], slow_weather, [10.0])
    assert ratio(entry("half", [20.0], [40.0], [20.0]), reference_model) == pytest.approx(0.5)
    assert ratio(entry("small", [20.0], [40.0], [20.0], bytes_per_step=50), reference_model) == pytest.approx(0.25)
    assert ratio(entry("none"), reference_model) is None
    half = entry("half", [20.0], [50.0], [20.0])
    row = rows_of(comparison(reference_model, half, sanity_check=None), judged=True, planned_rounds=3)[1]
    assert row["relative_to_reference"] == 0.5 and row["relative_range"] == [0.4, 0.5]
    assert row["time"]["train_ms"] == {"p20": None, "p50": 20, "p80": None, "n": 3}
    (table,) = peer_tables([row | {"read_from": "outputs/somewhere"}])
    shown = dict(zip((column.heading for column in table.columns), (cell.text for cell in table.rows[0]), strict=True))
    assert shown["its rounds"] == "0.400 to 0.500" and shown["step, n"] == "3" and "step, 20 to 80%" not in shown


@pytest.mark.parametrize(("ms", "void"), [(10.0, False), (10.4, True)])
def test_a_slow_reference_model_makes_the_table_void(ms, void):
    reference_model, sanity_check = entry("reference_model", [ms]), entry("x-transformers", [10.0])
    rows = rows_of(comparison(reference_model, sanity_check, entry("mhsa", [5.0])), judged=True, planned_rounds=1)
    assert [row["void"] is not None for row in rows] == [void] * 3
    assert all("0.97" in row["void"] for row in rows if void)
    assert ("VOID" in printed(rows)) == void
    assert rows[2]["relative_to_reference"] == pytest.approx(ms / 5.0)


def test_without_its_judge_a_table_is_unjudged():
    failed = entry("x-transformers")
    failed.fail("no")
    rows = rows_of(comparison(entry("reference_model", [1.0]), failed), judged=True, planned_rounds=1)
    assert rows[0]["void"] is None and rows[0]["reference_in_check"] is None
    shown = printed(rows)
    assert "UNJUDGED" in shown and "x-transformers: failed (no)" in shown
    assert "not measured" in verdict(failed, None)[1]


@pytest.mark.parametrize(("slowest_ms", "disturbed"), [(1.4, False), (1.6, True)])
def test_a_busy_machine_is_remarked_upon(slowest_ms, disturbed):
    shaken = entry("reference_model", [1.0, 1.0, slowest_ms, slowest_ms] * 5)
    rows = rows_of(comparison(shaken), judged=True, planned_rounds=1)
    assert ("DISTURBED: steps of reference_model" in printed(rows)) == disturbed


def test_an_interrupted_run_keeps_what_is_complete():
    entries = [entry("reference_model", [1.0], [1.0]), entry("mhsa", [1.0]), entry("later")]
    rows = rows_of(comparison(*entries), judged=True, planned_rounds=2)
    assert [(row["name"], row["rounds"], row["interrupted"]) for row in rows] == [
        ("reference_model", 2, False),
        ("mhsa", 1, True),
    ]


def test_what_has_had_its_minute_is_not_interrupted():
    entries = [entry("reference_model", [1.0], [1.0]), entry("mhsa", [MOST_MS])]
    assert [row["interrupted"] for row in rows_of(comparison(*entries), judged=True, planned_rounds=2)] == [
        False,
        False,
    ]


BUSY = {"busy": True, "cores": 2, "wanted_cores": 2, "average_at_start": 1.0, "seconds": 9.0}
BUSY |= {"others_cores": 0.75, "stolen_cores": 0.0}


def test_rows_of_a_busy_machine_are_marked():
    entries = [entry("reference_model", [1.0]), entry("mhsa", [1.0])]
    entries[1].load = BUSY
    shown = printed(rows_of(comparison(*entries), judged=True, planned_rounds=1))
    assert "mhsa !" in shown and "reference_model !" not in shown
    assert re.search(r"! BUSY MACHINE: others had 0\.75 .* of 2\s+cores.*: mhsa\.", shown, re.DOTALL)


def test_a_comparison_says_at_once_that_the_machine_was_busy(monkeypatch, capsys):
    """The rows have what others took while the rounds went on, however they ended."""
    monkeypatch.setattr("bench.baselines.rounds.load_meter", lambda row: Mock(read=lambda: BUSY))
    ready = entry("reference_model")
    ready.fail("not installed")
    with Steps(1) as progress:
        compete([ready], rounds=1, seconds=1.0, progress=progress)
    assert ready.load == BUSY and "BUSY MACHINE" in capsys.readouterr().out
    monkeypatch.setattr("bench.baselines.rounds.in_turn", Mock(side_effect=KeyboardInterrupt))
    ready.load = None
    with Steps(1) as progress, pytest.raises(KeyboardInterrupt):
        compete([ready], rounds=1, seconds=1.0, progress=progress)
    assert ready.load == BUSY


def test_an_entry_is_proved_once_and_measured_in_each_setting(monkeypatch):
    asked = []

    class Answering:
        """In place of a cell: notes who was asked what."""

        def __init__(self, make, task):
            self.task = task

        def ask(self, method, *arguments):
            asked.append((self.task, method))
            return {"prove": {"causal": OK}, "weigh": {"backend": "plain"}, "round": [1.0]}[method]

        def close(self):
            asked.append((self.task, "close"))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("bench.baselines.rounds.Cell", Answering)
    entries = [entry("x-transformers"), entry("x-transformers")]
    for made, setting in zip(entries, ("keep", "return"), strict=True):
        made.allocator = made.task = setting
        made.timed, made.checks = setting == "keep", {}
    with Steps(4) as progress:
        compete(entries, rounds=2, seconds=0, progress=progress)
    assert asked == [
        *(("keep", "prove"), ("keep", "weigh"), ("return", "weigh"), ("return", "close")),
        *[("keep", "round")] * 2,
    ]
    assert [made.checks for made in entries] == [{"causal": OK}] * 2
    assert [made.status for made in entries] == ["measured"] * 2


def test_ctrl_c_leaves_rows_and_exit_code_130(here, monkeypatch):  # noqa: F811
    def stopped(entries, **_):
        entries[0].checks, entries[0].rounds = {"causal": OK}, [[1.0]]
        entries[0].facts = entry("x").facts
        raise KeyboardInterrupt

    monkeypatch.setattr("bench.baselines.rounds.compete", stopped)
    ended = call("bench/peers.py", *TINY, "variants=[]", "peers=[]")
    assert ended.code == 130 and "INTERRUPTED" in ended.out
    assert len(rows_in(here)) == 1


def rows_in(folder) -> list[dict]:
    (path,) = folder.glob("outputs/bench/*-peers/rows.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_table_from_the_command_line(here, monkeypatch):  # noqa: F811
    toys = {
        "leaking": Peer(package="torch", backend="plain", arguments=packages.reference_arguments, build=leaking),
        "missing": Peer(
            package="no-such-package-here", backend="plain", arguments=packages.reference_arguments, build=absent
        ),
    }
    for name, peer in toys.items():
        monkeypatch.setitem(PACKAGES, name, peer)
    ended = call("bench/peers.py", *TINY, "variants=[product_key_memory]", "peers=[leaking,missing]")
    assert ended.code == 0, ended.err
    rows = {(row["name"], row["allocator"]): row for row in rows_in(here)}
    names = ["reference_model", "leaking", "missing", "product_key_memory"]
    assert list(rows) == list(itertools.product(names, ("keep", "return")))
    assert all(set(peer_row()) <= set(row) for row in rows.values())
    for name, setting in itertools.product(("reference_model", "product_key_memory"), ("keep", "return")):
        row = rows[name, setting]
        assert row["config"]["runtime"]["allocator"] == setting and row["data"]["name"] == "synthetic_text"
        assert row["status"] == "measured" and row["reason"] is None and passed(row["checks"])
        assert row["bytes_per_second"] > 0 and row["time"]["train_ms"]["n"] >= 4 and row["rounds"] == 2
        assert row["memory"]["train_peak_bytes"] > 0 and row["relative_to_reference"] > 0
        assert name != "reference_model" or row["relative_to_reference"] == 1  # of the same setting
    rows = {name: rows[name, "keep"] for name in names}
    assert rows["product_key_memory"]["checks"]["contract"] == OK
    assert rows["product_key_memory"]["config"]["variant"]["memory"]["half_keys"] == MEMORY.half_keys
    assert rows["reference_model"]["config"]["variant"]["arguments"]["longest"] == 16
    assert rows["reference_model"]["config_hash"] != rows["product_key_memory"]["config_hash"]
    leak, gone = rows["leaking"], rows["missing"]
    assert leak["status"] == "failed" and "moved the output at" in leak["reason"]
    assert leak["bytes_per_second"] is None and leak["rounds"] == 0 and not passed(leak["checks"])
    assert gone["status"] == "failed" and gone["reason"] == INSTALL
    assert INSTALL in ended.out and "UNJUDGED" in ended.out


def test_the_layer_alone(here):  # noqa: F811
    sizes = ("model.d_model=16", "batch.segment=32", "sizes.half_keys=[8]", "memory.top_k=4", "memory.d_query=8")
    words = (
        "lineup=layer",
        *sizes,
        "rounds=1",
        "seconds=0.01",
        "runtime.device=cpu",
        "runtime.precision=float32",
        "runtime.threads=1",
    )
    ended = call("bench/peers.py", *words, "data.bytes=20000")
    assert ended.code == 0, ended.err
    *package, ours, returned = rows_in(here)
    assert (ours["name"], ours["allocator"], returned["allocator"]) == (returned["name"], "keep", "return")
    assert ours["status"] == "measured" and passed(ours["checks"]) and ours["streams"] * ours["segment"] == 32
    assert {row["job"] for row in (*package, ours)} == {"product-key layer, 8^2 slots"}
    if version("product-key-memory") is None:
        assert {row["reason"] for row in package} == {INSTALL} and ours["relative_to_reference"] is None
    else:
        assert {row["status"] for row in package} == {"measured"} and ours["relative_to_reference"] > 0
        apart = package[0]["parameters"]["total"] / ours["parameters"]["total"]
        assert apart == pytest.approx(1, abs=0.05)  # a bias and the norms' weights


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["peers=[foo]"], ["peers=['foo']", "x-transformers, x-transformers-memory"]),
        (["variants=[foo]"], ["variant=foo", "mhsa"]),
        (["variants=[mhsa,mhsa]"], ["variants=", "each once"]),
        (["variant=mhsa"], ["variant=mhsa", "variants=[..]"]),
        (["batch.segment=512"], ["batch.segment=512", "context=.."]),
        (["runtime.allocator=return"], ["runtime.allocator=return", "in both settings"]),
        (["model.layers=1"], ["model.layers=1", "from 2"]),
        (["context=0"], ["context=0", "from 4"]),
        (["lineup=foo"], ["lineup=foo", "layer, packages, targets"]),
        (["memory.foo=1", "variants=[]"], ["memory.foo", "top_k"]),
        (["memory.top_k=9", "memory.half_keys=8", "variants=[product_key_memory]"], ["top_k=9", "half_keys"]),
        (["lineup=layer", "sizes.half_keys=[]"], ["sizes.half_keys=[]", "from 1"]),
        (["lineup=layer", "context=8"], ["context=8", "batch.segment"]),
    ],
)
def test_a_mistake_ends_with_2_before_anything_runs(here, words, parts, monkeypatch):  # noqa: F811
    monkeypatch.setattr("bench.baselines.rounds.compete", absent)
    ended = call("bench/peers.py", *words, "runtime.device=cpu", "runtime.precision=float32", "runtime.threads=1")
    assert ended.code == 2 and all(part in ended.err for part in parts), ended.err
    assert "Traceback" not in ended.err and not list(here.iterdir())


def test_the_keys_of_the_configuration_are_those_of_the_verb():
    from tests.composing import compose_config

    cfg = compose_config(name="peers")
    assert set(PeerSettings.__dataclass_fields__) <= set(cfg)
    assert set(cfg.peers) == set(PEERS)
