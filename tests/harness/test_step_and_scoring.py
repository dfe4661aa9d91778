"""Training steps with accumulation, carried state and bfloat16; scoring, compared with loops
over single bytes."""

import math
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.data.recall import recall_floor
from harness.data.streams import round_context, score_ranges
from harness.device.processes import SINGLE
from harness.device.runtime import Runtime
from harness.loop.step import train_step
from harness.loop.summary import final_score
from harness.objective import scoring
from harness.objective.checks import CausalityCheck, Future
from harness.objective.scoring import check_causality, score_context, score_stream, score_windows
from harness.optim.budget import Schedule, Spent
from harness.optim.optimizers import Optimizers
from harness.optim.parameter_groups import assign
from tests.support.small_runs import MEMORY, VARIANTS, evaluate, make_trainer, tensors

CPU = Runtime(device=torch.device("cpu"), precision="float32", compile=False)
SPANS = (
    "variant=adaptive_span",
    "variant.attention.span.ramp=4",
    "variant.attention.span.initial=0.3",
)
TRAINING = ("optim=adamw", "budget.steps=100", "batch.carry=true", "model.head_zero_init=false")


def test_a_step_with_accumulation_equals_one_without():
    whole, split = (
        make_trainer(*SPANS, *TRAINING, f"batch.accumulate={parts}") for parts in (1, 3)
    )
    for run in (whole, split):
        run.model.double()  # Adam amplifies the rounding errors of float32
        for _ in range(3):
            run.step()
    for (name, expected), actual in zip(
        whole.model.named_parameters(), split.model.parameters(), strict=True
    ):
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert whole.train_row().bits_per_byte == pytest.approx(
        split.train_row().bits_per_byte, abs=1e-12
    )
    assert len(tensors(whole.state.carried)) > 1 and len(whole.state.carried[0]) == 4
    for expected, actual in zip(
        tensors(whole.state.carried), tensors(split.state.carried), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("parts", [1, 3])
def test_auxiliary_losses_are_in_the_gradient_but_not_in_the_score(parts):
    weight, heads, span, lr = 0.01, 2, 16, 0.5
    words = (*SPANS, "model.head_zero_init=false")
    runs = [make_trainer(*words, f"variant.attention.span.loss_weight={w}") for w in (0.0, weight)]
    batch = runs[0].stream.batch(0)
    logits = runs[0].model(batch[0]).logits.detach()
    part = runs[0].objective.reported_part("valid")[:200]
    scores = [evaluate(run, part).bits_per_byte for run in runs]
    nats = []
    for run in runs:  # a step of SGD moves a parameter by its gradient times the rate
        groups = assign(run.model, default=torch.optim.SGD)
        optimizers = Optimizers(groups, lr=lr, schedule=Schedule())
        step = train_step(run.model, optimizers, CPU, *batch, None, accumulate=parts)
        nats.append(step[0].item())
    assert nats[0] == pytest.approx(
        F.cross_entropy(logits.transpose(1, 2), batch[1]).item(), abs=1e-6
    )
    assert nats[0] == nats[1] and scores[0] == scores[1]
    fractions = [run.model.layers[0]["attention"].sublayer.span.fraction for run in runs]
    # the loss is the weight times the mean span
    expected = torch.full((heads,), lr * weight * span / heads)
    torch.testing.assert_close(fractions[0] - fractions[1], expected, rtol=0, atol=1e-6)


def test_a_step_uses_the_carried_state():
    trainer = make_trainer(
        "model.head_zero_init=false", "variant.attention.zero_init=false", "batch.accumulate=3"
    )
    first, second = trainer.stream.batch(0), trainer.stream.batch(1)
    state = trainer.model(first[0]).state
    logits = [trainer.model(second[0], before).logits.detach() for before in (state, None)]
    warm, cold = (F.cross_entropy(x.transpose(1, 2), second[1]).item() for x in logits)
    nats, after = train_step(
        trainer.model, trainer.optimizers, trainer.runtime, *second, state, accumulate=3
    )
    assert nats.item() == pytest.approx(warm, abs=1e-6) and abs(warm - cold) > 1e-4
    assert after[0].tolist() == [32] * 4


def test_parameters_are_projected_after_every_step():
    trainer = make_trainer(
        "variant=adaptive_span",
        "variant.attention.span.loss_weight=10",
        "model.span=256",
        "optim.lr=0.1",
    )
    spans = trainer.model.layers[0]["attention"].sublayer.span
    with torch.no_grad():
        spans.fraction.fill_(0.5)
    trainer.model.project_()
    assert spans.max_keys == (192, 192)
    for _ in range(8):
        trainer.step()
    assert spans.fraction.tolist() == [0.0, 0.0] and spans.max_keys == (64, 64)


def test_bfloat16_training_is_finite_and_close_to_float32_with_parameters_in_float32():
    high, low = (
        make_trainer(*SPANS, *TRAINING, f"runtime.precision={precision}")
        for precision in ("float32", "bfloat16")
    )
    bits = []
    for run in (high, low):
        for _ in range(3):
            run.step()
        bits.append(run.train_row().bits_per_byte)
    assert bits[0] != bits[1] and bits[0] == pytest.approx(bits[1], abs=0.05)
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in low.model.parameters())
    assert {t.dtype for t in tensors(low.state.carried)} == {torch.int64, torch.bfloat16}
    assert evaluate(low, low.objective.reported_part("valid")[:200]).nats.isfinite().all()


# Scoring


@pytest.fixture(scope="module")
def model():
    """A model in float64 with noise added to its parameters, so that its outputs differ at every
    byte."""
    trainer = make_trainer(
        "variant=product_key_memory", *MEMORY, "model.head_zero_init=false", "model.span=6"
    )
    with torch.no_grad():
        for parameter in trainer.model.double().parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return trainer.model.eval()


def random_bytes(n_bytes: int) -> Tensor:
    return torch.randint(
        256, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )


@torch.no_grad()
def byte_by_byte(model, split: Tensor, *, first: int, end: int) -> list[float]:
    """Return nats of pairs ``first`` to ``end - 1``, by a forward pass for each byte. The first
    pass has no state."""
    nats, state = [], None
    for pair in range(first, end):
        out = model(split[pair].long().view(1, 1), state)
        nats.append(-out.logits[0, 0].double().log_softmax(-1)[split[pair + 1].item()].item())
        state = out.state
    return nats


@pytest.mark.parametrize("streams, context, segment", [(3, 0, 64), (3, 11, 7), (4, 11, 1)])
def test_the_score_of_streams_equals_that_of_single_bytes_after_the_context(
    model, streams, context, segment
):
    """The 101 pairs are divided into streams of 33 and 34, or of 25 and 26."""
    split, expected = random_bytes(102), []
    before = round_context(context, n_pairs=101, streams=streams, segment=segment)
    assert before == (0 if context == 0 else -(-context // segment) * segment)
    for first, end in score_ranges(101, streams, context=before):
        read = before if first else 0
        expected += byte_by_byte(model, split, first=first - read, end=end)[read:]
    score = score_stream(
        model, split, runtime=CPU, streams=streams, segment=segment, context=context
    )
    torch.testing.assert_close(
        score.nats.double(), torch.tensor(expected).double(), rtol=0, atol=1e-5
    )
    assert score.bits_per_byte == pytest.approx(sum(expected) / math.log(2) / 101, abs=1e-6)


def test_statistics_are_collected_from_the_first_batch_in_which_all_streams_are_scored(model):
    # 100 pairs are scored. Three streams of 34 also read 2 pairs of padding. Without a context,
    # statistics begin at once. A context of 12 leaves out the first two batches, in which only the
    # first stream is scored.
    for streams, segment, context, count in (
        (4, 64, 0, 100),
        (4, 7, 0, 100),
        (3, 64, 0, 102),
        (4, 6, 12, 88),
    ):
        cut = {"streams": streams, "segment": segment, "context": context}
        score = score_stream(model, random_bytes(101), runtime=CPU, collect_stats=True, **cut)
        assert len(score.nats) == 100 and score.stats["layers.0.memory"]["bytes"] == count
        assert score.stats["layers.0.memory"]["usage_count"].sum() == count * 2 * 4
    assert not score_stream(model, random_bytes(101), runtime=CPU, streams=4, segment=9).stats


@torch.no_grad()
def test_the_score_of_windows_equals_that_of_single_windows(model):
    split, expected = random_bytes(1900), torch.full((1899,), torch.nan, dtype=torch.float64)
    for first in (0, 512, 1024):
        last = min(first + 1024, 1899)
        logits = model(split[None, first:last].long()).logits[0]
        nats = F.cross_entropy(logits, split[first + 1 : last + 1].long(), reduction="none")
        expected[first + 512 if first else 0 : last] = nats[512 if first else 0 :]
    for batch in (2, 8):
        nats = score_windows(model, split, runtime=CPU, batch=batch).nats
        torch.testing.assert_close(nats.double(), expected, rtol=0, atol=1e-5)


def test_the_context_curve_is_the_score_by_position_in_a_window(model):
    split = random_bytes(48)  # 47 pairs: three windows of 12 and one of 11
    naive = [
        byte_by_byte(model, split, first=first, end=min(first + 12, 47))
        for first in (0, 12, 24, 36)
    ]
    curve = score_context(model, split, runtime=CPU, longest=12, segment=5, batch=3)
    edges = [(1, 1), (2, 2), (3, 4), (5, 8), (9, 12)]
    assert [(point["from_bytes"], point["to_bytes"]) for point in curve] == edges
    for point in curve:
        nats = [
            nats for window in naive for nats in window[point["from_bytes"] - 1 : point["to_bytes"]]
        ]
        assert point["bits_per_byte"] == pytest.approx(
            sum(nats) / len(nats) / math.log(2), abs=1e-5
        )
    short = score_context(model, split[:6], runtime=CPU, longest=12, segment=4)
    assert [(point["from_bytes"], point["to_bytes"]) for point in short] == [
        (1, 1),
        (2, 2),
        (3, 4),
        (5, 5),
    ]


@pytest.mark.parametrize(
    "limits, precision, change, causal",
    [
        (frozenset(), "float32", 0.0, True),
        (frozenset(), "float32", 1e-8, False),  # on a CPU no bit may change
        (frozenset({"rounding"}), "float32", 1e-5, True),
        (frozenset({"rounding"}), "float32", 1e-3, False),
        (frozenset({"rounding"}), "bfloat16", 1e-3, True),
        (frozenset({"rounding"}), "bfloat16", math.nan, False),
    ],
)
def test_changed_predictions_are_excused_only_as_rounding_that_is_declared(
    model, limits, precision, change, causal
):
    layers = [sublayer for _, sublayer in model.sublayers()]
    layers[0].limits = limits
    score = score_stream(model, random_bytes(100), runtime=CPU, streams=2, segment=20)
    future = Future(8, int(change != 0), change, change)
    compared = check_causality(
        model, [score, score._replace(future=future)], floor=None, precision=precision
    )
    assert compared[1] == causal and repr(compared[0]) == repr(future)


def test_rounding_elsewhere_does_not_hide_a_leak():
    """Mean changes are those of rounding, but some predictions change more than rounding can."""
    many = Future(cuts=512, changed=100_000, max_nats=0.05, sum_nats=9.9)
    assert not many.causal(precision="float32", rounding=True)
    assert many._replace(max_nats=9e-4).causal(precision="float32", rounding=True)


def test_cuts_are_distinct_and_all_earlier_predictions_are_compared(model):
    """Later bytes change the predictions of byte 13 of a segment, and no others. Changes of all
    processes are added."""
    model.register_forward_hook(leak_at_13)
    processes = Mock(wraps=SINGLE, world_size=1, shard=SINGLE.shard)
    processes.all_gather = lambda value, **_: [value] * 4
    runtime, options = replace(CPU, processes=processes), {"future_seed": 0, "cuts": 10**4}
    score = score_stream(
        model, random_bytes(121), runtime=runtime, streams=2, segment=20, **options
    )
    cuts, after_13 = 4 * 2 * 3 * 19, 4 * 2 * 3 * 6
    assert (score.future.cuts, score.future.changed) == (cuts, after_13)
    assert score.future.row()["future_missed_share"] == pytest.approx(3 / cuts)


def test_cuts_take_at_most_a_twentieth_of_the_time_of_a_run(monkeypatch):
    monkeypatch.setattr(scoring, "MIN_CUTS", 64)
    monkeypatch.setattr(scoring, "CUTS", 512)
    trainer, cuts = make_trainer("eval.windows=true"), []
    for n_bytes in (0, 10**6, 10**9):
        trainer.state.spent = Spent(bytes=n_bytes)
        cuts.append(sum(trainer.objective._cuts(10_000, trained_bytes=n_bytes)))
    assert cuts[::2] == [64, 512]
    bytes_per_cut = 7 / 8 * 64 + 1 / 8 * 1024  # in segments and windows
    assert 2 * cuts[1] * bytes_per_cut <= 0.05 * (3 * 10**6 + 2 * 3 * 10_000)  # in two splits


@pytest.mark.parametrize(
    ("noise", "change", "counts"),
    [
        (1e-6, 3e-6, False),
        (1e-6, 5e-6, True),
        (1e-3, 3e-3, True),  # more than rounding makes in float32
        (1e-6, math.nan, True),
    ],
)
def test_without_determinism_changes_like_the_measured_noise_do_not_count(
    model, noise, change, counts
):
    def predict(tokens: Tensor) -> tuple[Tensor]:
        return (torch.full((1, 9), change if tokens.any() else noise),)

    torch.use_deterministic_algorithms(False)
    check = CausalityCheck([0], model, CPU, rows=1, cuts=1)
    inputs = torch.zeros(1, 9, dtype=torch.int64)
    check.compare(0, (inputs, inputs, inputs == 0), torch.zeros(1, 9), predict)
    assert (check.result().changed > 0) == counts


def leak_at_13(model, inputs, out):
    later = out.logits[:, -1:].mean() if out.logits.shape[1] > 13 else 0.0
    leaking = torch.arange(out.logits.shape[1])[:, None] == 13
    return out._replace(logits=out.logits + leaking * torch.arange(out.logits.shape[2]) * later)


def test_a_trained_model_stays_above_the_floor_of_recall_and_below_it_a_score_is_not_causal():
    words = (
        "data.distances=[3]",
        "batch.streams=8",
        "batch.segment=64",
        "optim.lr=0.01",
        "budget.steps=80",
    )
    trainer = make_trainer(
        *VARIANTS["adaptive_span"], *words, "model.d_model=32", "model.span=8", "data.bytes=30000"
    )
    while not trainer.finished:
        trainer.step()
    score = evaluate(trainer, trainer.corpus.splits["valid"])
    floor = recall_floor(len(score.nats) + 1)
    assert floor - 40 / len(score.nats) < score.bits_per_byte < 3.9
    assert (
        score_windows(trainer.model, trainer.corpus.splits["valid"], runtime=CPU).bits_per_byte
        > floor
    )
    row = final_score(trainer, "test")
    floor = trainer.corpus.floor_bits(trainer.objective.reported_part("test"))
    assert row.check == trainer.plan.admission and row.floor_bits_per_byte == floor
    assert row.bits_per_copy["3"] < 4
    above = trainer.corpus.generated._replace(
        floor_bits=lambda part, **_: row.bits_per_byte + 41 / (len(part) - 1)
    )
    trainer.objective.corpus = replace(trainer.corpus, generated=above)
    assert final_score(trainer, "test").check == "not causal"
