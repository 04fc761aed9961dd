"""What a chat template has no place for is written where it has one, and said."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from trimtab.data.clean import Tally
from trimtab.data.convert import Example
from trimtab.data.render import IGNORED, Renderer
from trimtab.data.template import ChatTemplate

Make = Callable[..., PreTrainedTokenizerFast]

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": {"type": "object"}},
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
CONVERSATION: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "Weather in Bern?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sun"},
    {"role": "assistant", "content": "It is sunny."},
)
EXAMPLE = Example(CONVERSATION, (TOOL,), None, "row 1")

KNOWS_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}"
    "{{ '<call>' + c['function']['name'] + (c['function']['arguments'] | tojson) + '</call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As Gemma's and Llama-2's: two roles only, in turn, or it refuses.
TWO_ROLES = (
    "{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('Only two roles') }}"
    "{% elif (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As Zephyr's: other roles vanish without a word.
DROPS_TOOL_ROLE = (
    "{% for m in messages %}{% if m['role'] in ['system', 'user', 'assistant'] %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NEEDS_IDS = KNOWS_TOOLS.replace(
    "{% for c in m['tool_calls'] or [] %}",
    "{% for c in m['tool_calls'] or [] %}{% if not c['id'] %}{{ raise_exception('no id') }}{% endif %}",
)


def written(tokenizer: PreTrainedTokenizerFast, example: Example = EXAMPLE) -> tuple[str, str, list[str]]:
    """The text, its trained part, and what the report will say."""
    tally = Tally()
    (row,) = Renderer(tokenizer).encode([example], tally)
    assert not tally.dropped
    answers = [token for token in row.labels if token != IGNORED]
    return tokenizer.decode(row.input_ids), tokenizer.decode(answers), list(tally.changed)


def test_a_template_that_knows_tools_gets_them(byte_level: Make) -> None:
    text, answers, said = written(byte_level(KNOWS_TOOLS))
    assert "Tools: [" in text
    assert answers == '<call>weather{"city": "Bern"}</call><|im_end|>It is sunny.<|im_end|>'
    assert said == []


def test_a_template_without_tools_gets_them_in_the_system_message(chatml: PreTrainedTokenizerFast) -> None:
    text, answers, said = written(chatml)
    assert text.startswith("<|im_start|>system\nYou can call these tools:\n" + json.dumps(TOOL["function"]))
    assert answers == json.dumps(CALL["function"]) + "<|im_end|>It is sunny.<|im_end|>"
    assert "<|im_start|>tool\nsun<|im_end|>" in text
    assert [line.split(" (")[0] for line in said] == [
        "tools described in the system message",
        "tool calls written as JSON text",
    ]


def test_tools_go_behind_an_existing_system_message(chatml: PreTrainedTokenizerFast) -> None:
    system = {"role": "system", "content": "Be brief."}
    text, _, _ = written(chatml, Example((system, *CONVERSATION), (TOOL,), None, "row 1"))
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call these tools:")
    assert text.count("<|im_start|>system") == 1


def test_a_template_of_two_roles(byte_level: Make) -> None:
    text, answers, said = written(byte_level(TWO_ROLES))
    assert text.startswith("<|im_start|>user\nYou can call these tools:")
    assert "Weather in Bern?<|im_end|>" in text
    assert "<|im_start|>user\nsun<|im_end|>" in text
    assert answers.endswith("<|im_end|>It is sunny.<|im_end|>")
    assert len(said) == 4


def test_a_tool_result_that_would_vanish_is_written_as_user(byte_level: Make) -> None:
    text, _, said = written(byte_level(DROPS_TOOL_ROLE))
    assert "<|im_start|>user\nsun<|im_end|>" in text
    assert any(line.startswith("tool results written as user messages") for line in said)


@pytest.mark.parametrize("ids", [True, False])
def test_a_template_that_wants_call_ids(byte_level: Make, ids: bool) -> None:
    messages = [dict(message) for message in CONVERSATION]
    if ids:
        messages[1]["tool_calls"] = [{"id": "call00001", **CALL}]
        messages[2]["tool_call_id"] = "call00001"
    _, answers, said = written(byte_level(NEEDS_IDS), Example(tuple(messages), (TOOL,), None, "row 1"))
    assert answers.startswith("<call>weather" if ids else '{"name": "weather"')
    assert bool(said) is not ids


def test_a_row_without_tools_changes_nothing(byte_level: Make) -> None:
    text, _, said = written(
        byte_level(TWO_ROLES), Example(CONVERSATION[:1] + CONVERSATION[3:], (), None, "row 1")
    )
    assert text.startswith("<|im_start|>user\nWeather in Bern?<|im_end|>")
    assert said == []


def test_the_end_of_turn_is_found_by_looking(byte_level: Make, chatml: PreTrainedTokenizerFast) -> None:
    assert ChatTemplate(chatml).end_of_turn == "<|im_end|>"
    assert (
        ChatTemplate(byte_level("{% for m in messages %}{{ m['content'] }}{% endfor %}")).end_of_turn is None
    )
