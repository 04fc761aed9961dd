"""The order of batches: a function of the seed and a count, complete in every pass."""

from __future__ import annotations

from trimtab.zeroth.batches import BatchStream, Collate, by_length
from trimtab.zeroth.objective import Example

EXAMPLES = [Example([n + 1] * (1 + n % 3), [[50], [51]], n % 2) for n in range(10)]
COLLATE = Collate(pad_id=0, max_length=16)


def stream(seed: int = 0, batch_size: int = 2, micro_batches: int = 2) -> BatchStream:
    return BatchStream(EXAMPLES, batch_size, micro_batches, seed, COLLATE)


def drawn(batches: BatchStream, steps: int) -> list[int]:
    return [int(row[-1]) for _ in range(steps) for batch in batches() for row in batch.input_ids]


def test_every_pass_holds_each_example_once() -> None:
    seen = drawn(stream(), 5)  # twenty rows: two passes over ten examples
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(1, 11))
    assert seen[:10] != seen[10:]
    assert stream().steps_per_epoch == 3


def test_the_seed_decides_and_a_count_is_all_there_is_to_resume() -> None:
    whole = drawn(stream(seed=3), 9)
    assert whole == drawn(stream(seed=3), 9)
    assert whole != drawn(stream(seed=4), 9)
    later = stream(seed=3)
    later.taken = 6
    assert drawn(later, 3) == whole[6 * 4 :]


def test_micro_batches_only_cut_the_same_rows() -> None:
    assert drawn(stream(batch_size=4, micro_batches=1), 3) == drawn(stream(batch_size=1, micro_batches=4), 3)
    assert [b.examples for b in stream()()] == [2, 2]


def test_evaluation_takes_every_place_once_longest_first() -> None:
    groups = by_length(EXAMPLES, 4)
    assert sorted(place for group in groups for place in group) == list(range(10))
    lengths = [len(EXAMPLES[place].prompt) for group in groups for place in group]
    assert lengths == sorted(lengths, reverse=True)
