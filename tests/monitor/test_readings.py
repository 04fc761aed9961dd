"""Figures by device: one has its own alone, several are named, and processes on devices of one name are told apart."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.monitor import readings
from trimtab.monitor.memory import MemoryUse
from trimtab.monitor.pace import Pace
from trimtab.monitor.readings import Readings


def taken(device: str, processes: int = 1) -> dict[str, Any]:
    values: dict[str, Any] = {"loss": 1.0}
    Readings(device).take_in(values, None, Pace(0, 10), processes=processes)
    return values


def named(values: dict[str, Any]) -> set[str]:
    return {key for key in values if "/" in key}


def test_one_process_on_one_device_names_none() -> None:
    values = taken("cpu")
    assert values["memory_bytes"] > 0
    assert not named(values)


@pytest.mark.parametrize(
    ("other", "names"),
    [("cpu", ("cpu, rank 0", "cpu, rank 1")), ("cuda:1", ("cpu", "cuda:1"))],
)
def test_every_process_has_the_devices_of_all(
    monkeypatch: pytest.MonkeyPatch, other: str, names: tuple[str, str]
) -> None:
    def gather(into: list[Any], mine: Any) -> None:
        into[:] = [mine, [(other, MemoryUse(3, 5), 0.25)]]

    monkeypatch.setattr(readings.dist, "all_gather_object", gather)
    values = taken("cpu", processes=2)
    assert values[f"memory_bytes/{names[0]}"] == pytest.approx(values["memory_bytes"], rel=0.1)
    assert (values[f"memory_bytes/{names[1]}"], values[f"peak_memory_bytes/{names[1]}"]) == (3, 5)
    assert values[f"busy/{names[1]}"] == 0.25
    assert len(named(values)) == 5  # nobody knows how busy the CPU is
