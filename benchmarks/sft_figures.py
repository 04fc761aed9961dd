"""The tables of `sft_speed.py`: every cell's figures, and its loss curve beside the baseline's. Runs nothing."""

from __future__ import annotations

from typing import Any

from trimtab.bench.steady import furthest

COLUMNS = (
    ("tokens/s", "tokens_per_second", "{:,.0f}", 1.0),
    ("of HF", "of_baseline", "{:.2f}×", 1.0),
    ("step ms", "step_seconds", "{:,.1f}", 1000.0),
    ("peak GiB", "peak_bytes", "{:.1f}", 2.0**-30),
    ("driver GiB", "device_gib", "{:.1f}", 1.0),
    ("MFU %", "mfu", "{:.0f}", 100.0),
    ("to step 1, s", "start_seconds", "{:.0f}", 1.0),
    ("warm-up, s", "warm_up_seconds", "{:.1f}", 1.0),
    ("last loss", "last_loss", "{:.4f}", 1.0),
)
ON_TERMINAL = tuple(column for column in COLUMNS if column[0] != "of HF")
BASELINE = "hf"


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
        steps = min(len(cell["losses"]), len(base["losses"]))
        cell["curve_difference"] = furthest(cell["losses"], base["losses"])
        cell["same_rows"] = cell["tokens"] == base["tokens"]
        rows = "" if cell["same_rows"] else "; ROWS OF OTHER LENGTHS THAN THE BASELINE'S"
        far = "–" if cell["curve_difference"] is None else f"{100 * cell['curve_difference']:.3f} %"
        lines.append(
            f"{cell['cell']}: {cell['of_baseline']:.2f}× {BASELINE}; loss over {steps} steps at most {far} from "
            f"{BASELINE}'s, at the end {cell['losses'][steps - 1]:.4f} against {base['losses'][steps - 1]:.4f}{rows}"
        )
    return lines


def table(cells: list[dict[str, Any]], *, heading: bool = True) -> str:
    """For the terminal."""
    lines = ["".join([f"{'':<36}", *(f"{name:>13}" for name, *_ in ON_TERMINAL)])] if heading else []
    for cell in cells:
        told = f"{cell['title'][:35]:<36}"
        if cell["status"] == "finished":
            lines.append(told + "".join(f"{_shown(cell, *column):>13}" for column in ON_TERMINAL))
        else:
            lines.append(f"{told} {cell['status']}: {cell['reason']} ({cell['seconds']:.0f} s)")
    return "\n".join(lines)


def _shown(cell: dict[str, Any], name: str, key: str, form: str, times: float) -> str:
    value = cell.get(key)
    return "–" if value is None else form.format(times * value)


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
            "| | " + " | ".join(name for name, *_ in COLUMNS) + " |",
            "|---" * (len(COLUMNS) + 1) + "|",
        ]
        for cell in mine:
            shown = [_shown(cell, *column) for column in COLUMNS]
            if cell["status"] != "finished":
                shown = [cell["status"], *["–"] * (len(COLUMNS) - 1)]
            lines.append(f"| {cell['title']} | " + " | ".join(shown) + " |")
        failed = [f"- {cell['title']}: {cell['reason']}" for cell in mine if cell["status"] != "finished"]
        lines += ["", *(f"- {line}" for line in told), *_other_packages(header, mine), *failed, ""]
    return "\n".join(lines)


def _other_packages(header: dict[str, Any], cells: list[dict[str, Any]]) -> list[str]:
    """What a cell ran with that the others did not: some peers want older packages, from a folder of their own."""
    lines = []
    for cell in cells:
        used = cell.get("packages", {})
        if other := [f"{name} {used[name]}" for name in used if used[name] != header["packages"].get(name)]:
            lines.append(f"- {cell['title']}: with {', '.join(other)}")
    return lines
