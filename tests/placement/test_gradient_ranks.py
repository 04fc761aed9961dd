"""The guard over two ranks: the reduced gradient counts, each rank names what is cut, shards are looked at too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("gradient_ranks_run.py")


def ranks(case: str, folder: Path) -> list[str]:
    """What the guard said on each of two ranks."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*launcher, str(PROGRAM), case, str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [(folder / f"rank{rank}.txt").read_text(encoding="utf-8") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mixed", "twice", "sharded"])
def test_adapters_everywhere_get_gradients(case: str, tmp_path: Path) -> None:
    """One rank with a picture and one without; a tower that runs twice (no static graph needed); shards."""
    for said in ranks(case, tmp_path):
        assert "18 of 18 adapted modules" in said
        assert "28 of 28 adapted modules" in said
        assert "wait" not in said, "the other rank's picture is enough"
        assert said.splitlines()[-1].endswith("arrived, step 2")


@pytest.mark.slow
def test_a_cut_is_named_on_every_rank(tmp_path: Path) -> None:
    for said in ranks("cut", tmp_path):
        assert "it ran under torch.no_grad(), switched off in the forward of model.vision_model (" in said
