"""The table of recall by key: accuracy of answers on test, from rows of ``bench.evidence``."""

from pathlib import Path

from bench.evidence import LR_FACTORS, best_factor, cell_keys, mechanism, scores_by_factor
from harness.data.associative_recall import BYTES_PER_KEY
from harness.record.comparison import INCOMPARABLE_CHECKS
from harness.record.rows import read_rows

KIB = 2**10
LEARNED_ACCURACY = 0.99
NOT_LEARNED = "not in 6.1 (n=1)"
COLUMNS = ("8 keys", "8 keys, first query", "0.99 from, MB", "LR factor", "4 keys", "16 keys", "32 keys")
COLUMNS += ("state with 8 keys, KiB", "state with 32 keys, KiB")


def cells(folder: Path) -> dict[str, dict[str, str]]:
    """The cells of ``COLUMNS`` by mechanism: accuracy by number of keys at the learning rate that
    scored best on valid. With 8 keys also the training bytes of the first validation at 0.99:
    "rate at an end" without one, if the best rate does not lie between others."""
    file, table = folder / "recall_by_key.jsonl", {}
    scores, rows = scores_by_factor(file), [row for row in read_rows(file) if "seed=0" in row["cell"]]
    scored = [row for row in rows if row["summary"].get("test_answer_accuracy")]
    scored = [row for row in scored if row["summary"]["check"] not in INCOMPARABLE_CHECKS]
    for row in sorted(scored, key=lambda row: -row["summary"]["valid_bits_per_byte"]):  # best last
        name, summary = mechanism(row["cell"]), row["summary"]
        columns = table.setdefault(label(name), {})
        keys = summary["protocol"]["sequence"] // BYTES_PER_KEY
        columns[f"state with {keys} keys, KiB"] = f"{summary['memory']['state_bytes'] / KIB:,.0f}"
        columns[f"{keys} keys"] = f"{summary['test_answer_accuracy']['all']:.3f}"
        if keys == 8:
            first = summary["test_answer_accuracy"].get("first")
            columns["8 keys, first query"] = "" if first is None else f"{first:.3f}"
            columns["0.99 from, MB"] = NOT_LEARNED if best_factor(scores[name]) else "rate at an end"
            (curve,) = (entry for entry in row["record"] if entry.get("kind") == "curve")
            for n_bytes, accuracy in zip(curve["bytes_seen"], curve["answer_accuracy"], strict=True):
                if accuracy >= LEARNED_ACCURACY:
                    columns["0.99 from, MB"] = f"{n_bytes / 1e6:.1f}"
                    break
            columns["LR factor"] = cell_keys(row)[LR_FACTORS[1]]
    return dict(sorted(table.items(), key=lambda row: row[1].get("8 keys", ""), reverse=True))


def label(name: str) -> str:
    """A mechanism as the table shows it, such as ```NAME`, key_shift=true``."""
    variant, *options = name.split(" ")
    return ", ".join([f"`{variant}`", *(option.rpartition(".")[2] for option in options)])
