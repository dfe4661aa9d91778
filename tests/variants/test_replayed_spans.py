"""Replayed spans: fixed windows with the spans that another run learned, from a configuration or
from that run."""

import pytest
import torch

from tests.support.small_configs import TINY, plan
from tests.support.small_runs import (
    VARIANTS,
    make_run,
    make_trainer,
    temporary_cwd,  # noqa: F401 - a fixture
    whole_run,
)
from variants.attention import Attention

SPANS = [[0.0, 5.5], [3.0, 16.0]]
CONFIGURED = (
    "variant=replayed_spans",
    "variant.attention.span.ramp=4",
    f"variant.attention.span.spans={SPANS}",
)


def spans_of(model) -> list:
    return [sublayer.span for _, sublayer in model.sublayers() if isinstance(sublayer, Attention)]


def lengths_of(model) -> list:
    return [spans.metrics({})["span"].tolist() for spans in spans_of(model)]


@pytest.mark.numeric
def test_replayed_spans_equal_learned_spans_of_the_same_length_and_training_does_not_change_them():
    trainer, learned = make_trainer(*CONFIGURED), make_trainer(*VARIANTS["adaptive_span"]).model
    fixed = trainer.model
    # the buffer of fixed spans has the name of the learned parameter
    learned.load_state_dict(fixed.state_dict())
    learned.project_()
    assert lengths_of(fixed) == SPANS
    assert [spans.max_keys for spans in spans_of(fixed)] == [
        spans.max_keys for spans in spans_of(learned)
    ]
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    for _, sublayer in (*fixed.sublayers(), *learned.sublayers()):
        # projections that start at zero would hide the windows
        for parameter in sublayer.parameters():
            if parameter.dim() > 1 and not parameter.any():
                torch.nn.init.eye_(parameter)
    assert torch.equal(fixed.eval()(tokens).logits, learned.eval()(tokens).logits)
    assert fixed.ideal_flops() == learned.ideal_flops()
    assert fixed.train()(tokens).loss == 0
    trainer.step()
    assert lengths_of(fixed) == SPANS


@pytest.mark.numeric
def test_integer_spans_with_a_ramp_of_one_are_a_hard_window():
    words = ("variant=replayed_spans", "variant.attention.span.ramp=1")
    soft = plan(*TINY, *words, "variant.attention.span.spans=[[7,7],[7,7]]").make_model()
    hard = plan(*TINY, "variant=mhsa", "model.span=8").make_model()
    for model in (soft, hard):
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(256, (2, 50), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(soft.eval()(tokens).logits, hard.eval()(tokens).logits, atol=1e-5)


def test_init_from_a_finished_run_takes_its_spans_unless_spans_are_configured(cwd):
    learning, _ = whole_run(
        *VARIANTS["adaptive_span"], "budget.steps=2", "variant.attention.span.initial=0.4"
    )
    source = (f"init_from.run={learning.folder.path}", "budget.steps=2")
    replaying = make_run("variant=replayed_spans", "variant.attention.span.ramp=4", *source).trainer
    learned = lengths_of(learning.trainer.model)
    assert lengths_of(replaying.model) == learned
    replaying.step()
    assert lengths_of(replaying.model) == learned
    assert not any(name.endswith("fraction") for name, _ in replaying.model.named_parameters())
    configured = make_run(*CONFIGURED, *source).trainer.model
    assert lengths_of(configured) == SPANS
    assert torch.equal(configured.embedding.weight, learning.trainer.model.embedding.weight)


@pytest.mark.parametrize(
    "spans", ["[[1,2]]", "[[1,2],[3]]", "[1,2]", "[[1,2],[3,17]]", "[[1,2],[3,-1]]"]
)
def test_invalid_spans_are_refused_with_the_key_and_the_requirement(spans):
    message = (
        r"variant\.attention.*span\.spans=.*(2 lists.*2 spans|from 0 to "
        r"model\.span=16)|spans\.0=1: must be a list"
    )
    with pytest.raises(ValueError, match=message):
        plan(*TINY, "variant=replayed_spans", f"variant.attention.span.spans={spans}").make_model()
