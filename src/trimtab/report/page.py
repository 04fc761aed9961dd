"""A rehearsal's report as one HTML page: self-contained, every text escaped, no script and nothing from the network."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.diagnose.finding import Cause, Finding, Place
    from trimtab.rehearse.run import Result

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --fault: #c62828; --warning: #b26a00; --clean: #2e7d32; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 0; }
section { border: 1px solid var(--line); border-left-width: .4rem; border-radius: .3rem; margin: 1rem 0;
  padding: .8rem 1rem; }
.fault { border-left-color: var(--fault); } .warning, .unproven { border-left-color: var(--warning); }
.clean { border-left-color: var(--clean); }
dl { display: grid; grid-template-columns: 5rem 1fr; gap: .3rem 1rem; margin: .6rem 0 0; }
dt { opacity: .65; } dd { margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; }
code, pre { font: .9em ui-monospace, monospace; } table { border-collapse: collapse; }
td, th { border-bottom: 1px solid var(--line); padding: .2rem .8rem .2rem 0; text-align: left; }
"""


def rehearsal_page(result: Result) -> str:
    """The whole page."""
    verdict = result.verdict
    faults = sum(finding.severity == "fault" for finding in result.findings)
    summary = {
        "clean": "ran without a fault",
        "fault": f"{faults} fault{'s' * (faults != 1)}",
        "unproven": "nothing is proven",
    }[verdict]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{_text(verdict)}: {_text(result.target)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Rehearsal of <code>{_text(result.target)}</code></h1>",
        f'<section class="{_text(verdict)}"><h2>{_text(verdict)}: {_text(summary)}</h2>',
        f"<p>{result.steps} optimizer steps, {result.seconds:.1f} s</p>",
        *(f"<p>{_text(note)}</p>" for note in result.notes),
        _memory(result),
        "</section>",
        *(_finding(number, finding) for number, finding in enumerate(result.findings, 1)),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _finding(number: int, finding: Finding) -> str:
    times = f", {finding.count} times" if finding.count > 1 else ""
    rows = [
        ("says", _text(finding.message)),
        ("where", _place(finding.where)),
        ("inside", _place(finding.library)),
    ]
    rows += [("module", _text(finding.module))]
    for tensor in finding.tensors:
        shape = ", ".join(map(str, tensor.shape))
        rows.append(("tensor", _text(f"{tensor.name}: {tensor.device} {tensor.dtype} [{shape}]")))
    if finding.cause is not None:
        rows.append(("cause", f"{_place(finding.cause)}\n{_text(finding.cause.why)}"))
    rows.append(("fix", _text(finding.fix)))
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows if value)
    return (
        f'<section class="{_text(finding.severity)}"><h2>{number}. {_text(finding.kind)} '
        f"({_text(finding.severity)}{times})</h2><dl>{listed}</dl></section>"
    )


def _memory(result: Result) -> str:
    used = {device: figures for device, figures in result.memory.items() if figures["peak_bytes"]}
    if not used:
        return ""
    rows = "".join(
        f"<tr><td>{_text(device)}</td><td>{figures['peak_bytes'] / 2**20:,.1f} MiB</td>"
        f"<td>{figures['capacity_bytes'] / 2**30:,.1f} GiB</td></tr>"
        for device, figures in used.items()
    )
    return f"<table><tr><th>device</th><th>peak</th><th>capacity</th></tr>{rows}</table>"


def _place(place: Place | Cause | None) -> str:
    if place is None:
        return ""
    code = f"\n<code>{_text(place.code)}</code>" if place.code else ""
    return f"{_text(place.file)}:{place.line}{code}"


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
