"""``bench.verdicts``: what an interval says of a claim, and which runs it is of."""

import pytest

from bench.verdicts import FEW, HOLDS, NOT, OPEN, judge, verdict_table

FIRST = ("mhsa", "adaptive_span", "uniform_span", "replayed_spans", "all_attention_6", "product_key_memory")
FIRST += ("mhsa_8_layers",)


def lines(bits: dict[str, list[float]], *, state: dict[str, int] | None = None) -> list[dict]:
    """Of made-up runs, a seed for each number; scores within a hundredth of each other are noise."""
    made = []
    for name, scores in bits.items():
        for seed, score in enumerate(scores):
            summary = {"status": "finished", "check": "shipped", "test_bits_per_byte": score, "budget": {"bytes": 1}}
            summary |= {"data": {"sha256": "ab"}, "protocol": {"span": seed}, "precision": "float32"}
            summary |= {"numerics": {"shared": 1}, "flops_per_byte": {"executed": 1e6}}
            summary["memory"] = {"state_bytes": (state or {}).get(name, 100)}
            made.append({"cell": ["sweep=front_page", f"seed={seed}", f"variant={name}"], "summary": summary})
    return made


def verdicts(table: str) -> list[str]:
    return [line.strip("| ").split("|")[-1].strip("* ") for line in table.splitlines() if line.startswith("| **")]


def test_intervals_are_judged_by_where_they_lie():
    below, close = [-0.10, -0.11, -0.12], [-0.01, 0.0, 0.012]
    above = [-one for one in below]
    assert [judge(one, must="less", margin=0.0)[0] for one in (below, close, above)] == [HOLDS, OPEN, NOT]
    assert [judge(one, must="no more", margin=0.05)[0] for one in (below, close, above)] == [HOLDS, HOLDS, NOT]
    assert [judge(one, must="the same", margin=0.05)[0] for one in (below, close, above)] == [NOT, HOLDS, NOT]
    assert judge(close, must="the same", margin=0.02)[0] == OPEN
    assert judge([0.0] * 3, must="less", margin=0.0)[0] == NOT, "equal costs are not less"
    assert judge(below[:2], must="less", margin=0.0)[0] == judge([-1.0], must="less", margin=0.0)[0] == FEW
    assert judge(below, must="less", margin=0.0)[1] == "-0.1100 ± 0.0248"  # 4.303 x 0.01 / sqrt(3)


def test_a_claim_holds_where_all_of_its_parts_do():
    bits = {name: [2.3, 2.31, 2.32] for name in FIRST} | {"mhsa_8_layers": [2.4, 2.42, 2.43]}
    bits |= {"uniform_span": [2.29, 2.33, 2.32], "replayed_spans": [2.2, 2.21, 2.22]}
    table = verdict_table(lines(bits, state={"adaptive_span": 50}))
    assert verdicts(table) == [NOT, OPEN, NOT, HOLDS, HOLDS]  # adaptive spans have less state, but not fewer FLOPs
    assert "| -50.0000 ± 0.0000 | holds |" in table


def test_runs_without_a_score_are_counted_and_runs_of_two_protocols_make_no_table():
    made = lines({name: [2.3, 2.31, 2.32, 2.33] for name in FIRST})
    whole = verdict_table(made)
    assert "without a score" not in whole and FEW not in whole
    *_, failed, unchecked, _ = made  # of mhsa_8_layers
    failed["summary"], unchecked["summary"] = {"status": "failed"}, unchecked["summary"] | {"check": "unchecked"}
    table = verdict_table(made)
    assert "| 2, 2 without a score |" in table and verdicts(table)[-1] == FEW
    made[0]["summary"]["data"] = {"sha256": "cd"}
    with pytest.raises(ValueError, match="rows differ in data, protocol"):
        verdict_table(made)
