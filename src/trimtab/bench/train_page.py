"""The page of `trimtab bench train`: its table, what was left out and why, and a plot. It measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.bench.ladder import FIRST
from trimtab.bench.plots import Bars
from trimtab.bench.results import notes, table
from trimtab.bench.stand import Plots, Stand, finished
from trimtab.monitor.wording import count_of, size


def render(stand: Stand) -> tuple[str, Plots]:
    h, done = stand.header, [cell for cell in stand.cells if finished(cell)]
    base = done[0] if done and done[0]["row"] == FIRST else None
    quoted = [f"> {note}" for note in notes(h)]
    lines = ["# Training speed, one change a row", "", *quoted, *([""] if quoted else [])]
    lines += [
        f"{h['date']}, {h['machine']}, {h['device']} in {h['precision']} ({h['strategy']}), torch {h['torch']}, "
        f"Trimtab {h['trimtab']}.",
        "",
        f"{h['recipe']} of {h['model']}, {h['rows_a_step']} rows of at most {h['max_length']:,} tokens a step; "
        f"{h['steps']} timed steps after {h['warm_up']}.",
        "",
        f"`{h['command']}`",
        "",
    ]
    head = [
        "",
        "tokens/s",
        "× plain",
        "step",
        "peak",
        "MFU",
        "warm-up",
        f"loss at {h['steps'] + h['warm_up']}",
        "loss off by",
    ]
    lines += table(head, [_line(cell, base) for cell in stand.cells])
    lines += ["", _about(h), ""]
    told = [f"- {row['title']}: {row['reason']}" for row in stand.more.get("left_out", [])]
    lines += ["Left out here:", "", *told, ""] if told else []
    failed = [f"- {cell['title']}: {cell['reason']}" for cell in stand.failures]
    lines += ["## Failed", "", *failed, ""] if failed else []
    bars = {cell["title"]: speed for cell in done if (speed := _speed(cell)) is not None}
    unit = "tokens/s" if all(cell["tokens_per_second"] for cell in done) else "steps/s"
    note = f"{h['model']}, {h['machine']}"
    return "\n".join(lines), [Bars("Training speed", unit, bars, note)] if bars else []


def _about(header: Mapping[str, Any]) -> str:
    where = (
        "what PyTorch's allocator gave out at most"
        if header["device"].startswith("cuda")
        else "of the whole process, loading included"
    )
    first = count_of(header["warm_up"], "first step")
    return (
        f"Tokens are counted without padding. Peak: {where}. Warm-up: what the {first} took "
        "beyond so many usual ones (compiling, first launches). Loss off by: the largest difference from the "
        "plain row's loss at the same step, which PEFT's and the model's own code compute."
    )


def _speed(cell: Mapping[str, Any]) -> float | None:
    found: float | None = cell["tokens_per_second"] or cell["steps_per_second"]
    return found


def _line(cell: Mapping[str, Any], base: Mapping[str, Any] | None) -> list[str]:
    if not finished(cell):
        return [cell["title"], "failed", *["–"] * 7]
    speed, first = _speed(cell), _speed(base) if base is not None else None

    def shown(key: str, form: str, times: float = 1.0) -> str:
        return "–" if cell[key] is None else form.format(times * cell[key])

    return [
        cell["title"],
        shown("tokens_per_second", "{:,.0f}"),
        f"{speed / first:.2f}" if speed and first else "–",
        shown("step_seconds", "{:,.1f} ms", 1000),
        "–" if cell["peak_bytes"] is None else size(cell["peak_bytes"]),
        shown("mfu", "{:.0f} %", 100),
        shown("warm_up_seconds", "{:.1f} s"),
        shown("last_loss", "{:.4f}"),
        shown("loss_difference", "{:.3f} %", 100),
    ]
