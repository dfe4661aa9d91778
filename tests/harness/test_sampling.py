"""Sampling byte by byte with a carried state gives the bytes of forward passes over the whole
text."""

import itertools

import pytest
import torch

from bench.cost_worker import add_noise_, learned_spans
from harness.loop.sampling import draw, generate, token_ids
from tests.support.small_configs import TINY, plan, small

VARIANTS = ("adaptive_span_memory", "compressed")
"""Variants whose sublayers carry keys and values, summaries, or nothing."""
PROMPT = torch.randint(256, (29,), generator=torch.Generator().manual_seed(0))


def network(variant: str, *words: str):
    torch.manual_seed(0)
    model = (
        plan(f"variant={variant}", *TINY, "model.span=24", *small(variant), *words)
        .make_model()
        .double()
    )
    add_noise_(model)
    for part in learned_spans(model):  # the mask has kinks at integer spans
        part.place_([keys + 0.5 for keys in part.metrics({})["span"].tolist()])
    return model.eval()


@torch.no_grad()
def sampled_naively(model, text: torch.Tensor, n_bytes: int, **choice) -> list[int]:
    """Sample ``n_bytes`` bytes after ``text``, each from a forward pass over the whole text
    before it."""
    generator, tokens = torch.Generator().manual_seed(3), text.tolist()
    for _ in range(n_bytes):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(draw(logits, generator=generator, **choice))
    return tokens[len(text) :]


@pytest.mark.parametrize("variant", VARIANTS)
def test_sampling_with_a_carried_state_equals_sampling_from_whole_forward_passes(variant):
    model, choice = network(variant), {"temperature": 0.7, "top_k": 9}
    streamed = generate(
        model, PROMPT, n_symbols=256, generator=torch.Generator().manual_seed(3), **choice
    )
    assert list(itertools.islice(streamed, 14)) == sampled_naively(model, PROMPT, 14, **choice)


def test_a_long_prompt_is_read_in_segments_and_only_tokens_with_a_byte_are_drawn():
    model, prompt = network("mhsa"), PROMPT.repeat(40)
    choice = {"temperature": 0, "top_k": None}
    drawn = generate(model, prompt, n_symbols=256, **choice)
    assert list(itertools.islice(drawn, 3)) == sampled_naively(model, prompt, 3, **choice)
    few = itertools.islice(generate(model, PROMPT % 7, n_symbols=7, temperature=100.0), 200)
    assert set(few) == set(range(7))


def test_top_k_restricts_the_drawn_tokens_and_invalid_values_are_refused():
    logits, generator = (
        torch.tensor([0.1, 0.5, 0.2, 0.15, 0.05]).log().double(),
        torch.Generator().manual_seed(0),
    )
    for top_k, allowed in ((3, {1, 2, 3}), (None, set(range(5)))):
        choice = {"temperature": 1.0, "top_k": top_k, "generator": generator}
        assert {draw(logits, **choice) for _ in range(300)} == allowed
    with pytest.raises(ValueError, match="not finite"):
        draw(logits * float("nan"), **choice)
    with pytest.raises(ValueError, match="top_k=0: must be"):
        next(generate(network("mhsa"), PROMPT, n_symbols=256, top_k=0))


def test_a_mechanism_without_a_state_and_a_byte_outside_of_the_vocabulary_are_refused_by_name():
    model = network("product_key_memory", "variant.memory.query_norm=batch")
    with pytest.raises(
        ValueError, match=r"layers\.\d\.memory \(ProductKeyMemory\) has the limit `segments`"
    ):
        next(generate(model, PROMPT, n_symbols=256))
    assert token_ids(b"ba", b"ab", key="prompt").tolist() == [1, 0]
    with pytest.raises(
        ValueError,
        match=r"prompt: has byte 99 \('c'\), which is not among the 2 bytes of the model",
    ):
        token_ids(b"abc", b"ab", key="prompt")
    with pytest.raises(ValueError, match="prompt: is empty"):
        token_ids(b"", b"ab", key="prompt")
