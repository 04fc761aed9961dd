"""The test stand of the memory and speed benchmarks: which models, methods and batches, cell after cell, all kept.

A cell that fails is kept as failed, with its reason, and the next one goes on. What is wrong with the request itself is
an error before anything is run. It measures nothing itself.
"""

from __future__ import annotations

import math
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from trimtab import __version__
from trimtab.bench.cells import INFERENCE, Cell, Ways, measure, run_cell
from trimtab.bench.methods import METHODS, method
from trimtab.bench.nursery import nursery
from trimtab.bench.plots import Bars, Plot
from trimtab.bench.results import check_folder, make_folder, notes, reason_of, show, table, write_results
from trimtab.bench.sources import SCALES, choose_model, hub_reachable, in_model_cache
from trimtab.config.schema import ModelSettings
from trimtab.errors import RequestError
from trimtab.hardware import Hardware, probe
from trimtab.models import load_model_config, model_source
from trimtab.models.builtin import NAME as BUILT_IN
from trimtab.models.presets import PRESETS
from trimtab.monitor.progress import Quiet
from trimtab.placement import PlacementRequest, resolve

Plots = list[Plot]
Bar = tuple[str, float]
TUNED = tuple(name for name, m in METHODS.items() if m.family != "none")
RANDOM_NOTE = "random weights in its shapes; neither memory nor the time of a step depends on their values"


@dataclass(frozen=True, kw_only=True)
class StandRequest(Ways):
    """What is to be measured, as it was asked for."""

    methods: tuple[str, ...] = ("all",)
    model: tuple[str, ...] = ()
    scale: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    batch_sizes: tuple[int, ...] = (16,)
    lengths: tuple[int, ...] = (64,)
    isolated: bool = True
    """Each cell in a process of its own."""


@dataclass(frozen=True)
class Subject:
    """A model to be measured, with its own weights or with random ones in its shapes."""

    name: str
    random: bool
    shown: str
    note: str = ""


@dataclass
class Stand:
    """The folder of one benchmark and what was measured so far."""

    path: Path
    header: dict[str, Any]
    cells: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    """What a benchmark keeps beside its cells."""
    render: Callable[[Stand], tuple[str, Plots]] = lambda stand: ("", [])
    """Markdown, and what a page draws, from all that is there."""

    @property
    def failures(self) -> list[dict[str, Any]]:
        return [cell for cell in self.cells if not finished(cell)]

    def as_dict(self) -> dict[str, Any]:
        return {"run": self.header, "cells": self.cells, **self.more}

    def page(
        self,
        title: str,
        columns: Sequence[str],
        figures: Callable[[dict[str, Any]], list[str]],
        below: Sequence[str],
    ) -> str:
        """Markdown: what was measured where, every cell as a row with its figures or that it failed, and why."""
        h = self.header
        quoted = [f"> {note}" for note in notes(h)]
        about = (
            f"{h['date']}, {h['machine']}, device {h['device']}, torch {h['torch']}, Trimtab {h['trimtab']}."
        )
        lines = [f"# {title}", "", *quoted, *([""] if quoted else []), about, "", f"`{h['command']}`", ""]
        lines += table(
            ["model", "batch", "method", *columns],
            [
                [
                    cell["subject"],
                    f"{cell['batch']} × {cell['length']}",
                    cell["method"],
                    *(figures(cell) if finished(cell) else ["failed", *["–"] * (len(columns) - 1)]),
                ]
                for cell in self.cells
            ],
        )
        lines += ["", *below, ""]
        if self.failures:
            lines += ["## Failed", "", *(f"- {where(cell)}: {cell['reason']}" for cell in self.failures), ""]
        return "\n".join(lines)

    def bars(self, title: str, unit: str, bar: Callable[[dict[str, Any]], Bar], without: str = "") -> Plots:
        """One plot for each model and batch; `bar` gives the name and the value of a finished cell."""
        made: Plots = []
        wanted = list(dict.fromkeys((c["subject"], c["batch"], c["length"]) for c in self.cells))
        for subject, batch, length in wanted:
            drawn = [
                bar(cell) if finished(cell) else (cell["method"], math.nan)
                for cell in self.cells
                if (cell["subject"], cell["batch"], cell["length"]) == (subject, batch, length)
                and cell["method"] != without
            ]
            named = f"{title}, {batch} rows × {length} tokens"
            made.append(Bars(named, unit, dict(drawn), f"{subject}, {self.header['device']}"))
        return made

    def save(self) -> list[str]:
        """Write JSON and Markdown anew; their names."""
        return write_results(self.path, self.as_dict(), self.render(self)[0])


def open_stand(benchmark: str, request: StandRequest, out: Path, say: Callable[[str], None]) -> Stand:
    """Check the request against the machine, and start a folder for its results."""
    check_folder(out, "things in it", "results go into a folder of their own")
    hardware = probe()
    placed = resolve(
        PlacementRequest(device=request.device, precision=request.precision, processes=1), hardware
    )
    found = subjects(request)
    for subject in found:
        if subject.note:
            say(subject.note)
    header = {
        "benchmark": benchmark,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(["trimtab", *sys.argv[1:]]),
        "trimtab": __version__,
        "torch": hardware.torch_version,
        "machine": machine_of(hardware, placed.device),
        "device": placed.device,
        "device_reason": placed.reasons["device"],
        "whole": False,
        "notes": [s.note for s in found if s.note],
        "subjects": [asdict(s) for s in found],
        "methods": chosen_methods(request.methods),
    }
    make_folder(out)
    return Stand(out, header)


def run_stand(stand: Stand, request: StandRequest, progress: Quiet) -> bool:
    """All cells, one after the other; False when it was interrupted."""
    ways = {field.name: getattr(request, field.name) for field in fields(Ways)}
    asked = [
        (
            subject["shown"],
            Cell(
                model=subject["name"],
                random=subject["random"],
                method=name,
                batch=batch,
                length=length,
                **ways,
            ),
        )
        for subject in stand.header["subjects"]
        for batch in request.batch_sizes
        for length in request.lengths
        for name in stand.header["methods"]
    ]
    try:
        with nursery() as born_in:
            for number, (shown, cell) in enumerate(asked, 1):
                kept: dict[str, Any] = {"subject": shown, **asdict(cell)}
                progress.note(f"{where(kept)} (cell {number} of {len(asked)})")
                started = time.perf_counter()
                try:
                    found = run_cell(cell, born_in) if request.isolated else measure(cell)
                except Exception as error:
                    # The one place where any error is caught: it becomes this cell's result, and the exit code 1.
                    kept |= {"status": "failed", "reason": reason_of(error)}
                    progress.say(f"{where(kept)}: FAILED: {kept['reason']}")
                else:
                    kept |= {"status": "finished", **found}
                kept["seconds"] = round(time.perf_counter() - started, 3)
                stand.cells.append(kept)
                stand.save()
    except KeyboardInterrupt:
        stand.save()
        return False
    return True


def finished(cell: Mapping[str, Any]) -> bool:
    return bool(cell["status"] == "finished")


def where(cell: Mapping[str, Any]) -> str:
    return f"{cell['subject']}, {cell['batch']} × {cell['length']}, {cell['method']}"


def finish(stand: Stand, whole: bool, say: Callable[[str], None], *, as_json: bool) -> bool:
    """Print the results and say where they are; whether all is there."""
    stand.header["whole"] = whole
    files = stand.save()
    show(stand.as_dict(), stand.render(stand)[0], as_json=as_json)
    say(f"kept in {stand.path}: {', '.join(files)}; drawn by: trimtab report {stand.path}")
    if not whole:
        say("interrupted; what was measured is kept")
    failed = sum(run["status"] == "failed" for run in stand.more.get("to_target", []))
    failed += len(stand.failures)
    if failed:
        say(f"{failed} failed; the reasons are above")
    return whole and not failed


def chosen_methods(names: Sequence[str]) -> list[str]:
    """Inference is always there, and first: everything is held against it."""
    if tuple(names) == ("all",):
        return [INFERENCE, *TUNED]
    wanted = [n for n in names if n.strip().lower() not in (INFERENCE, "zero-shot", "zeroshot")]
    return [INFERENCE, *dict.fromkeys(method(name).name for name in wanted)]


def subjects(request: StandRequest) -> list[Subject]:
    """The models asked for; without a request what `bench glue` would take."""
    if request.shapes and (request.model or request.scale):
        raise RequestError.of(
            "--shapes with --model or --scale",
            "--shapes takes random weights, the others a model's own",
            "give one of them",
        )
    if request.shapes:
        return [_shape_of(name) for name in request.shapes]
    if request.model:
        found = [Subject(c.name, False, c.shown) for c in (choose_model(m, None) for m in request.model)]
    elif request.scale:
        found = [_of_scale(scale) for scale in request.scale]
    else:
        choice = choose_model(None, None)
        found = [Subject(choice.name, False, choice.shown, choice.note)]
    for subject in found:
        if not subject.random:
            load_model_config(ModelSettings(name=subject.name))  # an unknown name is told now
        if subject.name == BUILT_IN:
            model_source(ModelSettings(name=BUILT_IN))  # converted once, with a word on the terminal
    return found


def _shape_of(name: str) -> Subject:
    if Path(name).expanduser().is_dir():
        return Subject(name, True, f"{name} (random weights)")
    for known in PRESETS:
        if name.lower() in (known, known.rpartition("/")[2]):
            return Subject(known, True, f"{name} (random weights)")
    raise RequestError.of(
        f"--shapes {name}",
        "its shapes are not known here, and no such folder with a config.json is there",
        "name a folder, or one of " + ", ".join(known.rpartition("/")[2] for known in PRESETS),
    )


def _of_scale(scale: str) -> Subject:
    if scale not in SCALES:
        choose_model(None, scale)  # says which scales there are
    name = SCALES[scale]
    if in_model_cache(name) or hub_reachable():
        return Subject(name, False, name)
    note = f"{name} is not on this machine and the hub cannot be reached: {RANDOM_NOTE}"
    return Subject(name, True, f"{name} (random weights)", note)


def machine_of(hardware: Hardware, device: str) -> str:
    """What a device is, in words."""
    gpu = hardware.get(device)
    return gpu.model if gpu else f"{hardware.cpu.model or platform.machine()}, {hardware.cpu.cores} cores"
