"""The official metrics of the GLUE+ tasks, by their definitions. Pure Python; nothing is rounded or scaled here.

A figure that its data do not define (a correlation with a constant) is NaN, never 0. The exceptions are the
conventions of the tasks' own scripts: F1 without any positive, or without a word in common, is 0, and so is Matthews
with a constant side.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby

Labels = Sequence[int]


def accuracy(predicted: Labels, gold: Labels) -> float:
    """Share of predictions that are right."""
    _check(predicted, gold)
    return sum(p == g for p, g in zip(predicted, gold, strict=True)) / len(gold)


def f1(predicted: Labels, gold: Labels, positive: int = 1) -> float:
    """Harmonic mean of precision and recall of one class."""
    _check(predicted, gold)
    hits = sum(p == g == positive for p, g in zip(predicted, gold, strict=True))
    said, there = sum(p == positive for p in predicted), sum(g == positive for g in gold)
    return 2 * hits / (said + there) if said + there else 0.0


def f1_macro(predicted: Labels, gold: Labels) -> float:
    """Mean of the F1 of every class that occurs, predicted or true."""
    _check(predicted, gold)
    classes = sorted({*predicted, *gold})
    return math.fsum(f1(predicted, gold, c) for c in classes) / len(classes)


def matthews(predicted: Labels, gold: Labels) -> float:
    """Matthews correlation of two binary labellings (also of more classes, by Gorodkin's form)."""
    _check(predicted, gold)
    count, right = len(gold), sum(p == g for p, g in zip(predicted, gold, strict=True))
    said, there = Counter(predicted), Counter(gold)
    covariance = right * count - sum(said[c] * there[c] for c in there)
    spread = (count**2 - sum(n * n for n in said.values())) * (count**2 - sum(n * n for n in there.values()))
    return covariance / math.sqrt(spread) if spread else 0.0


def pearson(predicted: Sequence[float], gold: Sequence[float]) -> float:
    """Linear correlation; NaN where one side is constant."""
    _check(predicted, gold)
    count = len(gold)
    mean_p, mean_g = math.fsum(predicted) / count, math.fsum(gold) / count
    p, g = [x - mean_p for x in predicted], [x - mean_g for x in gold]
    if min(predicted) == max(predicted) or min(gold) == max(gold):
        return math.nan
    # hypot does not underflow where the sum of squares would.
    length_p, length_g = math.hypot(*p), math.hypot(*g)
    return math.fsum((x / length_p) * (y / length_g) for x, y in zip(p, g, strict=True))


def spearman(predicted: Sequence[float], gold: Sequence[float]) -> float:
    """Pearson's correlation of the ranks; equal values share the mean of their ranks."""
    return pearson(ranks(predicted), ranks(gold))


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; ties get the mean of the places that they take up."""
    order = sorted(range(len(values)), key=values.__getitem__)
    result, before = [0.0] * len(values), 0
    for _, tied in groupby(order, key=values.__getitem__):
        places = list(tied)
        for place in places:
            result[place] = before + (1 + len(places)) / 2
        before += len(places)
    return result


def multirc(predicted: Labels, gold: Labels, groups: Sequence[Hashable]) -> tuple[float, float]:
    """MultiRC's F1 over all answers (F1a), and the share of questions with every answer judged right (EM)."""
    _check(predicted, gold)
    right: dict[Hashable, bool] = {}
    for p, g, group in zip(predicted, gold, groups, strict=True):
        right[group] = right.get(group, True) and p == g
    return f1(predicted, gold), sum(right.values()) / len(right)


def normalised(answer: str) -> str:
    """SQuAD's normal form: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 where the answer equals one of the references in normal form."""
    return float(normalised(answer) in map(normalised, references))


def token_f1(answer: str, references: Sequence[str]) -> float:
    """The best F1 of the words in common with one of the references."""
    return max(_words_f1(normalised(answer).split(), normalised(r).split()) for r in references)


def answer_scores(answers: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[float, float]:
    """Mean F1 and mean exact match over questions: the figures of SQuAD and of ReCoRD."""
    if not answers or len(answers) != len(references):
        raise ValueError(f"{len(answers)} answers for {len(references)} questions")
    pairs = list(zip(answers, references, strict=True))
    return (
        math.fsum(token_f1(a, r) for a, r in pairs) / len(pairs),
        math.fsum(exact_match(a, r) for a, r in pairs) / len(pairs),
    )


BY_LABEL: dict[str, Callable[[Labels, Labels], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "f1_macro": f1_macro,
    "matthews": matthews,
}
"""Metrics that need the predicted and the true class alone."""


def _words_f1(said: list[str], true: list[str]) -> float:
    common = sum((Counter(said) & Counter(true)).values())
    return 2 * common / (len(said) + len(true)) if common else 0.0


def _check(predicted: Sequence[float], gold: Sequence[float]) -> None:
    if not gold or len(predicted) != len(gold):
        raise ValueError(f"{len(predicted)} predictions for {len(gold)} rows")
