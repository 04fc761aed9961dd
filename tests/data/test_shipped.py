"""The shipped data sets: shape of every row, no copies, and a README that tells the truth about them."""

from __future__ import annotations

import importlib.resources
import json
import re
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import cast

import pytest

from trimtab.diagnose.explain import explain
from trimtab.diagnose.finding import KINDS

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


Rows = list[dict[str, str]]

# Faults of a program that `trimtab explain` files under other-error; here they have names of their own.
OWN_KINDS = {"shape-mismatch", "index-range", "state-dict"}


@pytest.fixture(scope="module")
def known() -> Rows:
    return shipped("error-kinds")


@pytest.fixture(scope="module")
def held_out() -> Rows:
    return shipped("error-kinds-held-out")


def shipped(name: str) -> Rows:
    text = (SHIPPED / f"{name}.jsonl").read_text(encoding="ascii")
    return [cast("dict[str, str]", json.loads(line)) for line in text.splitlines()]


def kind_and_fix(row: dict[str, str]) -> tuple[str, str]:
    found = re.fullmatch(r"kind: ([a-z-]+)\nfix: (\S.*\S)", row["completion"])
    assert found, row
    return found[1], found[2]


def test_error_texts_are_answered_out_of_the_list_that_the_readme_gives(known: Rows, held_out: Rows) -> None:
    listed = dict(re.findall(r"^\| ([a-z-]+) \| (.+?) \|$", README, re.MULTILINE))
    listed.pop("kind")
    for rows in (known, held_out):
        assert all(list(row) == ["prompt", "completion"] for row in rows)
        counts = Counter(kind_and_fix(row) for row in rows)
        assert set(counts) == set(listed.items())
        assert len(set(counts.values())) == 1, "every kind has the same share"
    assert f"{len(known)} error texts" in README
    assert f"{len(held_out)} held-out" in README
    assert {kind for kind in listed if kind not in KINDS} == OWN_KINDS


def test_no_error_text_stands_twice_and_held_out_ones_stand_in_surroundings_of_their_own(
    known: Rows, held_out: Rows
) -> None:
    texts = Counter(row["prompt"] for row in known + held_out)
    assert [text for text, count in texts.items() if count > 1] == []
    # Numbers are no words: other numbers alone do not make another surrounding.
    seen = {word for row in known for word in words_around(row)}
    assert [row["prompt"] for row in held_out if not words_around(row) - seen] == []


def words_around(row: dict[str, str]) -> set[str]:
    return set(re.findall(r"[a-z_]{2,}", row["prompt"].lower()))


def test_explain_never_gives_another_kind(known: Rows, held_out: Rows) -> None:
    """What the rules of `trimtab explain` recognise they call the same; they have no rule for many of the texts."""
    recognised = 0
    for row in known + held_out:
        found = {explanation.kind for explanation in explain(row["prompt"])} - {"other-error"}
        assert not found or kind_and_fix(row)[0] in found, row["prompt"]
        recognised += bool(found)
    assert recognised > 50


def test_a_set_with_held_out_rows_of_its_own_is_evaluated_on_them(tiny_model: Path) -> None:
    """And on nothing where nobody wants an evaluation, nor where other rows are named."""
    from transformers import AutoTokenizer

    from trimtab.config.schema import DataSettings
    from trimtab.data.prepare import prepare_data

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def prepared(**settings: object) -> tuple[int, int, str]:
        data = prepare_data(DataSettings(source="error-kinds", **settings), tokenizer, seed=0)  # type: ignore[arg-type]
        return data.report.rows_train, data.report.rows_eval, data.report.split

    assert prepared() == (288, 48, "the set's own held-out rows")
    assert prepared(eval_fraction=0.0)[1] == 0
    assert prepared(eval_source="error-kinds")[1:] == (288, "data.eval_source=error-kinds")
