"""Labelled texts: ListOps by code, files of the user, and the order of reading."""

import json
import re
from collections import Counter
from statistics import median

import pytest
import torch

from harness.data import corpora
from harness.data.labelled import read_labelled
from harness.data.listops import listops
from harness.data.texts import TextBatches, Texts, scored_texts

OPERATORS = {
    "MIN": lambda *n: min(n),
    "MAX": lambda *n: max(n),
    "MED": lambda *n: int(median(n)),
    "SM": lambda *n: sum(n) % 10,
}


def evaluate(text: str) -> int:
    """Evaluate a list as an expression of Python: ``[MAX 2 3 ]`` becomes ``MAX(2,3,)``."""
    expression = re.sub(r"\[(\w+) ", r"\1(", text).replace("]", ")").replace(" ", ",")
    return eval(expression.replace(",)", ")"), dict(OPERATORS))


def test_every_list_has_100_to_500_bytes_and_evaluates_to_its_class():
    texts, labels = listops(300_000)
    assert all(100 <= len(text) <= 500 for text in texts)
    assert [str(evaluate(text.decode())) for text in texts] == labels
    shares = Counter(labels)
    assert len(shares) == 10 and min(shares.values()) > 0.06 * len(texts)
    names = Counter(re.findall("[A-Z]+", b"".join(texts).decode()))
    assert names.keys() == OPERATORS.keys()
    assert min(names.values()) > 0.9 * max(names.values())
    assert sum(map(len, texts)) + len(texts) - 300_000 in range(501)
    assert len(set(texts)) == len(texts)


def test_a_shorter_corpus_is_a_prefix_and_another_seed_gives_others():
    texts, _ = listops(20_000)
    assert listops(5_000)[0] == texts[: len(listops(5_000)[0])]
    assert not set(listops(20_000, seed=1)[0]) & set(texts)


CSV = 'id,label,text\n1,good,"a, ""b""\nc"\n2,bad,ü\n'


def test_a_csv_and_a_jsonl_file_of_the_same_texts_are_equal(tmp_path):
    (tmp_path / "a.csv").write_text(CSV)
    lines = [{"text": 'a, "b"\nc', "label": "good"}, {"text": "ü", "label": "bad"}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    expected = ([b'a, "b"\nc', "ü".encode()], ["good", "bad"])
    assert read_labelled(str(tmp_path / "a.csv")) == expected
    assert read_labelled(str(tmp_path / "a.jsonl")) == expected


MISTAKES = {
    "columns": ("a.csv", "text,class\nx,1\n", "line 2: label=None: needed are"),
    "no text": ("a.csv", 'text,label\nx,1\n"",2\n', "line 3: text='': needed are"),
    "no json": ("a.jsonl", '{"text": "x", "label": 1}\n{"text"\n', "line 2: Expecting"),
    "no object": ("a.jsonl", "[1]\n", "line 1: 'list' object has no"),
    "list": ("a.jsonl", '{"text": ["x"], "label": 1}\n', "line 1: text=['x']: needed are"),
    "one class": ("a.csv", "text,label\nx,1\ny,1\n", "its labels are ['1']; at least two"),
    "UTF-8": ("a.csv", b"text,label\nx,1\n\xff,2\n", "line 3: 'utf-8' codec"),
    "long": ("a.csv", f"text,label\n{'x' * 200000},1\n", "line 2: field larger than"),
    "more fields": ("a.csv", "text,label\na,1\nb, c,2\n", "line 3: ['2']: more fields than"),
    "open quote": ("a.csv", 'label,text\n1,a\n2,"b\n1,c\n', "unexpected end of data"),
    "surrogate": ("a.jsonl", '{"text": "\\ud800", "label": 1}\n', "line 1: 'utf-8' codec"),
    "suffix": ("a.csv.d/a.txt", "x", "allowed are files of .csv, .jsonl"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_file_is_named_with_file_and_line(mistake, tmp_path):
    name, content, words = MISTAKES[mistake]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as caught:
        read_labelled(str(path))
    assert str(caught.value).startswith(f"data.path={str(path)!r}: ") and words in str(caught.value)


def test_a_sorted_file_is_shuffled_and_cut_between_texts(tmp_path):
    rows = [f"{'yes' if i < 300 else 'no'} {i},{'yes' if i < 300 else 'no'}" for i in range(600)]
    path = tmp_path / "sorted.csv"
    path.write_text("\n".join(["text,label", *rows]))
    corpus = corpora.load("labelled", path=str(path), split=(0.8, 0.1, 0.1))
    assert corpus.classes == ("no", "yes")
    read = []
    for name, share in (("train", 480), ("valid", 60), ("test", 60)):
        texts = corpus.texts[name]
        assert texts.number == share and 0.3 < texts.labels.double().mean() < 0.7
        assert len(texts) == len(corpus.splits[name])
        for i, label in enumerate(texts.labels.tolist()):
            start, end = texts.starts[i], texts.starts[i] + texts.lengths[i]
            text = bytes(texts.content[start:end].tolist()).decode()
            assert text.split()[0] == corpus.classes[label]
            read.append(text)
    assert len(set(read)) == 600
    with pytest.raises(ValueError, match=r"data.sha256=0: the SHA-256 of file:sorted.csv is "):
        corpora.load("labelled", path=str(path), sha256="0")
    with pytest.raises(ValueError, match="data=labelled: allowed are data.vocabulary=256"):
        corpora.load("labelled", path=str(path), vocabulary=30)
    with pytest.raises(ValueError, match="data=labelled requires data.path=FILE.csv or .jsonl"):
        corpora.load("labelled")


TEXTS = Texts.of([b"a" * n for n in (1, 5, 70, 200, 64, 3, 2, 9)], [0, 1, 2, 0, 1, 2, 0, 1])


def test_texts_are_padded_to_the_longest_rounded_up_and_cut_at_the_limit():
    inputs, labels, lengths = TEXTS.cut(100).padded(torch.tensor([0, 2]))
    assert inputs.shape == (2, 128) and lengths.tolist() == [1, 70]
    assert inputs.count_nonzero(dim=1).tolist() == [1, 70] and labels.tolist() == [[0], [2]]
    assert TEXTS.cut(100).padded(torch.tensor([1, 4]))[0].shape == (2, 64)
    assert TEXTS.cut(100).padded(torch.tensor([3]))[2].tolist() == [100]
    assert TEXTS.within(TEXTS.content[2:80]).lengths.tolist() == [5, 70]
    assert TEXTS.within(TEXTS.content[300:305]).lengths.tolist() == [3]


@pytest.mark.parametrize("n_bytes", [1, 50, 200])
def test_no_text_both_selects_weights_and_is_reported(n_bytes):
    texts = Texts.of([b"a" * 90] * 9, [0] * 9).cut(20)
    end = len(texts.content)
    reported = texts.within(texts.content[: end - n_bytes]).starts.tolist()
    selecting = texts.within(texts.content[end - n_bytes :]).starts.tolist()
    assert reported and selecting and not set(reported) & set(selecting)


def test_an_epoch_reads_every_text_once_and_processes_divide_a_step():
    batches = TextBatches(TEXTS, streams=4, segment=256, seed=3)
    read = []
    for step in range(4):
        _, _, lengths = batches.batch(step)
        # a query of a text of T bytes has T keys
        keys_per_byte = round(float((lengths**2).sum() / lengths.sum()))
        assert batches.size(step) == (keys_per_byte, int(lengths.sum()))
        halves = [batches.batch(step, shard=(rank, 2))[2] for rank in range(2)]
        assert torch.equal(torch.cat(halves), lengths)
        read += lengths.tolist()
    assert sorted(read[:8]) == sorted(read[8:]) == sorted(TEXTS.lengths.tolist())
    assert read[:8] != read[8:]


@pytest.mark.parametrize("batch", [3, 8, 20])
def test_every_text_is_scored_once_in_order_by_any_number_of_processes(batch):
    def labels(shard: tuple[int, int]) -> list[int]:
        batches = scored_texts(TEXTS, batch=batch, shard=shard)
        return [n for _, targets, mask, _ in batches for n in targets[mask].tolist()]

    assert labels((0, 1)) == labels((0, 2)) + labels((1, 2)) == TEXTS.labels.tolist()
