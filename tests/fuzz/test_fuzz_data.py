"""Damaged files of every kind end in a value or in an error of ours: a few here, ten thousand each in the slow tests.

`TRIMTAB_FUZZ_CASES` and `TRIMTAB_FUZZ_SEED` set how many and which. A case is made again by reader, seed and number:
`python tests/fuzz/data_readers.py READER 1 SEED NUMBER`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from data_readers import READERS, fuzz

SEED = int(os.environ.get("TRIMTAB_FUZZ_SEED", "14"))
CASES = os.environ.get("TRIMTAB_FUZZ_CASES")
HERE = Path(__file__).parent


@pytest.mark.parametrize("reader", READERS)
def test_damaged_files_end_in_a_value_or_an_error_of_ours(reader: str) -> None:
    print(f"seed {SEED}")
    pytest.importorskip("soundfile" if reader in ("sounds", "codecs") else "json")
    ends, bad = fuzz(reader, int(CASES or 25), SEED)
    assert not bad, f"seed {SEED}: {bad[0]}"
    assert ends["RequestError"] > 0, f"nothing was refused, so nothing was damaged: {ends}"


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_ten_thousand_damaged_files(reader: str) -> None:
    """Each reader in a process of its own, whose memory is limited and which a watchdog ends where it hangs."""
    print(f"seed {SEED}")
    pytest.importorskip("soundfile" if reader in ("sounds", "codecs") else "json")
    words = [
        sys.executable,
        "-W",
        "ignore",
        str(HERE / "data_readers.py"),
        reader,
        CASES or "10000",
        str(SEED),
    ]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    print(done.stdout)
    assert done.returncode == 0, f"seed {SEED}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
