"""A run's life in its folder without a model: checkpoints made and rotated, weights kept, killed at one operation.

Called with a folder, it forks a child for each file operation of that life in turn, which dies before it; then the
next start has to find all that was promised. Prints how many operations there were.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

from fault_layer import FaultLayer

from trimtab.manifest import MANIFEST, verify
from trimtab.recipes.checkpoints import by_step, clear_leftovers, new_checkpoint, newest, rotate
from trimtab.recipes.kept_folder import clear_half_made, whole_kept, write_card
from trimtab.recipes.run_mark import Mark


def live(run: Path, said: list[str]) -> None:
    """From the newest checkpoint on to the fourth step, and the weights at its end."""
    clear_half_made(run, said.append)
    clear_leftovers(run / "checkpoints")
    start = newest(run / "checkpoints")
    rotate(run / "checkpoints", 2, best_step=1)
    for step in range(1 if start is None else int(start.name.removeprefix("checkpoint-")) + 1, 5):
        with new_checkpoint(run / "checkpoints", step) as folder:
            (folder / "shards").mkdir()
            for name in ("weights.safetensors", "shards/0.distcp", "state.json"):
                (folder / name).write_text(f"{name} {step}" * 100)
        rotate(run / "checkpoints", 2, best_step=1)
    with whole_kept(run / "adapter", said.append) as folder:
        (folder / "weights.safetensors").write_text("kept" * 100)
    write_card(run / "adapter", "the card")


def begin(run: Path) -> None:
    run.mkdir()
    Mark(("checkpoints", "adapter"), began=True).write(run)
    (run / "checkpoints" / "checkpoint-3-good").mkdir(parents=True)
    (run / "checkpoints" / "checkpoint-3-good" / "notes.txt").write_text("mine")
    (run / "adapter").mkdir()
    (run / "adapter" / "notes.txt").write_text("mine")


def check(run: Path, reached: int) -> int:
    """Whatever has its name is whole, nothing that was reached is lost, and what is the user's is there."""
    found = by_step(run / "checkpoints")
    for folder in found.values():
        verify(folder)
    assert max(found, default=0) >= reached, (found, reached)
    assert (run / "checkpoints" / "checkpoint-3-good" / "notes.txt").read_text() == "mine"
    notes = [path for path in run.rglob("notes.txt") if "checkpoint-3-good" not in path.parts]
    assert [path.read_text() for path in notes] == ["mine"], notes
    if (run / "adapter" / MANIFEST).exists():
        verify(run / "adapter")
    return max(found, default=0)


def killed(run: Path, at: int) -> bool:
    pid = os.fork()
    if pid == 0:
        layer = FaultLayer(run, at)
        layer.install()
        live(run, [])
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0


def main(place: Path) -> None:
    at, whole = 0, None
    while whole is None:
        at += 1
        run = place / f"killed-at-{at}"
        begin(run)
        if killed(run, at):
            reached = check(run, 0)
            # A second kill while the first is being mended, then to the end.
            killed(run, 1 + at % 7)
            reached = check(run, reached)
        else:
            whole, reached = at - 1, 4
        live(run, [])
        check(run, reached)
        names = {str(path.relative_to(run)) for path in run.rglob("*")}
        assert not [name for name in names if name.endswith((".partial", ".old"))], names
        assert by_step(run / "checkpoints").keys() == {1, 4}, names
        assert (run / "adapter" / "weights.safetensors").read_text() == "kept" * 100
        shutil.rmtree(run)
    print(whole)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
