"""Rows of every format as conversations, and the rows that cannot become one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trimtab.data.clean import BadRow, Tally
from trimtab.data.convert import Example, convert, is_answer
from trimtab.data.formats import FORMATS
from trimtab.data.read import Row
from trimtab.errors import RequestError

CALL = {"name": "weather", "arguments": {"city": "Bern"}}
CALLED = [{"type": "function", "function": CALL}]


def example(form: str, values: dict[str, Any], tally: Tally | None = None, **mapping: str) -> Example:
    return convert(Row(values, "set.json", 1), FORMATS[form], mapping, tally or Tally())


def said(*turns: str) -> list[dict[str, str]]:
    """Messages from short forms: `u:hello`, `a:hi`, `s:rules`."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, said("u:Add.\n1 2", "a:3")),
        ({"instruction": "Add.", "input": "", "output": "3"}, said("u:Add.", "a:3")),
        ({"instruction": "Add.", "input": None, "output": "3"}, said("u:Add.", "a:3")),
        ({"instruction": "Add.", "output": "3"}, said("u:Add.", "a:3")),
        ({"instruction": "", "input": "1 2", "output": "3"}, said("u:1 2", "a:3")),
        ({"instruction": "Add.", "output": "3", "system": "Be brief."}, said("s:Be brief.", "u:Add.", "a:3")),
        (
            {"instruction": "b", "output": "B", "history": [["a", "A"]], "system": "s"},
            said("s:s", "u:a", "a:A", "u:b", "a:B"),
        ),
        ({"instruction": "b", "output": "B", "history": '[["a", "A"]]'}, said("u:a", "a:A", "u:b", "a:B")),
        ({"instruction": "b", "output": "B", "history": []}, said("u:b", "a:B")),
    ],
)
def test_alpaca(values: dict[str, Any], expected: list[dict[str, str]]) -> None:
    assert list(example("alpaca", values).messages) == expected


@pytest.mark.parametrize(
    ("human", "gpt"), [("human", "gpt"), ("user", "assistant"), ("user", "bot"), ("Human", "chatgpt")]
)
def test_sharegpt_roles(human: str, gpt: str) -> None:
    turns = [{"from": human, "value": "a"}, {"from": gpt, "value": "b"}]
    assert list(example("sharegpt", {"conversations": turns, "system": "s"}).messages) == said(
        "s:s", "u:a", "a:b"
    )


def test_the_conversation_s_own_system_message_wins() -> None:
    turns = [
        {"from": "system", "value": "own"},
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "b"},
    ]
    assert example("sharegpt", {"conversations": turns, "system": "column"}).messages[0]["content"] == "own"


def test_sharegpt_with_tool_calls() -> None:
    turns = [
        {"from": "human", "value": "Weather in Bern?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": '{"sun": true}'},
        {"from": "gpt", "value": "Sunny."},
    ]
    tools = [{"name": "weather", "parameters": {"type": "object"}}]
    found = example("sharegpt", {"conversations": turns, "tools": json.dumps(tools)})
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": CALLED}
    assert found.tools == ({"type": "function", "function": tools[0]},)


def test_a_call_that_is_not_json_stays_text() -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "function_call", "value": "call me"}]
    assert example("sharegpt", {"conversations": turns}).messages[1] == said("a:call me")[0]


def test_calls_and_results_given_as_objects() -> None:
    turns = [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": CALL},
        {"from": "observation", "value": {"sun": True}},
        {"from": "gpt", "value": "Sunny."},
    ]
    tally = Tally()
    found = example("sharegpt", {"conversations": turns}, tally).messages
    assert found[1]["tool_calls"] == CALLED
    assert found[2]["content"] == '{"sun": true}'
    assert tally.changed.total() == 2


def test_openai_tool_calls_pass_with_arguments_as_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    turns = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun", "name": None},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "It is sun.", "tool_calls": None},
    ]
    found = example("messages", {"messages": turns}).messages
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool", "assistant"]
    assert found[1]["content"] == "ab"
    assert found[2]["tool_calls"] == [{"id": "c1", **CALLED[0]}]
    assert found[3] == {"role": "tool", "tool_call_id": "c1", "content": "sun"}
    assert found[4]["reasoning_content"] == "It is sun."
    assert "tool_calls" not in found[4]


def test_messages_as_json_text_in_a_csv() -> None:
    assert list(example("messages", {"messages": json.dumps(said("u:a", "a:b"))}).messages) == said(
        "u:a", "a:b"
    )


def test_prompt_and_completion_as_text_and_as_messages() -> None:
    assert list(example("prompt_completion", {"prompt": "a", "completion": "b"}).messages) == said(
        "u:a", "a:b"
    )
    found = example(
        "prompt_completion", {"prompt": said("u:a", "a:x", "u:b"), "completion": said("a:y")}
    ).messages
    assert [message["content"] for message in found] == ["a", "x", "b", "y"]
    assert [message["content"] for message in found if is_answer(message)] == ["y"]


def test_weight_zero_leaves_an_answer_untrained() -> None:
    turns = said("u:a", "a:bad", "u:b", "a:good")
    turns[1]["weight"] = 0  # type: ignore[assignment]
    found = example("messages", {"messages": turns}).messages
    assert [message["content"] for message in found if is_answer(message)] == ["good"]


def test_text() -> None:
    assert example("text", {"text": "a\nb"}).text == "a\nb"


def test_what_follows_the_last_answer_is_cut_and_counted() -> None:
    tally = Tally()
    found = example("messages", {"messages": said("u:a", "a:b", "u:c")}, tally)
    assert list(found.messages) == said("u:a", "a:b")
    assert tally.changed == {"conversation cut after its last answer": 1}


def test_numbers_and_crlf_are_written_as_text_and_counted() -> None:
    tally = Tally()
    found = example("alpaca", {"instruction": "a\r\nb", "output": 3}, tally)
    assert list(found.messages) == said("u:a\nb", "a:3")
    assert sorted(tally.changed) == [
        "CRLF line ends inside a text turned into LF",
        "number in `output` written as text",
    ]


@pytest.mark.parametrize(
    ("form", "values", "reason"),
    [
        ("alpaca", {"instruction": "a", "output": None}, "`output` is null"),
        ("alpaca", {"instruction": "a", "output": " \n"}, "`output` is empty"),
        ("alpaca", {"instruction": "a", "output": float("nan")}, "`output` is empty"),
        ("alpaca", {"instruction": "a", "output": ["b"]}, "`output` is a list, not text"),
        ("alpaca", {"instruction": "a", "output": True}, "`output` is a bool, not text"),
        ("alpaca", {"instruction": None, "output": "b"}, "`instruction` is empty"),
        ("alpaca", {"instruction": "a", "output": "b", "history": "x"}, "`history` is not a list"),
        ("messages", {"messages": None}, "`messages` is null"),
        ("messages", {"messages": []}, "`messages` is empty"),
        ("messages", {"messages": "hello"}, "`messages` is not a list of messages"),
        ("messages", {"messages": ["hello"]}, "holds a str where a message should be"),
        ("messages", {"messages": [{"content": "x"}]}, "a message in `messages` has no role"),
        ("messages", {"messages": [{"role": "narrator", "content": "x"}]}, "unknown role `narrator`"),
        ("messages", {"messages": said("u:a")}, "no answer"),
        ("messages", {"messages": said("u:a", "a:")}, "empty answer"),
        ("messages", {"messages": said("u: ", "a:b")}, "empty user message"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "part of kind image_url",
        ),
        (
            "sharegpt",
            {"conversations": said("u:a", "a:b"), "tools": "oops"},
            "`tools` is not a JSON list of tools",
        ),
        ("sharegpt", {"conversations": said("u:a", "a:b"), "tools": [{"x": 1}]}, "a tool without a name"),
        ("prompt_completion", {"prompt": "", "completion": "b"}, "`prompt` is empty"),
        ("text", {"text": "  "}, "`text` is empty"),
    ],
)
def test_rows_that_cannot_be_trained_on(form: str, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow) as raised:
        example(form, values)
    assert reason in str(raised.value)


def test_a_reason_names_the_column_of_the_file() -> None:
    with pytest.raises(BadRow, match="`answer` is null"):
        example("alpaca", {"instruction": "a", "answer": None}, output="answer")


def test_bad_rows_are_counted_or_stop_the_run() -> None:
    counting, strict = Tally(), Tally(strict=True)
    counting.bad("`output` is null", "set.json, row 4")
    counting.bad("`output` is null", "set.json, row 9")
    assert counting.reasons() == ["2 `output` is null (first: set.json, row 4)"]
    with pytest.raises(RequestError, match=r"set\.json, row 4: `output` is null\n.*\n.*data\.bad_rows=drop"):
        strict.bad("`output` is null", "set.json, row 4")


def test_the_key_sees_what_is_taught_and_nothing_else() -> None:
    base = {"instruction": "a", "output": "b"}
    key = example("alpaca", base).key
    assert example("alpaca", {**base, "id": 7, "input": ""}).key == key
    assert example("prompt_completion", {"prompt": "a", "completion": "b"}).key == key
    assert example("alpaca", {**base, "output": "B"}).key != key
    assert example("alpaca", {**base, "system": "s"}).key != key
