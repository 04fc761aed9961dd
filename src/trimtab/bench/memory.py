"""`trimtab bench memory`: the peak memory of every method, by model, batch and length, against inference.

Inference is one forward of the same batch with the logits of the answer positions alone, as the objective computes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.bench import svg
from trimtab.bench.cells import INFERENCE
from trimtab.bench.results import notes, table
from trimtab.bench.stand import Stand, StandRequest, open_stand, run_stand
from trimtab.monitor.progress import Quiet
from trimtab.monitor.wording import size


def run_memory(request: StandRequest, out: Path, progress: Quiet) -> tuple[Stand, bool]:
    """Measure all that was asked for; the results, and whether it ran to its end."""
    stand = open_stand("memory", request, out, progress.say)
    stand.render = render
    whole = run_stand(stand, request, progress)
    progress.end()
    return stand, whole


def ratio(stand: Stand, cell: dict[str, Any]) -> float | None:
    """A cell's peak by that of inference with the same model and batch; None where that was not measured."""
    base = stand.find(cell["subject"], cell["batch"], cell["length"], INFERENCE)
    return cell["peak_bytes"] / base["peak_bytes"] if base and base["peak_bytes"] > 0 else None


def render(stand: Stand) -> tuple[str, dict[str, str]]:
    return markdown(stand), plots(stand)


def settings_of(stand: Stand) -> Iterator[tuple[str, int, int]]:
    """Models, batches and lengths in the order in which they came."""
    yield from dict.fromkeys((c["subject"], c["batch"], c["length"]) for c in stand.cells)


def markdown(stand: Stand) -> str:
    lines = ["# Peak memory by method", "", *heading(stand)]
    done = [c for c in stand.cells if c["status"] == "finished"]
    rows = []
    for cell in stand.cells:
        start = [cell["subject"], f"{cell['batch']} × {cell['length']}", cell["method"]]
        if cell["status"] != "finished":
            rows.append([*start, "failed", *["–"] * 5])
            continue
        times = ratio(stand, cell)
        rows.append(
            [
                *start,
                size(cell["peak_bytes"]),
                f"{times:.3f}" if times is not None else "–",
                size(cell["weights_bytes"]),
                size(cell["anchor_bytes"]) if cell["anchor_bytes"] else "–",
                cell["weights"],
                str(cell["copies_in_a_forward"]),
            ]
        )
    lines += table(
        ["model", "batch", "method", "peak", "of inference", "weights", "anchors", "format", "copies"], rows
    )
    lines += [
        "",
        *(f"Peak: {how}." for how in dict.fromkeys(c["measured"] for c in done)),
        "Anchors are the start weights that DiZO keeps; format is that of the weights; copies is how many perturbed "
        "copies of the batch share a forward.",
        "",
        *failed(stand),
    ]
    return "\n".join(lines)


def heading(stand: Stand) -> list[str]:
    """What every table says of itself."""
    h = stand.header
    lines = [f"> {note}" for note in notes(h)]
    about = f"{h['date']}, {h['machine']}, device {h['device']}, torch {h['torch']}, Trimtab {h['trimtab']}."
    return [*lines, *([""] if lines else []), about, "", f"`{h['command']}`", ""]


def failed(stand: Stand) -> list[str]:
    if not stand.failures:
        return []
    return [
        "## Failed",
        "",
        *(
            f"- {c['subject']}, {c['batch']} × {c['length']}, {c['method']}: {c['reason']}"
            for c in stand.failures
        ),
        "",
    ]


def plots(stand: Stand) -> dict[str, str]:
    """One plot of bars for each model and batch."""
    made: dict[str, str] = {}
    wanted = list(settings_of(stand))
    for number, (subject, batch, length) in enumerate(wanted, 1):
        bars: dict[str, float] = {}
        for cell in stand.cells:
            if (cell["subject"], cell["batch"], cell["length"]) != (subject, batch, length):
                continue
            there = cell["status"] == "finished"
            times = ratio(stand, cell) if there else None
            name = f"{cell['method']} ({times:.2f}×)" if times is not None else cell["method"]
            bars[name] = cell["peak_bytes"] / 2**30 if there else float("nan")
        name = "memory.svg" if len(wanted) == 1 else f"memory-{number}.svg"
        made[name] = svg.bars_plot(
            f"Peak memory, {batch} rows × {length} tokens",
            bars,
            unit="GiB",
            note=f"{subject}, {stand.header['device']}",
        )
    return made
