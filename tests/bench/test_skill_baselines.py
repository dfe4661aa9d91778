"""The predictors of ``bench/skill_baselines.yaml``, which lack the skill, computed: exactly, or
on a generated part."""

import itertools
from collections import Counter
from math import factorial, log2, prod

import numpy as np
import pytest

from bench.tables import read_yaml
from harness.data.skills import BODY, DIGITS, KEYS, PAIRS, SKILLS, WORD_LENGTHS

BASELINES = read_yaml("skill_baselines.yaml")


def test_state_tracking_without_the_steps_or_without_their_order():
    orders = {order: i for i, order in enumerate(itertools.permutations(range(5)))}
    # the order after each step, by the order before it
    after_step = np.arange(5 * len(orders)).reshape(5, -1)
    for order, i in orders.items():
        for step in range(5):
            swapped = list(order)
            if step:
                swapped[step - 1], swapped[step] = swapped[step], swapped[step - 1]
            after_step[step, i] = orders[tuple(swapped)]
    # number of words by how often each step occurs, and by order
    words = {(0,) * 5: np.eye(len(orders), dtype=int)[0]}

    def bits_per_letter(number: np.ndarray) -> float:
        share = number[number > 0] / number.sum()
        return -(share * np.log2(share)).sum() / 5

    for length in range(1, max(WORD_LENGTHS) + 1):
        longer: dict[tuple, np.ndarray] = {}
        for counts, number in words.items():
            for step in range(5):
                key = tuple(count + (i == step) for i, count in enumerate(counts))
                target = longer.setdefault(key, np.zeros(len(orders), dtype=int))
                target[after_step[step]] += number
        words = longer
        if length in WORD_LENGTHS:
            of_counts = (
                sum(number.sum() * bits_per_letter(number) for number in words.values()) / 5**length
            )
            bits = {"(no memory)": bits_per_letter(sum(words.values())), "(counts only)": of_counts}
            for name, expected in bits.items():
                assert BASELINES[name]["state_tracking"][str(length)] == pytest.approx(
                    expected, abs=6e-4
                )


def test_selective_copying_without_the_capitals_or_without_their_order():
    mean_capitals, n, bits = BODY / 4, 0, 0.0
    for part in bytes(SKILLS["selective_copying"].stream(200_000)).split(b">")[:-1]:
        capitals = Counter(part[-BODY:].replace(b".", b""))
        n += capitals.total()
        bits += log2(factorial(capitals.total()) // prod(map(factorial, capitals.values())))
    assert BASELINES["(counts only)"]["selective_copying"]["all"] == pytest.approx(
        bits / n, abs=0.03
    )
    # Without memory 16 letters are equally likely, and a copy ends after a byte with the
    # probability 1 / 17.
    expected = 4 + log2((mean_capitals + 1) / mean_capitals)
    assert BASELINES["(no memory)"]["selective_copying"]["all"] == pytest.approx(expected, abs=6e-4)


def test_multi_query_recall_with_digits_but_without_their_keys():
    stream = SKILLS["multi_query_recall"].stream(40_000)
    cuts = itertools.combinations(range(KEYS + DIGITS - 1), DIGITS - 1)
    # how many keys have a digit
    keys_by_digit = np.array([np.diff((-1, *cut, KEYS + DIGITS - 1)) - 1 for cut in cuts])
    prior = (
        np.array([factorial(KEYS) / prod(map(factorial, row)) for row in keys_by_digit.tolist()])
        / DIGITS**KEYS
    )
    assert prior.sum() == pytest.approx(1) and PAIRS > KEYS
    belief, bits = prior, np.zeros(len(stream))
    for at, byte in enumerate(stream.tolist()):
        if byte == ord("\n"):
            belief = prior
        elif chr(byte).isdigit():
            joint = belief * keys_by_digit[:, byte - ord("0")] / KEYS
            bits[at], belief = -log2(joint.sum()), joint / joint.sum()
    for label, mask in SKILLS["multi_query_recall"].answers(stream).items():
        assert BASELINES["(counts only)"]["multi_query_recall"][label] == pytest.approx(
            bits[mask].mean(), abs=0.06
        )
        assert BASELINES["(no memory)"]["multi_query_recall"][label] == log2(DIGITS)
