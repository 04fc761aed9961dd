"""The rewards that Trimtab brings."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.config.schema import GrpoSettings
from trimtab.rewards.builtin import builtin_reward, code_of, final_answer, same_answer


def scores(name: str, *texts: str, settings: GrpoSettings | None = None, **columns: Any) -> list[Any]:
    reward, _ = builtin_reward(name, settings or GrpoSettings())
    given: dict[str, Any] = {"completions": list(texts), **columns}
    if name == "length":
        given = {"completion_ids": [text.split() for text in texts]}
    if name in ("format", "json"):
        given = {"completions": list(texts)}
    return list(reward(**given))


@pytest.mark.parametrize(
    ("completion", "gold", "score"),
    [
        ("16 - 3 = 13\n#### 18", "She makes 18.\n#### 18", 1.0),
        ("#### 18.0", "#### 18", 1.0),
        ("#### $1,200", "#### 1200", 1.0),
        ("#### 17", "#### 18", 0.0),
        ("#### 1\n#### 18", "#### 18", 1.0),
        ("#### 18\nThat is all.", "#### 18", 1.0),
        ("It is 18", "#### 18", 0.0),
        ("18", "18", 1.0),
        (" 18 ", "18", 1.0),
        ("####", "18", 0.0),
        ("", "18", 0.0),
        ("#### Paris.", "paris", 1.0),
        ("#### nan", "nan?", 0.0),
        ("#### -5", "-5", 1.0),
    ],
)
def test_answer(completion: str, gold: str, score: float) -> None:
    assert scores("answer", completion, answer=[gold]) == [score]


@pytest.mark.parametrize("gold", [None, "", " ", "So it is\n####"])
def test_a_row_without_a_right_answer_is_an_error_not_a_score(gold: str | None) -> None:
    for said in ("", "#### ", "None"):
        with pytest.raises(ValueError, match="no right answer"):
            scores("answer", said, answer=[gold])


def test_answer_reads_messages_and_a_named_column() -> None:
    reward, columns = builtin_reward("answer", GrpoSettings(answer_column="gold"))
    assert columns == ("gold",)
    said = [[{"role": "assistant", "content": "so #### 4"}], [{"role": "assistant", "content": "#### 5"}]]
    assert list(reward(completions=said, gold=[4, 4], extra=[0, 0])) == [1.0, 0.0]


def test_final_answer_and_same_answer() -> None:
    assert final_answer("no mark") is None
    assert final_answer("#### 3 \n") == "3"
    assert not same_answer("inf", "18")


def test_format_matches_the_whole_completion() -> None:
    settings = GrpoSettings(pattern=r"<think>.*</think>\s*[0-9]+")
    texts = ("<think>a\nb</think>\n12", " <think></think>3 ", "<think></think>12 or so", "12")
    assert scores("format", *texts, settings=settings) == [1.0, 1.0, 0.0, 0.0]


def test_length_falls_after_the_target() -> None:
    settings = GrpoSettings(target_length=4)
    assert scores("length", "a b", "a b c d", "a b c d e f g h", "", settings=settings) == [
        1.0,
        1.0,
        0.5,
        1.0,
    ]


def test_json_is_an_object_or_a_list() -> None:
    texts = (
        '{"a": 1}',
        "```json\n[1, 2]\n```",
        "3",
        "{'a': 1}",
        "",
        "[" * 100_000,
        '{"a": NaN}',
        "[-Infinity]",
    )
    assert scores("json", *texts) == [1.0, 1.0, *[0.0] * 6]


def test_the_last_block_is_the_code() -> None:
    assert code_of("First\n```python\na = 1\n```\nor\n```python\na = 2\n```") == "a = 2"
    assert code_of("```python\nunfinished = 1") == "unfinished = 1"
    assert code_of("```python\r\na = 1\r\nb = 2\r\n```") == "a = 1\r\nb = 2"
    assert code_of(" a = 1 ") == "a = 1"
