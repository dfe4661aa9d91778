"""Gate: every variant of ours keeps the contract at the small sizes on which cost, fit and peers insist, and every mechanism does
with the choices that are not its variant's; ``test_conformance.py`` has all pairs of choices for plain attention."""

import pytest
import torch

from tests.composing import CONF, plan
from tests.test_check import gate

VARIANTS = sorted(path.stem for path in (CONF / "variant").glob("*.yaml"))
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
    "perceiver_ar": ("position=alibi", "model.cache=hidden"),
    "performer": ("position=alibi", "model.attend_self=false"),
    "reformer": ("position=alibi", *HIDDEN),
    "transformer_xl": ("position=sinusoidal", "model.cache=kv", "model.attend_self=false"),
}


@pytest.mark.parametrize(
    ("variant", "words"), [*((variant, ()) for variant in VARIANTS), *OTHER_CHOICES.items()], ids=str
)
def test_every_variant_may_be_measured(variant, words):
    own = ("runtime.device=cpu", "runtime.precision=float32", "runtime.threads=1")
    random = torch.get_rng_state()
    assert [str(finding) for finding in gate(plan(f"variant={variant}", *own, *words))] == []
    assert torch.equal(torch.get_rng_state(), random), "the caller's random numbers"
