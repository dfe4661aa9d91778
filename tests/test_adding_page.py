"""``docs/adding_a_variant.md``: its example, copied out of the page, keeps the contract and trains."""

import json
import re
from pathlib import Path

from tests.command import MADE, ROOT, TINY, empty_folder, run_folders  # noqa: F401 - a fixture
from tests.test_outside import typed

PAGE = (ROOT / "docs" / "adding_a_variant.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def test_the_example_is_short():
    assert sum(len(text.splitlines()) for text in FILES.values()) <= 40 and len(FILES) == 3


def test_the_example_is_checked_and_trained(here):
    for path, text in FILES.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    (commands,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    check, train = (line.split()[1:] for line in commands.splitlines())
    checked = typed(*check, PYTHONPATH=str(ROOT))
    assert checked.code == 0 and "fading: keeps the contract in 2 combinations, 18 refused" in checked.out, checked
    trained = typed(str(ROOT / "train.py"), *train[1:], *TINY, *MADE)
    assert trained.code == 0, trained
    (run,) = run_folders(here / "outputs")
    assert json.loads((run / "summary.json").read_text(encoding="utf-8"))["status"] == "finished"
