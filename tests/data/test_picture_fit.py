"""Rows that a model cannot take are told before training: by their text, and by what max_length leaves of them."""

from __future__ import annotations

from typing import Any

import pytest

from picture_rows import drawn, question, turns
from tiny_processors import tiny_processor
from trimtab.config.schema import DataSettings, VisionSettings
from trimtab.data.clean import Tally
from trimtab.data.picture_check import checked_rows
from trimtab.data.picture_collate import PictureCollator
from trimtab.data.picture_fit import Fits
from trimtab.data.picture_prepare import prepare_pictures
from trimtab.data.pictures import Picture
from trimtab.errors import RequestError

WIDE, TALL = drawn(40, 20), drawn(24, 56, "green")
SHORT = question("How many bars?", "14", WIDE, where="row 1")
LONG = question("How many bars?", "one two three four five", WIDE, where="row 2")
TALK = turns(
    ("user", "<image>What?"), ("assistant", "a line"), ("user", "<image>And?"), ("assistant", "red"),
    pictures=(WIDE, TALL), where="row 3",
)  # fmt: skip
MARKED = question("What is <|im_end|>?", "an end", WIDE, where="row 4")


def fits(most: int | None, **options: Any) -> Fits:
    return Fits(
        PictureCollator(tiny_processor("llava_onevision"), max_length=most), options.get("do", "truncate")
    )


def tokens(row: Any) -> int:
    return int(PictureCollator(tiny_processor("llava_onevision"))([row])["input_ids"].shape[1])


def test_without_a_limit_all_fit_that_the_template_writes() -> None:
    tally = Tally()
    assert [fits(None)(row, tally) for row in (SHORT, LONG, TALK, MARKED)] == [True, True, True, False]
    (reason,) = tally.dropped
    assert "control token <|im_end|>" in reason
    assert tally.first[reason] == "row 4"
    with pytest.raises(RequestError, match="row 4: a text holds the control token"):
        fits(None)(MARKED, Tally(strict=True))


def test_what_is_too_long_is_dropped_where_that_is_asked() -> None:
    tally, most = Tally(), tokens(SHORT)
    assert [fits(most, do="drop")(row, tally) for row in (SHORT, LONG, TALK)] == [True, False, False]
    assert tally.dropped == {f"longer than data.max_length={most} (data.too_long=drop)": 2}


def test_what_is_too_long_is_cut_while_an_answer_and_all_pictures_are_left() -> None:
    tally, most = Tally(), tokens(LONG) - 2
    assert [fits(most)(row, tally) for row in (SHORT, LONG)] == [True, True]
    assert tally.changed == {f"answer cut at data.max_length={most}": 1}
    asked = PictureCollator(tiny_processor("llava_onevision")).asked([LONG])["input_ids"].shape[1]
    assert not fits(asked)(LONG, tally)
    assert tally.dropped == {f"no answer left at data.max_length={asked}: a picture is never cut": 1}
    # Behind the first answer, in the second picture.
    labels = PictureCollator(tiny_processor("llava_onevision"))([TALK])["labels"][0]
    first = int((labels != -100).nonzero()[0])
    assert not fits(first + 3)(TALK, Tally())
    # Of two turns the second answer may be lost: the first one is still there, and so are both pictures.
    long = turns(*(("user", "<image>What?"), ("assistant", "a")) * 2, ("user", "And? " * 9), ("assistant", "b"),
                 pictures=(WIDE, TALL))  # fmt: skip
    assert fits(tokens(long) - 6)(long, Tally())


@pytest.mark.parametrize("short_by", range(1, 12))
def test_a_row_fits_when_the_collator_takes_it_and_never_else(short_by: int) -> None:
    for row in (SHORT, LONG, TALK):
        made = fits(tokens(row) - short_by)
        fit = made(row, Tally())
        if fit:
            assert made.collator([row])["input_ids"].shape[1] == tokens(row) - short_by
        else:
            with pytest.raises(RequestError, match=r"data\.max_length"):
                made.collator([row])


def test_a_picture_of_a_size_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fits(1000)
    kind = type(made.collator.processor.image_processor)
    prepared, own = [], kind.preprocess

    def counted(self: Any, images: Any, *more: Any, **options: Any) -> Any:
        prepared.append(images)
        return own(self, images, *more, **options)

    monkeypatch.setattr(kind, "preprocess", counted)
    rows = [
        question(f"Question {n}?", "14", drawn(40, 20, colour))
        for n, colour in enumerate(("red", "blue") * 3)
    ]
    assert all(made(row, Tally()) for row in rows)
    assert len(prepared) == 1
    kept, _ = checked_rows(rows, 10_000, True, Tally(), repeats=True)
    assert [picture.size for row in kept for picture in row.pictures] == [(40, 20)] * 6
    monkeypatch.setattr(Picture, "open", None)
    assert all(made(row, Tally()) for row in kept), "a picture that was looked at is not opened again"
    assert len(prepared) == 1


def test_a_run_drops_and_counts_what_does_not_fit(tmp_path: Any) -> None:
    import json

    picture = drawn(40, 20)
    assert isinstance(picture, Picture)
    assert isinstance(picture.source, bytes)
    (tmp_path / "a.png").write_bytes(picture.source)
    lines = [
        {"image": "a.png", "question": row.messages[0]["content"][-1]["text"], "answer": row.answers[0]}
        for row in (SHORT, LONG, question("And how many lines?", "2"))
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    data = DataSettings(source=str(tmp_path / "rows.jsonl"), eval_fraction=0, too_long="drop")
    most = tokens(LONG) - 1
    prepared = prepare_pictures(data, VisionSettings(), 0, print, fits(most, do="drop"))
    assert [row.answers[0] for row in prepared.train] == ["14", "2"]
    assert prepared.report.train.dropped == {f"longer than data.max_length={most} (data.too_long=drop)": 1}
    with pytest.raises(RequestError, match=r"(?s)none of its 3 rows.*raise data.max_length"):
        prepare_pictures(data, VisionSettings(), 0, print, fits(5))
