"""Standard output that is closed, full or no longer read: a run goes on, and other verbs end with exit code 1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRIMTAB = f"{sys.executable} -m trimtab"
RUN = (
    "train device=cpu data.max_rows=8 data.eval_fraction=0 samples.prompts=[] training.batch_size=1 "
    "training.max_steps=2 monitor.progress=none"
)


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_result_that_cannot_be_printed_is_told_as_such(tmp_path: Path) -> None:
    done = shell(f"{TRIMTAB} config-schema >/dev/full", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "warning: standard output cannot be written to any more\n  why: No space left"
    )
    assert done.stderr.count("\n") == 3


def test_a_reader_that_has_seen_enough_is_no_reason_for_words(tmp_path: Path) -> None:
    done = shell(f"{TRIMTAB} config-schema | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    code = (
        "import os\nfrom trimtab.cli.streams import steady_streams\nwith steady_streams():\n"
        "    file = open('kept', 'w'); os.write(1, b'printed by a library'); print('printed')\n"
        "    file.write(str(file.fileno())); file.close()\n"
    )
    done = shell(f'{sys.executable} -c "{code}" <&- >&- 2>&-', tmp_path)
    assert done.returncode == 0
    assert int((tmp_path / "kept").read_text()) > 2


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">&-", ">&- 2>&- <&-", ">/dev/full", ">/dev/full 2>&1", "| true"])
def test_a_run_goes_on_when_nobody_reads_what_it_prints(
    tmp_path: Path, tiny_model: Path, streams: str
) -> None:
    done = shell(
        f"{TRIMTAB} {RUN} model={tiny_model} output_dir=run {streams}; exit ${{PIPESTATUS[0]}}", tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert '"status": "finished"' in (tmp_path / "run" / "summary.json").read_text()
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
