"""`trimtab bench memory`: the peak memory of every method, by model, batch and length, against inference.

Inference is one forward of the same batch with the logits of the answer positions alone, as the objective computes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.bench.cells import INFERENCE
from trimtab.bench.stand import Bar, Plots, Stand, StandRequest, finished, open_stand, run_stand
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
    same = {key: cell[key] for key in ("subject", "batch", "length")} | {"method": INFERENCE}
    base = next((c for c in stand.cells if finished(c) and same.items() <= c.items()), None)
    return cell["peak_bytes"] / base["peak_bytes"] if base and base["peak_bytes"] > 0 else None


def render(stand: Stand) -> tuple[str, Plots]:
    def figures(cell: dict[str, Any]) -> list[str]:
        times = ratio(stand, cell)
        return [
            size(cell["peak_bytes"]),
            f"{times:.3f}" if times is not None else "–",
            size(cell["weights_bytes"]),
            size(cell["anchor_bytes"]) if cell["anchor_bytes"] else "–",
            cell["weights"],
            str(cell["copies_in_a_forward"]),
        ]

    def bar(cell: dict[str, Any]) -> Bar:
        times = ratio(stand, cell)
        name = f"{cell['method']} ({times:.2f}×)" if times is not None else cell["method"]
        return name, cell["peak_bytes"] / 2**30

    below = [
        *(f"Peak: {how}." for how in dict.fromkeys(c["measured"] for c in stand.cells if finished(c))),
        "Anchors are the start weights that DiZO keeps; format is that of the weights; copies is how many perturbed "
        "copies of the batch share a forward.",
    ]
    columns = ["peak", "of inference", "weights", "anchors", "format", "copies"]
    text = stand.page("Peak memory by method", columns, figures, below)
    return text, stand.bars("Peak memory", "GiB", bar)
