"""Every recipe, killed at random times and inside random writes, ends as if nobody had touched it.

`TRIMTAB_KILL_SEED` repeats a series; each test prints its own seed.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from kill_runs import Tally, Warm, killed_until_done, same_run

SERIES = 4
KILLS = 3
"""In each series; over all recipes at least fifty, for a few come after the end."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", "grpo", "vision", "voice", "zeroth_order"])
def test_nothing_is_lost(recipe: str, warm: Warm, courses: dict[str, list[str]], tmp_path: Path) -> None:
    seed = int(os.environ.get("TRIMTAB_KILL_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"{recipe}: seed {seed}")
    dice, tally = random.Random(f"{recipe} {seed}"), Tally()
    plain = tmp_path / "plain"
    whole = warm.train([*courses[recipe], f"output_dir={plain}"], plain)
    assert whole.code == 0, whole.output[-3000:]
    series = 0
    while series < SERIES or tally.kills < SERIES * KILLS - 1:
        folder = tmp_path / f"killed-{series}"
        killed_until_done(warm, courses[recipe], folder, whole, KILLS, dice, tally)
        same_run(folder, plain)
        series += 1
    print(f"{recipe}: {series} runs, {tally}")
