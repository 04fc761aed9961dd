"""Hand-made rows of codes and words for a tiny Higgs Audio v2, column by column; nothing here is the package's own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

AUDIO, BOS, DELAY, AUDIO_END, TURN_END, PAD = 100, 101, 102, 103, 2, 1
"""Ids of the text's tokens, as tiny_models.py has them; two are free."""
ENTRIES = 16
"""Of a codebook; then come the stream's begin and end."""
BEGIN, END = ENTRIES, ENTRIES + 1
NONE = -100


@dataclass(frozen=True)
class Row:
    """One row as the model gets it, before it is padded."""

    ids: list[int]
    labels: list[int]
    columns: list[list[int]]
    column_labels: list[list[int]]


def shape(books: int = 4, **changes: Any) -> dict[str, Any]:
    return {
        "num_codebooks": books,
        "codebook_size": ENTRIES + 2,
        "audio_stream_bos_id": BEGIN,
        "audio_stream_eos_id": END,
        **changes,
    }


def voice_model(books: int = 4, *, device: str = "cpu", seed: int = 0, **changes: Any) -> Any:
    """Transformers' own model, untaught, with its text head."""
    from transformers import HiggsAudioV2ForConditionalGeneration

    from tiny_models import config

    torch.manual_seed(seed)
    made = config("higgs_audio_v2", **shape(books, **changes))
    return HiggsAudioV2ForConditionalGeneration(made, use_text_head=True).to(device)


def clip(frames: int, books: int, draw: random.Random) -> tuple[list[list[int]], list[list[int]]]:
    """The delayed columns of random codes, and the labels of a clip that is trained."""
    codes = [[draw.randrange(ENTRIES) for _ in range(books)] for _ in range(frames)]
    columns, labels = [], []
    for column in range(frames + 2 + books - 1):
        cells, wanted = [], []
        for book in range(books):
            at = column - book  # 0: begin; 1 … frames: codes; frames + 1: end; elsewhere filled up
            cells.append(BEGIN if at <= 0 else codes[at - 1][book] if at <= frames else END)
            wanted.append(NONE if at <= 0 or at > frames + 1 else cells[-1])
        columns.append(cells)
        labels.append(wanted)
    return columns, labels


def row(
    books: int, reference: int, target: int, seed: int, *, ends: Sequence[int] = (AUDIO_END, TURN_END)
) -> Row:
    """Words, a reference clip, words, the clip that is trained, and the words that end the turn; 0 frames: no clip."""
    draw = random.Random(seed)
    ids: list[int] = []
    labels: list[int] = []
    columns: list[list[int]] = []
    column_labels: list[list[int]] = []

    def say(words: Sequence[int], *, trained: bool = False) -> None:
        ids.extend(words)
        labels.extend(words if trained else [NONE] * len(words))

    def sound(frames: int, *, trained: bool) -> None:
        cells, wanted = clip(frames, books, draw)
        say([*[AUDIO] * (len(cells) - books + 1), *[DELAY] * (books - 1)])
        columns.extend(cells)
        column_labels.extend(wanted if trained else [[NONE] * books] * len(wanted))

    say([3, *(draw.randrange(5, 90) for _ in range(draw.randrange(2, 5)))])
    if reference:
        say([BOS])
        sound(reference, trained=False)
        say([AUDIO_END, TURN_END])
    say([draw.randrange(5, 90) for _ in range(draw.randrange(2, 6))])
    if target:
        say([BOS])
        sound(target, trained=True)
    say(ends, trained=True)
    return Row(ids, labels, columns, column_labels)


def rows(number: int, books: int = 4, *, seed: int = 0) -> list[Row]:
    """Of different lengths, every third without a reference clip."""
    return [
        row(books, 0 if n % 3 == 2 else 2 + n % 2, 2 + (n * 2) % 5, seed * 1000 + n) for n in range(number)
    ]


def batch(some: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Right-padded, with transformers' argument names."""
    wide = max(len(r.ids) for r in some)
    deep = max(len(r.columns) for r in some)
    books = next(len(r.columns[0]) for r in some if r.columns)

    def padded(values: list[Any], to: int, fill: Any) -> list[Any]:
        return values + [fill] * (to - len(values))

    return {
        "input_ids": torch.tensor([padded(r.ids, wide, PAD) for r in some]),
        "attention_mask": torch.tensor([padded([1] * len(r.ids), wide, 0) for r in some]),
        "labels": torch.tensor([padded(r.labels, wide, NONE) for r in some]),
        "audio_input_ids": torch.tensor([padded(r.columns, deep, [END] * books) for r in some]),
        "audio_input_ids_mask": torch.tensor([padded([True] * len(r.columns), deep, False) for r in some]),
        "audio_labels": torch.tensor([padded(r.column_labels, deep, [NONE] * books) for r in some]),
    }


def direct(model: Any, some: Sequence[Row]) -> tuple[list[float], list[int]]:
    """Sums and counts of text and of each codebook: row by row without padding, token by token, by the formula."""
    books, size = model.config.num_codebooks, model.config.codebook_size
    sums, counts = [0.0] * (1 + books), [0] * (1 + books)

    def add(part: int, logits: torch.Tensor, wanted: int) -> None:
        if wanted == NONE:
            return
        values = logits.tolist()
        high = max(values)
        total = sum(torch.exp(torch.tensor(v - high, dtype=torch.float64)).item() for v in values)
        sums[part] += high + torch.log(torch.tensor(total, dtype=torch.float64)).item() - values[wanted]
        counts[part] += 1

    for one in some:
        alone = batch([one])
        body = {name: alone[name] for name in ("input_ids", "audio_input_ids", "audio_input_ids_mask")}
        with torch.no_grad():
            hidden = model.model(**body).last_hidden_state[0]
        frame = -1
        for place, token in enumerate(one.ids):
            is_frame = token in (AUDIO, DELAY)
            frame += is_frame
            if place == 0:
                continue
            add(0, model.text_lm_head.weight.double() @ hidden[place - 1].double(), one.labels[place])
            if is_frame:
                heard = model.audio_lm_head.weight.double() @ hidden[place - 1].double()
                for book in range(books):
                    logits = heard[book * size : (book + 1) * size]
                    add(1 + book, logits, one.column_labels[frame][book])
    return sums, counts


def loss_of_parts(sums: Sequence[float], counts: Sequence[int]) -> float:
    text, *sounds = [total / count if count else 0.0 for total, count in zip(sums, counts, strict=True)]
    return text + sum(sounds) / len(sounds)
