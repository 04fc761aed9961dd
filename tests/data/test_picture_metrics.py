"""The metrics of the picture sets, on cases worked out by hand."""

from __future__ import annotations

import pytest

from trimtab.data.picture_metrics import METRICS, score
from trimtab.data.picture_wording import vqa_words
from trimtab.errors import RequestError


@pytest.mark.parametrize(
    ("given", "answers", "wanted"),
    [
        ("Yes", ["yes"], 1),
        ("  the  cat sat. ", ["The cat sat"], 1),
        ("the cat sat", ["The cat sat."], 1),
        ("no", ["yes"], 0),
        ("cats", ["cat"], 0),
        ("b", ["a", "b"], 1),
        ("", ["a"], 0),
        ("3.", ["3"], 1),
        ("['14']", ["14"], 0),
    ],
)
def test_exact(given: str, answers: list[str], wanted: float) -> None:
    assert score("exact", given, answers) == wanted


@pytest.mark.parametrize(
    ("given", "answer", "wanted"),
    [
        ("100", "100", 1),
        ("105", "100", 1),
        ("95", "100", 1),
        ("105.1", "100", 0),
        ("94.9", "100", 0),
        ("-105", "-100", 1),
        ("105", "-100", 0),
        ("10.5%", "10%", 1),
        ("10.6%", "10%", 0),
        ("0.1", "10%", 1),  # a share is a hundredth, as in the usual script
        ("10", "10%", 0),
        ("1,234", "1234", 1),
        ("1234", "1,234,000", 0),
        ("$5.00", "5", 1),
        ("-$5", "-5", 1),
        ("5 €", "5", 1),
        ("1e3", "1000", 1),
        (".5", "0.5", 1),
        (
            "2010",
            "2020",
            1,
        ),  # a year is a number like any other: the official metric does not tell them apart
        ("1900", "2020", 0),
        ("0.0", "0", 1),
        ("0.01", "0", 0),
        ("Manufactures", "manufactures", 1),
        ("Manufactures.", "Manufactures", 1),
        ("Manufacturing", "Manufactures", 0),
        ("nan", "nan", 1),
        ("nan", "5", 0),
        ("inf", "5", 0),
        ("1_0", "10", 0),
        ("1, 2", "12", 0),
        ("5 apples", "5", 0),
        ("", "5", 0),
    ],
)
def test_relaxed(given: str, answer: str, wanted: float) -> None:
    assert score("relaxed", given, [answer]) == wanted


def test_relaxed_takes_any_of_the_answers() -> None:
    assert score("relaxed", "20", ["14", "20.5"]) == 1


@pytest.mark.parametrize(
    ("given", "answers", "wanted"),
    [
        ("invoice", ["invoice"], 1.0),
        ("Invoice ", ["invoice"], 1.0),
        ("invoce", ["invoice"], 1 - 1 / 7),
        ("inoce", ["invoice"], 1 - 2 / 7),
        ("abcd", ["abxy"], 0.0),  # 2 of 4 wrong: not under one half
        ("abcde", ["abcxy"], 0.6),
        ("kitten", ["sitting"], 1 - 3 / 7),
        ("far", ["invoice", "fat"], 1 - 1 / 3),
        ("", ["a"], 0.0),
    ],
)
def test_anls(given: str, answers: list[str], wanted: float) -> None:
    assert score("anls", given, answers) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(("same", "wanted"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_soft_leaves_each_of_ten_out_in_turn(same: int, wanted: float) -> None:
    # Three agree: for those three 2/3 each, for the seven others 1: (3 × 2/3 + 7) / 10 = 0.9.
    # Two agree: (2 × 1/3 + 8 × 2/3) / 10 = 0.6. One: (0 + 9 × 1/3) / 10 = 0.3.
    answers = ["red"] * same + [f"other {number}" for number in range(10 - same)]
    assert score("soft", "red", answers) == pytest.approx(wanted, abs=1e-12)


def test_soft_compares_by_wording() -> None:
    assert score("soft", "The dog.", ["dog"] * 4 + ["cat"] * 6) == 1.0
    assert score("soft", "two", ["2"] * 10) == 1.0
    assert score("soft", "dont know", ["don't know"] * 10) == 1.0
    assert score("soft", "red", ["red"]) == 1.0
    assert score("soft", "blue", ["red"]) == 0.0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("A Dog", "dog"),
        ("an apple and the pear", "apple and pear"),
        ("none", "0"),
        ("Ten", "10"),
        ("yes!", "yes"),
        ("black/white", "black white"),
        ("black / white", "black white"),
        ("t-shirt", "t shirt"),
        ("1,000", "1000"),
        ("1,000-2,000", "10002000"),  # the rule of the official script
        ("3.5", "3.5"),
        ("st. john.", "st john"),
        ("couldnt", "couldn't"),
        ("couldnt've", "couldn't've"),
        ("its", "its"),
        (" two\n dogs ", "2 dogs"),
    ],
)
def test_the_wording_of_vqa(text: str, wanted: str) -> None:
    assert vqa_words(text) == wanted


def test_an_unknown_metric_lists_those_there_are() -> None:
    with pytest.raises(RequestError, match="exact, relaxed, anls, soft"):
        score("bleu", "a", ["a"])
    assert list(METRICS) == ["exact", "relaxed", "anls", "soft"]
