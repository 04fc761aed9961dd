"""Compiled layers inside of DDP and of FSDP2, over two real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ddp", "fsdp"])
def test_two_ranks_take_the_same_steps_compiled_and_plain(case: str, tmp_path: Path) -> None:
    here = Path(__file__).parent
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*launcher, str(here / "compiled_ranks_run.py"), case, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{here.parent}:{os.environ.get('PYTHONPATH', '')}"},
        check=False,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8"))
        assert found["compiled"] == pytest.approx(found["plain"], rel=1e-4)
        assert found["told"]["layers"] == 4
        assert "plain" not in found["told"]
        assert found["told"]["graphs"] <= 2
