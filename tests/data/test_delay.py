"""The delay pattern, held against plain loops that say in so many words what it is, and against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coded_rows import codes, own_processor, plain_columns, voice_tokenizer
from trimtab.data.delay import delayed, delayed_labels, spoken, undelayed
from trimtab.errors import RequestError


@st.composite
def clips(draw: Any) -> tuple[list[list[int]], int, int]:
    books, entries = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    frame = st.lists(st.integers(0, entries - 1), min_size=books, max_size=books)
    return draw(st.lists(frame, max_size=12)), books, entries


def tensor(clip: list[list[int]], books: int) -> torch.Tensor:
    return torch.tensor(clip, dtype=torch.long).reshape(-1, books)


@given(clips())
@settings(deadline=None)
def test_any_clip_is_delayed_and_labelled_as_the_loops_say_and_comes_back(made: Any) -> None:
    clip, books, entries = made
    columns = delayed(tensor(clip, books), entries, entries + 1)
    inputs, labels = plain_columns(clip, books, entries, entries + 1)
    assert columns.tolist() == inputs
    assert delayed_labels(tensor(clip, books), entries + 1).tolist() == labels
    assert undelayed(columns).tolist() == clip
    heard, ended = spoken(columns, entries, entries + 1)
    assert heard.tolist() == clip
    assert ended


def test_two_codebooks_by_hand() -> None:
    clip = torch.tensor([[1, 2], [3, 4], [5, 6]])
    assert delayed(clip, 8, 9).T.tolist() == [[8, 1, 3, 5, 9, 9], [8, 8, 2, 4, 6, 9]]
    assert delayed_labels(clip, 9).T.tolist() == [[-100, 1, 3, 5, 9, -100], [-100, -100, 2, 4, 6, 9]]


def test_eight_codebooks_by_hand() -> None:
    clip = torch.arange(16).reshape(2, 8)
    columns, labels = delayed(clip, 1024, 1025), delayed_labels(clip, 1025)
    assert columns.shape == labels.shape == (2 + 2 + 7, 8)
    assert columns[:, 7].tolist() == [1024] * 8 + [7, 15, 1025]
    assert labels[:, 7].tolist() == [-100] * 8 + [7, 15, 1025]
    assert columns[:, 3].tolist() == [1024] * 4 + [3, 11] + [1025] * 5
    assert labels[:, 3].tolist() == [-100] * 4 + [3, 11, 1025] + [-100] * 4
    # In each codebook two codes and one end.
    assert (labels != -100).sum(dim=0).tolist() == [3] * 8


@pytest.mark.parametrize(("frames", "books"), [(1, 1), (5, 1), (4, 2), (3, 8), (20, 8), (2, 12)])
def test_the_columns_are_those_of_transformers_own_processor(frames: int, books: int) -> None:
    clip = codes(frames, books, entries=1024)
    own = own_processor(voice_tokenizer(), books, entries=1024)
    stream = torch.cat([torch.full((1, books), 1024), clip, torch.full((1, books), 1025)])
    theirs = own.build_delay_pattern(stream.T[None])[0].T
    assert torch.equal(delayed(clip, 1024, 1025), theirs)
    # Theirs is undone without the first and the last column, as their `batch_decode` does.
    assert torch.equal(own.revert_delay_pattern(theirs[1:-1]), undelayed(theirs))


def test_no_step_goes_from_one_clip_into_the_next() -> None:
    """Each position predicts the next one's label. The first column of a clip is ignored in every codebook, so the last
    position of the clip before it, or whatever stands there, is asked for nothing."""
    first, second = codes(3, 4, seed=1), codes(2, 4, seed=2)
    labels = torch.cat([delayed_labels(first, 17), delayed_labels(second, 17)])
    border = 3 + 2 + 3
    assert (labels[border] == -100).all()
    asked = [(at, at + 1) for at in range(len(labels) - 1) if (labels[at + 1] != -100).any()]
    assert all((at < border) == (after < border) for at, after in asked)
    assert len(asked) == (3 + 4) + (2 + 4)


@pytest.mark.parametrize("wrong", [-1, 16, 17, 1000])
def test_a_code_that_the_model_does_not_know_names_the_clip(wrong: int) -> None:
    clip = codes(3)
    clip[1, 2] = wrong
    with pytest.raises(RequestError, match=r"rows.jsonl, line 3, its clip.*\n.*codes 0 to 15"):
        delayed(clip, 16, 17, "rows.jsonl, line 3, its clip")


def test_codes_of_another_shape_are_refused() -> None:
    with pytest.raises(RequestError, match=r"shape \(1, 4, 3\)"):
        delayed(torch.zeros(1, 4, 3, dtype=torch.long), 16, 17)
    with pytest.raises(RequestError, match="take 5"):
        undelayed(torch.full((4, 4), 16))


def test_a_clip_that_was_cut_off_keeps_its_whole_frames() -> None:
    clip = codes(6)
    columns = delayed(clip, 16, 17)
    # Six columns: BOS, and frames 0 and 1 in all four codebooks.
    heard, ended = spoken(columns[:6], 16, 17)
    assert torch.equal(heard, clip[:2])
    assert not ended
    heard, ended = spoken(columns[:1], 16, 17)
    assert heard.shape == (0, 4)
    assert not ended


def test_codebooks_that_end_late_do_not_lengthen_the_clip() -> None:
    """`generate` forces codebook k to end one column later than the pattern has it; until then the model is free."""
    clip = codes(4)
    columns = torch.cat([delayed(clip, 16, 17), torch.full((1, 4), 17)])
    for book in range(1, 4):
        columns[5 + book, book] = 3
    heard, ended = spoken(columns, 16, 17)
    assert torch.equal(heard, clip)
    assert ended
