"""Rows that begin alike: what they share is computed once, and losses and gradients are those of the rows apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_rows import CPU, SOUND, model

from trimtab.data.collate import Collate
from trimtab.data.shared_start import LEAST, branched, shared_start
from trimtab.fast.answers import use_answers
from trimtab.fast.rows import lay_rows

BEGIN = [7, 3, 50, 12, 9, 9, 41, 2, 30, 8]
ENDS = [[5, 9, 33, 7], [8, 3], [12, 4, 71, 70, 69, 3]]
ROWS: list[dict[str, Any]] = [
    {"input_ids": BEGIN + end, "labels": [-100] * (len(BEGIN) + 1) + end[1:]} for end in ENDS
]
HOST = ("row_lengths", "tokens", "items", "labels")


def test_what_is_shared_stands_once() -> None:
    batch = Collate("rows", 0, shares=True)(ROWS)
    assert batch["shared_start"] == len(BEGIN)
    assert batch["input_ids"].tolist() == [BEGIN + ENDS[0] + ENDS[1] + ENDS[2]]
    assert batch["position_ids"][0, 8:17].tolist() == [8, 9, 10, 11, 12, 13, 10, 11, 10]
    # The last token of each row is told, and tells nothing.
    assert batch["computed"].tolist() == [*range(13), 14, *range(16, 21)]
    assert batch["cu_seq_lens_q"].tolist() == [0, 10, 13, 14, 19]
    assert batch["head_rows"].tolist() == [10, 11, 12, 13, 14, 15, 16, 17, 18]
    assert batch["row_lengths"].tolist() == [14, 12, 16]
    apart = Collate("rows", 0)(ROWS)
    assert (batch["tokens"], batch["items"]) == (apart["tokens"], apart["items"])
    assert batch["head_labels"].tolist() == apart["head_labels"].tolist()
    assert "shared_start" not in apart


@given(
    st.lists(
        st.tuples(st.integers(0, 14), st.integers(1, 6), st.integers(0, 20)),
        min_size=1,
        max_size=5,
    )
)
def test_no_label_is_lost_and_no_token_moved(shapes: list[tuple[int, int, int]]) -> None:
    whole = [*BEGIN, 60, 61, 62, 63]
    rows = []
    for number, (alike, more, first) in enumerate(shapes):
        ids = whole[:alike] + [70 + number] * more
        rows.append((ids, [-100] * min(first, len(ids)) + ids[first:]))
    shared = shared_start(rows)
    assert shared == 0 or shared >= LEAST
    if not shared:
        return
    assert all(ids[:shared] == rows[0][0][:shared] and len(ids) > shared for ids, _ in rows)
    batch = branched(rows, shared)
    for (ids, labels), (a, b) in zip(
        rows,
        zip(batch["cu_seq_lens_q"][1:-1].tolist(), batch["cu_seq_lens_q"][2:].tolist(), strict=True),
        strict=True,
    ):
        assert batch["input_ids"][0, a:b].tolist() == ids[shared:]
        assert batch["position_ids"][0, a:b].tolist() == list(range(shared, len(ids)))
        assert batch["labels"][0, a:b].tolist() == labels[shared:]
        assert set(labels[1 : shared + 1]) == {-100}


@pytest.mark.parametrize("kind", SOUND)
def test_losses_and_gradients_are_those_of_the_rows_apart(kind: str) -> None:
    found = []
    for shares in (False, True):
        built = model(kind, **SOUND[kind]).train()
        laid = lay_rows(built, CPU, packing=False, longest=64)
        use_answers(built, CPU)
        assert laid.shares, laid.reason
        batch = Collate(laid.layout, 0, shares=shares)(ROWS)
        assert ("shared_start" in batch) is shares
        told = built(**{name: value for name, value in batch.items() if name not in HOST})
        told["loss"].backward()
        gradients = {name: p.grad for name, p in built.named_parameters() if p.grad is not None}
        found.append((told["loss"].detach(), gradients))
    (loss, plain), (shared_loss, shared) = found
    torch.testing.assert_close(shared_loss, loss)
    assert plain.keys() == shared.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(shared[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "changes", [{"attention_dropout": 0.1}, {"resid_pdrop": 0.1}, {"router_aux_loss_coef": 0.01}]
)
def test_what_counts_or_draws_by_token_is_not_shared(changes: dict[str, float]) -> None:
    assert not lay_rows(model("llama", **changes), CPU, packing=False, longest=64).shares


def test_an_adapter_with_dropout_is_not_shared() -> None:
    from peft import LoraConfig, get_peft_model

    for dropout, shares in ((0.0, True), (0.1, False)):
        adapted = get_peft_model(model("llama"), LoraConfig(target_modules=["q_proj"], lora_dropout=dropout))
        assert lay_rows(adapted, CPU, packing=False, longest=64).shares is shares
