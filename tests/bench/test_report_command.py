"""``python -m bench.report``: the files that it writes and removes, and the mistakes that it
refuses."""

import re
import subprocess
import sys
from unittest.mock import patch

import pytest

from bench.report import main
from tests.support.bench_rows import cost_row, peer_row, write_rows, write_run
from tests.support.command_line import ROOT
from tests.support.timeouts import TIMEOUT_SECONDS

CODE = "import sys; from bench.report import main; code = main(sys.argv[1:]); "
CODE += "sys.exit(code or sorted({'torch', 'wandb', 'hydra'} & set(sys.modules)) or 0)"


def test_the_command_writes_all_files_without_torch_and_removes_outdated_ones(tmp_path, capsys):
    rows, out = tmp_path / "rows", tmp_path / "report"
    write_run(rows, variant="adaptive_span", valid_bits_per_copy={"64": 0.1})
    write_rows(rows, [cost_row(length=n) for n in (256, 512)] + [peer_row(), {"kind": "cost"}])
    words = [sys.executable, "-c", CODE, str(rows), "--out", str(out)]
    process = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert process.returncode == 0, process.stderr
    figures = {path.name.partition("-")[0] for path in (out / "figures").glob("*.png")}
    assert figures == {"curves", "spans", "context"}
    assert all((out / name).stat().st_size for name in ("runs-1.csv", "cost-1.csv", "index.html"))
    *others, last = process.stdout.splitlines()
    assert last == f"page: {out / 'index.html'}" and not [o for o in others if str(out) in o]
    headings, run = (line.split(",") for line in (out / "runs.csv").read_text().splitlines())
    cells = dict(zip(headings, run, strict=True))
    assert (cells["variant"], cells["seed"], cells["valid_bits_per_byte"]) == (
        "adaptive_span",
        "0.0",
        "2.4",
    )
    assert (
        "refused: " in process.stdout
        and "it is of format 1" in process.stdout
        and "2.4000" in process.stdout
    )
    page = (out / "index.html").read_text()
    assert "python train.py variant=adaptive_span seed=0" in page and "Refused: " in page
    (article,) = re.findall('<article id="at-runs-1">.*?</article>', page, re.DOTALL)
    spans = "Learned spans: adaptive_span, seed 0"
    assert re.findall('alt="(.*?)"', article) == ["Learning curves", spans]
    (out / "mine.md").write_text("not of the report")
    for path in rows.glob("*/rows.jsonl"):
        path.unlink()
    with patch("bench.tables.figures.draw_all", return_value={}):
        assert main([str(rows), "--out", str(out)]) == 0
    assert not (out / "cost-1.csv").exists() and not [*(out / "figures").iterdir()]
    assert (out / "runs-1.csv").exists() and (out / "mine.md").exists()


@pytest.mark.parametrize("content", [None, "garbage"])
def test_a_folder_without_rows_is_refused(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "rows.jsonl").write_text(content)
    assert main([str(tmp_path), "--out", str(tmp_path / "report")]) == 2
    assert capsys.readouterr().err.startswith("error: ") and not (tmp_path / "report").exists()


def test_an_unwritable_output_folder_and_a_missing_input_folder_are_refused(tmp_path, capsys):
    write_run(tmp_path)
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path), "--out", str(tmp_path / "file" / "report")]) == 2
    assert main([str(tmp_path / "nowhere")]) == 2
    message = capsys.readouterr().err
    assert "--out" in message and "nowhere: must be a folder with runs (record.jsonl)" in message
