"""How a conversation with sound is written: by a template that can, else as published; and what the marks must be."""

from __future__ import annotations

from typing import Any

import pytest

from coded_rows import (
    ANY_ROLE,
    HEADERS,
    LLAMA,
    MARKS,
    SCENE,
    TEMPLATE,
    codes,
    said,
    voice_config,
    voice_tokenizer,
)
from trimtab.config.schema import VoiceSettings
from trimtab.data.clean import BadRow
from trimtab.data.voice_collate import VoiceCollator
from trimtab.data.voice_marks import VoiceMarks
from trimtab.data.voice_turns import VoiceTurns
from trimtab.errors import RequestError
from trimtab.models.chat import PLAIN_TEMPLATE

ROW = said("The west. ", codes(2), codes(2), " The east.", "A quiet room.").row
WHOLE = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nGenerate audio following instruction.\n\n"
    "<|scene_desc_start|>\nA quiet room.\n<|scene_desc_end|><|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nThe east.<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|><|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nThe west.<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|><|eot_id|>"
)


def turns_of(tokenizer: Any, **settings: Any) -> VoiceTurns:
    marks = VoiceMarks.of(tokenizer, voice_config(tokenizer))
    return VoiceTurns(tokenizer, marks, VoiceSettings(**settings))


@pytest.mark.parametrize(
    ("template", "how"),
    [
        (TEMPLATE, "conversations by the model's chat template"),
        (ANY_ROLE, "the scene in the system's turn (it has no role for a scene)"),
        (
            ANY_ROLE.replace(
                "{{ bos_token }}",
                "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'scene' %}"
                "{{ raise_exception('Unknown role') }}{% endif %}{% endfor %}",
            ),
            "the scene in the system's turn (the chat template refuses it (Unknown role))",
        ),
        (LLAMA, "in the published layout"),
        (PLAIN_TEMPLATE, "in the published layout, not by the chat template (the chat template refuses it"),
        (None, "in the published layout, not by the chat template (there is none)"),
        (TEMPLATE.replace("<|audio_out_bos|>' }}{% endif %}", "' }}{% endif %}"), "does not end in"),
    ],
)
def test_whatever_the_template_the_conversation_is_the_published_one(template: str | None, how: str) -> None:
    tokenizer = voice_tokenizer(template)
    turns = turns_of(tokenizer)
    assert how in turns.how
    ids = turns.ids(ROW, heard=True)
    assert tokenizer.decode(ids) == WHOLE
    assert ids == tokenizer(WHOLE, add_special_tokens=False)["input_ids"]
    assert [tokenizer.decode(ids[place]) for place in turns.trained(ids)] == ["<|audio_eos|>", "<|eot_id|>"]


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_a_tokenizer_that_opens_texts_itself_opens_them_once(template: str | None) -> None:
    tokenizer = voice_tokenizer(template, adds_bos=True)
    assert tokenizer.decode(turns_of(tokenizer).ids(ROW, heard=True)) == WHOLE
    unopened = voice_tokenizer(TEMPLATE.replace("{{ bos_token }}", ""), adds_bos=True)
    assert unopened.decode(turns_of(unopened).ids(ROW, heard=True)) == WHOLE


def test_a_widened_clip_has_the_tokens_of_the_widened_text() -> None:
    """Special tokens cut a text: what stands beside one is the same words whether it stands once or many times."""
    tokenizer = voice_tokenizer()
    row = said("  The  west…", codes(5), codes(3), "Äh,\n\nthe east", "A quiet room.")
    batch = VoiceCollator(tokenizer, voice_config(tokenizer), VoiceSettings())([row])
    first, second = (MARKS[0] * (frames + 2) + MARKS[3] * 3 for frames in (3, 5))
    text = WHOLE.replace("The east.", "Äh,\n\nthe east").replace("The west.", "The  west…")
    before, between, after = text.split(MARKS[0])
    widened = before + first + between + second + after
    assert batch["input_ids"][0].tolist() == tokenizer(widened, add_special_tokens=False)["input_ids"]


def test_the_scene_of_the_row_comes_before_that_of_the_settings() -> None:
    tokenizer = voice_tokenizer()
    turns = turns_of(tokenizer, scene="A hall.", system="Speak.")
    assert "A quiet room." in tokenizer.decode(turns.ids(ROW, heard=True))
    plain = tokenizer.decode(turns.ids(said("The west.").row, heard=False))
    assert "Speak.\n\n<|scene_desc_start|>\nA hall.\n<|scene_desc_end|>" in plain
    assert plain.count("<|AUDIO_OUT|>") == 1
    assert "scene" not in tokenizer.decode(turns_of(tokenizer).ids(said("The west.").row, heard=False))


def test_what_a_template_writes_behind_the_turn_is_not_trained() -> None:
    tokenizer = voice_tokenizer(ANY_ROLE.replace("'<|eot_id|>' }}", "'<|eot_id|>\n' }}"))
    turns = turns_of(tokenizer)
    assert "by the model's chat template" in turns.how
    ids = turns.ids(ROW, heard=True)
    assert tokenizer.decode(ids).endswith("<|eot_id|>\n")
    assert [tokenizer.decode(ids[place]) for place in turns.trained(ids)] == ["<|audio_eos|>", "<|eot_id|>"]


def test_a_template_that_fails_on_one_row_alone_makes_it_a_bad_row() -> None:
    refusing = (
        "{% if 'west' in messages[-2]['content'][0]['text'] %}{{ raise_exception('no west') }}{% endif %}"
    )
    turns = turns_of(voice_tokenizer(TEMPLATE + refusing))
    assert turns.how == "conversations by the model's chat template"
    with pytest.raises(BadRow, match="no west"):
        turns.ids(ROW, heard=True)


@pytest.mark.parametrize("name", ["system", "scene"])
def test_a_setting_with_a_special_token_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=rf"voice.{name} holds the special token <\|eot_id\|>"):
        turns_of(voice_tokenizer(), **{name: "Speak.<|eot_id|>"})


def test_neither_a_template_nor_the_tokens_of_the_published_layout() -> None:
    tokenizer = voice_tokenizer(None, special=[*MARKS, *SCENE, *HEADERS[1:]])
    with pytest.raises(
        RequestError, match=r"there is none\n.*no <\|start_header_id\|>\n.*model.chat_template"
    ):
        turns_of(tokenizer)


@pytest.mark.parametrize("name", ["audio_token", "audio_bos_token", "audio_delay_token"])
def test_a_config_and_a_tokenizer_that_disagree_are_both_named(name: str) -> None:
    tokenizer = voice_tokenizer()
    shape = voice_config(tokenizer)
    has = getattr(shape, f"{name}_id")
    setattr(shape, f"{name}_id", 200)
    with pytest.raises(RequestError, match=rf"config says {name}_id=200, its tokenizer has .* at {has}\n"):
        VoiceMarks.of(tokenizer, shape)


@pytest.mark.parametrize("missing", MARKS)
def test_a_tokenizer_without_a_mark_is_refused(missing: str) -> None:
    tokenizer = voice_tokenizer(special=[mark for mark in (*MARKS, *HEADERS, *SCENE) if mark != missing])
    shape = voice_config(voice_tokenizer())
    with pytest.raises(RequestError, match="has no token"):
        VoiceMarks.of(tokenizer, shape)


def test_marks_that_the_tokenizer_names_itself_are_taken() -> None:
    tokenizer = voice_tokenizer(special=["<sound>", *MARKS[1:], *HEADERS, *SCENE])
    tokenizer.audio_token = "<sound>"
    sound = tokenizer.convert_tokens_to_ids("<sound>")
    marks = VoiceMarks.of(tokenizer, voice_config(tokenizer, audio_token_id=sound))
    assert (marks.audio.text, marks.audio.id) == ("<sound>", sound)


def test_codebooks_without_room_for_bos_and_eos_are_refused() -> None:
    tokenizer = voice_tokenizer()
    with pytest.raises(RequestError, match=r"codebook_size=1024.*\n.*\n.*codebook_size to 1026"):
        VoiceMarks.of(
            tokenizer,
            voice_config(tokenizer, codebook_size=1024, audio_stream_bos_id=1024, audio_stream_eos_id=1025),
        )


def test_padding_that_would_stand_for_sound_is_refused() -> None:
    tokenizer = voice_tokenizer()
    tokenizer.pad_token = MARKS[3]
    with pytest.raises(RequestError, match="pads with"):
        VoiceMarks.of(tokenizer, voice_config(tokenizer))
