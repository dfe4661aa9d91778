"""Every shipped variant keeps the contract at small sizes and, in tests marked ``faults``, with
other choices."""

import json

import pytest
import torch

from harness.check.conformance import findings
from harness.check.small import shrink
from harness.plan.build import Plan
from tests.support.small_configs import CPU, VARIANT_NAMES, plan

HIDDEN = ("model.cache=hidden", "model.attend_self=false")
OTHER_CHOICES = {
    "compressed": ("position=relative", *HIDDEN),
    "compressed_top_k": ("position=alibi", *HIDDEN),
    "differential": ("position=relative", *HIDDEN),
    "gated_delta": ("position=none", "model.attend_self=false"),
    "gated_linear": ("position=sinusoidal", "model.attend_self=false"),
    "latent": ("position=alibi", "model.attend_self=false"),
    "linear": ("position=alibi", "model.attend_self=false"),
    "linformer": ("position=none", *HIDDEN),
    "local": ("position=alibi", *HIDDEN),
    "longformer": ("position=relative", *HIDDEN),
    "nsa": ("position=none", "model.attend_self=false"),
    "perceiver_ar": ("position=alibi", "model.cache=hidden"),
    "performer": ("position=alibi", "model.attend_self=false"),
    "reformer": ("position=alibi", *HIDDEN),
    "transformer_xl": ("position=sinusoidal", "model.cache=kv", "model.attend_self=false"),
}
SHIFT = "variant.attention.key_shift=true"
SHIFTED = [
    (variant, (SHIFT, *words)) for variant, words in OTHER_CHOICES.items() if variant != "reformer"
]
SHIFTED.append(("transformer_xl", (SHIFT,)))
OTHER = [
    pytest.param(*choices, marks=pytest.mark.faults)
    for choices in [*OTHER_CHOICES.items(), *SHIFTED]
]
IRRELEVANT_KEYS = ("name", "numerics", "lr_scale", "groups", "small")
"""Keys of a variant that cannot change the outcome of a check."""
BROKEN_PROMISES: dict[str, list[str]] = {}
"""Broken promises by checked configuration. Variants that are equal at small sizes are checked
once."""


def broken(plan: Plan) -> list[str]:
    """Return the broken promises of a plan, shrunk to small sizes."""
    small = shrink(plan)
    variant = {
        name: node for name, node in small.config["variant"].items() if name not in IRRELEVANT_KEYS
    }
    key = json.dumps([variant, small.config["model"], small.config["position"]])
    if key not in BROKEN_PROMISES:
        BROKEN_PROMISES[key] = [str(finding) for finding in findings(small) if not finding.passed]
    return BROKEN_PROMISES[key]


@pytest.mark.parametrize(
    "variant, words", [*((variant, ()) for variant in VARIANT_NAMES), *OTHER], ids=str
)
def test_every_variant_keeps_the_contract(variant, words):
    random = torch.get_rng_state()
    assert broken(plan(f"variant={variant}", "runtime.precision=float32", *CPU, *words)) == []
    assert torch.equal(torch.get_rng_state(), random), "the check changed the caller's random state"
