"""A GPU that really has no memory left for a step: the run goes on with smaller batches, and ends."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gpu_tests import forget_memory
from trimtab.hardware import probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not probe().gpus, reason="no CUDA device here"),
]
Trimtab = Callable[..., subprocess.CompletedProcess[str]]
BATCH = 512


@pytest.fixture
def words(tiny_model: Path, tiny_rows: Path, tmp_path: Path) -> list[str]:
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {tiny_model}\ndata: {tiny_rows}\ndevice: cuda\nmonitor: {{progress: none}}\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(line for line in tiny_rows.read_text().splitlines() for _ in range(20)))
    return [
        *("train", str(config), f"data={rows}", "data.keep_duplicates=true", "data.eval_fraction=0"),
        *("training.max_steps=2", f"training.batch_size={BATCH}", "precision=fp32", "training.save_steps=1"),
        f"output_dir={tmp_path / 'run'}",
    ]


@pytest.fixture
def little_memory(words: list[str], trimtab: Trimtab, tmp_path: Path) -> Iterator[None]:
    """As much as a quarter of the batch takes beside what the process holds already, and no more."""
    held = torch.cuda.memory_reserved()
    quarter = [*words, f"training.batch_size={BATCH // 4}", f"output_dir={tmp_path / 'measured'}"]
    done = trimtab(*quarter)
    assert done.returncode == 0, done.stderr
    peak = torch.cuda.max_memory_reserved()
    forget_memory()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (held + 1.3 * (peak - held)) / whole))
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("little_memory")
def test_a_step_that_does_not_fit_is_made_of_smaller_ones(
    words: list[str], trimtab: Trimtab, tmp_path: Path
) -> None:
    done = trimtab(*words)
    assert done.returncode == 1
    assert "out of memory on cuda:0" in done.stderr
    assert "training.halve_batch_on_oom=true" in done.stderr
    forget_memory()
    done = trimtab(*words, "training.halve_batch_on_oom=true", "overwrite=true")
    assert done.returncode == 0, done.stderr
    halved = json.loads((tmp_path / "run" / "summary.json").read_text())["halved"]
    assert halved["now"]["batch_size"] < BATCH
    assert halved["now"]["batch_size"] * halved["now"]["gradient_accumulation_steps"] == BATCH
    assert "CUDA out of memory" in halved["halvings"][0]["said"]
