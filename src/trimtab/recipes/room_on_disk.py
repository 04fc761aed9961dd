"""How much a run will write into its folder at most, beside what is free there: shown, and refused where it cannot fit.

The figures are an estimate (`disk_needs.py`); what is free is what the system tells: a quota it does not always.
Nothing is written, freed or deleted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.config.facts import keeps_best
from trimtab.errors import RequestError
from trimtab.file_system import FileSystem, amount, largest_file

if TYPE_CHECKING:
    from trimtab.config.schema import Config

CLOSE = 0.8
"""From this share of the free room on a run is warned of."""
FILES = 24
"""Files of one checkpoint, and of what is kept at the end."""


@dataclass(frozen=True)
class Room:
    """What a run will have in its folder at its largest, in bytes."""

    folder: Path
    system: FileSystem
    checkpoint: int
    """One checkpoint."""
    at_once: int | None
    """How many of them lie there at once; None where the number of steps is not known yet and all are kept."""
    kept: int
    """The adapter or the model."""
    export: int
    beside: int
    """Metrics, samples, what is kept of a voice's codec."""
    there: int
    """What of this lies there already, of a run that goes on."""
    largest: int
    """The largest single file."""
    elsewhere: bool = False
    """Whether the run is planned for GPUs that need not be here: then this disk need not be the run's."""

    @property
    def needed(self) -> int:
        """At the worst moment: while a checkpoint is written, or when the last are there and the export is made."""
        many = self.at_once or 1
        saving = many * self.checkpoint
        ending = max(many - 1, 1) * self.checkpoint + self.kept + self.export
        return max(0, max(saving, ending) + self.beside - self.there)

    @property
    def files(self) -> int:
        return ((self.at_once or 1) + 1) * FILES

    def refusal(self) -> tuple[str, str] | None:
        """Why the run cannot be kept there, and the figures; None where it can, as far as the system tells."""
        system, limit = self.system, largest_file()
        if system.read_only:
            return f"{system.mount} is read-only", "nothing can be written there"
        if (
            system.total and self.needed > system.free
        ):  # some network disks tell 0 of 0: nothing is known there
            return f"{self.folder} has too little room for the run", self.figures()
        if system.files_free is not None and system.files_free < self.files:
            return (
                f"{system.mount} can hold {system.files_free:,} more files",
                f"the run makes up to {self.files:,} (inodes, not bytes, are short there)",
            )
        if limit is not None and self.largest > limit:
            return (
                f"a file of {amount(self.largest)} would be written, and this process may write {amount(limit)}",
                "the limit on the size of a file (`ulimit -f`) is lower",
            )
        return None

    @property
    def close(self) -> bool:
        return bool(self.system.total) and self.needed > CLOSE * self.system.free

    def figures(self) -> str:
        free = f"{amount(self.system.free)} are free" if self.system.total else "what is free is not told"
        return f"{self.needs()}, {free} on {self.system.mount}"

    def needs(self) -> str:
        count = (
            "each checkpoint"
            if self.at_once is None
            else f"{self.at_once} checkpoint{'s' * (self.at_once > 1)}"
        )
        parts = [f"{count} of {amount(self.checkpoint)}", f"{amount(self.kept)} of weights"]
        parts += [f"{amount(self.export)} of export"] if self.export else []
        less = f", {amount(self.there)} of it there already" if self.there else ""
        return f"up to {amount(self.needed)} are written ({' + '.join(parts)}{less}; an estimate)"

    def as_dict(self) -> dict[str, Any]:
        """For machines; bytes throughout."""
        return {
            "folder": str(self.folder),
            "mount": str(self.system.mount),
            "needed": self.needed,
            "free": self.system.free,
            "checkpoint": self.checkpoint,
            "checkpoints_at_once": self.at_once,
            "fits": self.refusal() is None,
        }

    def line(self) -> tuple[str, str, str]:
        """As the plan shows it: mark, name, text."""
        refused = self.refusal()
        if refused is not None:
            said = f"{refused[0]}: {refused[1]}" if self.needed <= self.system.free else self.figures()
            if self.elsewhere:
                return "!", "disk", f"{said}; too little here, and where those GPUs are may be another disk"
            return "✗", "disk", said
        warning = "; that is close: see training.save_total_limit" if self.close else ""
        return "!" if self.close else "✓", "disk", self.figures() + warning

    def check(self, config: Config) -> None:
        """Refuse a run that cannot be kept; not a rehearsed one, whose folder will be on another machine."""
        from trimtab.rehearse.session import VARIABLE

        refused = self.refusal()
        if refused is None or VARIABLE in os.environ:
            return
        ways = ["free room there", "choose another output_dir"]
        limit = config.training.save_total_limit
        if self.at_once is None or self.at_once > 2 + keeps_best(config):
            fewer = 1 if limit is not None else 2
            ways.insert(
                0, f"set training.save_total_limit={fewer} (now {'null' if limit is None else limit})"
            )
        if self.export:
            ways.append("leave export.to out")
        raise RequestError.of(*refused, ", or ".join(ways))
