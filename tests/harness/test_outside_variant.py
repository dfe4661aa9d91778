"""A user's variant, a file or a package with a few lines of YAML, is checked, trained, or
refused."""

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.command_line import (
    GENERATED,
    ROOT,
    call,
    empty_folder,  # noqa: F401 - a fixture
    run_folders,
    summaries,
    train,
)

MIXER = """from torch import nn
from variants.contract import Sublayer, SublayerOutput

class Mixer(Sublayer):
    def __init__(self, context, *, width: int = 16):
        super().__init__()
        self.gate, self.into = nn.Linear(context.d_model, width), nn.Linear(context.d_model, width)
        self.out = nn.Linear(width, context.d_model)

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return SublayerOutput(self.out(self.gate(x).sigmoid() * self.into(x)))
"""
SUBLAYER = "_target_: {module}.Mixer\n_partial_: true\nwidth: 24\n"
VARIANT = """defaults:
  - /sublayer@mixer: my_mixer
name: mine
layers: [mixer]
"""


def write(folder: Path, *, module: str, conf: str):
    """Write a user's module, and the YAML of its sublayer and variant into the folder ``conf``."""
    files = {
        Path(*module.split(".")).with_suffix(".py"): MIXER,
        Path(conf, "sublayer", "my_mixer.yaml"): SUBLAYER.format(module=module),
        Path(conf, "variant", "mine.yaml"): VARIANT,
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


@pytest.fixture(name="imports")
def forget_imports(monkeypatch):
    """After a test, remove the example's modules and the folders that it added to the search
    path."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("my_mixer", "my_pkg", "fading"):
            del sys.modules[name]


PAGE = (ROOT / "docs" / "adding_a_variant.md").read_text()
FILES = dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def test_the_example_of_adding_a_variant_is_short_and_is_checked_and_trained(
    cwd, imports, monkeypatch
):
    assert sum(len(text.splitlines()) for text in FILES.values()) <= 40 and len(FILES) == 3
    for path, text in FILES.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    (commands,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    checks, trains = (shlex.split(line)[1:] for line in commands.splitlines())
    sizes = ("model.layers=2", "model.span=128", "batch.segment=128", "eval.segment=128")
    checked = call("bench/check.py", *checks[2:], *sizes)
    assert (
        checked.code == 0
        and "fading: PASSED: keeps the contract in 2 combinations (18 refused)" in checked.out
    ), checked
    outcome = train(*trains[1:], *GENERATED)
    assert outcome.code == 0, outcome
    assert [summary["status"] for summary in summaries(cwd / "outputs")] == ["finished"]


@pytest.mark.parametrize("name", ["variant/mhsa", "train"])
def test_a_users_file_with_the_name_of_one_of_ours_is_refused(cwd, name):
    """Our file would be read in place of the user's."""
    write(cwd, module="my_mixer", conf="my_conf")
    (cwd / "my_conf" / f"{name}.yaml").write_text("{}\n")
    outcome = train("-cd", "my_conf", *GENERATED, "variant=mhsa")
    assert outcome.code == 2 and len(outcome.err.splitlines()) == 1, outcome
    assert f"{cwd / 'my_conf' / name}.yaml: has the name of a file of the project" in outcome.err
    # our own folder is allowed
    assert train("-cd", str(ROOT / "conf"), *GENERATED, "--cfg", "job").code == 0


EXITS = {
    "import": ("from torch import nn", "import sys\nfrom torch import nn\nsys.exit()"),
    "constructor": ("super().__init__()", "exit(0)"),
    "forward": ("return SublayerOutput", "exit()\n        return SublayerOutput"),
    "late": (
        "return SublayerOutput",
        "if self.training and x.shape[1] == 32: raise SystemExit\n        return SublayerOutput",
    ),
}


@pytest.mark.parametrize("place", EXITS)
def test_a_users_code_that_exits_is_an_error(cwd, imports, place):
    write(cwd, module="my_mixer", conf="my_conf")
    (cwd / "my_mixer.py").write_text(MIXER.replace(*EXITS[place]))
    words = (
        "-cd",
        "my_conf",
        "trust=[my_mixer]",
        "variant=mine",
        *(["check=false"] if place == "late" else []),
    )
    outcome = train(*words, *GENERATED)
    assert outcome.code == 2 and outcome.err.count("error: ") == 1, outcome
    assert "calls exit(" in outcome.err or (place == "forward" and "SystemExit" in outcome.err)
    if place == "late":
        assert "calls exit(" in summaries(cwd / "outputs")[0]["error"]
        return
    outcome = call(
        "bench/check.py", *words, "position=none", "model.cache=kv", "model.attend_self=true"
    )
    assert outcome.code == 2 and "exit" in (outcome.out + outcome.err).lower(), outcome
    swept = train("-m", *words, *GENERATED, "seed=0,1")
    assert swept.code == 2 and "0 of 2 done" in swept.out, swept


def test_any_exit_that_is_not_of_ours_is_an_error(cwd, monkeypatch):
    module = ModuleType("theirs")
    exec("import sys\ndef leave(*_, **__):\n    sys.exit(0)", vars(module))
    monkeypatch.setattr("harness.trained.open_trained", module.leave)
    outcome = call("bench/evaluate.py", "run=outputs/latest")
    assert outcome.code == 2 and outcome.err == "error: the code of theirs calls exit(0)\n", outcome


def test_the_names_of_shipped_variants_are_reserved(cwd, imports):
    write(cwd, module="my_mixer", conf="my_conf")
    words = ("-cd", "my_conf", *GENERATED, "trust=[my_mixer]")
    refused = [
        ("variant=mine", "variant.name=mhsa"),
        ("variant=adaptive_span", "variant.name=mhsa"),
    ]
    refused.append(("variant=mhsa", "sublayer@variant.attention=my_mixer"))
    (cwd / "my_conf/variant/named.yaml").write_text("defaults: [linear]\nname: mhsa\n")
    (cwd / "my_conf/moved.yaml").write_text("# @package _global_\nvariant: {name: mhsa}\n")
    refused += [("variant=named",), ("variant=mine", "+moved=moved")]
    (cwd / "my_conf/moved").mkdir()
    (cwd / "my_conf/moved.yaml").rename(cwd / "my_conf/moved/moved.yaml")
    for choice in refused:
        outcome = train(*words, *choice)
        assert outcome.code == 2 and "name=mhsa: is the name of a shipped variant" in outcome.err, (
            choice,
            outcome,
        )
    assert (
        train(
            *words, "variant=mhsa", "sublayer@variant.attention=my_mixer", "variant.name=mixed"
        ).code
        == 0
    )


def test_a_package_on_the_search_path_needs_trust(cwd, imports):
    write(cwd, module="my_pkg.mixer", conf="my_pkg/conf")
    for package in ("my_pkg", "my_pkg/conf"):
        (cwd / package / "__init__.py").touch()
    sys.path.append(str(cwd))  # stands for an installed package
    words = (*GENERATED, "hydra.searchpath=[pkg://my_pkg.conf]", "variant=mine")
    outcome = train(*words)
    assert outcome.code == 2 and "my_pkg.mixer.Mixer: allowed are classes of" in outcome.err
    outcome = train(*words, "trust=[my_pkg]")
    assert outcome.code == 0, outcome
    (run,) = run_folders(cwd / "outputs")
    assert run.name.startswith("mine-s0-")
