"""Verdicts on the claims of the results page: intervals, claims of several parts, and runs
without a score."""

import pandas as pd

from bench.published_claims import FAILS, HOLDS, MEASURES, TOO_FEW, UNDECIDED, claims_table, judge
from bench.published_runs import STATE, TEST
from harness.record.table import Table, to_markdown

CLAIMED = ("mhsa", "adaptive_span", "uniform_span", "replayed_spans", "all_attention_6")


def runs_with_scores(bits: dict[str, list[float]]) -> pd.DataFrame:
    """Return runs with these scores, one seed for each number."""
    common = {STATE: 100, MEASURES["FLOPs per byte, %"]: 1e6}
    scores = [
        (name, seed, score) for name, seeds in bits.items() for seed, score in enumerate(seeds)
    ]
    return pd.DataFrame(
        [{"variant": name, "seed": seed, TEST: score} | common for name, seed, score in scores]
    )


def verdicts(table: Table) -> list[str]:
    return [row[-1].text.strip("*") for row in table.rows if row[0].text]


def test_an_interval_decides_whether_a_claim_holds():
    below, close = [-0.10, -0.11, -0.12], [-0.01, 0.0, 0.012]
    above = [-difference for difference in below]
    for expected, margin, verdicts_of in (
        ("lower", 0.0, [HOLDS, UNDECIDED, FAILS]),
        ("lower", 0.05, [HOLDS, HOLDS, FAILS]),
        ("equal", 0.05, [FAILS, HOLDS, FAILS]),
    ):
        assert [
            judge(case, expected=expected, margin=margin)[0] for case in (below, close, above)
        ] == verdicts_of
    assert judge(close, expected="equal", margin=0.02)[0] == UNDECIDED
    assert judge([0.0] * 3, expected="lower", margin=0.0)[0] == FAILS, "equal costs are not lower"
    assert [judge(case, expected="lower", margin=0.0)[0] for case in (below[:2], [-1.0])] == [
        TOO_FEW,
        TOO_FEW,
    ]
    # 4.303 x 0.01 / sqrt(3)
    assert judge(below, expected="lower", margin=0.0)[1] == "-0.1100 ± 0.0248"


def test_a_claim_holds_if_all_of_its_parts_hold():
    bits = {name: [2.3, 2.31, 2.32] for name in CLAIMED}
    bits |= {"uniform_span": [2.29, 2.33, 2.32], "replayed_spans": [2.2, 2.21, 2.22]}
    runs = runs_with_scores(bits)
    runs.loc[runs["variant"].isin(["adaptive_span", "all_attention_6"]), STATE] = 50
    table = claims_table(runs)
    # The first claim fails, because adaptive spans have less state but not fewer FLOPs. The second
    # is undecided: they are not separated from a uniform span.
    assert verdicts(table) == [FAILS, UNDECIDED, FAILS, HOLDS]
    assert "| -50.0000 ± 0.0000 | holds |" in to_markdown(table)


def test_runs_without_a_score_are_counted():
    runs = runs_with_scores({name: [2.3, 2.31, 2.32, 2.33] for name in CLAIMED})
    complete = claims_table(runs)
    assert "without a score" not in to_markdown(complete) and TOO_FEW not in verdicts(complete)
    unscored = (runs["variant"] == "all_attention_6") & (runs["seed"] > 1)
    runs.loc[unscored, TEST] = None
    table = claims_table(runs)
    assert "| 2, 2 without a score |" in to_markdown(table) and verdicts(table)[-1] == TOO_FEW
