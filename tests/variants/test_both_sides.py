"""Mechanisms that see both sides have the outputs and gradients of reference loops, with padding,
and of torch's own encoder layer."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from harness.model import LanguageModel, Residual
from tests.reference import linear
from tests.reference.attention import attention as reference
from tests.reference.both_sides import both_sides, padding
from tests.reference.performer import random_feature_product
from tests.support.attention_case import (
    DOUBLE,
    Case,
    assert_near,
    assert_outcome,
    covering_array,
    matrices,
    outcome,
    reference_output,
)
from tests.support.small_configs import plan
from variants.adaptive_span import AdaptiveSpan
from variants.all_attention import PersistentKV
from variants.attention import Attention
from variants.conformance import both, check
from variants.contract import LayerContext, Sublayer
from variants.feed_forward import FeedForward
from variants.linear import LinearAttention
from variants.longformer import Longformer
from variants.performer import Performer

pytestmark = pytest.mark.numeric
FACTORS = {
    "length": [1, 2, 7],
    "span": [1, 4, 9],
    "valid": ["all", "one", "some"],
    "position": ["none", "rotary", "alibi"],
    "spans": ["fixed", "zero", "integer", "all"],
    "persistent": [0, 3],
    "parts": ["", "gate qk_norm", "sink"],
    "kv_heads": [None, 1],
    "backend": ["plain", "chunked", "fused"],
}
BACKENDS = ["plain", "chunked", "fused"]


def valid_of(choice: str, length: int) -> list[int] | None:
    """Return numbers of bytes before padding in the two streams, or None."""
    return {"all": None, "one": [1, length], "some": [length, -(-length // 2)]}[choice]


def assert_both(sublayer: Sublayer, x: Tensor, valid: list[int] | None, expected: Tensor):
    """Assert that outputs of valid bytes, and their gradients, equal the expected ones."""
    counts = None if valid is None else torch.tensor(valid)
    actual = sublayer(x, valid=counts).y
    kept = ~padding(valid or [x.shape[1]] * len(x), length=x.shape[1])[..., None]
    named = {"x": x} | dict(sublayer.named_parameters())
    assert_outcome(outcome(actual * kept, named), outcome(expected * kept, named))


@pytest.mark.parametrize("choices", covering_array(FACTORS, strength=2), ids=str)
def test_attention_equals_loops_over_both_sides(choices):
    valid = valid_of(choices.pop("valid"), choices["length"])
    case = Case(direction="both", **choices)
    sublayer = case.build()
    past, x = case.stream()
    others = {"visible": both_sides(case.length, windows=[case.span] * case.heads)}
    if valid:
        others["hidden"] = padding(valid, length=case.length)
    expected = reference_output(sublayer, x=x, past=past, position=case.position, **others)
    assert_both(sublayer, x, valid, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("valid", [None, [11, 4], [1, 10]], ids=str)
def test_longformer_equals_loops_over_dilated_windows_of_both_sides(backend, valid):
    case = Case(direction="both", length=11, position="alibi", backend=backend)
    sublayer = case.build(
        partial(Longformer, windows=(3,), dilation=(2,), dilated_heads=2), noise=0.1
    )
    past, x = case.stream()
    visible = both_sides(case.length, windows=[3] * 3, dilations=[1, 2, 2])
    hidden = padding(valid or [11, 11], length=11)
    keywords = {"heads": 3, "span": 8, "attend_self": True, "position": "alibi", "hidden": hidden}
    expected = reference(x, **matrices(sublayer), **keywords, visible=visible)
    assert_both(sublayer, x, valid, expected)


@pytest.mark.parametrize("make", [LinearAttention, Performer])
@pytest.mark.parametrize("valid", [None, [7, 3], [1, 7]], ids=str)
def test_sums_equal_loops_over_all_keys(make, valid):
    case = Case(direction="both", length=7)
    sublayer = case.build(make, noise=0.1)
    past, x = case.stream()

    def product(head: int, query: Tensor, key: Tensor) -> Tensor:
        if make is Performer:
            return random_feature_product(sublayer.directions)(head, query, key)
        return linear.elu_plus_one(query) @ linear.elu_plus_one(key)

    common = {"heads": 3, "attend_self": True, "position": "none", "past": past}
    visible = both_sides(7, windows=[7] * 3)
    hidden = padding(valid or [7, 7], length=7)
    expected = linear.linear_attention(
        x, product=product, **matrices(sublayer), **common, visible=visible, hidden=hidden
    )
    assert_both(sublayer, x, valid, expected)


class Encoder(nn.Module):
    """One post-norm layer of ``harness/model.py``, with the weights of torch's."""

    def __init__(self, layer: nn.TransformerEncoderLayer, *, span: int, backend: str):
        super().__init__()
        context = Case(span=span, direction="both", backend=backend).context(d_model=6, heads=3)
        attention = Attention(context, bias=True).to(DOUBLE)
        block = FeedForward(context, hidden=10, activation="relu", bias=True, zero_init=False).to(
            DOUBLE
        )
        parts = layer.self_attn.in_proj_weight.chunk(3), layer.self_attn.in_proj_bias.chunk(3)
        for name, weight, bias in zip(("query", "key", "value"), *parts, strict=True):
            getattr(attention, name).load_state_dict({"weight": weight, "bias": bias})
        attention.output.load_state_dict(layer.self_attn.out_proj.state_dict())
        block.enter.load_state_dict(layer.linear1.state_dict())
        block.leave.load_state_dict(layer.linear2.state_dict())
        self.residuals = nn.ModuleList(
            Residual(sublayer, norm, norm_after=True)
            for sublayer, norm in ((attention, layer.norm1), (block, layer.norm2))
        )

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        attention, block = self.residuals
        x = attention(x, None, None, valid=valid).y
        return block(x, None, None).y


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_equals_torchs_encoder_layer_with_a_padding_mask(backend):
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(6, 3, 10, dropout=0.0, batch_first=True, dtype=DOUBLE)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 9, 6, dtype=DOUBLE, requires_grad=True)
    hidden = padding([9, 4], length=9)
    ours = Encoder(theirs, span=9, backend=backend)
    kept = ~hidden[..., None]
    expected = theirs(x, src_key_padding_mask=hidden) * kept
    actual = ours(x, torch.tensor([9, 4])) * kept
    assert_outcome(outcome(actual, {"x": x}), outcome(expected, {"x": x}), tolerance=1e-9)


PERSISTENT = partial(Attention, persistent=partial(PersistentKV, number=2), zero_init=False)


def model(layer: dict, **keywords) -> LanguageModel:
    """Return a model of two equal layers that sees both sides."""
    torch.manual_seed(0)
    case = Case(direction="both", span=5)

    def context(index: int):
        return case.context(d_model=6, heads=3, layer=index, n_layers=2)

    return LanguageModel([layer] * 2, context, vocabulary=7, **keywords)


@pytest.mark.parametrize("pooled", [False, True])
def test_padding_changes_no_prediction_and_later_bytes_do(pooled):
    tokens = torch.randint(8, (2, 9), generator=torch.Generator().manual_seed(0))
    valid = torch.tensor([9, 4])
    scored = model({"attention": PERSISTENT}, inputs=8, pooled=pooled).to(DOUBLE)
    logits = scored(tokens, valid=valid).logits
    padded = tokens.clone()
    padded[1, 4:] = (tokens[1, 4:] + 1) % 8
    same = scored(padded, valid=valid).logits
    alone = scored(tokens[1:, :4]).logits
    if not pooled:
        assert torch.equal(same[1, :4], logits[1, :4])
        assert_near(alone[0], logits[1, :4])
        changed = tokens.clone()
        changed[0, 4] = (tokens[0, 4] + 1) % 8
        assert (scored(changed, valid=valid).logits[0, 3] != logits[0, 3]).any()
    else:
        assert torch.equal(same, logits)
        assert_near(alone[0], logits[1])
    assert scored(tokens).state[1] == (None, None)


class SeesPadding(Attention):
    def forward(self, x, state=None, start=None, *, collect_stats=False, valid=None):
        return super().forward(x, state, start, collect_stats=collect_stats)


class SeesNoLaterByte(Attention):
    def attend(self, backend, q, keys, visible, **options):
        return super().attend(backend, q, keys, visible._replace(both=False), **options)


class SeesFartherThanItSays(Attention):
    def reach(self):
        return super().reach() - 1


class SeesFarBack(Attention):
    def forward(self, x, *args, **keywords):
        out = super().forward(x, *args, **keywords)
        back = self.reach() + 1
        return out._replace(y=out.y + torch.nn.functional.pad(x, (0, 0, back, 0))[:, : x.shape[1]])


MAKERS = {
    "attention": Attention,
    "adaptive span": partial(Attention, span=partial(AdaptiveSpan, ramp=3, initial=0.5)),
    "persistent": partial(Attention, persistent=partial(PersistentKV, number=3)),
    "longformer": partial(Longformer, windows=(3, 4), dilation=(1, 2)),
    "linear": LinearAttention,
    "performer": Performer,
}
CAUSAL = r"objective\.direction=both: variant\.attention \(\w+\) supports only causal"
ONLY_THE_PAST = dict.fromkeys(
    [
        "reformer",
        "linformer",
        "local",
        "latent",
        "nsa",
        "differential",
        "transformer_xl",
        "gated_delta",
        "gated_linear",
        "perceiver_ar",
        "forget_gate",
        "dynamic_span",
    ],
    CAUSAL,
) | {"linear_decay": "position=alibi: lowers scores by a slope"}
BROKEN = {
    SeesPadding: "padding does not matter",
    SeesNoLaterByte: "later bytes matter",
    SeesFartherThanItSays: "no byte beyond the declared reach matters",
    SeesFarBack: "no byte beyond the declared reach matters",
}


def broken_promises(make) -> list[str]:
    """Return the promises that a model with these sublayers breaks."""
    checked = {"span": 5, "vocabulary": 7, "checks": both.CHECKS}
    findings = check(lambda: model({"attention": make}), **checked)
    return [finding.promise for finding in findings if not finding.passed]


@pytest.mark.parametrize("name", MAKERS)
def test_mechanisms_keep_the_promises_of_both_sides(name):
    assert not broken_promises(MAKERS[name])


@pytest.mark.parametrize("broken", BROKEN)
def test_a_mechanism_that_breaks_a_promise_of_both_sides_is_found(broken):
    assert BROKEN[broken] in broken_promises(broken)


@pytest.mark.parametrize("name", ONLY_THE_PAST)
def test_a_variant_that_sees_only_the_past_refuses_both_sides_by_name(name):
    planned = plan(f"variant={name}")
    sizes = {key: getattr(planned.model, key) for key in ("d_model", "heads", "span")}
    context = LayerContext(
        layer=0, n_layers=len(planned.layers), scheme=planned.scheme, direction="both", **sizes
    )
    with pytest.raises(ValueError, match=ONLY_THE_PAST[name]):
        for layer in planned.layers:
            for make in layer.values():
                make(context)
