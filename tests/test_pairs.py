"""The report's tables of differences: matched seeds, corrections, and the one named in advance."""

from pathlib import Path

from bench.report import __main__ as report
from bench.report import plots
from bench.report.__main__ import main
from bench.report.gather import gather
from harness.record.table import Table
from tests.bench_rows import write_run
from tests.report_of import column, tables


def test_intervals_are_of_matched_seeds(tmp_path):
    for seed, own, other in ((0, 2.40, 2.30), (1, 2.50, 2.41), (2, 2.60, 2.49)):
        write_run(tmp_path, variant="mhsa", seed=seed, bits=own)
        write_run(tmp_path, variant="adaptive_span", seed=seed, bits=other)
    write_run(tmp_path, variant="adaptive_span", seed=7, bits=5.0)  # no match: no part of the difference
    found = tables(tmp_path)["differences-1"]
    assert found.caption.startswith("Reference: mhsa.")
    assert column(found, "split") == ["valid", "test"]
    assert column(found, "n")[0] == "3" and column(found, "difference, bits per byte")[0] == "-0.1000"
    half = 4.30265 * 0.01 / 3**0.5
    assert column(found, "smallest visible")[0] == f"{half:.4f}"
    assert column(found, "95% interval")[0] == f"{-0.1 - half:+.4f} to {-0.1 + half:+.4f}"
    assert column(found, "verdict")[0] == "better"
    assert any("different seeds" in note for note in tables(tmp_path)["runs-1"].notes)


def test_one_seed_has_neither_interval_nor_verdict(tmp_path):
    """However many bytes were scored: these are one set of weights."""
    for seed, own, other in ((0, 2.40, 2.30), (1, 2.50, 2.61)):
        write_run(tmp_path, variant="mhsa", seed=seed, bits=own)
        write_run(tmp_path, variant="adaptive_span", seed=seed, bits=other)
    write_run(tmp_path, variant="all_attention", seed=1, bits=2.6)
    found = tables(tmp_path)["differences-1"]
    names = ("variant", "verdict", "95% interval", "n", "p")
    rows = set(zip(*(column(found, name) for name in names), strict=True))
    assert ("all_attention", "n = 1", "", "1", "") in rows
    assert {row[1] for row in rows if row[0] == "adaptive_span"} == {"not separated"}


def compared(folder: Path, **of_variants: float) -> Path:
    """Five seeds of each variant on valid alone, that much better than the reference, give or take 0.01."""
    for variant, better in {"mhsa": 0.0, **of_variants}.items():
        for seed in range(5):
            bits = 2.4 + seed / 10 - better * (1 + 0.5 * (seed - 2))
            write_run(folder, variant=variant, seed=seed, bits=bits, test_bits_per_byte=None)
    return folder


def judged(table: Table) -> dict[str, tuple[str, str]]:
    shown = (column(table, name) for name in ("variant", "p", "verdict"))
    return {variant: (p, verdict) for variant, p, verdict in zip(*shown, strict=True)}


def test_verdicts_are_corrected_for_all_differences_of_a_table(tmp_path):
    """Student's t of one is 2.83, p 0.0474: separated alone, and not among two or three."""
    alone = tables(compared(tmp_path / "alone", adaptive_span=0.01))["differences-1"]
    assert judged(alone) == {"adaptive_span": ("0.0474", "better")}
    three = tables(compared(tmp_path / "three", adaptive_span=0.01, all_attention=0.02, dynamic_span=0.03))
    assert judged(three["differences-1"]) == dict.fromkeys(
        ("adaptive_span", "all_attention", "dynamic_span"), ("0.1423", "not separated")
    )
    assert "p and verdicts are corrected for 3 differences in this table, by Holm." in three["differences-1"].notes


def test_a_difference_that_was_named_in_advance_is_not_corrected(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda found, swept: [])
    compared(tmp_path / "runs", adaptive_span=0.01, all_attention=0.02)
    words = [str(tmp_path / "runs"), "--out", str(tmp_path / "report")]
    assert main([*words, "--contrast", "adaptive_span", "mhsa"]) == 0
    told = (tmp_path / "report" / "differences-1.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in told.splitlines() if line.startswith("| a")}
    assert "| 0.0474 | better" in rows["adaptive_span"] and "| 0.0474 | better" in rows["all_attention"]
    assert "adaptive_span less mhsa on valid was named in advance: it is not corrected." in told
    assert "corrected for 1 difference in this table" in told
    assert main([*words, "--contrast", "mhsa", "all_attention"]) == 0
    told = (tmp_path / "report" / "differences-1.md").read_text()
    assert "Reference: all_attention." in told and "mhsa less all_attention on valid" in told
    capsys.readouterr()
    assert main([*words, "--contrast", "mhsa", "nonsense"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: --contrast mhsa nonsense: must be two rows of one table; rows here are adaptive_span, "
    )


def test_the_named_difference_is_that_of_test_where_test_was_scored(tmp_path):
    for seed, own, other in ((0, 2.40, 2.30), (1, 2.50, 2.41), (2, 2.60, 2.49)):
        write_run(tmp_path, variant="mhsa", seed=seed, bits=own)
        write_run(tmp_path, variant="adaptive_span", seed=seed, bits=other)
    found = gather([tmp_path])
    (pairs,) = [
        table
        for table in report.all_tables(found, [], contrast=("adaptive_span", "mhsa"))
        if table.name == "differences-1"
    ]
    assert any("on test was named in advance" in note for note in pairs.notes)
    assert "p and verdicts are corrected for 1 difference in this table, by Holm." in pairs.notes
