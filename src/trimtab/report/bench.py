"""The page of a benchmark: its tables and plots, made anew from results.json. It measures and judges nothing.

The tables are those of the benchmark's own results.md, turned from Markdown into HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trimtab.bench.plots import Bars, Plot
from trimtab.monitor.wording import count_of
from trimtab.report.charts import Chart, Line, bars, figure
from trimtab.report.frame import facts, page, raw_table, section, text

TITLES = {
    "glue+": "GLUE+ benchmark",
    "memory": "Memory benchmark",
    "speed": "Speed benchmark",
    "train": "Training benchmark",
}
_CODE = re.compile(r"`([^`]+)`")
_TOLD = {
    "date": "date",
    "command": "command",
    "model_shown": "model",
    "origin": "config",
    "machine": "machine",
    "device": "device",
    "device_reason": "why there",
    "torch": "torch",
    "trimtab": "trimtab",
}


def bench_page(path: Path, content: Mapping[str, Any]) -> str:
    """The whole page; `content` is what results.json holds."""
    header, cells = content["run"], content["cells"]
    markdown, plots = _rendered(path, content)
    title = TITLES[header["benchmark"]]
    failed = failures(content)
    done = sum(cell["status"] == "finished" for cell in cells)
    state = f"{done} of {count_of(len(cells), 'cell')} measured, {len(failed)} failed"
    whole = header.get("whole") is not False
    if not whole:
        state += "; interrupted, or still going"
    told = {name: header.get(key) for key, name in _TOLD.items()}
    first, rest = _parted(list(html_of(markdown)))
    reasons = [f"<p><strong>{text(name)}</strong>: {text(reason)}</p>" for name, reason in failed.items()]
    kind = "fault" if failed else "clean" if cells and whole else "warning"
    return page(
        f"{title}: {path.resolve().name}",
        [
            f"<h1>{title} <code>{text(path.resolve().name)}</code></h1>",
            section(state if cells else "no cell was measured yet", [*reasons, facts(told)], kind=kind),
            section("Results", first),
            section("Plots", [f'<div class="curves">{"".join(map(_drawn, plots))}</div>'] if plots else []),
            section("Details", rest),
        ],
    )


def _parted(blocks: list[str]) -> tuple[list[str], list[str]]:
    """What stands up to the second heading, which has the first table, and all that follows."""
    headings = [place for place, block in enumerate(blocks) if block.startswith("<h3>")]
    cut = headings[1] if len(headings) > 1 else len(blocks)
    return blocks[:cut], blocks[cut:]


def failures(content: Mapping[str, Any]) -> dict[str, str]:
    """Each cell that failed, with its reason; also runs towards a target."""
    found = {}
    for cell in [*content["cells"], *content.get("to_target", [])]:
        if cell["status"] == "failed":
            batch = f"{cell['batch']} × {cell['length']}" if "batch" in cell else None
            seed = f"seed {cell['seed']}" if "seed" in cell else None
            where = (
                cell.get("subject"),
                cell.get("task"),
                batch,
                cell.get("method", cell.get("title")),
                seed,
            )
            found[", ".join(part for part in where if part)] = str(cell.get("reason", "no reason was kept"))
    return found


def _drawn(plot: Plot) -> str:
    if isinstance(plot, Bars):
        return bars(plot.title, plot.bars, plot.unit, plot.note)
    lines = [Line(name, points) for name, points in plot.series.items()]
    return figure(Chart(plot.title, plot.x_label, plot.y_label, lines, levels=plot.levels))


def _rendered(path: Path, content: Mapping[str, Any]) -> tuple[str, list[Plot]]:
    header, cells = dict(content["run"]), list(content["cells"])
    if header["benchmark"] == "glue+":
        from trimtab.bench.results import Results

        results = Results(path, header, {(c["task"], c["method"], c["seed"]): c for c in cells})
        return results.markdown(), results.plots()
    # These rooms measure, and so load torch.
    from trimtab.bench import memory, speed, train_page
    from trimtab.bench.stand import Stand

    more = {k: v for k, v in content.items() if k not in ("run", "cells")}
    stand = Stand(path, header, cells, more)
    render = {"memory": memory.render, "speed": speed.render, "train": train_page.render}
    return render[header["benchmark"]](stand)


def html_of(markdown: str) -> Iterator[str]:
    """The Markdown that our benchmarks write as HTML: headings, quotes, tables, lists and paragraphs."""
    lines = iter(markdown.splitlines()[1:])  # the first one is the title, which the page has
    block: list[str] = []
    for line in (*lines, ""):
        if block and (not line or line.startswith("#") or _sort(line) != _sort(block[0])):
            yield _block(block)
            block = []
        if line.startswith("#"):
            yield f"<h3>{_words(line.lstrip('# '))}</h3>"
        elif line:
            block.append(line)


def _sort(line: str) -> str:
    return line[0] if line[:2] in ("| ", "|-", "- ", "> ") else ""


def _block(lines: list[str]) -> str:
    match _sort(lines[0]):
        case "|":
            head, _, *rows = map(_cells, lines)
            return raw_table(head, ([_words(cell) for cell in row] for row in rows))
        case "-":
            return "<ul>" + "".join(f"<li>{_words(line[2:])}</li>" for line in lines) + "</ul>"
        case ">":
            return "".join(f"<p><strong>{_words(line[2:])}</strong></p>" for line in lines)
    return "".join(f"<p>{_words(line)}</p>" for line in lines)


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def _words(line: str) -> str:
    return _CODE.sub(r"<code>\1</code>", text(line))


def known(content: Any) -> bool:
    """Whether this is what a results.json of ours holds."""
    return (
        isinstance(content, Mapping)
        and isinstance(content.get("run"), Mapping)
        and content["run"].get("benchmark") in TITLES
        and isinstance(content.get("cells"), Iterable)
    )
