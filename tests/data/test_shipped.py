"""The shipped data set: shape of every row, no copies, and a README that tells the truth about it."""

from __future__ import annotations

import importlib.resources
import json
import re
from collections import Counter
from itertools import combinations
from typing import cast

import pytest

SHIPPED = importlib.resources.files("trimtab.data") / "shipped"
README = (SHIPPED / "README.md").read_text(encoding="utf-8")
LINES = (SHIPPED / "device-errors.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return [cast("dict[str, str]", json.loads(line)) for line in LINES]


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))


def test_every_row_has_the_columns_as_text(rows: list[dict[str, str]]) -> None:
    for number, row in enumerate(rows, start=1):
        assert list(row) == ["instruction", "input", "output", "topic"], f"row {number}"
        assert all(isinstance(value, str) and value == value.strip() for value in row.values()), (
            f"row {number}"
        )
        assert row["instruction"], f"row {number}"


def test_answers_have_one_shape(rows: list[dict[str, str]]) -> None:
    for number, row in enumerate(rows, start=1):
        answer = row["output"]
        assert re.fullmatch(r"Cause: \S.* Fix: \S.*[.`)]", answer), f"row {number}: {answer}"
        assert answer.count("Cause: ") == answer.count("Fix: ") == 1, f"row {number}: {answer}"
        assert answer.count("`") % 2 == 0, f"row {number} leaves a code span open: {answer}"
        assert 80 <= len(answer) <= 320, f"row {number} has {len(answer)} characters"
        assert len(row["instruction"]) + len(row["input"]) <= 260, f"row {number}"


def test_text_is_plain(rows: list[dict[str, str]]) -> None:
    odd = [number for number, line in enumerate(LINES, start=1) if not line.isascii()]
    assert odd == []
    assert all("\n" not in value for row in rows for value in row.values())


def test_no_question_and_no_answer_twice(rows: list[dict[str, str]]) -> None:
    asked = Counter((row["instruction"].lower(), row["input"].lower()) for row in rows)
    answered = Counter(row["output"].lower() for row in rows)
    assert [key for key, count in (asked + answered).items() if count > 1] == []


def test_no_row_is_a_near_copy_of_another(rows: list[dict[str, str]]) -> None:
    answers = [words(row["output"]) for row in rows]
    near = [
        (i + 1, j + 1)
        for (i, a), (j, b) in combinations(enumerate(answers), 2)
        if len(a & b) > 0.8 * len(a | b)
    ]
    assert near == []


def test_there_are_enough_rows_and_the_readme_counts_them(rows: list[dict[str, str]]) -> None:
    assert len(rows) >= 360
    assert re.search(r"^(\d+) questions and answers", README, re.MULTILINE)[1] == str(len(rows))  # type: ignore[index]


def test_readme_lists_the_topics(rows: list[dict[str, str]]) -> None:
    found = re.search(r"^- Topics: (.+)\.$", README, re.MULTILINE)
    assert found
    counts = Counter(row["topic"] for row in rows)
    assert found[1].split(", ") == sorted(counts)
    assert min(counts.values()) >= 10
