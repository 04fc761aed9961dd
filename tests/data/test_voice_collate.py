"""Batches of rows that are spoken, held against an evaluation in plain loops, transformers' processor and the model."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from coded_rows import (
    MARKS,
    SCENE,
    codes,
    own_processor,
    plain_columns,
    said,
    voice_config,
    voice_tokenizer,
)
from trimtab.config.schema import VoiceSettings
from trimtab.data.voice_collate import CodedRow, VoiceCollator
from trimtab.errors import RequestError
from trimtab.models.voice_loss import teach_voice
from trimtab.placement import move

SYSTEM = "Generate audio following instruction."
TOKENIZER = voice_tokenizer()


def collator_for(
    books: int = 4, entries: int = 16, tokenizer: Any = TOKENIZER, **changes: Any
) -> VoiceCollator:
    return VoiceCollator(tokenizer, voice_config(tokenizer, books, entries, **changes), VoiceSettings())


def plainly(row: CodedRow, books: int, entries: int) -> tuple[list[int], list[int], list[Any], list[Any]]:
    """Tokens, labels, columns and their labels of one row, piece by piece: nothing of it from the package."""
    vocab = TOKENIZER.get_vocab()
    ids: list[int] = []
    labels: list[int] = []
    columns: list[Any] = []
    column_labels: list[Any] = []

    def put(token: int, trained: bool = False) -> None:
        ids.append(token)
        labels.append(token if trained else -100)

    def words(text: str) -> None:
        for token in TOKENIZER(text, add_special_tokens=False)["input_ids"]:
            put(token)

    def opened(role: str) -> None:
        put(vocab["<|start_header_id|>"])
        words(role)
        put(vocab["<|end_header_id|>"])
        words("\n\n")

    def clip(held: Any, trained: bool) -> None:
        put(vocab["<|audio_out_bos|>"])
        cells, wanted = plain_columns(held.tolist(), books, entries, entries + 1)
        for column in range(len(cells)):
            put(vocab["<|AUDIO_OUT|>" if column < len(held) + 2 else "<|reserved_special_token_6|>"])
            columns.append(cells[column])
            column_labels.append(wanted[column] if trained else [-100] * books)
        put(vocab["<|audio_eos|>"], trained)
        put(vocab["<|eot_id|>"], trained)

    put(vocab["<|begin_of_text|>"])
    opened("system")
    words(SYSTEM)
    if row.row.scene:
        words("\n\n")
        put(vocab["<|scene_desc_start|>"])
        words(f"\n{row.row.scene}\n")
        put(vocab["<|scene_desc_end|>"])
    put(vocab["<|eot_id|>"])
    if row.reference is not None:
        opened("user")
        words(str(row.row.reference_text))
        put(vocab["<|eot_id|>"])
        opened("assistant")
        clip(row.reference, trained=False)
    opened("user")
    words(row.row.text)
    put(vocab["<|eot_id|>"])
    opened("assistant")
    clip(row.target, trained=True)
    return ids, labels, columns, column_labels


def rows_of(books: int, entries: int) -> list[CodedRow]:
    def some(frames: int, seed: int) -> torch.Tensor:
        return codes(frames, books, entries, seed)

    return [
        said("The sun rises.", some(5, 1), some(3, 2), "It was the night before.", "Audio in a quiet room."),
        said("It sets in the west, 12 times!", some(1, 3)),
        said("A", some(2, 4), some(9, 5), "Höchste Zeit, äh …"),
    ]


@pytest.mark.parametrize(("books", "entries"), [(1, 4), (2, 8), (8, 1024)])
def test_a_batch_is_what_plain_loops_make_of_it(books: int, entries: int) -> None:
    rows = rows_of(books, entries)
    batch = collator_for(books, entries)(rows)
    expected = [plainly(row, books, entries) for row in rows]
    width, frames = max(len(one[0]) for one in expected), max(len(one[2]) for one in expected)
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (3, width),
        "attention_mask": (3, width),
        "labels": (3, width),
        "audio_input_ids": (3, frames, books),
        "audio_input_ids_mask": (3, frames),
        "audio_labels": (3, frames, books),
    }
    for number, (ids, labels, columns, column_labels) in enumerate(expected):
        more, later = width - len(ids), frames - len(columns)
        assert batch["input_ids"][number].tolist() == ids + [TOKENIZER.pad_token_id] * more
        assert batch["attention_mask"][number].tolist() == [1] * len(ids) + [0] * more
        assert batch["labels"][number].tolist() == labels + [-100] * more
        assert batch["audio_input_ids"][number].tolist() == columns + [[entries + 1] * books] * later
        assert batch["audio_input_ids_mask"][number].tolist() == [True] * len(columns) + [False] * later
        assert batch["audio_labels"][number].tolist() == column_labels + [[-100] * books] * later


def test_by_hand_a_reference_and_a_clip_of_two_codebooks() -> None:
    row = said("A", torch.tensor([[3, 4]]), torch.tensor([[1, 2]]), "B")
    batch = collator_for(2, 8)([row])
    assert batch["audio_input_ids"][0].T.tolist() == [[8, 1, 9, 9, 8, 3, 9, 9], [8, 8, 2, 9, 8, 8, 4, 9]]
    ignored = [-100] * 4
    assert batch["audio_labels"][0].T.tolist() == [
        [*ignored, -100, 3, 9, -100],
        [*ignored, -100, -100, 4, 9],
    ]
    trained = batch["labels"][0][batch["labels"][0] != -100]
    assert TOKENIZER.convert_ids_to_tokens(trained.tolist()) == ["<|audio_eos|>", "<|eot_id|>"]


def test_inputs_are_those_of_transformers_own_processor() -> None:
    own = own_processor(TOKENIZER)
    sounds = [
        torch.randn(length, generator=torch.Generator().manual_seed(length)) for length in (100, 180, 60)
    ]
    with torch.no_grad():
        coded = [own.audio_tokenizer.encode(sound[None, None]).audio_codes[0].T for sound in sounds]
    rows = [said("The sun.", coded[1], coded[0], "The east.", "A room."), said("The west.", coded[2])]
    ours = collator_for()(rows)

    def text(role: str, words: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": words}]}

    sound = {"role": "assistant", "content": [{"type": "audio"}]}
    talks = [
        [
            *(text("system", SYSTEM), text("scene", "A room."), text("user", "The east."), sound),
            *(text("user", "The sun."), sound),
        ],
        [text("system", SYSTEM), text("user", "The west."), sound],
    ]
    written = [own.apply_chat_template(talk, tokenize=False) for talk in talks]
    theirs = own(
        text=written,
        audio=[sound.numpy() for sound in sounds],
        return_tensors="pt",
        padding_side="right",
        add_special_tokens=False,
    )
    for name in ("input_ids", "attention_mask", "audio_input_ids", "audio_input_ids_mask"):
        assert torch.equal(ours[name], theirs[name]), name


def test_no_trained_code_is_asked_of_another_clip_or_of_padding() -> None:
    """A position predicts the next one. The first column of every clip is ignored in all codebooks, so nothing is asked
    of the audio BOS token before it; and what is trained stands behind a column of the same clip."""
    collator = collator_for()
    batch = collator(rows_of(4, 16))
    sound = torch.isin(batch["input_ids"], torch.tensor([collator.marks.audio.id, collator.marks.delay.id]))
    labels = torch.full((*sound.shape, 4), -100)
    labels[sound] = batch["audio_labels"][batch["audio_input_ids_mask"]]
    trained = (labels != -100).any(dim=-1)
    assert trained.any(dim=1).all()
    for row, position in trained.nonzero().tolist():
        assert sound[row, position - 1]
        assert batch["attention_mask"][row, position]
    # Text is trained where sound has ended, and nowhere else.
    assert not (sound & (batch["labels"] != -100)).any()


def test_the_model_takes_the_batch() -> None:
    from transformers import HiggsAudioV2ForConditionalGeneration

    shape = voice_config(TOKENIZER)
    model = HiggsAudioV2ForConditionalGeneration(shape, use_text_head=True).eval()
    teach_voice(model)
    batch = VoiceCollator(TOKENIZER, shape, VoiceSettings(), 512)(rows_of(4, 16))
    places = model.model.get_placeholder_mask(batch["input_ids"], None, batch["audio_input_ids_mask"])
    assert torch.equal(places.sum(dim=1), batch["audio_input_ids_mask"].sum(dim=1))
    assert torch.isfinite(model(**batch).loss)


@pytest.mark.parametrize("references", [(True, True), (True, False), (False, False)])
def test_the_model_goes_on_from_what_is_asked(references: tuple[bool, bool]) -> None:
    from transformers import HiggsAudioV2ForConditionalGeneration

    shape = voice_config(TOKENIZER)
    torch.manual_seed(0)
    # In double precision, so that padding cannot change which code is the likeliest.
    model = HiggsAudioV2ForConditionalGeneration(shape).double().eval()
    rows = [
        said("The sun rises in the east." * (1 + n), None, codes(3 + n) if there else None, "The west.")
        for n, there in enumerate(references)
    ]
    collator = VoiceCollator(TOKENIZER, shape, VoiceSettings())
    whole = collator([CodedRow(row.row, row.reference, codes(2)) for row in rows])
    batch = collator.asked(rows)
    assert (batch["input_ids"][:, -1] == shape.audio_bos_token_id).all()
    for number in range(2):
        prompt = batch["input_ids"][number][batch["attention_mask"][number].bool()]
        assert torch.equal(whole["input_ids"][number, : len(prompt)], prompt)
    assert ("audio_input_ids" in batch) == any(references)
    assert "labels" not in batch
    before = batch["audio_input_ids"].shape[1] if any(references) else 0
    columns = model.generate(**batch, max_new_tokens=6, do_sample=False)
    assert columns.shape == (2, before + 6, 4)
    # The stream is opened as it was in training.
    assert (columns[:, before] == 16).all()
    assert (columns[:, before + 1, 1:] == 16).all()
    # A row is spoken beside another as it is alone.
    for number, row in enumerate(rows):
        alone = model.generate(**collator.asked([row]), max_new_tokens=6, do_sample=False)
        assert torch.equal(alone[0, -6:], columns[number, -6:])


@dataclass
class Held:
    batch: dict[str, Any]
    name: str


def test_a_batch_moves_whole() -> None:
    batch = collator_for()(rows_of(4, 16))
    assert type(batch) is dict
    assert {value.device.type for value in batch.values()} == {"cpu"}
    for moved in (move(batch, "meta"), move(Held(batch, "one"), "meta").batch):
        assert set(moved) == set(batch)
        assert {value.device.type for value in moved.values()} == {"meta"}


def test_a_collator_can_be_sent_to_another_process() -> None:
    collator, rows = collator_for(), rows_of(4, 16)
    twin, same = pickle.loads(pickle.dumps((collator, rows)))
    for name, value in collator(rows).items():
        assert torch.equal(value, twin(same)[name])


def test_the_length_is_that_of_the_row_and_of_what_is_asked() -> None:
    collator = collator_for()
    for row in rows_of(4, 16):
        assert collator.length(row) == collator([row])["input_ids"].shape[1]
        assert collator.length(row, asked=True) == collator.asked([row])["input_ids"].shape[1]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (said("A", None, where="here, line 7"), "no clip to train on"),
        (said("A", codes(0), where="here, line 7"), "its clip has no frame"),
        (said("A", codes(1), codes(0), "B", where="here, line 7"), "its reference has no frame"),
        (said("A <|AUDIO_OUT|>", codes(1), where="here, line 7"), r"text holds .*<\|AUDIO_OUT\|>"),
        (said("A", codes(1), codes(1), "<|eot_id|>", where="here, line 7"), r"reference text holds"),
        (said("A", codes(1), scene="a<|scene_desc_end|>", where="here, line 7"), r"scene holds"),
        (said("A \ud83d", codes(1), where="here, line 7"), "text holds half of a surrogate pair"),
        (said("A", codes(1) + 15, where="here, line 7"), "its clip: audio codes from"),
        (said("A", codes(1), codes(1, 2), "B", where="here, line 7"), "its reference: codes of 2 codebooks"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_named(row: CodedRow, why: str) -> None:
    collator = collator_for()
    for made in (lambda: collator([row]), lambda: collator.length(row)):
        with pytest.raises(RequestError, match=f"^here, line 7.*{why}"):
            made()


@pytest.mark.parametrize("mark", [*MARKS, *SCENE, "<|begin_of_text|>", "<|pad|>", "<|end_header_id|>"])
def test_no_special_token_comes_from_the_words_of_a_row(mark: str) -> None:
    collator = collator_for()
    with pytest.raises(RequestError, match="special token"):
        collator.asked([said(f"words{mark}words")])


def test_a_row_over_the_limit_is_never_cut() -> None:
    shape = voice_config(TOKENIZER)
    row = said("A", codes(30), where="here, line 2")
    tokens = VoiceCollator(TOKENIZER, shape, VoiceSettings()).length(row)
    assert VoiceCollator(TOKENIZER, shape, VoiceSettings(), tokens)([row])["input_ids"].shape[1] == tokens
    with pytest.raises(
        RequestError, match=f"here, line 2: {tokens} tokens, and data.max_length={tokens - 1}"
    ):
        VoiceCollator(TOKENIZER, shape, VoiceSettings(), tokens - 1)([row])
    few = voice_config(TOKENIZER, max_position_embeddings=tokens - 1)
    with pytest.raises(RequestError, match=f"max_position_embeddings={tokens - 1}"):
        VoiceCollator(TOKENIZER, few, VoiceSettings(), 4096)([row])
