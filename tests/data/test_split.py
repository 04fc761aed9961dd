"""Holding rows out by seed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.data.split import held_out
from trimtab.errors import RequestError


def keys(number: int) -> list[str]:
    return [f"row {i}" for i in range(number)]


def test_the_seed_s_own_figures() -> None:
    assert len(held_out(keys(7888), 0.1, seed=42)) == 789


def test_the_same_on_every_platform() -> None:
    assert sorted(held_out(keys(10), 0.3, seed=0)) == ["row 1", "row 2", "row 8"]


def test_another_seed_holds_out_other_rows() -> None:
    assert held_out(keys(100), 0.1, seed=0) != held_out(keys(100), 0.1, seed=1)


def test_the_order_of_the_file_does_not_matter() -> None:
    assert held_out(keys(50), 0.2, seed=3) == held_out(keys(50)[::-1], 0.2, seed=3)


def test_too_few_rows() -> None:
    with pytest.raises(RequestError, match=r"data\.eval_fraction=0\.1: only 1 different row"):
        held_out(["a", "a"], 0.1, seed=0)


@given(
    st.lists(st.sampled_from([f"r{i}" for i in range(40)]), min_size=1),
    st.floats(0.01, 0.99),
    st.integers(0, 5),
)
def test_at_least_one_row_on_each_side(rows: list[str], fraction: float, seed: int) -> None:
    if len(set(rows)) < 2:
        return
    chosen = held_out(rows, fraction, seed)
    assert chosen
    assert set(rows) - chosen
    assert chosen == held_out(rows, fraction, seed)
