"""The positive control of recall by key: a committed row in which softmax attention, without a
shift of keys, recalls."""

from pathlib import Path

from bench.evidence import mechanism
from harness.record.rows import read_rows

ROWS = Path(__file__).resolve().parents[2] / "bench" / "results" / "recall_by_key.jsonl"


def test_attention_without_shifted_keys_recalls_eight_keys_at_some_rate():
    summaries = [row["summary"] for row in read_rows(ROWS) if mechanism(row["cell"]) == "mhsa"]
    finished = [summary for summary in summaries if summary["status"] == "finished"]
    assert all(summary["protocol"]["sequence"] == 64 for summary in finished)
    accuracy = [summary["test_answer_accuracy"]["all"] for summary in finished]
    assert max(accuracy, default=0.0) >= 0.99, (
        "without this control no row of the table means anything"
    )
