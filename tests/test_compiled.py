"""Variants of each kind compiled: steps with carried state give the numbers of the uncompiled ones.

What breaks from one version of torch to the next is how Python is followed, so the graphs are run as they are (backend
``eager``); ``test_step.py`` generates code for one variant.
"""

import pytest
import torch

from harness.runtime import Runtime
from tests.runs import CARRY, MEMORY, make_run, own_folder, restored  # noqa: F401 - fixtures

VARIANTS = {"adaptive_span": "hidden", "all_attention": "kv"}
PATHS = {"kv": ("position=rotary", "model.cache=kv"), "hidden": ("position=relative", "model.cache=hidden")}


def forward(runtime: Runtime, model: torch.nn.Module):
    return torch.compile(model, backend="eager") if runtime.compile else model


@pytest.mark.parametrize(("variant", "cache"), VARIANTS.items())
def test_a_compiled_variant_trains_as_it_does_uncompiled(variant, cache, monkeypatch):
    monkeypatch.setattr(Runtime, "forward", forward)
    memory = MEMORY if "memory" in variant else ()
    words = (f"variant={variant}", *memory, *PATHS[cache], *CARRY, "optim=adamw", "runtime.path=plain")
    found = {}
    for compiled in (False, True):
        torch.compiler.reset()
        run = make_run(*words, f"runtime.compile={compiled}", "runtime.precision=bfloat16")
        for _ in range(3):
            run.step()
        found[compiled] = [run.train_row()["bits_per_byte"], *(p.sum().item() for p in run.model.parameters())]
    assert found[True] == pytest.approx(found[False], rel=2e-2, abs=2e-2)
