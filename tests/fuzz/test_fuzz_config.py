"""Damaged settings, model folders, templates, runs and logs end in a value or in an error of ours.

A few cases here, ten thousand for each reader in the slow tests. `TRIMTAB_FUZZ_CASES` and `TRIMTAB_FUZZ_SEED` set how
many and which.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from config_readers import READERS, fuzz

SEED = int(os.environ.get("TRIMTAB_FUZZ_SEED", "14"))
CASES = os.environ.get("TRIMTAB_FUZZ_CASES")
FEW = {"config": 40, "overrides": 40, "tokenizer": 30, "log": 20, "run_folder": 30, "checkpoints": 30}
"""Those that take more than some milliseconds a case."""


@pytest.mark.parametrize("reader", READERS)
def test_damaged_settings_end_in_a_value_or_an_error_of_ours(reader: str) -> None:
    print(f"seed {SEED}")
    ends, bad = fuzz(reader, int(CASES or FEW.get(reader, 60)), SEED)
    assert not bad, f"seed {SEED}: {bad[0]}"
    assert sum(ends.values()) > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("reader", READERS)
def test_ten_thousand_damaged_settings(reader: str) -> None:
    """Each reader in a process of its own, whose memory is limited and which a watchdog ends where it hangs."""
    script = Path(__file__).with_name("config_readers.py")
    words = [sys.executable, "-W", "ignore", str(script), reader, CASES or "10000", str(SEED)]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    print(done.stdout)
    assert done.returncode == 0, f"seed {SEED}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
