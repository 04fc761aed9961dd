"""Metrics against values computed by hand and against their textbook formulas."""

from __future__ import annotations

import math
import random

import pytest

from trimtab.data.tasks import metrics

PREDICTED = [1, 1, 1, 0, 0, 1, 0, 0]
GOLD = [1, 1, 0, 0, 1, 1, 0, 0]
# true positives 3, false positives 1, false negatives 1, true negatives 3


def test_by_hand() -> None:
    assert metrics.accuracy(PREDICTED, GOLD) == 0.75
    assert metrics.f1(PREDICTED, GOLD) == 0.75
    assert metrics.matthews(PREDICTED, GOLD) == pytest.approx((3 * 3 - 1 * 1) / math.sqrt(4 * 4 * 4 * 4))
    # F1 of the classes 0, 1, 2 is 2/3, 1/2 and 0.
    assert metrics.f1_macro([0, 0, 1, 1], [0, 2, 1, 0]) == pytest.approx((0.5 + 2 / 3 + 0) / 3)


def test_binary_formulas_on_random_labels() -> None:
    chance = random.Random(3)
    for _ in range(50):
        p, g = ([int(chance.random() < share) for _ in range(40)] for share in (0.3, 0.6))
        tp, fp = (
            sum(a & b for a, b in zip(p, g, strict=True)),
            sum(a & ~b & 1 for a, b in zip(p, g, strict=True)),
        )
        fn = sum(g) - tp
        tn = 40 - tp - fp - fn
        spread = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
        assert metrics.accuracy(p, g) == (tp + tn) / 40
        if tp:
            precision, recall = tp / (tp + fp), tp / (tp + fn)
            assert metrics.f1(p, g) == pytest.approx(2 * precision * recall / (precision + recall))
        if spread:
            assert metrics.matthews(p, g) == pytest.approx((tp * tn - fp * fn) / math.sqrt(spread))
            # On binary labels Matthews is Pearson.
            assert metrics.matthews(p, g) == pytest.approx(metrics.pearson(p, g))


def test_conventions_where_a_class_does_not_occur() -> None:
    assert metrics.matthews([1, 1, 1], [0, 1, 1]) == 0.0
    assert metrics.f1([0, 0], [0, 0]) == 0.0
    assert metrics.f1_macro([0, 0], [0, 0]) == 1.0


def test_pearson_by_hand() -> None:
    # deviations -1.5 -0.5 0.5 1.5 against -2 0 1 1: 3 + 0 + 0.5 + 1.5 over sqrt(5 * 6)
    assert metrics.pearson([1, 2, 3, 4], [1, 3, 4, 4]) == pytest.approx(5 / math.sqrt(30))
    assert metrics.pearson([1, 2, 3], [-2, -4, -6]) == pytest.approx(-1)


def test_pearson_survives_a_large_offset_and_tiny_values() -> None:
    assert metrics.pearson([1e9 + 1, 1e9 + 2, 1e9 + 4], [1, 2, 4]) == pytest.approx(1)
    assert metrics.pearson([1e-200, 2e-200, 4e-200], [1, 2, 4]) == pytest.approx(1)


def test_a_correlation_with_a_constant_is_not_defined() -> None:
    assert math.isnan(metrics.pearson([0.1, 0.1, 0.1], [1, 2, 3]))
    assert math.isnan(metrics.spearman([1, 2, 3], [5, 5, 5]))


def test_ranks_share_ties() -> None:
    assert metrics.ranks([10, 20, 20, 5, 20]) == [2, 4, 4, 1, 4]


def test_spearman_by_hand_and_by_formula() -> None:
    assert metrics.spearman([1, 2, 3, 4, 5], [1, 8, 27, 64, 125]) == pytest.approx(1)
    # ranks 1 2.5 2.5 4 against 1 2 3 4
    assert metrics.spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    chance = random.Random(1)
    a, b = ([chance.random() for _ in range(30)] for _ in range(2))
    squares = sum((x - y) ** 2 for x, y in zip(metrics.ranks(a), metrics.ranks(b), strict=True))
    assert metrics.spearman(a, b) == pytest.approx(1 - 6 * squares / (30 * (30**2 - 1)))


def test_squad_normal_form() -> None:
    assert metrics.normalised("  The  Bridge-Keeper's  an answer. ") == "bridgekeepers answer"
    assert metrics.normalised("Theatre") == "theatre"


def test_squad_scores_by_hand() -> None:
    assert metrics.exact_match("The river.", ["a river", "sea"]) == 1.0
    assert metrics.exact_match("river bank", ["river"]) == 0.0
    # one word in common of two and three: 2*1/(2+3)
    assert metrics.token_f1("river bank", ["the river of gold"]) == pytest.approx(2 / 5)
    assert metrics.token_f1("to be or be", ["be be be"]) == pytest.approx(2 * 2 / (4 + 3))
    assert metrics.token_f1("x", ["y", "x y"]) == pytest.approx(2 / 3)
    assert metrics.token_f1("", ["word"]) == 0.0
    # As in the official script of SQuAD 1.1: without a word in common 0, also where nothing is left of both.
    assert (metrics.token_f1("the", ["a"]), metrics.exact_match("the", ["a"])) == (0.0, 1.0)
    f1, em = metrics.answer_scores(["the cat", "dog house"], [["cat"], ["dog", "bird"]])
    assert (f1, em) == (pytest.approx((1 + 2 / 3) / 2), 0.5)


def test_multirc_by_hand() -> None:
    groups = ["a", "a", "b", "b", "c"]
    f1a, em = metrics.multirc([1, 0, 1, 1, 0], [1, 0, 1, 0, 0], groups)
    assert f1a == pytest.approx(2 * 2 / (3 + 2))
    assert em == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", sorted(metrics.BY_LABEL))
def test_lengths_must_agree(name: str) -> None:
    for predicted, gold in (([1], [1, 0]), ([], [])):
        with pytest.raises(ValueError, match=f"{len(predicted)} predictions for {len(gold)} rows"):
            metrics.BY_LABEL[name](predicted, gold)
