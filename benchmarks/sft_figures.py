"""The figures of `sft_speed.py`: from the time stamps and losses of a run to its tables. Runs nothing."""

from __future__ import annotations

import statistics
from typing import Any

COLUMNS = (
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("of HF", "of_baseline", "{:.2f}×"),
    ("step ms", "step_ms", "{:,.1f}"),
    ("peak GiB", "peak_gib", "{:.1f}"),
    ("driver GiB", "device_gib", "{:.1f}"),
    ("to step 1, s", "start_seconds", "{:.0f}"),
    ("warm-up, s", "compile_seconds", "{:.1f}"),
    ("last loss", "last_loss", "{:.4f}"),
)
BASELINE = "hf"


def figures_of(run: dict[str, Any], warm_up: int) -> dict[str, Any]:
    """`run` has when it was started, when training began, and each step's time, loss and tokens."""
    times, tokens, losses = run["times"], run["tokens"], run["losses"]
    warm_up = min(warm_up, len(times) - 1)
    spans = [after - before for before, after in zip(times[warm_up - 1 :], times[warm_up:], strict=False)]
    step = statistics.median(spans)
    return {
        "tokens_per_second": sum(tokens[warm_up:]) / (times[-1] - times[warm_up - 1]),
        "step_ms": 1000 * step,
        "timed_steps": len(spans),
        "peak_gib": run["peak_allocated"] / 2**30 if run["peak_allocated"] else None,
        "reserved_gib": run["peak_reserved"] / 2**30 if run["peak_reserved"] else None,
        "start_seconds": run["begun"] - run["started"],
        "compile_seconds": max(0.0, times[warm_up - 1] - run["begun"] - warm_up * step),
        "last_loss": statistics.mean(losses[-5:]),
        "losses": losses,
        "tokens": tokens,
        "times": [round(at - run["begun"], 4) for at in times],
    }


def _beside(cells: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The baseline among a group's cells."""
    done = [cell for cell in cells if cell["status"] == "finished"]
    return next((cell for cell in done if cell["cell"] == BASELINE), None)


def curve_lines(cells: list[dict[str, Any]]) -> list[str]:
    """How far each loss curve is from the baseline's, and whether the rows of each step were as long."""
    base, lines = _beside(cells), []
    for cell in cells:
        if base is None or cell is base or cell["status"] != "finished":
            continue
        cell["of_baseline"] = cell["tokens_per_second"] / base["tokens_per_second"]
        pairs = list(zip(cell["losses"], base["losses"], strict=False))
        far = [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]
        cell["curve_difference"] = max(far)
        cell["same_rows"] = cell["tokens"] == base["tokens"]
        rows = "" if cell["same_rows"] else "; ROWS OF OTHER LENGTHS THAN THE BASELINE'S"
        lines.append(
            f"{cell['cell']}: {cell['of_baseline']:.2f}× {BASELINE}; loss over {len(pairs)} steps at most "
            f"{100 * max(far):.3f} % from {BASELINE}'s (step {far.index(max(far)) + 1}), the last "
            f"{pairs[-1][0]:.4f} against {pairs[-1][1]:.4f}{rows}"
        )
    return lines


def table(cells: list[dict[str, Any]], *, heading: bool = True) -> str:
    """For the terminal."""
    lines = (
        ["".join([f"{'':<44}", *(f"{name:>13}" for name, _, _ in COLUMNS if name != "of HF")])]
        if heading
        else []
    )
    for cell in cells:
        if cell["status"] != "finished":
            lines.append(
                f"{cell['title'][:43]:<44} {cell['status']}: {cell['reason']} ({cell['seconds']:.0f} s)"
            )
            continue
        shown = [_shown(cell, key, form) for name, key, form in COLUMNS if name != "of HF"]
        lines.append("".join([f"{cell['title'][:43]:<44}", *(f"{text:>13}" for text in shown)]))
    return "\n".join(lines)


def _shown(cell: dict[str, Any], key: str, form: str) -> str:
    value = cell.get(key)
    return "–" if value is None else form.format(value)


def markdown(header: dict[str, Any], cells: list[dict[str, Any]]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in header["packages"].items() if version)
    lines = ["# LoRA SFT beside its peers", ""]
    lines += [f"{header['date']}, {header['machine']}, torch {header['torch']}, {packages}.", ""]
    lines += [f"`{header['command']}`", ""]
    for group in dict.fromkeys(cell["group"] for cell in cells):
        mine = [cell for cell in cells if cell["group"] == group]
        told = curve_lines(mine)
        lines += [f"## {group}: {mine[0]['rows_a_step']} rows of at most {mine[0]['length']:,} tokens", ""]
        lines += [
            "| | " + " | ".join(name for name, _, _ in COLUMNS) + " |",
            "|---" * (len(COLUMNS) + 1) + "|",
        ]
        for cell in mine:
            shown = [_shown(cell, key, form) for _, key, form in COLUMNS]
            if cell["status"] != "finished":
                shown = [cell["status"], *["–"] * (len(COLUMNS) - 1)]
            lines.append(f"| {cell['title']} | " + " | ".join(shown) + " |")
        failed = [f"- {cell['title']}: {cell['reason']}" for cell in mine if cell["status"] != "finished"]
        lines += ["", *(f"- {line}" for line in told), *failed, ""]
    return "\n".join(lines)
