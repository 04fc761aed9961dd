"""Batches of rows: end to end without padding, side by side where they are of one length, packed by best fit."""

from __future__ import annotations

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.data.collate import Collate
from trimtab.data.packing import pack, packed

ROWS = [
    {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, 3, 4, 5]},
    {"input_ids": [6, 7], "labels": [6, 7]},
    {"input_ids": [8, 9, 10], "labels": [-100, 9, -100]},
]


def test_end_to_end() -> None:
    batch = Collate("rows", 0)(ROWS)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 0, 1, 2]]
    assert batch["labels"].tolist() == [[-100, -100, 3, 4, 5, -100, 7, -100, 9, -100]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 7, 10]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == 8
    assert next(iter(batch)) == "row_lengths"
    assert (batch["tokens"], batch["items"]) == (10, 5)
    assert batch["head_rows"].tolist() == [1, 2, 3, 5, 7]
    assert batch["head_labels"].tolist() == [3, 4, 5, 7, 9]
    assert "cu_seq_lens_q" not in Collate("positions", 0)(ROWS)


def test_padded() -> None:
    batch = Collate("padded", 99)(ROWS)
    assert batch["input_ids"][1].tolist() == [6, 7, 99, 99, 99]
    assert batch["attention_mask"].sum(1).tolist() == [5, 2, 3]
    assert batch["head_rows"].tolist() == [1, 2, 3, 5, 10]
    assert batch["head_labels"].tolist() == [3, 4, 5, 7, 9]
    assert batch["tokens"] == 10


def test_without_a_label_one_place_stays() -> None:
    batch = Collate("rows", 0)([{"input_ids": [1, 2], "labels": [-100, -100]}])
    assert (batch["items"], batch["head_rows"].tolist(), batch["head_labels"].tolist()) == (0, [0], [-100])


def test_packed_rows_are_the_rows() -> None:
    rows = datasets.Dataset.from_list(ROWS)
    sequences = packed(rows, 8)
    assert sequences["row_lengths"][:] == [[5, 3], [2]]
    batch = Collate("rows", 0)(list(sequences))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 8, 9, 10, 6, 7]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 8, 10]
    with pytest.raises(ValueError, match="packed rows cannot be padded"):
        Collate("padded", 0)(list(sequences))


@given(st.lists(st.integers(1, 16), max_size=40))
def test_every_row_has_one_place_and_no_sequence_is_too_long(lengths: list[int]) -> None:
    bins = pack(lengths, 16)
    assert sorted(row for chosen in bins for row in chosen) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in chosen) <= 16 for chosen in bins)
    # Best fit leaves no two sequences that would fit into one.
    sizes = sorted(sum(lengths[row] for row in chosen) for chosen in bins)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > 16


def test_the_bins_are_those_of_trl() -> None:
    from trl import pack_dataset

    lengths = [3, 9, 4, 4, 12, 1, 7, 2, 2, 15, 6, 5]
    rows = datasets.Dataset.from_dict(
        {"input_ids": [[n] * n for n in lengths], "labels": [[n] * n for n in lengths]}
    )
    assert packed(rows, 16)["input_ids"][:] == pack_dataset(rows, 16, "bfd")["input_ids"][:]
