"""A processor that announces AMX and hides its tiles."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trimtab import processor
from trimtab.hardware import machine

AMX = 1 << 24
SIZES = (0x0400_2000, 0x0008_0040, 0x10, 0)
"""What Intel's processors say of their tiles: eight, of 16 rows."""


@pytest.mark.parametrize(
    ("last", "features", "tiles", "hidden"),
    [
        (0x20, AMX, SIZES, False),
        (0x1C, AMX, SIZES, True),
        (0x20, AMX, (0, 0, 0, 0), True),
        (0x20, 0, (0, 0, 0, 0), False),
        (0x05, AMX, (0, 0, 0, 0), False),
    ],
    ids=["as it should be", "last leaf too low", "no palette", "no tiles at all", "an old processor"],
)
def test_tiles_that_are_announced_and_not_described(
    last: int, features: int, tiles: tuple[int, int, int, int], hidden: bool
) -> None:
    def asks(leaf: int, part: int) -> tuple[int, int, int, int]:
        return {0: (last, 0, 0, 0), 7: (0, 0, 0, features), 0x1D: tiles}[leaf]

    assert processor.tiles_are_hidden(asks) is hidden


@pytest.mark.parametrize("hides", [True, False])
def test_the_limit_is_set_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch, hides: bool) -> None:
    features = AMX if hides else 0
    monkeypatch.setattr(processor, "cpuid", lambda: lambda leaf, part: (0x1C, 0, 0, features))
    environment: dict[str, str] = {}
    assert processor.keep_off_hidden_tiles(environment) is hides
    assert environment == ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"} if hides else {})


def test_the_doctor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpuid", lambda: lambda leaf, part: (0x1C, 0, 0, AMX))
    (remark,) = machine.check_tiles({"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert remark.level == "note"
    assert "ONEDNN_MAX_CPU_ISA is AVX2" in remark.found
    monkeypatch.setattr(machine, "cpuid", lambda: None)
    assert not list(machine.check_tiles({}))


@pytest.mark.parametrize("name", processor.LIMITS)
def test_a_limit_of_the_users_stands(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(processor, "cpuid", lambda: lambda leaf, part: (0x1C, 0, 0, AMX))
    environment = {name: "AVX2"}
    assert not processor.keep_off_hidden_tiles(environment)
    assert environment == {name: "AVX2"}


def test_bf16_is_multiplied_on_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, which a wrong instruction would end."""
    for name in processor.LIMITS:
        monkeypatch.delenv(name, raising=False)
    program = (
        "import trimtab, torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print((a @ a).sum().item())"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    assert float(told.stdout) == 64**3
