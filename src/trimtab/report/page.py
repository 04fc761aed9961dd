"""A rehearsal's report as one HTML page: self-contained, every text escaped, no script and nothing from the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.rehearse.report import TRIED
from trimtab.rehearse.session import WORDS
from trimtab.rehearse.written import sentence
from trimtab.report.frame import page, raw_facts, section, table, text

if TYPE_CHECKING:
    from trimtab.diagnose.finding import Cause, Finding, Place
    from trimtab.rehearse.verdict import Result


def rehearsal_page(result: Result) -> str:
    """The whole page."""
    verdict = result.verdict
    where = " in shapes" if result.shapes_only else ""
    faults = sum(finding.severity == "fault" for finding in result.findings)
    summary = {
        "clean": "ran without a fault",
        "fault": f"{faults} fault{'s' * (faults != 1)}",
        "unproven": "nothing is proven",
    }[verdict]
    told = [f"{result.steps} optimizer steps, {result.seconds:.1f} s", *result.notes]
    told += [f"Files: {said}"] if (said := sentence(result.files, most=20)) else []
    return page(
        f"{verdict}: {result.target}",
        [
            f"<h1>Rehearsal of <code>{text(result.target)}</code></h1>",
            section(
                f"{verdict}{where}: {summary}",
                [*(f"<p>{text(line)}</p>" for line in told), _memory(result)],
                kind=verdict,
            ),
            *(_finding(number, finding) for number, finding in enumerate(result.findings, 1)),
            *(
                _finding(number, finding, "with the fixes above made: ")
                for number, finding in enumerate(result.beyond, len(result.findings) + 1)
            ),
            *([_not_proven(result)] if result.asked else []),
        ],
    )


def _finding(number: int, finding: Finding, when: str = "") -> str:
    times = f", {finding.count} times" if finding.count > 1 else ""
    rows = [("says", text(finding.message)), ("where", _place(finding.where))]
    rows += [("inside", _place(finding.library)), ("module", text(finding.module))]
    for tensor in finding.tensors:
        shape = ", ".join(map(str, tensor.shape))
        rows.append(("tensor", text(f"{tensor.name}: {tensor.device} {tensor.dtype} [{shape}]")))
    if finding.cause is not None:
        rows.append(("cause", f"{_place(finding.cause)}\n{text(finding.cause.why)}"))
    rows.append(("fix" if finding.tried != "remains" else "tried, does not help", text(finding.fix)))
    if finding.tried and finding.tried != "remains":
        rows.append(("tried", text(TRIED[finding.tried])))
    rows += [
        ("also", f"{text(other.kind)} {_place(other.where or other.cause)}") for other in finding.follows
    ]
    title = f"{number}. {when}{finding.kind} ({finding.severity}{times})"
    return section(title, [raw_facts(rows)], kind=finding.severity)


def _not_proven(result: Result) -> str:
    """Where values were asked for, of which shapes have none."""
    rows = []
    for asked in result.asked:
        places = [_place(place) for place in (asked.where, asked.inside) if place is not None]
        rows.append((WORDS[asked.how], "\n".join(places) or text(asked.op)))
    return section("Not proven: these values were not computed", [raw_facts(rows)], kind="unproven")


def _memory(result: Result) -> str:
    return table(
        ["device", "peak", "capacity"],
        (
            (
                device,
                f"{figures['peak_bytes'] / 2**20:,.1f} MiB",
                f"{figures['capacity_bytes'] / 2**30:,.1f} GiB",
            )
            for device, figures in result.memory.items()
            if figures["peak_bytes"]
        ),
    )


def _place(place: Place | Cause | None) -> str:
    if place is None:
        return ""
    code = f"\n<code>{text(place.code)}</code>" if place.code else ""
    return f"{text(place.file)}:{text(place.line)}{code}"
