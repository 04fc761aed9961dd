"""Noise by counter: known answers, moments, and the same bits however it is asked for."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from trimtab.zeroth import noise as noise_module
from trimtab.zeroth.noise import NoiseMaker, Stream, noise, scalars

CPU = torch.device("cpu")


def philox(counter: list[int], key: list[int], rounds: int) -> list[int]:
    """Philox4x32 as its authors define it, on Python's integers."""
    c, k = list(counter), list(key)
    for r in range(rounds):
        if r:
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
    return c


def element(stream: Stream, e: int) -> float:
    key = [stream.seed % 2**32, stream.seed // 2**32]
    words = philox([e // 8, stream.tensor, stream.step, stream.query], key, 7)
    half = words[e % 8 // 2] // (2**16 if e % 2 else 1) % 2**16
    return 1.0 - 2.0 * (half % 2) if stream.kind == "signs" else (bin(half).count("1") - 8) / 2


# The known-answer vectors that Random123 publishes for philox4x32-7 and philox4x32-10.
KNOWN = [
    ([0] * 4, [0] * 2, 7, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, 7, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
    ([0] * 4, [0] * 2, 10, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, 10, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
]


@pytest.mark.parametrize(("counter", "key", "rounds", "words"), KNOWN)
def test_the_plain_philox_gives_the_published_vectors(
    counter: list[int], key: list[int], rounds: int, words: list[int]
) -> None:
    assert philox(counter, key, rounds) == words


STREAMS = [
    Stream(0, 0, 0),
    Stream(1, 2, 3, 4),
    Stream(2**64 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1),
    Stream(0xDEADBEEF12345678, 19_999, 310, 8, "signs"),
    Stream(2**63, 7, 0, 1, "signs"),
]


@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_every_element_is_that_of_plain_philox(stream: Stream) -> None:
    assert noise(stream, (333,)).tolist() == [element(stream, e) for e in range(333)]
    assert scalars(stream, [0, 5, 2**31]) == [
        element(Stream(stream.seed, stream.step, t, stream.query, stream.kind), 0) for t in (0, 5, 2**31)
    ]


@pytest.mark.parametrize("start", [0, 8, 1, 2**35 - 40, 2**34 - 3])
def test_far_elements(start: int) -> None:
    """Groups above 2**31 and 2**32 - 1 too: where a product's sign bit is set."""
    stream = Stream(99, 1, 2, 3)
    start = min(start, 8 * (2**32 - 1) - 32)
    got = NoiseMaker(CPU, 1000).draw(stream, start, 24)
    assert got.tolist() == [element(stream, start + e) for e in range(24)]


def test_an_edge_of_the_counter_is_refused() -> None:
    with pytest.raises(ValueError, match="64 bits"):
        Stream(2**64, 0, 0)
    with pytest.raises(ValueError, match="32 bits"):
        Stream(0, 2**32, 0)


def test_moments_of_normal() -> None:
    z = noise(Stream(3, 0, 0), (1_000_000,)).double()
    assert abs(z.mean().item()) < 4 / math.sqrt(1e6)
    assert abs(z.var().item() - 1) < 4 * math.sqrt(2 / 1e6)
    assert abs((z**4).mean().item() - (3 - 1 / 8)) < 0.05
    values, counts = z.unique(return_counts=True)
    assert values.tolist() == [v / 2 for v in range(-8, 9)]
    expected = [math.comb(16, k) / 2**16 * 1e6 for k in range(17)]
    chi = sum((c - e) ** 2 / e for c, e in zip(counts.tolist(), expected, strict=True))
    assert chi < 45  # 16 degrees of freedom: above it in one of 10,000 draws, and the draw is fixed


def test_moments_of_signs() -> None:
    z = noise(Stream(3, 0, 0, 1, "signs"), (1_000_000,))
    assert set(z.unique().tolist()) == {-1.0, 1.0}
    assert abs(z.mean().item()) < 4 / math.sqrt(1e6)


def test_values_are_exact_in_every_dtype() -> None:
    z = noise(Stream(5, 1, 2), (10_000,))
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        assert torch.equal(z.to(dtype).float(), z)


def test_streams_are_independent() -> None:
    """Neighbours in every coordinate, and neighbouring elements, have no correlation."""
    n = 200_000
    base = {"seed": 7, "step": 3, "tensor": 2, "query": 1}
    changed = [base] + [{**base, name: base[name] + d} for name in base for d in (1, 2)]
    changed.append({**base, "seed": 7 + 2**32})
    draws = [noise(Stream(**c), (n,)) for c in changed]
    for one, two in itertools.combinations(draws, 2):
        assert abs((one * two).mean().item()) < 5 / math.sqrt(n)
    for lag in (1, 2, 4, 7, 8, 16):
        assert abs((draws[0][lag:] * draws[0][:-lag]).mean().item()) < 5 / math.sqrt(n)


@pytest.mark.parametrize("kind", ["normal", "signs"])
def test_any_part_equals_the_whole(kind: noise_module.Kind) -> None:
    stream = Stream(11, 4, 1, 2, kind)
    whole = noise(stream, (4000,))
    maker = NoiseMaker(CPU, 4000)
    for start, count in [(0, 4000), (1, 1), (7, 9), (8, 8), (1234, 1000), (3999, 1), (0, 5)]:
        assert torch.equal(maker.draw(stream, start, count), whole[start : start + count])


@pytest.mark.parametrize("columns", [8, 64, 3, 9, 15, 17, 100])
def test_rows_equal_the_whole(columns: int) -> None:
    stream = Stream(12, 0, 5)
    whole = noise(stream, (50, columns))
    rows = torch.tensor([0, 49, 7, 7, 31, 1])
    assert torch.equal(NoiseMaker(CPU, 5000).draw_rows(stream, rows, columns, 0.25), whole[rows] * 0.25)


def test_the_chunk_size_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(13, 1, 1)
    whole = noise(stream, (10_007,))
    monkeypatch.setattr(noise_module, "_GROUPS_PER_THREAD", 7)
    assert NoiseMaker(CPU).chunk < 1000
    assert torch.equal(noise(stream, (10_007,)), whole)


@pytest.mark.parametrize("scale", [1e-3, -7.25, 3e-39, -1e-44, 1.1754944e-38, 2e38])
@pytest.mark.parametrize("kind", ["normal", "signs"])
def test_a_scale_is_one_fp32_product(scale: float, kind: noise_module.Kind) -> None:
    stream = Stream(14, 1, 1, 1, kind)
    scale = float(torch.tensor(scale))
    z = noise(stream, (1000,))
    assert torch.equal(NoiseMaker(CPU).draw(stream, 0, 1000, scale), torch.tensor(scale) * z)


def test_threads_change_nothing() -> None:
    stream, before = Stream(15, 1, 1), torch.get_num_threads()
    whole = noise(stream, (700_001,))
    try:
        torch.set_num_threads(2 if before == 1 else 1)
        assert torch.equal(noise(stream, (700_001,)), whole)
    finally:
        torch.set_num_threads(before)
