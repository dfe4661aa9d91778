"""Text that a model writes, byte after byte: the very bytes that one forward over the whole text would choose."""

import itertools

import pytest
import torch

from bench.cost_worker import learned_spans, shake_
from harness.loop.sampling import draw, numbers_of, sampled
from tests.small_configs import TINY, plan, small

VARIANTS = ("adaptive_span_memory", "compressed")
"""Of every kind of carried state."""
PROMPT = torch.randint(256, (29,), generator=torch.Generator().manual_seed(0))


def network(variant: str, *words: str):
    torch.manual_seed(0)
    model = plan(f"variant={variant}", *TINY, "model.span=24", *small(variant), *words).make_model().double()
    shake_(model)
    for part in learned_spans(model):  # off the kinks of whole keys
        part.place_([keys + 0.5 for keys in part.metrics({})["span"].tolist()])
    return model.eval()


@torch.no_grad()
def drawn_by_hand(model, text: torch.Tensor, number: int, **choice) -> list[int]:
    """As a forward over all that there is so far has the next byte."""
    generator, numbers = torch.Generator().manual_seed(3), text.tolist()
    for _ in range(number):
        logits = model(torch.tensor([numbers])).logits[0, -1]
        numbers.append(draw(logits, generator=generator, **choice))
    return numbers[len(text) :]


@pytest.mark.parametrize("variant", VARIANTS)
def test_streamed_text_is_that_of_whole_forwards(variant):
    model, choice = network(variant), {"temperature": 0.7, "top_k": 9}
    streamed = sampled(model, PROMPT, symbols=256, generator=torch.Generator().manual_seed(3), **choice)
    assert list(itertools.islice(streamed, 14)) == drawn_by_hand(model, PROMPT, 14, **choice)


def test_a_long_prompt_is_read_in_segments_and_no_number_without_a_byte_is_drawn():
    model, prompt = network("mhsa"), PROMPT.repeat(40)
    choice = {"temperature": 0, "top_k": None}
    drawn = sampled(model, prompt, symbols=256, **choice)
    assert list(itertools.islice(drawn, 3)) == drawn_by_hand(model, prompt, 3, **choice)
    few = itertools.islice(sampled(model, PROMPT % 7, symbols=7, temperature=100.0), 200)
    assert set(few) == set(range(7))


def test_choices_narrow_what_is_drawn():
    logits, generator = torch.tensor([0.1, 0.5, 0.2, 0.15, 0.05]).log().double(), torch.Generator().manual_seed(0)
    for top_k, allowed in ((3, {1, 2, 3}), (None, set(range(5)))):
        choice = {"temperature": 1.0, "top_k": top_k, "generator": generator}
        assert {draw(logits, **choice) for _ in range(300)} == allowed
    with pytest.raises(ValueError, match="not finite"):
        draw(logits * float("nan"), **choice)
    with pytest.raises(ValueError, match="top_k=0: must be"):
        next(sampled(network("mhsa"), PROMPT, symbols=256, top_k=0))


def test_a_mechanism_without_a_state_and_a_byte_that_the_vocabulary_lacks_are_refused_by_name():
    batch = network("product_key_memory", "variant.memory.query_norm=batch")
    with pytest.raises(ValueError, match=r"layers\.\d\.memory \(ProductKeyMemory\) has the limit `segments`"):
        next(sampled(batch, PROMPT, symbols=256))
    assert numbers_of(b"ba", b"ab", key="prompt").tolist() == [1, 0]
    with pytest.raises(ValueError, match=r"prompt: has byte 99 \('c'\), which is not among the 2 of the model"):
        numbers_of(b"abc", b"ab", key="prompt")
    with pytest.raises(ValueError, match="prompt: is empty"):
        numbers_of(b"", b"ab", key="prompt")
