"""``--help`` of each command, and the hints for misspelt words."""

import re

import pytest
from hydra import compose, initialize_config_dir

from harness.compose.help import help_text
from harness.compose.untrusted_config import CONF
from tests.support.command_line import ROOT, call, train
from tests.support.small_runs import temporary_cwd  # noqa: F401 - a fixture

COMMANDS = sorted(
    path.stem for path in CONF.glob("*.yaml") if path.stem not in ("command", "bench")
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_a_command_does_and_explains_each_key_and_group_that_it_accepts(command):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        keys = compose(command).keys()
    text = help_text(command)
    about, examples = text.split("\n\n")[:2]
    assert about[0].isupper() and about.endswith(".") and not about.startswith("`")
    assert 1 <= len(examples.splitlines()) - 1 <= 3
    groups = re.findall(r"^  (\w+): \w.+\n {6}", text.partition("\ngroups (")[2], re.MULTILINE)
    explained = text + "\n".join(help_text(command, group) for group in groups)
    for key in {*keys} - {"hydra", *groups}:
        assert re.search(rf"^(  )?{key}:", explained, re.MULTILINE), key
    assert {*groups} <= {*keys, "recipe", "sweep"}


def test_help_of_a_group_has_the_comments_of_its_keys_and_an_unknown_group_is_refused():
    assert re.search(r"span: 512 +# number S of positions", help_text("train", "model"))
    with pytest.raises(ValueError, match="modle: no such group; allowed are position, model"):
        help_text("train", "modle")


def test_a_command_prints_its_help_and_composes_nothing(cwd):
    shown = train("--help", "model")
    assert shown.code == 0 and "embedding_std" in shown.out and not [*cwd.iterdir()]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("varient=mhsa", "did you mean variant?"),
        ("variant=adaptive-span", "did you mean adaptive_span"),
        ("batch_size=4", "did you mean batch.streams?"),
        ("model.context=3", "did you mean model.span?"),
        ("model.spam=3", "did you mean model.span"),
        ("lr=3", "did you mean optim.lr?"),
        ("device=cpu", "did you mean runtime.device?"),
        ("variant.attention.biass=true", "did you mean variant.attention.bias"),
        ("++variant.attention.biass=true", "did you mean variant.attention.bias"),
        ("runtime.device=mps", "Apple's GPUs are not supported"),
    ],
)
def test_a_misspelt_word_or_one_of_another_program_is_answered_with_ours(word, hint, cwd):
    refused = train(word)
    assert refused.code == 2 and hint in refused.err and not [*cwd.iterdir()], refused


@pytest.mark.parametrize(
    "script", ["bench/front_page.py", "bench/shipped.py", "harness/data/__main__.py"]
)
def test_other_commands_explain_themselves_and_refuse_words_that_they_do_not_know(script):
    readme = (ROOT / "README.md").stat().st_mtime_ns
    assert call(script, "--help").code == 0
    assert call(script, "enwik8", "unknown=1").code == 2
    assert (ROOT / "README.md").stat().st_mtime_ns == readme
