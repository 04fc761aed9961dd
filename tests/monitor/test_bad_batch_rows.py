"""The rows of a batch that is kept to be looked at, however they were laid."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trimtab.data.collate import Collate
from trimtab.monitor.bad_batch import rows_of

START = list(range(10, 22))
EXAMPLES = [
    {"input_ids": [*START, 1, 2, 3], "labels": [-100] * 13 + [2, 3]},
    {"input_ids": [*START, 4, 5, 6, 7, 8], "labels": [-100] * 16 + [8]},
]


class Numbers:
    pad_token_id = 0

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


@pytest.mark.parametrize("shares", [False, True])
def test_each_row_is_told_whole(shares: bool) -> None:
    batch: dict[str, Any] = Collate("rows", 0, shares=shares)(EXAMPLES)
    assert ("shared_start" in batch) is shares
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    rows = rows_of(tensors, Numbers())
    assert [row["input"] for row in rows] == [" ".join(map(str, e["input_ids"])) for e in EXAMPLES]
    assert [row["trained_tokens"] for row in rows] == [2, 1]
