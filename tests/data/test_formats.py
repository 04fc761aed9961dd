"""Detection of the format from the columns, and what is said when the columns are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.data.formats import FORMATS, Detected, check_columns, detect, suggest, unused_columns, value_of
from trimtab.data.read import Row
from trimtab.errors import RequestError

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


def rows(*values: dict[str, Any]) -> list[Row]:
    return [Row(value, "set.jsonl", number, "line") for number, value in enumerate(values, 1)]


def found(values: dict[str, Any], wanted: str = "auto", **mapping: str) -> Detected:
    return detect(rows(values), wanted, mapping)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"instruction": "a", "output": "b"}, "alpaca"),
        ({"instruction": "a", "input": "", "output": "b", "text": "whole"}, "alpaca"),
        ({"conversations": SHAREGPT, "tools": "[]"}, "sharegpt"),
        ({"messages": CHAT, "prompt": "a"}, "messages"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"text": "a", "meta": 1}, "text"),
    ],
)
def test_detection_by_columns(values: dict[str, Any], name: str) -> None:
    assert found(values).form.name == name


def test_an_ambiguous_file_says_what_else_would_fit() -> None:
    detected = found({"instruction": "a", "output": "b", "text": "c"})
    assert detected.form.name == "alpaca"
    assert "text would fit too and comes later in the order messages, sharegpt, alpaca" in detected.reason


def test_the_setting_wins_over_detection() -> None:
    detected = found({"instruction": "a", "output": "b", "text": "c"}, "text")
    assert (detected.form.name, detected.reason) == ("text", "data.format=text; columns text")


def test_question_and_answer_get_the_settings_that_map_them() -> None:
    with pytest.raises(RequestError) as raised:
        found({"question": "a", "answer": "b"})
    text = str(raised.value)
    assert text.startswith("set.jsonl, line 1: no format fits its columns (question, answer)")
    assert "set data.columns.prompt=question data.columns.completion=answer" in text
    assert found({"question": "a", "answer": "b"}, prompt="question", completion="answer").form.name == (
        "prompt_completion"
    )


@pytest.mark.parametrize(
    ("values", "mapping"),
    [
        ({"instruction": "a", "response": "b"}, {"output": "response"}),
        ({"prompt": "a", "response": "b"}, {"completion": "response"}),
        ({"input": "a", "output": "b"}, {"prompt": "input", "completion": "output"}),
        ({"Question": "a", "Answer": "b"}, {"prompt": "Question", "completion": "Answer"}),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"completion": "chosen"}),
        ({"rejected": CHAT, "chosen": CHAT}, {"messages": "chosen"}),
        ({"dialog": CHAT, "id": 1}, {"messages": "dialog"}),
        ({"id": 1, "exchange": SHAREGPT}, {"conversations": "exchange"}),
        ({"content": "a", "id": 1}, {"text": "content"}),
        ({"instuction": "a", "output": "b"}, {"instruction": "instuction"}),
        (
            {"instruction": "a", "instances": [{"input": "b", "output": "c"}]},
            {"output": "instances.0.output", "input": "instances.0.input"},
        ),
        ({"id": 1, "score": 2}, {}),
    ],
)
def test_the_suggested_mapping_works(values: dict[str, Any], mapping: dict[str, str]) -> None:
    row = rows(values)[0]
    assert suggest(row, FORMATS.values(), {}) == mapping
    if mapping:
        assert found(values, **mapping)


def test_a_mapping_does_not_unmap_the_other_columns() -> None:
    with pytest.raises(RequestError, match=r"set data\.columns\.output=answer"):
        found({"question": "a", "answer": "b"}, instruction="question")
    assert found({"question": "a", "output": "b"}, instruction="question").form.name == "alpaca"


def test_a_mapped_column_that_is_not_there() -> None:
    with pytest.raises(RequestError, match=r"no column `questoin` .*\n.*\n.*data\.columns\.prompt=question"):
        found({"question": "a", "completion": "b"}, prompt="questoin")


def test_a_mapped_optional_column_that_no_row_has() -> None:
    with pytest.raises(RequestError, match="no column `context`"):
        found({"instruction": "a", "output": "b"}, input="context")


def test_an_optional_column_may_be_missing_in_some_rows() -> None:
    both = rows({"instruction": "a", "output": "b"}, {"instruction": "a", "output": "b", "context": "c"})
    assert detect(both, "auto", {"input": "context"}).form.name == "alpaca"


def test_a_mapping_the_wrong_way_round() -> None:
    with pytest.raises(RequestError, match=r"the other way round: data\.columns\.prompt=question"):
        found({"question": "a"}, question="prompt")


def test_a_mapping_of_an_unknown_column() -> None:
    with pytest.raises(RequestError, match=r"did you mean data\.columns\.instruction=q\?"):
        found({"q": "a"}, instructon="q")


def test_a_format_that_lacks_its_column_names_it() -> None:
    with pytest.raises(RequestError, match=r"no column `output` \(columns: instruction, answer\)"):
        found({"instruction": "a", "answer": "b"}, "alpaca")


def test_a_later_row_without_a_column_is_named() -> None:
    first, odd = rows({"instruction": "a", "output": "b"}, {"instruction": "a", "reply": "b"})
    with pytest.raises(
        RequestError, match=r"set\.jsonl, line 2: no column `output` \(columns: instruction, reply\)"
    ):
        check_columns(odd, FORMATS["alpaca"], first, {})


def test_mixed_formats_name_the_first_odd_row() -> None:
    first, odd = rows({"instruction": "a", "output": "b"}, {"messages": CHAT})
    with pytest.raises(RequestError, match=r"set\.jsonl, line 2: a messages row .* among alpaca rows"):
        check_columns(odd, FORMATS["alpaca"], first, {})


def test_a_path_into_a_row() -> None:
    values = {"a": [{"b": "x"}], "c.d": "y"}
    assert value_of(values, "out", {"out": "a.0.b"}) == "x"
    assert value_of(values, "out", {"out": "c.d"}) == "y"
    assert value_of(values, "out", {"out": "a.1.b"}) is value_of(values, "nothing", {})


def test_columns_that_are_not_used() -> None:
    row = rows({"id": 1, "question": "a", "answer": "b"})[0]
    mapping = {"prompt": "question", "completion": "answer"}
    assert unused_columns(row, FORMATS["prompt_completion"], mapping) == ["id"]
