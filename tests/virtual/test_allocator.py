"""CUDA's caching allocator: figures that follow from its rules, written out, and what must hold whatever is asked."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.virtual.allocator import Allocator, NoRoom
from trimtab.virtual.allocator_settings import Settings, parsed
from trimtab.virtual.replay import Lap

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Bench:
    """An allocator to which requests are made one by one."""

    def __init__(self, total: int = GIB, text: str = "", context: int = 0) -> None:
        self.pool = Allocator(total, context, parsed(text))
        self.lap = Lap("load", {}, 0, 0)
        self.made = 0

    def take(self, nbytes: int) -> int:
        """Allocate; gives the number to free it by."""
        self.made += 1
        self.lap.events.append(nbytes)
        self.pool.replay(self.lap)
        return self.made - 1

    def free(self, *numbers: int) -> None:
        self.lap.events.extend(~number for number in numbers)
        self.pool.replay(self.lap)

    def address(self, number: int) -> int:
        return self.pool.live[number].address

    @property
    def allocated(self) -> int:
        return self.pool.both.allocated

    @property
    def reserved(self) -> int:
        return self.pool.both.reserved


def test_requests_are_rounded_to_512_bytes() -> None:
    bench = Bench()
    for nbytes in (1, 512, 513):
        bench.take(nbytes)
    assert bench.allocated == 512 + 512 + 1024
    assert bench.pool.both.requested == 1 + 512 + 513


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (25 * MIB + 1, 26 * MIB),
    ],
)
def test_the_segment_that_a_first_request_makes(nbytes: int, segment: int) -> None:
    bench = Bench()
    bench.take(nbytes)
    assert bench.reserved == segment


def test_small_and_large_requests_do_not_share_segments() -> None:
    bench = Bench()
    bench.take(4 * MIB)
    assert bench.reserved == 20 * MIB
    bench.take(100)
    assert bench.reserved == 22 * MIB
    assert bench.pool.small_pool.segments == bench.pool.large_pool.segments == 1


def test_a_large_block_is_not_split_for_a_remainder_of_a_mebibyte() -> None:
    bench = Bench()
    bench.take(13 * MIB)  # of a segment of 14 MiB
    assert bench.allocated == bench.reserved == 14 * MIB
    bench.take(13 * MIB - 512)  # here more than 1 MiB is left
    assert bench.allocated == 27 * MIB - 512
    assert (bench.pool.both.splits, bench.pool.both.split_bytes) == (1, MIB + 512)


def test_the_smallest_block_that_fits_serves_and_of_equal_ones_the_first() -> None:
    bench = Bench()
    # Between the three that are freed lie others, so that none joins.
    sizes = (4 * MIB, 3 * MIB // 2, 2 * MIB, 3 * MIB // 2, 2 * MIB, 3 * MIB // 2)
    large, _, first, _, second, _ = (bench.take(size) for size in sizes)
    rest = bench.take(20 * MIB - sum(sizes))
    places = [bench.address(number) for number in (first, second, large)]
    bench.free(large, second, first)
    assert [bench.address(bench.take(2 * MIB)) for _ in places] == places
    assert rest in bench.pool.live


def test_freed_neighbours_join() -> None:
    bench = Bench()
    first, second, third = (bench.take(256 * KIB) for _ in range(3))
    place = bench.address(first)
    bench.free(first, third)
    assert bench.pool.both.splits == 2  # the first; the third with the rest of the segment
    bench.free(second)
    assert (bench.pool.both.splits, bench.pool.both.split_bytes) == (0, 0)
    assert bench.address(bench.take(768 * KIB)) == place
    assert bench.reserved == 2 * MIB


def test_blocks_are_kept_until_the_cache_is_emptied() -> None:
    bench = Bench()
    kept, gone = bench.take(100 * MIB), bench.take(50 * MIB)
    bench.free(gone)
    assert bench.reserved == 150 * MIB
    bench.pool.give_back()
    assert bench.reserved == 100 * MIB
    bench.free(kept)
    bench.pool.give_back()
    assert (bench.allocated, bench.reserved) == (0, 0)


def test_a_segment_with_a_tenant_is_not_given_back() -> None:
    bench = Bench()
    kept, gone = bench.take(4 * MIB), bench.take(4 * MIB)
    bench.free(gone)
    bench.pool.give_back()
    assert bench.reserved == 20 * MIB
    assert bench.pool.both.split_bytes == 16 * MIB
    assert kept in bench.pool.live


def test_what_is_cached_goes_back_when_the_device_is_full() -> None:
    bench = Bench(100 * MIB)
    bench.free(bench.take(60 * MIB))
    bench.take(80 * MIB)
    assert bench.reserved == 80 * MIB
    assert (bench.pool.retries, bench.pool.ooms) == (1, 0)


def test_out_of_memory_leaves_the_rest_as_it_was() -> None:
    bench = Bench(100 * MIB, context=10 * MIB)
    bench.take(60 * MIB)
    with pytest.raises(NoRoom):
        bench.take(31 * MIB)
    assert (bench.pool.retries, bench.pool.ooms) == (1, 1)
    assert bench.allocated == 60 * MIB
    last = bench.take(30 * MIB)
    assert bench.reserved == 90 * MIB
    bench.free(last)


def test_streams_do_not_share_blocks() -> None:
    bench = Bench()
    bench.free(bench.take(4 * MIB))
    bench.pool.select(7)
    bench.take(4 * MIB)
    assert bench.reserved == 40 * MIB
    bench.pool.select(0)
    bench.take(4 * MIB)
    assert bench.reserved == 40 * MIB


def test_a_block_that_another_stream_uses_is_active_until_the_next_request() -> None:
    bench = Bench()
    number = bench.take(4 * MIB)
    bench.pool.use(number, 7)
    bench.free(number)
    assert bench.allocated == 0
    assert [piece.size for piece in bench.pool.waiting] == [4 * MIB]
    bench.take(4 * MIB)
    assert not bench.pool.waiting
    assert bench.reserved == 20 * MIB


def test_a_private_pool_is_its_own() -> None:
    bench = Bench()
    bench.free(bench.take(4 * MIB))
    bench.pool.select(0, (0, 1))
    bench.free(bench.take(4 * MIB))
    bench.pool.select(0, (0, 0))
    assert bench.reserved == 40 * MIB
    bench.pool.give_back()
    assert bench.reserved == 20 * MIB
    bench.pool.let_go((0, 1))
    assert bench.reserved == 0


def test_blocks_above_max_split_size_are_neither_split_nor_lent() -> None:
    bench = Bench(text="max_split_size_mb:100")
    bench.free(bench.take(200 * MIB))
    bench.take(50 * MIB)  # may not have a part of it
    assert bench.reserved == 250 * MIB
    bench.take(190 * MIB)  # may have all of it: less than 20 MiB are wasted
    assert (bench.reserved, bench.allocated) == (250 * MIB, 250 * MIB)
    assert bench.pool.oversize.allocations == 1


def test_oversize_blocks_go_back_before_all_others() -> None:
    bench = Bench(300 * MIB, text="max_split_size_mb:100")
    bench.free(bench.take(20 * MIB), bench.take(130 * MIB), bench.take(130 * MIB))
    bench.take(250 * MIB)
    assert bench.pool.retries == 0
    assert bench.reserved == 270 * MIB


@pytest.mark.parametrize(
    ("text", "nbytes", "rounded"),
    [
        ("roundup_power2_divisions:4", 1200 * KIB, 1280 * KIB),
        ("roundup_power2_divisions:4", 1024 * KIB, 1024 * KIB),
        ("roundup_power2_divisions:4", 1000, 1024),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 300 * MIB, 300 * MIB),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 520 * MIB, 768 * MIB),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 1025 * MIB, 1280 * MIB),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 2049 * MIB, 2304 * MIB),
    ],
)
def test_rounding_by_powers_of_two(text: str, nbytes: int, rounded: int) -> None:
    assert parsed(text).rounded(nbytes) == rounded


def test_settings_keep_what_is_not_named() -> None:
    before = parsed("expandable_segments:True, garbage_collection_threshold:0.8")
    after = parsed("max_split_size_mb:512", before)
    assert after == Settings(expandable=True, collect_above=0.8, max_split=512 * MIB)
    with pytest.raises(ValueError, match="Unrecognized key 'colour'"):
        parsed("colour:red")


def test_growing_segments_take_pages_and_give_them_back() -> None:
    bench = Bench(text="expandable_segments:True")
    first, second = bench.take(30 * MIB), bench.take(30 * MIB)
    assert (bench.allocated, bench.reserved) == (60 * MIB, 60 * MIB)  # three pages of 20 MiB in one segment
    assert bench.address(second) == bench.address(first) + 30 * MIB
    third = bench.take(5 * MIB)
    assert bench.reserved == 80 * MIB
    bench.free(second)
    bench.pool.give_back()  # of the 30 MiB, one page is whole; the end of the last page goes back with nothing
    assert bench.reserved == 60 * MIB
    bench.free(first, third)
    bench.pool.give_back()
    assert bench.reserved == 0


def test_growing_segments_do_not_fragment() -> None:
    sizes = [30 * MIB, 50 * MIB, 70 * MIB, 90 * MIB, 110 * MIB]
    plain, growing = Bench(), Bench(text="expandable_segments:True")
    for bench in (plain, growing):
        for size in sizes:
            bench.free(bench.take(size))
    assert plain.reserved == sum(sizes)
    assert growing.reserved == 120 * MIB


def test_old_segments_are_collected_above_the_threshold() -> None:
    bench = Bench(GIB, text="garbage_collection_threshold:0.5,per_process_memory_fraction:0.5")
    assert bench.pool.allowed == 512 * MIB
    old, young = bench.take(150 * MIB), bench.take(160 * MIB)
    bench.free(old)
    for _ in range(5):
        bench.free(bench.take(100))
    bench.free(young)
    bench.take(170 * MIB)  # 312 MiB are held, more than 256: the one that was free for long goes
    assert bench.reserved == (160 + 170 + 2) * MIB
    assert bench.pool.retries == 0


Deed = tuple[str, int]
_sizes = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(1, 90 * MIB))
_deeds = st.lists(
    st.one_of(
        st.tuples(st.just("take"), _sizes),
        st.tuples(st.just("free"), st.integers(0, 1 << 20)),
        st.tuples(st.sampled_from(["empty", "stream"]), st.integers(0, 2)),
        st.tuples(st.just("use"), st.integers(0, 1 << 20)),
    ),
    max_size=80,
)


@settings(deadline=None, max_examples=150)
@given(
    _deeds,
    st.sampled_from(
        ["", "expandable_segments:True", "max_split_size_mb:40", "roundup_power2_divisions:4"],
    ),
)
def test_what_holds_whatever_is_asked(deeds: list[Deed], text: str) -> None:
    bench = Bench(256 * MIB, text)
    pool = bench.pool
    held: list[int] = []
    for deed, amount in deeds:
        if deed == "take":
            try:
                held.append(bench.take(amount))
            except NoRoom:
                assert pool.both.reserved - _unused(pool) + pool.segment_size(amount) > 256 * MIB
        elif deed == "free" and held:
            bench.free(held.pop(amount % len(held)))
        elif deed == "use" and held:
            pool.use(held[amount % len(held)], 5)
        elif deed == "empty":
            pool.give_back()
        elif deed == "stream":
            pool.select(amount)
        _check(pool)
    bench.free(*held)
    pool.give_back()
    assert (bench.allocated, bench.reserved) == (0, 0)
    assert not list(pool.segments())
    for figures in (pool.both, pool.small_pool, pool.large_pool):
        assert (figures.splits, figures.split_bytes, figures.requested, figures.segments) == (0, 0, 0, 0)


def _unused(pool: Allocator) -> int:
    runs = list(pool.segments())
    return sum(piece.size for run in runs for piece in run if piece.free and (piece.grows or piece.whole))


def _check(pool: Allocator) -> None:
    runs = list(pool.segments())
    pieces = [piece for run in runs for piece in run]
    assert pool.both.reserved == sum(piece.size for piece in pieces) <= 256 * MIB
    assert pool.both.allocated == sum(piece.size for piece in pool.live.values()) <= pool.both.reserved
    assert all(piece.size >= piece.requested for piece in pool.live.values())
    assert all(a.address + a.size <= b.address for a, b in pairwise(pieces))  # none overlaps
    assert all(not (a.free and b.free) for run in runs for a, b in pairwise(run))  # all have joined
    split = [piece for piece in pieces if piece.free and not piece.whole and not piece.grows]
    assert pool.both.splits == len(split)
    assert pool.both.split_bytes == sum(piece.size for piece in split)
    for name in ("allocated", "requested", "reserved", "segments", "splits", "split_bytes", "allocations"):
        small, large = getattr(pool.small_pool, name), getattr(pool.large_pool, name)
        assert getattr(pool.both, name) == small + large
        assert getattr(pool.both, f"{name}_peak") >= getattr(pool.both, name) >= 0


def test_of_equal_segments_the_latest_serves_as_addresses_go_down() -> None:
    bench = Bench()
    first, second = bench.take(40 * MIB), bench.take(40 * MIB)
    small = bench.take(1024)  # its segment lies in what the latest stretch of addresses has left
    places = {number: bench.address(number) for number in (first, second, small)}
    assert places[second] < places[first]
    assert places[small] == places[second] + 40 * MIB
    bench.free(first, second)
    assert bench.address(bench.take(40 * MIB)) == places[second]


def test_addresses_that_were_given_back_serve_again() -> None:
    bench = Bench()
    for _ in range(3):
        taken = bench.take(40 * MIB)
        place = bench.address(taken)
        bench.free(taken)
        bench.pool.give_back()
    kept = bench.take(40 * MIB)
    assert bench.address(kept) == place
