"""The Triton kernels without a GPU, where Triton is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
PROGRAM = Path(__file__).with_name("interpreted_kernels.py")


@pytest.mark.slow
def test_the_interpreted_kernels_agree_with_the_plain_code() -> None:
    # A process of its own: Triton decides at import whether it interprets.
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    assert "all agree" in done.stdout
