"""Rows as prompts: text, messages or a template, with the other columns kept for rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from trimtab.config import load_config
from trimtab.data.prompts import PromptData, prepare_prompts
from trimtab.errors import RequestError


@pytest.fixture
def prepare(tiny_model: Path, tmp_path: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def run(rows: list[dict[str, Any]], *settings: str) -> PromptData:
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
        words = ["recipe=grpo", "reward=length", f"data={file}", "data.eval_fraction=0", *settings]
        return prepare_prompts(load_config(None, words), tokenizer)

    return run


def test_a_question_becomes_a_users_message_and_its_columns_stay(prepare: Any) -> None:
    data = prepare([{"question": "What is 1 + 1?", "answer": "#### 2", "level": 3}])
    assert data.train[0] == {
        "prompt": [{"role": "user", "content": "What is 1 + 1?"}],
        "answer": "#### 2",
        "level": 3,
        "question": "What is 1 + 1?",
    }
    assert data.report.columns == ["answer", "level", "question"]


def test_text_is_continued_as_it_stands_on_request(prepare: Any) -> None:
    rows = [{"prompt": "Once upon", "answer": "a time"}]
    assert prepare(rows, "grpo.chat=false").train[0]["prompt"] == "Once upon"
    assert prepare(rows, "grpo.chat=false").report.as_dict()["chat"] is False
    assert prepare(rows).report.as_dict()["chat"] is True
    assert prepare(rows, "grpo.system=Be brief.").train[0]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Once upon"},
    ]


def test_messages_lose_their_answer_and_keep_the_rest(prepare: Any) -> None:
    turns = [
        {"role": "system", "content": "Rules."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
    ]
    data = prepare([{"messages": turns, "answer": "x"}])
    assert [m["role"] for m in data.train[0]["prompt"]] == ["system", "user"]
    sharegpt = prepare([{"conversations": [{"from": "human", "value": "Hello"}]}])
    assert sharegpt.train[0]["prompt"] == [{"role": "user", "content": "Hello"}]


def test_what_is_said_of_a_system_message_is_so(prepare: Any) -> None:
    rule = "grpo.system=Be brief."
    assert "after the system message 'Be brief.'" in prepare([{"question": "a"}], rule).report.asked
    messages = prepare([{"messages": [{"role": "user", "content": "a"}]}], rule)
    assert messages.train[0]["prompt"] == [{"role": "user", "content": "a"}]
    assert messages.report.asked.endswith("as they are: grpo.system is for prompts that are text")
    assert prepare([{"question": "a"}]).report.asked.endswith("as messages through the chat template")


def test_a_template_over_columns(prepare: Any) -> None:
    rows = [{"a": 3, "b": 4}, {"a": 1, "b": None}]
    data = prepare(rows, "grpo.prompt={a} + {b} =", "grpo.chat=false")
    assert data.train["prompt"] == ["3 + 4 ="]
    assert data.report.dropped == {"nothing in column `b` of grpo.prompt": 1}
    with pytest.raises(RequestError, match="braces cannot be read"):
        prepare(rows, 'grpo.prompt="{a:>3}"')


def test_a_column_of_another_name(prepare: Any) -> None:
    rows = [{"ask": "Hello", "gold": "x"}]
    assert prepare(rows, "data.columns={prompt: ask}").train[0]["prompt"][0]["content"] == "Hello"
    with pytest.raises(RequestError, match="no column 'prompt' or 'messages'") as missing:
        prepare(rows)
    assert "data.columns: {prompt: your_column}" in str(missing.value)


def test_what_is_too_long_empty_or_twice_is_dropped_and_counted(prepare: Any) -> None:
    rows = [{"question": q} for q in ("short", "short", "", "long " * 60)]
    data = prepare(rows, "max_prompt_length=40", "grpo.chat=false")
    assert len(data.train) == 1
    assert data.report.dropped == {
        "repeats an earlier row": 1,
        "`question` is empty": 1,
        "prompt longer than 40 tokens (grpo.max_prompt_length)": 1,
    }
    assert any("dropped 1" in line for line in data.report.lines())
    with pytest.raises(RequestError, match="none of its 1 rows can be asked"):
        prepare(rows[3:], "max_prompt_length=40")


def test_names_that_the_trainer_uses_are_left_out_and_told(prepare: Any) -> None:
    data = prepare([{"prompt": "a", "completion": "b", "completions": ["c"], "answer": "d"}])
    assert set(data.train.column_names) == {"prompt", "answer"}
    assert any("completion, completions" in note for note in data.report.notes)


def test_a_column_prompt_that_is_not_the_prompt_is_told_too(prepare: Any) -> None:
    rows = [{"prompt": "kept nowhere", "ask": "Hello"}]
    for setting in ("data.columns={prompt: ask}", "grpo.prompt={ask}"):
        report = prepare(rows, setting).report
        assert report.columns == ["ask"]
        assert "uses itself: prompt" in report.notes[0]
    assert prepare(rows).report.notes == []


def test_text_that_happens_to_be_json_is_a_prompt_and_messages_as_json_text_are_messages(
    prepare: Any,
) -> None:
    stored = json.dumps([{"role": "user", "content": "Hello"}])
    data = prepare([{"prompt": "[3, 1, 2]"}, {"prompt": '{"a": 1}'}, {"prompt": stored}])
    assert [prompt[0]["content"] for prompt in data.train["prompt"]] == ["[3, 1, 2]", '{"a": 1}', "Hello"]


def test_rows_without_a_prompt_are_dropped_by_what_they_lack(prepare: Any) -> None:
    rows = [{"prompt": "ask"}, {"prompt": " \t"}, {"prompt": None}, {"question": "ask"}, {"prompt": {"a": 1}}]
    assert prepare(rows).report.dropped == {
        "`prompt` is empty": 2,
        "no column `prompt`": 1,
        "`prompt` is not text": 1,
    }


def test_a_number_that_arrow_cannot_hold_is_an_error_that_names_the_column(prepare: Any) -> None:
    with pytest.raises(RequestError, match=r"more than 64 bits \(n\)"):
        prepare([{"question": "a", "n": 10**30, "m": 1}])


def test_held_out_rows_of_their_own_count_towards_the_longest_prompt(prepare: Any, tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text('{"question": "a much longer question than the others"}')
    alone = prepare([{"question": "a"}]).report.tokens.max
    assert (
        prepare([{"question": "a"}], f"data.eval_source={tmp_path / 'held.jsonl'}").report.tokens.max > alone
    )


def test_held_out_prompts_are_not_trained_on(prepare: Any) -> None:
    data = prepare([{"question": f"q{n}"} for n in range(20)], "data.eval_fraction=0.25")
    assert (len(data.train), len(data.eval)) == (15, 5)
    assert not set(data.train["question"]) & set(data.eval["question"])
    twice = [{"question": f"q{n % 10}", "number": n} for n in range(20)]
    data = prepare(twice, "data.eval_fraction=0.3")
    assert (len(data.train), len(data.eval)) == (14, 6)
    assert not set(data.train["question"]) & set(data.eval["question"])


def test_columns_of_mixed_kinds_are_an_error(prepare: Any) -> None:
    with pytest.raises(RequestError, match="values of different kinds"):
        prepare([{"question": "a", "answer": 1}, {"question": "b", "answer": "two"}])


def test_gsm8k_as_it_comes(shared_data: Path, tiny_model: Path) -> None:
    words = ["recipe=grpo", "reward=answer", f"data={shared_data / 'gsm8k'}", "data.max_length=2048"]
    config = load_config(None, [*words, "data.eval_fraction=0", "data.max_rows=50"])
    data = prepare_prompts(config, AutoTokenizer.from_pretrained(tiny_model))
    assert len(data.train) == 50
    assert all("####" in answer for answer in data.train["answer"])
