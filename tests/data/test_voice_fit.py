"""Which coded rows are kept before the first step, and what the report says of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coded_rows import codes, said, voice_config, voice_tokenizer
from trimtab.config.schema import DataSettings, VoiceSettings
from trimtab.data.report import SourceReport, VoiceReport
from trimtab.data.voice_collate import CodedRow, VoiceCollator
from trimtab.errors import RequestError

TOKENIZER = voice_tokenizer()


def source(rows: int) -> SourceReport:
    return SourceReport(
        "clips", [], None, "voice", "its columns", rows, rows, {"silent": 1}, {"silent": "a"}, {}, []
    )


def report_of(train: int, held: int, apart: bool = False) -> Any:
    about = source(train) if apart else source(train + held)
    other = source(held) if apart else None
    return VoiceReport(about, other, train, held, "by speaker", 1.0, 0.5, {}, train + held, {24000: 1}, True)


def collator(max_length: int | None = None) -> VoiceCollator:
    return VoiceCollator(TOKENIZER, voice_config(TOKENIZER), VoiceSettings(), max_length)


def row(line: int, frames: int, text: str = "A") -> CodedRow:
    made = said(text, codes(frames), where=f"clips, line {line}")
    return replace(made, row=replace(made.row, speaker="anna" if line % 2 else "ben"))


def test_rows_that_fit_are_kept_as_they_are() -> None:
    train, held, report = [row(1, 3), row(2, 5)], [row(3, 2)], report_of(2, 1)
    kept = collator().fitting(train, held, DataSettings(), report)
    assert kept == (train, held)
    least = collator().length(held[0])
    assert (report.rows_train, report.rows_eval, report.train.rows_kept) == (2, 1, 3)
    assert (report.train.lengths.min, report.train.lengths.max) == (least, least + 3)
    assert report.train.dropped == {"silent": 1}
    assert report.notes == ["conversations by the model's chat template"]


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_long_rows_are_left_out_and_counted(too_long: str) -> None:
    train, held, report = [row(1, 3), row(2, 9), row(3, 10)], [row(4, 9), row(5, 1)], report_of(3, 2)
    most = collator().length(train[0])
    data = DataSettings(too_long=too_long, bad_rows="drop")
    assert collator(most).fitting(train, held, data, report) == ([train[0]], [held[1]])
    why = f"longer than data.max_length={most}: a clip is never cut"
    assert report.train.dropped == {"silent": 1, why: 3}
    assert report.train.first_dropped[why] == "clips, line 2"
    assert (report.rows_train, report.rows_eval, report.train.rows_kept) == (1, 1, 2)
    # Of 22 frames to train on 3 are left, of 10 held out 1.
    assert (report.minutes_train, report.minutes_eval) == pytest.approx((1.0 * 3 / 22, 0.5 * 1 / 10))
    assert report.speakers == {"anna": 2}
    assert f"    dropped 3: {why} (first: clips, line 2)" in report.lines()


def test_a_source_of_its_own_for_evaluation_has_its_own_counts() -> None:
    train, held, report = [row(1, 3)], [row(1, 9), row(2, 1)], report_of(1, 2, apart=True)
    most = collator().length(train[0])
    collator(most).fitting(train, held, DataSettings(too_long="drop"), report)
    assert report.train.dropped == {"silent": 1}
    assert (report.train.rows_kept, report.eval.rows_kept) == (1, 1)
    assert sum(report.eval.dropped.values()) == 2


def test_what_should_be_cut_and_cannot_be_stops_where_bad_rows_stop() -> None:
    train = [row(1, 3), row(2, 9)]
    most, tokens = (collator().length(one) for one in train)
    with pytest.raises(RequestError, match=f"clips, line 2: {tokens} tokens, and data.max_length={most}"):
        collator(most).fitting(train, [], DataSettings(bad_rows="stop"), report_of(2, 0))
    kept, _ = collator(most).fitting(
        train, [], DataSettings(bad_rows="stop", too_long="drop"), report_of(2, 0)
    )
    assert kept == [train[0]]


def test_the_places_of_the_model_are_a_limit_too() -> None:
    train, report = [row(1, 3), row(2, 300)], report_of(2, 0)
    collator(4096).fitting(train, [], DataSettings(too_long="drop"), report)
    assert "longer than the model's max_position_embeddings=256: a clip is never cut" in report.train.dropped


def test_a_row_that_cannot_be_trained_on_is_dropped_or_stops() -> None:
    train, report = [row(1, 3), row(2, 3, "A<|eot_id|>"), row(3, 0)], report_of(3, 0)
    kept, _ = collator().fitting(train, [], DataSettings(bad_rows="drop"), report)
    assert kept == [train[0]]
    assert report.train.dropped["its clip has no frame"] == 1
    with pytest.raises(RequestError, match=r"clips, line 2: its text holds the special token <\|eot_id\|>"):
        collator().fitting(train, [], DataSettings(bad_rows="stop"), report_of(3, 0))


def test_codes_that_the_model_cannot_have_stop_the_run_whatever_bad_rows_says() -> None:
    train = [row(1, 3), said("A", codes(2, entries=40, seed=3), where="clips, line 2")]
    with pytest.raises(RequestError, match="clips, line 2, its clip: audio codes from"):
        collator().fitting(train, [], DataSettings(bad_rows="drop"), report_of(2, 0))


def test_nothing_left_is_an_error_with_the_reasons() -> None:
    with pytest.raises(
        RequestError, match=r"no row is left to train on: 1 its clip has no frame \(first: clips"
    ):
        collator().fitting([row(1, 0)], [], DataSettings(bad_rows="drop"), report_of(1, 0))
