"""Where the loss falls: on the answers and their end token, for every kind of tokenizer and template."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from trimtab.data.clean import Tally
from trimtab.data.convert import Example
from trimtab.data.render import IGNORED, Encoded, Renderer, label
from trimtab.data.template import ChatTemplate
from trimtab.errors import RequestError

Make = Callable[..., PreTrainedTokenizerFast]

ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|h|>' + m['role'] + '<|/h|>\\n\\n' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|h|>assistant<|/h|>\\n\\n' }}{% endif %}"
)
# Writes an empty thought into the last answer and removes thoughts from earlier ones, as Qwen3's template does.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% set said = m['content'].split('</think>')[-1].lstrip('\\n') %}"
    "{% if loop.last %}{{ '<think>\\n' + (m['content'].split('</think>')[0].split('<think>')[-1].strip('\\n') "
    "if '</think>' in m['content'] else '') + '\\n</think>\\n\\n' }}{% endif %}{{ said }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Opens a thought in the generation prompt that a finished answer does not have, as DeepSeek-R1's does.
OPENS_THOUGHT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% if m['role'] == 'assistant' %}"
    "{{ '<|im_end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"
)
# Ends a conversation with a second token, as Phi-3's does.
TWO_ENDS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m['role'] + ':\\n' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)


def chat(*turns: str, tools: tuple[dict[str, Any], ...] = ()) -> Example:
    """A conversation of user and assistant in turn."""
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns))
    return Example(messages, tools, None, "set.json, row 1")


def encode(
    tokenizer: PreTrainedTokenizerFast, *examples: Example, tally: Tally | None = None, **options: str
) -> list[Encoded]:
    return Renderer(tokenizer, **options).encode(examples, tally or Tally(strict=True))


def trained(tokenizer: PreTrainedTokenizerFast, row: Encoded) -> str:
    assert all(a in (IGNORED, b) for a, b in zip(row.labels, row.input_ids, strict=True))
    return tokenizer.decode([token for token in row.labels if token != IGNORED])


def ids_of(tokenizer: PreTrainedTokenizerFast, example: Example) -> list[int]:
    """What transformers itself makes of the conversation."""
    return tokenizer.apply_chat_template(list(example.messages), return_dict=False)


def test_chatml_trains_every_answer_through_its_end_and_nothing_else(chatml: PreTrainedTokenizerFast) -> None:
    example = chat("hello", "the cat", "and?", "sat\n")
    (row,) = encode(chatml, example)
    assert row.input_ids == ids_of(chatml, example)
    assert trained(chatml, row) == "the cat<|im_end|>sat\n<|im_end|>"
    assert row.labels[-1] == IGNORED, "the newline behind the last end token is the template's"
    assert chatml.pad_token_id == chatml.eos_token_id
    assert row.labels.count(chatml.eos_token_id) == 2


def test_train_on_all(chatml: PreTrainedTokenizerFast) -> None:
    (row,) = encode(chatml, chat("hello", "the cat"), train_on="all")
    assert row.labels == row.input_ids


def test_the_tokenizer_s_bos_is_added_once_when_the_template_writes_none(sentencepiece_like: Make) -> None:
    tokenizer = sentencepiece_like(ZEPHYR)
    (row,) = encode(tokenizer, chat("hi all", "he said: über", "so", "ok"))
    assert row.input_ids.count(tokenizer.bos_token_id) == 1
    assert row.input_ids[0] == tokenizer.bos_token_id
    assert row.labels[0] == IGNORED
    assert trained(tokenizer, row) == "he said: über</s>ok</s>"
    assert row.labels.count(tokenizer.eos_token_id) == 2


def test_no_double_bos_when_template_and_tokenizer_both_write_one(byte_level: Make) -> None:
    specials = ("<|h|>", "<|/h|>", "<|eot|>")
    tokenizer = byte_level(LLAMA3, specials=specials, eos="<|end|>", bos="<|begin|>", adds_bos=True)
    (row,) = encode(tokenizer, chat("hello", " the cat "))
    assert row.input_ids.count(tokenizer.bos_token_id) == 1
    assert trained(tokenizer, row) == "the cat<|eot|>", "an end-of-turn token that is not EOS ends the answer"


def test_no_bos_is_invented(chatml: PreTrainedTokenizerFast) -> None:
    (row,) = encode(chatml, chat("hello", "the cat"))
    assert row.input_ids[0] == chatml.convert_tokens_to_ids("<|im_start|>")


def test_only_one_of_two_end_tokens_is_trained(byte_level: Make) -> None:
    tokenizer = byte_level(TWO_ENDS, specials=("<|end|>",), eos="<|endoftext|>")
    (row,) = encode(tokenizer, chat("hello", "the cat", "and", "sat"))
    assert trained(tokenizer, row) == "the cat<|end|>sat<|end|>"
    assert row.input_ids[-1] == tokenizer.eos_token_id


def test_eos_is_appended_where_the_template_has_no_end(byte_level: Make) -> None:
    tokenizer = byte_level(NO_END, specials=(), eos="<|endoftext|>")
    (row,) = encode(tokenizer, chat("hello", "the cat", "and", "sat"))
    assert trained(tokenizer, row) == "the cat\nsat\n<|endoftext|>"
    (row,) = encode(tokenizer, chat("hello", "the cat"), train_on="all")
    assert row.input_ids.count(tokenizer.eos_token_id) == 1


def test_two_end_tokens_that_touch_are_both_trained(byte_level: Make) -> None:
    tokenizer = byte_level(
        TWO_ENDS.replace("<|end|>\\n", "<|end|><|stop|>\\n"), specials=("<|end|>", "<|stop|>"), eos="<|x|>"
    )
    (row,) = encode(tokenizer, chat("hello", "the cat"))
    assert trained(tokenizer, row) == "the cat<|end|><|stop|>"


@pytest.mark.parametrize(
    ("name", "specials", "eos", "expected"),
    [
        ("qwen2_5", "<|im_start|> <|im_end|>", "<|im_end|>", ["A one<|im_end|>A two<|im_end|>"]),
        (
            "qwen3",
            "<|im_start|> <|im_end|>",
            "<|im_end|>",
            [f"<think>\n\n</think>\n\nA {n}<|im_end|>" for n in ("one", "two")],
        ),
        (
            "llama3",
            "<|start_header_id|> <|end_header_id|> <|eot_id|>",
            "<|end_of_text|>",
            ["A one<|eot_id|>A two<|eot_id|>"],
        ),
        ("gemma", "<start_of_turn> <end_of_turn>", "<eos>", ["A one<end_of_turn>A two<end_of_turn>"]),
        ("phi3", "<|user|> <|assistant|> <|end|>", "<|endoftext|>", ["A one<|end|>A two<|end|>"]),
        (
            "gptoss",
            "<|start|> <|end|> <|message|> <|channel|>",
            "<|return|>",
            [f"<|channel|>final<|message|>A {n}<|return|>" for n in ("one", "two")],
        ),
    ],
)
def test_templates_of_real_models(
    byte_level: Make, name: str, specials: str, eos: str, expected: list[str]
) -> None:
    file = importlib.resources.files("trl") / "chat_templates" / f"{name}.jinja"
    if not file.is_file():
        pytest.skip(f"this TRL carries no chat template {name}")
    tokenizer = byte_level(
        file.read_text(encoding="utf-8"), specials=tuple(specials.split()), eos=eos, bos="<bos>"
    )
    rows = encode(tokenizer, chat("Q", "A one", "Q", "A two"))
    assert [trained(tokenizer, row) for row in rows] == expected


def test_a_template_that_rewrites_earlier_turns_gets_one_row_per_answer(byte_level: Make) -> None:
    tokenizer = byte_level(THINKING)
    tally = Tally()
    first, second = encode(tokenizer, chat("a", "<think>\nhm\n</think>\n\nhello", "b", "world"), tally=tally)
    assert trained(tokenizer, first) == "<think>\nhm\n</think>\n\nhello<|im_end|>"
    assert trained(tokenizer, second) == "<think>\n\n</think>\n\nworld<|im_end|>"
    assert "hm" not in tokenizer.decode(second.input_ids)
    assert sum(tally.changed.values()) == 1
    assert first.example is second.example
    tally = Tally()
    assert len(encode(tokenizer, chat("a", "hello"), tally=tally)) == 1
    assert not tally.changed


def test_a_generation_prompt_that_opens_a_thought(byte_level: Make) -> None:
    tokenizer = byte_level(OPENS_THOUGHT, specials=())
    tally = Tally()
    for answer in ("hello", "<b>hello"):  # the second shares its first character with the opened thought
        (row,) = encode(tokenizer, chat("a", answer), tally=tally)
        assert trained(tokenizer, row) == f"{answer}<|im_end|>"
    assert tally.changed["answer whose generation prompt is not how the chat template writes it"] == 2


def test_a_token_across_the_boundary_belongs_to_the_answer(byte_level: Make) -> None:
    # Without pre-tokenisation the answer's first letter becomes one token with the end of the prompt.
    template = NO_END.replace(":\\n", ": ")
    tokenizer = byte_level(template, specials=(), eos="<|end|>", corpus=["t: x"] * 50, use_regex=False)
    assert "t:Ġx" in tokenizer.get_vocab()
    (row,) = encode(tokenizer, chat("q", "xyz"))
    assert trained(tokenizer, row) == "t: xyz\n<|end|>"


def test_offsets_that_leave_out_spaces(byte_level: Make) -> None:
    tokenizer = byte_level(ZEPHYR, specials=(), eos="</s>", trim_offsets=True)
    for answer in ("  the  cat ", " x", "a b  "):
        (row,) = encode(tokenizer, chat("hello  there ", answer))
        assert trained(tokenizer, row) == f"{answer}</s>"


def test_zero_width_tokens() -> None:
    # A token of trimmed spaces covers the gap before it; one that stands for no text goes with what follows it.
    assert label([1, 2, 3], [(0, 4), (5, 5), (5, 6)], [(5, 6)]) == [IGNORED, IGNORED, 3]
    assert label([1, 2, 3], [(0, 4), (4, 4), (4, 6)], [(4, 6)]) == [IGNORED, 2, 3]


def test_conversations_that_start_with_the_assistant(chatml: PreTrainedTokenizerFast) -> None:
    messages = ({"role": "assistant", "content": "hello"}, *chat("a", "world").messages)
    (row,) = encode(chatml, Example(messages, (), None, "row"))
    assert trained(chatml, row) == "hello<|im_end|>world<|im_end|>"


def test_an_answer_with_weight_zero_is_not_trained(chatml: PreTrainedTokenizerFast) -> None:
    messages = tuple(
        {**m, "weight": 0} if m["content"] == "bad" else m for m in chat("a", "bad", "b", "good").messages
    )
    (row,) = encode(chatml, Example(messages, (), None, "row"))
    assert trained(chatml, row) == "good<|im_end|>"


@pytest.mark.parametrize("text", ["the cat\n", "the cat<|im_end|>"])
def test_plain_text_is_trained_whole_and_ended_once(chatml: PreTrainedTokenizerFast, text: str) -> None:
    (row,) = encode(chatml, Example((), (), text, "row"))
    assert row.labels == row.input_ids
    assert row.input_ids.count(chatml.eos_token_id) == 1
    assert row.input_ids[-1] == chatml.eos_token_id


def test_plain_text_gets_the_tokenizer_s_bos(sentencepiece_like: Make) -> None:
    tokenizer = sentencepiece_like(ZEPHYR)
    for text in ("hello", "<s>hello"):
        (row,) = encode(tokenizer, Example((), (), text, "row"))
        assert row.input_ids[0] == tokenizer.bos_token_id
        assert row.input_ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_control_tokens_in_a_text_are_not_let_through(chatml: PreTrainedTokenizerFast, place: int) -> None:
    turns = ["hello", "world"]
    turns[place] += "<|im_end|>\n<|im_start|>user"
    tally = Tally()
    assert encode(chatml, chat(*turns), tally=tally) == []
    assert list(tally.dropped) == [
        "a text holds the control token <|im_end|>, which the chat template writes itself"
    ]


def test_broken_unicode_is_a_bad_row(chatml: PreTrainedTokenizerFast) -> None:
    tally = Tally()
    assert len(encode(chatml, chat("a", "b\ud83d"), chat("a", "b"), tally=tally)) == 1
    assert list(tally.dropped) == ["a text holds half of a surrogate pair (broken Unicode)"]


def test_what_the_template_refuses_is_a_bad_row_with_its_words(byte_level: Make) -> None:
    strict = "{% if messages|length > 2 %}{{ raise_exception('Only one round!') }}{% endif %}" + NO_END
    tally = Tally()
    assert len(encode(byte_level(strict), chat("a", "b", "c", "d"), chat("a", "b"), tally=tally)) == 1
    assert list(tally.dropped) == ["the chat template refuses it (Only one round!)"]


def test_no_chat_template(byte_level: Make) -> None:
    tokenizer = byte_level(NO_END)
    tokenizer.chat_template = None
    with pytest.raises(RequestError, match=r"set model\.chat_template"):
        encode(tokenizer, chat("a", "b"))
    assert encode(tokenizer, Example((), (), "plain text needs none", "row"))


def test_a_template_without_answers(byte_level: Make) -> None:
    with pytest.raises(RequestError, match="leaves out the assistant's answer"):
        ChatTemplate(byte_level("{{ messages[0]['content'] }}"))


# Every character but the control tokens' own `<|`, so that no random text is one.
WORDS = st.text(st.characters(exclude_characters="<|", exclude_categories=["Cs"]), min_size=1, max_size=40)
ANSWERS = WORDS.filter(lambda text: text.strip())


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(WORDS, ANSWERS), min_size=1, max_size=4))
def test_any_conversation_trains_exactly_its_answers(
    chatml: PreTrainedTokenizerFast, rounds: list[tuple[str, str]]
) -> None:
    example = chat(*(turn for pair in rounds for turn in pair))
    (row,) = encode(chatml, example)
    assert row.input_ids == ids_of(chatml, example)
    assert trained(chatml, row) == "".join(answer + "<|im_end|>" for _, answer in rounds)
    assert row.labels.count(chatml.eos_token_id) == len(rounds)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(WORDS, ANSWERS), min_size=1, max_size=3))
def test_any_conversation_with_trimming_offsets(
    trimming: PreTrainedTokenizerFast, rounds: list[tuple[str, str]]
) -> None:
    (row,) = encode(trimming, chat(*(turn for pair in rounds for turn in pair)))
    assert trained(trimming, row) == "".join(answer + "<|im_end|>" for _, answer in rounds)


@pytest.fixture(scope="module")
def trimming(byte_level: Make, chatml: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return byte_level(chatml.chat_template, trim_offsets=True)
