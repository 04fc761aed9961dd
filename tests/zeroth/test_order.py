"""The order in which a pass makes its weights: nothing overwritten before it was read, every tensor updated once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.zeroth.order import Plan, Read, Way, plan

HEAD, TABLE, NORM, UNUSED = 900, 901, 902, 903


def layer(owner: int, size: int = 512, way: Way = "ahead") -> Read:
    return Read(owner, 0, size, way)


def simulated(reads: list[Read], ring: int, made: Plan) -> list[int]:
    """How many weights were made beyond those read, by the rule of `ahead.py`; none may be gone before it is read."""
    holds: dict[int, int] = {}
    issued, distance = 0, []
    for at, read in enumerate(reads):
        while issued < len(made.batches) and made.batches[issued].after < at:
            for each in made.batches[issued].reads:
                begin = made.places[each]
                assert begin + reads[each].size <= ring
                holds.update(dict.fromkeys(range(begin, begin + reads[each].size), each))
            issued += 1
        if read.way == "ahead":
            assert at in [each for batch in made.batches[:issued] for each in batch.reads]
            begin = made.places[at]
            assert {holds[place] for place in range(begin, begin + read.size)} == {at}
        distance.append(sum(len(batch.reads) for batch in made.batches[:issued]) - at)
    return distance


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 1000),
            st.sampled_from(["ahead", "ahead", "here", "table"]),
            st.sampled_from(["", "a", "b"]),
        ),
        max_size=24,
    )
)
def test_no_weight_is_overwritten_before_it_is_read(drawn: list[tuple[int, Way, str]]) -> None:
    reads = [Read(owner, 0, size, way, kind) for owner, (size, way, kind) in enumerate(drawn)]
    simulated(reads, 2048, plan(reads, 2048, [], carry=False))


def test_a_ring_of_two_holds_the_next_weight() -> None:
    reads = [layer(i) for i in range(6)]
    assert simulated(reads, 1024, plan(reads, 1024, [], carry=False))[:5] == [2, 2, 2, 2, 2]
    assert simulated(reads, 512, plan(reads, 512, [], carry=False)) == [1] * 6


def test_neighbours_of_one_kind_are_made_at_once() -> None:
    sizes = [512, 256, 256, 1024, 256, 256]
    reads = [Read(i, 0, size, "ahead", "bf16") for i, size in enumerate(sizes)]
    reads.insert(1, layer(HEAD, way="here"))
    made = plan(reads, 2560, [], carry=False)  # a batch takes two fifths of the ring at most
    assert [batch.reads for batch in made.batches] == [(0, 2, 3), (4,), (5, 6)]
    other = plan([layer(0), layer(1)], 2560, [], carry=False)
    assert [batch.reads for batch in other.batches] == [(0,), (1,)]


def test_every_tensor_is_brought_up_to_date_once() -> None:
    reads = [Read(HEAD, 0, 8, "table"), Read(TABLE, 0, 8, "table"), layer(0), layer(1), layer(1)]
    reads += [Read(2, 0, 512, "ahead"), Read(2, 256, 512, "ahead"), layer(HEAD, way="here")]
    made = plan(reads, 2048, [HEAD, TABLE, NORM, UNUSED, 0, 1, 2], carry=True)
    assert made.begin == {NORM, UNUSED}
    assert made.between == {HEAD, TABLE}
    assert made.late == {HEAD, TABLE, 0, 1, 2}
    assert made.carries == [False, False, True, True, False, True, True, False]


def test_a_pass_of_thin_products_alone_updates_as_it_reads() -> None:
    reads = [Read(HEAD, 0, 8, "table"), layer(0, way="here"), layer(HEAD, way="here"), layer(0, way="here")]
    made = plan(reads, 2048, [HEAD, TABLE, 0], carry=True)
    assert made.carries == [False, True, True, False]
    assert made.begin == {TABLE}
    assert not made.between
    assert HEAD in made.late


def test_what_is_read_in_two_ways_is_updated_before_anything_else() -> None:
    # A table among products, and a tensor that is made on either stream: neither has one moment that suits all.
    reads = [layer(0), Read(TABLE, 0, 8, "table"), layer(1), layer(1, way="here"), layer(2)]
    made = plan(reads, 2048, [0, 1, 2, TABLE], carry=True)
    assert made.begin == {1, TABLE}
    assert not made.late & {1, TABLE}
    assert made.carries == [True, False, False, False, True]


def test_without_an_update_to_carry_nothing_is_written() -> None:
    made = plan([layer(0), layer(1, way="here")], 2048, [0, 1, NORM], carry=False)
    assert not made.begin | made.between | made.late
    assert not any(made.carries)


def test_tensors_of_one_product_are_brought_up_to_date_together() -> None:
    three = Read(0, 0, 512, "ahead", "a", also=(1, 2))
    made = plan([three, layer(3), three], 2048, [0, 1, 2, 3], carry=True)
    assert made.late == {0, 1, 2, 3}
    assert made.carries == [True, True, False]


def test_tensors_that_another_product_reads_otherwise_are_updated_before_anything_else() -> None:
    # The second read of 1 finds it up to date; whoever reads all three would have to know that it is not for the rest.
    three = Read(0, 0, 512, "ahead", "a", also=(1, 2))
    for other in (layer(1), layer(1, way="here"), Read(2, 0, 8, "table")):
        made = plan([three, other, layer(3)], 2048, [0, 1, 2, 3], carry=True)
        assert made.begin == {0, 1, 2}
        assert made.carries == [False, False, True]
