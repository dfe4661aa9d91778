"""README and docs: commands compose, every link has a target, and the YAML of README is a
variant."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from harness.plan.build import plan_run
from tests.support.command_line import ROOT, call, empty_folder  # noqa: F401 - a fixture
from tests.support.small_configs import CONF, compose_config, jobs

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PAGES}
PROGRAMS = ("python", "torchrun", ".venv/bin/python")


def commands() -> dict[tuple[str, ...], str]:
    """Return the words after ``python`` or ``torchrun`` of every command on the pages, and the last
    page that has it."""
    pages = {}
    for page, text in TEXTS.items():
        blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        inline = re.findall(r"`(python[^`]*)`", text)
        lines = [*"".join(blocks).replace("\\\n", " ").splitlines(), *inline]
        for part in (part for line in lines for part in line.split("&&")):
            words = shlex.split(part, comments=True)
            if words and words[0] in PROGRAMS and "..." not in words[-1]:
                pages[tuple(words[1:])] = page
    return pages


def test_commands_on_the_pages_compose_unless_they_need_files_of_the_user():
    planned, command_names = set(), set()
    for words, page in commands().items():
        overrides = [
            word
            for word in words
            if re.match(r"\+*[\w@./]+=", word) and not word.startswith("hydra")
        ]
        if "-cd" in words or {"variant=mine", "variant=V"} & {*overrides}:
            continue
        if any(word.endswith("train.py") for word in words) and "recipe=" not in overrides:
            sweeping = "-m" in words or any(word.startswith("sweep=") for word in overrides)
            all_jobs = [tuple(job) for job in jobs(overrides)]
            for job in {all_jobs[0], all_jobs[-1]} - planned:
                plan_run(compose_config(*job), sweeping=sweeping)
                planned.add(job)
        elif words[0] == "-m" and words[1].startswith("bench."):
            name = words[1].removeprefix("bench.")
            assert find_spec(words[1]), (page, words)
            if (CONF / f"{name}.yaml").exists():
                compose_config(*overrides, name=name)
            command_names.add(name)
    assert len(planned) >= 12
    assert {"cost", "fit", "peers", "evaluate", "compress", "evidence", "report"} <= command_names


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_has_a_target(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", TEXTS[page]):
        path = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, f"{page}: {target}#{anchor}"


def write_yaml_of(page: str):
    """Write the first YAML block of a page, unchanged, to the file that the sentence before it
    names."""
    name, text = re.search(
        r"`(my_conf/\S+)`:\n\n```yaml\n(.*?)^```$", TEXTS[page], re.MULTILINE | re.DOTALL
    ).groups()
    Path(name).parent.mkdir(parents=True)
    Path(name).write_text(text)


def test_the_yaml_of_readme_is_a_variant_and_readme_is_short(cwd):
    write_yaml_of("README.md")
    outcome = call(
        "train.py",
        "-cd",
        "my_conf",
        "trust=[performer_pytorch]",
        "variant=their_performer",
        "--cfg",
        "job",
    )
    config = yaml.safe_load(outcome.out)
    assert (
        config["variant"]["attention"]["module"]["causal"] is True
        and config["variant"]["name"] == "their_performer"
    )
    assert len(TEXTS["README.md"].splitlines()) <= 170


def test_the_layer_of_the_page_on_adaptive_spans_runs_in_own_code(capsys):
    code = re.search(
        r"```python\n(.*?)^```$", TEXTS["docs/adaptive_span.md"], re.DOTALL | re.MULTILINE
    )
    exec(code[1], {})
    assert "32., 32., 32., 32." in capsys.readouterr().out


def test_the_attention_of_x_transformers_keeps_the_contract(cwd):
    write_yaml_of("docs/any_module.md")
    options = (
        "position=none",
        "model.cache=kv",
        "model.attend_self=true",
        "model.layers=1",
        "model.span=128",
    )
    options += ("batch.segment=128", "eval.segment=128")
    outcome = call(
        "bench/check.py", "-cd", "my_conf", "trust=[x_transformers]", "variant=xattn", *options
    )
    assert "attend_self=true, plain: 29 promises\n" in outcome.out, outcome
    assert (
        "xattn: PASSED: keeps the contract in 1 combination\n" in outcome.out and outcome.code == 0
    )
