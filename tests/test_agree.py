"""``python -m bench.agree``: what agrees passes, what cannot run is refused, and a wrong gradient fails."""

import torch

from tests.command import call
from tests.command import empty_folder as here  # noqa: F401 - a fixture
from variants.kernels import window

QUICK = ("settings=[rotary-kv]", "precisions=[float32]", "runtime.device=cpu", "runtime.threads=1", "data.bytes=20000")


def test_variants_agree_and_what_cannot_run_is_refused(here):  # noqa: F811
    ended = call("bench/agree.py", "variants=[adaptive_span,dynamic_span]", "paths=[plain,fused]", *QUICK)
    assert ended.code == 0, ended.out + ended.err
    lines = ended.out.splitlines()
    assert [line.split()[0] for line in lines] == ["pass", "pass", "pass", "refused"]
    assert "adaptive_span, rotary-kv, fused, float32, eager" in lines[1] and "at most 0.001" in lines[1]


def test_a_wrong_gradient_fails_with_the_parameters_name(here, monkeypatch):  # noqa: F811
    inner = window.attend

    def wrong(q, k, v, *arguments, **keywords):
        return inner(q.detach() if q.dtype == torch.float32 else q, k, v, *arguments, **keywords)

    monkeypatch.setattr(window, "attend", wrong)
    ended = call("bench/agree.py", "variants=[mhsa]", "paths=[plain]", *QUICK)
    assert ended.code == 1 and ended.out.startswith("FAIL") and "query.weight" in ended.out
