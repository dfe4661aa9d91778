"""Any module of a package as a variant, by YAML alone: a package that this test writes stands for an installed one."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.choices import follows
from harness.optim.parameter_groups import assign
from harness.plan.build import plan_run
from harness.plan.instantiate import resolve
from tests.command import MADE, run_folders, train
from tests.command import empty_folder as here  # noqa: F401 - a fixture
from tests.composing import TINY, compose_config
from tests.promises import FUTURE_EVAL, FUTURE_TRAIN, SEGMENTS, findings_of, model_of
from variants.any_module import AnyModule
from variants.conformance.fixture import Subject
from variants.conformance.sizes import reach
from variants.contract import Honours, LayerContext, Position, Sublayer

PACKAGE = """import torch
from torch import nn
from torch.nn import Linear

from variants.contract import Sublayer


class Mean(nn.Module):
    \"\"\"The mean of the bytes so far, or of all: [B, T, D] to [B, T, D].\"\"\"

    def __init__(self, dim, *, width: int = 16, causal=True, out_dim=None, several: bool = False, table=None):
        super().__init__()
        if width < 1:
            raise AssertionError("width must be positive")
        self.into, self.out = nn.Linear(dim, width), nn.Linear(width, out_dim or dim)
        self.causal, self.several = causal, several

    def forward(self, x):
        h = self.into(x)
        place = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)[:, None]
        y = self.out(h.cumsum(1) / place if self.causal else h.mean(1, keepdim=True).expand_as(h))
        return (y, {"seen": place}) if self.several else y


class Window(nn.Module):
    \"\"\"The sum of the last bytes, with or without a byte itself.\"\"\"

    def __init__(self, dim, window: int = 4, itself: bool = True):
        super().__init__()
        self.out, self.window, self.itself = nn.Linear(dim, dim), window, itself

    def forward(self, x):
        return self.out(sum(x.roll(n, 1).index_fill(1, torch.arange(min(n, x.shape[1])), 0.0) for n in self.distances()))

    def distances(self):
        return range(not self.itself, self.window + (not self.itself))


class Annotated(Mean):
    def __init__(self, dim: "NoSuchType", **options):
        super().__init__(dim, **options)


class Deaf(Mean):
    def __init__(self, dim, **options):
        super().__init__(dim)


class Told(nn.Module):
    def forward(self, x):
        return {"y": x}


class Nothing(nn.Module):
    def forward(self, x):
        return ()


class Kept(Sublayer):
    def __init__(self, context):
        super().__init__()


def exploding(*_):
    raise SystemExit("it was called")
"""
NAME = "someones_layers"


@pytest.fixture(name="layers")
def installed(tmp_path, monkeypatch):
    """The package, imported from where Python finds it; forgotten afterwards."""
    (tmp_path / "installed" / NAME).mkdir(parents=True)
    (tmp_path / "installed" / NAME / "__init__.py").write_text(PACKAGE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    yield lambda: __import__(NAME)
    sys.modules.pop(NAME, None)


def asked(target: str = f"{NAME}.Mean", *, honours: object = "{}", more: str = "limits: [segments]", **given) -> None:
    """What a user writes into ``my_conf`` of the current folder."""
    keywords = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in given.items())
    sublayer = f"_target_: variants.any_module.AnyModule\n_partial_: true\nhonours: {honours}\n{more}\nmodule:\n"
    sublayer += f"  _target_: {target}\n  dim: ${{model.d_model}}\n" + keywords
    variant = "# @package _global_\ndefaults:\n  - /sublayer@variant.mixer: mine\n  - override /position: none\n"
    variant += "variant: {name: mine, layers: [mixer], at: {}, groups: {}}\n"
    for folder, text in {"sublayer": sublayer, "variant": variant}.items():
        Path("my_conf", folder).mkdir(parents=True, exist_ok=True)
        Path("my_conf", folder, "mine.yaml").write_text(text, encoding="utf-8")


MINE = ("-cd", "my_conf", *MADE, "variant=mine", "budget.steps=2")
TRUSTED = (*MINE, f"trust=[{NAME}]")


def made(node: object, *, trust: tuple[str, ...] = (NAME,)):
    """The adapter as it is configured."""
    own = {"_target_": "variants.any_module.AnyModule", "_partial_": True, "honours": {}, "module": node}
    return resolve(own, key="variant.mixer", kind=Sublayer, trust=trust)


def node(target: str = f"{NAME}.Mean", **given) -> dict:
    return {"_target_": target, "dim": 16, **given}


def test_a_package_trains_by_yaml_alone(here, layers):  # noqa: F811
    asked(width=24, several=True)
    ended = train(*TRUSTED, "batch.carry=true")
    assert ended.code == 0, ended
    (run,) = run_folders(here / "outputs")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["steps"], summary["memory"]["state_bytes"]) == ("finished", 2, 8)
    own = (32 + 1) * 24 + (24 + 1) * 32
    assert summary["parameters"]["by_sublayer"]["layers.1.mixer"] == own
    # Only matrices are known, so it is charged for what they take, thrice, and the number says so.
    assert summary["flops_estimated_3x"] == ["layers.0.mixer", "layers.1.mixer"] and "about" in ended.out
    assert summary["flops_per_byte"]["ideal"] == 2 * (2 * 2 * 32 * 24 + 32 * 256)


def test_what_nobody_trusts_is_not_imported(here, layers):  # noqa: F811
    asked()
    ended = train(*MINE)
    assert ended.code == 2 and NAME not in sys.modules
    said = f"variant.mixer.module._target_={NAME}.Mean: allowed are classes of modules that the command line names; add yours"
    assert said in ended.err and len(ended.err.splitlines()) == 1 and not (here / "outputs").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"widht": 3},
            r"variant\.mixer\.module\.widht=3: no such key of Mean; allowed are dim, width, causal, out_dim",
        ),
        (
            {"width": -1},
            r"variant\.mixer\.module=.*Mean: cannot be built with dim=32, width=-1 \(AssertionError: width mu",
        ),
        (
            {"honours": "{position: [rotate]}"},
            r"mixer\.honours\.position=\['rotate'\]: .*told no positions.* attend_self, span",
        ),
        ({"out_dim": 8}, r"module=.*Mean: maps \(\d+, \d+, 32\) to \(\d+, \d+, 8\); .* \[B, T, D\] to \[B, T, D\]"),
    ],
)
def test_a_mistake_ends_with_2_and_leaves_nothing(here, layers, given, said):  # noqa: F811
    asked(**given)
    ended = train(*TRUSTED)
    assert ended.code == 2 and re.search(said, ended.err), ended.err
    assert len(ended.err.splitlines()) == 1 and not (here / "outputs").exists()


def test_a_forward_of_more_than_one_x_is_named():
    three = partial(nn.MultiheadAttention, 16, 2)
    with pytest.raises(
        ValueError, match=r"module=.*MultiheadAttention: its forward takes other .*argument: 'key'\); allowed"
    ):
        adapted(module=three, honours={})


@pytest.mark.parametrize(("given", "said"), [("Told", "a dict"), ("Nothing", "a tuple")])
def test_what_is_no_tensor_is_named(layers, given, said):
    with pytest.raises(ValueError, match=rf"module=someones_layers\.{given}: maps \(2, 3, 16\) to {said}; allowed is"):
        adapted(module=getattr(layers(), given), honours={})(torch.zeros(2, 3, 16))


def test_modules_are_taken_where_they_are_asked_for_and_from_the_trusted_alone(layers):
    build = made(node(width=4, causal=False)).keywords["module"]
    assert isinstance(build, partial) and (build.func.__name__, build.keywords["width"]) == ("Mean", 4)
    assert made(node(_partial_=True)).keywords["module"].func is build.func
    refused = [
        (node(), (), "allowed are classes of modules that the command line names"),
        (node("torch.nn.Identity"), (NAME,), "allowed are classes of someones_layers"),
        (node("harness.model.RMSNorm"), (NAME,), "allowed are classes of someones_layers"),
        (node(f"{NAME}.Linear"), (NAME,), "is defined in torch.nn.modules.linear; allowed are classes of someones"),
        (node(f"{NAME}.Kept"), (NAME,), "keeps the contract itself, so it stands where variant.mixer.module does"),
        (node(f"{NAME}.torch"), (NAME,), "must be a class derived from torch.nn"),
        (node(f"{NAME}.exploding"), (NAME,), "must be a class derived from torch.nn"),
        (node(width=2.5), (NAME,), "variant.mixer.module.width=2.5: must be int"),
        (node(_partial_=False), (NAME,), "module._partial_=False: must be true"),
        (3, (NAME,), "variant.mixer.module=3: must be a torch.nn.Module with _target_"),
        ({"dim": 3}, (NAME,), "must be a torch.nn.Module with _target_"),
    ]
    for given, trust, said in refused:
        with pytest.raises(ValueError, match=re.escape(said)):
            made(given, trust=trust)
    # A place that asks for a sublayer or a part takes no module, wherever it is from.
    with pytest.raises(
        ValueError, match=r"variant\.mixer\._target_=someones_layers\.Mean: must be a class derived from variants"
    ):
        resolve(node(_partial_=True), key="variant.mixer", kind=Sublayer, trust=(NAME,))
    persistent = {"_target_": "variants.attention.Attention", "_partial_": True, "persistent": node(_partial_=True)}
    with pytest.raises(
        ValueError, match=r"persistent\._target_=someones_layers\.Mean: must be a class derived from variants"
    ):
        resolve(persistent, key="variant.mixer", kind=Sublayer, trust=(NAME,))


@pytest.mark.parametrize("place", [{}, [1], [[{}]], {"deep": {"er": [{}]}}])
def test_no_target_below_a_module_is_followed(layers, place):
    """The package might follow it itself."""
    target = {"_target_": f"{NAME}.exploding", "_partial_": True}
    text = json.dumps(place).replace("{}", json.dumps(target)) if place != [1] else json.dumps([1, target])
    with pytest.raises(ValueError, match=r"module\.table.*\._target_=someones_layers\.exploding: .* plain values"):
        made(node(table=json.loads(text)))


def test_keywords_of_any_name_are_for_the_class_to_judge(layers):
    """Annotations that name what is not there are passed over: nobody here can mend them."""
    build = made(node(f"{NAME}.Annotated", width=4))
    assert model_of(build)().layers[0]["part0"].sublayer.module.into.out_features == 4
    with pytest.raises(
        ValueError, match=r"module=.*Annotated: cannot be built with.*unexpected keyword argument 'widht'"
    ):
        model_of(made(node(f"{NAME}.Annotated", widht=4)))()
    with pytest.raises(
        ValueError, match=r"module\.widht=4: .*Deaf takes keywords of any name and says nothing.* are dim"
    ):
        model_of(made(node(f"{NAME}.Deaf", widht=4)))()
    torch.manual_seed(0)
    model_of(made(node(f"{NAME}.Deaf")))()
    with pytest.raises(ValueError, match=r"variant\.mixer\.module\.dim: Deaf needs it"):
        made({"_target_": f"{NAME}.Deaf"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"limits": ("segments", "streams")},
            r"limits=\['segments', 'streams'\]: there is no limit streams; allowed are",
        ),
        (
            {"honours": {"cache": ["kv"]}},
            r"honours\.cache=\['kv'\]: .*carries nothing.*; allowed are attend_self, span",
        ),
        ({"honours": {"spam": "x"}}, r"honours\.spam=x: no such key; allowed are attend_self, span"),
        (
            {"honours": {"span": True}},
            r"honours\.span=True: must be the keyword of .*Window that is .* model\.span; .* window",
        ),
        (
            {"honours": {"span": "widow"}},
            r"honours\.span=widow: must be the keyword of .*Window .*; allowed are dim, window",
        ),
        ({"reach": -1}, r"reach=-1: allowed are integers from 0, or null"),
        ({"reach": 3, "honours": None}, r"reach=3: with honours=null it sees no byte but its own"),
        ({"period": 0}, r"period=0: allowed are integers from 1"),
    ],
)
def test_promises_are_refused_by_name_where_they_cannot_be(layers, given, said):
    with pytest.raises(ValueError, match=said):
        adapted(**{"honours": {}, "module": partial(layers().Window, dim=16)} | given)


def adapted(**given) -> AnyModule:
    """The adapter in a network of width 16 whose span is 8."""
    common = {"d_model": 16, "layer": 0, "n_layers": 1, "heads": 2, "span": 8, "scheme": Position}
    return AnyModule(LayerContext(attend_self=False, **common), **given)


def test_promises_are_what_the_yaml_says(layers):
    window = partial(layers().Window, dim=16, window=3)
    plain = adapted(module=window, honours={}, limits=("segments", "streams_apart"))
    assert plain.honours == Honours() and plain.reach() is None and plain.limits == {"segments", "streams_apart"}
    assert (plain.module.window, plain.module.itself) == (3, True)
    follows = adapted(module=window, honours={"attend_self": "itself", "span": "window"}, reach=7, period=4)
    assert follows.honours == Honours(attend_self={True, False}, span=True)
    assert (follows.reach(), follows.period, follows.limits) == (7, 4, frozenset())
    assert (follows.module.window, follows.module.itself) == (8, False)
    follows.set_span(8)
    plain.set_span(9)
    with pytest.raises(
        ValueError, match=r"eval\.span=9: someones_layers\.Window keeps the span that it was built with, 8"
    ):
        follows.set_span(9)
    alone = adapted(module=nn.Identity, honours=None)
    assert alone.honours is None and alone.reach() == 0


def test_the_check_holds_a_module_to_what_is_said_of_it(layers):
    def broken(limits: tuple[str, ...], **given) -> dict[str, str]:
        found = findings_of(model_of(partial(made(node(**given)), limits=limits)))
        return {promise: finding.detail for promise, finding in found.items() if not finding.passed}

    assert not broken(("segments",))
    assert broken(()).keys() == {SEGMENTS}
    # Seeing the future is no limit that could be declared.
    assert broken(("segments",), causal=False).keys() == {FUTURE_EVAL, FUTURE_TRAIN}


def test_and_to_how_far_it_sees(layers):
    def beyond(target: str, **said) -> str:
        """The first byte that matters beyond the declared reach."""
        breaks = list(reach(Subject(model_of(partial(made(node(f"{NAME}.{target}")), **said)), 5, 31)))
        return (breaks or [""])[0]

    assert not beyond("Mean") and not beyond("Window", reach=3)
    assert "beyond its reach of 2" in beyond("Window", reach=2)
    assert "what sees a past declares honours" in beyond("Mean", honours=None)


@pytest.mark.parametrize(
    ("module", "honours", "said"),
    [
        ("Window", {"span": "window", "attend_self": "itself"}, []),
        ("Window", {}, []),
        ("Mean", {"span": "table"}, ["model.span=13,26,6, which honours say it follows"]),
        ("Mean", {"attend_self": "table"}, ["model.attend_self=false,true, which honours say it follows"]),
    ],
)
def test_and_to_what_it_follows(layers, module, honours, said):
    own = {"_target_": "variants.any_module.AnyModule", "_partial_": True, "module": node(f"{NAME}.{module}")}
    cfg = compose_config(*TINY, f"trust=[{NAME}]", "model.d_model=16", "model.span=13", "position=none")
    cfg.variant = {"name": "mine", "layers": ["mixer"], "at": {}, "groups": {}, "mixer": {**own, "honours": honours}}
    breaks = list(follows(plan_run(cfg)))
    assert [line.partition(" with ")[2] for line in breaks] == said


def test_parameters_have_groups_of_their_own_and_layers_their_own_module(layers):
    model = model_of(made(node()))()
    groups = {"slow": {"match": "*.part0.sublayer.module.into.*", "lr_scale": 0.1}}
    default, slow = assign(model, default=torch.optim.AdamW, groups=groups)
    assert slow.name == "slow" and len(slow.parameters) == 4 and len(default.parameters) > 4
    first, second = (sublayer.module for _, sublayer in model.sublayers())
    assert first is not second and not torch.equal(first.into.weight, second.into.weight)
