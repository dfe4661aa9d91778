"""A torch module of an installed package as a sublayer, by YAML alone. The fixture ``layers``
installs a package."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from harness.check import admission
from harness.plan.build import plan_run
from harness.plan.targets import resolve
from tests.support.command_line import GENERATED, ROOT, run_folders, train
from tests.support.command_line import empty_folder as cwd  # noqa: F401 - a fixture
from tests.support.promises import FUTURE_EVAL, FUTURE_TRAIN, SEGMENTS, findings_of, model_of
from tests.support.small_configs import compose_config
from variants.any_module import AnyModule
from variants.contract import Honours, LayerContext, Position, Sublayer

PACKAGE = """import torch
from torch import nn
from torch.nn import Linear


class Mean(nn.Module):
    \"\"\"The mean of the bytes so far or, if not causal, of all: [B, T, D] to [B, T, D].\"\"\"

    def __init__(
        self, dim, *, width: int = 16, causal=True, out_dim=None, returns_tuple: bool = False,
        table=None,
    ):
        super().__init__()
        self.into, self.out = nn.Linear(dim, width), nn.Linear(width, out_dim or dim)
        self.causal, self.returns_tuple = causal, returns_tuple

    def forward(self, x):
        h = self.into(x)
        counts = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)[:, None]
        y = self.out(h.cumsum(1) / counts if self.causal else h.mean(1, keepdim=True).expand_as(h))
        return (y, {"counts": counts}) if self.returns_tuple else y


class Window(nn.Module):
    \"\"\"The sum of the last bytes, with or without the byte itself.\"\"\"

    def __init__(self, dim, window: int = 4, itself: bool = True):
        super().__init__()
        self.out, self.window, self.itself = nn.Linear(dim, dim), window, itself

    def forward(self, x):
        distances = range(not self.itself, self.window + (not self.itself))
        first = [torch.arange(min(n, x.shape[1])) for n in distances]
        shifted = [x.roll(n, 1).index_fill(1, at, 0.0) for n, at in zip(distances, first)]
        return self.out(sum(shifted))


def exploding(*_):
    raise SystemExit("it was called")
"""
NAME = "someones_layers"


@pytest.fixture(name="layers")
def installed(tmp_path, monkeypatch):
    """Put a package on the search path. Returns a function that imports it; the test's end
    undoes the import."""
    (tmp_path / "installed" / NAME).mkdir(parents=True)
    (tmp_path / "installed" / NAME / "__init__.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    yield lambda: __import__(NAME)
    sys.modules.pop(NAME, None)


def write_yaml(**keywords):
    """Write a sublayer and a variant into ``my_conf`` of the current folder."""
    sublayer = (
        "_target_: variants.any_module.AnyModule\n_partial_: true\nhonours: {}\nlimits: "
        "[segments]\nmodule:\n"
    )
    sublayer += f"  _target_: {NAME}.Mean\n  dim: ${{model.d_model}}\n"
    sublayer += "".join(f"  {name}: {json.dumps(value)}\n" for name, value in keywords.items())
    variant = (
        "# @package _global_\ndefaults:\n  - /sublayer@variant.mixer: mine\n  - override "
        "/position: none\n"
    )
    variant += "variant: {name: mine, layers: [mixer], at: {}, groups: {}}\n"
    for folder, text in {"sublayer": sublayer, "variant": variant}.items():
        Path("my_conf", folder).mkdir(parents=True, exist_ok=True)
        Path("my_conf", folder, "mine.yaml").write_text(text)


WORDS = ("-cd", "my_conf", *GENERATED, "variant=mine", "budget.steps=2")
TRUSTED = (*WORDS, f"trust=[{NAME}]")


def resolve_adapter(node: object):
    """Return ``AnyModule`` with the keywords of a configuration whose key ``module`` is
    ``node``."""
    adapter = {
        "_target_": "variants.any_module.AnyModule",
        "_partial_": True,
        "honours": {},
        "module": node,
    }
    return resolve(adapter, key="variant.mixer", base=Sublayer, trust=(NAME,))


def node(target: str = f"{NAME}.Mean", **keywords) -> dict:
    return {"_target_": target, "dim": 16, **keywords}


def test_a_module_of_a_package_trains_by_yaml_alone(cwd, layers):  # noqa: F811
    write_yaml(width=24, returns_tuple=True)
    outcome = train(*TRUSTED, "batch.carry=true")
    assert outcome.code == 0, outcome
    (run,) = run_folders(cwd / "outputs")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["memory"]["state_bytes"]) == (
        "finished",
        2,
        8,
    )
    assert summary["parameters"]["by_sublayer"]["layers.1.mixer"] == (32 + 1) * 24 + (24 + 1) * 32
    # Only the FLOPs of its matrices are known. A step is estimated as three forwards and marked as
    # an estimate.
    assert (
        summary["flops_estimated_3x"] == ["layers.0.mixer", "layers.1.mixer"]
        and "about" in outcome.out
    )
    assert summary["flops_per_byte"]["ideal"] == 2 * (2 * 2 * 32 * 24 + 32 * 256)


@pytest.mark.parametrize(
    "keywords, words, message",
    [
        (
            {},
            WORDS,
            rf"mixer\.module\._target_={NAME}\.Mean: allowed are classes of modules that the "
            r"command line names",
        ),
        (
            {"widht": 3},
            TRUSTED,
            r"mixer\.module\.widht=3: no such key .*; allowed are dim, width, causal, out_dim",
        ),
        (
            {"out_dim": 8},
            TRUSTED,
            r"Mean: maps \(\d+, \d+, 32\) to \(\d+, \d+, 8\); .* \[B, T, D\] to \[B, T, D\]",
        ),
    ],
)
def test_a_mistake_ends_with_exit_code_2_and_writes_no_file(
    cwd,  # noqa: F811
    layers,
    keywords,
    words,
    message,
):
    write_yaml(**keywords)
    outcome = train(*words)
    assert outcome.code == 2 and re.search(message, outcome.err), outcome.err
    assert len(outcome.err.splitlines()) == 1 and not (cwd / "outputs").exists()
    if words is not TRUSTED:
        assert NAME not in sys.modules, "a package without trust must not be imported"


@pytest.mark.parametrize(
    "refused_node, message",
    [
        (node("torch.nn.Identity"), "allowed are classes of someones_layers"),
        (
            node(f"{NAME}.Linear"),
            "is defined in torch.nn.modules.linear; allowed are classes of someones",
        ),
        (node(f"{NAME}.exploding"), "must be a class derived from torch.nn"),
        (
            node(table={"deep": [{"_target_": f"{NAME}.exploding"}]}),
            "must be plain values without _target_",
        ),
    ],
)
def test_a_module_is_accepted_only_under_the_key_module_and_from_trusted_packages(
    layers, refused_node, message
):
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_adapter(refused_node)
    module = node(_partial_=True)
    host = {"_target_": "variants.attention.Attention", "_partial_": True, "persistent": module}
    for sublayer in (module, host):
        with pytest.raises(
            ValueError,
            match=r"_target_=someones_layers\.Mean: must be a class derived from variants",
        ):
            resolve(sublayer, key="variant.mixer", base=Sublayer, trust=(NAME,))


def adapted(**keywords) -> AnyModule:
    """Return ``AnyModule`` in a network of width 16 with a span of 8."""
    common = {"d_model": 16, "layer": 0, "n_layers": 1, "heads": 2, "span": 8, "scheme": Position}
    return AnyModule(LayerContext(attend_self=False, **common), **{"honours": {}} | keywords)


@pytest.mark.parametrize(
    "promise, message",
    [
        (
            {"limits": ("segments", "streams")},
            r"limits=\['segments', 'streams'\]: there is no limit streams; allowed",
        ),
        (
            {"honours": {"cache": ["kv"]}},
            r"honours\.cache=\['kv'\]: .*; allowed are attend_self, span",
        ),
        (
            {"honours": {"span": "widow"}},
            r"honours\.span=widow: must be the keyword of .*Window .*; allowed are dim",
        ),
        ({"reach": 3, "honours": None}, r"reach=3: with honours=null it sees no byte but its own"),
        (
            {"module": partial(nn.MultiheadAttention, 16, 2)},
            r"module=.*: its forward needs other .*argument: 'key'\)",
        ),
    ],
)
def test_an_impossible_declaration_is_refused_by_its_key(layers, promise, message):
    with pytest.raises(ValueError, match=message):
        adapted(**{"module": partial(layers().Window, dim=16)} | promise)


def test_the_declarations_in_the_yaml_become_those_of_the_sublayer(layers):
    window = partial(layers().Window, dim=16, window=3)
    plain = adapted(module=window, limits=("segments", "streams_apart"))
    assert (
        plain.honours == Honours()
        and plain.reach() is None
        and plain.limits == {"segments", "streams_apart"}
    )
    assert (plain.module.window, plain.module.itself) == (3, True)
    adapter = adapted(
        module=window, honours={"attend_self": "itself", "span": "window"}, reach=7, period=4
    )
    assert adapter.honours == Honours(attend_self={True, False}, span=True)
    assert (adapter.reach(), adapter.period, adapter.module.window, adapter.module.itself) == (
        7,
        4,
        8,
        False,
    )
    plain.set_span(9)
    with pytest.raises(
        ValueError, match=r"eval\.span=9: .*Window keeps the span that it was built with, 8"
    ):
        adapter.set_span(9)
    bytewise = adapted(module=nn.Identity, honours=None)
    assert bytewise.honours is None and bytewise.reach() == 0


@pytest.mark.parametrize(
    "limits, keywords, broken",
    [
        (("segments",), {}, set()),
        ((), {}, {SEGMENTS}),
        (("segments",), {"causal": False}, {FUTURE_EVAL, FUTURE_TRAIN}),
    ],
)
def test_the_conformance_suite_checks_the_declarations_of_a_module(
    layers, limits, keywords, broken
):
    findings = findings_of(model_of(partial(resolve_adapter(node(**keywords)), limits=limits)))
    assert {promise for promise, finding in findings.items() if not finding.passed} == broken


@pytest.mark.parametrize(
    "target, broken",
    [
        ("my_layers.CausalAttention, dim: 32, heads: 2", None),
        ("my_layers.CausalLayer, dim: 32, heads: 2", None),
        (
            "torch.nn.TransformerEncoderLayer, d_model: 32, nhead: 2, dropout: 0.0, batch_first: "
            "true",
            FUTURE_EVAL,
        ),
    ],
)
def test_the_documented_wrappers_of_torchs_layers_keep_the_contract(
    target, broken, tmp_path, monkeypatch
):
    page = (ROOT / "docs" / "any_module.md").read_text()
    (tmp_path / "my_layers.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(admission, "WINDOWS", (4, 128))
    node = (
        f"{{_target_: variants.any_module.AnyModule, _partial_: true, module: {{_target_: "
        f"{target}}}, honours: {{}}"
    )
    words = (
        f"+variant.toy={node}, limits: [segments, ideal_flops]}}",
        "variant.name=mine",
        "variant.layers=[toy]",
    )
    sizes = (
        "model.d_model=32",
        "model.heads=2",
        "model.layers=2",
        "model.span=16",
        "batch.segment=64",
        "eval.segment=64",
    )
    plan = plan_run(
        compose_config("data=recall", "position=none", *words, *sizes),
        trusted=("my_layers", "torch"),
    )
    finding = next((finding for finding in admission.findings(plan) if not finding.passed), None)
    assert (finding and finding.promise) == broken, finding
    if broken:
        assert re.match(r"changing bytes 1 to \d+ moved the output at byte 0 by", finding.detail)
    sys.modules.pop("my_layers", None)
