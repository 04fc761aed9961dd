"""Numbers as a person reads them."""

from __future__ import annotations

import pytest

from trimtab.monitor.wording import clock, count_of, duration, rate, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0002, "under 1 ms"),
        (0.012, "12 ms"),
        (0.31, "0.31 s"),
        (3.04, "3 s"),
        (3.14, "3.1 s"),
        (41.2, "41 s"),
        (360, "6 min"),
        (7500, "2 h 5 min"),
        (7200, "2 h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_clock_size_rate_and_count() -> None:
    assert [clock(s) for s in (0, 250, 3723)] == ["0:00", "4:10", "1:02:03"]
    assert [size(640 * 2**20), size(int(3.4 * 2**30))] == ["640 MiB", "3.4 GiB"]
    assert [rate(1240.4, "tokens"), rate(0.42, "steps")] == ["1,240 tokens/s", "0.42 steps/s"]
    assert [count_of(1, "step"), count_of(1200, "step")] == ["1 step", "1,200 steps"]
