"""The digest of the source: the harness, the modules that a variant's mechanisms can import, and
trusted modules."""

import inspect
import shutil
from pathlib import Path

import pytest

from harness import source
from harness.source import digest, mechanism_files
from tests.faults.test_user_config_folder import git
from tests.support.command_line import ROOT, clear_source_caches

CHECKOUT = {
    "train.py": "",
    "harness/compose/cli.py": "",
    "harness/loop/sampling.py": "",
    "harness/loop/step.py": "",
    "harness/record/checkpoint.py": "",
    "harness/record/rows.py": "",
    "variants/__init__.py": "",
    "variants/contract.py": "",
    "variants/window.py": """
        import variants.contract
        def late():
            from variants.kernels.window import attend, CONSTANT
        """,
    "variants/window.yaml": "",
    "variants/window_more.yaml": "",
    "variants/kernels/__init__.py": "from variants.kernels import table\n",
    "variants/kernels/table.py": "",
    "variants/kernels/window.py": "from variants import conformance",
    "variants/kernels/window.cpp": "",
    "variants/conformance/__init__.py": "",
    "variants/other.py": "import torch.nn",
    "bench/cost.py": "",
    "bench/baselines/rounds.json": "",
    "bench/tables/page.py": "",
    "bench/results/one/rows.jsonl": "",
    "users/mine.py": "import helper\nfrom variants.other import Other\n",
    "users/mine.cpp": "",
    "users/helper.py": "import deep.er\n",
    "users/helper.cu": "",
    "users/deep/__init__.py": "",
    "users/deep/er.py": "",
    "users/unrelated.py": "",
    "users/package/__init__.py": "",
    "users/package/inner/kernel.cu": "",
}
WINDOW = {
    *("variants/__init__.py", "variants/contract.py", "variants/window.py", "variants/window.yaml"),
    *("variants/kernels/__init__.py", "variants/kernels/table.py", "variants/kernels/window.py"),
    "variants/kernels/window.cpp",
}
RUN = WINDOW | {"train.py", "harness/loop/step.py", "harness/record/checkpoint.py"}
MINE = {
    f"users/{name}"
    for name in ("mine.py", "mine.cpp", "helper.py", "helper.cu", "deep/__init__.py", "deep/er.py")
}
CASES = {
    "measuring": ({"measuring": True}, RUN | {"bench/cost.py", "bench/baselines/rounds.json"}),
    "a trusted file": ({"trust": ("mine",)}, RUN | MINE | {"variants/other.py"}),
    "a trusted package": (
        {"trust": ("package",)},
        RUN | {f"users/package/{n}" for n in ("__init__.py", "inner/kernel.cu")},
    ),
}
CONFIG = {
    "variant": {"attention": {"_partial_": True, "parts": [{"_target_": "variants.window.Window"}]}}
}


@pytest.fixture(autouse=True)
def empty_cache():
    """Clear the cache of read files before and after each test."""
    clear_source_caches()
    yield
    clear_source_caches()


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    for name, text in CHECKOUT.items():
        write(tmp_path / name, inspect.cleandoc(text))
    monkeypatch.setattr(source, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "users")
    return tmp_path


def write(path: Path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("case", CASES)
def test_the_digest_depends_on_exactly_the_files_that_can_change_a_number_of_the_run(
    checkout, case
):
    assert {name for name, _ in mechanism_files(CONFIG)} == WINDOW
    arguments, relevant_files = CASES[case]
    before = digest(CONFIG, **arguments)
    for name in CHECKOUT:
        text = (checkout / name).read_text()
        write(checkout / name, f"{text}\n# edited")
        assert digest(CONFIG, **arguments) == before, "a process must read each file only once"
        clear_source_caches()
        assert (digest(CONFIG, **arguments) != before) == (name in relevant_files), name
        write(checkout / name, text)
        clear_source_caches()
        assert digest(CONFIG, **arguments) == before
    for name in (
        "variants/__pycache__/window.pyc",
        "variants/.window.py.swp",
        "bench/.cost.py.swp",
        "variants/new.py",
    ):
        write(checkout / name, "new")
    clear_source_caches()
    assert digest(CONFIG, **arguments) == before


def test_a_copied_checkout_has_the_same_digest_and_imports_of_installed_modules_do_not_count(
    checkout, monkeypatch, tmp_path_factory
):
    before, copied = digest(CONFIG, measuring=True), tmp_path_factory.mktemp("copied")
    for name in reversed(CHECKOUT):
        write(copied / name, (checkout / name).read_text())
    with monkeypatch.context() as patched:
        patched.setattr(source, "ROOT", copied)
        assert digest(CONFIG, measuring=True) == before
    with pytest.raises(ValueError, match="trust=nowhere_at_all"):
        digest({}, trust=("nowhere_at_all",))
    write(checkout / "users/broken.py", "def (\n")
    assert digest({}, trust=("broken",)) != digest({})


def test_what_trusted_code_imports_counts_by_its_files_or_if_it_is_installed_by_its_version(
    checkout, monkeypatch, tmp_path_factory
):
    """``wrapper`` imports a package and a package without ``__init__.py`` of the user, and an
    installed one."""
    elsewhere, installed = (
        tmp_path_factory.mktemp("elsewhere"),
        tmp_path_factory.mktemp("env") / "site-packages",
    )
    monkeypatch.syspath_prepend(elsewhere)
    monkeypatch.syspath_prepend(installed)
    write(
        checkout / "users/wrapper.py",
        "def late():\n    import theirs.layer\nimport spread.part, numpy, torch, json\n",
    )
    write(elsewhere / "theirs/__init__.py", "")
    write(elsewhere / "theirs/deep/kernel.cu", "")
    write(
        elsewhere / "theirs/layer.py",
        "from .deep import kernel\nfrom other_file import x\nimport bought\n",
    )
    write(elsewhere / "other_file.py", "")
    write(elsewhere / "spread/part.py", "import wrapper")
    write(installed / "bought/__init__.py", "")
    write(installed / "bought-1.dist-info/METADATA", "Name: bought\nVersion: 1.0\n")
    write(elsewhere / "unrelated.py", "")
    write(checkout / "users/project/__init__.py", "")
    write(checkout / "users/project/helper.py", "")
    write(checkout / "users/project/inner/mine.py", "from ..helper import x")

    def changes(path: Path, text: str = "# edited", trust: str = "wrapper") -> bool:
        before, content = digest({}, trust=(trust,)), path.read_text()
        clear_source_caches()
        write(path, text)
        after = digest({}, trust=(trust,))
        write(path, content)
        clear_source_caches()
        return after != before

    counted = (
        "theirs/__init__.py",
        "theirs/deep/kernel.cu",
        "theirs/layer.py",
        "other_file.py",
        "spread/part.py",
    )
    assert [name for name in counted if not changes(elsewhere / name)] == []
    assert not changes(elsewhere / "unrelated.py") and not changes(installed / "bought/__init__.py")
    assert changes(installed / "bought-1.dist-info/METADATA", "Name: bought\nVersion: 2.0\n")
    assert changes(checkout / "users/project/helper.py", trust="project.inner.mine")
    before = digest({}, trust=("wrapper",))
    clear_source_caches()
    monkeypatch.setattr(source.platform, "python_version", lambda: "3.99.0")
    assert digest({}, trust=("wrapper",)) != before and digest({}) == digest({})


def test_mechanisms_have_static_imports_only():
    """A dynamic import would hide a file from the digest."""
    for path in (ROOT / "variants").rglob("*.py"):
        text = path.read_text()
        if "conformance" not in path.parts:
            assert "import_module" not in text and "__import__" not in text, path


def test_new_result_rows_and_logs_of_a_sweep_do_not_make_a_commit_dirty(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "ROOT", tmp_path)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    rows, code = tmp_path / "bench" / "results" / "rows.jsonl", tmp_path / "train.py"
    for path in (rows, code):
        path.write_text("")
    shutil.copy(ROOT / ".gitignore", tmp_path)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "a"]):
        git(tmp_path, *words)
    rows.write_text("{}")
    # hydra/launcher=submitit_local writes it
    log = tmp_path / ".submitit" / "1832" / "1832_0_log.out"
    log.parent.mkdir(parents=True)
    log.write_text("training")
    assert len(source.commit()) == 40
    code.write_text("pass")
    assert source.commit().endswith("-dirty")
