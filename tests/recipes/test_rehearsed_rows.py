"""Which of a zeroth-order run's steps a rehearsal of shapes meets: its own, with those that hold most early."""

from __future__ import annotations

import random

import pytest

from trimtab.recipes.rehearsed_rows import HeaviestEarly
from trimtab.zeroth.batches import BatchStream, Collate
from trimtab.zeroth.objective import Example

COLLATE = Collate(pad_id=0, max_length=64)


def examples(seed: int) -> list[Example]:
    draw = random.Random(seed)
    return [
        Example([n + 1] * draw.randint(1, 40), [[7] * draw.randint(1, 12)] * draw.choice((1, 1, 3)), 0)
        for n in range(23)
    ]


def tokens(batch: list[Example]) -> int:
    return sum(one.rows for one in batch) * max(one.length for one in batch)


def logits(batch: list[Example]) -> int:
    return sum(one.rows for one in batch) * max(len(answer) for one in batch for answer in one.candidates)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_steps_that_hold_most_come_behind_the_first(seed: int, micro_batches: int) -> None:
    run = BatchStream(examples(seed), 2, micro_batches, seed, COLLATE)
    whole = 19
    all_steps = [run.drawn(step) for step in range(whole)]
    early = HeaviestEarly(run, whole=whole, made=4)
    met = [early.drawn(step) for step in range(4)]
    for size in (tokens, logits):
        most = max(size(batch) for step in all_steps for batch in step)
        # The first rank's first pass: it may stand for all ranks.
        assert most in [size(step[0]) for step in met]
    for step in met[:3]:
        same = [step[at:] + step[:at] for at in range(micro_batches)]
        assert any(turned in all_steps for turned in same), "no batch that the run never draws"
    assert met[0] in ([*all_steps[0][at:], *all_steps[0][:at]] for at in range(micro_batches))


def test_where_few_are_made_they_are_the_heaviest() -> None:
    run = BatchStream(examples(1), 2, 1, 0, COLLATE)
    most = max(tokens(batch) for step in range(50) for batch in run.drawn(step))
    assert tokens(HeaviestEarly(run, whole=50, made=1).drawn(0)[0]) == most


def test_batches_are_padded_as_ever() -> None:
    run = BatchStream(examples(2), 2, 2, 0, COLLATE)
    early = HeaviestEarly(run, whole=9, made=4)
    first = [batch.input_ids.tolist() for batch in run()]
    assert [batch.input_ids.tolist() for batch in early()] in (first, first[::-1])
    assert early.taken == run.taken == 1
    assert early.steps_per_epoch == run.steps_per_epoch
